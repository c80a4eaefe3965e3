//! Errors in a scheduler's variables, and advice.

use super::Scheduler;
use super::hosts::HostListError;

/// Why a scheduler's variables do not place this launcher.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum SchedulerError {
    /// A value is malformed or out of range.
    #[error("{name} is {value:?}, expected {expected}")]
    Invalid {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What a valid value looks like.
        expected: String,
    },
    /// A variable that the scheduler always sets is not there.
    #[error("{scheduler} started this launcher, but {name} is not set")]
    Missing {
        /// The scheduler that started it.
        scheduler: Scheduler,
        /// The variable.
        name: &'static str,
    },
    /// A list of hosts cannot be read.
    #[error("{name} is {list:?}, which is not a list of hosts: {source}")]
    HostList {
        /// The variable.
        name: &'static str,
        /// Its value.
        list: String,
        /// What is wrong with it.
        source: HostListError,
    },
    /// Several launchers were started on one node.
    #[error(
        "{scheduler} started {tasks} launchers on one node, and each of them starts all ranks of the node"
    )]
    TasksPerNode {
        /// The scheduler that started them.
        scheduler: Scheduler,
        /// How many.
        tasks: usize,
    },
    /// The pods of the Job are not known.
    #[error("this is pod {index} of an indexed Job, but the number of its pods is not set")]
    NoNodes {
        /// The pod's completion index.
        index: usize,
    },
    /// The pod's name does not lead to the first pod's.
    #[error(
        "the host name {host:?} does not end in -{index}, the pod's JOB_COMPLETION_INDEX, so pod 0 cannot be named"
    )]
    PodName {
        /// The pod's host name.
        host: String,
        /// Its completion index.
        index: usize,
    },
    /// The pod has no domain in which the others could be found.
    #[error(
        "the pod {host:?} has no domain in /etc/hosts, so the other pods of its Job have no names"
    )]
    NoSubdomain {
        /// The pod's host name.
        host: String,
    },
    /// The machine of rank 0 is not in the variables.
    #[error("{scheduler} started this process, but its variables do not name rank 0's machine")]
    NoMaster {
        /// The scheduler that started it.
        scheduler: Scheduler,
    },
}

impl SchedulerError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Invalid { .. } | Self::Missing { .. } | Self::HostList { .. } => {
                "give the launcher its place by --nnodes, --node-rank and --master-addr, or start on this node alone with \
                 --standalone"
                    .to_owned()
            }
            Self::TasksPerNode { scheduler, tasks } => {
                let once = match scheduler {
                    Scheduler::Slurm | Scheduler::Kubernetes => "srun --ntasks-per-node=1",
                    Scheduler::OpenMpi => "mpirun -npernode 1",
                    Scheduler::Mpich => "mpiexec -ppn 1",
                };
                format!(
                    "start one launcher on each node: `{once} paceline run --nproc-per-node {tasks} PROGRAM`; or let \
                     {scheduler} start the ranks, without `paceline run`; with --standalone each launcher has a job of its own"
                )
            }
            Self::NoNodes { .. } => "set PET_NNODES to the Job's completions in the pod template; with --standalone each pod \
                                     has a job of its own"
                .to_owned(),
            Self::PodName { .. } => {
                "set PET_MASTER_ADDR in the pod template, or do not use the host's network".to_owned()
            }
            Self::NoSubdomain { .. } => {
                "make a headless Service for the Job and name it as `subdomain` in the pod template; a JobSet does it by itself"
                    .to_owned()
            }
            Self::NoMaster { scheduler } => name_master(*scheduler),
        })
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
