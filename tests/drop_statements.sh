#!/usr/bin/env bash
# Drops one statement or condition of a file at a time, and runs tests, which must fail. (cargo-mutants changes operators and whole
# bodies alone.) Arguments: files, `--`, and the arguments of `cargo test`. From the root of the repository, for example:
#
#     tests/drop_statements.sh src/pool/state/loading.rs -- -p aril --lib --test pool pool::
#
# Prints what no test noticed, and fails if there is any. Restores each file when it ends. A run that takes longer than
# `ARIL_TEST_SECONDS`, by default 300, counts as a failure.
set -euo pipefail
files=()
while [[ $# -gt 0 && $1 != -- ]]; do files+=("$1") && shift; done
shift || { sed -n '2,9s/^# \?//p' "$0" >&2 && exit 2; }

# The changes of a file: the number of a line, a tab and the text in its place.
changes() {
    awk '
        # The first character behind the operand that begins at `from`.
        function end(from,   at, depth, c) {
            for (at = from; at <= length($0); at++) {
                c = substr($0, at, 1)
                if (depth == 0 && (c ~ /[,;]/ || substr($0, at, 2) == " {" || substr($0, at, 4) ~ /^ (&&|\|\|) /)) return at
                if (c ~ /[(\[{]/) depth++
                if (c ~ /[])}]/ && depth-- == 0) return at
            }
            return at
        }
        function count(what) { return gsub(what, "&") }
        /^ *#\[cfg\(test\)\]/ { exit }
        /^ *(\/\/|#\[|$)/ { next }
        # A statement on a line of its own, and a call in a chain.
        /^ +[a-z_(*].*;$/ && !/^ +(let|use|return|break|continue|const|static|type|pub|mod) ?/ && count("[({[]") == count("[]})]") {
            print NR "\t"
        }
        /^ +\.(filter|take|skip|rev|min_by|max_by|chain)[a-z_]*\(.*\)$/ && count("[({[]") == count("[]})]") { print NR "\t" }
        # A condition: the operands of && and ||, and the whole of an if.
        {
            for (from = 1; match(substr($0, from), / (&&|\|\|) /); from = first) {
                first = from + RSTART + RLENGTH - 1
                neutral = substr($0, from + RSTART, 2) == "&&" ? "true" : "false"
                print NR "\t" substr($0, 1, first - 1) neutral substr($0, end(first))
            }
        }
        match($0, /^ +(\} else )?if /) && !/ let / && / \{$/ {
            print NR "\t" substr($0, 1, RLENGTH) "true" substr($0, end(RLENGTH + 1))
        }
    ' "$1"
}

missed=0
original=$(mktemp)
for file in "${files[@]}"; do
    cp "$file" "$original"
    trap 'cp "$original" "$file"; rm "$original"' EXIT
    while IFS=$'\t' read -r line text; do
        what="$file:$line: $(sed -n "${line}s/^ *//p" "$original") -> ${text#"${text%%[! ]*}"}"
        TEXT=$text awk -v line="$line" 'NR == line { print ENVIRON["TEXT"]; next } { print }' "$original" > "$file"
        if ! cargo test --quiet --no-run "$@" > /dev/null 2>&1 < /dev/null; then
            echo "does not build: $what"
        elif timeout "${ARIL_TEST_SECONDS:-300}" cargo test --quiet "$@" > /dev/null 2>&1 < /dev/null; then
            echo "MISSED: $what"
            missed=$((missed + 1))
        else
            echo "noticed: $what"
        fi
    done < <(changes "$original")
    cp "$original" "$file"
done
echo "$missed missed"
exit $((missed > 0))
