//! Gradients in ordinary memory: written into their bucket by the compute thread, reduced by the process group.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use burn::tensor::Tensor;
use paceline_collective::{AllGather, Done, ProcessGroup, Ticket};

use super::blocks::{Arrived, Blocks, Landed};
use super::sent::{Half, Memory};
use super::{Event, Finished, Gathered, HostMeans, Kept, Means, Reducer, Setup, lock};
use crate::buffer::Value;
use crate::comm_hook::CommHook;
use crate::error::DdpError;
use crate::hook::GradientSink;
use crate::plan::{BucketPlan, Segment};
use crate::timeline::BucketTiming;
use crate::zero::Shares;

pub(crate) struct HostReducer {
    group: ProcessGroup,
    plan: Arc<BucketPlan>,
    hook: CommHook,
    shares: Option<Arc<Shares>>,
    blocks: Mutex<Blocks>,
    keeps_tail: bool,
    /// The last step's gradients, if its tail did not come.
    unfinished: Mutex<Option<Gradients>>,
    /// Parameters on their way to all ranks, by bucket.
    weights: Mutex<Vec<Option<Weights>>>,
}

/// A bucket's parameters in flight, and its memory that is not.
struct Weights {
    ticket: Ticket<f32>,
    half: Option<Half>,
}

/// A step's averages and timings, without the tail.
struct Gradients {
    means: HostMeans,
    used: Vec<bool>,
    timings: Vec<BucketTiming>,
}

impl Gradients {
    fn finished(mut self, tail: Tail) -> Finished {
        self.timings.extend(tail.timing);
        Finished {
            means: Means::Host(self.means),
            used: self.used,
            statistics: tail.statistics,
            extras: tail.extras,
            timings: self.timings,
            tail: tail.values,
        }
    }
}

/// The contents of the tail bucket.
pub(super) struct Tail {
    pub(super) weight: f32,
    pub(super) statistics: Option<Vec<Vec<f32>>>,
    pub(super) extras: Vec<f32>,
    /// `None` if another rank lent the bucket.
    pub(super) timing: Option<BucketTiming>,
    /// All of it, if it is kept.
    pub(super) values: Vec<f32>,
}

impl HostReducer {
    pub(crate) fn new(mut setup: Setup) -> Self {
        if setup.shares.is_some() || setup.hook.is_per_shard() {
            setup.plan = Arc::new(BucketPlan::clone(&setup.plan).flags_in_tail());
        }
        Self::numbered_from(0, setup)
    }

    /// A reducer of the tail bucket alone, for gradients that do not go through host memory. Its sums end with one flag per
    /// parameter. Where parameters are sharded it leaves after all gathers of the step, see [`Event::Open`].
    pub(super) fn of_tail(setup: Setup) -> Self {
        let first = setup.plan.tail();
        let plan = Arc::new(setup.plan.tail_alone());
        Self::numbered_from(first, Setup { plan, ..setup })
    }

    fn numbered_from(first: usize, setup: Setup) -> Self {
        Self {
            group: setup.group.clone(),
            plan: setup.plan.clone(),
            hook: setup.hook,
            shares: setup.shares.clone(),
            keeps_tail: setup.keeps_tail,
            unfinished: Mutex::new(None),
            weights: Mutex::new(setup.plan.buckets.iter().map(|_| None).collect()),
            blocks: Mutex::new(Blocks::new(setup, first)),
        }
    }

    /// Takes gradients, row-major, by the index of their parameter.
    pub(super) fn write<'a>(&self, gradients: impl IntoIterator<Item = (usize, &'a [f32])>) {
        let mut blocks = lock(&self.blocks);
        for (index, values) in gradients {
            blocks.gradient(index, values);
        }
    }

    /// Waits for the tail bucket.
    pub(super) fn finish_tail(&self) -> Result<Tail, DdpError> {
        let at = self.plan.tail();
        let (landed, timing) = self.land(at)?;
        #[cfg(test)]
        crate::recovery::faults::after_tail(&self.group)?;
        Ok(self.tail(&landed, Some(timing)))
    }

    /// The tail bucket as another rank has it; `None` if its length is wrong.
    pub(super) fn lent_tail(&self, values: Vec<f32>) -> Option<Tail> {
        let is_whole = values.len() == self.plan.buckets[self.plan.tail()].stride;
        is_whole.then(|| self.tail(&Landed::Slice(values, 0), None))
    }

    /// Loses the rank here, in tests that plan it.
    #[cfg(test)]
    pub(super) fn before_send(&self, step: u64, bucket: usize) {
        crate::recovery::faults::before_send(step, bucket, &self.group);
    }

    fn tail(&self, landed: &Landed, timing: Option<BucketTiming>) -> Tail {
        let bucket = &self.plan.buckets[self.plan.tail()];
        let arrived = Arrived::new(bucket, landed, None);
        let means = || {
            let positions = 0..bucket.segments.len();
            positions.map(|position| arrived.mean(position)).collect()
        };
        Tail {
            weight: arrived.weight(),
            statistics: (arrived.weight() != 0.0).then(means),
            extras: arrived.extras(),
            timing,
            values: match self.keeps_tail {
                true => arrived.values().to_vec(),
                false => Vec::new(),
            },
        }
    }

    /// Waits for a bucket.
    fn land(&self, at: usize) -> Result<(Landed, BucketTiming), DdpError> {
        let mut blocks = lock(&self.blocks);
        if self.shares.is_some() && at != self.plan.tail() {
            return blocks.take_own(at);
        }
        if self.hook.is_per_shard() && at != self.plan.tail() {
            return blocks.receive(at);
        }
        let flight = blocks.take(at)?;
        drop(blocks);
        let (memory, timing) = flight.land()?;
        Ok((Landed::Whole(memory), timing))
    }
}

