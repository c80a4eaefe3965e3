//! The asynchronous operations: buffers that are worked on in place while the caller computes.

use std::sync::Arc;

use crate::buffer::Buffer;
use crate::call::Call;
use crate::calls::Ask;
use crate::element::{Element, ReduceOp};
use crate::error::{Error, OpKind};
use crate::group::ProcessGroup;
use crate::memory::Operand;
use crate::plan::{Counts, Kind};
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

impl AllReduce {
    /// Of `len` elements of each rank, outside of training.
    pub fn new(op: ReduceOp, len: usize) -> Self {
        Self {
            op,
            tree: None,
            len,
            bucket: None,
            step: 0,
        }
    }
}

/// What to reduce, in which order, and which elements each rank gets.
#[derive(Debug, Clone)]
pub struct ReduceScatter {
    /// As in [`AllReduce`].
    pub op: ReduceOp,
    /// As in [`AllReduce`].
    pub tree: Option<Arc<Tree>>,
    /// Elements of a block that each rank gets, in rank order; 0 is allowed. Without counts the buffer has nothing but
    /// blocks, which are dealt in equal slices.
    pub counts: Option<Arc<[usize]>>,
    /// As in [`AllReduce`].
    pub bucket: Option<u32>,
    /// As in [`AllReduce`].
    pub step: u64,
}

/// Which elements each rank brings to an all-gather.
#[derive(Debug, Clone, Default)]
pub struct AllGather {
    /// Elements of each rank, in rank order; 0 is allowed. Without counts the ranks have equal slices of the whole buffer.
    pub counts: Option<Arc<[usize]>>,
    /// The bucket of parameters, for reports.
    pub bucket: Option<u32>,
    /// As in [`AllReduce`].
    pub step: u64,
}

