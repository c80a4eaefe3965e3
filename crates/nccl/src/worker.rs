//! The NCCL thread: connects lanes, starts their calls, polls the running ones, and gives up when a group has failed.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_collective::ProcessGroup;

use crate::call::DeviceBuffer;
use crate::clock::Clock;
use crate::communicator::{Communicator, Threads};
use crate::driver::{Memory, Stream};
use crate::error::NcclError;
use crate::identity::Identity;
use crate::join::agree;
use crate::nccl::{Comm, Nccl, Reduce};
use crate::options::NcclOptions;
use crate::pool::{Pool, PooledEvent};
use crate::reason::give_reason;
use crate::shared::{Call, Lane, Order, Ready, Shared, Work};
use crate::ticket::{CallTiming, Outcome};
use crate::tree_sum::Adder;

/// Minimum and maximum interval between polls of a running call. In between, the interval is a fraction of the elapsed time,
/// so that a result is late by at most that fraction and a long call costs few polls.
const LOOK_MIN: Duration = Duration::from_micros(20);
const LOOK_MAX: Duration = Duration::from_millis(1);
const LOOK_SHARE: u32 = 16;
/// Maximum number of calls in the driver; bounds the memory that they hold.
const FLYING_MAX: usize = 128;
/// Interval of the watchdog.
const WATCH: Duration = Duration::from_millis(50);

/// The watchdog's name for the driver functions that free resources.
const GIVING_BACK: &str = "giving back what the communicator had on the device";

/// Starts the thread and its watchdog, and waits for the join.
pub(crate) fn start(
    group: &ProcessGroup,
    device: usize,
    options: &NcclOptions,
) -> Result<Communicator, NcclError> {
    let shared = Shared::new(group, options.grace);
    let named = |what: &str| format!("rank{}/{what}", group.global_rank(group.rank()));
    let refused = |error: std::io::Error| {
        NcclError::system(group.rank(), "start the thread that calls NCCL", error)
    };
    let watched = shared.clone();
    let watchdog = std::thread::Builder::new()
        .name(named("nccl-watch"))
        .spawn(move || while watched.watch(WATCH) {})
        .map_err(refused)?;
    let (served, options) = (shared.clone(), options.clone());
    let thread = std::thread::Builder::new()
        .name(named("nccl"))
        .spawn(move || run(&served, device, &options));
    let thread = thread.map_err(|error| {
        shared.end();
        refused(error)
    })?;
    match shared.await_joined() {
        Ok(joined) => Ok(Communicator {
            group: group.clone(),
            joined,
            threads: Arc::new(Threads {
                shared: shared.clone(),
                running: Some([thread, watchdog]),
            }),
            shared,
        }),
        Err(error) => {
            shared.close();
            if shared.await_end() {
                for thread in [thread, watchdog] {
                    // Its error has been reported.
                    let _ = thread.join();
                }
            }
            Err(error)
        }
    }
}

/// Reports the thread's end, even after a panic.
struct End<'a>(&'a Shared);

impl Drop for End<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let why = "the thread that calls NCCL panicked";
            self.0.abandon("go on calling NCCL", why);
        }
        self.0.end();
    }
}

fn run(shared: &Arc<Shared>, device: usize, options: &NcclOptions) {
    let _end = End(shared);
    match crate::join::join(shared, device, options) {
        Ok((worker, joined)) => {
            shared.joined(Ok(joined));
            worker.serve();
        }
        Err(error) => {
            let error = shared.fail(error);
            shared.joined(Err(error));
        }
    }
}

/// The communicators of all lanes, their stream, and their running calls.
pub(crate) struct Worker {
    pub(crate) shared: Arc<Shared>,
    pub(crate) nccl: Nccl,
    /// As this rank states it to those of a lane.
    pub(crate) identity: Identity,
    /// By lane.
    comms: Vec<Comm>,
    /// Untimed events, for data that becomes ready.
    pub(crate) pool: Arc<Pool>,
    pub(crate) stream: Stream,
    /// Events that tell when they happened.
    timed: Arc<Pool>,
    clock: Clock,
    adder: Adder,
    /// Memory that became too small for sums. Freeing it waits for the device, and a waiting thread cannot give up, so it is
    /// freed only when no call is running.
    outgrown: Vec<Memory>,
    /// Memory of the probe.
    rooms: Vec<Arc<Memory>>,
    flying: VecDeque<Flying>,
}

