//! The memory of a rank, by kind. Pure.

use serde::Serialize;

use super::stages::{Passes, Stage};
use super::{Cluster, Layout, ModelCosts, VALUE_BYTES, Way, Workload};

/// Gradient buckets that hold memory at once at stages 2 and 3 of ZeRO: one on its way and one being filled.
const POOLED_BUCKETS: f64 = 2.0;
/// Memory of the rank that needs most, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Memory {
    /// Weights, and gathered ones.
    pub weights: f64,
    /// Averaged gradients on their way to the optimizer.
    pub gradients: f64,
    /// The optimizer's state.
    pub optimizer: f64,
    /// Values that wait for the backward pass, and temporary ones.
    pub activations: f64,
    /// Buckets that gradients are reduced in.
    pub buckets: f64,
    /// The program, its data, and temporary values of the optimizer's step.
    pub other: f64,
    /// Pages of other ranks' buckets that this rank maps. The system counts them as resident in each process, but they are no
    /// memory of their own.
    pub mapped: f64,
    /// The most that the system counts at once: activations and averaged gradients take turns.
    pub peak: f64,
}

impl Memory {
    /// Memory that this rank takes from the machine in a step.
    #[must_use]
    pub fn own(&self) -> f64 {
        self.peak - self.mapped
    }

    /// Memory that a training takes, whose saves copy a rank's weights and optimizer state. An evaluation is not counted.
    #[must_use]
    pub fn with_saves(&self) -> f64 {
        self.own() + self.weights + self.optimizer
    }
}

/// What the memory of a rank depends on.
pub(super) struct Facts<'a> {
    pub(super) layout: &'a Layout,
    pub(super) model: &'a ModelCosts,
    pub(super) cluster: &'a Cluster,
    pub(super) work: &'a Workload,
    pub(super) way: &'a Way,
    pub(super) passes: &'a Passes,
    /// Of all ranks of a pipeline.
    pub(super) stages: &'a [Stage],
}

impl Facts<'_> {
    /// That of the rank of a pipeline that has `stage`.
    pub(super) fn of_rank(&self, rank: usize, stage: &Stage) -> Memory {
        let Self {
            layout,
            model,
            work,
            way,
            passes,
            stages,
            ..
        } = self;
        let (zero, replicas, stack) = (layout.zero, layout.dp as f64, passes.stack);
        let bytes = stage.part.parameters * VALUE_BYTES;
        let block = way.layer.parameters * VALUE_BYTES;
        let dealt = |from: u8, bytes: f64| match zero >= from {
            true => bytes / replicas,
            false => bytes,
        };
        // Stage 3 deals out the blocks. What is outside of them stays whole.
        let in_blocks = block * stage.layers;
        // The next block arrives while one is there as tensors.
        let gathered = match zero {
            3 => block.min(in_blocks),
            _ => 0.0,
        };
        let tied = stage.tied * VALUE_BYTES;
        let weights = bytes - in_blocks + dealt(3, in_blocks) + 2.0 * gathered + tied;
        // Gradients of several passes are added up in the buckets, which then leave with the last pass only.
        let buckets = match zero {
            2 if passes.count() == 1.0 => bytes.min(POOLED_BUCKETS * work.bucket),
            3 if passes.count() == 1.0 => {
                let outside = work.bucket.min(bytes - in_blocks);
                bytes.min(POOLED_BUCKETS * block.max(outside))
            }
            _ => bytes * stack,
        };
        // What the other ranks read of gradients, and what it is rounded from.
        let (buckets, shared) = match work.halves_gradients {
            true => (buckets * 1.5, buckets * 0.5),
            false => (buckets, buckets),
        };
        let optimizer = model.state * dealt(1, bytes);
        let gradients = dealt(1, bytes);
        let activations = passes.samples * (passes.kept(rank, stages) + way.temporary) + tied;
        // Two buckets of weights arrive before they replace the old ones. The allocator keeps this memory.
        let (arriving, slices) = match zero {
            1 | 2 => (bytes.min(2.0 * work.bucket), 2.0 * bytes / replicas),
            _ => (0.0, 0.0),
        };
        let extra = (model.step_extra / layout.tp as f64).max(arriving + slices);
        let local = layout.replicas_per_node(self.cluster);
        let mapped = (local - 1.0) / local * (shared / stack + gathered);
        let pass = weights + buckets + optimizer + activations + arriving;
        let end = weights + buckets + optimizer + gradients + extra;
        Memory {
            weights,
            gradients,
            optimizer,
            activations,
            buckets,
            other: model.rest + extra,
            mapped,
            peak: model.rest + pass.max(end) + mapped,
        }
    }
}
