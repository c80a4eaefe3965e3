//! The steps of a training run: which samples each shard reads in each, resumable after any of them.

use std::iter::FusedIterator;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{DistributedSampler, SamplerError};

/// The treatment of a data set that does not divide evenly among the shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Padding {
    /// No padding: every sample is read exactly once per epoch, and the first shards read one more.
    #[default]
    None,
    /// Like PyTorch: all shards read the same number of samples, some samples twice (or with `drop_last`, some never).
    Torch,
}

/// How [`ShardedBatches`] cuts epochs into steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchOptions {
    /// Samples of a step, over all shards. If it is not a multiple of the shards, the first shards take one sample more.
    pub global_batch: usize,
    /// The treatment of a data set that does not divide evenly.
    pub padding: Padding,
    /// The iteration ends before this epoch, counted from 0; `None` means never.
    pub epochs: Option<u64>,
}

impl BatchOptions {
    /// An endless sequence of steps of `global_batch` samples that reads every sample once per epoch.
    #[must_use]
    pub fn new(global_batch: usize) -> Self {
        Self {
            global_batch,
            padding: Padding::None,
            epochs: None,
        }
    }

    /// Ends after this many epochs.
    #[must_use]
    pub fn epochs(mut self, epochs: u64) -> Self {
        self.epochs = Some(epochs);
        self
    }
}

/// The settings that, with the seed and the epoch, decide which samples a step reads.
///
/// Saved with every [`SamplerState`], because a started epoch can only be finished in its own layout. The world size is not
/// part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchLayout {
    /// Samples of the data set.
    pub len: usize,
    /// Shards that the data set is dealt to.
    pub shards: usize,
    /// Samples of a step, over all shards.
    pub global_batch: usize,
    /// Whether epochs are read in random order.
    pub shuffle: bool,
    /// Whether steps with a short shard are dropped.
    pub drop_last: bool,
    /// The treatment of a data set that does not divide evenly.
    pub padding: Padding,
}

impl BatchLayout {
    /// Samples that `shard` reads in every full step.
    fn shard_batch(&self, shard: usize) -> u64 {
        dealt(self.global_batch, self.shards, shard)
    }

    /// Samples that `shard` reads in an epoch if no step is dropped.
    fn shard_samples(&self, shard: usize) -> u64 {
        match (self.padding, self.drop_last) {
            (Padding::None, _) => dealt(self.len, self.shards, shard),
            (Padding::Torch, false) => self.len.div_ceil(self.shards) as u64,
            (Padding::Torch, true) => (self.len / self.shards) as u64,
        }
    }

    /// Steps until the last shard has read all its samples; with `drop_last`, until the first shard runs short.
    fn steps(&self) -> u64 {
        let of = |shard| (self.shard_samples(shard), self.shard_batch(shard));
        let shards = (0..self.shards).map(of);
        let steps = if self.drop_last {
            shards.map(|(samples, batch)| samples / batch).min()
        } else {
            shards.map(|(samples, batch)| samples.div_ceil(batch)).max()
        };
        steps.unwrap_or(0)
    }

    /// Samples that `shard` has read before `step`.
    fn shard_consumed(&self, step: u64, shard: usize) -> u64 {
        step.saturating_mul(self.shard_batch(shard))
            .min(self.shard_samples(shard))
    }

    /// Samples that all shards have read before `step`.
    fn consumed(&self, step: u64) -> u64 {
        (0..self.shards)
            .map(|shard| self.shard_consumed(step, shard))
            .sum()
    }