/// A call in the driver.
struct Flying {
    lane: usize,
    outcome: Arc<Outcome>,
    launched: Instant,
    start: PooledEvent,
    done: Arc<PooledEvent>,
    /// When the device was first seen to have begun.
    begun: Option<Instant>,
    keeps: Keeps,
}

/// What has to stay as long as a call is on its way.
struct Keeps {
    buffer: DeviceBuffer,
    ready: Option<PooledEvent>,
    outgrown: Option<Memory>,
}

impl Worker {
    /// Without a lane.
    pub(crate) fn new(
        shared: &Arc<Shared>,
        (nccl, identity): (Nccl, Identity),
        stream: Stream,
    ) -> Result<Self, NcclError> {
        let timed = Pool::new(&stream.context, true);
        Ok(Self {
            shared: shared.clone(),
            nccl,
            identity,
            comms: Vec::new(),
            pool: Pool::new(&stream.context, false),
            clock: Clock::new(&stream, &timed)?,
            timed,
            stream,
            adder: Adder::default(),
            outgrown: Vec::new(),
            rooms: Vec::new(),
            flying: VecDeque::new(),
        })
    }

    /// Number of lanes.
    pub(crate) fn lanes(&self) -> usize {
        self.comms.len()
    }

    /// Connects to the other ranks of one more lane.
    pub(crate) fn connect(
        &mut self,
        lane: Lane,
        begin: impl FnOnce() -> Result<Comm, NcclError>,
    ) -> Result<(), NcclError> {
        const DOING: &str = "ncclCommInitRankConfig";
        let (shared, number) = (self.shared.clone(), self.lanes());
        shared.watch_lane(number, lane);
        let comm = shared.within(DOING, begin)?;
        shared.began(comm.ender());
        self.comms.push(comm);
        settle(&shared, (number, &self.comms[number]), DOING)
    }

    /// The ranks of the newest lane.
    pub(crate) fn newest(&self) -> ProcessGroup {
        self.shared.lane(self.lanes() - 1).group
    }

    /// The limit of a wait in the newest lane.
    pub(crate) fn limit(&self) -> Duration {
        self.shared.limit_of(self.lanes() - 1)
    }

    /// Memory for the probe, kept until [`clear`](Self::clear): freeing memory in use by NCCL would wait for NCCL.
    pub(crate) fn room(&mut self, bytes: usize) -> Result<Arc<Memory>, NcclError> {
        let context = &self.stream.context;
        let room = self.shared.within("cuMemAlloc", || context.memory(bytes))?;
        let room = Arc::new(room);
        self.rooms.push(room.clone());
        Ok(room)
    }

    /// Frees the probe's memory after its success.
    pub(crate) fn clear(&mut self) {
        let shared = self.shared.clone();
        shared.within("cuMemFree", || self.rooms.clear());
    }

    /// Serves calls until the end or the first failure.
    fn serve(mut self) {
        match self.serve_all() {
            Ok(()) => self.part(),
            Err((lane, error)) => {
                self.give_up(lane, error);
            }
        }
    }

    /// *Errors*: with the lane that has failed.
    fn serve_all(&mut self) -> Result<(), (usize, NcclError)> {
        loop {
            let wait = self.flying.front().map(|first| {
                let since = first.begun.unwrap_or(first.launched);
                between_looks(since.elapsed())
            });
            let order = if self.flying.len() < FLYING_MAX {
                self.shared.next(wait)
            } else {
                pause(LOOK_MAX);
                Ok(None)
            };
            match order {
                Ok(Some(Order::Call(call))) => {
                    let (lane, name) = (call.lane, call.outcome.call);
                    let launched = self.launch(call);
                    launched.map_err(|error| (lane, error.during(name)))?;
                }
                Ok(Some(Order::Join(group))) => self.join(&group)?,
                Ok(None) => {}
                Err(crate::shared::Ended) => {
                    let failure = self.shared.failure();
                    return failure.map_or(Ok(()), |error| Err((0, error)));
                }
            }
            self.look()?;
        }
    }

    /// Joins the ranks of one more group. Once NCCL has begun to connect them, a failure is that of all lanes: what it leaves on
    /// the stream would hold up their calls.
    fn join(&mut self, group: &ProcessGroup) -> Result<(), (usize, NcclError)> {
        // NCCL takes memory, which waits for the device. All ranks have the same calls before this.
        while let Some(first) = self.flying.front() {
            pause(first.launched.elapsed());
            self.look()?;
        }
        let joined = match agree(self, group) {
            Ok(agreed) => {
                let lane = self.lanes();
                let connected = agreed.connect(self);
                Ok(connected.map_err(|error| (lane, error))?)
            }
            Err(error) => Err(error),
        };
        self.shared.joined(joined);
        Ok(())
    }

