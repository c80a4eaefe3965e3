//! Buckets in host memory: gradients in, partial sums along the shard tree, launches in order.
//!
//! A rank computes its shards from left to right. Their gradients merge like a binary counter: each
//! bucket's memory is a small stack of blocks, and after every shard the two topmost blocks are added as long as
//! they are siblings in the shard tree. After the last shard, the stack holds exactly the blocks that the collective needs to
//! continue the same tree across ranks.

mod landed;
mod travel;

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use burn::tensor::TensorData;
use paceline_collective::{ProcessGroup, Tree};

use super::compress::{self, Compressor, Leaf as ShardLeaf};
use super::pool::Pool;
use super::sent::Memory;
use super::{Event, Kept, Setup};
use crate::buffer;
use crate::comm_hook::CommHook;
use crate::error::DdpError;
use crate::plan::BucketPlan;
use crate::record::Recorder;
use crate::timeline::BucketTiming;
use crate::zero::{Shares, ZeroStage};
pub(super) use landed::{Arrived, Flight, Landed};

/// Buckets that are on their way to the other ranks while the next is filled, if their memory is pooled. Two were no faster.
pub(crate) const IN_FLIGHT: usize = 1;

/// A gradient behind the one of a parameter that comes after it.
pub(crate) const LATE: &str = "a gradient came out of order, after its bucket had been completed without it: the backward pass of this version of Burn \
                    runs hooks in another order";

/// The buckets of one rank, from the first shard of a step to the last.
pub(super) struct Blocks {
    plan: Arc<BucketPlan>,
    first: usize,
    tree: Arc<Tree>,
    group: ProcessGroup,
    hook: CommHook,
    /// Compresses the gradient buckets, in place of the stack and the reduction.
    compressor: Option<Box<dyn Compressor>>,
    shares: Option<Arc<Shares>>,
    recorder: Option<Arc<Recorder>>,
    live: Vec<Live>,
    /// Of the only shard on the only rank: gradients in their own memory, by parameter.
    adopted: Option<Vec<Option<Vec<f32>>>>,
    /// Whether the gradient buckets share one pool.
    is_pooled: bool,
    /// A bucket that could not get memory, or did not come back while others were filled.
    failed: Option<DdpError>,
    leaf: Option<Leaf>,
    /// Blocks on every bucket's stack below the current shard.
    height: usize,
    /// Next bucket to launch; launches are strictly in order.
    next: usize,
    /// Buckets that may be launched, see [`Event::Open`]; `None` if all may as soon as they are complete.
    open: Option<usize>,
    step: u64,
}

struct Live {
    memory: Option<Memory>,
    /// Where its memory comes from, and comes back to.
    pool: Pool,
    flight: Option<Flight>,
    /// This rank's slice, back from the other ranks.
    own: Option<(Landed, BucketTiming)>,
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
    shard: usize,
    merges: usize,
    last: bool,
    /// Whether its last backward pass is running.
    is_last_micro: bool,
    /// See [`Micro::is_ordered`](super::Micro::is_ordered).
    is_ordered: bool,
    /// The first bucket and position for which an ordered pass may still bring a gradient.
    awaited: (usize, usize),
    /// Factor of the running backward pass.
    factor: f32,
    weight: f32,
    extras: Vec<f32>,
}

impl Blocks {
    /// `first` is the reported number of the plan's first bucket. A bucket without [reserved](Self::reserve) memory takes it when
    /// its first gradient comes.
    pub(super) fn new(setup: Setup, first: usize) -> Self {
        let compressor = compress::compressor(&setup);
        let Setup {
            group,
            plan,
            tree,
            hook,
            shares,
            recorder,
            ..
        } = setup;
        let stage = shares.as_ref().map(|shares| shares.stage());
        let is_pooled = stage.is_some_and(ZeroStage::shards_gradients);
        let common = Pool::default();
        let is_alone = group.world() == 1 && tree.leaves() == 1;
        let adopts = is_alone && hook == CommHook::None && shares.is_none() && recorder.is_none();
        let is_gated = stage.is_some_and(ZeroStage::shards_parameters);
        let live = plan.buckets.iter().enumerate().map(|(at, bucket)| Live {
            memory: None,
            pool: match is_pooled && at != plan.tail() {
                true => common.clone(),
                false => Pool::default(),
            },
            flight: None,
            own: None,
            fill: vec![Fill::Empty; bucket.segments.len()],
            open: 0,
            sealed: false,
            ready: None,
        });
        Self {
            open: is_gated.then_some(0),
            live: live.collect(),
            adopted: adopts.then(|| vec![None; plan.places.len()]),
            is_pooled,
            plan,
            first,
            tree,
            group,
            hook,
            compressor,
            shares,
            recorder,
            failed: None,
            leaf: None,
            height: 0,
            next: 0,
            step: 0,
        }
    }

