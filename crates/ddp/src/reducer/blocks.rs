//! Buckets in host memory: gradients in, partial sums along the shard tree, launches in order.
//!
//! A rank computes its shards from left to right. Their gradients merge like a binary counter: each
//! bucket's memory is a small stack of blocks, and after every shard the two topmost blocks are added as long as
//! they are siblings in the shard tree. After the last shard, the stack holds exactly the blocks that the collective needs to
//! continue the same tree across ranks.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use paceline_collective::{AllReduce, ProcessGroup, ReduceOp, Tree};

use super::sent::{Memory, Sent};
use super::{Event, Setup};
use crate::error::DdpError;
use crate::plan::{Bucket, BucketPlan, Wire};
use crate::zero::Shares;

/// The sums of one bucket over all shards, still to be divided by `weight`.
pub(super) struct Arrived<'a> {
    bucket: &'a Bucket,
    /// The first block of the bucket, reduced.
    values: &'a [f32],
    weight: f32,
}

impl<'a> Arrived<'a> {
    /// `memory` is the bucket's, with the result in front. `known` is the weight if the bucket's own copy was rounded.
    pub(super) fn new(bucket: &'a Bucket, memory: &'a Memory, known: Option<f32>) -> Self {
        let values = &memory.blocks[..bucket.stride];
        Self {
            bucket,
            values,
            weight: known.unwrap_or(values[bucket.weight]),
        }
    }

    /// Sum of the shards' weights.
    pub(super) fn weight(&self) -> f32 {
        self.weight
    }

    /// The sums that travel with the bucket.
    pub(super) fn extras(&self) -> Vec<f32> {
        self.values[self.bucket.extras.clone()].to_vec()
    }

    /// Whether any shard on any rank used the segment at `position` and any had a sample: a step without samples changes
    /// nothing.
    pub(super) fn used(&self, position: usize) -> bool {
        self.values[self.bucket.flags + position] > 0.0 && self.weight() != 0.0
    }

    /// The segment at `position`, divided by the weight.
    pub(super) fn mean(&self, position: usize) -> Vec<f32> {
        self.mean_of(position, 0..self.bucket.segments[position].len)
    }

    /// Some elements of the segment at `position`, divided by the weight.
    pub(super) fn mean_of(&self, position: usize, range: Range<usize>) -> Vec<f32> {
        let offset = self.bucket.segments[position].offset;
        let weight = self.weight();
        self.values[offset + range.start..offset + range.end]
            .iter()
            .map(|sum| sum / weight)
            .collect()
    }
}

/// The buckets of one rank, from the first shard of a step to the last.
pub(super) struct Blocks {
    plan: Arc<BucketPlan>,
    first: usize,
    tree: Arc<Tree>,
    group: ProcessGroup,
    shares: Option<Arc<Shares>>,
    live: Vec<Live>,
    leaf: Option<Leaf>,
    /// Blocks on every bucket's stack below the current shard.
    height: usize,
    /// Next bucket to launch; launches are strictly in order.
    next: usize,
    step: u64,
}

struct Live {
    memory: Option<Memory>,
    sent: Option<Sent>,
    fill: Vec<Fill>,
    open: usize,
    sealed: bool,
    ready: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fill {
    Empty,
    /// Some micro-batches have contributed.
    Partial,
    /// Complete for this shard and merged down the stack.
    Merged,
}

/// The shard that is being computed.
struct Leaf {
    merges: usize,
    last: bool,
    /// Whether its last backward pass is running.
    is_last_micro: bool,
    /// Factor of the running backward pass.
    factor: f32,
    weight: f32,
    extras: Vec<f32>,
}

impl Blocks {
    /// `first` is the reported number of the plan's first bucket.
    pub(super) fn new(setup: Setup, first: usize) -> Result<Self, DdpError> {
        let Setup {
            group,
            plan,
            tree,
            wire,
            shares,
        } = setup;
        let depth = tree.stack_depth(group.rank());
        let mut live = Vec::with_capacity(plan.buckets.len());
        for (at, bucket) in plan.buckets.iter().enumerate() {
            // The tail is never halved: its sums are exact counts.
            let halves = wire == Wire::Bf16 && at != plan.tail();
            live.push(Live {
                memory: Some(Memory::new(&group, bucket.stride * depth, halves)?),
                sent: None,
                fill: vec![Fill::Empty; bucket.segments.len()],
                open: 0,
                sealed: false,
                ready: None,
            });
        }
        Ok(Self {
            plan,
            first,
            tree,
            group,
            shares,
            live,
            leaf: None,
            height: 0,
            next: 0,
            step: 0,
        })
    }

