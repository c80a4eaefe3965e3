#!/usr/bin/env bash
# Runs all tests. Up to three that fail are run once more, by themselves: the tests kill and stop hundreds of processes, and a machine
# that others use may stand still for seconds. Those that pass then are counted, and named at the end; they are worth a look.
#
# Usage: tools/tests.sh LOG
#
# LOG gets what the first run printed. Exit codes: 0 all tests passed, at the latest when repeated, 1 a test failed twice or the tests cannot
# be built, 2 wrong usage.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly REPEATED_MAX=3
if (($# != 1)); then
    sed -n 's/^# Usage: /usage: /p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
log=$1

# fail: ends with the names, because the end is all that some CI systems keep.
fail() {
    printf 'failed: %s\n' "${failed[@]-a program did not build}"
    exit 1
}

cargo test --workspace --no-fail-fast 2>&1 | tee "$log" && exit
# The harness adds how it took the code of a documentation test to its name.
mapfile -t failed < <(sed -nE 's/^test (.*) \.\.\. FAILED$/\1/p' "$log" | sed -E 's/ - (compile|compile fail|should panic)$//' | sort -u)
# A program that died has not said which test failed.
mapfile -t died < <(grep "process didn't exit successfully" "$log")
if ((${#died[@]} > 0 || ${#failed[@]} == 0 || ${#failed[@]} > REPEATED_MAX)); then
    failed+=("${died[@]}")
    fail
fi
printf '\n=== once more, alone: %s\n' "${failed[*]}"
cargo test --workspace --no-fail-fast -- --exact "${failed[@]}" 2>&1 | tee "$log.again" || fail
# A name that was not found again has not passed.
passed=$(grep -cE '^test .* \.\.\. ok$' "$log.again" || true)
((passed >= ${#failed[@]})) || fail
printf 'failed once, then passed: %s\n' "${failed[@]}" | tee -a "$log.repeated"
