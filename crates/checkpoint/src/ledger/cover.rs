//! Deals the samples of every step again, and counts how often each was used. Needs no data: the sampler is deterministic.

use std::collections::HashSet;

use paceline_ddp::sampler::{
    BatchLayout, BatchOptions, DistributedSampler, Padding, SamplerError, SamplerOptions,
    SamplerState, ShardedBatches,
};
use serde::Serialize;

use super::audit::{Attempt, Kept};
use super::fault::Fault;
use super::lines::Hash;
use super::record::Begin;

/// Most samples of a data set: an epoch's order has 8 bytes for each in memory.
const SAMPLES_MAX: usize = 1 << 32;

/// How the samples of one epoch were used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Epoch {
    /// Samples of the data set.
    pub len: usize,
    /// Samples used exactly once.
    pub once: usize,
    /// Samples used more than once: only if `Padding::Torch` repeats some.
    pub repeated: usize,
    /// Samples not used: only if the epoch is unfinished or its settings drop some.
    pub unused: usize,
    /// Whether all its steps are done.
    pub is_finished: bool,
}

/// The epochs that the steps of `kept` make up, up to the first fault.
pub(super) fn cover(attempts: &[Attempt], kept: &[Kept]) -> (Vec<Epoch>, Option<Fault>) {
    let mut epochs = Vec::new();
    let fault = count(attempts, kept, &mut epochs).err();
    (epochs, fault)
}

fn count(attempts: &[Attempt], kept: &[Kept], epochs: &mut Vec<Epoch>) -> Result<(), Fault> {
    let mut dealt: Option<(&Begin, ShardedBatches)> = None;
    let mut position: Option<SamplerState> = None;
    let mut used: Vec<u8> = Vec::new();
    for Kept { step, attempt, .. } in kept {
        let begin = &attempts[*attempt].begin;
        let is_same = |of: &Begin| (of.seed, of.layout) == (begin.seed, begin.layout);
        if dealt.as_ref().is_none_or(|(of, _)| !is_same(of)) {
            let batches = batches_after(begin, position.as_ref());
            let step = step.step.saturating_sub(1);
            let batches = batches.map_err(|why| Fault::Settings { step, why })?;
            dealt = Some((begin, batches));
        }
        let Some(plan) = dealt.as_mut().and_then(|(_, batches)| batches.next()) else {
            break;
        };
        let expected = (plan.epoch, plan.range());
        let found = (step.epoch, step.from..step.to);
        if found != expected {
            let step = step.step;
            return Err(Fault::OutOfTurn {
                step,
                found,
                expected,
            });
        }
        let (found, expected) = (step.indices, Hash::of_indices(&plan.shards));
        if found != expected {
            let step = step.step;
            return Err(Fault::OtherSamples {
                step,
                found,
                expected,
            });
        }
        if plan.step_in_epoch == 0 {
            used = vec![0; begin.layout.len];
        }
        for index in plan.shards.iter().flatten() {
            used[*index] = used[*index].saturating_add(1);
        }
        if plan.ends_epoch() {
            let of = Epoch::new(&std::mem::take(&mut used), true);
            epochs.push(of);
            let BatchLayout {
                padding, drop_last, ..
            } = begin.layout;
            if padding == Padding::None && !drop_last && of.once < of.len {
                let epoch = plan.epoch;
                return Err(Fault::Uneven { epoch, of });
            }
        }
        position = Some(plan.after);
    }
    if !used.is_empty() {
        epochs.push(Epoch::new(&used, false));
    }
    Ok(())
}

impl Epoch {
    fn new(used: &[u8], is_finished: bool) -> Self {
        let count = |wanted: fn(u8) -> bool| used.iter().filter(|uses| wanted(**uses)).count();
        Self {
            len: used.len(),
            once: count(|uses| uses == 1),
            repeated: count(|uses| uses > 1),
            unused: count(|uses| uses == 0),
            is_finished,
        }
    }
}

/// The steps as `begin` deals them, after `position`.
fn batches_after(begin: &Begin, position: Option<&SamplerState>) -> Result<ShardedBatches, String> {
    let BatchLayout { len, shards, .. } = begin.layout;
    if len > SAMPLES_MAX {
        return Err(format!(
            "{len} samples are more than the {SAMPLES_MAX} that can be checked"
        ));
    }
    let owners = &begin.owners;
    let is_dealt = owners.first().is_some_and(|(_, first)| *first == 0)
        && owners.is_sorted_by(|(_, a), (_, b)| a < b)
        && owners.last().is_some_and(|(_, first)| *first < shards);
    let ranks: HashSet<_> = owners.iter().map(|(rank, _)| rank).collect();
    // After a loss the numbers that processes were started with have gaps.
    let are_known = begin.generation > 0 || ranks.iter().all(|rank| **rank < begin.world);
    if !is_dealt || !are_known || ranks.len() < owners.len() {
        let world = begin.world;
        return Err(format!(
            "the {shards} shards are not dealt to replicas among {world} ranks"
        ));
    }
    let deal = || -> Result<ShardedBatches, SamplerError> {
        let sampler = DistributedSampler::new(SamplerOptions {
            len,
            shards,
            seed: begin.seed,
            shuffle: begin.layout.shuffle,
            drop_last: begin.layout.drop_last,
        })?;
        let mut options = BatchOptions::new(begin.layout.global_batch);
        options.padding = begin.layout.padding;
        let mut batches = ShardedBatches::new(sampler, options)?;
        if let Some(position) = position {
            batches.load_state_dict(position)?;
        }
        Ok(batches)
    };
    deal().map_err(|error| error.to_string())
}