    /// Submits a call to the driver: the wait for its data, the work, and the events around it.
    fn launch(&mut self, call: Call) -> Result<(), NcclError> {
        let Call {
            lane,
            work,
            buffer,
            ready,
            outcome,
        } = call;
        let shared = self.shared.clone();
        shared.health()?;
        if self.flying.is_empty() {
            let renewed = || self.clock.renew(&self.stream, &self.timed);
            shared.within("cuEventRecord", renewed)?;
        }
        let event = match ready {
            Ready::Now => None,
            Ready::Event(event) => {
                shared.within("cuStreamWaitEvent", || self.stream.wait(&event))?;
                Some(event)
            }
            Ready::Fence(fence) => {
                let waited = shared.within_unlimited("the fence of a call's data", fence);
                waited.map_err(|reason| {
                    let (rank, call) = (shared.lane(lane).group.rank(), outcome.call);
                    let what = format!("the data of {call} did not become ready on rank {rank}");
                    NcclError::of_rank(rank, format!("{what}: {reason}"))
                })?;
                None
            }
        };
        let start = shared.within("cuEventRecord", || self.mark())?;
        let outgrown = self.put((lane, &work), &buffer)?;
        let done = Arc::new(shared.within("cuEventRecord", || self.mark())?);
        outcome.launch(done.clone());
        self.flying.push_back(Flying {
            lane,
            outcome,
            launched: Instant::now(),
            start,
            done,
            begun: None,
            keeps: Keeps {
                buffer,
                ready: event,
                outgrown,
            },
        });
        Ok(())
    }

    /// An event after the stream's work so far.
    fn mark(&self) -> Result<PooledEvent, NcclError> {
        let event = self.timed.take()?;
        self.stream.record(&event)?;
        Ok(event)
    }

    /// Puts the work of a call on the stream. Returns memory that must live until the stream has done it.
    fn put(
        &mut self,
        (lane, work): (usize, &Work),
        buffer: &DeviceBuffer,
    ) -> Result<Option<Memory>, NcclError> {
        let (ptr, bytes) = (buffer.ptr, buffer.bytes);
        let (comm, stream, shared) = (&self.comms[lane], &self.stream, &self.shared);
        if bytes == 0 {
            return Ok(None);
        }
        let function = match work {
            Work::AllReduce(float) | Work::Max(float) => {
                let data = (bytes / float.bytes(), *float);
                let reduce = match work {
                    Work::Max(_) => Reduce::Max,
                    _ => Reduce::Sum,
                };
                // SAFETY: the communicator's caller keeps the buffer alive until the call is over.
                shared.within("ncclAllReduce", || unsafe {
                    comm.all_reduce(ptr, data, reduce, stream)
                })?;
                "ncclAllReduce"
            }
            Work::ReduceScatter(float, counts) => {
                // NCCL's reduce-scatter takes equal parts only; it runs the calls of a group together.
                let put = || {
                    comm.group(|| {
                        for (root, (at, count)) in parts(ptr, counts, float.bytes()) {
                            // SAFETY: the same; the parts are those of the buffer, which was checked on submission.
                            unsafe { comm.reduce(at, (count, *float), root, stream) }?;
                        }
                        Ok(())
                    })
                };
                shared.within("ncclReduce", put)?;
                "ncclReduce"
            }
            Work::AllGather(counts) => {
                let put = || {
                    comm.group(|| {
                        for (root, (at, count)) in parts(ptr, counts, 1) {
                            // SAFETY: the same.
                            unsafe { comm.broadcast((at, at), count, root, stream) }?;
                        }
                        Ok(())
                    })
                };
                shared.within("ncclBroadcast", put)?;
                "ncclBroadcast"
            }
            Work::Send(peer) => {
                // SAFETY: the same.
                shared.within("ncclSend", || unsafe {
                    comm.send(ptr, bytes, *peer, stream)
                })?;
                "ncclSend"
            }
            Work::Receive(peer) => {
                // SAFETY: the same.
                shared.within("ncclRecv", || unsafe {
                    comm.recv(ptr, bytes, *peer, stream)
                })?;
                "ncclRecv"
            }
            Work::TreeSum(sum) => {
                let adder = &mut self.adder;
                let rank = shared.lane(lane).group.rank();
                let prepared = || adder.prepare(&stream.context, sum, rank);
                let (moves, outgrown) = shared.within("cuMemAlloc", prepared)?;
                // SAFETY: the same; the buffer's size was checked on submission.
                shared.within("ncclSend", || unsafe { moves.slices((comm, stream), ptr) })?;
                settle(shared, (lane, comm), "the exchange of slices")?;
                // SAFETY: the same.
                shared.within("cuLaunchKernel", || unsafe {
                    moves.add(adder, stream, ptr)
                })?;
                if sum.counts.is_none() {
                    // SAFETY: the same.
                    shared.within("ncclAllGather", || unsafe {
                        moves.sums((comm, stream), ptr)
                    })?;
                    settle(shared, (lane, comm), "the exchange of sums")?;
                }
                return Ok(outgrown);
            }
        };
        settle(shared, (lane, comm), function)?;
        Ok(None)
    }

