//! Environments of schedulers as tables: what they mean to a launcher, and what their faults are called.

use proptest::prelude::*;

use super::*;
use crate::env::{EnvError, WorkerEnv};

type Vars<'a> = &'a [(&'a str, &'a str)];

fn lookup(vars: Vars<'_>, changes: Vars<'_>, name: &str) -> Option<String> {
    let all = changes.iter().chain(vars);
    all.clone()
        .find(|(key, _)| *key == name)
        .map(|(_, value)| (*value).to_owned())
}

fn no_pod() -> Pod {
    unreachable!("only a pod's names are looked at")
}

fn found(vars: Vars<'_>, changes: Vars<'_>) -> Result<Option<Found>, SchedulerError> {
    detect(&|name| lookup(vars, changes, name), &no_pod)
}

fn rank(vars: Vars<'_>, changes: Vars<'_>) -> Result<WorkerEnv, EnvError> {
    WorkerEnv::from_lookup(&|name| lookup(vars, changes, name))
}

/// What Slurm 22.05 sets for task 1 of `srun -N2 --ntasks-per-node=1`.
const STEP: Vars<'_> = &[
    ("SLURMD_NODENAME", "gpu02"),
    ("SLURM_GTIDS", "1"),
    ("SLURM_JOB_ID", "812"),
    ("SLURM_JOB_NODELIST", "gpu[01-04]"),
    ("SLURM_JOB_NUM_NODES", "4"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NNODES", "2"),
    ("SLURM_NODEID", "1"),
    ("SLURM_NTASKS", "2"),
    ("SLURM_PROCID", "1"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NODELIST", "gpu[01-02]"),
    ("SLURM_STEP_NUM_NODES", "2"),
    ("SLURM_STEP_NUM_TASKS", "2"),
    ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"),
];

/// What Slurm 22.05 sets for a batch script on two nodes.
const BATCH: Vars<'_> = &[
    ("SLURMD_NODENAME", "gpu01"),
    ("SLURM_JOB_ID", "812"),
    ("SLURM_JOB_NODELIST", "gpu[01-02]"),
    ("SLURM_JOB_NUM_NODES", "2"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NNODES", "2"),
    ("SLURM_NODEID", "0"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_PROCID", "0"),
    ("SLURM_TASKS_PER_NODE", "3,1"),
];

/// What Open MPI 4.1 sets for rank 1 of two machines, `mpirun` on the first.
const OPEN_MPI_4: Vars<'_> = &[
    ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
    ("OMPI_COMM_WORLD_NODE_RANK", "0"),
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    (
        "OMPI_MCA_orte_hnp_uri",
        "821952512.0;tcp://192.0.2.2:51783;tcp6://[fd00::2]:42453",
    ),
    (
        "OMPI_MCA_orte_local_daemon_uri",
        "821952512.1;tcp://192.0.2.3:55517;tcp6://[fd00::3]:45107",
    ),
    ("PMIX_HOSTNAME", "node2"),
    ("PMIX_NAMESPACE", "821952513"),
];

/// What Open MPI 5.0 sets for rank 1 of two machines, `mpirun` on the first.
const OPEN_MPI_5: Vars<'_> = &[
    ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("PMIX_HOSTNAME", "node-2"),
    ("PMIX_NAMESPACE", "prterun-node-1-23597@1"),
];

/// What Hydra 4.0 sets for rank 1 of two machines.
const HYDRA: Vars<'_> = &[
    ("MPI_LOCALNRANKS", "1"),
    ("MPI_LOCALRANKID", "0"),
    ("PMI_FD", "12"),
    ("PMI_RANK", "1"),
    ("PMI_SIZE", "2"),
];

const POD: Vars<'_> = &[
    ("JOB_COMPLETION_INDEX", "3"),
    ("KUBERNETES_SERVICE_HOST", "10.96.0.1"),
];

