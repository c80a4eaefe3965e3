#!/usr/bin/env bash
# Measures Paceline's all-reduce against Gloo's and Open MPI's in one run. Each round starts every library once, one after
# another, so that changes in the machine's speed affect all of them.
#
# Usage: benches/collectives.sh [--rounds R] [--seconds S] [--sizes BYTES,...] [--out FILE] [PROGRAM]
#
# PROGRAM is the `paceline` to run, by default target/release/paceline. Raw results, one JSON object per line, are appended
# to FILE, by default docs/benchmarks/collectives.jsonl. Markdown tables of that file (benches/tables.py) go to stdout,
# progress to stderr.
#
# Libraries that are not installed are reported and left out:
#   Gloo      torch in the Python that PACELINE_BENCH_PYTHON names, by default python3; started by torchrun's module
#   Open MPI  mpicc.openmpi and mpirun.openmpi, or mpicc and mpirun if they are Open MPI's
#
# Exit codes: 0 done, 1 something failed, 2 wrong usage, 128 + n ended by signal n.

set -euo pipefail

# Time limit of one run of one library.
readonly START_SECONDS_MAX=600

fail() {
    printf 'collectives: %s\n' "$*" >&2
    exit 1
}

usage() {
    printf 'collectives: %s\nusage: benches/collectives.sh [--rounds R] [--seconds S] [--sizes BYTES,...] %s\n' "$*" \
        '[--out FILE] [PROGRAM]' >&2
    exit 2
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
command_line="benches/collectives.sh${*:+ $*}"
rounds=5
seconds=0.5
# 8 B, 1 KiB, 64 KiB, 1 MiB, 4 MiB, 16 MiB, 64 MiB
sizes=8,1024,65536,1048576,4194304,16777216,67108864
out=$here/../docs/benchmarks/collectives.jsonl
program=$here/../target/release/paceline
while (($# > 0)); do
    case $1 in
    --rounds)
        [[ ${2-} =~ ^[1-9][0-9]{0,2}$ ]] || usage "--rounds takes a number from 1 to 999"
        rounds=$2
        shift 2
        ;;
    --seconds)
        [[ ${2-} =~ ^[0-9]{1,3}(\.[0-9]{1,3})?$ && $2 =~ [1-9] ]] || usage "--seconds takes a number above 0"
        seconds=$2
        shift 2
        ;;
    --sizes)
        [[ ${2-} =~ ^[1-9][0-9]{0,9}(,[1-9][0-9]{0,9})*$ ]] || usage "--sizes takes numbers of bytes"
        sizes=$2
        shift 2
        ;;
    --out)
        [[ -n ${2-} ]] || usage "--out takes a file"
        out=$2
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

IFS=, read -ra size_list <<<"$sizes"

# The ranks must not inherit settings or a rank from the caller's environment.
python=${PACELINE_BENCH_PYTHON:-python3}
for variable in "${!PACELINE_@}" "${!SLURM_@}" "${!TORCHELASTIC_@}" RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE; do
    unset "$variable"
done

folder=$(mktemp -d "${TMPDIR:-/tmp}/paceline-collectives.XXXXXX")
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

# quoted TEXT: as a JSON string.
quoted() {
    local text=${1//\\/\\\\}
    text=${text//\"/\\\"}
    printf '"%s"' "${text//[[:cntrl:]]/ }"
}

# --- Installed libraries ---

torch=
torchrun=()
if torch=$("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null); then
    torchrun=("$python" -m torch.distributed.run)
else
    printf 'collectives: no Gloo: %s has no torch (PACELINE_BENCH_PYTHON names another Python)\n' "$python" >&2
fi

# first NAME...: the first of these programs that is installed.
first() {
    local name
    for name; do
        command -v "$name" && return
    done
    return 1
}

mpi=
if mpicc=$(first mpicc.openmpi mpicc) && mpirun=$(first mpirun.openmpi mpirun) &&
    mpi=$("$mpirun" --version 2>/dev/null | sed -nE '1s/.*\((Open MPI|OpenRTE)\) ([0-9.]+).*/\2/p') && [[ -n $mpi ]]; then
    "$mpicc" -O3 "$here/peers/mpi.c" -o "$folder/mpi" -lm || fail "$mpicc cannot compile benches/peers/mpi.c"
else
    mpi=
    printf 'collectives: no Open MPI: its mpicc and mpirun are not installed\n' >&2
fi

# By default mpirun refuses to run as root, or with more ranks than cores.
mpirun_options=(--oversubscribe)
if ((EUID == 0)); then
    mpirun_options+=(--allow-run-as-root)
fi

# --- Measuring ---

started=$(date -u +%Y-%m-%dT%H:%M:%SZ)
round=0

# keep: appends the JSON lines of stdin to the raw results, with the round and the start time of the whole run.
keep() {
    sed -nE "s/^\\{/{\"started\":\"$started\",\"round\":$round,/p" >>"$out"
}

# measure WHAT COMMAND...: runs a library and keeps its results.
measure() {
    local code=0
    printf 'round %d of %d: %s\n' "$round" "$rounds" "$1" >&2
    timeout --signal=TERM --kill-after=10 "$START_SECONDS_MAX" "${@:2}" >"$folder/out" 2>"$folder/err" </dev/null &
    job=$!
    wait "$job" || code=$?
    job=
    if ((code != 0)); then
        cat "$folder/out" "$folder/err" >&2
        fail "$1 ended with exit code $code"
    fi
    keep <"$folder/out"
}

# paceline RANKS TRANSPORT MEMORY
paceline() {
    measure "paceline, $1 ranks, $2, $3 memory" "$program" bench all-reduce --nproc-per-node "$1" --transport "$2" \
        --memory "$3" --sizes "$sizes" --seconds "$seconds" --json
}

# gloo RANKS
gloo() {
    if [[ -n $torch ]]; then
        measure "Gloo, $1 ranks" "${torchrun[@]}" --standalone --nproc-per-node "$1" "$here/peers/gloo.py" "$seconds" \
            "${size_list[@]}"
    fi
}

# openmpi RANKS TRANSPORT
openmpi() {
    if [[ -n $mpi ]]; then
        local wire=()
        if [[ $2 == tcp ]]; then
            wire=(--mca pml ob1 --mca btl "tcp,self")
        fi
        measure "Open MPI, $1 ranks, $2" "$mpirun" "${mpirun_options[@]}" "${wire[@]}" -n "$1" "$folder/mpi" openmpi \
            "$2" "$seconds" "${size_list[@]}"
    fi
}

commit=$(git -C "$here" describe --always --dirty 2>/dev/null || true)
cpu=$(sed -nE 's/^model name[[:space:]]*: (.*)/\1/p' /proc/cpuinfo | head -n 1)
version=$("$program" --version)
printf '{"record":"setup","command":%s,"commit":%s,"machine":%s,"paceline":%s,"torch":%s,"openmpi":%s,"rounds":%d}\n' \
    "$(quoted "$command_line")" "$(quoted "${commit:-unknown}")" \
    "$(quoted "${cpu:-unknown}, $(nproc) cores, $(uname -sr)")" "$(quoted "$version")" \
    "$(quoted "${torch:-not installed}")" "$(quoted "${mpi:-not installed}")" "$rounds" | keep

for ((round = 1; round <= rounds; round++)); do
    paceline 2 shm arena
    gloo 2
    paceline 2 shm ordinary
    openmpi 2 shm
    paceline 2 tcp arena
    openmpi 2 tcp
    paceline 4 shm arena
    gloo 4
    openmpi 4 shm
done

"$here/tables.py" "$out"
