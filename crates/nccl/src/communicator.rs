//! The communicator: join, calls, end.

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

use paceline_collective::ProcessGroup;

use crate::call::{Before, DeviceBuffer, Float, Label, TreeSum};
use crate::driver::Context;
use crate::error::NcclError;
use crate::options::NcclOptions;
use crate::pool::Pool;
use crate::report::{PairReport, RankPlace};
use crate::shared::{Ready, Refused, Shared, Work};
use crate::ticket::Ticket;
use crate::version::Version;

/// A group's ranks, each with a device, connected by NCCL.
///
/// Calls are asynchronous and run in the order of their submission. All ranks must issue the same calls in the same
/// order, with buffers of the same length. NCCL does not check this: a different call on a rank leads to a deadline or to
/// wrong numbers.
///
/// A rank of several groups, as along the dimensions of a mesh, [joins](Self::join_lane) each as a *lane*. The calls of all lanes of a
/// device run in one order, that of their submission, so that order must fit on all ranks: there must be one order of the calls of
/// all groups of which every rank submits its own.
///
/// One thread, `rank3/nccl`, makes all NCCL calls and polls the group's health. A failure of the group ends NCCL's calls within
/// a millisecond, and their tickets carry the group's error, which names the rank to blame. If that thread is stuck in the
/// driver, another one aborts NCCL in its place.
///
/// *Blocks*: after the device has begun a call, its limit is the group's timeout plus [`NcclOptions::grace`]. The waiting ranks
/// then meet in a barrier of the group, which names a missing one ([`NcclError::Deadline`]). The wait for the caller's own work
/// before a call has no deadline. Dropping waits until running calls have finished or failed.
///
/// *Errors*: the first failure of any lane latches, fails the groups of all lanes as well, and every later call returns it. A
/// sub-group's failure says its name and the job's number of the rank to blame ([`NcclError::Along`]).
pub struct Communicator {
    pub(crate) shared: Arc<Shared>,
    pub(crate) group: ProcessGroup,
    pub(crate) joined: Joined,
    /// Of all lanes; they end with the last one.
    pub(crate) threads: Arc<Threads>,
}

/// The NCCL thread and its watchdog.
pub(crate) struct Threads {
    pub(crate) shared: Arc<Shared>,
    /// Taken on drop.
    pub(crate) running: Option<[JoinHandle<()>; 2]>,
}

/// The result of a join on the NCCL thread.
pub(crate) struct Joined {
    pub(crate) lane: usize,
    pub(crate) context: Context,
    /// Untimed events, for data that becomes ready.
    pub(crate) pool: Arc<Pool>,
    pub(crate) report: PairReport,
}

impl Communicator {
    /// Joins the other ranks of `group`, all of which must call this. `device` is the driver's ordinal of this rank's device. The
    /// environment is not changed.
    ///
    /// *Blocks*: until all ranks have joined and the [`NcclOptions::probe`] is done. Each step has the group's timeout plus the
    /// grace.
    ///
    /// *Errors*: if all ranks are certain to get an error, the group stays intact, and the program can continue without NCCL.
    /// This holds for a library, driver or device that is missing on some rank (the others are told which), for
    /// different versions, for two ranks on one device, and for the probe's findings. Other failures fail the group as well.
    pub fn join(
        group: &ProcessGroup,
        device: usize,
        options: &NcclOptions,
    ) -> Result<Self, NcclError> {
        crate::worker::start(group, device, options)
    }

    /// Joins the other ranks of a further group, all of which must call this or [`join`](Self::join), after the same calls of the
    /// lanes that they share. The result is used and dropped as this one is; the device, its stream and its thread are the same, and
    /// stay until both are dropped. Ranks may join their groups in different orders if none waits for another one.
    ///
    /// *Blocks*: until all earlier calls have ended, and then as [`join`](Self::join).
    ///
    /// *Errors*: as [`join`](Self::join). Before NCCL has begun to connect, all ranks of `group` get the same error, and the other
    /// lanes stay as they are. Later failures, such as the probe's findings, are failures of all lanes.
    pub fn join_lane(&self, group: &ProcessGroup) -> Result<Self, NcclError> {
        Ok(Self {
            joined: self.shared.join(group)?,
            shared: self.shared.clone(),
            group: group.clone(),
            threads: self.threads.clone(),
        })
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.group.world()
    }

    /// Version of NCCL, the same on all ranks.
    pub fn version(&self) -> Version {
        self.joined.report.nccl
    }

    /// This rank's host and device.
    pub fn place(&self) -> &RankPlace {
        &self.joined.report.ranks[self.rank()]
    }

