//! The ticket of a submitted call.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use crate::call::CallName;
use crate::driver::Context;
use crate::error::NcclError;
use crate::pool::PooledEvent;
use crate::shared::unpoisoned;

/// When the stages of a call were reached on this rank.
///
/// `started` and `finished` are device times converted to the host's clock, accurate to about the duration of a driver call,
/// 10 µs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallTiming {
    /// The caller submitted it.
    pub submitted: Instant,
    /// The driver had all of it: its data was fenced, and NCCL's kernels were on the stream.
    pub launched: Instant,
    /// The device began: the data was ready, and earlier calls were over.
    pub started: Instant,
    /// The device finished.
    pub finished: Instant,
}

/// A submitted call. It runs whether or not anyone waits.
#[derive(Clone)]
pub struct Ticket(pub(crate) Arc<Outcome>);

impl Ticket {
    /// The call.
    pub fn call(&self) -> CallName {
        self.0.call
    }

    /// Waits on the host until the call is over.
    ///
    /// *Blocks*: until the device is done or the call has failed, at most the group's timeout and a grace after the device
    /// began.
    ///
    /// *Errors*: the communicator's first failure, from any call.
    pub fn wait(&self) -> Result<CallTiming, NcclError> {
        self.0.wait()
    }

    /// The result, if the call is over.
    pub fn poll(&self) -> Option<Result<CallTiming, NcclError>> {
        self.0.lock().settled.clone()
    }

    /// Makes all later work of the device's primary context wait for this call, on the device. With a driver before CUDA 12.5,
    /// the host waits instead.
    ///
    /// The call may still fail, and the work behind it would then use wrong data: check [`wait`](Self::wait) or
    /// [`poll`](Self::poll) before results leave the device.
    ///
    /// *Blocks*: until the driver has the call, which is soon unless its data is awaited with a fence.
    pub fn order_after(&self) -> Result<(), NcclError> {
        // Without an event the call is over, and precedes all later work.
        let Some(event) = self.0.launched()? else {
            return Ok(());
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

/// A call's result, shared with its tickets.
pub(crate) struct Outcome {
    pub(crate) call: CallName,
    pub(crate) submitted: Instant,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Happens when the device is done; set once the driver has the call.
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
        unpoisoned(self.state.lock())
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
        let is_open = |state: &mut State| state.settled.is_none();
        let state = unpoisoned(self.changed.wait_while(self.lock(), is_open));
        let settled = state.settled.clone();
        settled.expect("the wait is for a settlement")
    }

    /// The event of a call that the driver has; none when it is over.
    fn launched(&self) -> Result<Option<Arc<PooledEvent>>, NcclError> {
        let is_queued = |state: &mut State| state.settled.is_none() && state.done.is_none();
        let state = unpoisoned(self.changed.wait_while(self.lock(), is_queued));
        match &state.settled {
            Some(settled) => settled.clone().map(|_| None),
            None => Ok(state.done.clone()),
        }
    }
}
