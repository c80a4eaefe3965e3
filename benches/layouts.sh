#!/usr/bin/env bash
# Measures how much time each layout of a language model over ranks adds to a training step, in Paceline and in PyTorch. Each
# round runs every job once, Paceline's and PyTorch's in turn, so that changes in the machine's speed affect both.
#
# Usage: benches/layouts.sh [--only REGEX] [--rounds N] [PROGRAM]
#
# REGEX chooses layouts by PyTorch's job and number of ranks, such as 'gpipe 4'; by default all. PROGRAM is the `paceline` to run, by default target/release/paceline. Raw results, one JSON object per line, are appended
# to docs/benchmarks/layouts.jsonl. A Markdown table of this run (benches/layouts-table.py) goes to stdout, progress to stderr.
# A round of all layouts takes about a minute.
#
# Without PyTorch in the Python that PACELINE_BENCH_PYTHON names, by default python3, only Paceline is measured.
#
# Exit codes: 0 done, 1 something failed, 2 wrong usage, 128 + n ended by signal n.

set -euo pipefail
python=${PACELINE_BENCH_PYTHON:-python3}
readonly SYNOPSIS='benches/layouts.sh [--only REGEX] [--rounds N] [PROGRAM]' OPTION=rounds DEFAULT=9
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
readonly LAYERS=4 HEADS=4 WIDTH=256 CONTEXT=64 SEQUENCES=8
# Steps of a job that count, after those that warm it up, which PyTorch's script leaves out too.
readonly STEPS=8 WARMUP=3
# Micro-batches of a pipeline.
readonly MICRO=4
# Bytes, and the separator between texts.
readonly VOCABULARY=257
# Time limit of one of PyTorch's jobs.
readonly PEER_SECONDS_MAX=120

# What Paceline's jobs have in common.
readonly JOB=(--task lm --layers "$LAYERS" --heads "$HEADS" --width "$WIDTH" --context "$CONTEXT" --dropout 0 --epochs 1 --keep 1
    --threads-per-rank 1 --usage off --timeout-seconds 60)

# NAME OF PYTORCH'S JOB|RANKS|SEQUENCES OF A RANK|MICRO-BATCHES|OPTIONS: ranks that compute without each other.
readonly ALL_APART=(
    'apart|1|8|1|'
    'apart|2|4|1|'
    'apart|4|2|1|'
    'apart|2|8|1|'
    "apart|2|8|$MICRO|"
    "apart|4|8|$MICRO|"
)

# NAME OF PYTORCH'S JOB|RANKS|MICRO-BATCHES|OPTIONS|THE SAME COMPUTED APART|ITS PART OF THAT TIME|WHAT BOTH DO. A rank of a
# data-parallel job computes its own sequences. W ranks that share the layers or matrices of one model compute all of them
# in 1 / W of the time, and a pipeline of M micro-batches waits for (W - 1) / M of that. A backward pass costs two forward
# passes, so another one of these takes a third more.
readonly ALL_LAYOUTS=(
    'recompute|1|1|--recompute blocks|apart 1 8 1|4/3|recomputed blocks; `torch.utils.checkpoint`'
    'ddp|2|1||apart 2 4 1|1/1|DDP; `DistributedDataParallel`'
    'zero1|2|1|--zero 1|apart 2 4 1|1/1|ZeRO-1; `ZeroRedundancyOptimizer`'
    'zero2|2|1|--zero 2|apart 2 4 1|1/1|ZeRO-2; FSDP2, `reshard_after_forward=False`'
    'zero3|2|1|--zero 3|apart 2 4 1|1/1|ZeRO-3, which recomputes blocks; FSDP2'
    "gpipe|2|$MICRO|--pp 2 --schedule gpipe|apart 2 8 $MICRO|5/8|GPipe; \`ScheduleGPipe\`"
    "1f1b|2|$MICRO|--pp 2 --schedule 1f1b|apart 2 8 $MICRO|5/8|1F1B; \`Schedule1F1B\`"
    'tp|2|1|--tp 2|apart 2 8 1|1/2|tensor parallel; `parallelize_module`'
    'ddp|4|1||apart 4 2 1|1/1|DDP; `DistributedDataParallel`'
    'zero1|4|1|--zero 1|apart 4 2 1|1/1|ZeRO-1; `ZeroRedundancyOptimizer`'
    'zero2|4|1|--zero 2|apart 4 2 1|1/1|ZeRO-2; FSDP2, `reshard_after_forward=False`'
    'zero3|4|1|--zero 3|apart 4 2 1|1/1|ZeRO-3, which recomputes blocks; FSDP2'
    "gpipe|4|$MICRO|--pp 4 --pp-cuts 2,3,4 --schedule gpipe|apart 4 8 $MICRO|7/16|GPipe; \`ScheduleGPipe\`"
    "1f1b|4|$MICRO|--pp 4 --pp-cuts 2,3,4 --schedule 1f1b|apart 4 8 $MICRO|7/16|1F1B; \`Schedule1F1B\`"
)

