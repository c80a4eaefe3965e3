//! What can go wrong in a group of ranks, and whom to blame.

mod display;
mod operation;

use std::sync::Arc;
use std::time::Duration;

use paceline_rendezvous::env::EnvError;
use paceline_rendezvous::page::PageError;
use paceline_rendezvous::store::StoreError;

use self::display::During;
pub use self::display::{Ranks, Seconds};
pub use self::operation::{OpKind, Operation, Route};
use crate::plan::PlanError;

/// Said of calls that differ only in whose memory they are on, where that keeps them from being done together.
pub(crate) const MIXED: &str =
    "; it is one call, on buffers of the group on some ranks and on ordinary memory on others";

/// A failure of a process group.
///
/// The first failure latches: every later call on the group returns it again. Ranks that fail because of another one
/// carry that rank in [`culprit`](Self::culprit).
#[derive(Clone, thiserror::Error)]
pub enum Error {
    /// The environment does not describe a rank.
    #[error(transparent)]
    Environment(#[from] Arc<EnvError>),
    /// A setting of this library's own is wrong.
    #[error("{name} is {value:?}, expected {expected}")]
    Setting {
        /// The variable or option.
        name: &'static str,
        /// What it says.
        value: String,
        /// What it may say.
        expected: &'static str,
    },
    /// No usable network interface is one of those asked for.
    #[error("network interfaces {wanted:?} were asked for, which fits none of {found}")]
    Interface {
        /// The setting.
        wanted: String,
        /// The interfaces that there are, with their addresses.
        found: String,
    },
    /// The job's store failed while the group formed.
    #[error("rank {rank} could not {doing}: {source}")]
    Store {
        /// This rank.
        rank: usize,
        /// What it was doing.
        doing: String,
        /// What the store said.
        source: Arc<StoreError>,
    },
    /// The job page cannot be used.
    #[error(transparent)]
    Page(#[from] Arc<PageError>),
    /// The operating system refused something.
    #[error("rank {rank} could not {doing}: {reason}")]
    System {
        /// This rank.
        rank: usize,
        /// What it was doing.
        doing: String,
        /// The system's answer.
        reason: String,
    },
    /// The transport that was asked for cannot work here.
    #[error("transport {wanted:?} was asked for but cannot be used: {reason}")]
    Transport {
        /// What was asked for.
        wanted: &'static str,
        /// Why not.
        reason: String,
    },
    /// Some ranks never came while the group formed.
    #[error("rank {rank} waited {} for {}, which did not {what}{detail}", Seconds(*waited), Ranks(missing))]
    Absent {
        /// This rank.
        rank: usize,
        /// The ranks it waited for.
        missing: Vec<usize>,
        /// What they should have done.
        what: &'static str,
        /// How long.
        waited: Duration,
        /// What else was seen meanwhile; empty or beginning with a separator.
        detail: String,
    },
    /// A peer is of another job or version, or speaks nonsense while the group forms.
    #[error("rank {rank} cannot work with rank {peer}: {reason}")]
    Peer {
        /// This rank.
        rank: usize,
        /// The other one.
        peer: usize,
        /// What is wrong.
        reason: String,
    },
    /// The environment asks for algorithms that there are not.
    #[error("PACELINE_ALGORITHM cannot be followed: {source}")]
    Algorithm {
        /// What is wrong with it.
        source: PlanError,
    },
    /// A plan that cannot be made.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A call with arguments that cannot work on any rank.
    #[error("rank {rank} called {kind} wrongly: {reason}")]
    Call {
        /// This rank.
        rank: usize,
        /// The operation.
        kind: OpKind,
        /// What is wrong.
        reason: String,
    },
    /// The dimensions of a [`DeviceMesh`](crate::DeviceMesh) do not fit the group.
    #[error("a mesh of {dims} cannot be made of group {group:?}: {reason}")]
    Mesh {
        /// The dimensions, in words.
        dims: String,
        /// The group's name.
        group: String,
        /// What is wrong.
        reason: String,
    },
    /// A [sub-group](crate::ProcessGroup::subgroup) of ranks that cannot be one.
    #[error("group {name:?} cannot be made of group {group:?}: {reason}")]
    Members {
        /// The sub-group's name.
        name: String,
        /// The group's name.
        group: String,
        /// What is wrong.
        reason: String,
    },
    /// The arena has no room left, or in a group of one rank the process can have no more memory.
    #[error("no room for a buffer of {bytes} bytes: {}", full(*used, *size))]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// Bytes in use.
        used: usize,
        /// Bytes of the arena; `isize::MAX` without one.
        size: usize,
    },
    /// The ranks did not all call the same operation. The same error on every rank.
    #[error("operation #{seq} differs between ranks: {calls}")]
    Mismatch {
        /// The group's running number.
        seq: u64,
        /// Who called what, in words.
        calls: String,
        /// The odd one out, when there is exactly one.
        culprit: Option<usize>,
    },
    /// A rank ended without leaving the group.
    #[error("rank {rank} ({place}) died{}", During(during))]
    PeerLost {
        /// The rank that died.
        rank: usize,
        /// Its host and process id.
        place: String,
        /// What this rank was waiting in.
        during: Option<Operation>,
    },
    /// A data connection to a rank ended, although that rank lives.
    #[error(
        "a data connection to rank {rank} ({place}) ended during {during}, while the one for messages stands"
    )]
    Disconnected {
        /// The rank at its other end.
        rank: usize,
        /// Its host and process id.
        place: String,
        /// What this rank was waiting in.
        during: Operation,
    },
    /// A rank left the group in order, but is needed.
    #[error("rank {rank} left the group after operation #{after}, while {during} needs it")]
    PeerLeft {
        /// The rank that left.
        rank: usize,
        /// The last operation it took part in.
        after: u64,
        /// The operation that needs it.
        during: Operation,
    },
    /// An operation's time was over. Names who had not come and what they were doing, or says that all ranks wait in it.
    #[error("{operation} timed out after {} on rank {rank}: {missing}{waiting}", Seconds(*waited))]
    Deadline {
        /// This rank.
        rank: usize,
        /// The operation.
        operation: Operation,
        /// How long it had run.
        waited: Duration,
        /// The ranks that had not come; none where the network holds up an operation in which all wait.
        culprits: Vec<usize>,
        /// What they were doing, in words.
        missing: Box<str>,
        /// Who else waited; empty or beginning with a separator.
        waiting: Box<str>,
    },
    /// Another rank gave up and said why.
    #[error("rank {by} gave up: {cause}")]
    Aborted {
        /// The rank that gave up.
        by: usize,
        /// The rank that it blames.
        culprit: Option<usize>,
        /// Its own words.
        cause: String,
        /// Whether its reason was a deadline.
        deadline: bool,
    },
    /// This rank gave up: [`abort`](crate::ProcessGroup::abort) was called, or it panicked.
    #[error("rank {rank} gave up: {cause}")]
    AbortedHere {
        /// This rank.
        rank: usize,
        /// Why.
        cause: String,
    },
    /// The launcher ended the job.
    #[error("the launcher ended the job: {text}")]
    Revoked {
        /// The rank that the launcher blames.
        culprit: Option<usize>,
        /// The launcher's words.
        text: String,
    },
    /// Nothing can form the group of the ranks that are left.
    #[error("this job does not go on without the lost ranks: {reason}")]
    NoRecovery {
        /// Why not.
        reason: &'static str,
    },
    /// This process replaces a lost rank, and is in no group yet.
    #[error("rank {rank} replaces a lost rank and has not joined the others yet")]
    NotJoined {
        /// The lost rank's number.
        rank: usize,
    },
    /// The other ranks have given this one up and go on without it.
    #[error("rank {rank} was given up: generation {generation} of the group goes on without it")]
    Fenced {
        /// This rank, by its number in the group that it was in.
        rank: usize,
        /// The generation that it is not in.
        generation: u64,
    },
    /// A peer sent something that no correct peer sends.
    #[error("rank {peer} broke the protocol{}: {reason}", During(during))]
    Wire {
        /// The rank that sent it.
        peer: usize,
        /// The operation during which it arrived.
        during: Option<Operation>,
        /// What was wrong.
        reason: String,
    },
    /// The thread that executes operations is gone, which only a bug of this library can cause.
    #[error("the communication thread of rank {rank} ended before its work was done")]
    ThreadGone {
        /// This rank.
        rank: usize,
    },
}

