//! The communicator: who joins it, its calls, its end.

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
/// order, with buffers of the same length. NCCL compares nothing: a rank that issues another call is found when the
/// deadline is over, or gives wrong numbers.
///
/// All of NCCL is called on one thread, `rank3/nccl`, which meanwhile looks at the group's health: a failure of the group
/// ends NCCL's calls within a millisecond, and their tickets carry the group's error, which names the rank to blame. Where that
/// thread is inside the driver then and does not come back soon, another one aborts NCCL in its place.
///
/// *Blocks*: a call that the device has begun has the group's timeout and [`NcclOptions::grace`]; then the ranks that wait for
/// it come together over the group, and one that does not come within the timeout is named ([`NcclError::Missing`]). A wait for
/// the caller's own work, before a call begins, has no deadline. Dropping waits until calls on their way are over, or have
/// failed.
///
/// *Errors*: the first failure latches, fails the group as well, and every later call returns it.
pub struct Communicator {
    shared: Arc<Shared>,
    joined: Joined,
    /// There until the end.
    threads: Option<[JoinHandle<()>; 2]>,
}

/// What the thread has found out when it has joined.
pub(crate) struct Joined {
    pub(crate) context: Context,
    /// Events without a time, for data that becomes ready.
    pub(crate) pool: Arc<Pool>,
    pub(crate) report: PairReport,
}

impl Communicator {
    /// Joins the other ranks of `group`, all of which have to call this; `device` is the driver's number of this rank's
    /// device in this process. No variable of the environment is set.
    ///
    /// *Blocks*: until all ranks have joined and what [`NcclOptions::probe`] asks for is done: each step has the group's timeout
    /// and a grace.
    ///
    /// *Errors*: where all ranks are sure to get an error, the group stays sound, and a program may go on without NCCL. This
    /// holds for a library, a driver or a device that is absent on some rank
    /// ([`NcclError::Unable`] on the others), for different versions, for two ranks on one device, and for what the probe
    /// finds. Other failures fail the group as well.
    pub fn join(
        group: &ProcessGroup,
        device: usize,
        options: &NcclOptions,
    ) -> Result<Self, NcclError> {
        let started = crate::worker::start(group, device, options)?;
        Ok(Self {
            shared: started.shared,
            joined: started.joined,
            threads: Some(started.threads),
        })
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.shared.rank()
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.shared.group.world()
    }

    /// Version of NCCL, the same on all ranks.
    pub fn version(&self) -> Version {
        self.joined.report.nccl
    }

    /// Where this rank is.
    pub fn place(&self) -> &RankPlace {
        &self.joined.report.ranks[self.rank()]
    }

    /// What the probe found, and where all ranks are.
    pub fn report(&self) -> &PairReport {
        &self.joined.report
    }

    /// Whether [`Before::Context`] works, and [`release`](Self::release) without a wait on the host: the driver is for CUDA
    /// 12.5 or newer, and `NCCL_P2P_USE_CUDA_MEMCPY` is not set, with which NCCL's own copies would wait for themselves.
    pub fn has_context_events(&self) -> bool {
        self.joined.context.driver().has_context_events()
    }

    /// The first failure, if there is one: what every further call would return.
    pub fn health(&self) -> Result<(), NcclError> {
        self.shared.failure().map_or(Ok(()), Err)
    }

    /// Whether a function of NCCL or the driver will not return any more. The thread is then left behind, with what its
    /// calls keep: the process has to end.
    pub fn is_wedged(&self) -> bool {
        self.shared.is_wedged()
    }

    /// Replaces the whole buffer on every rank by the sum of all ranks' buffers.
    ///
    /// *Numerics*: the order of additions is NCCL's, which depends on the number of ranks and the links between them.
    ///
    /// *Errors*: the ticket's; a length that is no multiple of a number's.
    pub fn all_reduce(
        &self,
        buffer: DeviceBuffer,
        float: Float,
        before: Before,
        label: Label,
    ) -> Ticket {
        self.submit(Work::AllReduce(float), buffer, before, label)
    }

