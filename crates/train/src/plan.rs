//! What each layout of a training costs, by arithmetic on measured figures: memory by kind, bytes between ranks, time of a
//! step. Pure: it answers for any number of ranks.
//!
//! The model is measured with one layer and with several ([`ModelCosts::of`]), so a model that does not fit this machine can
//! be planned too. What a layout shares is dealt out by arithmetic; what the sharing makes slower is measured: ranks that
//! compute at the same time, recomputed blocks, and parts of layers.

mod check;
mod choose;
mod cost;
mod memory;
mod model;
mod render;
mod stages;

use paceline_split::pipeline::Schedule;
use serde::{Deserialize, Serialize};

pub use check::{Check, Checked};
pub use choose::{Plan, Row};
pub use cost::{Cost, Seconds};
pub use memory::Memory;
pub use model::{Depth, ModelCosts, PartCosts, Shape, Way};
pub(crate) use stages::MICRO_BATCHES_PER_STAGE;

/// Bytes of a trained value.
const VALUE_BYTES: f64 = 4.0;

/// A connection between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Seconds until the first byte arrives.
    pub latency: f64,
    /// Bytes per second that a rank sends.
    pub bandwidth: f64,
}

impl Link {
    /// The link of `ranks` ranks whose all-reduce of few bytes takes `small` seconds, and that of `bytes` bytes `large`.
    #[must_use]
    pub fn of_all_reduce(ranks: usize, small: f64, bytes: f64, large: f64) -> Self {
        let rounds = 2.0 * (ranks as f64 - 1.0).max(1.0);
        Self {
            latency: small / rounds,
            bandwidth: bytes / ranks as f64 * rounds / (large - small).max(1e-9),
        }
    }

    /// Seconds of an all-reduce.
    fn all_reduce(self, ranks: f64, bytes: f64) -> f64 {
        2.0 * (ranks - 1.0).max(0.0) * (self.latency + bytes / ranks / self.bandwidth)
    }

    /// Seconds of a message.
    fn message(self, bytes: f64) -> f64 {
        self.latency + bytes / self.bandwidth
    }
}

/// The machines.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cluster {
    /// Machines.
    pub nodes: usize,
    /// Ranks on each of them.
    pub ranks_per_node: usize,
    /// Bytes that a rank may use; `None` for any number.
    pub memory: Option<f64>,
    /// Between the ranks of a node.
    pub within: Link,
    /// Between nodes.
    pub between: Link,
    /// Whether communication takes time from computing, as it does where ranks compute on the cores that also communicate.
    pub shares_cores: bool,
}

impl Cluster {
    /// Number of ranks.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.nodes * self.ranks_per_node
    }

    /// The link between so many neighbours.
    fn link(&self, ranks: usize) -> Link {
        match ranks <= self.ranks_per_node {
            true => self.within,
            false => self.between,
        }
    }
}

/// What is trained in a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// Samples of a step.
    pub global_batch: usize,
    /// Shards of a step; more replicas than this have a shard each, as all have by default.
    pub shards: Option<usize>,
    /// Micro-batches of a shard. Pipelines cut a shard that has 1 of them.
    pub accumulate: usize,
    /// Bytes of a gradient bucket.
    pub bucket: f64,
    /// Whether gradients travel in half the bytes, and take as much memory again for it.
    pub halves_gradients: bool,
}

/// Stages of a rank in the interleaved schedule.
const CHUNKS: usize = 2;

/// How the ranks share the work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Layout {
    /// Replicas.
    pub dp: usize,
    /// Pipeline stages of a replica.
    pub pp: usize,
    /// Parts of each layer.
    pub tp: usize,
    /// Stage of ZeRO.
    pub zero: u8,
    /// Whether blocks are recomputed.
    pub recompute: bool,
    /// The pipeline's schedule.
    pub schedule: Schedule,
}

impl Layout {
    /// Plain data parallelism.
    #[must_use]
    pub fn ddp(ranks: usize) -> Self {
        Self {
            dp: ranks,
            pp: 1,
            tp: 1,
            zero: 0,
            recompute: false,
            schedule: Schedule::default(),
        }
    }

    /// Stages of a rank of a pipeline.
    #[must_use]
    pub fn chunks(&self) -> usize {
        match self.schedule {
            Schedule::Interleaved if self.pp > 1 => CHUNKS,
            _ => 1,
        }
    }
}

impl std::fmt::Display for Layout {
    /// `dp 4 x pp 2, zero 1, recompute`
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let axes = [("dp", self.dp), ("pp", self.pp), ("tp", self.tp)];
        let several: Vec<String> = axes
            .into_iter()
            .filter(|(_, parts)| *parts > 1)
            .map(|(name, parts)| format!("{name} {parts}"))
            .collect();
        match several.is_empty() {
            true => f.write_str("single")?,
            false => f.write_str(&several.join(" x "))?,
        }
        if self.pp > 1 {
            write!(f, " {}", self.schedule)?;
        }
        if self.zero > 0 {
            write!(f, ", zero {}", self.zero)?;
        }
        if self.recompute {
            f.write_str(", recompute")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
