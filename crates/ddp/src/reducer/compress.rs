//! Buckets that are compressed on their way: the seam between [`Blocks`](super::blocks) and the lossy communication hooks.
//!
//! A lossy hook compresses the gradients of each shard by themselves and adds the results in an order that depends on the
//! number of shards only. The averages therefore have the same bits on any number of ranks. All hooks but [`TopK`](top_k::TopK) compress
//! each parameter by itself, so the other parameters that a rank has do not matter either: those of a stage of a pipeline, or slices
//! of some that differ between ranks which have others whole.
//!
//! ```text
//!  backward   bucket complete for a shard -> add;  for the rank's last shard -> send
//!  finish     tail: weight and flags, exact -> resend, bucket by bucket -> receive, bucket by bucket
//! ```

use std::sync::Arc;

use paceline_collective::{AllReduce, Error, OpTiming, ProcessGroup, ReduceOp, Ticket, Tree};

use super::{Kept, Setup};
use crate::comm_hook::CommHook;
use crate::plan::BucketPlan;
use crate::stack::Stack;

mod int8;
mod local;
mod power_sgd;
mod residuals;
mod top_k;

/// One shard's gradients of a bucket.
pub(super) struct Leaf<'a> {
    pub(super) bucket: usize,
    pub(super) shard: usize,
    /// Gradients times their weights, laid out as in the bucket, without flags.
    pub(super) values: &'a [f32],
    /// By segment: 0 if the shard did not use it.
    pub(super) used: &'a [f32],
    /// Sum of the shard's weights.
    pub(super) weight: f32,
}

/// The sums of a bucket over all shards, as decompressed.
pub(super) struct Received {
    /// Laid out as in the bucket.
    pub(super) values: Vec<f32>,
    /// Bytes that this rank brought to the bucket's collectives.
    pub(super) bytes: usize,
    /// The first and the last collective; `None` if there was none.
    pub(super) timing: Option<[OpTiming; 2]>,
    /// Set if the sums are over this rank's shards only.
    pub(super) own: Option<Own>,
}

/// What the tail says of all ranks, of this one.
pub(super) struct Own {
    pub(super) weight: f32,
    /// By segment.
    pub(super) used: Vec<bool>,
}

/// A lossy hook. Its calls are the same on every rank, in the same order.
pub(super) trait Compressor: Send {
    /// Starts a step. The last one may not have ended.
    fn begin(&mut self, step: u64);

    /// Takes the gradients of the rank's shards, from left to right.
    fn add(&mut self, leaf: Leaf<'_>) -> Result<(), Error>;

    /// Sends what [`add`](Self::add) has collected of a bucket.
    fn send(&mut self, bucket: usize) -> Result<(), Error>;

    /// Waits for it and starts the second exchange, if the hook has one.
    fn resend(&mut self, bucket: usize) -> Result<(), Error>;

    /// Waits for the bucket.
    fn receive(&mut self, bucket: usize) -> Result<Received, Error>;

    /// Takes over what it keeps for the next step: this one has succeeded.
    fn commit(&mut self) {}

    /// What it keeps of a parameter from step to step; `None` if nothing, or if another rank keeps it.
    fn kept(&mut self, kept: Kept, index: usize) -> Option<&mut [f32]> {
        let _ = (kept, index);
        None
    }
}

/// What all hooks need.
#[derive(Clone)]
struct Context {
    group: ProcessGroup,
    tree: Arc<Tree>,
    plan: Arc<BucketPlan>,
    step: u64,
}

/// The compressor of a hook, or `None` if its buckets are reduced whole.
pub(super) fn compressor(setup: &Setup) -> Option<Box<dyn Compressor>> {
    let context = Context {
        group: setup.group.clone(),
        tree: setup.tree.clone(),
        plan: setup.plan.clone(),
        step: 0,
    };
    match setup.hook {
        CommHook::None | CommHook::Bf16Compress | CommHook::Fp16Compress => None,
        CommHook::Int8 => Some(Box::new(int8::Int8::new(context))),
        CommHook::TopK { fraction } => Some(Box::new(top_k::TopK::new(context, fraction))),
        CommHook::LocalSgd(options) => {
            Some(Box::new(local::Local::new(context, options.start_iter)))
        }
        CommHook::PowerSgd(options) => {
            let shapes = &setup.shapes;
            Some(Box::new(power_sgd::PowerSgd::new(context, options, shapes)))
        }
    }
}

impl Context {
    /// Gradient buckets.
    fn buckets(&self) -> usize {
        self.plan.tail()
    }

    /// Elements of a bucket's gradients, with the padding between them.
    fn len(&self, bucket: usize) -> usize {
        self.plan.buckets[bucket].flags
    }

    /// Shards of a rank.
    fn shards(&self, rank: usize) -> usize {
        self.tree.range(rank).len()
    }

    /// The turn of one of this rank's shards.
    fn turn(&self, shard: usize) -> usize {
        shard - self.tree.range(self.group.rank()).start
    }

    /// Sums messages over all shards along the tree. `stack` has this rank's blocks.
    fn all_reduce(
        &self,
        bucket: usize,
        stack: Stack<f32>,
        len: usize,
    ) -> Result<Ticket<f32>, Error> {
        let buffer = stack.buffer(&self.group, len)?;
        let call = AllReduce {
            op: ReduceOp::Sum,
            tree: Some(self.tree.clone()),
            len,
            bucket: Some(bucket as u32),
            step: self.step,
        };
        Ok(self.group.all_reduce_async(buffer, call))
    }
}
