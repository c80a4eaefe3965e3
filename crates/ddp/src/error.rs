//! The errors of data-parallel training.

use std::fmt;
use std::sync::Arc;

use paceline_collective::{Apart, ProcessGroup};
use paceline_nn::{BoxError, CapturedTensor};

use crate::comm_hook::CommHook;
use crate::pace::Straggler;
use crate::precision::Precision;

/// Errors of data-parallel training. Clone, because a failed group gives the same first cause to every later call.
#[derive(Clone, thiserror::Error)]
pub enum DdpError {
    /// A collective failed; the group is latched.
    #[error(transparent)]
    Collective(#[from] paceline_collective::Error),
    /// An operation between the parts of a model failed: along a dimension of the job's mesh, in which ranks have other
    /// numbers.
    #[error("group {group}{}: {error}", .rank.map(|rank| format!(", rank {rank} of the job")).unwrap_or_default())]
    Along {
        /// The group of the ranks.
        group: String,
        /// The job's number of the rank to blame.
        rank: Option<usize>,
        /// The failure, with numbers of the group.
        error: Box<paceline_collective::Error>,
    },
    /// Ranks called `Ddp::new` with different models or settings.
    #[error("{}", Differing(.what, .rank0, .differing))]
    Mismatch {
        /// What differs first, for example `parameter 3 (conv1.weight)`.
        what: String,
        /// Rank 0's value.
        rank0: String,
        /// Every rank that differs from rank 0, with its value.
        differing: Vec<(usize, String)>,
    },
    /// Ranks compute other bits in the same operations, see [`DdpOptions::same_bits`](crate::DdpOptions::same_bits).
    #[error("{}", OtherBits(*.than, .differing))]
    OtherBits {
        /// The rank with which the others were compared.
        than: usize,
        /// Ranks, and the operations in which they differ from it.
        differing: Vec<(Vec<usize>, Vec<&'static str>)>,
    },
    /// A parameter has a type that loses digits in f32 sums.
    #[error(
        "tensor {path} has type {dtype}; expected parameters of F64, F32, F16 or BF16, and running statistics of F32, F16 or BF16"
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
    #[error("{shards} shards are too few for {world} ranks: every rank needs at least one")]
    Shards {
        /// Shards asked for.
        shards: usize,
        /// Ranks in the group.
        world: usize,
    },
    /// A step's plan was made for another job.
    #[error("the step's plan has {shards} shards, but the job has {expected}")]
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
    #[error(
        "the model of step {step} has different parameters from the model given to Ddp::new: {what}"
    )]
    ModelChanged {
        /// Step number.
        step: u64,
        /// What differs first.
        what: String,
    },
    /// Replicas no longer hold the same weights.
    #[error(
        "weights differ between ranks at step {step}: {}; all ranks had the same at step {since}",
        Odd(.what, .ranks)
    )]
    Diverged {
        /// Step at whose start the weights were compared.
        step: u64,
        /// In what they differ: elements of a parameter, or the whole state.
        what: String,
        /// The last step at whose start all ranks are known to have had the same.
        since: u64,
        /// Ranks that differ from the majority, by the numbers that they were started with; empty if there is no majority.
        ranks: Vec<usize>,
        /// The first one's number in the group.
        culprit: Option<usize>,
    },
    /// The device failed, or it cannot do what was requested.
    #[error("device: {0}")]
    Device(String),
    /// NCCL or the CUDA driver failed.
    #[cfg(any(feature = "cuda", test))]
    #[error(transparent)]
    Nccl(Box<paceline_nccl::NcclError>),
    /// The requested backend cannot be used.
    #[error("{0}")]
    Backend(&'static str),
    /// The model has a `SyncBatchNorm`, which needs all shards of a rank at once, but they run one after the other.
    #[error(
        "SyncBatchNorm needs all shards at once, but Ddp::step runs those of a rank one after the other, and the job has \
         {shards} shards on {world} ranks"
    )]
    SyncBatchNorm {
        /// Shards of the job.
        shards: usize,
        /// Ranks in the group.
        world: usize,
    },
    /// A shard without samples cannot take part in a `SyncBatchNorm`.
    #[error(
        "step {step}: shard {shard} has no samples, but the others wait for it in a SyncBatchNorm"
    )]
    NothingToNormalise {
        /// Step number.
        step: u64,
        /// The shard.
        shard: usize,
    },
    /// A shard has ended, but another one of its rank waits for it in a `SyncBatchNorm`.
    #[error("shard {shard} has ended while another shard waits for it in a SyncBatchNorm")]
    NotNormalised {
        /// The shard that has ended.
        shard: usize,
    },
    /// The last step's weights were not passed to `Ddp::average`.
    #[error("step {step}: the weights after the last step have not been averaged")]
    NotAveraged {
        /// Step number.
        step: u64,
    },
    /// A communication hook and another setting exclude each other.
    #[error("communication hook {hook} does not work with {what}: {why}")]
    CommHook {
        /// The hook.
        hook: CommHook,
        /// The other setting.
        what: &'static str,
        /// The reason.
        why: &'static str,
        /// What to do instead.
        instead: &'static str,
    },
    /// Digests of gradients cannot be taken, see [`DdpOptions::record`](crate::DdpOptions::record).
    #[error("gradients are not recorded with {what}")]
    Record {
        /// The other setting.
        what: &'static str,
    },
    /// The device does not support the requested type.
    #[error("{device} does not compute in {precision}")]
    UnsupportedPrecision {
        /// The requested precision.
        precision: Precision,
        /// The device.
        device: String,
    },
    /// A name in `keep_f32` matches nothing in the model.
    #[error("keep_f32 names {name}, which is neither a path nor a module type in the model")]
    NothingToKeep {
        /// The name.
        name: String,
    },
    /// Tensors of different types met in the user's part of a step.
    #[error("step {step}: tensors of different types meet: {message}")]
    MixedTypes {
        /// Step number.
        step: u64,
        /// Burn's message.
        message: String,
    },
    /// The loss of a step in mixed precision is not f32.
    #[error("step {step}: the loss has type {dtype}, which has too few digits for it")]
    LossType {
        /// Step number.
        step: u64,
        /// The loss's type.
        dtype: String,
    },
    /// A block of the model failed in the forward or backward pass.
    #[error("step {step}: {error}")]
    Block {
        /// Step number.
        step: u64,
        /// What failed.
        error: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// A backward pass ran a block whose parameters are sharded twice, or after a block with a lower index.
    #[error(
        "ZeRO stage 3: a backward pass reaches block {block} again or out of order; expected each block at most once, by index"
    )]
    BlockOrder {
        /// The block's index.
        block: usize,
    },
    /// A use of sharded parameters that is not possible.
    #[error("ZeRO stage 3: {0}")]
    Sharded(&'static str),
    /// A gradient scaler has invalid values, or is not supported here.
    #[error("gradient scaler: {what}")]
    Scaler {
        /// What is wrong.
        what: String,
    },
    /// Live recovery does not work with the rest of the settings.
    #[error("live recovery does not work with {what}")]
    Recovery {
        /// The other setting, and why.
        what: &'static str,
    },
    /// This process cannot take the place of a lost rank.
    #[error("it cannot replace a lost rank: {what}")]
    Joining {
        /// Why not.
        what: String,
    },
    /// This rank leaves the job because it is slower than the others, see
    /// [`DdpOptions::exclude_stragglers`](crate::DdpOptions::exclude_stragglers).
    #[error("it leaves the job as a straggler: {0}")]
    Straggler(Straggler),
    /// Ranks that were to go on without a lost one are too far apart.
    #[error(transparent)]
    Apart(#[from] Apart),
    /// The system refused to install handlers for the stop signals.
    #[error("cannot listen for signals: {0}")]
    Signals(Arc<std::io::Error>),
}

impl DdpError {
    /// The failure of a pass in `step`.
    pub(crate) fn of_pass(step: u64, error: BoxError) -> Self {
        let error = match error.downcast::<Self>() {
            Ok(error) => return *error,
            Err(error) => error,
        };
        match error.downcast::<paceline_collective::Error>() {
            Ok(error) => Self::Collective(*error),
            Err(error) => Self::Block {
                step,
                error: error.into(),
            },
        }
    }

    /// An operation of `group`, a part of the job's ranks, failed.
    pub fn along(group: &ProcessGroup, error: paceline_collective::Error) -> Self {
        Self::Along {
            group: group.name().into(),
            rank: error.culprit().map(|rank| group.global_rank(rank)),
            error: Box::new(error),
        }
    }

    /// The failed operation between ranks, if it is one.
    pub fn collective(&self) -> Option<&paceline_collective::Error> {
        match self {
            Self::Collective(error) => Some(error),
            Self::Along { error, .. } => Some(error),
            _ => None,
        }
    }

    /// Whether a step failed because other ranks were lost or gave up, so that this rank's state is as good as before the step.
    pub fn is_loss(&self) -> bool {
        self.collective()
            .is_some_and(paceline_collective::Error::is_loss)
    }

    /// Advice, if there is any.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Collective(error) => error.hint(),
            Self::Along { error, .. } => error.hint(),
            Self::Mismatch { .. } => Some(
                "start every rank with the same program, model and settings".into(),
            ),
            Self::OtherBits { .. } => Some(
                "take machines of one kind, or --same-bits warn (DdpOptions::same_bits) if the model does not use these operations"
                    .into(),
            ),
            Self::UnsupportedType { .. } => Some(
                "keep the tensor in f32 and cast inside the forward pass".into(),
            ),
            Self::NoParameters => Some(
                "create the model on an autodiff device, for example Device::flex().autodiff()".into(),
            ),
            Self::Shards { world, .. } => Some(format!("use at least {world} shards")),
            Self::Plan { .. } => Some("make the plans with Ddp::batches".into()),
            Self::MicroBatches { .. } => Some(
                "call ShardStep::micro_batches(n) first if a shard's number of micro-batches is not DdpOptions::accumulate"
                    .into(),
            ),
            Self::ModelChanged { .. } => Some("make a new Ddp for a changed model".into()),
            Self::Diverged { .. } => Some(
                "something outside the reduced gradients changed the weights: look for updates that depend on \
                 the rank, on time or on unseeded randomness, and on a GPU for sums that Burn does not repeat (its \
                 clipping by norm, Lamb, Muon: see docs/devices.md)"
                    .into(),
            ),
            #[cfg(any(feature = "cuda", test))]
            Self::Nccl(error) => error.hint(),
            Self::Backend(_) => Some("leave the backend at its default (auto)".into()),
            Self::SyncBatchNorm { world, .. } => {
                Some(format!(
                    "call Ddp::step_on_replicas, which runs each shard in a thread, set the number of shards to {world}, or \
                     use BatchNorm"
                ))
            }
            Self::NothingToNormalise { .. } | Self::NotNormalised { .. } => {
                Some("run the layer equally often in every shard, without an incomplete last batch".into())
            }
            Self::NotAveraged { .. } => {
                Some(
                    "pass the model to Ddp::average after every step of the optimizer, and to Ddp::end_round before a \
                     checkpoint"
                        .into(),
                )
            }
            Self::Record { .. } => Some("leave out the record, or the other setting".into()),
            Self::CommHook { instead, .. } => Some((*instead).into()),
            Self::UnsupportedPrecision { .. } => {
                Some("choose f32, the other one of bf16 and fp16, or another device".into())
            }
            Self::NothingToKeep { .. } => Some(
                "write a type as in the program, for example LayerNorm, and a path with dots, for example encoder.norm"
                    .into(),
            ),
            Self::MixedTypes { .. } => Some(
                "cast the model's input with Precision::input, and wrap layers that stay in f32 with in_f32; \
                 DdpOptions::keep_f32 lists those layers"
                    .into(),
            ),
            Self::LossType { .. } => {
                Some("cast the model's output with Precision::logits before the loss".into())
            }
            Self::Block { error, .. } if error.is::<CapturedTensor>() => {
                Some("pass the tensor as a part of the block's input".into())
            }
            Self::BlockOrder { .. } => Some(
                "give blocks indices in the order of the forward pass, and use a lower stage of ZeRO if one runs twice".into(),
            ),
            Self::Recovery { .. } => Some(
                "leave recovery at none: the launcher then restarts the job from its last checkpoint (--max-restarts)".into(),
            ),
            Self::Apart(_) => Some(
                "every rank must call Ddp::step and Ddp::with_recovery in the same order".into(),
            ),
            Self::Block { .. }
            | Self::Device(_)
            | Self::Joining { .. }
            | Self::Scaler { .. }
            | Self::Sharded(_)
            | Self::Signals(_)
            | Self::Straggler(_) => None,
        }
    }

    /// Whether the program or its settings have to change: starting it again would fail the same way.
    pub(crate) fn is_configuration(&self) -> bool {
        match self {
            Self::Collective(error) => error.is_configuration(),
            Self::Along { error, .. } => error.is_configuration(),
            Self::Mismatch { .. }
            | Self::OtherBits { .. }
            | Self::UnsupportedType { .. }
            | Self::NoParameters
            | Self::Shards { .. }
            | Self::Backend(_)
            | Self::CommHook { .. }
            | Self::Record { .. }
            | Self::SyncBatchNorm { .. }
            | Self::UnsupportedPrecision { .. }
            | Self::NothingToKeep { .. }
            | Self::Recovery { .. }
            | Self::Scaler { .. } => true,
            _ => false,
        }
    }

    /// The rank to blame, if known.
    pub fn culprit(&self) -> Option<usize> {
        match self {
            Self::Collective(error) => error.culprit(),
            Self::Along { rank, .. } => *rank,
            Self::Mismatch { differing, .. } => differing.first().map(|(rank, _)| *rank),
            Self::OtherBits { differing, .. } => differing.first()?.0.first().copied(),
            Self::Apart(apart) => Some(apart.rank),
            Self::Diverged { culprit, .. } => *culprit,
            #[cfg(any(feature = "cuda", test))]
            Self::Nccl(error) => error.culprit(),
            _ => None,
        }
    }
}

paceline_rendezvous::debug_with_hint!(DdpError);

/// Renders a difference in weights.
struct Odd<'a>(&'a String, &'a Vec<usize>);

impl fmt::Display for Odd<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(what, ranks) = self;
        match ranks.is_empty() {
            true => write!(f, "no majority agrees on {what}"),
            false => write!(f, "{what} on ranks {ranks:?} differ from the other ranks"),
        }
    }
}

/// Renders the operations in which ranks compute other bits.
struct OtherBits<'a>(usize, &'a Vec<(Vec<usize>, Vec<&'static str>)>);

impl fmt::Display for OtherBits<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(than, differing) = self;
        for (at, (ranks, names)) in differing.iter().enumerate() {
            let names = names.join(", ");
            match at {
                0 => write!(
                    f,
                    "ranks {ranks:?} compute other bits than rank {than} in {names}"
                )?,
                _ => write!(f, "; ranks {ranks:?} in {names}")?,
            }
        }
        Ok(())
    }
}

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