    /// Polls the running calls: settles finished ones, and returns an error with its lane if one cannot continue.
    fn look(&mut self) -> Result<(), (usize, NcclError)> {
        let shared = self.shared.clone();
        shared.within("cuEventQuery", || {
            while let Some(lane) = self.flying.front().map(|first| first.lane) {
                if !self.look_at_first().map_err(|error| (lane, error))? {
                    break;
                }
            }
            Ok(())
        })
    }

    /// Polls the oldest running call, and settles it if it has finished; returns whether it has.
    fn look_at_first(&mut self) -> Result<bool, NcclError> {
        let Some(first) = self.flying.front_mut() else {
            return Ok(false);
        };
        if first.begun.is_none() && first.start.has_happened()? {
            first.begun = Some(Instant::now());
        }
        let (lane, call) = (first.lane, first.outcome.call);
        let waited = first.begun.map(|begun| begun.elapsed());
        let happened = first.done.has_happened();
        let is_done = happened.map_err(|error| error.during(call))?;
        // Even of a call that is done: its kernels also end if NCCL fails in the background.
        self.comms[lane]
            .is_settled("NCCL's work")
            .map_err(|error| error.during(call))?;
        if is_done {
            return self.land().map(|()| true);
        }
        self.shared.health()?;
        // There is no deadline until the data is ready: the call waits for the caller's own work.
        match waited.filter(|waited| *waited > self.shared.limit_of(lane)) {
            Some(waited) => Err(deadline((&self.shared, lane), &call.to_string(), waited)),
            None => Ok(false),
        }
    }

    /// Settles the oldest call, which has finished.
    fn land(&mut self) -> Result<(), NcclError> {
        let Some(first) = self.flying.pop_front() else {
            return Ok(());
        };
        let (submitted, seen) = (first.outcome.submitted, Instant::now());
        let (started, took) = (
            self.clock.time_of(&first.start)?,
            first.done.since(&first.start)?,
        );
        // The device's times, between those that the host is sure of.
        let within = |moment: Instant| moment.clamp(submitted, seen.max(submitted));
        let timing = CallTiming {
            submitted,
            launched: first.launched,
            started: within(started),
            finished: within(started + took),
        };
        let Keeps {
            buffer,
            ready,
            outgrown,
        } = first.keeps;
        // First, so that a waiter may then own the buffer alone.
        let shared = &self.shared;
        shared.within("dropping what a call keeps", || drop((buffer, ready)));
        self.outgrown.extend(outgrown);
        if self.flying.is_empty() {
            shared.within("cuMemFree", || self.outgrown.clear());
        }
        self.shared.finish(&first.outcome, Ok(timing));
        Ok(())
    }

    /// Puts work of the newest lane on the stream and waits for it. Returns the device's time for it.
    ///
    /// *Errors*: not done within `limit`.
    pub(crate) fn complete(
        &mut self,
        doing: &'static str,
        limit: Duration,
        put: impl FnOnce(&Comm, &Stream) -> Result<(), NcclError>,
    ) -> Result<Duration, NcclError> {
        let shared = self.shared.clone();
        let lane = self.lanes() - 1;
        let (comm, stream) = (&self.comms[lane], &self.stream);
        let begun = Instant::now();
        let start = shared.within("cuEventRecord", || self.mark())?;
        shared.within(doing, || put(comm, stream))?;
        settle_within(&shared, (lane, comm), doing, limit)?;
        let done = shared.within("cuEventRecord", || self.mark())?;
        while !shared.within("cuEventQuery", || done.has_happened())? {
            shared.health()?;
            shared.within(doing, || comm.is_settled(doing))?;
            let waited = begun.elapsed();
            if waited > limit {
                return Err(deadline((&shared, lane), doing, waited));
            }
            pause(waited);
        }
        done.since(&start)
    }

