#!/usr/bin/env bash
# Gathers in .bundle what runs on a machine that has a GPU and no Rust: the GPU tests, the benchmarks, the example, the fixtures,
# and run.sh. Needs nvcc (build.rs says how it is found), and cargo.
set -euo pipefail
cd "$(dirname "$0")/.."

max_bytes=$((60 << 20))
bundle=.bundle
rm -rf "$bundle"
mkdir -p "$bundle/tests"

# Builds what the arguments name, and puts the stripped executables in the bundle without cargo's hashes.
gather() {
    local path name
    cargo "$@" --features cuda --message-format=json |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' |
        while read -r path; do
            name=$(basename "$path")
            strip -o "$bundle/${name%-*}" "$path"
        done
}

gather test --release --test gpu --no-run
gather bench --bench '*' --no-run
if [ -d examples/qwen3 ]; then
    gather build --release --example qwen3
fi
cp -r tests/fixtures "$bundle/tests/"
cp tests/run_bundle.sh "$bundle/run.sh"

du -ab "$bundle" --max-depth=1 | sort -n
bytes=$(du -sb "$bundle" | cut -f1)
if [ "$bytes" -gt "$max_bytes" ]; then
    echo "the bundle has $bytes bytes, more than $max_bytes" >&2
    exit 1
fi