    /// Gives memory to all buckets that have a pool of their own.
    pub(super) fn reserve(&mut self) -> Result<(), DdpError> {
        let first = match self.is_pooled {
            true => self.plan.tail(),
            false => 0,
        };
        (first..self.live.len()).try_for_each(|bucket| self.hold(bucket))
    }

    /// Numbers in a bucket's memory, and its hook.
    fn extent(&self, bucket: usize) -> (usize, CommHook) {
        let depth = match self.is_compressed(bucket) {
            true => 1,
            false => self.tree.stack_depth(self.group.rank()),
        };
        // The tail is never compressed: its sums are exact counts.
        let hook = match bucket == self.plan.tail() {
            true => CommHook::None,
            false => self.hook,
        };
        (self.plan.buckets[bucket].stride * depth, hook)
    }

    fn is_compressed(&self, bucket: usize) -> bool {
        self.compressor.is_some() && bucket != self.plan.tail()
    }

    /// The block that the current shard fills, and how often it merges with those below.
    fn level(&self, bucket: usize) -> (usize, usize) {
        match (&self.leaf, self.is_compressed(bucket)) {
            (Some(leaf), false) => (self.height, leaf.merges),
            _ => (0, 0),
        }
    }

    pub(super) fn apply(&mut self, event: Event) {
        match event {
            Event::Step { step, undone } => {
                if let Some(compressor) = &mut self.compressor {
                    compressor.begin(step);
                }
                self.height = 0;
                self.next = 0;
                self.open = self.open.map(|_| 0);
                self.step = step + undone;
                self.leaf = None;
                self.failed = None;
                self.take_adopted();
                if let Some(recorder) = &self.recorder {
                    recorder.begin_step();
                }
            }
            Event::Shard(shard) => self.begin_shard(shard),
            Event::ShardEnd(buffers) => self.end_shard(&buffers),
            Event::Micro(micro) => self.in_shard(|leaf| {
                leaf.is_last_micro = micro.is_last;
                leaf.is_ordered = micro.is_ordered;
                leaf.factor = micro.factor;
                if micro.is_first {
                    leaf.weight += micro.factor;
                    leaf.extras[0] += micro.weight;
                }
            }),
            Event::MicroEnd => self.in_shard(|leaf| {
                leaf.is_last_micro = false;
                leaf.is_ordered = false;
            }),
            Event::Extra { slot, value } => self.in_shard(|leaf| leaf.extras[slot] += value),
            Event::Open(buckets) => self.open(buckets),
            Event::Commit => {
                if let Some(compressor) = &mut self.compressor {
                    compressor.commit();
                }
            }
        }
    }

    fn open(&mut self, buckets: usize) {
        if self.leaf.as_ref().is_some_and(|leaf| leaf.last) {
            for bucket in 0..buckets.min(self.plan.tail()) {
                self.complete_all(bucket);
            }
        }
        self.open = self.open.map(|_| buckets);
        self.launch_ready();
    }

    fn in_shard(&mut self, change: impl FnOnce(&mut Leaf)) {
        if let Some(leaf) = &mut self.leaf {
            change(leaf);
        }
    }

    /// See [`Compressor::kept`].
    pub(super) fn kept(&mut self, kept: Kept, index: usize) -> Option<&mut [f32]> {
        self.compressor.as_mut()?.kept(kept, index)
    }

