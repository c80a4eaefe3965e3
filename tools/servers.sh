#!/usr/bin/env bash
# Installs the servers and small tools that some tests need, from Debian's packages with apt-get, if they are missing and this user may.
#
# Usage: tools/servers.sh
#
# Always exits with 0: tests that need a missing server report themselves as skipped. One function for each server.

set -uo pipefail
PATH=$PATH:/usr/sbin # daemons
export DEBIAN_FRONTEND=noninteractive

etcd() {
    # For launchers that meet in etcd: crates/launch/tests/etcd.rs, crates/rendezvous/tests/etcd.rs.
    provide etcd etcd-server
}

slurm() {
    # For launchers and ranks that srun starts: tools/slurm.sh, crates/cli/tests/slurm.rs, crates/rendezvous/tests/schedulers.rs.
    provide slurmd slurmctld slurmd slurm-client munge
}

mpi() {
    # The same for mpirun and mpiexec: crates/cli/tests/mpi.rs, crates/rendezvous/tests/schedulers.rs; and for their libraries:
    # crates/collective/tests/processes/mpi.rs.
    provide mpirun.openmpi openmpi-bin
    provide mpiexec.hydra mpich
}

tools() {
    # To render a man page (crates/cli/tests/options.rs), and to drop packets (crates/doctor/tests/namespaces.rs).
    provide mandoc mandoc
    provide nft nftables
}

# provide PROGRAM PACKAGE...: installs the program if it is not in PATH, or says why it cannot.
provide() {
    local program=$1
    shift
    # `command -v` would find the function of the same name.
    if type -P "$program" >/dev/null; then
        printf '%s: already installed\n' "$program"
    elif ! type -P apt-get >/dev/null; then
        skip "$program" "there is no apt-get: install $* by hand"
    elif ! as_root true; then
        skip "$program" "this user is not root and sudo is refused: run \`apt-get install $*\` as root"
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
    printf '%s: missing, its tests will be skipped; %s\n' "$1" "$2"
}

etcd
slurm
mpi
tools