#[test]
fn a_slurm_step_places_the_launcher() {
    let found = found(STEP, &[]).unwrap().unwrap();
    assert_eq!((found.nodes, found.node_rank), (Some(2), 1));
    assert_eq!(found.host.as_deref(), Some("gpu02"));
    assert_eq!(
        (found.master_addr, found.master_port),
        (Ok("gpu01".to_owned()), 11_624)
    );
    assert_eq!(
        (
            found.job.as_str(),
            found.run_id.as_str(),
            found.restart_count
        ),
        ("Slurm step 812.0", "slurm-812.0", 0)
    );
    assert_eq!(found.advice, None);
}

#[test]
fn a_requeued_job_counts_its_starts() {
    let restarted = [("SLURM_RESTART_COUNT", "2")];
    assert_eq!(found(STEP, &restarted).unwrap().unwrap().restart_count, 2);
    assert_eq!(found(BATCH, &restarted).unwrap().unwrap().restart_count, 2);
}

#[test]
fn without_srun_an_allocation_is_one_node_and_advice() {
    // Slurm gives the shell of salloc, the batch script and the rest steps with numbers of their own.
    for own in ["4294967290", "4294967291", "4294967292", ""] {
        let found = found(BATCH, &[("SLURM_STEP_ID", own)]).unwrap().unwrap();
        assert_eq!((found.nodes, found.node_rank), (Some(1), 0), "{own}");
        let advice = found.advice.unwrap();
        assert!(
            advice.contains("has 2 nodes") && advice.contains("srun --ntasks-per-node=1"),
            "{advice}"
        );
        let rank = rank(BATCH, &[("SLURM_STEP_ID", own)]).unwrap();
        assert_eq!(rank, WorkerEnv::alone(), "nobody starts the other ranks");
    }
    let one = found(BATCH, &[("SLURM_JOB_NUM_NODES", "1")]).unwrap();
    assert_eq!(one.unwrap().advice, None);
}

#[test]
fn launchers_that_would_start_ranks_twice_are_refused_with_the_command_for_one() {
    for (vars, changes, tasks, once) in [
        (
            STEP,
            &[("SLURM_STEP_TASKS_PER_NODE", "4(x2)")][..],
            4,
            "srun --ntasks-per-node=1",
        ),
        (
            STEP,
            &[("SLURM_STEP_TASKS_PER_NODE", "1,2")],
            2,
            "srun --ntasks-per-node=1",
        ),
        (
            OPEN_MPI_4,
            &[("OMPI_COMM_WORLD_LOCAL_SIZE", "2")],
            2,
            "mpirun -npernode 1",
        ),
        (HYDRA, &[("MPI_LOCALNRANKS", "3")], 3, "mpiexec -ppn 1"),
    ] {
        let error = found(vars, changes).unwrap_err();
        let launchers = format!("started {tasks} launchers on one node");
        assert!(error.to_string().contains(&launchers), "{error}");
        let hint = error.hint().unwrap();
        let command = format!("`{once} paceline run --nproc-per-node {tasks} PROGRAM`");
        assert!(hint.contains(&command), "{hint}");
    }
}

#[test]
fn a_bad_value_of_a_step_is_shown_with_what_was_expected() {
    for (name, value, expected) in [
        (
            "SLURM_NODEID",
            "2",
            "SLURM_NODEID is \"2\", expected a whole number from 0 to 1",
        ),
        (
            "SLURM_NODEID",
            "",
            "Slurm started this launcher, but SLURM_NODEID is not set",
        ),
        (
            "SLURM_STEP_NUM_NODES",
            "0",
            "SLURM_STEP_NUM_NODES is \"0\", expected a whole number from 1 to 65536",
        ),
        (
            "SLURM_STEP_TASKS_PER_NODE",
            "1(x",
            "SLURM_STEP_TASKS_PER_NODE is \"1(x\", expected counts such as 1(x2) or 2,1",
        ),
        (
            "SLURM_STEP_NODELIST",
            "gpu[",
            "SLURM_STEP_NODELIST is \"gpu[\", which is not a list of hosts: its brackets do not match",
        ),
        (
            "SLURM_JOB_ID",
            "x",
            "SLURM_JOB_ID is \"x\", expected a whole number",
        ),
        (
            "SLURM_RESTART_COUNT",
            "-1",
            "SLURM_RESTART_COUNT is \"-1\", expected a whole number from 0 to 4294967295",
        ),
    ] {
        let error = found(STEP, &[(name, value)]).unwrap_err();
        assert_eq!(error.to_string(), expected);
        assert!(error.hint().unwrap().contains("--standalone"));
    }
}

