//! Data-parallel training for [Burn](https://burn.dev): one process per device, gradients averaged while the
//! backward pass still runs, the same bits on any number of ranks.
//!
//! Start a program with one process per device:
//!
//! ```text
//! paceline run --nproc-per-node 2 ./my-program
//! ```
//!
//! In it, join the group, wrap the model, step, save:
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::optim::AdamWConfig;
//! use burn::tensor::Tensor;
//! use paceline::{BatchOptions, Checkpoint, Checkpoints, Ddp, DdpOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//! let group = paceline::init()?; // one rank when not started by a launcher
//! let device = paceline::device::of_rank(&group)?.autodiff(); // the CPU, or the device that PACELINE_DEVICE names
//! let model = LinearConfig::new(4, 1).init(&device);
//! let mut optimizer = AdamWConfig::new().init();
//!
//! let (mut ddp, mut model) = Ddp::new(group, model, DdpOptions::default())?;
//! let mut checkpoints = Checkpoints::open(folder, ddp.group())?;
//! for plan in ddp.batches(1000, BatchOptions::new(100).epochs(2))? {
//!     let reduced = ddp.step_on(&model, &plan, |model, indices| {
//!         let input = Tensor::<2>::ones([indices.len(), 4], &device); // the samples with these indices
//!         model.forward(input).powf_scalar(2.0).mean()
//!     })?;
//!     model = optimizer.step(1e-3, model, reduced.grads);
//!     if plan.ends_epoch() {
//!         checkpoints.save(&ddp, Checkpoint::new(&model, &optimizer).sampler(&plan.after))?;
//!     }
//! }
//! checkpoints.finish()?;
//! # Ok(())
//! # }
//! ```
//!
//! - [`Ddp`]: replicas and steps. `examples/minimal.rs` is a whole program in under 60 lines, which also resumes and stops on
//!   a signal.
//! - [`Checkpoints`]: what a training goes on from, saved in the background, loaded on any number of ranks.
//! - [`sampler`]: which rank reads which sample, index for index like PyTorch's `DistributedSampler`; [`loader`]: reading
//!   ahead.
//! - [`Precision`] and [`GradScaler`]: computing in bf16 or f16.
//! - [`ProcessGroup`]: all-reduce, broadcast, all-gather, reduce-scatter and barrier on plain memory; its types are in
//!   [`collectives`].
//! - [`device`]: CPU or GPU, which one of several, and opening it.
//! - [`usage`]: how long all devices really worked at the same time.
//! - `DdpStrategy` (feature `burn-train`): existing burn-train code made data-parallel by one argument.
//!
//! Programs also join their group when started by `torchrun`, by Slurm or MPI, or by hand with its variables set.

pub use paceline_checkpoint::{Checkpoint, CheckpointError, Checkpoints, Saved};
pub use paceline_collective::{Error, GroupOptions, ProcessGroup, ReduceOp, Transport};
#[cfg(feature = "burn-train")]
pub use paceline_ddp::DdpStrategy;
pub use paceline_ddp::sampler::{BatchOptions, StepPlan};
pub use paceline_ddp::{
    Backend, BucketCaps, Ddp, DdpError, DdpOptions, DdpState, GradScaler, GradScalerOptions,
    GradScalerState, NORMS, Precision, Reduced, Reduction, SHARDS_DEFAULT, ShardStep, Wire, device,
    in_f32, loader, sampler, timeline, weights,
};
pub use paceline_rendezvous::stop::StopSignal;

/// What the operations of a [`ProcessGroup`] take and give.
pub mod collectives {
    pub use paceline_collective::{
        Algorithm, AllReduce, Buffer, DType, DeviceMesh, Done, Element, MemoryReport, Received,
        RecvTicket, SendTicket, Ticket, Tree, bf16, f16,
    };
}

/// How busy devices and ranks were, for programs that no launcher watches.
pub mod usage {
    pub use paceline_usage::memory::peak_resident_bytes;
    pub use paceline_usage::{Lang, Machine, Options, RankPids, Report, Rules, Tally, Tracker};
}

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

/// The code blocks of the pages, compiled as tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../../docs/devices.md")]
    mod devices {}
    #[doc = include_str!("../../../docs/mixed-precision.md")]
    mod mixed_precision {}
    #[doc = include_str!("../../../docs/preemption.md")]
    mod preemption {}
    #[doc = include_str!("../../../docs/programs.md")]
    mod programs {}
}
