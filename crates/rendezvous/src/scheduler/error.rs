//! Errors in a scheduler's variables, and advice.

use super::Scheduler;
use super::hosts::HostListError;

/// Why a scheduler's variables do not place this launcher.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct SchedulerError {
    message: String,
    hint: String,
}

impl SchedulerError {
    /// A message and what to do about it.
    pub fn new(message: String, hint: impl Into<String>) -> Self {
        let hint = hint.into();
        Self { message, hint }
    }

    fn no_place(message: String) -> Self {
        let hint = "give the launcher its place by --nnodes, --node-rank and --master-addr, or start on this node alone with \
                    --standalone";
        Self::new(message, hint)
    }

    /// A value is malformed or out of range.
    pub(super) fn invalid(name: &str, value: &str, expected: &str) -> Self {
        Self::no_place(format!("{name} is {value:?}, expected {expected}"))
    }

    /// A variable that the scheduler always sets is not there.
    pub(super) fn missing(scheduler: Scheduler, name: &str) -> Self {
        Self::no_place(format!(
            "{scheduler} started this launcher, but {name} is not set"
        ))
    }

    /// A list of hosts cannot be read.
    pub(super) fn host_list(name: &str, list: &str, why: HostListError) -> Self {
        Self::no_place(format!(
            "{name} is {list:?}, which is not a list of hosts: {why}"
        ))
    }

    /// Several launchers were started on one node.
    pub(super) fn tasks_per_node(scheduler: Scheduler, tasks: usize) -> Self {
        let once = match scheduler {
            Scheduler::Slurm | Scheduler::Kubernetes => "srun --ntasks-per-node=1",
            Scheduler::OpenMpi => "mpirun -npernode 1",
            Scheduler::Mpich => "mpiexec -ppn 1",
        };
        Self::new(
            format!(
                "{scheduler} started {tasks} launchers on one node, and each of them starts all ranks of the node"
            ),
            format!(
                "start one launcher on each node: `{once} paceline run --nproc-per-node {tasks} PROGRAM`; or let \
                 {scheduler} start the ranks, without `paceline run`; with --standalone each launcher has a job of its own"
            ),
        )
    }

    /// The machine of rank 0 is not in the variables.
    pub(super) fn no_master(scheduler: Scheduler) -> Self {
        Self::new(
            format!(
                "{scheduler} started this process, but its variables do not name rank 0's machine"
            ),
            name_master(scheduler),
        )
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        Some(self.hint.clone())
    }
}

crate::debug_with_hint!(SchedulerError);

/// How to say where rank 0 is.
pub(crate) fn name_master(scheduler: Scheduler) -> String {
    let how = match scheduler {
        Scheduler::Mpich => "mpiexec -genv MASTER_ADDR HOST",
        _ => "mpirun -x MASTER_ADDR=HOST",
    };
    format!(
        "name the machine on which rank 0 is started: `{how} ...`, the first of the list of hosts"
    )
}
