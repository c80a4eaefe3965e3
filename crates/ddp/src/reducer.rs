//! The gradients of one step on their way: from the hooks into buckets, across the ranks, and back.
//!
//! Where a gradient lies decides its way:
//!
//! ```text
//! ordinary memory   hook -> bucket in host memory ------------------------> all_reduce
//! any other device  hook -> kept until its bucket is complete
//!                     staging thread: one read-back -> bucket, as above --> all_reduce
//! NVIDIA, NCCL      hook -> bucket on the device -------------------------> NCCL
//! ```
//!
//! The first two differ in who writes into the bucket, and in nothing else: the same gradients give the same bytes.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use burn::tensor::Tensor;
use paceline_collective::{ProcessGroup, Tree};

use crate::buffer;
use crate::error::DdpError;
use crate::hook::GradientSink;
use crate::plan::{BucketPlan, Wire};
use crate::timeline::BucketTiming;

mod blocks;
mod on_device;
mod sent;
mod stage;
#[cfg(test)]
mod tests;

use blocks::{Arrived, Blocks, Event};
#[cfg(any(feature = "cuda", test))]
pub(crate) use on_device::DeviceCall;
use on_device::OnDevice;
pub(crate) use on_device::{DeviceGroup, DeviceTicket, cut};
use sent::Memory;
use stage::Stage;

/// Which way gradients go.
pub(crate) enum Way {
    /// They lie in ordinary memory.
    Host,
    /// They are read back from a device.
    Staged,
    /// They stay on their device.
    #[cfg_attr(
        not(feature = "cuda"),
        allow(dead_code, reason = "made for CUDA only, and in tests")
    )]
    Device(Box<dyn DeviceGroup>),
}

/// Collects gradients shard by shard and reduces each bucket as soon as it is complete.
pub(crate) struct Reducer {
    plan: Arc<BucketPlan>,
    tree: Arc<Tree>,
    /// All buckets, or only the tail where gradients stay on their device.
    blocks: Arc<Mutex<Blocks>>,
    way: Inner,
    wire: Wire,
    turn: Mutex<Turn>,
}

enum Inner {
    Host,
    Staged(Stage),
    Device(OnDevice),
}

/// Where the compute thread is.
#[derive(Clone, Copy, Default)]
struct Turn {
    announced: usize,
    done: usize,
}

/// Averages over all shards, by parameter; none where no rank used it.
pub(crate) enum Means {
    Host(Vec<Option<Vec<f32>>>),
    Device(Vec<Option<Tensor<1>>>),
}

impl Means {
    /// Whether parameter `index` has none.
    pub(crate) fn lacks(&self, index: usize) -> bool {
        match self {
            Self::Host(values) => values[index].is_none(),
            Self::Device(values) => values[index].is_none(),
        }
    }

    pub(crate) fn scale(&mut self, factor: f32) {
        match self {
            Self::Host(values) => {
                for value in values.iter_mut().flatten().flatten() {
                    *value *= factor;
                }
            }
            Self::Device(values) => {
                for slot in values.iter_mut() {
                    *slot = slot.take().map(|mean| mean.mul_scalar(factor));
                }
            }
        }
    }

    /// Takes the averages of all parameters away.
    pub(crate) fn clear(&mut self) {
        match self {
            Self::Host(values) => values.fill(None),
            Self::Device(values) => values.fill(None),
        }
    }
}

/// What a step brought.
pub(crate) struct Finished {
    pub(crate) means: Means,
    /// Averages of the running statistics in plan order; none if no shard had a sample.
    pub(crate) statistics: Option<Vec<Vec<f32>>>,
    /// Sums over all shards.
    pub(crate) extras: Vec<f32>,
    pub(crate) timings: Vec<BucketTiming>,
}

/// What the tail bucket brought.
struct Tail {
    weight: f32,
    statistics: Option<Vec<Vec<f32>>>,
    extras: Vec<f32>,
    timing: BucketTiming,
}

