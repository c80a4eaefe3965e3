//! The errors of data-parallel training.

use std::fmt;
use std::sync::Arc;

use crate::precision::Precision;

/// Errors of data-parallel training. Clone, because a failed group gives the same first cause to every later call.
#[derive(Clone, thiserror::Error)]
pub enum DdpError {
    /// A collective failed; the group is latched.
    #[error(transparent)]
    Collective(#[from] paceline_collective::Error),
    /// Ranks brought different models or settings to `Ddp::new`.
    #[error("{}", Differing(.what, .rank0, .differing))]
    Mismatch {
        /// What differs first, for example `parameter 3 (conv1.weight)`.
        what: String,
        /// Rank 0's value.
        rank0: String,
        /// Every rank that differs from rank 0, with its value.
        differing: Vec<(usize, String)>,
    },
    /// A parameter has a type that f32 sums would lose digits of.
    #[error(
        "parameter {path} has type {dtype}; gradients are summed in F32, for parameters of F32, F16 and BF16"
    )]
    UnsupportedType {
        /// Path of the parameter in the model.
        path: String,
        /// Its element type.
        dtype: String,
    },
    /// The model has nothing to train.
    #[error("the model has no parameter that requires gradients")]
    NoParameters,
    /// The number of shards does not fit the number of ranks.
    #[error("{shards} shards cannot be dealt to {world} ranks: every rank needs at least one")]
    Shards {
        /// Shards asked for.
        shards: usize,
        /// Ranks in the group.
        world: usize,
    },
    /// A step's plan was made for another job.
    #[error("the plan of the step has {shards} shards, and the job has {expected}")]
    Plan {
        /// Shards of the plan.
        shards: usize,
        /// Shards of the job.
        expected: usize,
    },
    /// A step was not run as announced.
    #[error("step {step}, shard {shard}: {announced} micro-batches announced, {done} run")]
    MicroBatches {
        /// Step number.
        step: u64,
        /// Shard in which it happened.
        shard: usize,
        /// Micro-batches announced.
        announced: usize,
        /// Backward passes that were run.
        done: usize,
    },
    /// The model given to a step is not the one given to `Ddp::new`.
    #[error("the model of step {step} has other parameters than the one given to Ddp::new: {what}")]
    ModelChanged {
        /// Step number.
        step: u64,
        /// What differs first.
        what: String,
    },
    /// Replicas no longer hold the same weights.
    #[error(
        "weights differ between ranks at step {step}: {path} of {ranks:?} is not what the others hold"
    )]
    Diverged {
        /// Step at whose start the weights were compared.
        step: u64,
        /// Parameter in which the difference was found.
        path: String,
        /// Ranks that differ from the majority.
        ranks: Vec<usize>,
    },
    /// The device that computes does not do what it is asked for.
    #[error("device: {0}")]
    Device(String),
    /// NCCL, or the driver below it.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Nccl(Box<paceline_nccl::NcclError>),
    /// The backend asked for cannot be used.
    #[error("{0}")]
    Backend(&'static str),
    /// The device does not compute in the type asked for.
    #[error("{device} does not compute in {precision}")]
    UnsupportedPrecision {
        /// What was asked for.
        precision: Precision,
        /// The device.
        device: String,
    },
    /// A name of `keep_f32` fits nothing in the model.
    #[error("keep_f32 names {name}, which the model has neither as a path nor as a type of module")]
    NothingToKeep {
        /// The name.
        name: String,
    },
    /// Tensors of different types met in the user's part of a step.
    #[error("step {step}: tensors of different types meet: {message}")]
    MixedTypes {
        /// Step number.
        step: u64,
        /// What Burn said.
        message: String,
    },
    /// The loss of a step in mixed precision is not f32.
    #[error("step {step}: the loss has type {dtype}, which has too few digits for it")]
    LossType {
        /// Step number.
        step: u64,
        /// Its type.
        dtype: String,
    },
    /// A gradient scaler cannot work so, or not here.
    #[error("gradient scaler: {what}")]
    Scaler {
        /// What is wrong.
        what: String,
    },
    /// The system does not let this process handle the signals that ask it to stop.
    #[error("cannot listen for signals: {0}")]
    Signals(Arc<std::io::Error>),
}

impl DdpError {
    /// Advice, where there is some.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Collective(error) => error.hint(),
            Self::Mismatch { .. } => Some(
                "start every rank with the same program, model and settings".into(),
            ),
            Self::UnsupportedType { .. } => Some(
                "keep parameters in f32 and cast inside the forward pass".into(),
            ),
            Self::NoParameters => Some(
                "create the model on an autodiff device, for example Device::flex().autodiff()".into(),
            ),
            Self::Shards { world, .. } => Some(format!("use at least {world} shards")),
            Self::Plan { .. } => Some("make the plans with Ddp::batches".into()),
            Self::MicroBatches { .. } => Some(
                "call ShardStep::micro_batches(n) first when a shard has another number than DdpOptions::accumulate"
                    .into(),
            ),
            Self::ModelChanged { .. } => Some("make a new Ddp for a changed model".into()),
            Self::Diverged { .. } => Some(
                "something outside the reduced gradients changed the weights: look for updates that depend on \
                 the rank, on time or on unseeded randomness, and on a GPU for sums that Burn does not repeat (its \
                 clipping by norm, Lamb, Muon: see docs/devices.md)"
                    .into(),
            ),
            #[cfg(feature = "cuda")]
            Self::Nccl(error) => error.hint(),
            Self::Backend(_) => Some("leave the backend to itself (auto)".into()),
            Self::UnsupportedPrecision { .. } => {
                Some("choose f32, or the other one of bf16 and fp16, or another device".into())
            }
            Self::NothingToKeep { .. } => Some(
                "a type is written as in the program, for example LayerNorm; a path with dots, for example encoder.norm"
                    .into(),
            ),
            Self::MixedTypes { .. } => Some(
                "cast what goes into the model with Precision::input, and wrap layers that stay in f32 with in_f32; \
                 or change which ones do with DdpOptions::keep_f32"
                    .into(),
            ),
            Self::LossType { .. } => {
                Some("cast what comes out of the model with Precision::logits, before the loss".into())
            }
            Self::Device(_) | Self::Scaler { .. } | Self::Signals(_) => None,
        }
    }

    /// The rank to blame, where one is known.
    pub fn culprit(&self) -> Option<usize> {
        match self {
            Self::Collective(error) => error.culprit(),
            Self::Mismatch { differing, .. } => differing.first().map(|(rank, _)| *rank),
            Self::Diverged { ranks, .. } => ranks.first().copied(),
            #[cfg(feature = "cuda")]
            Self::Nccl(error) => error.culprit(),
            _ => None,
        }
    }
}

paceline_rendezvous::debug_with_hint!(DdpError);

/// Renders a mismatch: the item, rank 0's value, and the ranks with other values.
struct Differing<'a>(&'a String, &'a String, &'a Vec<(usize, String)>);

impl fmt::Display for Differing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(what, rank0, differing) = self;
        write!(f, "ranks do not agree on {what}: rank 0 has {rank0}")?;
        for (rank, value) in differing.iter() {
            write!(f, ", rank {rank} has {value}")?;
        }
        Ok(())
    }
}