    /// Replaces the whole buffer on every rank by the root's.
    ///
    /// *Errors*: the ticket's; a root that is no rank.
    pub fn broadcast(
        &self,
        buffer: DeviceBuffer,
        root: usize,
        before: Before,
        label: Label,
    ) -> Ticket {
        self.submit(Work::Broadcast { root }, buffer, before, label)
    }

    /// Gives all ranks the parts of all ranks.
    ///
    /// *Shape*: the buffer has `world` parts of one length; this rank's part is at its place, the others are filled.
    ///
    /// *Errors*: the ticket's; a length that is no multiple of `world`.
    pub fn all_gather(&self, buffer: DeviceBuffer, before: Before, label: Label) -> Ticket {
        self.submit(Work::AllGather, buffer, before, label)
    }

    /// Sums all ranks' blocks over a tree; the result replaces the first block on every rank.
    ///
    /// *Shape*: `sum.tree.blocks(rank).len()` blocks of `sum.len` singles, `sum.stride` apart; the buffer may be longer. The
    /// blocks behind the first hold nothing of use afterwards.
    ///
    /// *Numerics*: additions in the order of the tree, each rounded once: the same bytes for any number of ranks, and those of
    /// [`ProcessGroup::all_reduce_async`] on the host.
    ///
    /// *Cost*: on the wire about what an all-reduce of NCCL's takes when each rank has one block, `(n - 1) / n` of all
    /// blocks out and in, and as much of the result; each further block of a rank costs as much again out. Memory for
    /// what comes in, about one block for each rank's block, divided by the number of ranks.
    ///
    /// *Errors*: the ticket's; a tree of another world, or a buffer that is too short.
    pub fn reduce_in_tree_order(
        &self,
        buffer: DeviceBuffer,
        sum: TreeSum,
        before: Before,
        label: Label,
    ) -> Ticket {
        self.submit(Work::TreeSum(sum), buffer, before, label)
    }

    /// Lets all work that the device's primary context is given from now on wait for these calls, as
    /// [`Ticket::order_after`] of each.
    ///
    /// *Cost*: one wait for the last of them, since calls run in order.
    pub fn release(&self, tickets: &[&Ticket]) -> Result<(), NcclError> {
        let last = tickets.iter().max_by_key(|ticket| ticket.call().seq);
        last.map_or(Ok(()), |ticket| ticket.order_after())
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

    /// Why a call cannot work on this rank.
    fn wrong(&self, work: &Work, buffer: &DeviceBuffer) -> Option<String> {
        let (bytes, world) = (buffer.bytes, self.world());
        match work {
            Work::AllReduce(float) if !bytes.is_multiple_of(float.bytes()) => Some(format!(
                "{bytes} bytes are no multiple of a number's {}",
                float.bytes()
            )),
            Work::Broadcast { root } if *root >= world => {
                Some(format!("there is no rank {root} among {world}"))
            }
            Work::AllGather if !bytes.is_multiple_of(world) => {
                Some(format!("{bytes} bytes are no multiple of {world} ranks"))
            }
            Work::TreeSum(sum) => crate::tree_sum::wrong(sum, (self.rank(), world), bytes),
            Work::AllReduce(_) | Work::Broadcast { .. } | Work::AllGather => None,
        }
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
            let rank = self.rank();
            self.shared.group.abort("it panicked");
            let reason = "it panicked".into();
            self.shared.fail(NcclError::System {
                rank,
                doing: "go on",
                reason,
            });
        }
        self.shared.close();
        // A thread that will not come back is left behind; whatever it keeps stays.
        if self.shared.await_end() {
            for thread in self.threads.take().into_iter().flatten() {
                // A panic in there has settled all calls with an error; there is nobody left to tell.
                let _ = thread.join();
            }
        }
    }
}
