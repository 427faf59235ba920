#!/usr/bin/env bash
# Runs what tests/bundle.sh gathered, on a machine with a GPU. Results and logs go to $OUT, or the current folder.
#
#   run.sh tests [FILTER...]        every GPU test
#   run.sh sanitize [TOOL...]       the same with small cases under compute-sanitizer: memcheck racecheck initcheck synccheck
#   run.sh bench [ARGUMENTS...]     the workloads that other libraries are measured on (--help lists the arguments)
#   run.sh criterion [ARGUMENTS...] the other benchmarks
#   run.sh example [ARGUMENTS...]   the reference forward; without arguments, the fixtures, verified
set -euo pipefail

usage() {
    sed -n 's/^#   //p' "$0" >&2
    exit 2
}

command=${1:-}
[ -n "$command" ] || usage
shift
mkdir -p "${OUT:=.}"
OUT=$(cd "$OUT" && pwd)
# Tests find the fixtures from here.
cd "$(dirname "$0")"
export RUST_BACKTRACE=1

case $command in
tests)
    ./gpu --include-ignored --test-threads=1 "$@" 2>&1 | tee "$OUT/tests.log"
    ;;
sanitize)
    [ $# -gt 0 ] || set -- memcheck racecheck initcheck synccheck
    failed=()
    for tool in "$@"; do
        echo "== $tool"
        # Without the test whose point is its 20 GB.
        PROPTEST_CASES=16 "${COMPUTE_SANITIZER:-compute-sanitizer}" --tool "$tool" --error-exitcode 86 \
            ./gpu --include-ignored --test-threads=1 --skip offsets_are_64_bits_wide \
            2>&1 | tee "$OUT/sanitize-$tool.log" || failed+=("$tool")
    done
    if [ ${#failed[@]} -gt 0 ]; then
        echo "failed: ${failed[*]}" >&2
        exit 1
    fi
    ;;
bench)
    ./workloads --out "$OUT/aril.json" "$@" 2>&1 | tee "$OUT/bench.log"
    ;;
criterion)
    export CRITERION_HOME=$OUT/criterion
    for bench in linear embedding routing host; do
        "./$bench" --bench "$@"
    done 2>&1 | tee "$OUT/criterion.log"
    ;;
example)
    if [ $# -eq 0 ]; then
        set -- --model tests/fixtures/qwen3 --requests tests/fixtures/goldens/mixed.json --device cuda --verify
        for adapter in tests/fixtures/adapters/*/; do
            set -- "$@" --adapter "$(basename "$adapter")=$adapter"
        done
    fi
    ./qwen3 "$@" 2>&1 | tee "$OUT/example.log"
    ;;
*)
    usage
    ;;
esac
