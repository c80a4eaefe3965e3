//! The NCCL thread: starts calls, polls the running ones, and gives up when the group has failed.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_collective::ProcessGroup;

use crate::call::DeviceBuffer;
use crate::clock::Clock;
use crate::communicator::Communicator;
use crate::driver::{Memory, Stream};
use crate::error::NcclError;
use crate::nccl::Comm;
use crate::options::NcclOptions;
use crate::pool::{Pool, PooledEvent};
use crate::reason::give_reason;
use crate::shared::{Order, Ready, Shared, Work};
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
            shared,
            joined,
            threads: Some([thread, watchdog]),
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
            let rank = self.0.rank();
            self.0.group.abort("the thread that calls NCCL panicked");
            let error = NcclError::system(rank, "go on calling NCCL", "its thread panicked");
            self.0.fail(error);
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

/// A communicator, its stream, and its running calls.
pub(crate) struct Worker {
    pub(crate) shared: Arc<Shared>,
    comm: Comm,
    /// A sub-group of the same ranks, which finds the missing ones if NCCL stalls. `None` for one rank.
    control: Option<ProcessGroup>,
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

/// A stream with the clock of its events.
pub(crate) struct Track {
    pub(crate) stream: Stream,
    timed: Arc<Pool>,
    clock: Clock,
}

impl Track {
    pub(crate) fn new(stream: Stream) -> Result<Self, NcclError> {
        let timed = Pool::new(&stream.context, true);
        Ok(Self {
            clock: Clock::new(&stream, &timed)?,
            timed,
            stream,
        })
    }
}

/// A call in the driver.
struct Flying {
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
    /// Connects to the other ranks.
    pub(crate) fn connect(
        shared: &Arc<Shared>,
        (track, control): (Track, Option<ProcessGroup>),
        begin: impl FnOnce() -> Result<Comm, NcclError>,
    ) -> Result<Self, NcclError> {
        let comm = shared.within("ncclCommInitRankConfig", begin);
        let worker = Self {
            shared: shared.clone(),
            comm: comm.map_err(|error| give_reason(shared, control.as_ref(), error))?,
            control,
            stream: track.stream,
            timed: track.timed,
            clock: track.clock,
            adder: Adder::default(),
            outgrown: Vec::new(),
            rooms: Vec::new(),
            flying: VecDeque::new(),
        };
        shared.began(worker.comm.ender());
        match settle(shared, &worker.comm, "ncclCommInitRankConfig") {
            Ok(()) => Ok(worker),
            Err(error) => Err(worker.give_up(error)),
        }
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
            Err(error) => {
                self.give_up(error);
            }
        }
    }

