//! Places of nodes and ranks, from the variables that Slurm, Kubernetes and MPI launchers set.
//!
//! There are two ways to start a job under a scheduler, and both are read here from its variables:
//!
//! - one launcher on each node (`srun --ntasks-per-node=1 paceline run ./prog`): [`detect`] gives the launcher the number
//!   of nodes, its own and the address of the first;
//! - the ranks themselves (`srun -n 4 ./prog`): [`WorkerEnv`](crate::env::WorkerEnv) finds torchrun's values in them.
//!
//! | | nodes | this node | host of node 0 | port | several tasks on a node |
//! |---|---|---|---|---|---|
//! | Slurm step | `SLURM_STEP_NUM_NODES` | `SLURM_NODEID` | first of `SLURM_STEP_NODELIST` | from `SLURM_JOB_ID` and `SLURM_STEP_ID` | `SLURM_STEP_TASKS_PER_NODE` |
//! | pod of an indexed Job | `NNODES` | `JOB_COMPLETION_INDEX` | `JOB-0` in the pod's domain | 29500 | |
//! | Open MPI | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_RANK` | `mpirun`'s, if rank 0 is there | from `PMIX_NAMESPACE` | `OMPI_COMM_WORLD_LOCAL_SIZE` |
//! | MPICH, Intel MPI | `PMI_SIZE` | `PMI_RANK` | `MASTER_ADDR` | 29500 | `MPI_LOCALNRANKS` |
//!
//! Open MPI comes first, then MPICH and then Slurm, because their launchers start daemons with `srun` whose variables the
//! ranks inherit. A step that Slurm itself started with `--mpi=pmi2` has `PMI_RANK` too, but no `MPI_LOCALRANKID`.
//!
//! *Source*: srun(1) and sbatch(1) of Slurm 22.05, Open MPI 4.1 and 5.0, MPICH 4.0, the Kubernetes documentation of Jobs.
//! Slurm, both versions of Open MPI and MPICH have been run; the tests run those that are installed.

mod error;
mod hosts;
mod kubernetes;
mod mpi;
mod slurm;

use std::collections::HashMap;
use std::fmt;

use crate::env::{VARIABLES, names};

pub(crate) use self::error::name_master;

pub use self::error::SchedulerError;
pub use self::hosts::{HOSTS_MAX, HostListError, hosts};
pub use self::kubernetes::Pod;

/// Most nodes that a scheduler is believed to have given to one job.
const NODES_MAX: usize = crate::env::WORLD_MAX;

/// The scheduler that started this process as one of several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheduler {
    /// `srun`, or `sbatch` and `salloc` without it.
    Slurm,
    /// A Job with completion mode `Indexed`, alone or in a JobSet.
    Kubernetes,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// Hydra: the `mpiexec` of MPICH, Intel MPI and MVAPICH.
    Mpich,
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Slurm => "Slurm",
            Self::Kubernetes => "Kubernetes",
            Self::OpenMpi => "Open MPI",
            Self::Mpich => "MPICH",
        })
    }
}

impl Scheduler {
    /// How to give every node of a job the same token.
    pub fn token_hint(self) -> &'static str {
        match self {
            Self::Slurm => {
                "put this line into the batch script, before srun:\n  export PACELINE_JOB_TOKEN=$(openssl rand -hex 32)"
            }
            Self::Kubernetes => {
                "make a Secret, and set PACELINE_JOB_TOKEN from it in the pod template (env, valueFrom, secretKeyRef):\n  \
                 kubectl create secret generic paceline-job --from-literal=token=$(openssl rand -hex 32)"
            }
            Self::OpenMpi => {
                "put this line before mpirun, and give mpirun `-x PACELINE_JOB_TOKEN`:\n  \
                 export PACELINE_JOB_TOKEN=$(openssl rand -hex 32)"
            }
            Self::Mpich => {
                "put this line before mpiexec:\n  export PACELINE_JOB_TOKEN=$(openssl rand -hex 32)"
            }
        }
    }
}

/// A launcher's place, as its scheduler gives it; the scheduler started one launcher on each node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The scheduler that says it.
    pub scheduler: Scheduler,
    /// The scheduler's name of the job: `Slurm step 812.0`.
    pub job: String,
    /// Number of nodes; `None` if the scheduler does not give it.
    pub nodes: Option<usize>,
    /// Number of this node, below `nodes`.
    pub node_rank: usize,
    /// The scheduler's name of this node, if it has one.
    pub host: Option<String>,
    /// Host of node 0, or why it is not known. A job of one node does not need it.
    pub master_addr: Result<String, SchedulerError>,
    /// A port on that host that other jobs do not use, and the next one.
    pub master_port: u16,
    /// Name of the job, `TORCHELASTIC_RUN_ID`.
    pub run_id: String,
    /// How often the scheduler has started the job before.
    pub restart_count: u32,
    /// Advice on what may have been forgotten at the start.
    pub advice: Option<String>,
}

