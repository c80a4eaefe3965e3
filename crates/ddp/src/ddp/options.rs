//! `DdpOptions`, and the fields that ranks compare.

use std::num::{NonZeroU64, NonZeroUsize};

use burn::tensor::Device;
use paceline_nn::Recompute;
use serde::{Deserialize, Serialize};

use crate::buffer;
use crate::comm_hook::CommHook;
use crate::error::DdpError;
use crate::numerics::{self, SameBits};
use crate::plan::BucketCaps;
use crate::precision::{NORMS, Precision};
use crate::recovery::Recovery;
use crate::scaler::GradScaler;

/// The path of gradients to the other ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// NCCL if the model is on a CUDA device and the `cuda` feature is built in, otherwise the host.
    #[default]
    Auto,
    /// Through the host's memory and the process group: any device.
    Host,
    /// NCCL, on CUDA devices.
    Nccl,
}

/// The order in which NCCL adds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reduction {
    /// The shard tree's order: the same bits on any number of ranks, as with the host backend.
    #[default]
    Tree,
    /// NCCL's own order, which depends on the number of ranks and on their links.
    Ring,
}

/// Number of shards if the job sets none and has at most this many ranks.
pub const SHARDS_DEFAULT: usize = 4;

/// Settings of a [`Ddp`](crate::Ddp); they must be the same on every rank.
#[derive(Clone, Debug)]
pub struct DdpOptions {
    /// Number of shards `V` per global batch, fixed for the job's life. The result depends on `V` and not on the number of
    /// ranks. `None` means 4 ([`SHARDS_DEFAULT`]), so 1, 2, 3 and 4 ranks give the same bits. With more ranks it means one
    /// shard per rank, and rank 0 prints a notice on stderr.
    ///
    /// *Cost*: a rank runs a forward and a backward pass for each of its shards. By default a single rank therefore runs four
    /// small passes per step; with `Some(1)` it runs one over the whole batch.
    pub shards: Option<usize>,
    /// Micro-batches per shard and step (gradient accumulation), unless the program calls
    /// [`ShardStep::micro_batches`](crate::ShardStep::micro_batches).
    pub accumulate: usize,
    /// Job seed: dropout and other device randomness is seeded from (seed, step, shard), and in a
    /// [`Block`](paceline_nn::Block) from (seed, step, shard, micro-batch, block).
    pub seed: u64,
    /// Caps of the gradient buckets.
    pub caps: BucketCaps,
    /// The path of gradients to the other ranks.
    pub backend: Backend,
    /// The order in which NCCL adds; without NCCL it is always the tree's.
    pub reduction: Reduction,
    /// What happens if the ranks' kernels compute different bits, so that the result depends on which rank computes what:
    /// [`Ddp::new`](crate::Ddp::new) and [`Ddp::join_parts`](crate::Ddp::join_parts) compare a *numeric fingerprint*, digests of
    /// small operations of Burn's and of `paceline::nn` in f32.
    ///
    /// *Cost*: a few milliseconds, once in a process. [`SameBits::Warn`] compares on CPUs only, where the bits shall not depend on
    /// the number of ranks: not with a communication hook for which they do, and not with more than 4 ranks that leave `shards` open.
    /// [`SameBits::Strict`] compares always; on GPUs it takes seconds, in which kernels are compiled.
    pub same_bits: SameBits,
    /// How gradients travel between ranks.
    pub comm_hook: CommHook,
    /// Largest 2-norm of the whole gradient; larger gradients are scaled down to it.
    pub clip_norm: Option<f64>,
    /// The type that models compute in. Weights and gradients between ranks are always f32.
    pub precision: Precision,
    /// Modules that stay in f32 whatever the [`precision`](Self::precision): module types such as `LayerNorm`, or paths such
    /// as `encoder.norm`, with everything below them. Default: [`NORMS`]; `BatchNorm` always stays in f32. Their input must
    /// be f32 too, see [`in_f32`](crate::in_f32).
    pub keep_f32: Vec<String>,
    /// Which [`Block`](paceline_nn::Block)s of the model are recomputed in the backward pass, to save memory.
    pub recompute: Recompute,
    /// Scales losses and skips steps with an infinite or NaN gradient, for [`Precision::F16`].
    pub scaler: Option<GradScaler>,
    /// Skips steps with an infinite or NaN loss or averaged gradient, on all ranks alike, see
    /// [`Reduced::skipped`](crate::Reduced::skipped). A scaler skips steps with such a gradient in any case. `Checkpoints::give_up` of
    /// `paceline_checkpoint` then goes back some steps.
    ///
    /// *Cost*: one pass over the averaged gradients.
    pub skip_non_finite: bool,
    /// Number of user sums that travel with each step, see [`ShardStep::add`](crate::ShardStep::add).
    pub sums: usize,
    /// Steps between two comparisons of a window of the weights over all ranks; 0 = never.
    ///
    /// *Cost*: hashes 64 KiB; on a device the step also waits for all submitted work.
    pub fingerprint_every: u64,
    /// Extra settings that the ranks compare: (name, value).
    pub settings: Vec<(String, String)>,
    /// From [`Ddp::new`](crate::Ddp::new) on, SIGTERM, SIGINT and SIGUSR1 no longer end the process. The program must call
    /// [`Ddp::stop_requested`](crate::Ddp::stop_requested), which reports them, after every step.
    pub stop_on_signal: bool,
    /// Leaves the memory of gradients, and the weights that Burn has not made yet, to
    /// [`ZeroRedundancyOptimizer::at_stage`](crate::ZeroRedundancyOptimizer::at_stage). From stage 2 of ZeRO on no rank then ever has
    /// memory for all gradients; weights are made one parameter at a time, and at stage 3 no rank ever has the whole model. As
    /// PyTorch's deferred initialization.
    pub deferred_init: bool,
    /// What happens when a rank is lost (killed, crashed, stopped or hung). With [`Recovery::Live`] the other ranks go on without
    /// it and end with the same weights: [`Ddp::step`](crate::Ddp::step) repeats the interrupted step, so it may call the program's
    /// closure again, for other shards. Operations of the program's own on the group need
    /// [`Ddp::with_recovery`](crate::Ddp::with_recovery). A program that calls [`Ddp::admit`](crate::Ddp::admit) has lost ranks
    /// replaced.
    ///
    /// It works for models that every rank has whole, without a communication hook or `SyncBatchNorm`, under a launcher with
    /// `--recovery live`. Otherwise a loss ends the step.
    pub recovery: Recovery,
    /// With [`Recovery::Live`], a rank that stays so much slower than the others that they are faster without it leaves the job
    /// after a step, as long as this many ranks are left: [`Ddp::step`](crate::Ddp::step) fails there with
    /// [`DdpError::Straggler`](crate::DdpError::Straggler). The launcher replaces it as it replaces any lost rank. Default: slow
    /// ranks are [named](crate::Ddp::stragglers) and stay.
    pub exclude_stragglers: Option<NonZeroUsize>,
    /// Takes a digest of each shard's gradient of each parameter, so that one rank can compute a step of the job again and find
    /// the shard and the tensor that differ. `Checkpoints::record` keeps those of so many last steps, or up to twice as many.
    ///
    /// *Cost*: reads each gradient once while it is in the cache. On a GPU gradients go through the host, as with
    /// [`Backend::Host`].
    ///
    /// It works where a step's gradients have the same bits on one rank: not with f64 parameters, parts of a model, gradients
    /// that NCCL adds, and the hooks `Bf16Compress`, `Fp16Compress` and `LocalSgd`.
    pub record: Option<NonZeroU64>,
}