impl Error {
    /// The system refused what `rank` was `doing`.
    pub(crate) fn system(rank: usize, doing: impl Into<String>, reason: impl ToString) -> Self {
        Self::System {
            rank,
            doing: doing.into(),
            reason: reason.to_string(),
        }
    }

    /// Nonsense of a peer that arrived `during` an operation, or between two.
    pub(crate) fn wire(peer: usize, during: Option<Operation>, reason: String) -> Self {
        Self::Wire {
            peer,
            during,
            reason,
        }
    }

    /// The rank to blame, when it is known.
    pub fn culprit(&self) -> Option<usize> {
        match self {
            Self::Peer { peer, .. } | Self::Wire { peer, .. } => Some(*peer),
            Self::PeerLost { rank, .. }
            | Self::PeerLeft { rank, .. }
            | Self::Disconnected { rank, .. } => Some(*rank),
            Self::Call { rank, .. }
            | Self::AbortedHere { rank, .. }
            | Self::ThreadGone { rank } => Some(*rank),
            Self::Absent { missing, .. } => missing.first().copied(),
            Self::Deadline { culprits, .. } => culprits.first().copied(),
            Self::Mismatch { culprit, .. }
            | Self::Aborted { culprit, .. }
            | Self::Revoked { culprit, .. } => *culprit,
            _ => None,
        }
    }

    /// Whether time ran out, here or on the rank that gave up.
    pub fn is_deadline(&self) -> bool {
        matches!(
            self,
            Self::Deadline { .. } | Self::Absent { .. } | Self::Aborted { deadline: true, .. }
        )
    }

