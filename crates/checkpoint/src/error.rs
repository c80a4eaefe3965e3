//! Errors of saving and loading checkpoints.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use paceline_ddp::DdpError;

use crate::lock::{LockError, in_use};

/// Errors of checkpoints.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// Another job uses the folder, or a process of this job that is lost but not gone.
    #[error("checkpoint folder {} {}", path.display(), in_use(.waited))]
    InUse {
        /// The folder.
        path: PathBuf,
        /// How long this process has waited for it; zero if another job has it.
        waited: Duration,
    },
    /// There are checkpoints, but all are damaged.
    #[error("no valid checkpoint in {}{}", path.display(), list(.reasons))]
    NoneValid {
        /// The folder.
        path: PathBuf,
        /// The reason for each.
        reasons: Vec<String>,
    },
    /// There are fewer checkpoints than are to be averaged.
    #[error("{} has {found} whole checkpoints, but {count} are to be averaged", path.display())]
    TooFew {
        /// The folder.
        path: PathBuf,
        /// Those that can be read.
        found: usize,
        /// Those asked for.
        count: usize,
    },
    /// A checkpoint does not fit the program.
    #[error("checkpoint {} does not fit this program: {what}", path.display())]
    Misfit {
        /// The checkpoint.
        path: PathBuf,
        /// The first difference.
        what: String,
    },
    /// A file or folder cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// The failed action, for example `write checkpoint`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// An object store cannot be used.
    #[error("cannot {action} {url}: {what}")]
    Remote {
        /// The failed action, for example `download from`.
        action: &'static str,
        /// The place there.
        url: String,
        /// The cause.
        what: String,
        /// Advice, if there is any.
        hint: Option<String>,
    },
    /// The run's ledger cannot be read or continued.
    #[error("cannot {action} ledger {}: {source}", path.display())]
    Ledger {
        /// The failed action, for example `continue`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error, or what is wrong with the file.
        source: io::Error,
    },
    /// The digests of a run's gradients cannot be read or continued.
    #[error("cannot {action} digests {}: {source}", path.display())]
    Digests {
        /// The failed action, for example `read`.
        action: &'static str,
        /// The file, or the folder of all ranks' files.
        path: PathBuf,
        /// The system's error, or what is wrong with the file.
        source: io::Error,
    },
    /// Rank 0 failed for all ranks, as it says itself.
    #[error("{0}")]
    Rank0(String),
    /// The job has no folder in memory.
    #[error("this job has no folder in memory for checkpoints")]
    NoMemory,
    /// The ranks could not exchange a checkpoint.
    #[error(transparent)]
    Ddp(#[from] DdpError),
}

impl From<paceline_collective::Error> for CheckpointError {
    fn from(error: paceline_collective::Error) -> Self {
        Self::Ddp(error.into())
    }
}

impl CheckpointError {
    /// Advice, if there is any.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::InUse { waited, .. } if !waited.is_zero() => Some(
                "look after the machine that the lost process ran on, then resume; earlier checkpoints are untouched".into(),
            ),
            Self::InUse { .. } => {
                Some("wait for the other job to end, or save in another folder".into())
            }
            Self::NoneValid { path, .. } => {
                Some(format!("to start over, move {} away", path.display()))
            }
            Self::TooFew { .. } => {
                Some("average fewer, or train with a larger --keep".into())
            }
            Self::File { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                Some("free some space and resume; earlier checkpoints are untouched".into())
            }
            Self::Ledger {
                action: "continue", ..
            } => Some(
                "move it away, and the run begins another one; checkpoints are untouched".into(),
            ),
            Self::Digests {
                action: "continue", ..
            } => Some("move it away, and the rank begins another one".into()),
            Self::NoMemory => Some(
                "start it with `paceline run` or `paceline train`, on hosts with /dev/shm".into(),
            ),
            Self::File { .. } => Some("earlier checkpoints are untouched".into()),
            Self::Remote { hint, .. } => hint.clone(),
            Self::Ddp(error) => error.hint(),
            Self::Ledger { .. } | Self::Digests { .. } | Self::Misfit { .. } | Self::Rank0(_) => {
                None
            }
        }
    }
}

paceline_rendezvous::debug_with_hint!(CheckpointError);

/// Makes an error of the system in a folder of checkpoints one of saving.
pub(crate) fn failed_in(folder: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    move |source| CheckpointError::File {
        action: "save a checkpoint in",
        path: folder.to_path_buf(),
        source,
    }
}

/// The same of state that cannot be saved, in words.
pub(crate) fn unusable(folder: &Path) -> impl FnOnce(String) -> CheckpointError {
    move |what| failed_in(folder)(io::Error::other(what))
}

/// The error of a folder that is not locked.
pub(crate) fn not_locked(folder: &Path) -> impl FnOnce(LockError) -> CheckpointError {
    let path = folder.to_path_buf();
    move |error| match error {
        LockError::InUse { waited } => CheckpointError::InUse { path, waited },
        LockError::File(source) => CheckpointError::File {
            action: "lock checkpoint folder",
            path,
            source,
        },
    }
}

fn list(reasons: &[String]) -> String {
    reasons
        .iter()
        .map(|reason| format!("\n  {reason}"))
        .collect()
}