    /// Ends the lanes: in order, because peers may still be receiving, unless it leaves them.
    fn part(self) {
        const FINALIZE: &str = "ncclCommFinalize";
        let shared = self.shared;
        // No lane's end waits for another one's: ranks may have joined them in different orders.
        let in_order = || {
            let mut comms = self.comms.iter();
            comms.try_for_each(|comm| shared.within(FINALIZE, || comm.finalize()))?;
            let mut comms = self.comms.iter().enumerate();
            comms.try_for_each(|lane| settle(&shared, lane, FINALIZE))
        };
        let is_finalized = !shared.is_leaving()
            && in_order()
                .inspect_err(|error| {
                    tracing::debug!("NCCL's communicator is aborted at its end: {error}");
                })
                .is_ok();
        for comm in self.comms {
            let ended = match is_finalized {
                true => shared.within("ncclCommDestroy", || comm.destroy()),
                false => shared.within("ncclCommAbort", || comm.abort()),
            };
            if let Err(error) = ended {
                tracing::debug!("NCCL's communicator did not end: {error}");
            }
        }
        let memory = (self.flying, self.rooms, self.outgrown, self.adder);
        let held = (memory, self.clock, self.timed, self.pool, self.stream);
        shared.within(GIVING_BACK, || drop(held));
    }

    /// Reports a lane's failure to all ranks, then aborts all lanes. Returns the first failure.
    pub(crate) fn give_up(self, lane: usize, error: NcclError) -> NcclError {
        let error = give_reason(&self.shared, lane, error);
        let shared = self.shared;
        for comm in self.comms {
            if let Err(error) = shared.within("ncclCommAbort", || comm.abort()) {
                tracing::debug!("NCCL's communicator did not end: {error}");
            }
        }
        // NCCL's kernels end soon after; until then they may write to the calls' buffers.
        let begun = Instant::now();
        let mut all_over = self.rooms.is_empty();
        let mut over = Vec::new();
        for call in self.flying {
            let is_over = loop {
                match shared.within("cuEventQuery", || call.done.has_happened()) {
                    Ok(false) if begun.elapsed() < shared.grace => pause(LOOK_MAX),
                    Ok(is_over) => break is_over,
                    Err(_) => break false,
                }
            };
            if is_over {
                over.push(call);
            } else {
                all_over = false;
                std::mem::forget(call);
            }
        }
        // Freeing memory and streams may wait for all of the device's work.
        let held = (over, self.clock, self.timed, self.pool, self.stream);
        shared.within(GIVING_BACK, || drop(held));
        let held = (self.adder, self.outgrown, self.rooms);
        if all_over {
            shared.within(GIVING_BACK, || drop(held));
        } else {
            std::mem::forget(held);
        }
        error
    }
}

/// The ranks whose parts of a buffer are not empty, with the address and the elements of each part.
fn parts(ptr: u64, counts: &[usize], size: usize) -> impl Iterator<Item = (usize, (u64, usize))> {
    let mut next = ptr;
    let placed = counts.iter().enumerate().map(move |(rank, count)| {
        let at = next;
        next += (count * size) as u64;
        (rank, (at, *count))
    });
    placed.filter(|(_, (_, count))| *count > 0)
}

/// Waits until NCCL has accepted the last call, or has connected.
fn settle(shared: &Shared, comm: (usize, &Comm), what: &'static str) -> Result<(), NcclError> {
    settle_within(shared, comm, what, shared.limit_of(comm.0))
}

fn settle_within(
    shared: &Shared,
    (lane, comm): (usize, &Comm),
    what: &'static str,
    limit: Duration,
) -> Result<(), NcclError> {
    let begun = Instant::now();
    while !shared.within("ncclCommGetAsyncError", || comm.is_settled(what))? {
        shared.health()?;
        let waited = begun.elapsed();
        if waited > limit {
            return Err(deadline((shared, lane), what, waited));
        }
        pause(waited);
    }
    Ok(())
}

/// Sleeps until the next poll of something that has taken this long.
fn pause(waited: Duration) {
    std::thread::park_timeout(between_looks(waited));
}

fn between_looks(waited: Duration) -> Duration {
    (waited / LOOK_SHARE).clamp(LOOK_MIN, LOOK_MAX)
}

fn deadline((shared, lane): (&Shared, usize), doing: &str, waited: Duration) -> NcclError {
    NcclError::Deadline {
        rank: shared.lane(lane).group.rank(),
        doing: doing.into(),
        waited,
        source: None,
    }
}