    /// Whether the ranks that are left can go on after this failure. After any other one they would fail the same way again.
    pub fn is_loss(&self) -> bool {
        matches!(
            self,
            Self::PeerLost { .. }
                | Self::PeerLeft { .. }
                | Self::Disconnected { .. }
                | Self::Deadline { .. }
                | Self::Absent { .. }
                | Self::Aborted { .. }
                | Self::Revoked { .. }
        )
    }

    /// Whether a setting has to change: the same settings would fail the same way.
    pub fn is_configuration(&self) -> bool {
        matches!(
            self,
            Self::Environment(_)
                | Self::Setting { .. }
                | Self::Interface { .. }
                | Self::Transport { .. }
                | Self::Algorithm { .. }
        )
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            Self::Environment(source) => return source.hint(),
            Self::Page(source) => return source.hint(),
            Self::Store { source, .. } => return source.hint(),
            Self::Plan(source) => return source.hint(),
            Self::Transport { wanted: "mpi", .. } => {
                "start the program itself with the launcher of this MPI library (mpirun, mpiexec or srun) on all hosts; \
                 PACELINE_MPI_LIBRARY names the file of another library"
            }
            Self::Transport { .. } => {
                "leave PACELINE_TRANSPORT unset to let the group choose; shm needs all ranks on one host and in one \
                 network namespace"
            }
            Self::Interface { .. } => {
                "change or unset PACELINE_SOCKET_IFNAME, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, whichever is set"
            }
            Self::Absent { .. } => {
                "look at the first error of those ranks; when they are alive, check that this host's addresses can be \
                 reached from theirs"
            }
            Self::Call {
                kind: OpKind::AllReduce,
                reason,
                ..
            } if reason.contains("i64") => {
                "reduce with Sum and divide, choosing the rounding yourself"
            }
            Self::Memory { size, .. } if *size == isize::MAX as usize => {
                "raise the limit of the container or of `ulimit`, make the model or the batch smaller, or deal the model to several ranks \
                 (`paceline train --zero 3`)"
            }
            Self::Memory { .. } => {
                "raise GroupOptions::arena_bytes, drop buffers that are no longer needed, or deal the gradients to several ranks \
                 (`paceline train --zero 2`)"
            }
            Self::Mismatch { calls, .. } if calls.ends_with(MIXED) => {
                "between hosts a long call is cut in one way for all ranks: bring a buffer of the group on every rank, or \
                 ordinary memory on every rank"
            }
            Self::Mismatch { .. } => {
                "every rank must issue the same operations in the same order; look for a branch that depends on the rank"
            }
            Self::PeerLeft { .. } => {
                "that rank ran fewer steps; give all ranks the same number of batches"
            }
            Self::Deadline { culprits, .. } if culprits.is_empty() => {
                "look at the network between the hosts; when it is merely slow, raise PACELINE_TIMEOUT_SECONDS or send less (--comm-hook)"
            }
            Self::Deadline { .. } => {
                "see what the named rank is doing; raise PACELINE_TIMEOUT_SECONDS when it is merely slow"
            }
            Self::Peer { .. } => "start all ranks from the same build and with the same settings",
            Self::NotJoined { .. } => {
                "a replacement joins in `Ddp::new`: until then it cannot take part in operations between ranks"
            }
            Self::Disconnected { .. } => {
                "look for what ends connections between these hosts, such as a firewall"
            }
            Self::PeerLost { .. } => {
                "look at that rank's own output for its panic, signal or exit code"
            }
            _ => return None,
        };
        Some(text.into())
    }
}

paceline_rendezvous::debug_with_hint!(Error);

/// Why a buffer has no room.
fn full(used: usize, size: usize) -> String {
    match size == isize::MAX as usize {
        true => "the process can have no more memory".into(),
        false => format!("{used} of the arena's {size} bytes are in use"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_read_as_sentences() {
        let operation = Operation {
            kind: OpKind::AllReduce,
            seq: 4411,
            bucket: Some(3),
        };
        for (error, expected) in [
            (
                Error::PeerLost {
                    rank: 1,
                    place: "host b, pid 7".into(),
                    during: Some(operation),
                },
                "rank 1 (host b, pid 7) died while this rank was in all-reduce #4411 (bucket 3)",
            ),
            (
                Error::Deadline {
                    rank: 0,
                    operation,
                    waited: Duration::from_secs(60),
                    culprits: vec![2],
                    missing: "rank 2 (host b, pid 8) is in the data loader at step 812 since 14 s"
                        .into(),
                    waiting: "; ranks 0, 1 wait".into(),
                },
                "all-reduce #4411 (bucket 3) timed out after 60 s on rank 0: rank 2 (host b, pid 8) is in the data \
                 loader at step 812 since 14 s; ranks 0, 1 wait",
            ),
            (
                Error::Absent {
                    rank: 0,
                    missing: vec![2, 3],
                    what: "come",
                    waited: Duration::from_millis(1500),
                    detail: String::new(),
                },
                "rank 0 waited 1.5 s for ranks 2, 3, which did not come",
            ),
        ] {
            assert_eq!(error.to_string(), expected);
        }
    }
}