impl Default for DdpOptions {
    fn default() -> Self {
        Self {
            shards: None,
            accumulate: 1,
            seed: 0,
            caps: BucketCaps::default(),
            backend: Backend::default(),
            reduction: Reduction::default(),
            same_bits: SameBits::default(),
            comm_hook: CommHook::None,
            clip_norm: None,
            precision: Precision::F32,
            keep_f32: NORMS.map(String::from).to_vec(),
            recompute: Recompute::None,
            scaler: None,
            skip_non_finite: false,
            sums: 0,
            fingerprint_every: 1,
            settings: Vec::new(),
            stop_on_signal: false,
            deferred_init: false,
            recovery: Recovery::None,
            exclude_stragglers: None,
            record: None,
        }
    }
}

impl DdpOptions {
    /// Number of shards in a job of `world` ranks.
    pub(super) fn shard_count(&self, world: usize) -> usize {
        self.shards.unwrap_or(SHARDS_DEFAULT.max(world))
    }

    /// The numeric fingerprint of this rank, or nothing where ranks do not compare it.
    pub(super) fn fingerprint(
        &self,
        device: Option<&Device>,
        world: usize,
    ) -> Result<Vec<i64>, DdpError> {
        // On the host every reduction is the tree's.
        let is_promised = |device| {
            let shards = self.shards.is_some() || world <= SHARDS_DEFAULT;
            buffer::is_host(device) && self.comm_hook.keeps_bits() && shards
        };
        let is_strict = self.same_bits == SameBits::Strict;
        match device.filter(|device| world > 1 && (is_strict || is_promised(device))) {
            Some(device) => numerics::fingerprint(device),
            None => Ok(Vec::new()),
        }
    }

    /// The settings that ranks compare, by name; `world` is the number of ranks.
    ///
    /// The pattern names every field, so that adding a field forces the decision whether ranks compare it.
    pub(super) fn compared(&self, world: usize) -> Vec<(String, String)> {
        let Self {
            // Compared as their number.
            shards: _,
            accumulate,
            seed,
            // Compared as the bucket plan, which is made from it.
            caps: _,
            backend,
            reduction,
            same_bits,
            comm_hook,
            clip_norm,
            precision,
            keep_f32,
            // Changes no bits.
            recompute: _,
            scaler,
            skip_non_finite,
            sums,
            fingerprint_every,
            settings,
            stop_on_signal,
            // Compared as the number of weights.
            deferred_init: _,
            recovery,
            exclude_stragglers,
            record,
        } = self;
        let own: [(&str, String); 18] = [
            ("shards", self.shard_count(world).to_string()),
            ("accumulate", accumulate.to_string()),
            ("seed", seed.to_string()),
            ("backend", format!("{backend:?}")),
            ("reduction", format!("{reduction:?}")),
            ("same_bits", format!("{same_bits:?}")),
            ("comm_hook", comm_hook.to_string()),
            ("clip_norm", format!("{clip_norm:?}")),
            ("precision", precision.to_string()),
            ("keep_f32", keep_f32.join(",")),
            (
                "scaler",
                scaler.as_ref().map_or("none".into(), GradScaler::describe),
            ),
            ("skip_non_finite", skip_non_finite.to_string()),
            ("sums", sums.to_string()),
            ("fingerprint_every", fingerprint_every.to_string()),
            ("stop_on_signal", stop_on_signal.to_string()),
            ("recovery", format!("{recovery:?}")),
            ("exclude_stragglers", format!("{exclude_stragglers:?}")),
            ("record", format!("{record:?}")),
        ];
        let own = own.map(|(name, value)| (name.to_string(), value));
        settings.iter().cloned().chain(own).collect()
    }
}
