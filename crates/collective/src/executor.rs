//! Runs operations in the order of their submission, on the communication thread or on a caller's own.

mod queue;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use self::queue::{Job, Next, Queue, Times};
use crate::call::Call;
use crate::engine::{Begun, Engine};
use crate::error::{Error, OpKind};
use crate::flight::{Entry, Partner, Recorder};
use crate::memory::Operand;
use crate::plan::INLINE_BYTES_MAX;
use crate::runner::Runner;
use crate::status::{OpWait, Status};
use crate::ticket::{OpTiming, Outcome, Promise, Settled};

/// Interval of looks while all operations end.
const IDLE_POLL: Duration = Duration::from_micros(100);

/// Operations that may wait in the queue; a thread that submits one more waits for room.
pub(crate) const QUEUE_MAX: usize = 1024;

/// Order of execution is order of submission: the executing thread takes the front of the queue.
///
/// Two changes of thread are most of the time of a small operation, so a thread that would only wait executes instead:
///
/// - A synchronous call runs on its caller's thread, and what is queued in front of it does too.
/// - A thread that waits for a ticket runs the operations that are not taken up yet, up to the ticket's own.
/// - A small asynchronous call with nothing in front of it is [begun](Engine::begin) by its caller, after which peers need
///   nothing more of this rank. The rest is done by the first to come: the thread that waits for the ticket, the one that makes the next
///   call, or the communication thread, which looks for it [within a millisecond](queue::PATIENCE).
#[derive(Debug)]
pub(crate) struct Executor {
    status: Arc<Status>,
    recorder: Arc<Recorder>,
    /// In nanoseconds.
    timeout: AtomicU64,
    /// Whether the engine can begin small calls.
    begins: bool,
    queue: Mutex<Queue>,
    /// There is work for the communication thread, or its time is over.
    work: Condvar,
    /// There is room in the queue.
    room: Condvar,
}

impl Executor {
    pub(crate) fn new(
        status: Arc<Status>,
        recorder: Arc<Recorder>,
        engine: Engine,
        timeout: Duration,
    ) -> Self {
        Self {
            status,
            recorder,
            begins: engine.begins(),
            timeout: AtomicU64::new(nanos(timeout)),
            queue: Mutex::new(Queue::of(engine)),
            work: Condvar::new(),
            room: Condvar::new(),
        }
    }

