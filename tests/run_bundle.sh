#!/usr/bin/env bash
# Runs what tests/bundle.sh gathered, on a machine with a GPU. Results and logs go to $OUT, or the current folder.
#
#   run.sh tests [FILTER...]        every GPU test
#   run.sh ranks                    the tests that need two GPUs or more, with `libnccl.so` in LD_LIBRARY_PATH. Each is a process of its own,
#                                   that ends after TEST_SECONDS (120), because GPUs may wait for each other
#   run.sh sanitize [TOOL...]       the same with small cases under compute-sanitizer: racecheck initcheck memcheck synccheck. A process
#                                   on every core, up to 16, within SANITIZE_SECONDS (3600). It prints what has not passed.
#   run.sh bench [ARGUMENTS...] [-- DIR [ARGUMENTS...]]
#                                   our workloads (--help lists the arguments); then those of other libraries, by the folder DIR,
#                                   whose device.sh --out FILE writes the same JSON schema; and the table of both
#   run.sh record DIR [ARGUMENTS...] [-- FILE...]
#                                   the files of a record: linear.json, moe.json, layer.json, and others.json by the folder DIR, with
#                                   earlier results of other libraries (FILE) for the workloads that DIR does not reach
#   run.sh pool                     the adapter pool: loads, the cost of steps on the host, a decode step beside loads; pool.json
#   run.sh pool --stalls            a decode step beside each part of a load;
#                                   with --waits, of a host that updates the routing for each step and waits for it
#   run.sh criterion [ARGUMENTS...] the other benchmarks
#   run.sh example [ARGUMENTS...]   the reference forward; without arguments, all small models, verified
#   run.sh serve [FILTER...]        the tests of aril-engine that need a GPU, and those of aril-serve with its engine on the GPU
#   run.sh serve-ranks              those of both that need two GPUs
#   run.sh figures [ARGUMENTS...]   steps of Qwen3-8B, 32B and 30B-A3B, on random weights; adds to serve.json
#   run.sh load ARGUMENTS...        the server under a trace of requests; adds to serve.json
#   run.sh candle [FILTER...]       the tests of aril-candle, with CUDA's libraries of the toolkit in CUDA_HOME (/usr/local/cuda)
set -euo pipefail

usage() {
    sed -n 's/^#   //p' "$0" >&2
    exit 2
}

adapters=() expert_adapters=()
for adapter in "$(dirname "$0")"/tests/fixtures/adapters/*/; do
    adapters+=(--adapter "$(basename "$adapter")=tests/fixtures/adapters/$(basename "$adapter")")
done
for adapter in "$(dirname "$0")"/tests/fixtures/adapters-moe/*/; do
    expert_adapters+=(--adapter "$(basename "$adapter")=tests/fixtures/adapters-moe/$(basename "$adapter")")
done

command=${1:-}
[ -n "$command" ] || usage
shift
mkdir -p "${OUT:=.}"
OUT=$(cd "$OUT" && pwd)
start=$PWD
cd "$(dirname "$0")"
export OUT RUST_BACKTRACE=1 ARIL_QWEN3_BIN=$PWD/qwen3 ARIL_FIXTURES=$PWD/tests/fixtures

# Runs other libraries by the folder $1, in the folder that holds it.
others() {
    (cd "$(dirname "$1")" && bash "$(basename "$1")/device.sh" --out "$OUT/peers.json" "${@:2}") 2>&1 | tee "$OUT/peers.log"
}

# Runs each test of the program $1 whose name has $2 as a process of its own.
each() {
    local tests name begin status failed=0
    tests=$("$1" --list "$2" | sed -n 's/: test$//p')
    # A filter without a test has failed.
    [ -n "$tests" ] || failed=1
    for name in $tests; do
        begin=$SECONDS status=0
        timeout -k 5 "${TEST_SECONDS:-120}" "$1" --include-ignored --nocapture --exact "$name" || status=$?
        [ "$status" = 0 ] || failed=1
        echo "$name: status $status after $((SECONDS - begin)) s"
    done
    return "$failed"
}

case $command in
tests)
    {
        status=0
        ./gpu --include-ignored --test-threads=1 "$@" || status=1
        ./forward --ignored --test-threads=1 --skip ranks:: "$@" || status=1
        exit "$status"
    } 2>&1 | tee "$OUT/tests.log"
    ;;
ranks)
    each ./forward gpu::ranks:: 2>&1 | tee "$OUT/ranks.log"
    ;;