#[test]
fn the_ranks_of_a_node_are_its_gpus() {
    let ranks = |value| ranks_per_node(&|name| lookup(&[("SLURM_GPUS_ON_NODE", value)], &[], name));
    assert_eq!(ranks("8"), Some((8, "SLURM_GPUS_ON_NODE")));
    for value in ["", "0", "many"] {
        assert_eq!(ranks(value), None, "{value}");
    }
}

#[test]
fn open_mpi_places_a_launcher_and_meets_where_mpirun_is() {
    for (vars, host) in [(OPEN_MPI_4, "192.0.2.2"), (OPEN_MPI_5, "node-1")] {
        let found = found(vars, &[]).unwrap().unwrap();
        assert_eq!((found.nodes, found.node_rank), (Some(2), 1));
        assert_eq!(found.master_addr, Ok(host.to_owned()));
        assert!((10_000..30_000).contains(&found.master_port));
        let rank = rank(vars, &[]).unwrap();
        assert_eq!(
            (rank.master_addr.as_str(), rank.master_port),
            (host, found.master_port)
        );
        assert_eq!((rank.rank, rank.world, rank.run_id), (1, 2, found.run_id));
    }
}

#[test]
fn rank_0_elsewhere_than_mpirun_says_so_and_a_name_helps() {
    let first = [("OMPI_COMM_WORLD_RANK", "0")];
    let scheduler = Scheduler::OpenMpi;
    for vars in [OPEN_MPI_4, OPEN_MPI_5] {
        let lost = found(vars, &first).unwrap().unwrap();
        assert_eq!(lost.master_addr, Err(SchedulerError::no_master(scheduler)));
        assert_eq!(rank(vars, &first), Err(EnvError::NoMaster { scheduler }));
        let named = [first[0], ("MASTER_ADDR", "node2")];
        let found = found(vars, &named).unwrap().unwrap();
        assert_eq!(found.master_addr, Ok("node2".to_owned()));
        assert_eq!(rank(vars, &named).unwrap().master_addr, "node2");
    }
    for (vars, here) in [
        (
            OPEN_MPI_4,
            ("OMPI_MCA_orte_local_daemon_uri", OPEN_MPI_4[5].1),
        ),
        (OPEN_MPI_5, ("PMIX_HOSTNAME", "node-1.cluster")),
    ] {
        let found = found(vars, &[first[0], here]).unwrap().unwrap();
        assert!(found.master_addr.is_ok(), "{here:?}");
    }
}

#[test]
fn hydra_has_to_be_told_where_rank_0_is() {
    let scheduler = Scheduler::Mpich;
    let lost = found(HYDRA, &[]).unwrap().unwrap();
    let error = lost.master_addr.unwrap_err();
    assert_eq!(
        error.to_string(),
        "MPICH started this process, but its variables do not name rank 0's machine"
    );
    assert!(error.hint().unwrap().contains("-genv MASTER_ADDR HOST"));
    let error = rank(HYDRA, &[]).unwrap_err();
    assert_eq!(error, EnvError::NoMaster { scheduler });
    let named = [("MASTER_ADDR", "node1"), ("MASTER_PORT", "4001")];
    let found = found(HYDRA, &named).unwrap().unwrap();
    assert_eq!(
        (found.master_addr, found.master_port),
        (Ok("node1".to_owned()), 4001)
    );
    assert_eq!(rank(HYDRA, &named).unwrap().master_port, 4001);
}

#[test]
fn ranks_of_one_machine_meet_there() {
    for (vars, changes) in [
        (
            OPEN_MPI_4,
            [
                ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ],
        ),
        (HYDRA, [("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")]),
        (STEP, [("SLURM_STEP_NUM_NODES", "1"), ("SLURM_NODEID", "0")]),
    ] {
        let rank = rank(vars, &changes).unwrap();
        assert_eq!((rank.rank, rank.world), (1, 2));
        assert_eq!(rank.master_addr, "127.0.0.1");
        assert!(!rank.is_exposed());
    }
}

