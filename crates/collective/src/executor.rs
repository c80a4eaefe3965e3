//! Runs operations in the order of their submission, on the communication thread or on the caller's own.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::call::Call;
use crate::engine::{Engine, Runner};
use crate::error::{Error, OpKind};
use crate::flight::{Entry, Partner, Recorder};
use crate::memory::Operand;
use crate::status::{Status, Vigil};
use crate::ticket::{OpTiming, Outcome, Promise, Settled};

/// Operations that may wait in the queue; whoever submits one more waits for room.
pub(crate) const QUEUE_MAX: usize = 1024;

/// Order of execution is order of submission. A synchronous call that finds the queue empty runs on its caller's thread,
/// which saves two changes of thread: most of the time of a small operation.
#[derive(Debug)]
pub(crate) struct Executor {
    status: Arc<Status>,
    recorder: Arc<Recorder>,
    engine: Mutex<Engine>,
    timeout: Duration,
    queue: Mutex<Queue>,
    /// There is work for the communication thread, or its time is over.
    work: Condvar,
    /// There is room in the queue.
    room: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Somebody is executing; others queue up.
    running: bool,
    closed: bool,
    /// Number of the last operation submitted.
    seq: u64,
}

#[derive(Debug)]
struct Job {
    call: Call,
    operand: Operand,
    promise: Promise,
    submitted: Instant,
}

impl Executor {
    pub(crate) fn new(
        status: Arc<Status>,
        recorder: Arc<Recorder>,
        engine: Engine,
        timeout: Duration,
    ) -> Self {
        let (queue, work, room) = (Mutex::default(), Condvar::new(), Condvar::new());
        Self {
            status,
            recorder,
            engine: Mutex::new(engine),
            timeout,
            queue,
            work,
            room,
        }
    }

    /// Queues an operation for the communication thread. *Blocks* while [`QUEUE_MAX`] operations wait.
    pub(crate) fn submit(&self, call: Call, operand: Operand) -> Arc<Outcome> {
        let submitted = Instant::now();
        let full = |queue: &mut Queue| queue.jobs.len() >= QUEUE_MAX;
        let queue = self
            .room
            .wait_while(self.queue(), full)
            .unwrap_or_else(PoisonError::into_inner);
        self.enqueue(queue, call, operand, submitted)
    }

    /// Runs an operation to its end: here when nothing is in front of it, else on the communication thread.
    pub(crate) fn run(&self, mut call: Call, operand: Operand) -> Settled {
        let submitted = Instant::now();
        let mut queue = self.queue();
        if queue.running || !queue.jobs.is_empty() {
            let outcome = self.enqueue(queue, call, operand, submitted);
            return outcome
                .take(None)
                .expect("without a limit the result has come");
        }
        queue.running = true;
        queue.seq += 1;
        call.header.operation.seq = queue.seq;
        drop(queue);
        let turn = Turn(self);
        let settled = self.execute(&call, operand, submitted, Runner::Caller);
        drop(turn);
        settled
    }

    fn enqueue(
        &self,
        mut queue: MutexGuard<'_, Queue>,
        mut call: Call,
        operand: Operand,
        submitted: Instant,
    ) -> Arc<Outcome> {
        queue.seq += 1;
        call.header.operation.seq = queue.seq;
        // What is submitted to a failed group never starts, and would push out what led to the failure.
        if self.status.is_sound() {
            self.recorder.submitted(&self.entry(&call), submitted);
        }
        let (promise, outcome) = Promise::new(self.status.rank);
        queue.jobs.push_back(Job {
            call,
            operand,
            promise,
            submitted,
        });
        drop(queue);
        self.work.notify_one();
        outcome
    }

    /// The communication thread: runs until [`close`](Self::close), and then what is still queued.
    pub(crate) fn serve(&self) {
        let idle = |queue: &mut Queue| queue.running || (queue.jobs.is_empty() && !queue.closed);
        loop {
            let mut queue = self
                .work
                .wait_while(self.queue(), idle)
                .unwrap_or_else(PoisonError::into_inner);
            let Some(job) = queue.jobs.pop_front() else {
                return;
            };
            queue.running = true;
            drop(queue);
            self.room.notify_one();
            let turn = Turn(self);
            let settled = self.execute(&job.call, job.operand, job.submitted, Runner::CommThread);
            drop(turn);
            job.promise.keep(settled);
        }
    }

    /// Ends the communication thread once the queue is empty. After a failure that is at once.
    pub(crate) fn close(&self) {
        self.queue().closed = true;
        self.work.notify_all();
    }

    /// Number of the last operation submitted.
    pub(crate) fn last(&self) -> u64 {
        self.queue().seq
    }

    fn execute(
        &self,
        call: &Call,
        mut operand: Operand,
        submitted: Instant,
        runner: Runner,
    ) -> Settled {
        let status = &*self.status;
        let started = Instant::now();
        let seq = call.header.operation.seq;
        let vigil = Vigil::new(status, call.header.operation, started, self.timeout);
        let result = status.health().and_then(|()| {
            self.recorder.started(&self.entry(call), submitted, started);
            // A poisoned lock means that an engine panicked: its peers are in no known state.
            let mut engine = self
                .engine
                .lock()
                .map_err(|_| Error::ThreadGone { rank: status.rank })?;
            engine.execute(call, &operand, &vigil, runner)
        });
        let settled = match result {
            Ok(peers_ready) => {
                let finished = Instant::now();
                self.recorder.arrived(seq, peers_ready);
                self.recorder.finished(seq, finished);
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
                operand.lose();
                self.recorder.failed(seq, Instant::now());
                let first = status.fail(error);
                status.announce();
                Err(first)
            }
        };
        // Only now: until the peers know of a failure, this rank counts as one that waits.
        vigil.retract();
        settled
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
            step: (kind == OpKind::AllReduce && header.operation.bucket.is_some())
                .then_some(u64::from(header.mark)),
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

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to execute; given back even by a panic.
struct Turn<'a>(&'a Executor);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut queue = self.0.queue();
        queue.running = false;
        let more = !queue.jobs.is_empty() || queue.closed;
        drop(queue);
        if more {
            self.0.work.notify_all();
        }
    }
}
