//! Which CPUs each rank may run on, and how many compute threads that leaves it.
//!
//! The ranks inherit what the launcher may use; a binding gives each a part of it, near its GPU where that is known.
//! Memory needs no policy of its own: the kernel puts a page on the node of the CPU that touches it first, and takes
//! another node's when that one is full. A policy the launcher was started with (`numactl --interleave`) stays.

mod cpus;
mod decide;
pub(crate) mod files;
mod topology;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use paceline_words::counted;

pub use self::cpus::{Cpus, NotCpus};
use self::topology::Topology;
use crate::devices::{Lookup, Near};

/// Groups of ranks that the one line about a plan names; more are counted.
const SHOWN_MAX: usize = 8;

/// Where ranks may run. By default, without a binding, each may run wherever the launcher may.
///
/// A rank's node is the one of the GPU with the number of its local rank, counted over the visible ones and again
/// from the first where there are fewer. Where that is not known, as without GPUs, the ranks are spread over the nodes in
/// order, as evenly as they can be.
///
/// *Source*: torchrun's `--numa-binding` for the first four, Slurm's `--cpu-bind=cores` for the last. torchrun ends with
/// an error where there are no GPUs, and divides a node among all its GPUs, also those that no rank uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Binding {
    /// All CPUs of the rank's NUMA node.
    Node,
    /// All CPUs of all NUMA nodes of that node's socket.
    Socket,
    /// Cores of the rank's NUMA node that no other rank has.
    Exclusive,
    /// Cores of the rank's NUMA node that share their last cache; another such group for each rank while there are any.
    CoreComplex,
    /// An equal share of all cores, whatever the GPUs, that no other rank has.
    Cores,
}

impl Binding {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Node,
        Self::Socket,
        Self::Exclusive,
        Self::CoreComplex,
        Self::Cores,
    ];

    /// Its name on a command line.
    pub const fn name(self) -> &'static str {
        ["node", "socket", "exclusive", "core-complex", "cores"][self as usize]
    }
}

impl FromStr for Binding {
    type Err = NotABinding;

    fn from_str(text: &str) -> Result<Self, NotABinding> {
        let found = Self::ALL.into_iter().find(|binding| binding.name() == text);
        found.ok_or(NotABinding)
    }
}

/// A text that names no binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected node, socket, exclusive, core-complex or cores")]
pub struct NotABinding;

/// The CPUs of each rank. Display says it for people, in one line.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Bound {
    /// What was asked for.
    pub binding: Binding,
    /// The CPUs of each local rank.
    pub cpus: Vec<Cpus>,
    /// Why the ranks were spread over the nodes in order instead of being near their GPUs; `None` where they are near, or
    /// need not be.
    pub not_near: Option<String>,
    /// Cores for each rank's threads: the fewest of any rank, where a shared core counts in part.
    pub cores_each: usize,
    /// Cores that the ranks have together.
    pub cores: usize,
    /// CPUs that the launcher may use.
    pub(crate) cpus_allowed: usize,
}

impl Bound {
    /// Looks at this machine and decides.
    ///
    /// *Errors*: a machine that does not allow it, or describes itself in a way that makes no sense.
    pub(crate) fn plan(binding: Binding, nproc: usize, var: Lookup<'_>) -> Result<Self, BindError> {
        let root = Path::new("/");
        let topology = Topology::read(root, &allowed()?)?;
        let near = match binding {
            Binding::Cores => Near::Unknown(String::new()),
            _ => Near::read(root, var)?,
        };
        Self::new(binding, nproc, &topology, near)
    }

    fn new(
        binding: Binding,
        nproc: usize,
        topology: &Topology,
        near: Near,
    ) -> Result<Self, BindError> {
        let cpus = decide::decide(binding, nproc, topology, &near)?;
        let cores: Vec<_> = cpus.iter().map(|cpus| topology.cores(cpus)).collect();
        let not_near = match near {
            Near::Unknown(why) if binding != Binding::Cores => Some(why),
            _ => None,
        };
        Ok(Self {
            binding,
            cpus,
            not_near,
            cores_each: cores_each(&cores),
            cores: cores.iter().flatten().collect::<BTreeSet<_>>().len(),
            cpus_allowed: topology.cpus.len(),
        })
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places = [
            "NUMA nodes",
            "sockets",
            "exclusive cores of NUMA nodes",
            "core complexes of NUMA nodes",
            "exclusive cores",
        ];
        write!(f, "bound to {}", places[self.binding as usize])?;
        match &self.not_near {
            Some(why) => write!(f, " in order ({why})")?,
            None if self.binding == Binding::Cores => {}
            None => write!(f, " near their GPUs")?,
        }
        let groups: Vec<_> = self.cpus.chunk_by(|a, b| a == b).collect();
        let mut first = 0;
        for (index, group) in groups.iter().enumerate() {
            let separator = if index == 0 { ": " } else { "; " };
            if index == SHOWN_MAX {
                return write!(f, "{separator}ranks {first}-{} alike", self.cpus.len() - 1);
            }
            let last = first + group.len() - 1;
            let cpus = if group[0].len() == 1 { "CPU" } else { "CPUs" };
            if first == last {
                write!(f, "{separator}rank {first} to {cpus} {}", group[0])?;
            } else {
                write!(f, "{separator}ranks {first}-{last} to {cpus} {}", group[0])?;
            }
            first = last + 1;
        }
        Ok(())
    }
}

