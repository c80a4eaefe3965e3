//! Data-parallel training for [Burn](https://burn.dev): one process per device, gradients averaged while the
//! backward pass still runs, the same bits on any number of ranks.
//!
//! Start a program with one process per device:
//!
//! ```text
//! paceline run --nproc-per-node 2 ./my-program
//! ```
//!
//! In it, join the group, wrap the step, keep the rest:
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::optim::AdamWConfig;
//! use burn::tensor::Tensor;
//! use paceline::{Ddp, DdpOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let group = paceline::init()?; // one rank when not started by a launcher
//! let device = paceline::device::of_rank(&group)?.autodiff(); // the CPU, or what PACELINE_DEVICE says
//! let model = LinearConfig::new(4, 1).init(&device);
//! let mut optimizer = AdamWConfig::new().init();
//!
//! let (mut ddp, mut model) = Ddp::new(group, model, DdpOptions::default())?;
//! for _ in 0..2 {
//!     let reduced = ddp.step(&model, |shard| {
//!         let input = Tensor::<2>::ones([8, 4], &device); // this shard's samples
//!         let loss = shard.model()?.forward(input).powf_scalar(2.0).mean();
//!         shard.backward(loss, 8.0) // a mean over 8 samples
//!     })?;
//!     model = optimizer.step(1e-3, model, reduced.grads);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! - [`Ddp`]: replicas and steps. `examples/minimal.rs` is a whole program in under 100 lines.
//! - [`DdpOptions::stop_on_signal`] and [`Ddp::stop_requested`]: save and stop on all ranks after the same step.
//! - [`sampler`]: which rank reads which sample, index for index like PyTorch's `DistributedSampler`; [`loader`]: reading
//!   ahead.
//! - [`ProcessGroup`]: all-reduce, broadcast, all-gather, reduce-scatter and barrier on plain memory.
//! - [`device`]: CPU or GPU, which one of several, and opening it.
//! - [`usage::Tracker`]: how long all devices really worked at the same time.
//! - `DdpStrategy` (feature `burn-train`): existing burn-train code made data-parallel by one argument.
//!
//! Programs also join their group when started by `torchrun`, by Slurm or MPI, or by hand with its variables set
//! ([`rendezvous::env`]).

pub use paceline_collective as collective;
pub use paceline_collective::{
    AllReduce, Buffer, Done, Error, GroupOptions, ProcessGroup, ReduceOp, Ticket, Transport, Tree,
};
#[cfg(feature = "burn-train")]
pub use paceline_ddp::DdpStrategy;
pub use paceline_ddp::{
    Backend, BucketCaps, Ddp, DdpError, DdpOptions, Precision, Reduced, Reduction, ShardStep, Wire,
    device, in_f32, loader, sampler, timeline, weights,
};
pub use paceline_gpu as gpu;
pub use paceline_rendezvous as rendezvous;
pub use paceline_rendezvous::stop::StopSignal;
pub use paceline_usage as usage;

/// Joins the group that this process was started for, with the default options.
///
/// The place in the group comes from torchrun's environment variables, which `paceline run` sets too. A process
/// started without any of them is alone: a group of one rank.
///
/// *Blocks*: until all ranks have come, at most 60 s or `PACELINE_TIMEOUT_SECONDS`.
///
/// *Errors*: variables that make no sense, ranks that never come, peers that do not belong to the job.
pub fn init() -> Result<ProcessGroup, Error> {
    ProcessGroup::init(&GroupOptions::default())
}