impl Reducer {
    pub(crate) fn new(
        group: ProcessGroup,
        plan: Arc<BucketPlan>,
        tree: Arc<Tree>,
        way: Way,
        wire: Wire,
    ) -> Result<Self, DdpError> {
        let (in_host_memory, first) = match &way {
            Way::Host | Way::Staged => (plan.clone(), 0),
            Way::Device(_) => (Arc::new(plan.tail_alone()), plan.tail()),
        };
        let rank = group.global_rank(group.rank());
        let share = tree.clone();
        let blocks = Blocks::new(group.clone(), (in_host_memory, first), share, wire)?;
        let blocks = Arc::new(Mutex::new(blocks));
        let way = match way {
            Way::Host => Inner::Host,
            Way::Staged => Inner::Staged(Stage::start(rank, plan.clone(), blocks.clone())?),
            Way::Device(device) => {
                let place = (tree.clone(), group.rank());
                Inner::Device(OnDevice::new(device, plan.clone(), place))
            }
        };
        Ok(Self {
            plan,
            tree,
            blocks,
            way,
            wire,
            turn: Mutex::default(),
        })
    }

    /// Whether gradients are in host memory from the start.
    pub(crate) fn is_on_host(&self) -> bool {
        matches!(self.way, Inner::Host)
    }

    /// Starts a step with empty buckets.
    pub(crate) fn begin_step(&self, step: u64) {
        self.say(Event::Step(step));
        if let Inner::Device(device) = &self.way {
            device.begin_step(step);
        }
    }

    /// Starts shard `shard` with `announced` micro-batches.
    pub(crate) fn begin_shard(&self, shard: usize, announced: usize) {
        *lock(&self.turn) = Turn { announced, done: 0 };
        self.say(Event::Shard { shard, announced });
        if let Inner::Device(device) = &self.way {
            device.begin_shard(shard);
        }
    }

    /// Changes the number of micro-batches of the current shard, before the first one.
    pub(crate) fn announce(&self, announced: usize) {
        lock(&self.turn).announced = announced;
        self.say(Event::Announce(announced));
    }

    /// Announces a backward pass over a micro-batch of the given weight.
    pub(crate) fn begin_micro(&self, weight: f32) {
        let turn = *lock(&self.turn);
        // With one shard and one micro-batch the gradient is the result: passing it on untouched
        // gives the bits that a program without data parallelism gets.
        let alone = self.tree.leaves() == 1 && turn.announced == 1;
        let factor = if alone { 1.0 } else { weight };
        match &self.way {
            Inner::Host => {}
            Inner::Staged(stage) => stage.wait_for_room(),
            Inner::Device(device) => device.begin_micro(factor, turn.done + 1 == turn.announced),
        }
        self.say(Event::Micro { weight, factor });
    }

    /// Ends a backward pass.
    pub(crate) fn end_micro(&self) {
        lock(&self.turn).done += 1;
        match &self.way {
            Inner::Host => {}
            Inner::Staged(stage) => stage.flush(),
            Inner::Device(device) => device.end_micro(),
        }
        self.say(Event::MicroEnd);
    }

    /// Adds to one of the sums that travel with the step.
    pub(crate) fn add_extra(&self, slot: usize, value: f32) {
        self.say(Event::Extra { slot, value });
    }

    /// Micro-batches done and announced in the current shard.
    pub(crate) fn micro_batches(&self) -> (usize, usize) {
        let turn = *lock(&self.turn);
        (turn.done, turn.announced)
    }

    /// Ends the current shard; `buffers` are the running statistics it left, in plan order.
    pub(crate) fn end_shard(&self, buffers: Vec<Vec<f32>>) {
        if let Inner::Device(device) = &self.way {
            let first = self.plan.buckets[self.plan.tail()].extras.len();
            let Some(used) = device.end_shard() else {
                // The others must not take this rank for one that goes on.
                return;
            };
            for index in used {
                self.say(Event::Extra {
                    slot: first + index,
                    value: 1.0,
                });
            }
        }
        self.say(Event::ShardEnd(buffers));
    }

    /// How many buckets have left in this step.
    pub(crate) fn launched(&self) -> usize {
        match &self.way {
            Inner::Host => lock(&self.blocks).launched(),
            Inner::Staged(stage) => {
                // One that cannot be waited for is counted as having sent: the group is then given up.
                stage
                    .settle()
                    .map_or(usize::MAX, |()| lock(&self.blocks).launched())
            }
            Inner::Device(device) => device.launched() + lock(&self.blocks).launched(),
        }
    }