    pub(super) fn apply(&mut self, event: Event) {
        match event {
            Event::Step(step) => {
                self.height = 0;
                self.next = 0;
                self.step = step;
                self.leaf = None;
            }
            Event::Shard(shard) => self.begin_shard(shard),
            Event::ShardEnd(buffers) => self.end_shard(&buffers),
            Event::Micro(micro) => self.in_shard(|leaf| {
                leaf.is_last_micro = micro.is_last;
                leaf.factor = micro.factor;
                leaf.weight += micro.factor;
                leaf.extras[0] += micro.weight;
            }),
            Event::MicroEnd => self.in_shard(|leaf| leaf.is_last_micro = false),
            Event::Extra { slot, value } => self.in_shard(|leaf| leaf.extras[slot] += value),
        }
    }

    fn in_shard(&mut self, change: impl FnOnce(&mut Leaf)) {
        if let Some(leaf) = &mut self.leaf {
            change(leaf);
        }
    }

    /// The number of buckets sent in this step.
    pub(super) fn launched(&self) -> usize {
        self.next
    }

    /// The receipt of a bucket that was sent, and when it was complete on this rank.
    pub(super) fn take(&mut self, bucket: usize) -> (Option<Sent>, Option<Instant>) {
        let live = &mut self.live[bucket];
        (live.sent.take(), live.ready.take())
    }

    /// Lends a bucket's memory between two steps.
    pub(super) fn lend(&mut self, bucket: usize) -> Option<Memory> {
        self.live[bucket].memory.take()
    }

    /// The step that has just ended.
    pub(super) fn step(&self) -> u64 {
        self.step
    }

    /// Takes a bucket's memory back for the next step.
    pub(super) fn give_back(&mut self, bucket: usize, memory: Memory) {
        self.live[bucket].memory = Some(memory);
    }

    fn begin_shard(&mut self, shard: usize) {
        let rank = self.group.rank();
        let extras = self.plan.buckets[self.plan.tail()].extras.len();
        self.leaf = Some(Leaf {
            merges: self.tree.merges_after(rank, shard),
            last: shard + 1 == self.tree.range(rank).end,
            is_last_micro: false,
            factor: 0.0,
            weight: 0.0,
            extras: vec![0.0; extras],
        });
        for live in &mut self.live {
            live.fill.fill(Fill::Empty);
            live.open = live.fill.len();
            live.sealed = false;
        }
    }

    /// Takes the gradient of a parameter, row-major. Drops a gradient that arrives outside a step (from a hooked model used
    /// on its own).
    pub(super) fn gradient(&mut self, index: usize, values: &[f32]) {
        let Some(leaf) = &self.leaf else { return };
        let (bucket, position) = self.plan.places[index];
        let layout = &self.plan.buckets[bucket];
        let segment = &layout.segments[position];
        let live = &mut self.live[bucket];
        let Some(buffer) = live.memory.as_mut().map(|memory| &mut memory.blocks) else {
            return;
        };
        let at = self.height * layout.stride + segment.offset;
        let slot = &mut buffer[at..at + segment.len];
        match live.fill[position] {
            Fill::Empty => store(slot, values, leaf.factor),
            Fill::Partial => accumulate(slot, values, leaf.factor),
            Fill::Merged => return,
        }
        live.fill[position] = Fill::Partial;
        if leaf.is_last_micro {
            self.complete(bucket, position);
        }
    }

    /// Marks a segment complete for this shard, merges it, and launches buckets that became ready.
    fn complete(&mut self, bucket: usize, position: usize) {
        let Some(leaf) = &mut self.leaf else { return };
        let layout = &self.plan.buckets[bucket];
        let live = &mut self.live[bucket];
        let Some(buffer) = live.memory.as_mut().map(|memory| &mut memory.blocks) else {
            return;
        };
        let segment = &layout.segments[position];
        let base = self.height * layout.stride;
        let used = match live.fill[position] {
            Fill::Merged => return,
            Fill::Partial => 1.0,
            Fill::Empty => {
                buffer[base + segment.offset..base + segment.offset + segment.len].fill(0.0);
                0.0
            }
        };
        buffer[base + layout.flags + position] = used;
        if self.shares.is_some() && bucket != self.plan.tail() {
            let first = leaf.extras.len() - self.plan.places.len();
            leaf.extras[first + segment.index] = used;
        }
        let data = segment.offset..segment.offset + segment.len;
        merge(buffer, layout.stride, self.height, leaf.merges, data);
        let flag = layout.flags + position..layout.flags + position + 1;
        merge(buffer, layout.stride, self.height, leaf.merges, flag);
        live.fill[position] = Fill::Merged;
        live.open -= 1;
        if live.open == 0 && bucket != self.plan.tail() {
            self.seal(bucket);
        }
    }

