//! `DdpOptions`, and which of them the ranks compare.

use serde::{Deserialize, Serialize};

use crate::plan::{BucketCaps, Wire};
use crate::precision::{NORMS, Precision};
use crate::scaler::GradScaler;

/// The path of gradients to the other ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// NCCL where the model is on a CUDA device and the `cuda` feature is built in, else through the host.
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
    /// The shard tree's: the same bits on any number of ranks, as everywhere else.
    #[default]
    Tree,
    /// NCCL's own, which depends on the number of ranks and on how they are connected.
    Ring,
}

/// Shards of a job that names no number and has no more ranks.
pub const SHARDS_DEFAULT: usize = 4;

/// Settings of a [`Ddp`](crate::Ddp); all of them must be the same on every rank.
#[derive(Clone, Debug)]
pub struct DdpOptions {
    /// Shards `V` that a step's global batch is cut into, fixed for the job's life. The result depends on `V` and not on
    /// the number of ranks. `None`: 4 ([`SHARDS_DEFAULT`]), so 1, 2, 3 and 4 ranks give the same bits; with more ranks one
    /// per rank, and rank 0 says so on stderr.
    ///
    /// *Cost*: a rank runs a forward and a backward pass for each of its shards. One rank therefore runs four smaller
    /// ones per step by default; with `Some(1)` it runs one over the whole batch.
    pub shards: Option<usize>,
    /// Micro-batches per shard and step (gradient accumulation) unless
    /// [`ShardStep::micro_batches`](crate::ShardStep::micro_batches) says otherwise.
    pub accumulate: usize,
    /// Job seed: dropout and other device randomness is seeded from (seed, step, shard).
    pub seed: u64,
    /// Caps of the gradient buckets.
    pub caps: BucketCaps,
    /// The path of gradients to the other ranks.
    pub backend: Backend,
    /// The order in which NCCL adds; without NCCL it is always the tree's.
    pub reduction: Reduction,
    /// The number format of gradients between ranks.
    pub wire: Wire,
    /// Largest allowed 2-norm of the whole gradient; larger ones are scaled down to it.
    pub clip_norm: Option<f64>,
    /// The type that models compute in; weights and gradients between ranks are f32 in each.
    pub precision: Precision,
    /// Modules that stay in f32 in another [`precision`](Self::precision): types of modules such as `LayerNorm`, or paths such as
    /// `encoder.norm`, with everything below them. [`NORMS`] unless changed; `BatchNorm` always does. Their input has
    /// to be f32 too, see [`in_f32`](crate::in_f32).
    pub keep_f32: Vec<String>,
    /// Scales losses and skips the steps in which a gradient is infinite or NaN, for [`Precision::F16`].
    pub scaler: Option<GradScaler>,
    /// Number of user sums that travel with each step, see [`ShardStep::add`](crate::ShardStep::add).
    pub sums: usize,
    /// Steps between two comparisons of a window of the weights over all ranks; 0 = never.
    ///
    /// *Cost*: 64 KiB are hashed; on a device the step also waits until the device has done what it was given.
    pub fingerprint_every: u64,
    /// Further settings that the ranks compare: (name, value).
    pub settings: Vec<(String, String)>,
    /// SIGTERM, SIGINT and SIGUSR1 no longer end the process from [`Ddp::new`](crate::Ddp::new) on: they are for
    /// [`Ddp::stop_requested`](crate::Ddp::stop_requested), which the program then has to ask after every step.
    pub stop_on_signal: bool,
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
            wire: Wire::default(),
            clip_norm: None,
            precision: Precision::F32,
            keep_f32: NORMS.map(String::from).to_vec(),
            scaler: None,
            sums: 0,
            fingerprint_every: 1,
            settings: Vec::new(),
            stop_on_signal: false,
        }
    }
}

impl DdpOptions {
    /// Shards of a job of `world` ranks.
    pub(super) fn shard_count(&self, world: usize) -> usize {
        self.shards.unwrap_or(SHARDS_DEFAULT.max(world))
    }

    /// The settings that ranks compare, by name; `world` is the number of ranks.
    ///
    /// The pattern names every field, so that a new one does not compile until it is decided whether ranks compare it.
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
            wire,
            clip_norm,
            precision,
            keep_f32,
            scaler,
            sums,
            fingerprint_every,
            settings,
            stop_on_signal,
        } = self;
        let own: [(&str, String); 13] = [
            ("shards", self.shard_count(world).to_string()),
            ("accumulate", accumulate.to_string()),
            ("seed", seed.to_string()),
            ("backend", format!("{backend:?}")),
            ("reduction", format!("{reduction:?}")),
            ("wire", format!("{wire:?}")),
            ("clip_norm", format!("{clip_norm:?}")),
            ("precision", precision.to_string()),
            ("keep_f32", keep_f32.join(",")),
            (
                "scaler",
                scaler.as_ref().map_or("none".into(), GradScaler::describe),
            ),
            ("sums", sums.to_string()),
            ("fingerprint_every", fingerprint_every.to_string()),
            ("stop_on_signal", stop_on_signal.to_string()),
        ];
        let own = own.map(|(name, value)| (name.to_string(), value));
        settings.iter().cloned().chain(own).collect()
    }
}