    /// Makes sure that a bucket has memory.
    fn hold(&mut self, bucket: usize) -> Result<(), DdpError> {
        let (len, hook) = self.extent(bucket);
        let live = &mut self.live[bucket];
        if live.memory.is_none() {
            live.memory = Some(live.pool.take(&self.group, len, hook)?);
        }
        Ok(())
    }

    /// The same for a bucket that is filled. One that was sent in this step takes no more gradients, and after a failure the
    /// step is lost.
    fn hold_open(&mut self, bucket: usize) {
        if bucket >= self.next && self.failed.is_none() {
            self.failed = self.hold(bucket).err();
        }
    }

    /// The step that has just ended.
    pub(super) fn step(&self) -> u64 {
        self.step
    }

    fn begin_shard(&mut self, shard: usize) {
        let rank = self.group.rank();
        if let Some(recorder) = &self.recorder {
            recorder.begin_shard(shard, self.group.started_rank(rank), self.plan.places.len());
        }
        let extras = self.plan.buckets[self.plan.tail()].extras.len();
        self.leaf = Some(Leaf {
            shard,
            merges: self.tree.merges_after(rank, shard),
            last: shard + 1 == self.tree.range(rank).end,
            is_last_micro: false,
            is_ordered: false,
            awaited: (0, 0),
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

    /// Takes the gradient of a parameter, row-major, with its memory if it needs no sum.
    pub(super) fn own_gradient(&mut self, index: usize, data: TensorData) {
        let place = self.plan.places[index];
        let (bucket, position) = place;
        let is_first = self.live[bucket].fill[position] == Fill::Empty;
        let leaf = self.leaf.as_ref();
        let is_whole = leaf.is_some_and(|leaf| leaf.is_last_micro && leaf.factor == 1.0);
        match &mut self.adopted {
            Some(adopted) if is_first && is_whole => {
                adopted[index] = Some(buffer::into_floats(data));
            }
            _ => return self.gradient(index, &buffer::floats(&data)),
        }
        self.live[bucket].fill[position] = Fill::Partial;
        self.pass_over(place);
        self.complete(bucket, position);
    }

    /// The gradients that [`own_gradient`](Self::own_gradient) kept, by parameter.
    pub(super) fn take_adopted(&mut self) -> Vec<Option<Vec<f32>>> {
        let adopted = self.adopted.iter_mut().flatten();
        adopted.map(Option::take).collect()
    }

    /// Takes the gradient of a parameter, row-major. Drops a gradient that arrives outside a step (from a hooked model used
    /// on its own).
    pub(super) fn gradient(&mut self, index: usize, values: &[f32]) {
        let (bucket, position) = self.plan.places[index];
        self.pass_over((bucket, position));
        if self.leaf.is_some() {
            self.hold_open(bucket);
        }
        let (height, _) = self.level(bucket);
        let Some(leaf) = &self.leaf else { return };
        let layout = &self.plan.buckets[bucket];
        let segment = &layout.segments[position];
        let live = &mut self.live[bucket];
        let Some(buffer) = live.memory.as_mut().map(|memory| &mut memory.blocks) else {
            return;
        };
        let at = height * layout.stride + segment.offset;
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

    /// An ordered pass has come to the parameter at `place`: those before it have no gradient, if none has come. So buckets with unused
    /// parameters hold nobody up.
    fn pass_over(&mut self, place: (usize, usize)) {
        // Where buckets are gated, they are in the order of blocks.
        let is_gated = self.open.is_some();
        let has_passed = self
            .leaf
            .as_ref()
            .is_some_and(|leaf| leaf.is_ordered && place < leaf.awaited);
        if has_passed && self.live[place.0].fill[place.1] == Fill::Merged {
            // It must not be lost silently, however unlikely it is.
            self.failed = self.failed.take().or(Some(DdpError::Backend(LATE)));
        }
        while let Some(leaf) = self
            .leaf
            .as_mut()
            .filter(|leaf| leaf.is_ordered && !is_gated)
            && leaf.awaited < place
        {
            let (bucket, position) = leaf.awaited;
            if position == self.plan.buckets[bucket].segments.len() {
                leaf.awaited = (bucket + 1, 0);
                continue;
            }
            leaf.awaited.1 += 1;
            self.complete(bucket, position);
        }
    }

    /// Marks a segment complete for this shard, merges it, and launches buckets that became ready.
    fn complete(&mut self, bucket: usize, position: usize) {
        self.hold_open(bucket);
        let (height, merges) = self.level(bucket);
        let has_flags_in_tail = self.shares.is_some() || self.compressor.is_some();
        let Some(leaf) = &mut self.leaf else { return };
        let layout = &self.plan.buckets[bucket];
        let live = &mut self.live[bucket];
        let Some(buffer) = live.memory.as_mut().map(|memory| &mut memory.blocks) else {
            return;
        };
        let segment = &layout.segments[position];
        let base = height * layout.stride;
        let used = match live.fill[position] {
            Fill::Merged => return,
            Fill::Partial => 1.0,
            Fill::Empty => {
                buffer[base + segment.offset..base + segment.offset + segment.len].fill(0.0);
                0.0
            }
        };
        let data = segment.offset..segment.offset + segment.len;
        if let Some(recorder) = &self.recorder
            && used > 0.0
            && bucket != self.plan.tail()
        {
            // Just written, so it is still in the cache.
            let gradient = base + data.start..base + data.end;
            recorder.gradient(segment.index, &buffer[gradient]);
        }
        buffer[base + layout.flags + position] = used;
        if has_flags_in_tail && bucket != self.plan.tail() {
            let first = leaf.extras.len() - self.plan.places.len();
            leaf.extras[first + segment.index] = used;
        }
        merge(buffer, layout.stride, height, merges, data);
        let flag = layout.flags + position..layout.flags + position + 1;
        merge(buffer, layout.stride, height, merges, flag);
        live.fill[position] = Fill::Merged;
        live.open -= 1;
        if live.open == 0 && bucket != self.plan.tail() {
            self.seal(bucket);
        }
    }

    /// Writes a bucket's weight and extras for this shard; after the last shard the bucket may be launched.
    fn seal(&mut self, bucket: usize) {
        let (height, merges) = self.level(bucket);
        let is_compressed = self.is_compressed(bucket);
        let Some(leaf) = &self.leaf else { return };
        let layout = &self.plan.buckets[bucket];
        let live = &mut self.live[bucket];
        let Some(buffer) = live.memory.as_mut().map(|memory| &mut memory.blocks) else {
            return;
        };
        let base = height * layout.stride;
        buffer[base + layout.weight] = leaf.weight;
        for (offset, value) in layout.extras.clone().zip(&leaf.extras) {
            buffer[base + offset] = *value;
        }
        let tail = layout.weight..layout.extras.end;
        merge(buffer, layout.stride, height, merges, tail);
        if let Some(compressor) = self.compressor.as_mut().filter(|_| is_compressed) {
            let (values, flags) = buffer.split_at(layout.flags);
            let added = compressor.add(ShardLeaf {
                bucket,
                shard: leaf.shard,
                values,
                used: &flags[..layout.segments.len()],
                weight: leaf.weight,
            });
            if let Err(error) = added {
                self.failed = self.failed.take().or(Some(error.into()));
            }
        }
        live.sealed = true;
        if leaf.last {
            live.ready = Some(Instant::now());
            self.launch_ready();
        }
    }

    fn end_shard(&mut self, buffers: &[Vec<f32>]) {
        let tail = self.plan.tail();
        (0..tail).for_each(|bucket| self.complete_all(bucket));
        self.put_buffers(tail, buffers);
        self.seal(tail);
        if let Some(leaf) = self.leaf.take() {
            self.height = self.height + 1 - leaf.merges;
        }
    }

    fn put_buffers(&mut self, tail: usize, buffers: &[Vec<f32>]) {
        self.hold_open(tail);
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
        self.complete_all(tail);
    }

    fn complete_all(&mut self, bucket: usize) {
        for position in 0..self.plan.buckets[bucket].segments.len() {
            self.complete(bucket, position);
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
