#!/usr/bin/env bash
# Measures how much time each layout of a language model over ranks adds to a training step, in Paceline and in PyTorch. Each
# round runs every job once, Paceline's and PyTorch's in turn, so that changes in the machine's speed affect both.
#
# Usage: benches/layouts.sh [--only REGEX] [--rounds N] [PROGRAM]
#
# REGEX chooses layouts by PyTorch's job and number of ranks, such as 'gpipe 4'; by default all. PROGRAM is the `paceline` to run, by default target/release/paceline. Raw results, one JSON object per line, are appended
# to docs/benchmarks/layouts.jsonl. A Markdown table of this run (benches/layouts-table.py) goes to stdout, progress to stderr.
# A round of all layouts takes about two and a half minutes.
#
# Without PyTorch in the Python that PACELINE_BENCH_PYTHON names, by default python3, only Paceline is measured.
#
# Exit codes: 0 done, 1 something failed, 2 wrong usage, 128 + n ended by signal n.

set -euo pipefail
python=${PACELINE_BENCH_PYTHON:-python3}
readonly SYNOPSIS='benches/layouts.sh [--only REGEX] [--rounds N] [PROGRAM]' OPTION=rounds DEFAULT=5
command_line="benches/layouts.sh${*:+ $*}"
only=
if [[ ${1-} == --only ]]; then
    only=${2-}
    shift $(($# < 2 ? 1 : 2))
fi
source=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
source "$source/tools/jobs.sh"
readonly OUT=$source/docs/benchmarks/layouts.jsonl

# The model, and the sequences of a step.
readonly HEADS=4 WIDTH=256 CONTEXT=64 SEQUENCES=8
# Steps of a job that count, after those that warm it up, which PyTorch's script leaves out too.
readonly STEPS=8 WARMUP=3
# Bytes, and the separator between texts.
readonly VOCABULARY=257
# Time limit of one of PyTorch's jobs.
readonly PEER_SECONDS_MAX=120

# What Paceline's jobs have in common.
readonly JOB=(--task lm --heads "$HEADS" --width "$WIDTH" --context "$CONTEXT" --dropout 0 --epochs 1 --keep 1
    --threads-per-rank 1 --usage off --timeout-seconds 60)

# RANKS SEQUENCES MICRO-BATCHES LAYERS|TIMES: processes that compute without each other, and how often a round measures them and the
# layouts that are compared with them.
readonly ALL_APART=(
    '1 8 1 4|3'
    '2 4 1 4|1'
    '2 8 1 4|1'
    '2 8 4 4|1'
    '4 2 1 4|1'
    '4 4 1 4|1'
    '4 4 4 4|1'
    '4 8 1 4|1'
    '4 8 4 4|1'
    '4 8 4 8|1'
)

# NAME OF PYTORCH'S JOB|OPTIONS|THE SAME COMPUTED APART|ITS PART OF THAT TIME|WHAT BOTH DO. A rank of a data-parallel job computes its own
# sequences. W ranks that share the layers or matrices of one model compute all of them in 1 / W of the time. M micro-batches wait
# in a pipeline for (W - 1) / M of that, of which two stages for each rank leave a half, and gradients of weights in the waits a
# third. A backward pass costs two forward passes, so another one of these takes a third more.
readonly ALL_LAYOUTS=(
    'recompute|--recompute blocks|1 8 1 4|4/3|recomputed blocks; `torch.utils.checkpoint`'
    'ddp||2 4 1 4|1/1|DDP; `DistributedDataParallel`'
    'zero1|--zero 1|2 4 1 4|1/1|ZeRO-1; `ZeroRedundancyOptimizer`'
    'zero2|--zero 2|2 4 1 4|1/1|ZeRO-2; FSDP2, `reshard_after_forward=False`'
    'zero3|--zero 3|2 4 1 4|1/1|ZeRO-3, which recomputes blocks; FSDP2'
    'tp|--tp 2|2 8 1 4|1/2|tensor parallel; `parallelize_module`'
    'gpipe|--pp 2 --schedule gpipe|2 8 4 4|5/8|GPipe; `ScheduleGPipe`'
    '1f1b|--pp 2 --schedule 1f1b|2 8 4 4|5/8|1F1B; `Schedule1F1B`'
    'interleaved|--pp 2 --pp-cuts 2,3,4 --schedule interleaved|2 8 4 4|9/16|interleaved; `ScheduleInterleaved1F1B`'
    'zb|--pp 2 --schedule zb-h1|2 8 4 4|13/24|ZB-H1; `ScheduleInterleavedZeroBubble`'
    'zbv|--pp 2 --schedule zb-h1|2 8 4 4|13/24|ZB-H1; `ScheduleZBVZeroBubble`'
    'ddp||4 2 1 4|1/1|DDP; `DistributedDataParallel`'
    'zero1|--zero 1|4 2 1 4|1/1|ZeRO-1; `ZeroRedundancyOptimizer`'
    'zero2|--zero 2|4 2 1 4|1/1|ZeRO-2; FSDP2, `reshard_after_forward=False`'
    'zero3|--zero 3|4 2 1 4|1/1|ZeRO-3, which recomputes blocks; FSDP2'
    'ddp+tp|--tp 2 --shards 2|4 4 1 4|1/2|DDP x tensor parallel; `replicate` x `parallelize_module`'
    'zero3+tp|--zero 3 --tp 2 --shards 2|4 4 1 4|1/2|ZeRO-3, which recomputes blocks, x tensor parallel; FSDP2 x `parallelize_module`'
    'ddp+1f1b|--pp 2 --shards 2|4 4 4 4|5/8|DDP x 1F1B; `DistributedDataParallel` x `Schedule1F1B`'
    'zero1+1f1b|--zero 1 --pp 2 --shards 2|4 4 4 4|5/8|ZeRO-1 x 1F1B; `ZeroRedundancyOptimizer` x `Schedule1F1B`'
    'zero3+1f1b|--zero 3 --pp 2 --shards 2|4 4 4 4|5/8|ZeRO-3, which recomputes blocks, x 1F1B; FSDP2 x `Schedule1F1B`'
    'tp|--tp 4|4 8 1 4|1/4|tensor parallel; `parallelize_module`'
    'gpipe|--pp 4 --pp-cuts 2,3,4 --schedule gpipe|4 8 4 4|7/16|GPipe; `ScheduleGPipe`'
    '1f1b|--pp 4 --pp-cuts 2,3,4 --schedule 1f1b|4 8 4 4|7/16|1F1B; `Schedule1F1B`'
    'zb|--pp 4 --pp-cuts 2,3,4 --schedule zb-h1|4 8 4 4|5/16|ZB-H1; `ScheduleInterleavedZeroBubble`'
    '1f1b+tp|--pp 2 --tp 2|4 8 4 4|5/16|1F1B x tensor parallel; `Schedule1F1B` x `parallelize_module`'
    'interleaved|--pp 4 --pp-cuts 2,3,4,5,6,7,8 --schedule interleaved|4 8 4 8|11/32|interleaved, 8 layers; `ScheduleInterleaved1F1B`'
    'zbv|--pp 4 --pp-cuts 3,5,7 --schedule zb-h1|4 8 4 8|5/16|ZB-H1, 8 layers; `ScheduleZBVZeroBubble`'
)

LAYOUTS=()
compared=
for line in "${ALL_LAYOUTS[@]}"; do
    IFS='|' read -r layout options apart part words <<<"$line"
    if [[ "$layout ${apart%% *}" =~ $only ]]; then
        LAYOUTS+=("$line")
        compared+="|$apart|"
    fi
done
((${#LAYOUTS[@]})) || usage "--only $only chooses no layout"

# The processes that run, and PyTorch's.
jobs=()
peer=
clean_up() {
    local one
    for one in "${jobs[@]}" $peer; do
        kill -TERM "$one" 2>/dev/null || true
    done
    wait
    rm -rf "$folder"
}

if "$python" -c 'import torch' 2>/dev/null; then
    coproc PEER { exec "$python" "$source/benches/peers/layouts.py" "$HEADS" "$WIDTH" "$CONTEXT" "$VOCABULARY" 2>peer.err; }
    peer=$PEER_PID
    read -r -t "$PEER_SECONDS_MAX" torch <&"${PEER[0]}" || { cat peer.err >&2 && fail "PyTorch does not start"; }
else
    torch=
    printf 'layouts: no PyTorch: %s has no torch (PACELINE_BENCH_PYTHON names another Python)\n' "$python" >&2
fi

# A text that so many sequences of a step make WARMUP + STEPS steps of: its last tenth is held out.
text_of() {
    local bytes=$(((WARMUP + STEPS) * $1 * CONTEXT * 10 / 9 + 1))
    { gzip -dc "$source/crates/train/data/shakespeare.txt.gz" || true; } 2>/dev/null | head -c "$bytes" >"text-$1"
}

# median: of the numbers of stdin, one per line.
median() {
    sort -g | awk '{ at[NR] = $1 } END { if (NR) printf "%.6f\n", (at[int((NR + 1) / 2)] + at[int(NR / 2) + 1]) / 2 }'
}

# ours PROCESSES SEQUENCES OPTION...: the median step of jobs at the same time, the slowest one's, in `seconds`.
ours() {
    local processes=$1 sequences=$2 process medians=()
    shift 2
    [[ -f text-$sequences ]] || text_of "$sequences"
    jobs=()
    for ((process = 0; process < processes; process++)); do
        rm -rf "run-$process"
        "$program" train "${JOB[@]}" --data "$PWD/text-$sequences" --global-batch "$sequences" --run-dir "run-$process" "$@" \
            >"run-$process.out" 2>&1 </dev/null &
        jobs+=($!)
    done
    for ((process = 0; process < processes; process++)); do
        if ! wait "${jobs[process]}"; then
            cat "run-$process.out" >&2
            fail "a job of Paceline failed: $*"
        fi
        medians+=("$(sed -nE 's/^\{"kind":"step".*"seconds":([0-9.e-]+).*/\1/p' "run-$process/metrics.jsonl" |
            tail -n +$((WARMUP + 1)) | median)")
    done
    jobs=()
    seconds=$(printf '%s\n' "${medians[@]}" | sort -g | tail -n 1)
}

# theirs LAYOUT RANKS SEQUENCES MICRO LAYERS: the median step of the slowest rank, in `seconds`.
theirs() {
    printf '%s %d %d %d %d %d\n' "$@" "$STEPS" >&"${PEER[1]}"
    read -r -t "$PEER_SECONDS_MAX" seconds <&"${PEER[0]}" && [[ $seconds != failed ]] ||
        { cat peer.err >&2 && fail "a job of PyTorch failed: $*"; }
}

started=$(date -u +%Y-%m-%dT%H:%M:%SZ)
# keep FIELDS: appends a line to the raw results.
keep() {
    printf '{"started":"%s","round":%d,%s}\n' "$started" "$round" "$1" >>"$OUT"
}

# both FIELDS LAYOUT RANKS SEQUENCES MICRO LAYERS PROCESSES OPTIONS: measures and keeps both libraries' step.
both() {
    local fields=$1 layout=$2 ranks=$3 sequences=$4 micro=$5 layers=$6 processes=$7 options
    read -ra options <<<"$8"
    # One shard for each replica of the model.
    [[ $8 == *--shards* ]] || options+=(--shards "$([[ $8 =~ --[pt]p ]] && echo 1 || echo $((ranks / processes)))")
    printf 'round %d of %d: %s, %d ranks:' "$((again + 1))" "$rounds" "$layout" "$ranks" >&2
    ours "$processes" "$sequences" --layers "$layers" --accumulate "$micro" --nproc-per-node $((ranks / processes)) "${options[@]}"
    keep "$fields,\"library\":\"paceline\",\"step_seconds\":$seconds"
    printf ' %s' "$seconds" >&2
    if [[ -n $torch ]]; then
        theirs "$layout" "$ranks" "$sequences" "$micro" "$layers"
        keep "$fields,\"library\":\"torch\",\"step_seconds\":$seconds"
        printf ' %s' "$seconds" >&2
    fi
    printf '\n' >&2
}

round=0
commit=$(git -C "$source" describe --always --dirty 2>/dev/null || true)
cpu=$(sed -nE 's/^model name[[:space:]]*: (.*)/\1/p' /proc/cpuinfo | head -n 1)
keep "\"record\":\"setup\",\"command\":\"$command_line\",\"commit\":\"$commit\",\"machine\":\"$cpu, $(nproc) cores, $(uname -sr)\",\
\"paceline\":\"$("$program" --version)\",\"torch\":\"${torch:-not installed}\",\"rounds\":$rounds"
for ((again = 0; again < rounds; again++)); do
    for group in "${ALL_APART[@]}"; do
        IFS='|' read -r job times <<<"$group"
        [[ $compared == *"|$job|"* ]] || continue
        read -r ranks sequences micro layers <<<"$job"
        for ((time = 1; time <= times; time++)); do
            round=$((again * times + time))
            both "\"record\":\"apart\",\"job\":\"$job\"" apart "$ranks" "$sequences" "$micro" "$layers" "$ranks" ''
            for line in "${LAYOUTS[@]}"; do
                IFS='|' read -r layout options apart part words <<<"$line"
                [[ $apart == "$job" ]] || continue
                both "\"record\":\"layout\",\"layout\":\"$words\",\"ranks\":$ranks,\"options\":\"$options\",\"apart\":\"$job\",\"part\":\"$part\"" \
                    "$layout" "$ranks" "$SEQUENCES" "$micro" "$layers" 1 "$options"
            done
        done
    done
done

"$source/benches/layouts-table.py" "$OUT" "$started"
