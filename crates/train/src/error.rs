//! Errors that end training, and their exit codes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use paceline_checkpoint::CheckpointError;
use paceline_ddp::DdpError;
use paceline_ddp::device::DeviceError;
use paceline_ddp::loader::LoaderError;
use paceline_ddp::sampler::SamplerError;
use paceline_split::pipeline::PipelineError;
use paceline_split::tensor::PartsError;

use crate::data::DataError;

/// Kinds of failure that scripts can distinguish; the command line maps them to exit codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureClass {
    /// The job failed.
    Job,
    /// The user's input cannot be used.
    Usage,
    /// The machine lacks something needed.
    Environment,
    /// Something did not happen in time.
    Deadline,
}

/// Errors of the trainer.
#[derive(thiserror::Error)]
pub enum TrainError {
    /// The data cannot be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The data does not fit the batch and shards.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// Data-parallel training failed.
    #[error(transparent)]
    Ddp(#[from] DdpError),
    /// The ranks ended with different models. Its culprit is a rank of the job and not of a group of replicas.
    #[error(transparent)]
    Ended(DdpError),
    /// The parts of `--tp` do not fit the ranks or the model.
    #[error(transparent)]
    Parts(#[from] PartsError),
    /// The pipeline of `--pp` failed.
    #[error(transparent)]
    Pipeline(PipelineError),
    /// There is no device to train on.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A batch could not be prepared.
    #[error("{0}")]
    Loader(String),
    /// The loss or the gradients are not finite, on all ranks.
    #[error("{message}")]
    NotFinite {
        /// Which of them, and in which step.
        message: String,
        /// Advice.
        hint: &'static str,
    },
    /// The user's input cannot be used.
    #[error("{message}")]
    Usage {
        /// What is wrong with it.
        message: String,
        /// Advice, if there is any.
        hint: Option<String>,
    },
    /// There is nothing to resume.
    #[error("no valid checkpoint in {}", path.display())]
    NoCheckpoint {
        /// The folder searched.
        path: PathBuf,
    },
    /// A checkpoint cannot be written, read or used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A file cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// The failed action, for example `write checkpoint`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

impl From<PipelineError> for TrainError {
    fn from(error: PipelineError) -> Self {
        match error {
            PipelineError::Ddp(error) => Self::Ddp(error),
            error => Self::Pipeline(error),
        }
    }
}

impl From<paceline_collective::Error> for TrainError {
    fn from(error: paceline_collective::Error) -> Self {
        Self::Ddp(DdpError::Collective(error))
    }
}

impl TrainError {
    /// The user's input cannot be used, with advice: data that a task cannot read, say.
    pub fn usage(message: String, hint: impl Into<String>) -> Self {
        let hint = Some(hint.into());
        Self::Usage { message, hint }
    }

    /// For `map_err` on what is done with a file.
    pub(crate) fn file(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::File {
            action,
            path: path.to_owned(),
            source,
        }
    }

    /// Advice, if there is any.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Data(error) => error.hint(),
            Self::Sampler(error) => error.hint(),
            Self::Ddp(error) | Self::Ended(error) => error.hint(),
            Self::Pipeline(error) => error.hint(),
            Self::Parts(_) => Some("choose another --tp".into()),
            Self::Device(error) => error.hint(),
            Self::NotFinite { hint, .. } => Some((*hint).into()),
            Self::Usage { hint, .. } => hint.clone(),
            Self::NoCheckpoint { .. } => Some("start over without --resume".into()),
            Self::Checkpoint(CheckpointError::NoneValid { path, .. }) => Some(format!(
                "start over without --resume: in another --run-dir, or here after `rm -r {}`",
                path.display()
            )),
            Self::File { source, .. } | Self::Checkpoint(CheckpointError::File { source, .. })
                if source.kind() == std::io::ErrorKind::StorageFull =>
            {
                Some("free some space, then continue with --resume; earlier checkpoints are untouched".into())
            }
            Self::File { .. } => Some("earlier checkpoints are untouched".into()),
            Self::Checkpoint(error) => error.hint(),
            Self::Loader(_) => None,
        }
    }

    /// For an error that all ranks have at the same time: the rank that reports it.
    pub(crate) fn spokesman(&self) -> Option<usize> {
        match self {
            Self::Ddp(error @ (DdpError::Mismatch { .. } | DdpError::OtherBits { .. })) => {
                error.culprit()
            }
            Self::Ddp(error @ DdpError::Diverged { .. }) | Self::Ended(error) => {
                Some(error.culprit().unwrap_or(0))
            }
            Self::NotFinite { .. }
            | Self::NoCheckpoint { .. }
            | Self::Checkpoint(CheckpointError::Rank0(_)) => Some(0),
            _ => None,
        }
    }

    /// The kind of failure.
    pub fn class(&self) -> FailureClass {
        match self {
            Self::Data(_)
            | Self::Sampler(_)
            | Self::Parts(_)
            | Self::Usage { .. }
            | Self::NoCheckpoint { .. }
            | Self::Checkpoint(
                CheckpointError::InUse {
                    waited: Duration::ZERO,
                    ..
                }
                | CheckpointError::NoneValid { .. }
                | CheckpointError::TooFew { .. }
                | CheckpointError::Misfit { .. },
            ) => FailureClass::Usage,
            Self::File { .. }
            | Self::Checkpoint(
                CheckpointError::InUse { .. }
                | CheckpointError::File { .. }
                | CheckpointError::Remote { .. },
            )
            | Self::Device(_)
            | Self::Ddp(DdpError::Signals(_)) => FailureClass::Environment,
            Self::Ddp(error) | Self::Checkpoint(CheckpointError::Ddp(error))
                if error.collective().is_some_and(|error| error.is_deadline()) =>
            {
                FailureClass::Deadline
            }
            Self::Ddp(_)
            | Self::Ended(_)
            | Self::Pipeline(_)
            | Self::Checkpoint(_)
            | Self::Loader(_)
            | Self::NotFinite { .. } => FailureClass::Job,
        }
    }
}

paceline_rendezvous::debug_with_hint!(TrainError);

/// Why samples could not be read ahead.
pub(crate) fn loader_error(error: LoaderError<TrainError>) -> TrainError {
    match error {
        LoaderError::Load { cause, .. } => cause,
        error => TrainError::Loader(error.to_string()),
    }
}