    /// Deadline of each operation that starts from now on.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout.load(Ordering::Relaxed))
    }

    pub(crate) fn set_timeout(&self, timeout: Duration) {
        self.timeout.store(nanos(timeout), Ordering::Relaxed);
    }

    /// Begins an operation here when peers need no more of this rank for it, else queues it for the communication thread.
    /// The result is its number and where its result will be left. *Blocks* while [`QUEUE_MAX`] operations wait.
    pub(crate) fn submit(&self, mut call: Call, operand: Operand) -> (u64, Arc<Outcome>) {
        let submitted = Instant::now();
        let bytes = call.header.total.saturating_mul(call.element_bytes());
        let small = self.begins && bytes <= INLINE_BYTES_MAX && self.status.is_sound();
        if small {
            self.finish_met();
        }
        let mut queue = self.queue.lock();
        if small && !queue.is_running() && queue.jobs.is_empty() {
            let seq = queue.number(&mut call);
            let turn = self.turn(queue);
            return (seq, self.begin(turn, call, operand, submitted));
        }
        while queue.jobs.len() >= QUEUE_MAX {
            queue.crowd += 1;
            self.room.wait(&mut queue);
            queue.crowd -= 1;
        }
        let seq = queue.number(&mut call);
        let (job, outcome) = self.job(call, operand, Times::of(submitted));
        queue.jobs.push_back(job);
        // The executing thread looks at the queue afterwards.
        let wake = !queue.is_running();
        drop(queue);
        if wake {
            self.work.notify_one();
        }
        (seq, outcome)
    }

    /// Runs an operation to its end.
    pub(crate) fn run(&self, mut call: Call, operand: Operand) -> Settled {
        let submitted = Instant::now();
        let mut queue = self.queue.lock();
        let seq = queue.number(&mut call);
        if queue.is_running() || !queue.jobs.is_empty() {
            let (job, outcome) = self.job(call, operand, Times::of(submitted));
            queue.jobs.push_back(job);
            drop(queue);
            return self.settle(seq, &outcome);
        }
        let mut turn = self.turn(queue);
        let times = Times::of(submitted);
        turn.execute(&call, operand, times, submitted, Runner::Caller)
    }

    /// Waits for the end of operation `seq`, whose result is left in `outcome`; executes what is queued up to it when
    /// nobody else does.
    pub(crate) fn settle(&self, seq: u64, outcome: &Outcome) -> Settled {
        if let Some(settled) = outcome.take_now() {
            return settled;
        }
        let mut queue = self.queue.lock();
        if queue.is_running() {
            drop(queue);
            return outcome.wait();
        }
        if let Some(mut job) = queue.take_until(seq) {
            let mut turn = self.turn(queue);
            loop {
                let own = job.seq() == seq;
                let started = job.times.started();
                let settled =
                    turn.execute(&job.call, job.operand, job.times, started, Runner::Caller);
                if own {
                    job.promise.forget();
                    return settled;
                }
                job.promise.keep(settled);
                let mut queue = self.queue.lock();
                let Some(next) = queue.take_until(seq) else {
                    break;
                };
                self.leave(queue);
                job = next;
            }
        }
        outcome.wait()
    }

    /// Finishes the operation in front if that waits for nobody. *Blocks*: no.
    pub(crate) fn finish_met(&self) {
        let mut queue = self.queue.lock();
        if queue.has_met()
            && let Some(job) = queue.jobs.pop_front()
        {
            self.turn(queue).complete(job, Runner::Caller);
        }
    }

    /// The communication thread: runs until [`close`](Self::close), and then what is still queued.
    pub(crate) fn serve(&self) {
        let mut seen = 0;
        let mut queue = self.queue.lock();
        loop {
            match queue.next(Instant::now(), seen) {
                Next::Run => {
                    let Some(job) = queue.jobs.pop_front() else {
                        continue;
                    };
                    self.turn(queue).complete(job, Runner::CommThread);
                    queue = self.queue.lock();
                }
                Next::Sleep => {
                    queue.looks = false;
                    self.work.wait(&mut queue);
                }
                Next::Look(after) => {
                    (queue.looks, seen) = (true, queue.begun);
                    self.work.wait_for(&mut queue, after);
                }
                Next::End => return,
            }
        }
    }

    /// Ends the communication thread once the queue is empty. After a failure that is at once.
    pub(crate) fn close(&self) {
        self.queue.lock().closed = true;
        self.work.notify_all();
    }

    /// Waits until no operation is left, for at most `limit`; whether that is so. After a failure it takes as long as the one that
    /// runs needs to notice.
    pub(crate) fn is_idle_within(&self, limit: Duration) -> bool {
        let started = Instant::now();
        loop {
            let queue = self.queue.lock();
            if !queue.is_running() && queue.jobs.is_empty() {
                return true;
            }
            drop(queue);
            if started.elapsed() >= limit {
                return false;
            }
            std::thread::sleep(IDLE_POLL);
        }
    }

    /// Frees the memory that operations keep for the next ones, once they have [ended](Self::is_idle_within).
    pub(crate) fn release(&self) {
        if let Some(engine) = self.queue.lock().engine() {
            engine.release(self.status.generation());
        }
    }

    /// Operations that wait.
    pub(crate) fn queued(&self) -> usize {
        self.queue.lock().jobs.len()
    }

    /// Number of the last operation submitted.
    pub(crate) fn last(&self) -> u64 {
        self.queue.lock().seq
    }

    /// Begins an operation that nothing is in front of.
    fn begin(
        &self,
        mut turn: Turn<'_>,
        call: Call,
        operand: Operand,
        submitted: Instant,
    ) -> Arc<Outcome> {
        let started = Instant::now();
        let engine = turn.engine.as_mut();
        let begun = engine.map_or(Begun::No, |engine| engine.begin(&call, &operand));
        let times = Times {
            submitted,
            begun: (begun != Begun::No).then_some(started),
        };
        if times.begun.is_some() {
            self.recorder
                .started(&self.entry(&call), submitted, started);
        }
        if begun == Begun::Met {
            return Outcome::of(turn.execute(&call, operand, times, started, Runner::Caller));
        }
        let (job, outcome) = self.job(call, operand, times);
        let mut queue = self.queue.lock();
        queue.begun += u64::from(times.begun.is_some());
        // Others may have queued up since, behind it.
        queue.jobs.push_front(job);
        drop(queue);
        drop(turn);
        outcome
    }

    /// A numbered call that waits in the queue.
    fn job(&self, call: Call, operand: Operand, times: Times) -> (Job, Arc<Outcome>) {
        // What is submitted to a failed group never starts, and would push out what led to the failure. What was begun is
        // recorded already.
        if self.status.is_sound() && times.begun.is_none() {
            self.recorder.submitted(&self.entry(&call), times.submitted);
        }
        let (promise, outcome) = Promise::new(self.status.rank);
        let job = Job {
            call,
            operand,
            promise,
            times,
        };
        (job, outcome)
    }

    /// Takes the right to execute, which nobody has, and leaves the queue.
    fn turn(&self, mut queue: MutexGuard<'_, Queue>) -> Turn<'_> {
        let engine = queue.take_engine();
        self.leave(queue);
        Turn {
            executor: self,
            engine,
        }
    }

    /// Leaves the queue, which may have become shorter.
    fn leave(&self, queue: MutexGuard<'_, Queue>) {
        let crowd = queue.crowd;
        drop(queue);
        if crowd > 0 {
            self.room.notify_one();
        }
    }

    /// What the flight recorder keeps of a call.
    fn entry(&self, call: &Call) -> Entry {
        let header = &call.header;
        let kind = header.operation.kind;
        Entry {
            operation: header.operation,
            reduce: header.reduce,
            dtype: header.dtype,
            elements: header.total,
            bytes: header.total * call.element_bytes(),
            step: (header.operation.bucket).map(|_| u64::from(header.mark)),
            partner: match kind {
                OpKind::Broadcast
                | OpKind::BroadcastBytes
                | OpKind::Reduce
                | OpKind::Gather
                | OpKind::Scatter => Partner::Root(header.mark),
                _ => Partner::All,
            },
            leaves: header.reduce.map_or(0, |_| header.leaves),
            algorithm: header.algorithm,
        }
    }
}