/// The default number of ranks of a node: one for each GPU that the scheduler gave to the job here, and
/// the variable that says so.
pub fn ranks_per_node(get: &dyn Fn(&str) -> Option<String>) -> Option<(usize, &'static str)> {
    slurm::gpus(&present(get))
}

/// Reads what a scheduler says to a launcher; `None` when none started it, and for a launcher inside another one's rank:
/// the outer one has taken the scheduler's place. `pod` is asked only in a pod of an indexed Job.
///
/// *Errors*: a variable is malformed, or launchers were started where one is enough.
///
/// ```
/// use paceline_rendezvous::scheduler::{Pod, detect};
///
/// let step = [
///     ("SLURM_JOB_ID", "812"), ("SLURM_STEP_ID", "0"), ("SLURM_STEP_NUM_NODES", "2"), ("SLURM_NODEID", "1"),
///     ("SLURM_STEP_NODELIST", "gpu[01-02]"), ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"),
/// ];
/// let get = |name: &str| step.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string());
/// let found = detect(&get, &Pod::read)?.expect("a step");
/// assert_eq!((found.nodes, found.node_rank), (Some(2), 1));
/// assert_eq!(found.master_addr.as_deref(), Ok("gpu01"));
/// # Ok::<(), paceline_rendezvous::scheduler::SchedulerError>(())
/// ```
pub fn detect(
    get: &dyn Fn(&str) -> Option<String>,
    pod: &dyn Fn() -> Pod,
) -> Result<Option<Found>, SchedulerError> {
    let get = &present(get);
    if get("TORCHELASTIC_RUN_ID").is_some() {
        return Ok(None);
    }
    if let Some(scheduler) = mpi::started_by(get) {
        return mpi::node(scheduler, get).map(Some);
    }
    if let Some(found) = slurm::node(get)? {
        return Ok(Some(found));
    }
    kubernetes::node(get, pod)
}

/// The scheduler that started this process as one of a job's tasks, and their number.
pub fn tasks(get: &dyn Fn(&str) -> Option<String>) -> Option<(Scheduler, usize)> {
    let (scheduler, vars) = rank_vars(&present(get))?;
    Some((scheduler, vars.get(names::WORLD_SIZE)?.parse().ok()?))
}

/// torchrun's variables of a rank that a scheduler started, and the scheduler.
pub(crate) fn rank_vars(
    get: &dyn Fn(&str) -> Option<String>,
) -> Option<(Scheduler, HashMap<&'static str, String>)> {
    let mpi = mpi::started_by(get);
    let scheduler = mpi.or_else(|| slurm::step(get).map(|_| Scheduler::Slurm))?;
    let value = |name| match mpi {
        Some(scheduler) => mpi::value(scheduler, name, get),
        None => slurm::value(name, get),
    };
    let named = VARIABLES.iter().map(|variable| variable.name);
    let vars = named.filter_map(|name| Some((name, value(name)?)));
    Some((scheduler, vars.collect()))
}

/// An empty variable counts as absent.
fn present(get: &dyn Fn(&str) -> Option<String>) -> impl Fn(&str) -> Option<String> {
    move |name| get(name).filter(|value| !value.trim().is_empty())
}

/// A port and the next one, below Linux's range of ephemeral ports (32768 and up), so that no connection occupies it by
/// chance. Jobs with numbers near each other never share one.
fn port_of(number: u64) -> u16 {
    // The remainder fits.
    10_000 + 2 * (number % 10_000) as u16
}

/// A whole number from `min` to `max`.
fn number(
    get: &dyn Fn(&str) -> Option<String>,
    name: &'static str,
    (min, max): (usize, usize),
) -> Result<Option<usize>, SchedulerError> {
    let Some(value) = get(name) else {
        return Ok(None);
    };
    match value.trim().parse() {
        Ok(number) if (min..=max).contains(&number) => Ok(Some(number)),
        _ => {
            let expected = format!("a whole number from {min} to {max}");
            Err(SchedulerError::invalid(name, &value, &expected))
        }
    }
}

/// [`number`] of a variable that its scheduler always sets.
fn required(
    get: &dyn Fn(&str) -> Option<String>,
    scheduler: Scheduler,
    name: &'static str,
    range: (usize, usize),
) -> Result<usize, SchedulerError> {
    number(get, name, range)?.ok_or_else(|| SchedulerError::missing(scheduler, name))
}

#[cfg(test)]
mod tests;