/// A binding that this machine does not allow.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// A file about the machine cannot be read.
    #[error("`{}` cannot be read: {source}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// A file about the machine makes no sense.
    #[error("`{}` says `{found}`, expected {expected}", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What it says, or the beginning of it.
        found: String,
        /// What it should say.
        expected: &'static str,
    },
    /// The system does not say which CPUs the launcher may use.
    #[error("the CPUs that this process may use are not known: {0}")]
    Affinity(#[source] io::Error),
    /// More ranks than cores to divide among them.
    #[error("{ranks} ranks cannot have cores of their own: {} {cores}", owner(*.node))]
    TooFewCores {
        /// Cores that the launcher may use.
        cores: usize,
        /// Ranks that share them.
        ranks: usize,
        /// The node, unless it is about the whole machine.
        node: Option<usize>,
    },
    /// All CPUs that the launcher may use are far from the GPU.
    #[error("GPU {gpu} is on NUMA node {node}, where this process may use no CPU")]
    NoCpuNearGpu {
        /// Its number among the visible ones.
        gpu: usize,
        /// Its node.
        node: usize,
    },
}

impl BindError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::TooFewCores { node: Some(_), .. } => {
                "start fewer ranks, or let them share the node's cores: `--numa-binding node`".into()
            }
            Self::TooFewCores { cores, .. } => {
                format!("start at most {}, or leave the binding out", counted(*cores, "rank"))
            }
            Self::NoCpuNearGpu { .. } => {
                "ask the batch system or the container for CPUs near the GPU (`taskset -pc $$` says which it gives), or \
                 leave the binding out"
                    .into()
            }
            Self::Read { .. } | Self::Malformed { .. } | Self::Affinity(_) => {
                "leave the binding out: the ranks run without it".into()
            }
        })
    }
}

paceline_rendezvous::debug_with_hint!(BindError);

fn owner(node: Option<usize>) -> String {
    match node {
        Some(node) => format!("NUMA node {node} has"),
        None => "this process may use".to_owned(),
    }
}

/// The CPUs that this thread may use, as its children will.
fn allowed() -> Result<Cpus, BindError> {
    let mask = rustix::thread::sched_getaffinity(None);
    let mask = mask.map_err(|error| BindError::Affinity(error.into()))?;
    Ok(Cpus::from(&mask))
}

/// The fewest cores of a rank, given the cores of each. Of cores that several ranks share everyone has its part.
fn cores_each(cores: &[BTreeSet<usize>]) -> usize {
    let mut ranks_on = BTreeMap::<usize, usize>::new();
    for core in cores.iter().flatten() {
        *ranks_on.entry(*core).or_default() += 1;
    }
    let part = |own: &BTreeSet<usize>| {
        let mut shared_by = BTreeMap::<usize, usize>::new();
        for core in own {
            *shared_by.entry(ranks_on[core]).or_default() += 1;
        }
        let parts = shared_by.iter().map(|(ranks, cores)| cores / ranks);
        parts.sum::<usize>()
    };
    cores.iter().map(part).min().unwrap_or(0).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Bound {
        /// Two ranks on eight cores with two threads each.
        pub(crate) fn example() -> Self {
            Self {
                binding: Binding::Cores,
                cpus: ["0-7", "8-15"].map(|cpus| cpus.parse().unwrap()).into(),
                not_near: None,
                cores_each: 4,
                cores: 8,
                cpus_allowed: 16,
            }
        }
    }

    fn bound(binding: Binding, cpus: &[&str], not_near: Option<&str>) -> Bound {
        Bound {
            binding,
            cpus: cpus.iter().map(|cpus| cpus.parse().unwrap()).collect(),
            not_near: not_near.map(str::to_owned),
            ..Bound::example()
        }
    }

    #[test]
    fn a_binding_says_who_is_where() {
        let node = bound(Binding::Node, &["0-3,8", "0-3,8", "4-7"], None);
        assert_eq!(
            node.to_string(),
            "bound to NUMA nodes near their GPUs: ranks 0-1 to CPUs 0-3,8; rank 2 to CPUs 4-7"
        );
        let exclusive = bound(Binding::Exclusive, &["0"], Some("no GPU was found"));
        assert_eq!(
            exclusive.to_string(),
            "bound to exclusive cores of NUMA nodes in order (no GPU was found): rank 0 to CPU 0"
        );
        let many: Vec<_> = (0..12).map(|cpu| cpu.to_string()).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        let text = bound(Binding::Cores, &many, None).to_string();
        assert!(
            text.starts_with("bound to exclusive cores: rank 0 to CPU 0; rank 1"),
            "{text}"
        );
        assert!(
            text.ends_with("; rank 7 to CPU 7; ranks 8-11 alike"),
            "{text}"
        );
    }

    #[test]
    fn names_of_bindings_are_read_as_they_are_written() {
        for binding in Binding::ALL {
            assert_eq!(binding.name().parse(), Ok(binding));
        }
        assert_eq!("numa".parse::<Binding>(), Err(NotABinding));
    }

    #[test]
    fn ranks_that_share_cores_have_a_part_of_them() {
        let check = |cores: &[&str], expect: usize| {
            let cores: Vec<_> = cores
                .iter()
                .map(|cores| cores.parse::<Cpus>().unwrap().0)
                .collect();
            assert_eq!(cores_each(&cores), expect, "{cores:?}");
        };
        check(&["0-7", "0-7", "8-15", "8-15"], 4);
        check(&["0-3", "4-15"], 4);
        check(&["0-7", "0-3"], 2);
        check(&["0", "0", "0"], 1);
    }
}
