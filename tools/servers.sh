#!/usr/bin/env bash
# Installs the servers that some tests start, where they are absent and this user may: Debian's packages, by apt-get.
#
# Usage: tools/servers.sh
#
# Always exits with 0: tests that need a server which is not there say SKIPPED. One function for each server.

set -uo pipefail
PATH=$PATH:/usr/sbin # daemons
export DEBIAN_FRONTEND=noninteractive

etcd() {
    # Launchers that meet in etcd: crates/launch/tests/etcd.rs, crates/rendezvous/tests/etcd.rs.
    provide etcd etcd-server
}

slurm() {
    # Launchers and ranks that srun starts: tools/slurm.sh, crates/cli/tests/slurm.rs, crates/rendezvous/tests/schedulers.rs.
    provide slurmd slurmctld slurmd slurm-client munge
}

mpi() {
    # The same of mpirun and mpiexec: crates/cli/tests/mpi.rs, crates/rendezvous/tests/schedulers.rs.
    provide mpirun.openmpi openmpi-bin
    provide mpiexec.hydra mpich
}

# provide PROGRAM PACKAGE...: has the program in PATH, or says why not.
provide() {
    local program=$1
    shift
    # Not `command -v`, which would find the function of the same name here.
    if type -P "$program" >/dev/null; then
        printf '%s: is there\n' "$program"
    elif ! type -P apt-get >/dev/null; then
        skip "$program" "install $* by hand: there is no apt-get here"
    elif ! as_root true; then
        skip "$program" "run \`apt-get install $*\` as root: this user may not"
    elif install "$@"; then
        printf '%s: installed\n' "$program"
    else
        skip "$program" "\`apt-get install $*\` failed, see above"
    fi
}

install() {
    local apt=(apt-get -qq -o DPkg::Lock::Timeout=120 -o Acquire::Retries=2)
    as_root "${apt[@]}" install --yes --no-install-recommends "$@" ||
        { as_root "${apt[@]}" update && as_root "${apt[@]}" install --yes --no-install-recommends "$@"; }
}

as_root() {
    if ((EUID == 0)); then
        "$@"
    else
        sudo --non-interactive --preserve-env=DEBIAN_FRONTEND "$@" 2>/dev/null
    fi
}

# skip PROGRAM WHAT_TO_DO
skip() {
    printf '%s: ABSENT, its tests will say SKIPPED; %s\n' "$1" "$2"
}

etcd
slurm
mpi
