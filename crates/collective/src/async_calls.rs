//! The asynchronous operations: buffers that are worked on in place while the caller computes.

use std::sync::Arc;

use crate::buffer::Buffer;
use crate::call::Call;
use crate::calls::Ask;
use crate::element::{Element, ReduceOp};
use crate::error::{Error, OpKind};
use crate::group::ProcessGroup;
use crate::memory::Operand;
use crate::plan::{Counts, Pattern};
use crate::ticket::{Done, Ticket};
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
    /// *Blocks*: only while 1024 operations are queued. *Errors*: the ticket's.
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
        match self.ask(&buffer, call) {
            Ok(ask) => self.submit(buffer, ask, [0, 0]),
            Err(error) => failed(error),
        }
    }

    /// As [`all_reduce_async`](Self::all_reduce_async), but returns with the result, and without a change of thread when
    /// no operation is in front of it.
    pub fn all_reduce_buffer<T: Element>(
        &self,
        buffer: Buffer<T>,
        call: AllReduce,
    ) -> Result<Done<T>, Error> {
        let ask = self.ask(&buffer, call)?;
        self.run_buffer(buffer, ask, [0, 0])
    }

    /// Replaces the root's buffer by the reduction of all ranks' buffers. The contents elsewhere are unspecified afterwards.
    pub fn reduce_async<T: Element>(
        &self,
        buffer: Buffer<T>,
        op: ReduceOp,
        root: usize,
    ) -> Ticket<T> {
        let len = buffer.len();
        let ask = Ask::new(OpKind::Reduce, Pattern::Reduce { len, root }).reducing(op);
        self.submit_rooted(buffer, ask, root, [0, 0])
    }

    /// Replaces the whole buffer by the root's.
    pub fn broadcast_async<T: Element>(&self, buffer: Buffer<T>, root: usize) -> Ticket<T> {
        let len = buffer.len();
        let ask = Ask::new(OpKind::Broadcast, Pattern::Broadcast { len, root });
        self.submit_rooted(buffer, ask, root, [0, 0])
    }

    /// Fills the buffer with all ranks' slices: rank `r` brings the `r`-th of `world` equal ones, in place.
    pub fn all_gather_async<T: Element>(&self, buffer: Buffer<T>) -> Ticket<T> {
        let kind = OpKind::AllGather;
        let Some(each) = self.slice(&buffer) else {
            return self.uneven(kind, buffer.len());
        };
        let counts = Counts::Same(each);
        let ask = Ask::new(kind, Pattern::AllGather { counts });
        self.submit(buffer, ask, [self.rank() * each, 0])
    }

    /// Reduces all ranks' buffers; rank `r` gets the result in the `r`-th of `world` equal slices, in place. The rest of
    /// the buffer is left as it was.
    pub fn reduce_scatter_async<T: Element>(&self, buffer: Buffer<T>, op: ReduceOp) -> Ticket<T> {
        let kind = OpKind::ReduceScatter;
        let Some(each) = self.slice(&buffer) else {
            return self.uneven(kind, buffer.len());
        };
        let counts = Counts::Same(each);
        let ask = Ask::new(kind, Pattern::ReduceScatter { counts }).reducing(op);
        self.submit(buffer, ask, [0, self.rank() * each])
    }

    /// Fills the root's buffer with all ranks' slices. The root's has one slice for each rank and its own in place; the
    /// others' is their slice.
    pub fn gather_async<T: Element>(&self, buffer: Buffer<T>, root: usize) -> Ticket<T> {
        let kind = OpKind::Gather;
        let Some((each, own)) = self.rooted_slice(&buffer, root) else {
            return self.uneven(kind, buffer.len());
        };
        let counts = Counts::Same(each);
        let ask = Ask::new(kind, Pattern::Gather { counts, root });
        self.submit_rooted(buffer, ask, root, [own, 0])
    }

    /// Gives each rank its slice of the root's buffer, which has one for each rank; the others' buffer is their slice.
    pub fn scatter_async<T: Element>(&self, buffer: Buffer<T>, root: usize) -> Ticket<T> {
        let kind = OpKind::Scatter;
        let Some((each, own)) = self.rooted_slice(&buffer, root) else {
            return self.uneven(kind, buffer.len());
        };
        let counts = Counts::Same(each);
        let ask = Ask::new(kind, Pattern::Scatter { counts, root });
        self.submit_rooted(buffer, ask, root, [0, own])
    }

    /// Gives each rank its slice of every rank's buffer. The first half of the buffer is what this rank sends, `world` equal
    /// slices, the second what it receives.
    pub fn all_to_all_async<T: Element>(&self, buffer: Buffer<T>) -> Ticket<T> {
        let (kind, half) = (OpKind::AllToAll, buffer.len() / 2);
        if !buffer.len().is_multiple_of(2 * self.world()) {
            return self.uneven(kind, buffer.len());
        }
        let counts = Counts::Same(half / self.world());
        self.submit(
            buffer,
            Ask::new(kind, Pattern::AllToAll { counts }),
            [0, half],
        )
    }

    fn ask<T: Element>(&self, buffer: &Buffer<T>, call: AllReduce) -> Result<Ask, Error> {
        let kind = OpKind::AllReduce;
        let tree = call.tree.as_ref().unwrap_or(&self.member().tree);
        if tree.world() != self.world() {
            let reason = format!(
                "the tree is for {} ranks, the world has {}",
                tree.world(),
                self.world()
            );
            return Err(self.refuse(kind, reason));
        }
        let blocks = tree.blocks(self.rank()).len();
        let needed = call.len.checked_mul(blocks);
        if needed.is_none_or(|needed| needed > buffer.len()) {
            let reason = format!(
                "the buffer has {} elements, expected {blocks} blocks of {}",
                buffer.len(),
                call.len
            );
            return Err(self.refuse(kind, reason));
        }
        Ok(Ask {
            mark: call.step as u32,
            bucket: call.bucket,
            tree: call.tree,
            ..Ask::new(kind, Pattern::AllReduce { len: call.len }).reducing(call.op)
        })
    }

    fn slice<T: Element>(&self, buffer: &Buffer<T>) -> Option<usize> {
        buffer
            .len()
            .is_multiple_of(self.world())
            .then(|| buffer.len() / self.world())
    }

    /// Elements of a slice, and where this rank's own begins in its buffer.
    fn rooted_slice<T: Element>(&self, buffer: &Buffer<T>, root: usize) -> Option<(usize, usize)> {
        if self.rank() != root {
            return Some((buffer.len(), 0));
        }
        self.slice(buffer).map(|each| (each, each * root))
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

    pub(crate) fn submit_rooted<T: Element>(
        &self,
        buffer: Buffer<T>,
        ask: Ask,
        root: usize,
        starts: [usize; 2],
    ) -> Ticket<T> {
        match self.check_root(ask.kind, root) {
            Ok(()) => self.submit(buffer, ask, starts),
            Err(error) => failed(error),
        }
    }

    /// Runs an operation at once, on this thread when nothing is in front of it.
    pub(crate) fn run_buffer<T: Element>(
        &self,
        buffer: Buffer<T>,
        ask: Ask,
        starts: [usize; 2],
    ) -> Result<Done<T>, Error> {
        let len = buffer.len();
        let (call, operand) = self.prepare(buffer, &ask, starts)?;
        let settled = self.member().executor.run(call, operand);
        Ticket::over(settled, len).wait()
    }

    pub(crate) fn submit<T: Element>(
        &self,
        buffer: Buffer<T>,
        ask: Ask,
        starts: [usize; 2],
    ) -> Ticket<T> {
        let len = buffer.len();
        let (call, operand) = match self.prepare(buffer, &ask, starts) {
            Ok(prepared) => prepared,
            Err(error) => return failed(error),
        };
        let executor = &self.member().executor;
        match self.world() {
            // Without peers there is nothing to wait for, and no communication thread.
            1 => Ticket::over(executor.run(call, operand), len),
            _ => Ticket::on_its_way(executor, executor.submit(call, operand), len),
        }
    }

    /// `starts`: the elements at which `In` and `Out` begin.
    fn prepare<T: Element>(
        &self,
        mut buffer: Buffer<T>,
        ask: &Ask,
        starts: [usize; 2],
    ) -> Result<(Call, Operand), Error> {
        if !self.member().allocator.owns(buffer.region()) {
            return Err(self.refuse(ask.kind, "the buffer belongs to another group".into()));
        }
        let call = self.call::<T>(ask, true)?;
        if let Some(ReduceOp::PreMulSum(factor)) = ask.reduce {
            buffer.premultiply(factor);
        }
        let [input, output] = starts.map(|at| at * size_of::<T>());
        Ok((call, Operand::region(buffer.into_region(), input, output)))
    }
}

pub(crate) fn failed<T: Element>(error: Error) -> Ticket<T> {
    Ticket::over(Err(error), 0)
}
