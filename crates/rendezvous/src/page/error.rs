//! Why a job page cannot be made or mapped.

use std::io;
use std::os::fd::RawFd;

use super::SLOTS_MAX;

/// Why a job page cannot be made or mapped.
#[derive(thiserror::Error)]
pub enum PageError {
    /// The number of local ranks is zero or beyond [`SLOTS_MAX`].
    #[error("a job page holds 1 to {SLOTS_MAX} local ranks, asked for {slots}")]
    Slots {
        /// Slots asked for.
        slots: usize,
    },
    /// The operating system refused memory.
    #[error("cannot {operation} the job page")]
    Os {
        /// What was tried.
        operation: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// An inherited descriptor is not a job page of this version.
    #[error("file descriptor {fd} is not this job's page: {reason}")]
    NotAPage {
        /// The descriptor, from `PACELINE_PAGE_FD`.
        fd: RawFd,
        /// What is wrong with it.
        reason: String,
    },
}

impl PageError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::NotAPage { .. } => Some(
                "PACELINE_PAGE_FD is set by the launcher for its own children; a wrapper between launcher and rank \
                 must keep the descriptor open, or unset the variable, and the rank then runs without a page"
                    .into(),
            ),
            Self::Slots { .. } | Self::Os { .. } => None,
        }
    }

    pub(super) fn os(operation: &'static str, source: io::Error) -> Self {
        Self::Os { operation, source }
    }
}

crate::debug_with_hint!(PageError);