    /// The step before which exactly `consumed` samples have been read, if any.
    fn step_at(&self, consumed: u64) -> Option<u64> {
        // Each step reads at least one sample, so `consumed(step)` is strictly increasing and can be searched.
        let (mut low, mut high) = (0, self.steps());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.consumed(middle) < consumed {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        (low < self.steps() && self.consumed(low) == consumed).then_some(low)
    }

    /// Describes the settings that differ from `now`; empty if all agree.
    fn differences(&self, now: &Self) -> String {
        let mut found = Vec::new();
        let mut compare = |name: &str, saved: &dyn std::fmt::Debug, now: &dyn std::fmt::Debug| {
            let (saved, now) = (format!("{saved:?}"), format!("{now:?}"));
            if saved != now {
                found.push(format!("{name} {saved} (now {now})"));
            }
        };
        compare("len", &self.len, &now.len);
        compare("shards", &self.shards, &now.shards);
        compare("global_batch", &self.global_batch, &now.global_batch);
        compare("shuffle", &self.shuffle, &now.shuffle);
        compare("drop_last", &self.drop_last, &now.drop_last);
        compare("padding", &self.padding, &now.padding);
        found.join(", ")
    }
}

/// Cuts the samples of a shard into at most `count` micro-batches of equal size, the last one shorter; none is empty.
pub fn micro_batches(indices: &[usize], count: usize) -> std::slice::Chunks<'_, usize> {
    indices.chunks(indices.len().div_ceil(count.max(1)).max(1))
}

/// The share of the `index`-th of `parts` when `total` items are dealt round-robin.
fn dealt(total: usize, parts: usize, index: usize) -> u64 {
    (total / parts + usize::from(index < total % parts)) as u64
}

/// A run's position in its data: enough to continue with the next sample, on any number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplerState {
    /// Seed of the shuffle.
    pub seed: u64,
    /// Epoch of the next step.
    pub epoch: u64,
    /// Samples of that epoch, including padding, that all shards together have read.
    pub consumed: u64,
    /// The layout of the epoch. It may differ on resuming only if `consumed` is 0.
    pub layout: BatchLayout,
}

/// One step: the samples of every shard, and the position afterwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepPlan {
    /// The epoch, from 0.
    pub epoch: u64,
    /// The step within the epoch, from 0.
    pub step_in_epoch: u64,
    /// Sample indices of each shard. In an epoch's last steps, lists can be short or empty.
    pub shards: Vec<Vec<usize>>,
    /// The state to save after training on this step. Plans are made ahead of training, so the iterator's own state is
    /// usually ahead.
    pub after: SamplerState,
}

impl StepPlan {
    /// Samples of the step, over all shards: the divisor of a mean over the step.
    #[must_use]
    pub fn samples(&self) -> usize {
        self.shards.iter().map(Vec::len).sum()
    }

    /// The samples of the epoch, including padding, that all shards together have read before this step and after it.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        let consumed = |step| self.after.layout.consumed(step);
        consumed(self.step_in_epoch)..consumed(self.step_in_epoch + 1)
    }

    /// Whether this is the last step of the epoch.
    #[must_use]
    pub fn ends_epoch(&self) -> bool {
        self.after.epoch != self.epoch
    }
}

/// The steps of a run, one epoch after another.
///
/// Shard `v` of `V` reads every `V`-th sample of the epoch's order, as with [`DistributedSampler`], and takes its next
/// `global_batch / V` of them each step. The number per step is constant for a shard. At the end of an epoch, shards take the
/// remaining samples; with `drop_last`, steps with a short shard are dropped.
///
/// *Numerics*: if `V` does not divide `global_batch`, the first shards take one sample more per step, run out earlier, and
/// have empty lists in the epoch's last steps. Every sample is still read once.
/// *Cost*: one shuffle per epoch, at its first step.
///
/// ```
/// # use paceline_ddp::sampler::*;
/// let sampler = DistributedSampler::new(SamplerOptions {
///     len: 5,
///     shards: 2,
///     shuffle: false,
///     ..SamplerOptions::default()
/// })?;
/// let mut steps = ShardedBatches::new(sampler, BatchOptions::new(4))?;
/// assert_eq!(steps.steps_per_epoch(), 2);
/// assert_eq!(steps.next().unwrap().shards, [[0, 2], [1, 3]]);
/// assert_eq!(steps.next().unwrap().shards, [vec![4], vec![]]);
/// assert_eq!(steps.next().unwrap().epoch, 1);
/// # Ok::<(), SamplerError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ShardedBatches {
    sampler: DistributedSampler,
    layout: BatchLayout,
    epochs: Option<u64>,
    epoch: u64,
    step: u64,
    /// An epoch and its order, kept for the steps of that epoch.
    order: Option<(u64, Vec<usize>)>,
}

