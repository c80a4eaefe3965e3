#!/usr/bin/env bash
# Runs programs that were built with CUDA on a machine without a GPU, with the stand-in for NVIDIA's driver and NCCL: three models; a
# language model in each stage of ZeRO, under each schedule of a pipeline, in parts, in meshes of these on four devices, and on several
# devices of one process; its plan; and a job that loses a rank. Burn compiles its kernels, which then do nothing; everything around them
# happens as on a device. It reports failures on that path. The computed numbers are meaningless.
#
# Usage: tools/gpu/dry.sh [--ptxas FILE] PROGRAMS
#
# PROGRAMS is the folder with `paceline` and `step_time`, such as the one that tools/gpu/pack.sh makes. CUDA_PATH is a folder with
# nvvm/libdevice/libdevice.10.bc. With --ptxas, NVIDIA's assembler assembles every kernel. Both are in a CUDA toolkit, and in pip's
# package nvidia-cuda-nvcc-cu12. The script builds the stand-in.
#
# Exit codes: 0 success, 1 something failed, 2 wrong usage or a missing file.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

usage() {
    printf 'dry: %s\nusage: tools/gpu/dry.sh [--ptxas FILE] PROGRAMS\n' "$*" >&2
    exit 2
}

ptxas=
programs=
while (($# > 0)); do
    case $1 in
    --ptxas)
        ptxas=$(realpath -e "${2-}") || usage "--ptxas takes a file"
        shift 2
        ;;
    -*) usage "unknown option $1" ;;
    *)
        [[ -z $programs ]] || usage "one folder only"
        programs=$(realpath -e "$1") || usage "$1 does not exist"
        shift
        ;;
    esac
done
[[ -x $programs/paceline && -x $programs/step_time ]] || usage "PROGRAMS must be a folder with paceline and step_time"
[[ -f ${CUDA_PATH-}/nvvm/libdevice/libdevice.10.bc ]] || usage "CUDA_PATH must be a folder with nvvm/libdevice/libdevice.10.bc"

