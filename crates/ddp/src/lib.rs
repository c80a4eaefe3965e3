//! Data-parallel training of Burn models.
//!
//! One process per device holds a replica of the model. Every step's global batch is cut into shards; each rank
//! computes its shards, gradients are averaged over all ranks while the backward pass still runs, and
//! every replica takes the same optimizer step.
//!
//! ```text
//!  compute thread                              comm thread                peers
//!  forward on the hooked model
//!  backward completes gradient -> hook -> its slot in a bucket
//!    all slots of the lowest open bucket full: launch ---> all_reduce <------> same bucket
//!  step() returns <------------------------- reduced buckets
//!  optimizer.step(lr, model, reduced.grads)
//! ```
//!
//! - [`Ddp`]: replicas, steps, gradients.
//! - [`Precision`], [`in_f32`], [`GradScaler`]: computing in bf16 or f16 with weights in f32.
//! - [`ZeroRedundancyOptimizer`]: each rank keeps the optimizer state of a part of the parameters.
//! - [`sampler`]: the samples that each rank reads, index for index as PyTorch's `DistributedSampler`.
//! - [`device`]: choosing and opening the CPU or a GPU.
//! - [`loader`]: reading ahead on worker threads.
//! - [`weights`]: a model's tensors as bytes, and their SHA-256.
//! - [`timeline`]: the timing of a step, and a trace for Perfetto.

mod buffer;
mod comm_hook;
#[cfg(feature = "cuda")]
mod cuda;
mod ddp;
mod deferred;
pub mod device;
mod device_threads;
mod error;
mod fingerprint;
mod gradients;
mod hook;
pub mod loader;
mod numerics;
mod pace;
mod panic_text;
mod placement;
mod plan;
mod precision;
mod record;
mod recovery;
mod reducer;
pub mod sampler;
mod scaler;
mod stack;
#[cfg(feature = "burn-train")]
mod strategy;
mod sync_batch_norm;
pub mod timeline;
mod verify;
pub mod weights;
mod zero;

pub use comm_hook::{
    CommHook, CommHookParseError, LocalSgdOptions, OuterOptimizer, PowerSgdOptions,
};
pub use ddp::{
    Backend, BackwardPart, Ddp, DdpOptions, DdpState, Give, Given, OwnTensor, Pieces, Reduced,
    Reduction, SHARDS_DEFAULT, ShardStep,
};
pub use error::DdpError;
pub use fingerprint::odd_ranks;
pub use numerics::SameBits;
pub use pace::{Fate, Straggler};
pub use paceline_nn::{Block, in_f32};
pub use placement::Placement;
pub use plan::{Bucket, BucketCaps, BucketPlan, Layout, Segment};
pub use precision::{NORMS, Precision};
pub use record::ShardDigests;
pub use recovery::Recovery;
pub use reducer::{Arrival, DeviceExchange};
pub use scaler::{GradScaler, GradScalerOptions, GradScalerState};
#[cfg(feature = "burn-train")]
pub use strategy::DdpStrategy;
pub use sync_batch_norm::SyncBatchNorm;
pub use zero::{Slice, ZeroRedundancyOptimizer, ZeroStage, ZeroStageParseError};