    fn serve_all(&mut self) -> Result<(), NcclError> {
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
                Ok(Some(order)) => {
                    let call = order.outcome.call;
                    self.launch(order).map_err(|error| error.during(call))?;
                }
                Ok(None) => {}
                Err(crate::shared::Ended) => {
                    return self.shared.failure().map_or(Ok(()), Err);
                }
            }
            let shared = self.shared.clone();
            shared.within("cuEventQuery", || self.look())?;
        }
    }

    /// Submits a call to the driver: the wait for its data, the work, and the events around it.
    fn launch(&mut self, order: Order) -> Result<(), NcclError> {
        let Order {
            work,
            buffer,
            ready,
            outcome,
        } = order;
        let shared = self.shared.clone();
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
                    let (rank, call) = (shared.rank(), outcome.call);
                    let what = format!("the data of {call} did not become ready on rank {rank}");
                    NcclError::of_rank(rank, format!("{what}: {reason}"))
                })?;
                None
            }
        };
        let start = shared.within("cuEventRecord", || self.mark())?;
        let outgrown = self.put(&work, &buffer)?;
        let done = Arc::new(shared.within("cuEventRecord", || self.mark())?);
        outcome.launch(done.clone());
        self.flying.push_back(Flying {
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
    fn put(&mut self, work: &Work, buffer: &DeviceBuffer) -> Result<Option<Memory>, NcclError> {
        let (ptr, bytes) = (buffer.ptr, buffer.bytes);
        let (comm, stream, shared) = (&self.comm, &self.stream, &self.shared);
        if bytes == 0 {
            return Ok(None);
        }
        let function = match work {
            Work::AllReduce(float) => {
                let (count, data) = (bytes / float.bytes(), *float);
                // SAFETY: the communicator's caller keeps the buffer alive until the call is over.
                shared.within("ncclAllReduce", || unsafe {
                    comm.all_reduce(ptr, count, data, stream)
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
            Work::TreeSum(sum) => {
                let adder = &mut self.adder;
                let rank = shared.rank();
                let prepared = || adder.prepare(&stream.context, sum, rank);
                let (moves, outgrown) = shared.within("cuMemAlloc", prepared)?;
                // SAFETY: the same; the buffer's size was checked on submission.
                shared.within("ncclSend", || unsafe { moves.slices((comm, stream), ptr) })?;
                settle(shared, comm, "the exchange of slices")?;
                // SAFETY: the same.
                shared.within("cuLaunchKernel", || unsafe {
                    moves.add(adder, stream, ptr)
                })?;
                if sum.counts.is_none() {
                    // SAFETY: the same.
                    shared.within("ncclAllGather", || unsafe {
                        moves.sums((comm, stream), ptr)
                    })?;
                    settle(shared, comm, "the exchange of sums")?;
                }
                return Ok(outgrown);
            }
        };
        settle(shared, comm, function)?;
        Ok(None)
    }

    /// Polls the running calls: settles finished ones, and returns an error if one cannot continue.
    fn look(&mut self) -> Result<(), NcclError> {
        while let Some(first) = self.flying.front_mut() {
            if first.begun.is_none() && first.start.has_happened()? {
                first.begun = Some(Instant::now());
            }
            let call = first.outcome.call;
            let happened = first.done.has_happened();
            let is_done = happened.map_err(|error| error.during(call))?;
            // Even of a call that is done: its kernels also end if NCCL fails in the background.
            self.comm
                .is_settled("NCCL's work")
                .map_err(|error| error.during(call))?;
            if is_done {
                self.land()?;
                continue;
            }
            let waited = first.begun.map(|begun| begun.elapsed());
            self.shared.group.health()?;
            // There is no deadline until the data is ready: the call waits for the caller's own work.
            return match waited.filter(|waited| *waited > self.shared.limit()) {
                Some(waited) => Err(deadline(&self.shared, &call.to_string(), waited)),
                None => Ok(()),
            };
        }
        Ok(())
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

    /// Puts work on the stream and waits for it. Returns the device's time for it.
    ///
    /// *Errors*: not done within `limit`.
    pub(crate) fn complete(
        &mut self,
        doing: &'static str,
        limit: Duration,
        put: impl FnOnce(&Comm, &Stream) -> Result<(), NcclError>,
    ) -> Result<Duration, NcclError> {
        let shared = self.shared.clone();
        let (comm, stream) = (&self.comm, &self.stream);
        let begun = Instant::now();
        let start = shared.within("cuEventRecord", || self.mark())?;
        shared.within(doing, || put(comm, stream))?;
        settle_within(&shared, comm, doing, limit)?;
        let done = shared.within("cuEventRecord", || self.mark())?;
        while !shared.within("cuEventQuery", || done.has_happened())? {
            shared.group.health()?;
            shared.within(doing, || comm.is_settled(doing))?;
            let waited = begun.elapsed();
            if waited > limit {
                return Err(deadline(&shared, doing, waited));
            }
            pause(waited);
        }
        done.since(&start)
    }

    /// Ends the communicator: in order, because peers may still be receiving, unless it leaves them.
    fn part(self) {
        let shared = self.shared;
        let in_order = || {
            shared.within("ncclCommFinalize", || self.comm.finalize())?;
            settle(&shared, &self.comm, "ncclCommFinalize")
        };
        let is_finalized = !shared.is_leaving()
            && in_order()
                .inspect_err(|error| {
                    tracing::debug!("NCCL's communicator is aborted at its end: {error}");
                })
                .is_ok();
        let ended = match is_finalized {
            true => shared.within("ncclCommDestroy", || self.comm.destroy()),
            false => shared.within("ncclCommAbort", || self.comm.abort()),
        };
        if let Err(error) = ended {
            tracing::debug!("NCCL's communicator did not end: {error}");
        }
        let memory = (self.flying, self.rooms, self.outgrown, self.adder);
        let held = (memory, self.clock, self.timed, self.stream);
        shared.within(GIVING_BACK, || drop(held));
    }

    /// Reports the failure to all ranks, then aborts the communicator. Returns the first failure.
    pub(crate) fn give_up(self, error: NcclError) -> NcclError {
        let error = give_reason(&self.shared, self.control.as_ref(), error);
        let shared = self.shared;
        if let Err(error) = shared.within("ncclCommAbort", || self.comm.abort()) {
            tracing::debug!("NCCL's communicator did not end: {error}");
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
        let held = (over, self.clock, self.timed, self.stream);
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
fn settle(shared: &Shared, comm: &Comm, what: &'static str) -> Result<(), NcclError> {
    settle_within(shared, comm, what, shared.limit())
}

fn settle_within(
    shared: &Shared,
    comm: &Comm,
    what: &'static str,
    limit: Duration,
) -> Result<(), NcclError> {
    let begun = Instant::now();
    while !shared.within("ncclCommGetAsyncError", || comm.is_settled(what))? {
        shared.group.health()?;
        let waited = begun.elapsed();
        if waited > limit {
            return Err(deadline(shared, what, waited));
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

fn deadline(shared: &Shared, doing: &str, waited: Duration) -> NcclError {
    NcclError::Deadline {
        rank: shared.rank(),
        doing: doing.into(),
        waited,
        source: None,
    }
}
