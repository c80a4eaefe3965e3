//! A submitted call's receipt, and the works whose end somebody wants to be told of.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::failure::Failure;

/// How a call ended: for a receive with the rank that sent, in the group's number.
pub(crate) type Outcome = Result<Option<usize>, Failure>;

/// A call on its way.
#[derive(Debug, Default)]
pub(crate) struct Work {
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Debug, Default)]
struct State {
    outcome: Option<Outcome>,
    /// Where the work's number goes when it is over.
    listener: Option<(&'static Finished, u64)>,
}

impl Work {
    /// Of a call that is over.
    pub(crate) fn over(outcome: Outcome) -> Arc<Self> {
        let work = Self::default();
        work.settle(outcome);
        Arc::new(work)
    }

    pub(crate) fn settle(&self, outcome: Outcome) {
        let mut state = self.state.lock();
        state.outcome = Some(outcome);
        let listener = state.listener.take();
        drop(state);
        self.over.notify_all();
        if let Some((finished, handle)) = listener {
            finished.push(handle);
        }
    }

    /// How the call ended, if that was within `limit`; without a limit it ends by the deadline of the group.
    pub(crate) fn wait(&self, limit: Option<Duration>) -> Option<Outcome> {
        let mut state = self.state.lock();
        let pending = |state: &mut State| state.outcome.is_none();
        match limit {
            Some(limit) => {
                self.over.wait_while_for(&mut state, pending, limit);
            }
            None => self.over.wait_while(&mut state, pending),
        }
        state.outcome.clone()
    }

    /// Puts the work's number among the finished ones when it is over, which may be now.
    pub(crate) fn tell(&self, finished: &'static Finished, handle: u64) {
        let mut state = self.state.lock();
        match state.outcome {
            Some(_) => {
                drop(state);
                finished.push(handle);
            }
            None => state.listener = Some((finished, handle)),
        }
    }
}

/// Numbers of works that are over. Bounded by the works that there are.
#[derive(Debug, Default)]
pub(crate) struct Finished {
    handles: Mutex<VecDeque<u64>>,
    came: Condvar,
}

impl Finished {
    pub(crate) fn push(&self, handle: u64) {
        self.handles.lock().push_back(handle);
        self.came.notify_one();
    }

    /// The oldest number, if there is one within `limit`.
    pub(crate) fn next(&self, limit: Duration) -> Option<u64> {
        let mut handles = self.handles.lock();
        self.came
            .wait_while_for(&mut handles, |handles| handles.is_empty(), limit);
        handles.pop_front()
    }
}
