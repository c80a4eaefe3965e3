//! The buckets of one step: gradients in, partial sums along the shard tree, launches in order.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use burn::tensor::TensorData;
use paceline_collective::{AllReduce, Buffer, ProcessGroup, ReduceOp, Ticket, Tree};

use crate::buffer::floats;
use crate::error::DdpError;
use crate::hook::GradientSink;
use crate::plan::{Bucket, BucketPlan};
use crate::timeline::BucketTiming;

/// What one bucket brought back: plain sums over all shards, still to be divided by `weight`.
pub(crate) struct Arrived<'a> {
    pub(crate) bucket: &'a Bucket,
    /// The first block of the bucket, reduced.
    pub(crate) values: &'a [f32],
}

impl Arrived<'_> {
    /// Sum of the shards' weights.
    pub(crate) fn weight(&self) -> f32 {
        self.values[self.bucket.weight]
    }

    /// Whether any shard on any rank used the segment at `position`.
    pub(crate) fn used(&self, position: usize) -> bool {
        self.values[self.bucket.flags + position] > 0.0
    }

    /// The segment at `position`, divided by the weight.
    pub(crate) fn mean(&self, position: usize) -> Vec<f32> {
        let segment = &self.bucket.segments[position];
        let weight = self.weight();
        self.values[segment.offset..segment.offset + segment.len]
            .iter()
            .map(|sum| sum / weight)
            .collect()
    }
}

/// Collects gradients shard by shard and reduces each bucket as soon as it is complete.
///
/// A rank computes its shards from left to right. Their gradients merge like a binary counter: each
/// bucket's memory is a small stack of blocks, and after every shard the two topmost blocks are added as long as
/// they are siblings in the shard tree. What is left when the last shard is done is exactly what the
/// collective needs to go on with the same tree across ranks.
pub(crate) struct Reducer {
    state: Mutex<State>,
}

struct State {
    plan: Arc<BucketPlan>,
    tree: Arc<Tree>,
    group: ProcessGroup,
    live: Vec<Live>,
    leaf: Option<Leaf>,
    /// Blocks on every bucket's stack below the current shard.
    height: usize,
    /// Next bucket to launch; launches are strictly in order.
    next: usize,
    step: u64,
    error: Option<DdpError>,
}

struct Live {
    buffer: Option<Buffer<f32>>,
    ticket: Option<Ticket<f32>>,
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
    announced: usize,
    done: usize,
    /// Factor of the running backward pass.
    factor: f32,
    weight: f32,
    extras: Vec<f32>,
}

impl Reducer {
    pub(crate) fn new(
        group: ProcessGroup,
        plan: Arc<BucketPlan>,
        tree: Arc<Tree>,
    ) -> Result<Self, DdpError> {
        let depth = tree.stack_depth(group.rank());
        let mut live = Vec::with_capacity(plan.buckets.len());
        for bucket in &plan.buckets {
            live.push(Live {
                buffer: Some(group.buffer::<f32>(bucket.stride * depth)?),
                ticket: None,
                fill: vec![Fill::Empty; bucket.segments.len()],
                open: 0,
                sealed: false,
                ready: None,
            });
        }
        Ok(Self {
            state: Mutex::new(State {
                plan,
                tree,
                group,
                live,
                leaf: None,
                height: 0,
                next: 0,
                step: 0,
                error: None,
            }),
        })
    }

    /// Starts a step with empty buckets.
    pub(crate) fn begin_step(&self, step: u64) {
        let mut state = self.lock();
        state.height = 0;
        state.next = 0;
        state.step = step;
        state.leaf = None;
        state.error = None;
    }

    /// Starts shard `shard` with `announced` micro-batches.
    pub(crate) fn begin_shard(&self, shard: usize, announced: usize) {
        self.lock().begin_shard(shard, announced);
    }

    /// Changes the number of micro-batches of the current shard, before the first one.
    pub(crate) fn announce(&self, announced: usize) {
        if let Some(leaf) = &mut self.lock().leaf {
            leaf.announced = announced;
        }
    }

    /// Announces a backward pass over a micro-batch of the given weight.
    pub(crate) fn begin_micro(&self, weight: f32) {
        let mut state = self.lock();
        let alone = state.tree.leaves() == 1;
        if let Some(leaf) = &mut state.leaf {
            // With one shard and one micro-batch the gradient is the result: passing it on untouched
            // gives the bits that a program without data parallelism gets.
            leaf.factor = if alone && leaf.announced == 1 {
                1.0
            } else {
                weight
            };
            leaf.weight += leaf.factor;
            leaf.extras[0] += weight;
        }
    }

    /// Ends a backward pass; returns how many this shard has had and how many were announced.
    pub(crate) fn end_micro(&self) -> (usize, usize) {
        match &mut self.lock().leaf {
            Some(leaf) => {
                leaf.done += 1;
                (leaf.done, leaf.announced)
            }
            None => (0, 0),
        }
    }

