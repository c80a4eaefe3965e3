//! Streams: queues of work, each with its own thread, and marks by which they wait for each other.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use super::Device;
use crate::code::Code;
use crate::machine::Kind;
use crate::process::{Process, lock};

/// A queue and its thread.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) device: Arc<Device>,
    /// Whether it is not ordered with the default stream.
    pub(crate) is_apart: bool,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    work: VecDeque<Work>,
    is_busy: bool,
    is_closed: bool,
    /// Its thread has ended; later work is dropped.
    is_over: bool,
}

/// A piece of a stream's work.
pub(crate) enum Work {
    /// Runs a function, unless the context's work has failed.
    Do(Kind, Box<dyn FnOnce() -> Result<(), Code> + Send>),
    /// Waits for a mark.
    Wait(Arc<Mark>),
    /// Reaches a mark.
    Hit(Arc<Mark>),
}

/// A point in the work of one or several streams.
#[derive(Debug)]
pub(crate) struct Mark {
    state: Mutex<Reached>,
    changed: Condvar,
}

#[derive(Debug)]
struct Reached {
    left: usize,
    at: Option<Instant>,
}

/// An event: the last recorded mark.
#[derive(Debug, Default)]
pub(crate) struct Event {
    pub(crate) mark: Mutex<Option<Arc<Mark>>>,
    /// Whether its time is kept.
    pub(crate) is_timed: bool,
}

impl fmt::Debug for Work {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Do(kind, _) => write!(formatter, "Do({kind:?})"),
            Self::Wait(_) => formatter.write_str("Wait"),
            Self::Hit(_) => formatter.write_str("Hit"),
        }
    }
}

impl Work {
    pub(crate) fn new(kind: Kind, run: impl FnOnce() -> Result<(), Code> + Send + 'static) -> Self {
        Self::Do(kind, Box::new(run))
    }
}

impl Mark {
    /// A mark that this many streams must reach.
    pub(crate) fn after(streams: usize) -> Self {
        let at = (streams == 0).then(Instant::now);
        Self {
            state: Mutex::new(Reached { left: streams, at }),
            changed: Condvar::new(),
        }
    }

    fn hit(&self) {
        let mut state = lock(&self.state);
        state.left = state.left.saturating_sub(1);
        if state.left == 0 {
            state.at.get_or_insert_with(Instant::now);
            self.changed.notify_all();
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.at().is_some()
    }

    /// When it was reached.
    pub(crate) fn at(&self) -> Option<Instant> {
        lock(&self.state).at
    }

    pub(crate) fn wait(&self) {
        let state = lock(&self.state);
        drop(self.changed.wait_while(state, |state| state.at.is_none()));
    }
}

impl Event {
    /// The last recorded mark.
    pub(crate) fn mark(&self) -> Option<Arc<Mark>> {
        lock(&self.mark).clone()
    }
}

impl Stream {
    pub(super) fn start(device: Arc<Device>, is_apart: bool) -> Arc<Self> {
        let queue = Mutex::new(Queue::default());
        let stream = Arc::new(Self {
            device,
            is_apart,
            queue,
            changed: Condvar::new(),
        });
        let worker = stream.clone();
        let name = format!("fake-cuda{}/stream", stream.device.ordinal);
        let started = std::thread::Builder::new()
            .name(name)
            .spawn(move || worker.run());
        // Never joined: as on a device, work that never ends blocks only its waiters.
        drop(started.expect("a thread for a stream"));
        stream
    }

    pub(crate) fn push(&self, work: Work) {
        let mut queue = lock(&self.queue);
        if queue.is_over {
            drop(queue);
            // A caller that found the stream before its end must not wait for it.
            if let Work::Hit(mark) = work {
                mark.hit();
            }
            return;
        }
        queue.work.push_back(work);
        drop(queue);
        self.changed.notify_all();
    }

    /// A mark after all its work so far.
    pub(crate) fn mark(&self) -> Arc<Mark> {
        let mark = Arc::new(Mark::after(1));
        self.push(Work::Hit(mark.clone()));
        mark
    }

    pub(crate) fn is_idle(&self) -> bool {
        let queue = lock(&self.queue);
        queue.work.is_empty() && !queue.is_busy
    }

    /// Ends its thread after all its work.
    pub(crate) fn close(&self) {
        lock(&self.queue).is_closed = true;
        self.changed.notify_all();
    }

    fn run(&self) {
        while let Some(work) = self.next() {
            match work {
                Work::Do(kind, work) => self.work(kind, work),
                Work::Wait(mark) => mark.wait(),
                Work::Hit(mark) => mark.hit(),
            }
        }
    }

    fn next(&self) -> Option<Work> {
        let mut queue = lock(&self.queue);
        queue.is_busy = false;
        loop {
            if let Some(work) = queue.work.pop_front() {
                queue.is_busy = true;
                return Some(work);
            }
            if queue.is_closed {
                queue.is_over = true;
                return None;
            }
            queue = self
                .changed
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn work(&self, kind: Kind, work: Box<dyn FnOnce() -> Result<(), Code> + Send>) {
        let process = Process::here();
        process.wait_until_let_go();
        let machine = process.machine().unwrap_or_default();
        std::thread::sleep(machine.delay(kind));
        if self.device.check().is_ok()
            && let Err(code) = work()
        {
            self.device.fail(code);
        }
    }
}
