#!/usr/bin/env bash
# Shows that a model that is too large for the memory of one process trains on four ranks at stage 3 of ZeRO. `ulimit -d` bounds the
# private memory of every process alike. One rank must fail with an error that says what to do. Four ranks train, are interrupted
# in the middle, and resume from their checkpoint, within the bound; the weights are those of one rank without it.
#
# Usage: tools/memory-proof.sh [--epochs N] [PROGRAM]
#
# PROGRAM is the `paceline` to run, by default target/release/paceline. A Markdown table goes to stdout, progress to stderr.
# Everything else is in a temporary folder, which is removed.
#
# Exit codes: 0 all of it holds, 1 something does not, 2 wrong usage, 128 + n ended by signal n.

set -euo pipefail
readonly SYNOPSIS='tools/memory-proof.sh [--epochs N] [PROGRAM]' OPTION=epochs DEFAULT=1
source=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
source "$source/tools/jobs.sh"

{ gzip -dc "$source/crates/train/data/shakespeare.txt.gz" || true; } 2>/dev/null | head -c 5000 >text
# 25,384,448 parameters: weights, gradients and AdamW's two moments are 406 MB.
readonly JOB=(--task lm --data "$PWD/text" --layers 8 --heads 4 --width 512 --context 64 --dropout 0.1 --global-batch 4 --shards 4
    --epochs "$epochs")
readonly SHARDED=(--nproc-per-node 4 --zero 3)
# Bound of a process, in KiB. It counts private memory that may be written, touched or not, and so stacks of threads too.
readonly BOUND_KIB=370000

rows=()

# row NAME RUN BOUND RESULT
row() {
    local peak
    peak=$(tail -n 1 "$2/metrics.jsonl" 2>/dev/null | grep -oE '"peak_bytes":[0-9]+' | cut -d: -f2 | sort -n | tail -n 1) || true
    rows+=("| $1 | $3 | ${peak:+$(((peak + 500000) / 1000000)) MB} | $4 |")
    printf '%s: %s\n' "$1" "$4" >&2
}

unbounded=$program
start whole "${JOB[@]}" --nproc-per-node 1
finish_well whole
expected=$hash
steps=$(word whole 'epochs?, ([0-9,]+) steps' | tr -d ,)
row 'one rank' whole none "\`${hash:0:16}\`"

printf '#!/usr/bin/env bash\nulimit -d %d\nexec %q "$@"\n' "$BOUND_KIB" "$unbounded" >bounded
chmod +x bounded
program=$PWD/bounded
bound="$((BOUND_KIB * 1024 / 1000000)) MB"

start failed "${JOB[@]}" --nproc-per-node 1
finish failed
if ((code == 0)) || ! grep -qE 'memory allocation of [0-9]+ bytes failed|can have no more memory' failed.out ||
    ! grep -q -e '--zero 3' failed.out; then
    cat failed.out >&2
    fail "one rank should have failed for lack of memory and named --zero 3, but ended with exit code $code"
fi
row 'one rank' failed "$bound" 'out of memory, and the error names `--zero 3`'

start sharded "${JOB[@]}" "${SHARDED[@]}" --save-every 2
await_step sharded $((steps / 3)) || fail 'four ranks ended before they could be interrupted'
kill -TERM "$job"
finish sharded
stopped=$(word sharded 'stopped by SIGTERM after step ([0-9]+) of')
if [[ -z $stopped ]]; then
    cat sharded.out >&2
    fail "four ranks were not stopped in their middle: exit code $code"
fi
start sharded --resume sharded
finish_well sharded
[[ $hash == "$expected" ]] || fail "the weights of four ranks are $hash, those of one rank $expected"
row 'four ranks, `--zero 3`' sharded "$bound" "stopped after step $stopped of $steps and resumed: \`${hash:0:16}\`"

printf '| job | bound of a process | peak of a rank | result |\n|---|---|---|---|\n'
printf '%s\n' "${rows[@]}"
