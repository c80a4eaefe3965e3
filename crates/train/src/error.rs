//! Errors that end training, and their exit codes.

use std::path::PathBuf;

use paceline_checkpoint::CheckpointError;
use paceline_ddp::DdpError;
use paceline_ddp::device::DeviceError;
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
    /// The loss is not finite.
    #[error("the loss is {loss} at step {step}: training has diverged")]
    NotFinite {
        /// The step.
        step: u64,
        /// The mean loss.
        loss: f32,
    },
    /// No scale of the loss keeps the gradients finite.
    #[error("the gradients of step {step} are not finite, even with the loss scaled by {scale:e}")]
    NoScale {
        /// The step.
        step: u64,
        /// The scale.
        scale: f32,
    },
    /// The run directory belongs to a running job.
    #[error("run directory {} is in use by another job", path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// The run directory holds a finished or interrupted run.
    #[error("run directory {} already holds a run", path.display())]
    NotEmpty {
        /// The directory.
        path: PathBuf,
    },
    /// There is nothing to resume.
    #[error("no valid checkpoint in {}", path.display())]
    NoCheckpoint {
        /// The folder searched.
        path: PathBuf,
    },
    /// Too many devices for the strategy `model`.
    #[error("strategy model: the model has {parts} parts for {devices} devices")]
    MoreDevicesThanParts {
        /// The devices.
        devices: usize,
        /// The layers or blocks that can be on devices of their own.
        parts: usize,
    },
    /// The run is of another task.
    #[error("{} holds no language model", path.display())]
    NoLanguageModel {
        /// The run directory.
        path: PathBuf,
    },
    /// The tokenizer's file cannot be used.
    #[error("{}: {why}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// No tokenizer could be trained.
    #[error("cannot train a tokenizer: {why}")]
    TokenizerTraining {
        /// Why not.
        why: String,
    },
    /// The tokenizer does not take the prompt.
    #[error("the tokenizer cannot encode the prompt: {why}")]
    Prompt {
        /// Why not.
        why: String,
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
    /// Advice, if there is any.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Data(error) => error.hint(),
            Self::Sampler(error) => error.hint(),
            Self::Ddp(error) => error.hint(),
            Self::Pipeline(error) => error.hint(),
            Self::Parts(_) => Some("choose another --tp".into()),
            Self::Device(error) => error.hint(),
            Self::NotFinite { .. } => Some(
                "lower --lr, set --clip-norm 1, or raise --warmup; earlier checkpoints are kept".into(),
            ),
            Self::NoScale { .. } => Some(
                "train with --precision bf16, which has the range of f32, or check why the gradients are so large".into(),
            ),
            Self::InUse { .. } => Some("choose another --run-dir, or wait for the other job to end".into()),
            Self::NotEmpty { .. } => Some("add --resume to continue it, or choose another --run-dir; --resume auto does either".into()),
            Self::NoCheckpoint { .. } => Some("start over without --resume".into()),
            Self::MoreDevicesThanParts { parts, .. } => Some(format!("use at most --devices {parts}")),
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
            Self::NoLanguageModel { .. } => {
                Some("name the run of a `paceline train --task lm`".into())
            }
            Self::Tokenizer { .. } => Some(
                "--tokenizer takes bytes, bpe, or a tokenizer.json in Hugging Face's format".into(),
            ),
            Self::TokenizerTraining { .. } => Some(
                "use --tokenizer bytes, or build with `--features tokenizers`".into(),
            ),
            Self::Loader(_) | Self::Prompt { .. } => None,
        }
    }

    /// For an error that all ranks have at the same time: the rank that reports it.
    pub(crate) fn spokesman(&self) -> Option<usize> {
        match self {
            Self::Ddp(error @ (DdpError::Mismatch { .. } | DdpError::Diverged { .. })) => {
                error.culprit()
            }
            Self::NotFinite { .. }
            | Self::NoScale { .. }
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
            | Self::NoLanguageModel { .. }
            | Self::Tokenizer { .. }
            | Self::TokenizerTraining { .. }
            | Self::Prompt { .. }
            | Self::InUse { .. }
            | Self::NotEmpty { .. }
            | Self::NoCheckpoint { .. }
            | Self::MoreDevicesThanParts { .. }
            | Self::Checkpoint(
                CheckpointError::InUse { .. }
                | CheckpointError::NoneValid { .. }
                | CheckpointError::Misfit { .. },
            ) => FailureClass::Usage,
            Self::File { .. }
            | Self::Checkpoint(CheckpointError::File { .. })
            | Self::Device(_)
            | Self::Ddp(DdpError::Signals(_)) => FailureClass::Environment,
            Self::Pipeline(PipelineError::Message { error, .. }) if error.is_deadline() => {
                FailureClass::Deadline
            }
            Self::Ddp(DdpError::Collective(error))
            | Self::Checkpoint(CheckpointError::Ddp(DdpError::Collective(error)))
                if error.is_deadline() =>
            {
                FailureClass::Deadline
            }
            Self::Ddp(_)
            | Self::Pipeline(_)
            | Self::Checkpoint(_)
            | Self::Loader(_)
            | Self::NotFinite { .. }
            | Self::NoScale { .. } => FailureClass::Job,
        }
    }
}

paceline_rendezvous::debug_with_hint!(TrainError);