sanitize)
    [ $# -gt 0 ] || set -- racecheck initcheck memcheck synccheck
    export ARIL_SMALL_CASES=1 ARIL_TEST_SECONDS=7200 RAYON_NUM_THREADS=2
    sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
    end=$((SECONDS + ${SANITIZE_SECONDS:-3600}))
    at_once=$(($(nproc) < 16 ? $(nproc) : 16))
    # The tests of a process, by the beginnings of their names. The last has those of no other.
    shards=(consumers::c consumers::a experts::a_ experts:: fused_linear::a_ fused_linear:: operations::t operations:: fully_sharded::
        pool:: wrong:: "")
    rm -f "$OUT"/sanitize-*

    # Runs a command under a tool, as its job $2. start_job has the names of its tests on stdin; a program without tests is one.
    check() {
        local tool=$1 log=$OUT/sanitize-$1-$2 begin=$SECONDS status=124 options=() line
        shift 2
        set +e
        : > "$log.log"
        # The most barriers of a thread block.
        [ "$tool" != synccheck ] || options=(--num-cuda-barriers "${SYNCCHECK_BARRIERS:-1024}")
        if [ "$SECONDS" -lt "$end" ]; then
            timeout -k 5 $((end - SECONDS)) "$sanitizer" --tool "$tool" "${options[@]}" --error-exitcode 86 \
                --log-file "$log.tool" "$@" 2>&1 |
                while IFS= read -r line || [ -n "$line" ]; do echo "$((SECONDS - begin)) s: $line"; done > "$log.log"
            status=${PIPESTATUS[0]}
        fi
        if [ "$1" = ./gpu ] || [ "$1" = ./forward ]; then
            sed -nE 's/^[0-9]+ s: test ([^ ]+) \.\.\. (.*[^a-z])?ok$/\1/p' "$log.log" > "$log.passed"
        elif [ "$status" = 0 ]; then
            cp "$log.wanted" "$log.passed"
        fi
        echo "$status $((SECONDS - begin))" > "$log.status"
    }
    start_job() {
        cat > "$OUT/sanitize-$1-$2.wanted"
        while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do wait -n || true; done
        check "$@" &
    }
    for tool in "$@"; do
        # The library's tests, without those whose point is their size or what runs at once, which the tools change, and the one that
        # has more launches on their way than they have memory for.
        skipped=(--skip chain:: --skip contention:: --skip loading:: --skip misuse:: --skip offsets_are_64_bits_wide
            --skip experts::limits:: --skip experts::steps:: --skip a_launch_on_experts_allocates_nothing)
        # initcheck has every copy wait, so that none is ever on its way.
        [ "$tool" != initcheck ] || skipped+=(--skip a_host_that_runs_ahead_is_told --skip a_busy_routing_may_be_waited_for
            --skip copies_are_in_the_order_of_the_queue --skip a_slot_is_overwritten_after_the_last_step_that_reads_it)
        left=$(./gpu --list "${skipped[@]}" | sed -n 's/: test$//p')
        for shard in "${shards[@]}"; do
            tests=$(grep "^$shard" <<< "$left" || true)
            left=$(grep -v "^$shard" <<< "$left" || true)
            name=${shard//::/-}
            name=${name%-}
            mapfile -t names <<< "$tests"
            start_job "$tool" "${name:-others}" ./gpu --include-ignored --test-threads=1 --exact "${names[@]}" <<< "$tests"
        done
        # The kernels of the base model.
        tests=$(./forward --list gpu::kernels:: | sed -n 's/: test$//p')
        mapfile -t names <<< "$tests"
        start_job "$tool" kernels ./forward --ignored --test-threads=1 --exact "${names[@]}" <<< "$tests"
        # initcheck does not see what cuBLASLt stores, and takes every product for uninitialized.
        [ "$tool" != initcheck ] || continue
        forward=(./qwen3 --device cuda --dtype bf16 --max-new-tokens 3)
        start_job "$tool" qwen3 "${forward[@]}" --model tests/fixtures/qwen3 \
            --requests tests/fixtures/goldens/mixed.json "${adapters[@]}" <<< qwen3
        for model in moe moe-int4 moe-int8; do
            start_job "$tool" "qwen3-$model" "${forward[@]}" --model "tests/fixtures/qwen3-$model" \
                --requests "tests/fixtures/goldens/$model.json" "${expert_adapters[@]}" <<< "qwen3-$model"
        done
    done
    wait

    # A finding begins with a line that is not indented. Others of these lines frame them.
    findings() {
        cat "$1" 2> /dev/null | grep -E '^=+ [^ ]' | grep -vE 'COMPUTE-SANITIZER|SUMMARY|Target application returned|were not printed'
    }
    failed=0
    for status in "$OUT"/sanitize-*.status; do
        log=${status%.status}
        touch "$log.passed"
        read -r code seconds < "$status"
        wanted=$(grep -c . "$log.wanted" || true)
        passed=$(grep -c . "$log.passed" || true)
        found=$(findings "$log.tool" | wc -l || true)
        printf '%-36s %3d of %3d passed, %3d findings, status %3d, %4d s\n' "$(basename "$log")" "$passed" "$wanted" "$found" "$code" "$seconds"
        grep . "$log.wanted" | grep -vxFf "$log.passed" | sed 's/^/    not passed: /' || true
        [ "$found" = 0 ] || findings "$log.tool" | cut -c1-200 | sort | uniq -c | sort -rn | sed 's/^/    /;8q'
        # A job without a test has failed.
        if [ "$wanted" = 0 ] || [ "$passed" != "$wanted" ] || [ "$found" != 0 ] || [ "$code" != 0 ]; then failed=1; fi
    done > "$OUT/sanitize.log"
    cat "$OUT/sanitize.log"
    exit "$failed"
    ;;
bench)
    bundle=$PWD
    ours=()
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        ours+=("$1")
        shift
    done
    # Files and folders are named as they are where this was started.
    cd "$start"
    status=0
    "$bundle/workloads" --out "$OUT/aril.json" "${ours[@]}" 2>&1 | tee "$OUT/bench.log" || status=$?
    if [ $# -gt 1 ]; then
        others "${@:2}" || status=$?
        "$bundle/record" tables "$OUT/aril.json" --against "$OUT/peers.json" 2>&1 | tee -a "$OUT/bench.log"
    fi
    exit "$status"
    ;;
record)
    [ $# -gt 0 ] || usage
    bundle=$PWD
    runner=()
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        runner+=("$1")
        shift
    done
    cd "$start"
    status=0
    rm -f "$OUT/record.log"
    measure() {
        "$bundle/workloads" --suite "$2" --no-warm --budget 120 --out "$OUT/$1.json" 2>&1 | tee -a "$OUT/record.log" || status=$?
    }
    measure linear decode,prefill,own,host
    measure moe moe,moe-own
    measure layer layer
    others "${runner[@]}" || status=$?
    "$bundle/record" others "$OUT/peers.json" "${@:2}" --out "$OUT/others.json"
    exit "$status"
    ;;
pool)
    ./pool --out "$OUT/pool.json" "$@" 2>&1 | tee "$OUT/pool.log"
    ;;
criterion)
    export CRITERION_HOME=$OUT/criterion
    for bench in sharded host; do
        "./$bench" --bench "$@"
    done 2>&1 | tee "$OUT/criterion.log"
    ;;
