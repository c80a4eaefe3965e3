#!/usr/bin/env bash
# Shows that every layout of a model over devices gives the same bits: trains one language model in each layout, and again
# interrupted in the middle and resumed in the next layout of the table. Then it compares the SHA-256 of the weights. Beside the
# peak memory is the one that `paceline plan` computes.
#
# Usage: tools/layout-table.sh [--large] [--epochs N] [PROGRAM]
#
# --large trains a larger model for a few steps in each layout, for memory only: with the small one, a process is mostly its
# program. All layouts take 10 to 20 minutes on 4 cores. PROGRAM is the `paceline` to run, by default target/release/paceline. A Markdown table goes to stdout, progress to
# stderr. Everything else is in a temporary folder, which is removed.
#
# Exit codes: 0 all hashes are equal, 1 hashes differ or a job failed, 2 wrong usage, 128 + n ended by signal n.

set -euo pipefail
readonly SYNOPSIS='tools/layout-table.sh [--large] [--epochs N] [PROGRAM]'
is_large=
if [[ ${1-} == --large ]]; then
    is_large=yes
    shift
fi
readonly is_large OPTION=epochs DEFAULT=$((${#is_large} > 0 ? 1 : 2))
source=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
source "$source/tools/jobs.sh"

# A small text, so that the whole table takes minutes; or the text of three steps of a larger model.
{ gzip -dc "$source/crates/train/data/shakespeare.txt.gz" || true; } 2>/dev/null | head -c 30000 >text
sizes=(--layers 6 --heads 4 --width 64 --context 64)
if [[ -n $is_large ]]; then
    sizes=(--layers 6 --heads 8 --width 384 --context 256)
fi
readonly SHARDS=4
# What all rows have in common: the model, the batch, and how it is cut.
readonly MODEL=(--task lm --data "$PWD/text" "${sizes[@]}" --dropout 0.1 --global-batch 32 --clip-norm 1 --shards "$SHARDS" --accumulate 4)
readonly JOB=("${MODEL[@]}" --epochs "$epochs")
# What a resumed job needs where its own layout says nothing: it takes the rest from the run that it resumes.
readonly PLAIN=(--strategy ddp --devices 1 --nproc-per-node 1 --zero 0 --pp 1)
# Checkpoints show the job's progress from outside.
readonly SAVE_EVERY_STEPS=2
# Attempts to stop a job in its middle: a late signal may come after its end.
readonly INTERRUPTIONS_MAX=5

# NAME|OPTIONS; layouts of one group have the same bits. Parts of tensor parallelism change the order of additions, so they
# are a group of their own.
readonly WHOLE=(
    'one process|--nproc-per-node 1'
    'DataParallel, 2 replicas|--strategy dp --devices 2'
    'model parallel, 2 devices|--strategy model --devices 2'
    'DDP, 2 ranks|--nproc-per-node 2'
    'DDP, 4 ranks|--nproc-per-node 4'
    'ZeRO-1, 2 ranks|--nproc-per-node 2 --zero 1'
    'ZeRO-1, 3 ranks|--nproc-per-node 3 --zero 1'
    'ZeRO-1, 4 ranks|--nproc-per-node 4 --zero 1'
    'ZeRO-2, 2 ranks|--nproc-per-node 2 --zero 2'
    'ZeRO-2, 3 ranks|--nproc-per-node 3 --zero 2'
    'ZeRO-2, 4 ranks|--nproc-per-node 4 --zero 2'
    'ZeRO-3, 2 ranks|--nproc-per-node 2 --zero 3'
    'ZeRO-3, 3 ranks|--nproc-per-node 3 --zero 3'
    'ZeRO-3, 4 ranks|--nproc-per-node 4 --zero 3'
    'GPipe, 2 stages|--nproc-per-node 2 --pp 2 --schedule gpipe'
    'GPipe, 4 stages|--nproc-per-node 4 --pp 4 --schedule gpipe'
    '1F1B, 2 stages|--nproc-per-node 2 --pp 2 --schedule 1f1b'
    '1F1B, 4 stages|--nproc-per-node 4 --pp 4 --schedule 1f1b'
    'interleaved, 2 ranks of 2 stages|--nproc-per-node 2 --pp 2 --schedule interleaved --pp-chunks 2'
    'interleaved, 4 ranks of 2 stages|--nproc-per-node 4 --pp 4 --schedule interleaved --pp-chunks 2'
    'ZB-H1, 2 stages|--nproc-per-node 2 --pp 2 --schedule zb-h1'
    'ZB-H1, 4 stages|--nproc-per-node 4 --pp 4 --schedule zb-h1'
    'DDP of 2 pipelines of 2 stages|--nproc-per-node 4 --pp 2 --schedule 1f1b'
    'ZeRO-1 x 2 stages|--nproc-per-node 4 --pp 2 --schedule 1f1b --zero 1'
    'ZeRO-3 x 2 stages|--nproc-per-node 4 --pp 2 --schedule interleaved --pp-chunks 2 --zero 3'
)
readonly PARTS=(
    '2 parts on one rank|--nproc-per-node 1 --tp 2'
    '2 parts on 2 ranks|--nproc-per-node 2 --tp 2'
    'DDP of 2 replicas of 2 parts|--nproc-per-node 4 --tp 2'
    '2 stages of 2 parts|--nproc-per-node 4 --pp 2 --tp 2 --schedule 1f1b'
    'DDP of 2 pipelines of 2 stages of 2 parts|--nproc-per-node 8 --pp 2 --tp 2 --schedule 1f1b'
    'ZeRO-3 x 2 parts|--nproc-per-node 4 --tp 2 --zero 3'
    'ZeRO-3 x 2 stages of 2 parts|--nproc-per-node 8 --pp 2 --tp 2 --schedule 1f1b --zero 3'
)

# figure RUN KEY: the largest value that a rank's record has at the end of RUN.
figure() {
    tail -n 1 "$1/metrics.jsonl" | grep -oE "\"$2\":[0-9]+" | cut -d: -f2 | sort -n | tail -n 1
}

# training_peak RUN: stores the largest peak memory of its ranks after their second step in `training`, before they evaluate and save.
training_peak() {
    local count= rank kib
    until ((${count:-0} >= 2)) || ! kill -0 "$job" 2>/dev/null || ((SECONDS >= job_end)); do
        sleep 0.02
        count=$(grep -cs '^{"kind":"step"' "$1/metrics.jsonl") || true
    done
    training=0
    for rank in $(pgrep -P "$job" -f ' worker '); do
        kib=$(sed -nE 's/^VmHWM:\s+([0-9]+) kB$/\1/p' "/proc/$rank/status")
        ((training >= kib * 1024)) || training=$((kib * 1024))
    done
}

# megabytes BYTES: with one decimal.
megabytes() {
    local tenths=$((($1 + 50000) / 100000))
    printf '%d.%d' $((tenths / 10)) $((tenths % 10))
}

# option NAME DEFAULT OPTION...: the value of an option.
option() {
    local name=$1 value=$2
    shift 2
    while (($# > 1)); do
        [[ $1 != "$name" ]] || value=$2
        shift 2
    done
    printf '%s' "$value"
}

# arithmetic OPTION...: the peak memory of a rank according to `paceline plan`, or - for what it does not know.
arithmetic() {
    local ranks pp tp zero schedule layout= rows peak
    ranks=$(option --nproc-per-node 1 "$@")
    pp=$(option --pp 1 "$@")
    tp=$(option --tp 1 "$@")
    zero=$(option --zero 0 "$@")
    schedule=$(option --schedule 1f1b "$@")
    # Strategies of one process are no layouts of ranks, nor are parts that share a rank. A plan has a shard for each rank.
    if [[ " $* " == *' --strategy '* ]] || ((ranks % (pp * tp) || ranks > SHARDS)); then
        printf -- '-'
        return
    fi
    rows=plan-$ranks.json
    if [[ ! -e $rows ]]; then
        "$program" plan --json "${MODEL[@]}" --nproc-per-node "$ranks" >"$rows" 2>plan.err || fail "$(cat plan.err)"
    fi
    ((ranks / pp / tp == 1)) || layout="dp $((ranks / pp / tp))"
    ((pp == 1)) || layout+="${layout:+ x }pp $pp"
    ((tp == 1)) || layout+="${layout:+ x }tp $tp"
    ((pp == 1)) || layout+=" $schedule"
    ((zero == 0)) || layout+=", zero $zero"
    ((zero < 3)) || layout+=", recompute"
    peak=$(grep -oE "\"layout\":\"${layout:-single}\",\"parts\":\{[^}]*\},\"memory\":\{[^}]*\}" "$rows" |
        grep -oE '"peak":[0-9]+' | cut -d: -f2) || true
    if [[ -n $peak ]]; then megabytes "$peak"; else printf -- '-'; fi
}

# interrupt RUN OPTION...: stops a job in its middle; stores the step in `stopped`.
interrupt() {
    local try run=$1
    shift
    for ((try = 1; try <= INTERRUPTIONS_MAX; try++)); do
        rm -rf "$run"
        start "$run" "${JOB[@]}" --save-every "$SAVE_EVERY_STEPS" "$@"
        if await_step "$run" $((steps / 3)); then
            kill -TERM "$job" 2>/dev/null || true
        fi
        finish "$run"
        stopped=$(word "$run" 'stopped by SIGTERM after step ([0-9]+) of')
        if ((code == 143)) && [[ -n $stopped ]]; then
            return 0
        fi
    done
    cat "$run.out" >&2
    fail "no job could be stopped in its middle; the last one ended with exit code $code"
}

# complete OPTION...: the same with the options of PLAIN that are missing, in `completed`.
complete() {
    completed=("$@")
    local i
    for ((i = 0; i < ${#PLAIN[@]}; i += 2)); do
        [[ " $* " == *" ${PLAIN[i]} "* ]] || completed+=("${PLAIN[@]:i:2}")
    done
}

# group LAYOUT...: appends a row for each layout; all must end with the same hash.
group() {
    local layouts=("$@") hashes=() at name next_name options next_options begun seconds loss sent peak row differing
    for ((at = 0; at < ${#layouts[@]}; at++)); do
        IFS='|' read -r name options <<<"${layouts[at]}"
        IFS='|' read -r next_name next_options <<<"${layouts[(at + 1) % ${#layouts[@]}]}"
        read -ra options <<<"$options"
        read -ra next_options <<<"$next_options"
        begun=${EPOCHREALTIME/[.,]/}
        start through "${JOB[@]}" "${options[@]}"
        [[ -z $is_large ]] || training_peak through
        finish_well through
        seconds=$(since "$begun")
        steps=$(word through 'epochs?, ([0-9,]+) steps' | tr -d ,)
        [[ $steps =~ ^[1-9][0-9]*$ ]] || fail "the job's output does not contain its number of steps"
        hashes+=("$hash")
        loss=$(word through 'held-out loss ([0-9.]+)')
        sent=$(figure through sent_bytes)
        peak=$(megabytes "$(figure through peak_bytes)")
        row="| $name | \`${options[*]}\` | $loss | \`${hash:0:16}\` | $peak |${is_large:+ $(megabytes "$training") |} $(arithmetic "${options[@]}")"
        row+=" | $(megabytes $((sent / steps))) | $seconds"
        if [[ -n $is_large ]]; then
            rows+=("$row |")
            printf '%s: %s MB\n' "$name" "$peak" >&2
            rm -rf through
            continue
        fi
        interrupt resumed "${options[@]}"
        complete "${next_options[@]}"
        start resumed --resume "${completed[@]}"
        finish_well resumed
        hashes+=("$hash")
        rows+=("$row | step $stopped of $steps, then $next_name: \`${hash:0:16}\` |")
        printf '%s: %s, then %s: %s\n' "$name" "${hashes[-2]:0:16}" "$next_name" "${hash:0:16}" >&2
        rm -rf through resumed
    done
    differing=$(printf '%s\n' "${hashes[@]}" | sort -u | wc -l)
    ((differing == 1)) || different+=("$differing different hashes among: $*")
}

rows=()
different=()
group "${WHOLE[@]}"
group "${PARTS[@]}"

printf '| layout | options | held-out loss | weights (SHA-256) | peak memory of a rank, MB |'
[[ -z $is_large ]] || printf ' in its steps, MB |'
printf ' as planned, MB'
printf ' | sent by a rank in a step, MB | seconds'
[[ -n $is_large ]] || printf ' | interrupted, then resumed'
printf ' |\n|---|---|---|---|---|---|---|---|---|\n'
printf '%s\n' "${rows[@]}"
((${#different[@]} == 0)) || fail "${different[@]}"
