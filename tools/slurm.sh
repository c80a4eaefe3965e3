#!/usr/bin/env bash
# Runs a command with its own Slurm cluster: the real daemons of a controller and several nodes, all on this machine and below one
# temporary folder. Nothing of it remains after the command.
#
# Usage: tools/slurm.sh [--nodes N] [--gpus N] COMMAND [ARGS]...
#
#   --nodes N   nodes of 8 cores, called 127.0.0.1, 127.0.0.2, ...: names that resolve to this machine without DNS (default 2)
#   --gpus N    GPUs that each node claims to have (default 0)
#
# The command finds the cluster through SLURM_CONF, as srun and the other clients do. Slurm's slurmctld, slurmd, srun and munged must be installed:
#   apt-get install --no-install-recommends slurmctld slurmd slurm-client munge
# It needs no systemd, cgroups or root.
#
# Exit codes: the command's, 2 wrong usage, 3 Slurm is not installed or does not start.

set -euo pipefail
PATH=$PATH:/usr/sbin

nodes=2
gpus=0
while [[ ${1-} == --* ]]; do
    case $1 in
        --nodes) nodes=${2-} && shift 2 ;;
        --gpus) gpus=${2-} && shift 2 ;;
        --) shift && break ;;
        *) printf 'slurm.sh: unknown option %s\n' "$1" >&2 && exit 2 ;;
    esac
done
if [[ $# -eq 0 || ! $nodes =~ ^[1-9][0-9]?$ || ! $gpus =~ ^[0-9]$ ]]; then
    sed -n 's/^# Usage: /usage: /p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
for program in slurmctld slurmd srun munged mungekey; do
    if ! command -v "$program" >/dev/null; then
        printf 'slurm.sh: %s is not installed: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge\n' \
            "$program" >&2
        exit 3
    fi
done

dir=$(mktemp -d)
chmod 755 "$dir" # munged requires a socket that every user can reach
export SLURM_CONF=$dir/slurm.conf
daemons=()

# shellcheck disable=SC2317 # called by the trap
stop() {
    trap - EXIT
    if ((${#daemons[@]} > 1)); then
        scancel --quiet --full --signal=KILL --user="$(id -un)" || true
        scancel --quiet --user="$(id -un)" || true
        # The steps' processes outlive the nodes' daemons.
        for _ in {1..50}; do
            [[ -n $(squeue --noheader 2>/dev/null) ]] || break
            sleep 0.1
        done
    fi
    if ((${#daemons[@]} > 0)); then
        kill "${daemons[@]}" 2>/dev/null || true
        wait "${daemons[@]}" 2>/dev/null || true
    fi
    rm -rf "$dir"
}

# start NAME COMMAND [ARGS]...
start() {
    local name=$1
    shift
    "$@" >"$dir/$name.log" 2>&1 </dev/null 9<&- &
    daemons+=($!)
}

# free_ports COUNT: prints the first of so many ports in a row on which nothing listens
free_ports() {
    local first port
    while :; do
        first=$((30000 + RANDOM % 2600))
        for ((port = first; port < first + $1; port++)); do
            ! (: <>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || continue 2
        done
        printf '%d\n' "$first"
        return
    done
}

start_all() {
    local port node name
    port=$(free_ports $((nodes + 1)))
    mkdir -p "$dir/state" "$dir/spool"
    cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort=$port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$dir/munge.sock
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5
MinJobAge=2
SchedulerParameters=sched_min_interval=0,sched_interval=1,batch_sched_delay=0,requeue_delay=1
# The ports of a job follow from its id, and other clusters may run on this machine.
FirstJobId=$((1 + RANDOM))
GresTypes=gpu
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
    : >"$dir/gres.conf"
    if ((gpus > 0)); then
        # Slurm only checks that the GPUs' device files exist.
        touch $(seq -f "$dir/gpu%g" "$gpus")
        printf 'NodeName=127.0.0.[1-%d] Name=gpu File=%s\n' "$nodes" "$dir/gpu[1-$gpus]" >"$dir/gres.conf"
    fi
    for ((node = 1; node <= nodes; node++)); do
        printf 'NodeName=127.0.0.%d NodeHostname=%s NodeAddr=127.0.0.1 Port=%d CPUs=8 Gres=gpu:%d\n' \
            "$node" "$(hostname)" $((port + node)) "$gpus" >>"$SLURM_CONF"
        mkdir -p "$dir/spool/127.0.0.$node"
    done
    start munged munged --foreground --force --key-file="$dir/munge.key" --socket="$dir/munge.sock" \
        --pid-file="$dir/munge.pid" --log-file="$dir/munge.log" --seed-file="$dir/munge.seed"
    start slurmctld slurmctld -D
    for ((node = 1; node <= nodes; node++)); do
        name=127.0.0.$node
        start "slurmd-$name" slurmd -D -N "$name"
    done
    for _ in {1..150}; do
        if [[ $(sinfo --noheader --states=idle --format=%D 2>/dev/null) == "$nodes" ]]; then
            return 0
        fi
        sleep 0.1
    done
    return 1
}

trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
mungekey --create --keyfile="$dir/munge.key"
# One cluster starts at a time: it takes its ports before the next one looks.
exec 9<"${BASH_SOURCE[0]}"
flock 9
if ! start_all; then
    printf 'slurm.sh: Slurm does not start; the last lines of its daemons:\n' >&2
    tail -n 5 "$dir"/*.log >&2
    exit 3
fi
exec 9<&-
code=0
"$@" || code=$?
exit "$code"