/// A call, and the elements of the buffer at which `In` and `Out` begin.
type Asked = (Ask, [usize; 2]);

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
    /// let ticket = group.all_reduce_async(buffer, AllReduce::new(ReduceOp::Sum, 3));
    /// // ... compute meanwhile ...
    /// assert_eq!(ticket.wait()?.buffer[..], [1.0, 2.0, 3.0]);
    /// # Ok::<(), paceline_collective::Error>(())
    /// ```
    pub fn all_reduce_async<T: Element>(&self, buffer: Buffer<T>, call: AllReduce) -> Ticket<T> {
        let asked = self.ask(&buffer, call);
        self.submit(buffer, asked)
    }

    /// As [`all_reduce_async`](Self::all_reduce_async), but returns with the result, and without a change of thread when
    /// no operation is in front of it.
    pub fn all_reduce_buffer<T: Element>(
        &self,
        buffer: Buffer<T>,
        call: AllReduce,
    ) -> Result<Done<T>, Error> {
        let asked = self.ask(&buffer, call)?;
        let len = buffer.len();
        let (call, operand) = self.prepare(buffer, &asked)?;
        Done::of(self.member().executor.run(call, operand), len)
    }

    /// Replaces the root's buffer by the reduction of all ranks' buffers. The contents elsewhere are unspecified afterwards.
    pub fn reduce_async<T: Element>(
        &self,
        buffer: Buffer<T>,
        op: ReduceOp,
        root: usize,
    ) -> Ticket<T> {
        let len = buffer.len();
        let ask = Ask::rooted(Kind::Reduce, len, root).reducing(op);
        let checked = self.check_root(ask.kind, root);
        self.submit(buffer, checked.map(|()| (ask, [0, 0])))
    }

    /// Replaces the whole buffer by the root's.
    pub fn broadcast_async<T: Element>(&self, buffer: Buffer<T>, root: usize) -> Ticket<T> {
        let len = buffer.len();
        let ask = Ask::rooted(Kind::Broadcast, len, root);
        let checked = self.check_root(ask.kind, root);
        self.submit(buffer, checked.map(|()| (ask, [0, 0])))
    }

    /// Fills the first elements of the buffer with all ranks' slices, in rank order; each rank brings its own in place.
    ///
    /// *Shape*: `call.counts` are the same on all ranks; the buffer may be longer than their sum.
    ///
    /// *Blocks*, *Errors*: as [`all_reduce_async`](Self::all_reduce_async).
    pub fn all_gather_async<T: Element>(&self, buffer: Buffer<T>, call: AllGather) -> Ticket<T> {
        let kind = OpKind::AllGather;
        let dealt = self.dealt(kind, &buffer, 1, call.counts);
        let asked = dealt.map(|(counts, own)| {
            let ask = Ask::new(Kind::AllGather, counts);
            (ask.of_bucket(call.bucket, call.step), [own, 0])
        });
        self.submit(buffer, asked)
    }

    /// Reduces all ranks' blocks over a tree, and gives each rank its slice of the result: in its own first block, in
    /// place. The rest of the buffer stays as it was.
    ///
    /// *Shape*: `tree.blocks(rank).len()` blocks one after another, each as long as the sum of `call.counts`, which are the
    /// same on all ranks; the buffer may be longer.
    ///
    /// *Numerics*: every slice has the bytes that [`all_reduce_async`](Self::all_reduce_async) over the same tree gives
    /// there.
    ///
    /// *Cost*: half the bytes of that all-reduce; [`all_gather_async`](Self::all_gather_async) with the same counts is the
    /// other half. *Blocks*, *Errors*: as there.
    ///
    /// # Example
    ///
    /// ```
    /// use paceline_collective::{AllGather, GroupOptions, ProcessGroup, ReduceOp, ReduceScatter, Tree};
    ///
    /// let group = ProcessGroup::local(1, &GroupOptions::default())?.remove(0);
    /// let mut buffer = group.buffer::<f32>(3)?;
    /// buffer.copy_from_slice(&[1.0, 2.0, 3.0]);
    /// let (tree, counts) = (Some(Tree::per_rank(1)), Some([3].into()));
    /// let call = ReduceScatter { op: ReduceOp::Sum, tree, counts, bucket: Some(0), step: 1 };
    /// let mut buffer = group.reduce_scatter_async(buffer, call).wait()?.buffer;
    /// buffer[..3].iter_mut().for_each(|mine| *mine *= 0.5);
    /// let call = AllGather { counts: Some([3].into()), bucket: Some(0), step: 1 };
    /// assert_eq!(group.all_gather_async(buffer, call).wait()?.buffer[..], [0.5, 1.0, 1.5]);
    /// # Ok::<(), paceline_collective::Error>(())
    /// ```
    pub fn reduce_scatter_async<T: Element>(
        &self,
        buffer: Buffer<T>,
        call: ReduceScatter,
    ) -> Ticket<T> {
        let kind = OpKind::ReduceScatter;
        let dealt = self
            .blocks(kind, call.tree.as_ref())
            .and_then(|blocks| self.dealt(kind, &buffer, blocks, call.counts));
        let asked = dealt.map(|(counts, own)| {
            let mut ask = Ask::new(Kind::ReduceScatter, counts).reducing(call.op);
            ask.tree = call.tree;
            (ask.of_bucket(call.bucket, call.step), [0, own])
        });
        self.submit(buffer, asked)
    }

    /// Fills the root's buffer with all ranks' slices. The root's has one slice for each rank and its own in place; the
    /// others' is their slice.
    pub fn gather_async<T: Element>(&self, buffer: Buffer<T>, root: usize) -> Ticket<T> {
        let slice = self.rooted_slice(OpKind::Gather, &buffer, root);
        let asked = slice.map(|(each, own)| (Ask::rooted(Kind::Gather, each, root), [own, 0]));
        self.submit(buffer, asked)
    }

    /// Gives each rank its slice of the root's buffer, which has one for each rank; the others' buffer is their slice.
    pub fn scatter_async<T: Element>(&self, buffer: Buffer<T>, root: usize) -> Ticket<T> {
        let slice = self.rooted_slice(OpKind::Scatter, &buffer, root);
        let asked = slice.map(|(each, own)| (Ask::rooted(Kind::Scatter, each, root), [0, own]));
        self.submit(buffer, asked)
    }

    /// Gives each rank its slice of every rank's buffer. The first half of the buffer is what this rank sends, `world` equal
    /// slices, the second what it receives.
    pub fn all_to_all_async<T: Element>(&self, buffer: Buffer<T>) -> Ticket<T> {
        let half = buffer.len() / 2;
        let asked = self.even(OpKind::AllToAll, buffer.len(), 2 * self.world());
        let asked = asked.map(|each| (Ask::new(Kind::AllToAll, each), [0, half]));
        self.submit(buffer, asked)
    }

    fn ask<T: Element>(&self, buffer: &Buffer<T>, call: AllReduce) -> Result<Asked, Error> {
        let kind = OpKind::AllReduce;
        let blocks = self.blocks(kind, call.tree.as_ref())?;
        self.check_blocks(kind, buffer.len(), blocks, call.len)?;
        let mut ask = Ask::new(Kind::AllReduce, call.len).reducing(call.op);
        ask.tree = call.tree;
        Ok((ask.of_bucket(call.bucket, call.step), [0, 0]))
    }

    /// The blocks that this rank brings to a reduction over a tree.
    fn blocks(&self, kind: OpKind, tree: Option<&Arc<Tree>>) -> Result<usize, Error> {
        let tree = tree.unwrap_or(&self.member().tree);
        let (ranks, world) = (tree.world(), self.world());
        self.require(kind, ranks == world, || {
            format!("the tree is for {ranks} ranks, but the world has {world}")
        })?;
        Ok(tree.blocks(self.rank()).len())
    }

    fn check_blocks(
        &self,
        kind: OpKind,
        len: usize,
        blocks: usize,
        each: usize,
    ) -> Result<(), Error> {
        let needed = each.checked_mul(blocks);
        self.require(kind, needed.is_some_and(|needed| needed <= len), || {
            format!("the buffer has {len} elements, expected {blocks} blocks of {each}")
        })
    }

    /// How each of a buffer's blocks is dealt to the ranks, and where this rank's slice of the first begins.
    fn dealt<T: Element>(
        &self,
        kind: OpKind,
        buffer: &Buffer<T>,
        blocks: usize,
        counts: Option<Arc<[usize]>>,
    ) -> Result<(Counts, usize), Error> {
        let Some(counts) = counts else {
            let each = self.even(kind, buffer.len(), blocks * self.world())?;
            return Ok((Counts::Same(each), self.rank() * each));
        };
        let sum = self.sum_counts(kind, "buffer", &counts)?;
        self.check_blocks(kind, buffer.len(), blocks, sum)?;
        let own = counts[..self.rank()].iter().sum();
        Ok(((&*counts).into(), own))
    }

    /// Elements of each of `parts` equal parts.
    fn even(&self, kind: OpKind, len: usize, parts: usize) -> Result<usize, Error> {
        self.require(kind, len.is_multiple_of(parts), || {
            format!("the buffer has {len} elements, which is no multiple of {parts}")
        })?;
        Ok(len / parts)
    }

    /// Elements of each slice of a rooted operation, and where this rank's own begins in its buffer.
    fn rooted_slice<T: Element>(
        &self,
        kind: OpKind,
        buffer: &Buffer<T>,
        root: usize,
    ) -> Result<(usize, usize), Error> {
        self.check_root(kind, root)?;
        if self.rank() != root {
            return Ok((buffer.len(), 0));
        }
        let each = self.even(kind, buffer.len(), self.world())?;
        Ok((each, each * root))
    }

    fn submit<T: Element>(&self, buffer: Buffer<T>, asked: Result<Asked, Error>) -> Ticket<T> {
        let len = buffer.len();
        let (call, operand) = match asked.and_then(|asked| self.prepare(buffer, &asked)) {
            Ok(prepared) => prepared,
            Err(error) => return Ticket::over(Err(error), 0),
        };
        let executor = &self.member().executor;
        match self.world() {
            // Without peers there is nothing to wait for, and no communication thread.
            1 => Ticket::over(executor.run(call, operand), len),
            _ => Ticket::on_its_way(executor, executor.submit(call, operand), len),
        }
    }

    fn prepare<T: Element>(
        &self,
        mut buffer: Buffer<T>,
        (ask, starts): &Asked,
    ) -> Result<(Call, Operand), Error> {
        self.check_own(ask.kind, &buffer)?;
        let call = self.call(ask, T::DTYPE, true)?;
        if let Some(ReduceOp::PreMulSum(factor)) = ask.reduce {
            buffer.premultiply(factor);
        }
        let [input, output] = starts.map(|at| at * size_of::<T>());
        Ok((call, Operand::region(buffer.into_region(), input, output)))
    }
}
