//! Why a job cannot be written or submitted.

use std::io;

/// An invalid description, or a submission that failed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The description is at fault.
    #[error("{message}")]
    Usage {
        /// What is wrong with it.
        message: String,
        /// Advice, if there is any.
        hint: Option<String>,
    },
    /// The machine or the scheduler is.
    #[error("{message}")]
    Failed {
        /// What failed.
        message: String,
        /// Advice, if there is any.
        hint: Option<String>,
        /// The system's answer.
        source: Option<io::Error>,
    },
    /// The scheduler's program did not answer in time, and was killed.
    #[error("`{program}` did not answer within {seconds} s")]
    Deadline {
        /// The program.
        program: &'static str,
        /// How long it was waited for.
        seconds: u64,
    },
}

impl SubmitError {
    pub(crate) fn usage(message: String) -> Self {
        let hint = None;
        Self::Usage { message, hint }
    }

    /// The job's name does not fit the scheduler.
    pub(crate) fn name(name: &str, why: &str) -> Self {
        Self::Usage {
            message: format!("`{name}` cannot be the job's name: {why}"),
            hint: Some("give another one with --job-name".to_owned()),
        }
    }

    /// A setting has a value that cannot be written down or means nothing.
    pub(crate) fn setting(setting: &str, value: &str, expected: &str) -> Self {
        Self::usage(format!("{setting} is `{value}`, expected {expected}"))
    }

    /// The scheduler would kill the ranks before their own time to stop is over; `option` gives the job more.
    pub(crate) fn grace(ranks: u64, scheduler: u64, option: &str) -> Self {
        Self::Usage {
            message: format!(
                "ranks may take {ranks} s to stop, and the scheduler kills them after {scheduler} s"
            ),
            hint: Some(format!(
                "give the job more time with {option}, or the ranks less with --shutdown-timeout"
            )),
        }
    }

    pub(crate) fn system(message: String) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Failed {
            message,
            hint: None,
            source: Some(source),
        }
    }

    pub(crate) fn failed(message: String, hint: Option<String>) -> Self {
        Self::Failed {
            message,
            hint,
            source: None,
        }
    }

    /// Advice for the user.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Usage { hint, .. } | Self::Failed { hint, .. } => hint.clone(),
            Self::Deadline { .. } => {
                Some("is the scheduler's server up? It may have the job all the same".to_owned())
            }
        }
    }
}

paceline_rendezvous::debug_with_hint!(SubmitError);