#[test]
fn a_launcher_of_ranks_counts_before_the_scheduler_that_started_its_daemons() {
    let both: Vec<_> = OPEN_MPI_4.iter().chain(STEP).copied().collect();
    assert_eq!(
        found(&both, &[]).unwrap().unwrap().scheduler,
        Scheduler::OpenMpi
    );
    // `srun --mpi=pmi2`.
    let pmi2 = [("PMI_RANK", "7"), ("PMI_SIZE", "9")];
    let step = found(STEP, &pmi2).unwrap().unwrap();
    assert_eq!((step.scheduler, step.node_rank), (Scheduler::Slurm, 1));
    assert_eq!(rank(STEP, &pmi2).unwrap().rank, 1);
}

#[test]
fn nothing_is_found_outside_and_inside_of_another_launchers_rank() {
    assert_eq!(found(&[("PATH", "/bin")], &[]), Ok(None));
    for vars in [STEP, BATCH, OPEN_MPI_4, HYDRA, POD] {
        assert_eq!(found(vars, &[("TORCHELASTIC_RUN_ID", "none")]), Ok(None));
    }
}

#[test]
fn a_pod_of_an_indexed_job_finds_pod_0_in_its_own_domain() {
    let hosts = "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n\
                 10.244.1.7\tresnet-3.train.ml.svc.cluster.local\tresnet-3\n";
    for (host, hosts, expected) in [
        ("resnet-3", hosts, Ok("resnet-0.train.ml.svc.cluster.local")),
        ("resnet-3.train.ml.svc", "", Ok("resnet-0.train.ml.svc")),
        (
            "resnet-3",
            "10.244.1.7 resnet-3",
            Err("no domain in /etc/hosts"),
        ),
        (
            "resnet-3",
            "10.244.1.7 resnet-33.train resnet-3 # resnet-3.x",
            Err("no domain"),
        ),
        ("worker-a", hosts, Err("does not end in -3")),
    ] {
        let pod = || Pod {
            host: host.to_owned(),
            hosts: hosts.to_owned(),
        };
        let vars = [("NNODES", "4")];
        let found = detect(&|name| lookup(POD, &vars, name), &pod)
            .unwrap()
            .unwrap();
        assert_eq!(
            (found.nodes, found.node_rank, found.master_port),
            (Some(4), 3, 29_500)
        );
        match (&found.master_addr, expected) {
            (Ok(addr), Ok(expected)) => {
                assert_eq!(addr, expected);
                assert_eq!(found.run_id, "resnet");
            }
            (Err(error), Err(expected)) => {
                assert!(error.to_string().contains(expected), "{error}");
                assert!(error.hint().is_some());
            }
            (got, expected) => panic!("{got:?}, expected {expected:?}"),
        }
        let found = detect(&|name| lookup(POD, &[], name), &pod)
            .unwrap()
            .unwrap();
        assert_eq!(found.nodes, None, "the pod template has to say it");
        let too_few = detect(&|name| lookup(POD, &[("NNODES", "3")], name), &pod);
        assert_eq!(
            too_few.unwrap_err().to_string(),
            "JOB_COMPLETION_INDEX is \"3\", expected a whole number from 0 to 2"
        );
    }
}

proptest! {
    #[test]
    fn no_value_of_any_variable_panics(which in 0..64_usize, value in "\\PC{0,40}") {
        for vars in [STEP, BATCH, OPEN_MPI_4, OPEN_MPI_5, HYDRA, POD] {
            let (name, _) = vars[which % vars.len()];
            let change = [(name, value.as_str())];
            let get = |name: &str| lookup(vars, &change, name);
            let pod = || Pod { host: value.clone(), hosts: value.clone() };
            if let Err(error) = detect(&get, &pod) {
                prop_assert!(error.hint().is_some());
            }
            if let Err(error) = WorkerEnv::from_lookup(&get) {
                prop_assert!(!error.to_string().is_empty());
            }
        }
    }
}
