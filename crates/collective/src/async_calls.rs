//! The asynchronous operations: buffers that are worked on in place while the caller computes.

use std::sync::Arc;

use crate::buffer::Buffer;
use crate::call::{Call, Header};
use crate::element::{Element, ReduceOp};
use crate::error::{Error, OpKind, Operation};
use crate::group::ProcessGroup;
use crate::old_plan::Plan;
use crate::ticket::{Outcome, Ticket};
use crate::tree::Tree;

/// What to reduce, and in which order.
#[derive(Debug, Clone)]
pub struct AllReduce {
    /// How numbers are combined; [`ReduceOp::Average`] divides by the number of leaves.
    pub op: ReduceOp,
    /// The order, and how many blocks each rank brings; none means one leaf for each rank.
    pub tree: Option<Arc<Tree>>,
    /// Elements of one block.
    pub len: usize,
    /// The gradient bucket, for reports.
    pub bucket: Option<u32>,
    /// The training step that the call belongs to, 0 outside training. Compared between the ranks like everything
    /// else (its low 32 bits), so that a rank that left out a step is noticed at the next one.
    pub step: u64,
}

impl ProcessGroup {
    /// Reduces all ranks' blocks over a tree; the result replaces the first `call.len` elements on every rank.
    ///
    /// *Shape*: `tree.blocks(rank).len()` blocks of `call.len` elements one after another; the buffer may be longer.
    ///
    /// *Numerics*: every element is combined in the order of the tree, so the result has the same bytes for any number of
    /// ranks and on any transport.
    ///
    /// *Blocks* only while 1024 operations are queued. *Errors*: the ticket's.
    ///
    /// # Example
    ///
    /// ```
    /// use paceline_collective::{AllReduce, GroupOptions, ProcessGroup, ReduceOp};
    ///
    /// let group = ProcessGroup::local(1, &GroupOptions::default())?.remove(0);
    /// let mut buffer = group.buffer::<f32>(3)?;
    /// buffer.copy_from_slice(&[1.0, 2.0, 3.0]);
    /// let ticket = group.all_reduce_async(buffer, AllReduce { op: ReduceOp::Sum, tree: None, len: 3, bucket: None, step: 0 });
    /// // ... compute meanwhile ...
    /// assert_eq!(ticket.wait()?.buffer[..], [1.0, 2.0, 3.0]);
    /// # Ok::<(), paceline_collective::Error>(())
    /// ```
    pub fn all_reduce_async<T: Element>(&self, buffer: Buffer<T>, call: AllReduce) -> Ticket<T> {
        let tree = call.tree.unwrap_or_else(|| self.member().tree.clone());
        let kind = OpKind::AllReduce;
        if tree.world() != self.world() {
            let reason = format!(
                "the tree is for {} ranks, the world has {}",
                tree.world(),
                self.world()
            );
            return self.refused(kind, reason);
        }
        let blocks = tree.blocks(self.rank()).len();
        if call
            .len
            .checked_mul(blocks)
            .is_none_or(|len| len > buffer.len())
        {
            let reason = format!(
                "the buffer has {} elements, expected {blocks} blocks of {}",
                buffer.len(),
                call.len
            );
            return self.refused(kind, reason);
        }
        let plan = Plan::all_reduce(call.len, self.world(), size_of::<T>());
        let shape = Shape {
            kind,
            reduce: Some(call.op),
            total: call.len,
            mark: call.step as u32,
            bucket: call.bucket,
        };
        self.submit(buffer, &shape, plan, tree)
    }

    /// Replaces the whole buffer by the root's.
    pub fn broadcast_async<T: Element>(&self, buffer: Buffer<T>, root: usize) -> Ticket<T> {
        if let Err(error) = self.check_root(OpKind::Broadcast, root) {
            return failed(error);
        }
        let plan = Plan::broadcast(buffer.len(), self.world(), root);
        let shape = Shape {
            kind: OpKind::Broadcast,
            reduce: None,
            total: buffer.len(),
            mark: root as u32,
            bucket: None,
        };
        self.submit(buffer, &shape, plan, self.member().tree.clone())
    }

    /// Fills the buffer with all ranks' slices: rank `r` brings the `r`-th of `world` equal ones, in place.
    pub fn all_gather_async<T: Element>(&self, buffer: Buffer<T>) -> Ticket<T> {
        let kind = OpKind::AllGather;
        let Some(each) = self.slice(&buffer) else {
            return self.uneven(kind, buffer.len());
        };
        let shape = Shape {
            kind,
            reduce: None,
            total: each,
            mark: 0,
            bucket: None,
        };
        self.submit(
            buffer,
            &shape,
            Plan::all_gather(each, self.world()),
            self.member().tree.clone(),
        )
    }

    /// Reduces all ranks' buffers; rank `r` gets the result in the `r`-th of `world` equal slices, in place. The rest of
    /// the buffer is left as it was.
    pub fn reduce_scatter_async<T: Element>(&self, buffer: Buffer<T>, op: ReduceOp) -> Ticket<T> {
        let kind = OpKind::ReduceScatter;
        let Some(each) = self.slice(&buffer) else {
            return self.uneven(kind, buffer.len());
        };
        let shape = Shape {
            kind,
            reduce: Some(op),
            total: each,
            mark: 0,
            bucket: None,
        };
        self.submit(
            buffer,
            &shape,
            Plan::reduce_scatter(each, self.world()),
            self.member().tree.clone(),
        )
    }

    fn slice<T: Element>(&self, buffer: &Buffer<T>) -> Option<usize> {
        buffer
            .len()
            .is_multiple_of(self.world())
            .then(|| buffer.len() / self.world())
    }

    fn uneven<T: Element>(&self, kind: OpKind, len: usize) -> Ticket<T> {
        self.refused(
            kind,
            format!(
                "the buffer has {len} elements, which is no multiple of {}",
                self.world()
            ),
        )
    }

    fn refused<T: Element>(&self, kind: OpKind, reason: String) -> Ticket<T> {
        failed(self.refuse(kind, reason))
    }

    fn submit<T: Element>(
        &self,
        buffer: Buffer<T>,
        shape: &Shape,
        plan: Plan,
        tree: Arc<Tree>,
    ) -> Ticket<T> {
        let member = self.member();
        if let Err(error) = self.check_reduce::<T>(shape.kind, shape.reduce) {
            return failed(error);
        }
        if !member.allocator.owns(buffer.region()) {
            return self.refused(shape.kind, "the buffer belongs to another group".into());
        }
        let header = Header {
            operation: Operation {
                kind: shape.kind,
                seq: 0,
                bucket: shape.bucket,
            },
            reduce: shape.reduce,
            dtype: Some(T::DTYPE),
            total: shape.total,
            first: 0,
            piece: shape.total,
            mark: shape.mark,
            leaves: tree.leaves() as u32,
        };
        let len = buffer.len();
        let call = Call { header, plan, tree };
        let outcome = match self.world() {
            // Without peers there is nothing to wait for, and no communication thread.
            1 => Outcome::of(member.executor.run(call, buffer.into_region())),
            _ => member.executor.submit(call, buffer.into_region()),
        };
        Ticket::new(outcome, len)
    }
}

/// What the header says about a call.
struct Shape {
    kind: OpKind,
    reduce: Option<ReduceOp>,
    total: usize,
    mark: u32,
    bucket: Option<u32>,
}

fn failed<T: Element>(error: Error) -> Ticket<T> {
    Ticket::new(Outcome::of(Err(error)), 0)
}