    /// The probe's results, and all ranks' devices.
    pub fn report(&self) -> &PairReport {
        &self.joined.report
    }

    /// Whether [`Before::Context`] works, and [`release`](Self::release) without a wait on the host: the driver is for CUDA
    /// 12.5 or newer, and `NCCL_P2P_USE_CUDA_MEMCPY` is not set, with which NCCL's own copies would wait for themselves.
    pub fn has_context_events(&self) -> bool {
        self.joined.context.driver().has_context_events()
    }

    /// The first failure, which every later call returns.
    pub fn health(&self) -> Result<(), NcclError> {
        self.shared.failure().map_or(Ok(()), Err)
    }

    /// Whether a function of NCCL or the driver hangs. The thread and its calls' buffers are then leaked, and the process must
    /// exit.
    pub fn is_wedged(&self) -> bool {
        self.shared.is_wedged()
    }

    /// Replaces the whole buffer on every rank by the sum of all ranks' buffers.
    ///
    /// *Numerics*: the order of additions is NCCL's, which depends on the number of ranks and the links between them.
    ///
    /// *Errors*: on the ticket; a length that is no multiple of a number's size.
    pub fn all_reduce(
        &self,
        buffer: DeviceBuffer,
        float: Float,
        before: Before,
        label: Label,
    ) -> Ticket {
        self.submit(Work::AllReduce(float), buffer, before, label)
    }

    /// Replaces the whole buffer on every rank by the largest numbers of all ranks' buffers, element by element.
    ///
    /// *Numerics*: exact. Where a rank has a NaN, or ranks have zeros of both signs, the result is NCCL's choice.
    ///
    /// *Errors*: as [`all_reduce`](Self::all_reduce).
    pub fn max(&self, buffer: DeviceBuffer, float: Float, before: Before, label: Label) -> Ticket {
        self.submit(Work::Max(float), buffer, before, label)
    }

    /// Replaces each rank's part of its buffer by the sum of all ranks' buffers there. The content of the rest is undefined
    /// afterwards.
    ///
    /// *Shape*: the parts are consecutive, in rank order. *Units*: `counts` are numbers of the type `float`.
    ///
    /// *Numerics*: as [`all_reduce`](Self::all_reduce).
    ///
    /// *Errors*: on the ticket; counts that are not those of the buffer.
    pub fn reduce_scatter(
        &self,
        buffer: DeviceBuffer,
        (float, counts): (Float, Arc<[usize]>),
        before: Before,
        label: Label,
    ) -> Ticket {
        self.submit(Work::ReduceScatter(float, counts), buffer, before, label)
    }

    /// Collects the parts of all ranks on every rank.
    ///
    /// *Shape*: the parts are consecutive, in rank order; this rank's part is in place, the others are overwritten.
    /// *Units*: `counts` are bytes.
    ///
    /// *Errors*: on the ticket; counts that are not those of the buffer.
    pub fn all_gather(
        &self,
        buffer: DeviceBuffer,
        counts: Arc<[usize]>,
        before: Before,
        label: Label,
    ) -> Ticket {
        self.submit(Work::AllGather(counts), buffer, before, label)
    }

    /// Sums all ranks' blocks over a tree; the result replaces the first block on every rank, or with [`TreeSum::counts`] this
    /// rank's part of it.
    ///
    /// *Shape*: `sum.tree.blocks(rank).len()` blocks of `sum.len` singles, `sum.stride` apart; the buffer may be longer. The
    /// content of the rest is undefined afterwards.
    ///
    /// *Numerics*: additions in the order of the tree, each rounded once: the same bytes for any number of ranks, and those of
    /// [`ProcessGroup::all_reduce_async`] on the host.
    ///
    /// *Cost*: with one block per rank, about the traffic of NCCL's all-reduce: `(n - 1) / n` of a block out and in, and as much
    /// of the result. Each further block of a rank adds as much outgoing traffic. Incoming slices take the memory of about all
    /// ranks' blocks divided by the number of ranks. With [`TreeSum::counts`] the result is not sent, which is half of the
    /// traffic.
    ///
    /// *Errors*: on the ticket; a tree of another world, a buffer that is too short, or counts that are not those of a block.
    pub fn reduce_in_tree_order(
        &self,
        buffer: DeviceBuffer,
        sum: TreeSum,
        before: Before,
        label: Label,
    ) -> Ticket {
        self.submit(Work::TreeSum(sum), buffer, before, label)
    }

