#!/usr/bin/env bash
# Gathers in .bundle what runs on a machine that has a GPU and no Rust. Needs nvcc (build.rs says how it is found), and cargo.
#
#   tests/bundle.sh [PART...]    tests: the GPU tests; bench: the benchmarks; example: qwen3; by default these three
#                                serve: the tests of aril-engine and aril-serve, the figures of the engine and the load of the server
#                                candle: the tests of aril-candle, which link the libraries of the toolkit in CUDA_HOME. Its nvcc,
#                                on the PATH, compiles candle's kernels for CUDA_COMPUTE_CAP (90) in a quarter of an hour.
#
# run.sh is in every bundle, and the fixtures are in those that have tests or the example.
set -euo pipefail
cd "$(dirname "$0")/.."

# Code for the devices that bundles are for.
export ARIL_CUDA_ARCHS=${ARIL_CUDA_ARCHS:-90a}

max_bytes=$((60 << 20))
bundle=.bundle
[ $# -gt 0 ] || set -- tests bench example
rm -rf "$bundle"
mkdir -p "$bundle"

# Figures name the commit that they are of.
ARIL_COMMIT=$(git rev-parse --short=7 HEAD)
git diff --quiet HEAD || ARIL_COMMIT+=-dirty
export ARIL_COMMIT

# Builds what the arguments name, and puts the stripped executables in the bundle without cargo's hashes, of 16 digits.
gather() {
    local path name
    cargo "$@" --features cuda --message-format=json |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' |
        while read -r path; do
            name=$(basename "$path")
            strip -o "$bundle/${name%-????????????????}" "$path"
        done
}

fixtures() {
    mkdir -p "$bundle/tests"
    cp -r tests/fixtures "$bundle/tests/"
}

for part in "$@"; do
    case $part in
    tests)
        gather test -p aril -p aril-qwen3 --release --test gpu --test forward --no-run
        fixtures
        ;;
    bench)
        gather bench -p aril-bench --bench '*' --no-run
        gather build -p aril-bench --release --bin record
        ;;
    example)
        gather build -p aril-qwen3 --release --example qwen3
        fixtures
        ;;
    serve)
        # For the tests of the server, cargo also builds the server itself, which nothing here runs, like the tests beside its source.
        gather test -p aril-engine -p aril-serve --release --lib --test server --no-run
        rm -f "$bundle/aril-serve" "$bundle/aril_serve"
        gather build -p aril-bench -p aril-serve --release --bin figures --example load
        cp -r benches/models "$bundle/"
        fixtures
        ;;
    candle)
        # Compressed, candle's kernels take less than half of the bytes.
        CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-90} NVCC_APPEND_FLAGS=-Xfatbin=-compress-all CARGO_TARGET_DIR=target/dependants \
            gather test --locked --manifest-path crates/candle/Cargo.toml --release --test engine --no-run
        fixtures
        ;;
    *)
        echo "there is no part $part: tests, bench, example, serve, candle" >&2
        exit 2
        ;;
    esac
done
cp tests/run_bundle.sh "$bundle/run.sh"

du -ab "$bundle" --max-depth=1 | sort -n
bytes=$(du -sb "$bundle" | cut -f1)
if [ "$bytes" -gt "$max_bytes" ]; then
    echo "the bundle has $bytes bytes, more than $max_bytes" >&2
    exit 1
fi