impl ShardedBatches {
    /// The steps, beginning with the first of epoch 0.
    ///
    /// *Errors*: `BatchBelowShards`; `NoFullStep`, with `drop_last` only.
    pub fn new(sampler: DistributedSampler, options: BatchOptions) -> Result<Self, SamplerError> {
        let of = sampler.options();
        let layout = BatchLayout {
            len: of.len,
            shards: of.shards,
            global_batch: options.global_batch,
            shuffle: of.shuffle,
            drop_last: of.drop_last,
            padding: options.padding,
        };
        if layout.global_batch < layout.shards {
            return Err(SamplerError::BatchBelowShards {
                global_batch: layout.global_batch,
                shards: layout.shards,
            });
        }
        if layout.steps() == 0 {
            return Err(SamplerError::NoFullStep {
                len: layout.len,
                shards: layout.shards,
                global_batch: layout.global_batch,
            });
        }
        Ok(Self {
            sampler,
            layout,
            epochs: options.epochs,
            epoch: 0,
            step: 0,
            order: None,
        })
    }

    /// Continues at the first step after `state`.
    ///
    /// *Errors*: `SeedDiffers`; within an epoch also `LayoutDiffers` and `NotAtAStep`.
    pub fn load_state_dict(&mut self, state: &SamplerState) -> Result<(), SamplerError> {
        let seed = self.sampler.options().seed;
        if state.seed != seed {
            return Err(SamplerError::SeedDiffers {
                saved: state.seed,
                now: seed,
            });
        }
        self.step = self.step_of(state)?;
        self.epoch = state.epoch;
        Ok(())
    }

    fn step_of(&self, state: &SamplerState) -> Result<u64, SamplerError> {
        let SamplerState {
            epoch, consumed, ..
        } = *state;
        if consumed == 0 {
            return Ok(0);
        }
        let differences = state.layout.differences(&self.layout);
        if !differences.is_empty() {
            return Err(SamplerError::LayoutDiffers {
                epoch,
                consumed,
                differences,
                shards: (state.layout.shards != self.layout.shards).then_some(state.layout.shards),
            });
        }
        self.layout
            .step_at(consumed)
            .ok_or(SamplerError::NotAtAStep {
                epoch,
                consumed,
                global_batch: self.layout.global_batch,
            })
    }

    /// The position before the next step of the iterator.
    #[must_use]
    pub fn state(&self) -> SamplerState {
        SamplerState {
            seed: self.sampler.options().seed,
            epoch: self.epoch,
            consumed: self.layout.consumed(self.step),
            layout: self.layout,
        }
    }

    /// Steps per epoch.
    #[must_use]
    pub fn steps_per_epoch(&self) -> u64 {
        self.layout.steps()
    }

    /// The layout of the steps.
    #[must_use]
    pub fn layout(&self) -> &BatchLayout {
        &self.layout
    }

    /// Goes to the first step of `epoch`. The iterator goes from one epoch to the next by itself.
    pub fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
        self.step = 0;
    }

    /// The samples of `shard` in the next step.
    fn shard_indices(&self, order: &[usize], shard: usize) -> Vec<usize> {
        let BatchLayout { len, shards, .. } = self.layout;
        let first = self.layout.shard_consumed(self.step, shard);
        let end = self.layout.shard_consumed(self.step + 1, shard);
        (first..end)
            // Positions beyond the order are padding, which repeats the order from its start.
            .map(|turn| order[(shard + turn as usize * shards) % len])
            .collect()
    }

    fn advance(&mut self) {
        self.step += 1;
        if self.step == self.steps_per_epoch() {
            self.set_epoch(self.epoch + 1);
        }
    }
}

impl Iterator for ShardedBatches {
    type Item = StepPlan;

    fn next(&mut self) -> Option<StepPlan> {
        let (epoch, step_in_epoch) = (self.epoch, self.step);
        if self.epochs.is_some_and(|end| epoch >= end) {
            return None;
        }
        let order = match self.order.take() {
            Some((of, order)) if of == epoch => order,
            _ => self.sampler.order(epoch),
        };
        let shards = (0..self.layout.shards)
            .map(|shard| self.shard_indices(&order, shard))
            .collect();
        self.order = Some((epoch, order));
        self.advance();
        Some(StepPlan {
            epoch,
            step_in_epoch,
            shards,
            after: self.state(),
        })
    }
}

impl FusedIterator for ShardedBatches {}

#[cfg(test)]
mod tests;