cargo build --quiet --package paceline-fake-cuda
work=$(mktemp -d "${TMPDIR:-/tmp}/paceline-dry.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir "$work/lib" "$work/ptx"
cp "${CARGO_TARGET_DIR:-target}/debug/libpaceline_fake_cuda.so" "$work/lib/libcuda.so.1"
# Burn looks for the first name. NCCL is the same file.
ln -s libcuda.so.1 "$work/lib/libcuda.so"
ln -s libcuda.so.1 "$work/lib/libnccl.so.2"
export LD_LIBRARY_PATH=$work/lib CUDA_PATH RUST_BACKTRACE=0
unset CUDA_VISIBLE_DEVICES

# The compute capability of an H100, for which kernels are compiled.
readonly device='{"capability":[9,0],"memory_mib":8192}'
failed=0

# part NAME RANKS OPTION...: a few steps of every model, with one device for each rank.
part() {
    local name=$1 ranks=$2 list=$device model more begun=$SECONDS words=ok
    shift 2
    for ((more = 1; more < ranks; more++)); do list+=",$device"; done
    export PACELINE_FAKE_CUDA="{\"devices\":[$list],\"foreign_kernels\":\"$work/ptx\"}"
    for model in mlp gpt resnet20; do
        # Weights are whatever was in memory before, so ranks may differ, and the job may end with that error.
        if ! timeout 120 "$programs/paceline" run --nproc-per-node "$ranks" --log-dir "$work/log" "$programs/step_time" \
            --device cuda --workload "$model" --steps 2 --warmup 1 --batch 2 "$@" >"$work/out" 2>&1 &&
            ! grep -q 'weights differ between ranks' "$work/out" ||
            grep -rqE "thread 'DS[UD]-" "$work/out" "$work/log"; then
            words=FAILED
            failed=1
            printf -- '--- %s, %s\n' "$name" "$model"
            cat "$work/out"
        fi
        rm -rf "$work/log"
    done
    printf '%-7s %3d s  %s\n' "$words" $((SECONDS - begun)) "$name"
}

# layout NAME DEVICES WORD...: a command with a language model, which these words are, on so many devices.
layout() {
    local name=$1 devices=$2 list=$device more begun=$SECONDS words=ok
    shift 2
    for ((more = 1; more < devices; more++)); do list+=",$device"; done
    export PACELINE_FAKE_CUDA="{\"devices\":[$list],\"foreign_kernels\":\"$work/ptx\"}"
    if ! timeout 120 "$@" >"$work/out" 2>&1 &&
        ! grep -rq 'weights differ between ranks' "$work/out" "$work/log" ||
        grep -rqE "thread 'DS[UD]-" "$work/out" "$work/log"; then
        words=FAILED
        failed=1
        printf -- '--- %s\n' "$name"
        cat "$work/out"
    fi
    rm -rf "$work/run" "$work/log"/*
    printf '%-7s %3d s  %s\n' "$words" $((SECONDS - begun)) "$name"
}

part 'one rank' 1
part 'one rank in bf16' 1 --precision bf16
part 'two ranks, tree' 2
part 'two ranks, ring, bf16 between them' 2 --reduction ring --comm-hook bf16

for ((line = 0; line < 64; line++)); do
    printf '%d bottles on the wall, and one of them falls down\n' "$line"
done >"$work/text"
mkdir -p "$work/log"
text=(--task lm --data "$work/text" --device cuda --usage off --layers 2 --heads 2 --width 32 --context 32
    --global-batch 8 --shards 2 --accumulate 2 --clip-norm 1)
lm=("$programs/paceline" train "${text[@]}" --run-dir "$work/run")
# Twelve steps.
once=("${lm[@]}" --epochs 1)
for words in '--zero 1' '--zero 2' '--zero 3' '--recompute blocks' '--tp 2' '--tp 2 --sequence-parallel on' \
    '--pp 2 --schedule gpipe' '--pp 2 --schedule 1f1b' '--pp 2 --schedule interleaved' '--pp 2 --schedule zb-h1'; do
    # shellcheck disable=SC2086 # several words
    layout "two ranks, $words" 2 "${once[@]}" --nproc-per-node 2 $words
done
for words in '--pp 2' '--tp 2' '--pp 2 --tp 2' '--zero 3 --pp 2' '--zero 3 --tp 2'; do
    # shellcheck disable=SC2086
    layout "four ranks, $words" 4 "${once[@]}" --nproc-per-node 4 $words
done
for strategy in dp model; do
    layout "one rank, --strategy $strategy --devices 2" 2 "${once[@]}" --strategy "$strategy" --devices 2
done
layout 'plan of two ranks' 2 "$programs/paceline" plan "${text[@]}" --nproc-per-node 2
# It is killed after eight seconds, when the ranks train, and before the last step.
layout 'two ranks, one of them lost' 2 "$programs/paceline" chaos --kills 1 --seed 3 --faults kill --every-seconds 12 \
    --log-dir "$work/log" -- \
    "${lm[@]}" --epochs 16 --nproc-per-node 2 --recovery live

kernels=$(find "$work/ptx" -name '*.ptx' | wc -l)
printf '%d kernels compiled\n' "$kernels"
if ((kernels == 0)); then
    failed=1
fi
if [[ -n $ptxas ]]; then
    refused=0
    for file in "$work"/ptx/*.ptx; do
        target=$(awk '$1 == ".target" { sub(",.*", "", $2); print $2; exit }' "$file")
        if ! "$ptxas" -arch="$target" -o /dev/null "$file" >"$work/out" 2>&1; then
            refused=$((refused + 1))
            head -n 3 "$work/out"
        fi
    done
    printf '%d of them rejected by %s\n' "$refused" "$("$ptxas" --version | tail -n 1)"
    ((refused == 0)) || failed=1
fi
exit "$failed"