    /// Sends the buffer to another rank, which receives as many bytes. Messages between two ranks are received in the order
    /// in which they are sent.
    ///
    /// *Blocks*: never the caller. On the device a message waits for its other end, and later calls for the message: give all ranks
    /// their messages in one order of all of them.
    ///
    /// *Errors*: on the ticket; a number that is not that of another rank.
    pub fn send(&self, buffer: DeviceBuffer, to: usize, before: Before, label: Label) -> Ticket {
        self.submit(Work::Send(to), buffer, before, label)
    }

    /// Fills the buffer with what another rank sends. Otherwise as [`send`](Self::send).
    pub fn receive(
        &self,
        buffer: DeviceBuffer,
        from: usize,
        before: Before,
        label: Label,
    ) -> Ticket {
        self.submit(Work::Receive(from), buffer, before, label)
    }

    /// Makes all later work of the device's primary context wait for these calls, as [`Ticket::order_after`] of each.
    ///
    /// *Cost*: one wait for the last of them, since calls of all lanes run in order.
    pub fn release(&self, tickets: &[&Ticket]) -> Result<(), NcclError> {
        let last = tickets.iter().max_by_key(|ticket| ticket.call().seq);
        last.map_or(Ok(()), |ticket| ticket.order_after())
    }

    /// Ends this rank's part in all lanes at once, when running calls have finished or failed. For ranks that go on without a lost one, or with
    /// another one: they join a communicator of their next group.
    ///
    /// NCCL is aborted and never destroyed, because a communicator that has lost a rank may hang in its orderly end.
    ///
    /// *Blocks*: as dropping it does.
    ///
    /// *Errors*: NCCL or the driver does not return. The process cannot use the device any more and must exit.
    pub fn abort(self) -> Result<(), NcclError> {
        self.shared.leave();
        match self.shared.await_end() {
            true => Ok(()),
            false => self.health(),
        }
    }

    #[cfg(test)]
    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    fn submit(&self, work: Work, buffer: DeviceBuffer, before: Before, label: Label) -> Ticket {
        let ready = match self.wrong(&work, &buffer) {
            Some(reason) => Err(Refused::Wrong(reason)),
            None => self.ready(before).map_err(Refused::Driver),
        };
        let work = (self.joined.lane, work);
        Ticket(self.shared.submit(work, label, buffer, ready))
    }

    fn ready(&self, before: Before) -> Result<Ready, NcclError> {
        match before {
            Before::Now => Ok(Ready::Now),
            Before::Fence(fence) => Ok(Ready::Fence(fence)),
            Before::Context => {
                let event = self.joined.pool.take()?;
                self.joined.context.record(&event)?;
                Ok(Ready::Event(event))
            }
        }
    }

    /// The reason why a call is invalid on this rank, if it is.
    fn wrong(&self, work: &Work, buffer: &DeviceBuffer) -> Option<String> {
        let (bytes, world) = (buffer.bytes, self.world());
        match work {
            Work::AllReduce(float) | Work::Max(float) if !bytes.is_multiple_of(float.bytes()) => {
                Some(format!(
                    "{bytes} bytes are no multiple of a number's {}",
                    float.bytes()
                ))
            }
            Work::ReduceScatter(float, counts) => wrong_parts(counts, float.bytes(), world, bytes),
            Work::AllGather(counts) => wrong_parts(counts, 1, world, bytes),
            Work::TreeSum(sum) => crate::tree_sum::wrong(sum, (self.rank(), world), bytes),
            Work::Send(peer) | Work::Receive(peer) => {
                let is_other = *peer < world && *peer != self.rank();
                (!is_other).then(|| format!("{peer} is no other rank of {world}"))
            }
            Work::AllReduce(_) | Work::Max(_) => None,
        }
    }
}

/// The reason why the ranks' parts, each of so many elements of `size` bytes, are not a buffer of `bytes`, if they are not.
pub(crate) fn wrong_parts(
    counts: &[usize],
    size: usize,
    world: usize,
    bytes: usize,
) -> Option<String> {
    if counts.len() != world {
        return Some(format!("{} parts for {world} ranks", counts.len()));
    }
    let all = counts
        .iter()
        .try_fold(0_usize, |all, count| all.checked_add(*count))
        .and_then(|all| all.checked_mul(size));
    match all {
        Some(all) if all == bytes => None,
        _ => Some(format!(
            "the parts {counts:?} are not {} elements",
            bytes / size
        )),
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank())
            .field("world", &self.world())
            .field("version", &self.version())
            .field("place", self.place())
            .finish_non_exhaustive()
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shared.abandon("go on", "it panicked");
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.close();
        // A wedged thread is leaked with its buffers.
        if self.shared.await_end() {
            for thread in self.running.take().into_iter().flatten() {
                // If it panicked, it has settled all calls with an error.
                let _ = thread.join();
            }
        }
    }
}