    /// Adds to one of the sums that travel with the step.
    pub(crate) fn add_extra(&self, slot: usize, value: f32) {
        if let Some(leaf) = &mut self.lock().leaf {
            leaf.extras[slot] += value;
        }
    }

    /// Micro-batches done and announced in the current shard.
    pub(crate) fn micro_batches(&self) -> (usize, usize) {
        self.lock()
            .leaf
            .as_ref()
            .map_or((0, 0), |leaf| (leaf.done, leaf.announced))
    }

    /// Ends the current shard; `buffers` are the running statistics it left, in plan order.
    pub(crate) fn end_shard(&self, buffers: &[Vec<f32>]) {
        self.lock().end_shard(buffers);
    }

    /// How many buckets have left in this step.
    pub(crate) fn launched(&self) -> usize {
        self.lock().next
    }

    /// Waits for every bucket in launch order, gives each to `arrived`, and takes the memory back.
    pub(crate) fn finish(
        &self,
        mut arrived: impl FnMut(usize, Arrived<'_>),
    ) -> Result<Vec<BucketTiming>, DdpError> {
        let (plan, count) = {
            let state = self.lock();
            if let Some(error) = &state.error {
                return Err(error.clone());
            }
            (state.plan.clone(), state.live.len())
        };
        let mut timings = Vec::with_capacity(count);
        for (index, bucket) in plan.buckets.iter().enumerate() {
            let (ticket, ready) = {
                let mut state = self.lock();
                let live = &mut state.live[index];
                (live.ticket.take(), live.ready.take())
            };
            let ticket = ticket.expect("every bucket is launched when the last shard ends");
            let wait_start = Instant::now();
            let done = ticket.wait()?;
            let wait_end = Instant::now();
            timings.push(BucketTiming {
                bucket: index,
                bytes: bucket.stride * size_of::<f32>(),
                ready: ready.unwrap_or(done.timing.submitted),
                started: done.timing.started,
                peers_ready: done.timing.peers_ready,
                finished: done.timing.finished,
                waited: (wait_start, wait_end),
            });
            arrived(
                index,
                Arrived {
                    bucket,
                    values: &done.buffer[..bucket.stride],
                },
            );
            self.lock().live[index].buffer = Some(done.buffer);
        }
        Ok(timings)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while holding the lock is our own bug; the state it left is not used again.
        self.state
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl GradientSink for Reducer {
    fn gradient(&self, index: usize, gradient: TensorData) {
        self.lock().gradient(index, &gradient);
    }
}

impl State {
    fn begin_shard(&mut self, shard: usize, announced: usize) {
        let rank = self.group.rank();
        let extras = self.plan.buckets[self.plan.tail()].extras.len();
        self.leaf = Some(Leaf {
            merges: self.tree.merges_after(rank, shard),
            last: shard + 1 == self.tree.range(rank).end,
            announced,
            done: 0,
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

    /// A gradient that comes outside a step (a hooked model used on its own) has nowhere to go.
    fn gradient(&mut self, index: usize, gradient: &TensorData) {
        let Some(leaf) = &self.leaf else { return };
        let (bucket, position) = self.plan.places[index];
        let layout = &self.plan.buckets[bucket];
        let segment = &layout.segments[position];
        let live = &mut self.live[bucket];
        let Some(buffer) = live.buffer.as_mut() else {
            return;
        };
        let at = self.height * layout.stride + segment.offset;
        let slot = &mut buffer[at..at + segment.len];
        let values = &floats(gradient);
        match live.fill[position] {
            Fill::Empty => store(slot, values, leaf.factor),
            Fill::Partial => accumulate(slot, values, leaf.factor),
            Fill::Merged => return,
        }
        live.fill[position] = Fill::Partial;
        if leaf.done + 1 == leaf.announced {
            self.complete(bucket, position);
        }
    }

    /// Marks a segment complete for this shard, merges it, and launches what became ready.
    fn complete(&mut self, bucket: usize, position: usize) {
        let Some(leaf) = &self.leaf else { return };
        let layout = &self.plan.buckets[bucket];
        let live = &mut self.live[bucket];
        let Some(buffer) = live.buffer.as_mut() else {
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

    /// Writes a bucket's weight and extras for this shard; after the last shard it may leave.
    fn seal(&mut self, bucket: usize) {
        let Some(leaf) = &self.leaf else { return };
        let layout = &self.plan.buckets[bucket];
        let live = &mut self.live[bucket];
        let Some(buffer) = live.buffer.as_mut() else {
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
            let Some(buffer) = live.buffer.take() else {
                return;
            };
            let call = AllReduce {
                op: ReduceOp::Sum,
                tree: Some(self.tree.clone()),
                len: self.plan.buckets[self.next].stride,
                bucket: Some(self.next as u32),
                step: self.step,
            };
            live.ticket = Some(self.group.all_reduce_async(buffer, call));
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
        if let Some(buffer) = live.buffer.as_mut() {
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
fn merge(
    buffer: &mut [f32],
    stride: usize,
    top: usize,
    merges: usize,
    range: std::ops::Range<usize>,
) {
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
