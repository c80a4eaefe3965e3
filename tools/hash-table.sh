#!/usr/bin/env bash
# Shows that any number of ranks gives the same bits: trains one job on 1, 2, 3, 4 and 8 ranks, over shared memory and over
# TCP, and again interrupted in the middle of an epoch and resumed on another number of ranks. Then it compares the
# SHA-256 of the weights.
#
# Usage: tools/hash-table.sh [--epochs N] [PROGRAM]
#
# PROGRAM is the `paceline` to run, by default target/release/paceline. A Markdown table goes to stdout, progress to
# stderr. Everything else is in a temporary folder, which is removed.
#
# Exit codes: 0 all hashes are equal, 1 hashes differ or a job failed, 2 wrong usage, 128 + n ended by signal n.

set -euo pipefail
readonly SYNOPSIS='tools/hash-table.sh [--epochs N] [PROGRAM]' OPTION=epochs DEFAULT=15
source "$(dirname "${BASH_SOURCE[0]}")/jobs.sh"

readonly SHARDS=8
# Checkpoints show the job's progress from outside; an epoch of the built-in digits has 23 steps.
readonly SAVE_EVERY_STEPS=3
# Attempts to hit the middle of an epoch: a late signal may hit its end.
readonly INTERRUPTIONS_MAX=5

rows=()
hashes=()

# row RANKS TRANSPORT HOW SECONDS
row() {
    rows+=("| $1 | $2 | $3 | $epochs | $4 | \`${hash:0:16}\` |")
    hashes+=("$hash")
    printf 'ranks %s, transport %s, %s: %s\n' "$1" "$2" "$3" "${hash:0:16}" >&2
}

# through RANKS TRANSPORT: an uninterrupted job.
through() {
    local run=through-$1-$2 begun=${EPOCHREALTIME/[.,]/}
    start "$run" --epochs "$epochs" --nproc-per-node "$1" --shards "$SHARDS" --transport "$2"
    finish_well "$run"
    row "$1" "$(word "$run" 'transport ([a-z]+)')" uninterrupted "$(since "$begun")"
}

# interrupt RUN RANKS TRANSPORT: stops a job within its middle epoch; stores the step in `stopped`.
interrupt() {
    local try middle=$((epochs / 2))
    for ((try = 1; try <= INTERRUPTIONS_MAX; try++)); do
        rm -rf "$1"
        start "$1" --epochs "$epochs" --nproc-per-node "$2" --shards "$SHARDS" --transport "$3" \
            --save-every "$SAVE_EVERY_STEPS"
        if await_step "$1" $((middle * steps_per_epoch + steps_per_epoch / 3)); then
            kill -TERM "$job" 2>/dev/null || true
        fi
        finish "$1"
        stopped=$(word "$1" 'stopped by SIGTERM after step ([0-9]+) of')
        if ((code == 143)) && [[ -n $stopped ]] && ((stopped % steps_per_epoch != 0)); then
            return 0
        fi
    done
    cat "$1.out" >&2
    fail "no job could be stopped within an epoch; the last one ended with exit code $code"
}

# resumed RANKS TRANSPORT LATER_RANKS LATER_TRANSPORT: a job that is stopped and resumed on another number of ranks.
resumed() {
    local run=resumed-$1-$3 begun=${EPOCHREALTIME/[.,]/} transport
    interrupt "$run" "$1" "$2"
    start "$run" --resume --nproc-per-node "$3" --transport "$4"
    finish_well "$run"
    transport=$(word "$run" 'transport ([a-z]+)')
    if [[ $transport != "$2" ]]; then
        transport="$2, then $transport"
    fi
    row "$1, then $3" "$transport" "SIGTERM after step $stopped of $steps, resumed" "$(since "$begun")"
}

through 1 auto
steps=$(word through-1-auto 'epochs?, ([0-9,]+) steps' | tr -d ,)
[[ $steps =~ ^[1-9][0-9]*$ ]] || fail "the job's output does not contain its number of steps"
steps_per_epoch=$((steps / epochs))
for transport in shm tcp; do
    for ranks in 2 3 4 8; do
        through "$ranks" "$transport"
    done
done
resumed 2 shm 8 shm
resumed 8 tcp 3 tcp
resumed 4 shm 1 auto

printf '| ranks | transport | how | epochs | seconds | weights (SHA-256) |\n|---|---|---|---|---|---|\n'
printf '%s\n' "${rows[@]}"
differing=$(printf '%s\n' "${hashes[@]}" | sort -u | wc -l)
((differing == 1)) || fail "$differing different hashes"
