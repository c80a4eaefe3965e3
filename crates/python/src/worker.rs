//! A thread that runs jobs in the order of their submission.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Jobs that may wait; a thread that submits one more waits for room.
const QUEUE_MAX: usize = 1024;

/// Lets no panic through.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// A thread that is started by its first job.
#[derive(Default)]
pub(crate) struct Worker {
    name: String,
    queue: Arc<Queue>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// A job runs, on the thread or on a caller's own.
    running: bool,
    closed: bool,
}

impl State {
    fn is_idle(&self) -> bool {
        !self.running && self.jobs.is_empty()
    }
}

impl Worker {
    pub(crate) fn new(name: String) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }

    /// Queues a job for the thread.
    ///
    /// *Blocks*: while 1024 jobs wait. *Errors*: the thread does not start, or has ended.
    pub(crate) fn submit(&self, job: Job) -> io::Result<()> {
        self.start()?;
        let mut state = self.queue.state.lock();
        let full = |state: &mut State| state.jobs.len() >= QUEUE_MAX && !state.closed;
        self.queue.changed.wait_while(&mut state, full);
        if state.closed {
            return Err(io::Error::other("the group has been destroyed"));
        }
        state.jobs.push_back(job);
        drop(state);
        self.queue.changed.notify_all();
        Ok(())
    }

    /// Runs `job` on this thread if nothing is in front of it: two changes of thread take several times as long as a small operation.
    pub(crate) fn run_if_idle<R>(&self, job: impl FnOnce() -> R) -> Option<R> {
        let mut state = self.queue.state.lock();
        if !state.is_idle() {
            return None;
        }
        state.running = true;
        drop(state);
        let turn = Turn(&self.queue);
        let result = job();
        drop(turn);
        Some(result)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.queue.state.lock().is_idle()
    }

    /// Waits until no job is left, for at most `limit`; whether that is so.
    pub(crate) fn is_idle_within(&self, limit: Duration) -> bool {
        let mut state = self.queue.state.lock();
        let busy = |state: &mut State| !state.is_idle();
        self.queue.changed.wait_while_for(&mut state, busy, limit);
        state.is_idle()
    }

    /// Ends the thread when the jobs that it has are done, and waits for that.
    pub(crate) fn close(&self) {
        self.queue.state.lock().closed = true;
        self.queue.changed.notify_all();
        if let Some(thread) = self.thread.lock().take() {
            // Jobs let no panic through.
            let _ = thread.join();
        }
    }

    fn start(&self) -> io::Result<()> {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let queue = self.queue.clone();
            let builder = std::thread::Builder::new().name(self.name.clone());
            *thread = Some(builder.spawn(move || queue.serve())?);
        }
        Ok(())
    }
}

impl Queue {
    fn serve(&self) {
        let mut state = self.state.lock();
        loop {
            if state.running || state.jobs.is_empty() && !state.closed {
                self.changed.wait(&mut state);
                continue;
            }
            let Some(job) = state.jobs.pop_front() else {
                return;
            };
            state.running = true;
            drop(state);
            let turn = Turn(self);
            job();
            drop(turn);
            state = self.state.lock();
        }
    }
}

/// The right to run a job; given back even by a panic.
struct Turn<'a>(&'a Queue);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.state.lock().running = false;
        self.0.changed.notify_all();
    }
}
