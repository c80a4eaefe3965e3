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
//! - `trainer` (feature `cli`): the loop and the command line of `paceline train`, for your own model and data.
//! - [`Ddp`]: replicas and steps. `examples/minimal.rs` is a complete program in under 60 lines that also resumes and stops
//!   on a signal.
//! - [`Checkpoints`]: the state of a training, saved in the background, loaded on any number of ranks.
//! - [`sampler`]: the samples that each rank reads, index for index as PyTorch's `DistributedSampler`; [`loader`]: reading
//!   ahead.
//! - [`Precision`] and [`GradScaler`]: computing in bf16 or f16.
//! - [`nn`]: blocks of a model that are recomputed in the backward pass, to save memory; layers that are faster on CPUs, and layers whose gradients
//!   a pipeline puts off.
//! - [`ProcessGroup`]: all-reduce, broadcast, all-gather, reduce-scatter and barrier on plain memory; its types are in
//!   [`collectives`].
//! - [`device`]: choosing and opening the CPU or a GPU.
//! - [`usage`]: how long all devices really worked at the same time.
//! - `DdpStrategy` (feature `burn-train`): makes existing burn-train code data-parallel with one argument.
//!
//! Programs also join their group when started by `torchrun`, by Slurm or MPI, or by hand with torchrun's variables set.

#![warn(clippy::print_stderr)] // it panics where the terminal is gone

#[cfg(feature = "cli")]
mod cli;
#[cfg(feature = "cli")]
mod commands;
#[cfg(feature = "cli")]
pub mod trainer;

pub use paceline_checkpoint::{Checkpoint, CheckpointError, Checkpoints, Saved, averaged, digests};
pub use paceline_collective::{Error, GroupOptions, ProcessGroup, ReduceOp, Transport};
#[cfg(feature = "burn-train")]
pub use paceline_ddp::DdpStrategy;
pub use paceline_ddp::sampler::{BatchOptions, StepPlan};
pub use paceline_ddp::{
    Backend, BucketCaps, CommHook, CommHookParseError, Ddp, DdpError, DdpOptions, DdpState,
    GradScaler, GradScalerOptions, GradScalerState, LocalSgdOptions, NORMS, OuterOptimizer,
    PowerSgdOptions, Precision, Recovery, Reduced, Reduction, SHARDS_DEFAULT, SameBits, ShardStep,
    SyncBatchNorm, ZeroRedundancyOptimizer, ZeroStage, device, in_f32, loader, sampler, timeline,
    weights,
};
pub use paceline_rendezvous::stop::StopSignal;

use paceline_rendezvous::env;

/// Argument and result types of a [`ProcessGroup`]'s operations.
pub mod collectives {
    pub use paceline_collective::{
        Algorithm, AllReduce, Buffer, DType, DeviceMesh, Done, Element, MemoryReport, Received,
        RecvTicket, SendTicket, Ticket, Tree, bf16, f16,
    };
}

/// Burn's layers with the same bits on any machine, and parts of a model that can be run in several ways with the same bits.
pub mod nn {
    pub use paceline_nn::{
        AdamW, AdamWConfig, Block, Ema, MapTensors, Pass, Recompute, Tensors, TransformerBlock,
        TransformerBlockConfig, attention, batch_norm, batch_norm_add_relu, batch_norm_relu,
        checkpoint, conv1d, conv2d, cross_entropy, gelu, gpt, last_linear, layer_norm, linear,
        product, relu, resnet, rms_norm, scores, sigmoid, silu, softmax, tanh, to_device, vit,
    };
}

/// One model on several devices, of one process or of several ranks.
pub mod split {
    pub use paceline_split::{DataParallel, ModelParallel, Part, pipeline, tensor};
}

/// How busy devices and ranks were, for programs without a launcher.
pub mod usage {
    pub use paceline_usage::memory::peak_resident_bytes;
    pub use paceline_usage::{Lang, Machine, Options, RankPids, Report, Rules, Tally, Tracker};
}

/// Joins this process's group with the default options.
///
/// The place in the group comes from torchrun's environment variables, which `paceline run` sets too. A process without any
/// of them forms a group of one rank.
///
/// *Blocks*: until all ranks have joined, at most 60 s or `PACELINE_TIMEOUT_SECONDS`.
///
/// Warns of `PACELINE_*` variables that have no effect in this program.
///
/// *Errors*: invalid variables, missing ranks, peers that do not belong to the job.
pub fn init() -> Result<ProcessGroup, Error> {
    let joined = ProcessGroup::init(&GroupOptions::default());
    // One rank warns for all, and each one where there is no group: a misspelt name may be the reason.
    if joined.as_ref().map_or(true, |group| group.rank() == 0) {
        let names = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
        for warning in env::unknown(names) {
            paceline_rendezvous::notice!(WARN, "{warning}");
        }
    }
    joined
}

/// Does what this process's command line asks the program `paceline` for.
#[cfg(feature = "cli")]
#[doc(hidden)]
#[must_use]
pub fn main() -> std::process::ExitCode {
    let result = match cli::parse(std::env::args_os()) {
        Ok(command) => command.run(),
        Err(stop) => return stop.report().into(),
    };
    result.unwrap_or_else(|failure| failure.report()).into()
}

/// The code blocks of the pages, compiled as tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../../docs/comm-hooks.md")]
    mod comm_hooks {}
    #[doc = include_str!("../../../docs/devices.md")]
    mod devices {}
    #[doc = include_str!("../../../docs/mixed-precision.md")]
    mod mixed_precision {}
    #[doc = include_str!("../../../docs/preemption.md")]
    mod preemption {}
    #[doc = include_str!("../../../docs/programs.md")]
    mod programs {}
    #[doc = include_str!("../../../docs/splitting.md")]
    mod splitting {}
}
