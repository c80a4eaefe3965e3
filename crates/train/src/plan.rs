//! What each layout of a training costs, by arithmetic on measured figures: memory by kind, bytes between ranks, time of a
//! step. Pure: it answers for any number of ranks.
//!
//! The model is measured with one layer and with several ([`ModelCosts::of`]), so a model that does not fit this machine can
//! be planned too.

mod check;
mod choose;
mod cost;
mod render;

use paceline_split::pipeline::Schedule;
use serde::{Deserialize, Serialize};

pub use check::{Check, Checked};
pub use choose::{Parts, Plan, Row};
pub use cost::{Cost, Memory, Seconds};

/// Bytes of a trained value.
const VALUE_BYTES: f64 = 4.0;

/// One depth of a model, as a dry step has shown it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Depth {
    /// Layers of this model.
    pub layers: usize,
    /// Trained values outside of the layers, and in one of them.
    pub parameters: [usize; 2],
    /// Seconds of a forward pass.
    pub forward: f64,
    /// Seconds of a backward pass.
    pub backward: f64,
    /// Seconds of the optimizer's step.
    pub optimizer: f64,
    /// Seconds of a step on one rank besides these.
    pub other: f64,
    /// Resident bytes before the model was made.
    pub rest_bytes: f64,
    /// Most resident bytes up to the end of the backward pass.
    pub pass_bytes: f64,
    /// Most resident bytes from there to the end of the step.
    pub end_bytes: f64,
}

/// Costs of a part of a model for one pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PartCosts {
    /// Trained values.
    pub parameters: f64,
    /// Seconds of its forward pass.
    pub forward: f64,
    /// Seconds of its backward pass.
    pub backward: f64,
    /// Bytes that it keeps for the backward pass, and temporary ones.
    pub activations: f64,
    /// Seconds of the optimizer's step for it.
    pub optimizer: f64,
    /// Seconds of copying and averaging its gradients, on one rank.
    pub other: f64,
}

/// What a model costs on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ModelCosts {
    /// Equal layers; 0 for a model that is no list of layers.
    pub layers: usize,
    /// Attention heads, which tensor parallelism deals out; 0 for none.
    pub heads: usize,
    /// Samples of the pass that the figures are for.
    pub samples: f64,
    /// Everything outside of the layers.
    pub outer: PartCosts,
    /// One layer.
    pub layer: PartCosts,
    /// Bytes between two layers.
    pub boundary: f64,
    /// Bytes of the process without a model.
    pub rest: f64,
    /// Temporary bytes of the optimizer's step.
    pub step_extra: f64,
}

/// The shape of a model that the figures do not show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Layers of the model to plan.
    pub layers: usize,
    /// Attention heads of a layer.
    pub heads: usize,
    /// Values of a sample between two layers.
    pub boundary: usize,
}

/// Optimizer state of AdamW, in values per trained value.
const MOMENTS: f64 = 2.0;

impl ModelCosts {
    /// The costs of a model with `shape.layers` layers, from the same model with fewer layers. Passes had `samples` samples.
    #[must_use]
    pub fn of(depths: &[Depth], shape: Shape, samples: usize) -> Self {
        let Some(first) = depths.first() else {
            return Self::default();
        };
        let last = depths.last().unwrap_or(first);
        let more = last.layers.saturating_sub(first.layers).max(1) as f64;
        let values = |depth: &Depth| {
            let [outer, layer] = depth.parameters.map(|count| count as f64);
            outer + layer * depth.layers as f64
        };
        let state = |depth: &Depth, copies: f64| VALUE_BYTES * values(depth) * copies;
        // Weights, buckets and moments are there in the pass; the averages join them at its end.
        let pass =
            |depth: &Depth| depth.pass_bytes - depth.rest_bytes - state(depth, 2.0 + MOMENTS);
        let end = |depth: &Depth| depth.end_bytes - depth.rest_bytes - state(depth, 3.0 + MOMENTS);
        let split = |figure: &dyn Fn(&Depth) -> f64| {
            if first.layers == 0 {
                return [figure(last).max(0.0), 0.0];
            }
            let layer = ((figure(last) - figure(first)) / more).max(0.0);
            let layer = if more_than_one(depths) { layer } else { 0.0 };
            [(figure(last) - layer * last.layers as f64).max(0.0), layer]
        };
        let forward = split(&|depth| depth.forward);
        let backward = split(&|depth| depth.backward);
        let activations = split(&pass);
        let per_value = |figure: fn(&Depth) -> f64| figure(last).max(0.0) / values(last).max(1.0);
        let part = |at: usize| {
            let parameters = last.parameters[at] as f64;
            PartCosts {
                parameters,
                forward: forward[at],
                backward: backward[at],
                activations: activations[at],
                optimizer: parameters * per_value(|depth| depth.optimizer),
                other: parameters * per_value(|depth| depth.other),
            }
        };
        Self {
            layers: shape.layers,
            heads: shape.heads,
            samples: samples as f64,
            outer: part(0),
            layer: part(1),
            boundary: (shape.boundary * samples) as f64 * VALUE_BYTES,
            rest: last.rest_bytes,
            // The pass before leaves memory with the allocator, less of it in a small model.
            step_extra: end(last).min(end(first)).max(0.0),
        }
    }
}

fn more_than_one(depths: &[Depth]) -> bool {
    depths.len() > 1
}

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
}

/// What is trained in a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// Samples of a step.
    pub global_batch: usize,
    /// Shards of a step; more ranks than this have a shard each.
    pub shards: usize,
    /// Micro-batches of a shard.
    pub accumulate: usize,
    /// Bytes of a gradient bucket.
    pub bucket: f64,
}

/// How the ranks share the work.
#[derive(Clone, Copy, Debug, PartialEq)]
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