impl Reducer for HostReducer {
    fn reserve(&self) -> Result<(), DdpError> {
        lock(&self.blocks).reserve()
    }

    fn apply(&self, event: Event) {
        lock(&self.blocks).apply(event);
    }

    fn launched(&self) -> usize {
        lock(&self.blocks).launched()
    }

    fn finish(&self) -> Result<Finished, DdpError> {
        let last = self.plan.tail();
        // Whole f32 buckets carry their own weight, so each is divided while the next is still in flight.
        let mut early = match (self.hook, &self.shares) {
            (CommHook::None, None) => None,
            _ => Some(self.finish_tail()?),
        };
        if self.hook.is_per_shard() {
            lock(&self.blocks).resend()?;
        }
        let known = early.as_ref().map(|tail| tail.weight);
        let has_flags = self.shares.is_some() || self.hook.is_per_shard();
        let flags = early.as_mut().filter(|_| has_flags).map(|tail| {
            let sums = tail.extras.len() - self.plan.places.len();
            tail.extras.split_off(sums)
        });
        let mut means = HostMeans::of(self.plan.places.len());
        let mut adopted = lock(&self.blocks).take_adopted();
        let mut used = vec![false; self.plan.places.len()];
        let mut timings = Vec::with_capacity(last + 1);
        for (at, bucket) in self.plan.buckets[..last].iter().enumerate() {
            let (landed, timing) = self.land(at)?;
            let arrived = Arrived::new(bucket, &landed, known);
            let mut places = Vec::with_capacity(bucket.segments.len());
            for (position, Segment { index, len, .. }) in bucket.segments.iter().enumerate() {
                used[*index] = match &flags {
                    Some(flags) => flags[*index] > 0.0 && known != Some(0.0),
                    None => arrived.used(position),
                };
                let own = match &self.shares {
                    Some(shares) => shares.owned(&self.plan, *index, self.group.rank()),
                    None => 0..*len,
                };
                let has_mean = used[*index]
                    && landed.concerns(position)
                    && (self.shares.is_none() || !own.is_empty());
                let alone = adopted.get_mut(*index).and_then(Option::take);
                match alone {
                    _ if !has_mean => {}
                    Some(gradient) => {
                        let landed = Landed::Slice(gradient, 0);
                        means.push(landed, arrived.weight(), [(*index, own)]);
                    }
                    None => places.push((*index, arrived.place(position, own))),
                }
            }
            let weight = arrived.weight();
            means.push(landed, weight, places);
            timings.push(timing);
        }
        let gradients = Gradients {
            means,
            used,
            timings,
        };
        match early.map_or_else(|| self.finish_tail(), Ok) {
            Ok(tail) => Ok(gradients.finished(tail)),
            Err(error) => {
                *lock(&self.unfinished) = Some(gradients).filter(|_| self.keeps_tail);
                Err(error)
            }
        }
    }

    fn finish_with(&self, tail: Vec<f32>) -> Option<Finished> {
        let gradients = lock(&self.unfinished).take()?;
        let tail = self.lent_tail(tail)?;
        Some(gradients.finished(tail))
    }

    fn kept(&self, kept: Kept, index: usize, with: &mut dyn FnMut(&mut [f32])) {
        lock(&self.blocks).kept(kept, index).map(with);
    }

    fn send_weights(&self, bucket: usize, own: &HashMap<usize, Value>) -> Result<(), DdpError> {
        let shares = self.shares.as_ref().expect("the weights are dealt");
        let mut blocks = lock(&self.blocks);
        let memory = blocks.lend(bucket)?;
        let Memory {
            blocks: mut values,
            half,
        } = memory;
        for segment in &self.plan.buckets[bucket].segments {
            let range = shares.owned(&self.plan, segment.index, self.group.rank());
            if let Some(Value::Host(own)) = own.get(&segment.index) {
                let at = segment.offset + range.start;
                values[at..at + own.len()].copy_from_slice(own);
            }
        }
        let call = AllGather {
            counts: Some(shares.counts(bucket).clone()),
            bucket: Some(bucket as u32),
            step: blocks.step(),
        };
        let ticket = self.group.all_gather_async(values, call);
        lock(&self.weights)[bucket] = Some(Weights { ticket, half });
        Ok(())
    }

    fn receive_weights(&self, bucket: usize) -> Result<Gathered, DdpError> {
        let sent = lock(&self.weights)[bucket].take();
        let Weights { ticket, half } = sent.expect("the bucket's weights were sent");
        let start = Instant::now();
        let Done { buffer, timing } = ticket.wait()?;
        let (values, bytes) = (buffer, self.plan.buckets[bucket].stride * size_of::<f32>());
        let named = (bucket, bytes, "all_gather");
        let timing = BucketTiming::on_host(named, None, timing, start);
        let segments = self.plan.buckets[bucket].segments.iter();
        let weights = segments.map(|Segment { index, offset, len }| {
            let weight = values[*offset..offset + len].to_vec();
            (*index, Value::Host(weight))
        });
        let weights = weights.collect();
        let memory = Memory {
            blocks: values,
            half,
        };
        lock(&self.blocks).give_back(bucket, memory);
        Ok(Gathered {
            values: weights,
            timing,
        })
    }
}

impl GradientSink for HostReducer {
    fn gradient(&self, index: usize, gradient: Tensor<1>) {
        // Panics on a failed read, as Burn's own reads do.
        let data = gradient.into_data();
        lock(&self.blocks).own_gradient(index, data);
    }
}
