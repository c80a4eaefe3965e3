//! The asynchronous operations on slices of different lengths.
//!
//! Every rank gives the lengths of all slices: an exchange of what only some know would make the caller wait. The lengths
//! are compared like everything else about a call.

use crate::async_calls::failed;
use crate::buffer::Buffer;
use crate::calls::Ask;
use crate::element::{Element, ReduceOp};
use crate::error::{Error, OpKind};
use crate::group::ProcessGroup;
use crate::plan::{Counts, Pattern};
use crate::ticket::Ticket;

impl ProcessGroup {
    /// Fills the buffer with all ranks' slices, of different lengths, in rank order. Each rank brings its own in place.
    ///
    /// *Shape*: `counts` are the lengths of all ranks' slices, the same on all ranks; the buffer is as long as their sum.
    ///
    /// *Blocks*: and *Errors*: as [`all_reduce_async`](Self::all_reduce_async).
    ///
    /// # Example
    ///
    /// ```
    /// use paceline_collective::{GroupOptions, ProcessGroup};
    ///
    /// let groups = ProcessGroup::local(2, &GroupOptions::default())?;
    /// std::thread::scope(|scope| {
    ///     for group in groups {
    ///         scope.spawn(move || {
    ///             let mut buffer = group.buffer::<i32>(3).unwrap();
    ///             let own = [0..2, 2..3][group.rank()].clone();
    ///             buffer[own].fill(group.rank() as i32 + 5);
    ///             let ticket = group.all_gather_v_async(buffer, &[2, 1]);
    ///             // ... compute meanwhile ...
    ///             assert_eq!(ticket.wait().unwrap().buffer[..], [5, 5, 6]);
    ///         });
    ///     }
    /// });
    /// # Ok::<(), paceline_collective::Error>(())
    /// ```
    pub fn all_gather_v_async<T: Element>(&self, buffer: Buffer<T>, counts: &[usize]) -> Ticket<T> {
        let kind = OpKind::AllGather;
        if let Err(error) = self.check_counts(kind, "buffer", buffer.len(), counts) {
            return failed(error);
        }
        let own = counts[..self.rank()].iter().sum();
        let counts = Counts::Each(counts.into());
        let ask = Ask::new(kind, Pattern::AllGather { counts });
        self.submit(buffer, ask, [own, 0])
    }

    /// Reduces all ranks' buffers; each rank gets the result in its slice, in place. The rest of the buffer is left as it
    /// was.
    ///
    /// *Shape*: `counts` are the lengths of all ranks' slices, the same on all ranks; the buffer is as long as their sum.
    ///
    /// *Blocks*: and *Errors*: as [`all_reduce_async`](Self::all_reduce_async).
    pub fn reduce_scatter_v_async<T: Element>(
        &self,
        buffer: Buffer<T>,
        counts: &[usize],
        op: ReduceOp,
    ) -> Ticket<T> {
        let kind = OpKind::ReduceScatter;
        if let Err(error) = self.check_counts(kind, "buffer", buffer.len(), counts) {
            return failed(error);
        }
        let own = counts[..self.rank()].iter().sum();
        let counts = Counts::Each(counts.into());
        let ask = Ask::new(kind, Pattern::ReduceScatter { counts }).reducing(op);
        self.submit(buffer, ask, [0, own])
    }

    /// Fills the root's buffer with all ranks' slices, of different lengths, in rank order.
    ///
    /// *Shape*: `counts` are the lengths of all ranks' slices, the same on all ranks (of [`gather_v`](Self::gather_v) only
    /// the root needs them). The root's buffer is as long as their sum, with its own slice in place; the others' is their
    /// slice.
    ///
    /// *Blocks*: and *Errors*: as [`all_reduce_async`](Self::all_reduce_async).
    pub fn gather_v_async<T: Element>(
        &self,
        buffer: Buffer<T>,
        counts: &[usize],
        root: usize,
    ) -> Ticket<T> {
        let kind = OpKind::Gather;
        let own = match self.rooted_counts(kind, &buffer, counts, root) {
            Ok(own) => own,
            Err(error) => return failed(error),
        };
        let counts = Counts::Each(counts.into());
        let ask = Ask::new(kind, Pattern::Gather { counts, root });
        self.submit(buffer, ask, [own, 0])
    }

    /// Gives each rank its slice of the root's buffer, of different lengths.
    ///
    /// *Shape*: `counts` are the lengths of all ranks' slices, the same on all ranks (of [`scatter_v`](Self::scatter_v)
    /// only the root needs them). The root's buffer is as long as their sum and keeps its own slice in place; the others'
    /// is their slice.
    ///
    /// *Blocks*: and *Errors*: as [`all_reduce_async`](Self::all_reduce_async).
    pub fn scatter_v_async<T: Element>(
        &self,
        buffer: Buffer<T>,
        counts: &[usize],
        root: usize,
    ) -> Ticket<T> {
        let kind = OpKind::Scatter;
        let own = match self.rooted_counts(kind, &buffer, counts, root) {
            Ok(own) => own,
            Err(error) => return failed(error),
        };
        let counts = Counts::Each(counts.into());
        let ask = Ask::new(kind, Pattern::Scatter { counts, root });
        self.submit(buffer, ask, [0, own])
    }

    /// Gives each rank its slice of every rank's buffer, of different lengths.
    ///
    /// *Shape*: `counts[from * world + to]` is the length of what rank `from` sends rank `to`, the same on all ranks (for
    /// [`all_to_all_v`](Self::all_to_all_v) a rank needs only its own; an [`all_gather`](Self::all_gather) of those gives
    /// all). The buffer holds what this rank sends, in the order of the receivers, and after it room for what it
    /// receives, in the order of the senders.
    ///
    /// *Blocks*: and *Errors*: as [`all_reduce_async`](Self::all_reduce_async).
    pub fn all_to_all_v_async<T: Element>(&self, buffer: Buffer<T>, counts: &[usize]) -> Ticket<T> {
        let (kind, world, rank) = (OpKind::AllToAll, self.world(), self.rank());
        if Some(counts.len()) != world.checked_mul(world) {
            let reason = format!(
                "{} counts, expected one for each pair of the {world} ranks",
                counts.len()
            );
            return failed(self.refuse(kind, reason));
        }
        let (sent, received) = (
            counts[rank * world..][..world].iter(),
            counts[rank..].iter().step_by(world),
        );
        let all: Vec<usize> = sent.chain(received).copied().collect();
        if let Err(error) = self.check_sum(kind, "buffer", buffer.len(), &all) {
            return failed(error);
        }
        let received = all[..world].iter().sum();
        let counts = Counts::Each(counts.into());
        self.submit(
            buffer,
            Ask::new(kind, Pattern::AllToAll { counts }),
            [0, received],
        )
    }

    /// Where this rank's slice begins in its buffer.
    fn rooted_counts<T: Element>(
        &self,
        kind: OpKind,
        buffer: &Buffer<T>,
        counts: &[usize],
        root: usize,
    ) -> Result<usize, Error> {
        self.check_root(kind, root)?;
        if self.rank() == root {
            self.check_counts(kind, "buffer", buffer.len(), counts)?;
            return Ok(counts[..root].iter().sum());
        }
        self.check_ranks(kind, "buffer", counts)?;
        self.check_own(kind, "buffer", buffer.len(), counts)?;
        Ok(0)
    }
}
