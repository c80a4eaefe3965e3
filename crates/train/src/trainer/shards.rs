//! The data of a rank's shards, and their passes.

use std::ops::Range;

use paceline_ddp::ShardStep;
use paceline_ddp::sampler::{StepPlan, micro_batches};

use crate::config::TrainConfig;
use crate::error::TrainError;
use crate::task::{Compute, Loss, Part, TrainTask};

/// One rank's data for one step: the micro-batches of each of its shards.
pub(crate) type RankBatch<B> = Vec<Vec<B>>;

/// The micro-batches of a shard.
pub(crate) fn of_shard<T: TrainTask>(
    task: &T,
    plan: &StepPlan,
    shard: usize,
    accumulate: usize,
) -> Result<Vec<T::Batch>, TrainError> {
    micro_batches(&plan.shards[shard], accumulate)
        .map(|part| task.batch(Part::Train, Some(plan.epoch), part.iter().copied()))
        .collect()
}

/// Runs the forward and backward passes of a shard.
pub(crate) fn run_shard<T: TrainTask>(
    task: &T,
    config: &TrainConfig,
    shard: &mut ShardStep<'_, T::Model>,
    micro: &[T::Batch],
) -> Result<(), TrainError> {
    let device = shard.device().clone();
    let compute = Compute::new(&device, config.precision);
    shard.micro_batches(micro.len());
    for batch in micro {
        let Loss { mean, weight, .. } = task
            .loss(&shard.model()?, batch, compute)?
            .checked(task.name())?;
        let value = mean.clone().inner();
        shard.backward(mean, weight)?;
        // Reading the loss any earlier would leave the device idle until the backward pass is submitted.
        shard.add_loss(value.into_scalar::<f32>() * weight);
    }
    Ok(())
}

/// The data of one step that was read ahead.
pub(super) struct Loaded<B> {
    pub(super) shards: Range<usize>,
    pub(super) batch: RankBatch<B>,
}

impl<B> Loaded<B> {
    pub(super) fn of(&self, shard: usize) -> Option<&[B]> {
        let at = shard.checked_sub(self.shards.start)?;
        Some(self.batch.get(at)?)
    }
}
