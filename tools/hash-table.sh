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

readonly SHARDS=8
# Checkpoints show the job's progress from outside; an epoch of the built-in digits has 23 steps.
readonly SAVE_EVERY_STEPS=3
# Time limit of one job.
readonly JOB_SECONDS_MAX=600
# Attempts to hit the middle of an epoch: a late signal may hit its end.
readonly INTERRUPTIONS_MAX=5

fail() {
    printf 'hash-table: %s\n' "$*" >&2
    exit 1
}

usage() {
    printf 'hash-table: %s\nusage: tools/hash-table.sh [--epochs N] [PROGRAM]\n' "$*" >&2
    exit 2
}

epochs=15
program=$(dirname "${BASH_SOURCE[0]}")/../target/release/paceline
while (($# > 0)); do
    case $1 in
    --epochs)
        [[ ${2-} =~ ^[1-9][0-9]{0,3}$ ]] || usage "--epochs takes a number from 1 to 9999"
        epochs=$2
        shift 2
        ;;
    -*) usage "unknown option $1" ;;
    *)
        (($# == 1)) || usage "one PROGRAM only"
        program=$1
        shift
        ;;
    esac
done
[[ -x $program ]] || usage "there is no program $program: build it with \`cargo build --release\`, or name another"
program=$(realpath "$program")

# The jobs must not inherit settings or a rank from the caller's environment.
for variable in "${!PACELINE_@}" "${!SLURM_@}" "${!TORCHELASTIC_@}" RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE; do
    unset "$variable"
done

folder=$(mktemp -d "${TMPDIR:-/tmp}/paceline-hash-table.XXXXXX")
job=
clean_up() {
    if [[ -n $job ]]; then
        kill -TERM "$job" 2>/dev/null || true
        wait "$job" || true
    fi
    rm -rf "$folder"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
cd "$folder"

rows=()
hashes=()

# start RUN OPTION...: starts a job in the run directory RUN, with its output in RUN.out.
start() {
    local run=$1
    shift
    "$program" train --run-dir "$run" "$@" >"$run.out" 2>&1 </dev/null &
    job=$!
    job_end=$((SECONDS + JOB_SECONDS_MAX))
}

# finish RUN: waits for the job and stores its exit code in `code`.
finish() {
    while kill -0 "$job" 2>/dev/null; do
        if ((SECONDS >= job_end)); then
            cat "$1.out" >&2
            fail "the job of $1 took longer than $JOB_SECONDS_MAX s"
        fi
        sleep 0.02
    done
    code=0
    wait "$job" || code=$?
    job=
}

# finish_well RUN: the same for a job that must complete; stores the hash in `hash`.
finish_well() {
    finish "$1"
    hash=$(sed -n 's/^weights sha256: //p' "$1.out")
    if ((code != 0)) || [[ ! $hash =~ ^[0-9a-f]{64}$ ]]; then
        cat "$1.out" >&2
        fail "the job of $1 ended with exit code $code and without a hash of its weights"
    fi
}

# word RUN PATTERN: the last match of the pattern's group in the output of RUN.
word() {
    sed -nE "s/.*$2.*/\\1/p" "$1.out" | tail -n 1
}

# row RANKS TRANSPORT HOW SECONDS
row() {
    rows+=("| $1 | $2 | $3 | $epochs | $4 | \`${hash:0:16}\` |")
    hashes+=("$hash")
    printf 'ranks %s, transport %s, %s: %s\n' "$1" "$2" "$3" "${hash:0:16}" >&2
}

# since MICROSECONDS: seconds since then, with one decimal.
since() {
    local tenths=$(((${EPOCHREALTIME/[.,]/} - $1 + 50000) / 100000))
    printf '%d.%d' $((tenths / 10)) $((tenths % 10))
}

# through RANKS TRANSPORT: an uninterrupted job.
through() {
    local run=through-$1-$2 begun=${EPOCHREALTIME/[.,]/}
    start "$run" --epochs "$epochs" --nproc-per-node "$1" --shards "$SHARDS" --transport "$2"
    finish_well "$run"
    row "$1" "$(word "$run" 'transport ([a-z]+)')" uninterrupted "$(since "$begun")"
}

# await_step RUN STEP: waits until the job has saved a checkpoint at STEP or later; fails if the job ends first.
await_step() {
    local newest
    while kill -0 "$job" 2>/dev/null && ((SECONDS < job_end)); do
        newest=$(find "$1/checkpoints" -maxdepth 1 -name 'step-*' 2>/dev/null | sort | tail -n 1)
        if [[ -n $newest ]] && ((10#${newest##*step-} >= $2)); then
            return 0
        fi
        sleep 0.005
    done
    return 1
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