LAYOUTS=()
compared=
for line in "${ALL_LAYOUTS[@]}"; do
    IFS='|' read -r layout ranks micro options apart part words <<<"$line"
    if [[ "$layout $ranks" =~ $only ]]; then
        LAYOUTS+=("$line")
        compared+="|$apart|"
    fi
done
((${#LAYOUTS[@]})) || usage "--only $only chooses no layout"
APART=()
for line in "${ALL_APART[@]}"; do
    IFS='|' read -r layout ranks sequences micro options <<<"$line"
    [[ $compared != *"|$layout $ranks $sequences $micro|"* ]] || APART+=("$line")
done

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
    coproc PEER { exec "$python" "$source/benches/peers/layouts.py" "$LAYERS" "$HEADS" "$WIDTH" "$CONTEXT" "$VOCABULARY" 2>peer.err; }
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

# theirs LAYOUT RANKS SEQUENCES MICRO: the median step of the slowest rank, in `seconds`.
theirs() {
    printf '%s %d %d %d %d\n' "$@" "$STEPS" >&"${PEER[1]}"
    read -r -t "$PEER_SECONDS_MAX" seconds <&"${PEER[0]}" && [[ $seconds != failed ]] ||
        { cat peer.err >&2 && fail "a job of PyTorch failed: $*"; }
}

started=$(date -u +%Y-%m-%dT%H:%M:%SZ)
# keep FIELDS: appends a line to the raw results.
keep() {
    printf '{"started":"%s","round":%d,%s}\n' "$started" "$round" "$1" >>"$OUT"
}

# both FIELDS PROCESSES SEQUENCES MICRO OPTIONS LAYOUT RANKS: measures and keeps both libraries' step.
both() {
    local options
    read -ra options <<<"$5"
    printf 'round %d of %d: %s, %d ranks:' "$round" "$rounds" "$6" "$7" >&2
    ours "$2" "$3" --accumulate "$4" --shards "$(shards_of "$@")" --nproc-per-node $(($7 / $2)) "${options[@]}"
    keep "$1,\"library\":\"paceline\",\"step_seconds\":$seconds"
    printf ' %s' "$seconds" >&2
    if [[ -n $torch ]]; then
        theirs "$6" "$7" "$3" "$4"
        keep "$1,\"library\":\"torch\",\"step_seconds\":$seconds"
        printf ' %s' "$seconds" >&2
    fi
    printf '\n' >&2
}

# shards_of, with the arguments of `both`: one for each replica of the model.
shards_of() {
    case $5 in
    *--pp* | *--tp*) echo 1 ;;
    *) echo $(($7 / $2)) ;;
    esac
}

round=0
commit=$(git -C "$source" describe --always --dirty 2>/dev/null || true)
cpu=$(sed -nE 's/^model name[[:space:]]*: (.*)/\1/p' /proc/cpuinfo | head -n 1)
keep "\"record\":\"setup\",\"command\":\"$command_line\",\"commit\":\"$commit\",\"machine\":\"$cpu, $(nproc) cores, $(uname -sr)\",\
\"paceline\":\"$("$program" --version)\",\"torch\":\"${torch:-not installed}\",\"rounds\":$rounds"
for ((round = 1; round <= rounds; round++)); do
    for line in "${APART[@]}"; do
        IFS='|' read -r layout ranks sequences micro options <<<"$line"
        both "\"record\":\"apart\",\"job\":\"$layout $ranks $sequences $micro\"" "$ranks" "$sequences" "$micro" "$options" "$layout" "$ranks"
    done
    for line in "${LAYOUTS[@]}"; do
        IFS='|' read -r layout ranks micro options apart part words <<<"$line"
        both "\"record\":\"layout\",\"layout\":\"$words\",\"ranks\":$ranks,\"options\":\"$options\",\"apart\":\"$apart\",\"part\":\"$part\"" \
            1 "$SEQUENCES" "$micro" "$options" "$layout" "$ranks"
    done
done

"$source/benches/layouts-table.py" "$OUT" "$started"