/// The right to execute, which is having the engine; given back even by a panic.
struct Turn<'a> {
    executor: &'a Executor,
    engine: Option<Box<Engine>>,
}

impl Turn<'_> {
    fn complete(&mut self, job: Job, runner: Runner) {
        let started = job.times.started();
        let settled = self.execute(&job.call, job.operand, job.times, started, runner);
        job.promise.keep(settled);
    }

    /// Runs a call that this rank joins, or joined when its caller began it, at `started`.
    fn execute(
        &mut self,
        call: &Call,
        mut operand: Operand,
        times: Times,
        started: Instant,
        runner: Runner,
    ) -> Settled {
        let executor = self.executor;
        let (status, recorder) = (&*executor.status, &*executor.recorder);
        let Times { submitted, begun } = times;
        let seq = call.header.operation.seq;
        let wait = OpWait::new(status, call.header.operation, started, executor.timeout());
        let ready = match begun {
            // Its peers may all have come before something else failed.
            Some(_) => Ok(()),
            None => status.health(),
        };
        let result = ready.and_then(|()| {
            if begun.is_none() {
                recorder.started(&executor.entry(call), submitted, started);
            }
            let engine = self.engine.as_mut();
            let engine = engine.ok_or(Error::ThreadGone { rank: status.rank })?;
            engine.execute(call, &operand, &wait, runner)
        });
        let settled = match result {
            Ok(peers_ready) => {
                // The clock takes a tenth of the smallest call each time.
                let finished = Instant::now();
                let peers_ready = peers_ready.unwrap_or(finished);
                recorder.finished(seq, peers_ready, finished);
                Ok((
                    operand.into_region(),
                    OpTiming {
                        submitted,
                        started,
                        peers_ready,
                        finished,
                    },
                ))
            }
            Err(error) => {
                operand.lose(status.generation());
                recorder.failed(seq, Instant::now());
                let first = status.fail(error);
                status.announce();
                Err(first)
            }
        };
        // Only now: until the peers know of a failure, this rank counts as one that waits.
        wait.retract();
        settled
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Some(engine) = self.engine.take() else {
            return;
        };
        let mut queue = self.executor.queue.lock();
        queue.give_back(engine);
        let wake = queue.needs_thread();
        drop(queue);
        if wake {
            self.executor.work.notify_all();
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
