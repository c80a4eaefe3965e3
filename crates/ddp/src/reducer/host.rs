//! Gradients in ordinary memory: written into their bucket by the compute thread, reduced by the process group.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use burn::tensor::Tensor;

use super::blocks::{Arrived, Blocks};
use super::sent::Memory;
use super::{Event, Finished, Means, Reducer, Setup, lock};
use crate::buffer;
use crate::error::DdpError;
use crate::hook::GradientSink;
use crate::plan::{BucketPlan, Wire};
use crate::timeline::BucketTiming;

pub(crate) struct HostReducer {
    plan: Arc<BucketPlan>,
    /// The reported number of the plan's first bucket.
    first: usize,
    wire: Wire,
    blocks: Mutex<Blocks>,
}

/// The contents of the tail bucket.
pub(super) struct Tail {
    pub(super) weight: f32,
    pub(super) statistics: Option<Vec<Vec<f32>>>,
    pub(super) extras: Vec<f32>,
    pub(super) timing: BucketTiming,
}

impl HostReducer {
    /// *Errors*: no memory for the buckets.
    pub(crate) fn new(setup: Setup) -> Result<Self, DdpError> {
        Self::numbered_from(0, setup)
    }

    /// A reducer of the tail bucket alone, for gradients that do not go through host memory. Its sums end with one flag per
    /// parameter.
    pub(super) fn of_tail(setup: Setup) -> Result<Self, DdpError> {
        let first = setup.plan.tail();
        let plan = Arc::new(setup.plan.tail_alone());
        Self::numbered_from(first, Setup { plan, ..setup })
    }

    fn numbered_from(first: usize, setup: Setup) -> Result<Self, DdpError> {
        Ok(Self {
            plan: setup.plan.clone(),
            first,
            wire: setup.wire,
            blocks: Mutex::new(Blocks::new(setup, first)?),
        })
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
        let bucket = &self.plan.buckets[at];
        let (memory, timing) = self.wait(at)?;
        let arrived = Arrived::new(bucket, &memory, None);
        let means = || {
            let positions = 0..bucket.segments.len();
            positions.map(|position| arrived.mean(position)).collect()
        };
        let tail = Tail {
            weight: arrived.weight(),
            statistics: (arrived.weight() != 0.0).then(means),
            extras: arrived.extras(),
            timing,
        };
        lock(&self.blocks).give_back(at, memory);
        Ok(tail)
    }

    fn wait(&self, at: usize) -> Result<(Memory, BucketTiming), DdpError> {
        let stride = self.plan.buckets[at].stride;
        let (sent, ready) = lock(&self.blocks).take(at);
        let sent = sent.expect("every bucket is launched when the last shard ends");
        let bytes = stride * sent.bytes_each();
        let wait_start = Instant::now();
        let (memory, done) = sent.wait(stride)?;
        let timing = BucketTiming {
            bucket: self.first + at,
            bytes,
            ready: ready.unwrap_or(done.submitted),
            started: done.started,
            peers_ready: done.peers_ready,
            finished: done.finished,
            waited: (wait_start, Instant::now()),
            device: None,
        };
        Ok((memory, timing))
    }
}

impl Reducer for HostReducer {
    fn apply(&self, event: Event) {
        lock(&self.blocks).apply(event);
    }

    fn launched(&self) -> usize {
        lock(&self.blocks).launched()
    }

    fn finish(&self) -> Result<Finished, DdpError> {
        let last = self.plan.tail();
        // Unhalved buckets carry their own weight, so each is divided while the next is still in flight.
        let early = match self.wire {
            Wire::F32 => None,
            Wire::Bf16 => Some(self.finish_tail()?),
        };
        let known = early.as_ref().map(|tail| tail.weight);
        let mut means = vec![None; self.plan.places.len()];
        let mut timings = Vec::with_capacity(last + 1);
        for (at, bucket) in self.plan.buckets[..last].iter().enumerate() {
            let (memory, timing) = self.wait(at)?;
            let arrived = Arrived::new(bucket, &memory, known);
            for (position, segment) in bucket.segments.iter().enumerate() {
                means[segment.index] = arrived.used(position).then(|| arrived.mean(position));
            }
            timings.push(timing);
            lock(&self.blocks).give_back(at, memory);
        }
        let tail = match early {
            Some(tail) => tail,
            None => self.finish_tail()?,
        };
        timings.push(tail.timing);
        Ok(Finished {
            means: Means::Host(means),
            statistics: tail.statistics,
            extras: tail.extras,
            timings,
        })
    }
}

impl GradientSink for HostReducer {
    fn gradient(&self, index: usize, gradient: Tensor<1>) {
        // Panics on a failed read, as Burn's own reads do.
        let data = gradient.into_data();
        self.write([(index, &buffer::floats(&data)[..])]);
    }
}
