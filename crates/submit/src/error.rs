//! Why a job cannot be written or submitted.

use std::io;
use std::path::{Path, PathBuf};

/// An invalid description, or a submission that failed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The job's name does not fit the scheduler.
    #[error("`{name}` cannot be the job's name: {why}")]
    Name {
        /// The name.
        name: String,
        /// The rule that it breaks.
        why: String,
    },
    /// A setting has a value that cannot be written down or means nothing.
    #[error("{setting} is `{value}`, expected {expected}")]
    Setting {
        /// The option's name.
        setting: &'static str,
        /// What it was given.
        value: String,
        /// What it takes.
        expected: &'static str,
    },
    /// A name cannot be an environment variable.
    #[error("`{name}` cannot be the name of an environment variable")]
    VariableName {
        /// The name.
        name: String,
    },
    /// A variable that the job makes for itself.
    #[error("`{name}` cannot be set: every job makes its own")]
    OwnVariable {
        /// The variable.
        name: &'static str,
    },
    /// A word of the job has a NUL byte, which no command line and no variable can have.
    #[error("`{word}` contains a NUL byte")]
    NulByte {
        /// The word, without its NUL bytes.
        word: String,
    },
    /// CPUs for each rank, where the node itself says how many ranks there are.
    #[error("{cpus} CPUs for each rank, but the number of `{ranks}` ranks is not known yet")]
    UnknownRanks {
        /// CPUs of a rank.
        cpus: usize,
        /// The word.
        ranks: String,
    },
    /// The scheduler would kill the ranks before their own time to stop is over.
    #[error("ranks may take {ranks} s to stop, and the scheduler kills them after {scheduler} s")]
    Grace {
        /// Seconds that the launcher gives the ranks.
        ranks: u64,
        /// Seconds that the scheduler gives the job.
        scheduler: u64,
        /// The option that gives the job more.
        option: &'static str,
    },
    /// A manifest could not be written as YAML.
    #[error("the manifest cannot be written as YAML: {reason}")]
    Yaml {
        /// The serializer's words.
        reason: String,
    },
    /// The file could not be written.
    #[error("cannot write {}", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The scheduler's program is not installed here.
    #[error("`{program}` is not in PATH")]
    NoScheduler {
        /// The program.
        program: &'static str,
        /// The command that would have been run.
        command: String,
    },
    /// The scheduler's program could not be started or watched.
    #[error("`{program}` could not be run")]
    Run {
        /// The program.
        program: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The scheduler's program refused the job and has printed why.
    #[error("`{program}` ended with {status}")]
    Refused {
        /// The program.
        program: &'static str,
        /// Its exit status.
        status: String,
        /// The file that it was given.
        file: PathBuf,
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
    /// For `map_err` on what is done to a file.
    pub(crate) fn write(path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Write { path, source }
    }

    /// Advice for the user.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Name { .. } => Some("give another one with --job-name".to_owned()),
            Self::UnknownRanks { .. } => Some(
                "give --nproc-per-node a number, or ask for whole nodes without --cpus-per-rank"
                    .to_owned(),
            ),
            Self::Grace { option, .. } => Some(format!(
                "give the job more time with {option}, or the ranks less with --shutdown-timeout"
            )),
            Self::NoScheduler { command, .. } => Some(format!(
                "the file is written; where the scheduler's programs are, run `{command}`"
            )),
            Self::Refused { file, .. } => Some(format!(
                "it was given {}, which stays for you to look at",
                file.display()
            )),
            Self::Deadline { .. } => {
                Some("is the scheduler's server up? It may have the job all the same".to_owned())
            }
            _ => None,
        }
    }

    /// Whether the description is at fault, and not the machine or the scheduler.
    pub fn is_usage(&self) -> bool {
        !matches!(
            self,
            Self::Write { .. }
                | Self::NoScheduler { .. }
                | Self::Run { .. }
                | Self::Refused { .. }
                | Self::Deadline { .. }
                | Self::Yaml { .. }
        )
    }
}

paceline_rendezvous::debug_with_hint!(SubmitError);