    /// Waits until no call of an earlier step is under way, and says how they ended.
    pub(crate) fn synchronize(&self) -> Result<(), DdpError> {
        match &self.way {
            Inner::Host | Inner::Staged(_) => Ok(()),
            Inner::Device(device) => device.synchronize(),
        }
    }

    /// Waits for every bucket in launch order and takes the memory back. Gradients that stay on their device are
    /// not waited for: what is computed with them is.
    pub(crate) fn finish(&self) -> Result<Finished, DdpError> {
        match &self.way {
            Inner::Host => self.finish_on_host(),
            Inner::Staged(stage) => {
                stage.settle()?;
                self.finish_on_host()
            }
            Inner::Device(device) => self.finish_on_device(device),
        }
    }

    fn finish_on_host(&self) -> Result<Finished, DdpError> {
        let last = self.plan.tail();
        // Whole buckets bring their own weight, so that each is divided while the next is still on its way.
        let early = match self.wire {
            Wire::F32 => None,
            Wire::Bf16 => Some(self.finish_tail(last)?),
        };
        let known = early.as_ref().map(|tail| tail.weight);
        let mut means = vec![None; self.plan.places.len()];
        let mut timings = Vec::with_capacity(last + 1);
        for (at, bucket) in self.plan.buckets[..last].iter().enumerate() {
            let (memory, timing) = self.wait(at, bucket.stride)?;
            let arrived = Arrived::new(bucket, &memory, known);
            for (position, segment) in bucket.segments.iter().enumerate() {
                means[segment.index] = arrived.used(position).then(|| arrived.mean(position));
            }
            timings.push(timing);
            lock(&self.blocks).give_back(at, memory);
        }
        let tail = match early {
            Some(tail) => tail,
            None => self.finish_tail(last)?,
        };
        timings.push(tail.timing);
        Ok(Finished {
            means: Means::Host(means),
            statistics: tail.statistics,
            extras: tail.extras,
            timings,
        })
    }

    fn finish_on_device(&self, device: &OnDevice) -> Result<Finished, DdpError> {
        device.health()?;
        let last = self.plan.tail();
        let mut tail = self.finish_tail(0)?;
        let flags = tail.extras.split_off(self.plan.buckets[last].extras.len());
        let mut timings = Vec::with_capacity(last + 1);
        let means = device.finish(&flags, tail.weight, &mut timings)?;
        tail.timing.bucket = last;
        timings.push(tail.timing);
        Ok(Finished {
            means: Means::Device(means),
            statistics: tail.statistics,
            extras: tail.extras,
            timings,
        })
    }

    /// Waits for the tail, which is number `at` of the buckets in host memory.
    fn finish_tail(&self, at: usize) -> Result<Tail, DdpError> {
        let plan = lock(&self.blocks).plan();
        let bucket = &plan.buckets[at];
        let (memory, timing) = self.wait(at, bucket.stride)?;
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

    fn wait(&self, at: usize, stride: usize) -> Result<(Memory, BucketTiming), DdpError> {
        let (sent, ready) = lock(&self.blocks).take(at);
        let sent = sent.expect("every bucket is launched when the last shard ends");
        let bytes = stride * sent.bytes_each();
        let wait_start = Instant::now();
        let (memory, done) = sent.wait(stride)?;
        let timing = BucketTiming {
            bucket: at,
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

    fn say(&self, event: Event) {
        match &self.way {
            Inner::Host | Inner::Device(_) => lock(&self.blocks).apply(event),
            Inner::Staged(stage) => stage.say(event),
        }
    }
}

impl GradientSink for Reducer {
    fn gradient(&self, index: usize, gradient: Tensor<1>) {
        match &self.way {
            Inner::Host => {
                // Burn's own reads panic too where memory cannot be read.
                let data = gradient.into_data();
                lock(&self.blocks).gradient(index, &buffer::floats(&data));
            }
            Inner::Staged(stage) => stage.gradient(index, gradient),
            Inner::Device(device) => device.gradient(index, gradient),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while holding the lock is our own bug; the state it left is not used again.
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}
