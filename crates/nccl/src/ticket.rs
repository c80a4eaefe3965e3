//! A running call's receipt.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::call::CallName;
use crate::driver::Context;
use crate::error::NcclError;
use crate::pool::PooledEvent;

/// When the stages of a call were reached on this rank.
///
/// `started` and `finished` are the device's, moved to the host's clock: they are right to about the time that a question
/// to the driver takes, some 10 microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallTiming {
    /// The caller handed it over.
    pub submitted: Instant,
    /// The driver had all of it: its data's fence was over, NCCL had put its kernels on the stream.
    pub launched: Instant,
    /// The device began with it: its data was ready, and the calls before it were over.
    pub started: Instant,
    /// The device was done with it.
    pub finished: Instant,
}

/// A call on its way. It runs whether or not anybody waits.
#[derive(Clone)]
pub struct Ticket(pub(crate) Arc<Outcome>);

impl Ticket {
    /// What it is the ticket of.
    pub fn call(&self) -> CallName {
        self.0.call
    }

    /// Waits on the host until the call is over.
    ///
    /// *Blocks*: until the device is done or the call has failed: the group's timeout and a grace from when the device
    /// began with it. *Errors*: the communicator's first failure, whichever call met it.
    pub fn wait(&self) -> Result<CallTiming, NcclError> {
        self.0.wait()
    }

    /// How the call ended, if it has.
    pub fn poll(&self) -> Option<Result<CallTiming, NcclError>> {
        self.0.lock().settled.clone()
    }

    /// Lets all work that the device's primary context is given from now on wait for this call, on the device. Where the
    /// driver cannot do that, for CUDA before 12.5, the host waits.
    ///
    /// The call, and with it what was ordered behind it, may still fail: look at [`wait`](Self::wait) or
    /// [`poll`](Self::poll) before its numbers leave the device.
    ///
    /// *Blocks*: until the driver has the call, which is soon unless its data is awaited with a fence.
    pub fn order_after(&self) -> Result<(), NcclError> {
        let event = match self.0.launched()? {
            // It is over, and so is what comes before anything from now on.
            None => return Ok(()),
            Some(event) => event,
        };
        let context: &Context = event.context();
        if context.driver().has_context_events() {
            return context.wait(&event);
        }
        self.wait().map(drop)
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket")
            .field("call", &self.0.call)
            .field("settled", &self.0.lock().settled)
            .finish()
    }
}

/// How a call ended.
pub(crate) type Settled = Result<CallTiming, NcclError>;

/// Where the result of a call is left for whoever holds the ticket.
pub(crate) struct Outcome {
    pub(crate) call: CallName,
    pub(crate) submitted: Instant,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Happens when the device is done; there once the driver has the call.
    done: Option<Arc<PooledEvent>>,
    settled: Option<Settled>,
}

impl Outcome {
    pub(crate) fn new(call: CallName) -> Arc<Self> {
        Arc::new(Self {
            call,
            submitted: Instant::now(),
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The driver has the call; `done` happens when it is over.
    pub(crate) fn launch(&self, done: Arc<PooledEvent>) {
        self.lock().done = Some(done);
        self.changed.notify_all();
    }

    /// The first settlement counts.
    pub(crate) fn settle(&self, settled: Settled) {
        let mut state = self.lock();
        state.settled.get_or_insert(settled);
        // The event goes back to where others take it from.
        let done = state.done.take();
        drop(state);
        drop(done);
        self.changed.notify_all();
    }

    fn wait(&self) -> Settled {
        let mut state = self.lock();
        loop {
            if let Some(settled) = &state.settled {
                return settled.clone();
            }
            let woken = self.changed.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The event of a call that the driver has; none when it is over.
    fn launched(&self) -> Result<Option<Arc<PooledEvent>>, NcclError> {
        let mut state = self.lock();
        loop {
            match (&state.settled, &state.done) {
                (Some(settled), _) => return settled.clone().map(|_| None),
                (None, Some(done)) => return Ok(Some(done.clone())),
                (None, None) => {}
            }
            let woken = self.changed.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// What is known of a call that is over.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stages {
    pub(crate) launched: Instant,
    /// The device's, on the host's clock as far as it is known.
    pub(crate) started: Instant,
    pub(crate) took: Duration,
}

impl Stages {
    /// With the device's moments between those that the host is sure of.
    pub(crate) fn between(self, submitted: Instant, seen: Instant) -> CallTiming {
        let within = |moment: Instant| moment.clamp(submitted, seen.max(submitted));
        CallTiming {
            submitted,
            launched: self.launched,
            started: within(self.started),
            finished: within(self.started + self.took),
        }
    }
}
