//! Under a real mpirun: launchers that find their place without any option.
//!
//! Its second machine is this one under another name, reached by a stand-in for ssh.

#[path = "schedulers/support.rs"]
mod support;

use support::{Ended, Site, has};

const SAY: &str = "echo at $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE on node $GROUP_RANK of \
                   $GROUP_WORLD_SIZE meet $MASTER_ADDR";
const TOKEN: &str = "export PACELINE_JOB_TOKEN=$(printf '0f%.0s' {1..32});";
/// ssh's options, the host, and then the command: it runs here, with the host's own folder for temporary files. Two daemons of
/// Open MPI that make their folders in one place at the same moment may both fail.
const SSH: &str = "while [[ $1 == -* ]]; do shift; done; export TMPDIR=$TMPDIR/$1; mkdir -p $TMPDIR; shift; \
                   exec sh -c \"$*\"";
/// Without Open MPI's shared topology: of two of its daemons on one machine, as "nodes" are here, one crashes in it now and
/// then (4.1.4, `hwloc_shmem_topology_write`).
const OPEN_MPI: &str = "mpirun.openmpi --allow-run-as-root --oversubscribe -mca rtc ^hwloc -mca plm_rsh_agent ./ssh.sh";
const HYDRA: &str = "mpiexec.hydra -launcher ssh -launcher-exec ./ssh.sh";

fn site() -> Site {
    let site = Site::new(SAY);
    site.script("ssh.sh", SSH);
    site
}

fn has_open_mpi() -> bool {
    let how = "apt-get install --no-install-recommends openmpi-bin";
    has(&["mpirun.openmpi"], how)
}

fn has_hydra() -> bool {
    let how = "apt-get install --no-install-recommends mpich";
    has(&["mpiexec.hydra"], how)
}

fn four_ranks_on_two_nodes(ended: &Ended) {
    ended.ends_with(0);
    let ranks = ended.ranks();
    assert_eq!(ranks.len(), 4, "{ended:?}");
    for (rank, line) in ranks.iter().enumerate() {
        let (local, node) = (rank % 2, rank / 2);
        let start = format!("at {rank} of 4, {local} of 2 on node {node} of 2 meet ");
        assert!(line.starts_with(&start), "{line}");
    }
}

#[test]
fn mpirun_alone_places_launchers_under_real_open_mpi() {
    if !has_open_mpi() {
        return;
    }
    let run = "$LAUNCHER run --nproc-per-node 2 --log-dir /dev/null ./rank.sh";
    let line = format!("{TOKEN} {OPEN_MPI} --host $(hostname),127.0.0.2 -npernode 1 {run}");
    let ended = site().run(&[], &line);
    four_ranks_on_two_nodes(&ended);
    ended.says("Open MPI's job: 2 nodes, this is node 1, meeting at ");
}

#[test]
fn rank_0_on_another_machine_than_mpirun_has_to_be_named_under_real_open_mpi() {
    if !has_open_mpi() {
        return;
    }
    let run = "$LAUNCHER run --nproc-per-node 2 --log-dir /dev/null ./rank.sh";
    let hosts = "--host 127.0.0.2,127.0.0.3 -npernode 1";
    let ended = site().run(&[], &format!("{TOKEN} {OPEN_MPI} {hosts} {run}"));
    ended
        .ends_with(2)
        .says("do not name rank 0's machine")
        .says("mpirun -x MASTER_ADDR=HOST");
    let line = format!("{TOKEN} {OPEN_MPI} {hosts} -x MASTER_ADDR=127.0.0.1 {run}");
    four_ranks_on_two_nodes(&site().run(&[], &line));
}

#[test]
fn mpiexec_with_an_address_places_launchers_under_real_hydra() {
    if !has_hydra() {
        return;
    }
    let run = "$LAUNCHER run --nproc-per-node 2 --log-dir /dev/null ./rank.sh";
    let hosts = "-hosts 127.0.0.1,127.0.0.2 -n 2 -ppn 1";
    let named = "-genv MASTER_ADDR 127.0.0.1";
    four_ranks_on_two_nodes(&site().run(&[], &format!("{TOKEN} {HYDRA} {hosts} {named} {run}")));
    let ended = site().run(&[], &format!("{TOKEN} {HYDRA} {hosts} {run}"));
    assert_ne!(ended.code, Some(0));
    ended.says("mpiexec -genv MASTER_ADDR HOST");
}

#[test]
fn two_launchers_on_one_node_are_refused_under_real_open_mpi() {
    if !has_open_mpi() {
        return;
    }
    let ended = site().run(&[], &format!("{OPEN_MPI} -n 2 $LAUNCHER run ./rank.sh"));
    ended
        .ends_with(2)
        .says("Open MPI started 2 launchers on one node")
        .says("`mpirun -npernode 1 paceline run --nproc-per-node 2 PROGRAM`");
    assert!(ended.ranks().is_empty(), "{ended:?}");
}
