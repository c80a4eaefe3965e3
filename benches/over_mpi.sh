#!/usr/bin/env bash
# Measures Paceline's all-reduce over MPI libraries, each beside the library's own, and over TCP. Two ranks on this machine count as two
# hosts, so that all data goes over MPI. Each round starts everything once, one after another, so that changes in the machine's speed
# affect all.
#
# Usage: benches/over_mpi.sh [--rounds R] [--seconds S] [PROGRAM]
#
# PROGRAM is the `paceline` to run, by default target/release/paceline. Raw results are appended to docs/benchmarks/over_mpi.jsonl, in which
# `transport` names the library and its way. Markdown tables of them (benches/tables.py) go to stdout, progress to stderr.
#
# MPICH 4.0 over UCX over TCP is left out: its MPI_Finalize now and then does not return.
#
# Needs Debian's packages openmpi-bin, libopenmpi-dev, mpich and libmpich-dev.

set -euo pipefail

rounds=5
seconds=0.2
while [[ ${1-} == --* ]]; do
    case $1 in
    --rounds) rounds=$2 ;;
    --seconds) seconds=$2 ;;
    *)
        printf 'over_mpi: unknown option %s\n' "$1" >&2
        exit 2
        ;;
    esac
    shift 2
done
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
program=$(realpath "${1-$here/../target/release/paceline}")
out=$here/../docs/benchmarks/over_mpi.jsonl
sizes=(8 1024 65536 1048576 16777216)

folder=$(mktemp -d "${TMPDIR:-/tmp}/paceline-over-mpi.XXXXXX")
trap 'rm -rf "$folder"' EXIT
mpicc.openmpi -O3 "$here/peers/mpi.c" -o "$folder/openmpi" -lm
mpicc.mpich -O3 "$here/peers/mpi.c" -o "$folder/mpich" -lm

openmpi=(mpirun.openmpi --oversubscribe --bind-to none)
if ((EUID == 0)); then
    openmpi+=(--allow-run-as-root)
fi

started=$(date -u +%Y-%m-%dT%H:%M:%SZ)
round=0

# keep WAY: appends the JSON lines of stdin to the raw results.
keep() {
    sed -nE "s/\"transport\":\"mpi\"/\"transport\":\"$1\"/; s/^\\{/{\"started\":\"$started\",\"round\":$round,/p" >>"$out"
}

# bench TRANSPORT LAUNCHER...
bench() {
    local list
    list=$(IFS=, && printf '%s' "${sizes[*]}")
    # shellcheck disable=SC2016
    timeout 300 "${@:2}" -n 2 bash -c 'PACELINE_HOST_ID=${OMPI_COMM_WORLD_RANK-$PMI_RANK} exec "$0" "$@"' \
        "$program" bench all-reduce --transport "$1" --sizes "$list" --seconds "$seconds" --json
}

# both WAY PEER LAUNCHER...: Paceline over a library, and the library itself.
both() {
    printf 'round %d of %d: %s\n' "$round" "$rounds" "$1" >&2
    bench mpi "${@:3}" | keep "$1"
    timeout 300 "${@:3}" -n 2 "$folder/$2" MPI_Allreduce "$1" "$seconds" "${sizes[@]}" | keep "$1"
}

printf '{"record":"setup","command":"benches/over_mpi.sh","commit":"%s","machine":"%s, %s cores, %s","openmpi":"%s","mpich":"%s","rounds":%d}\n' \
    "$(git -C "$here" describe --always --dirty)" "$(sed -nE '/^model name/s/.*: //p' /proc/cpuinfo | head -n 1)" "$(nproc)" "$(uname -sr)" \
    "$(mpirun.openmpi --version | sed -nE '1s/.* //p')" "$(mpiexec.hydra --version | sed -nE 's/^ *Version: *//p')" "$rounds" | keep setup

for ((round = 1; round <= rounds; round++)); do
    both 'Open MPI, shared memory' openmpi "${openmpi[@]}"
    both 'Open MPI, TCP' openmpi "${openmpi[@]}" --mca pml ob1 --mca btl tcp,self
    both 'MPICH, shared memory' mpich mpiexec.hydra
    printf 'round %d of %d: TCP\n' "$round" "$rounds" >&2
    bench tcp "${openmpi[@]}" | keep tcp
done
"$here/tables.py" "$out"