    /// Writes a bucket's weight and extras for this shard; after the last shard the bucket may be launched.
    fn seal(&mut self, bucket: usize) {
        let Some(leaf) = &self.leaf else { return };
        let layout = &self.plan.buckets[bucket];
        let live = &mut self.live[bucket];
        let Some(buffer) = live.memory.as_mut().map(|memory| &mut memory.blocks) else {
            return;
        };
        let base = self.height * layout.stride;
        buffer[base + layout.weight] = leaf.weight;
        for (offset, value) in layout.extras.clone().zip(&leaf.extras) {
            buffer[base + offset] = *value;
        }
        let tail = layout.weight..layout.extras.end;
        merge(buffer, layout.stride, self.height, leaf.merges, tail);
        live.sealed = true;
        if leaf.last {
            live.ready = Some(Instant::now());
            self.launch_ready();
        }
    }

    fn launch_ready(&mut self) {
        while self.next < self.live.len() && self.live[self.next].sealed {
            let live = &mut self.live[self.next];
            let Some(memory) = live.memory.take() else {
                return;
            };
            let stride = self.plan.buckets[self.next].stride;
            let call = AllReduce {
                op: ReduceOp::Sum,
                tree: Some(self.tree.clone()),
                len: stride,
                bucket: Some((self.first + self.next) as u32),
                step: self.step,
            };
            let len = stride * self.tree.blocks(self.group.rank()).len();
            let shares = self
                .shares
                .as_ref()
                .filter(|_| self.next < self.plan.tail());
            let counts = shares.map(|shares| shares.counts(self.next).clone());
            live.sent = Some(memory.send(&self.group, call, counts, len));
            self.next += 1;
        }
    }

    fn end_shard(&mut self, buffers: &[Vec<f32>]) {
        let tail = self.plan.tail();
        for bucket in 0..tail {
            for position in 0..self.plan.buckets[bucket].segments.len() {
                self.complete(bucket, position);
            }
        }
        self.put_buffers(tail, buffers);
        self.seal(tail);
        if let Some(leaf) = self.leaf.take() {
            self.height = self.height + 1 - leaf.merges;
        }
    }

    fn put_buffers(&mut self, tail: usize, buffers: &[Vec<f32>]) {
        let Some(leaf) = &self.leaf else { return };
        let weight = leaf.weight;
        let layout = &self.plan.buckets[tail];
        let live = &mut self.live[tail];
        let base = self.height * layout.stride;
        if let Some(buffer) = live.memory.as_mut().map(|memory| &mut memory.blocks) {
            for (segment, values) in layout.segments.iter().zip(buffers) {
                let at = base + segment.offset;
                store(&mut buffer[at..at + segment.len], values, weight);
            }
        }
        live.fill.fill(Fill::Partial);
        for position in 0..self.plan.buckets[tail].segments.len() {
            self.complete(tail, position);
        }
    }
}

/// `slot = values * factor`
fn store(slot: &mut [f32], values: &[f32], factor: f32) {
    if factor == 1.0 {
        slot.copy_from_slice(values);
        return;
    }
    for (slot, value) in slot.iter_mut().zip(values) {
        *slot = value * factor;
    }
}

/// `slot += values * factor`, the product rounded before the sum.
fn accumulate(slot: &mut [f32], values: &[f32], factor: f32) {
    for (slot, value) in slot.iter_mut().zip(values) {
        *slot += value * factor;
    }
}

/// Adds the topmost block of a stack into the one below, `merges` times, in `range` only.
fn merge(buffer: &mut [f32], stride: usize, top: usize, merges: usize, range: Range<usize>) {
    for level in 0..merges {
        let right_block = (top - level) * stride;
        let (below, above) = buffer.split_at_mut(right_block);
        let left = &mut below[right_block - stride + range.start..right_block - stride + range.end];
        let right = &above[range.clone()];
        for (left, right) in left.iter_mut().zip(right) {
            *left += right;
        }
    }
}