example)
    [ $# -gt 0 ] || set -- --device cuda --verify
    ./qwen3 "$@" 2>&1 | tee "$OUT/example.log"
    ;;
serve)
    export ARIL_SERVE_DEVICE=cuda
    {
        ./aril_engine on_gpu --include-ignored --test-threads=1
        # The tests of the process start the program on the CPU. The bundle does not have it.
        ./server --test-threads=1 --skip ranks --skip process:: "$@"
    } 2>&1 | tee "$OUT/serve.log"
    ;;
serve-ranks)
    export ARIL_SERVE_DEVICE=cuda
    {
        status=0
        each ./aril_engine on_ranks_of_gpus || status=1
        each ./server ranks || status=1
        exit "$status"
    } 2>&1 | tee "$OUT/serve-ranks.log"
    ;;
figures)
    [ $# -gt 0 ] || set -- models/Qwen3-8B models/Qwen3-32B models/Qwen3-30B-A3B
    ./figures --out "$OUT/serve.json" "$@" 2>&1 | tee "$OUT/figures.log"
    ;;
load)
    ./load --out "$OUT/serve.json" "$@" 2>&1 | tee "$OUT/load.log"
    ;;
candle)
    export LD_LIBRARY_PATH=${CUDA_HOME:-/usr/local/cuda}/targets/x86_64-linux/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    ./engine --test-threads=1 "$@" 2>&1 | tee "$OUT/candle.log"
    ;;
*)
    usage
    ;;
esac
