//! Why a run cannot be shown.

use std::io;
use std::path::{Path, PathBuf};

/// Errors of reading a run.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The folder is not a run's.
    #[error("{} holds no run: it has no metrics.jsonl", folder.display())]
    NoRun {
        /// The folder.
        folder: PathBuf,
    },
    /// No folder in this one is a run's.
    #[error("there is no run below {}", folder.display())]
    NoRuns {
        /// The folder.
        folder: PathBuf,
    },
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl ReportError {
    /// Advice, if there is any.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::NoRun { .. } => Some("name the run directory of a `paceline train`".into()),
            Self::NoRuns { .. } => Some("name a run directory, or train first".into()),
            Self::File { .. } => None,
        }
    }

    /// For `map_err` on what is done with a file.
    pub(crate) fn file(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { path, source }
    }
}
