//! What callers, the thread that calls NCCL and its watchdog have in common: orders, open calls, the first failure.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use paceline_collective::ProcessGroup;

use crate::call::{CallName, DeviceBuffer, Float, Kind, Label, TreeSum};
use crate::communicator::Joined;
use crate::error::NcclError;
use crate::nccl::Ender;
use crate::pool::PooledEvent;
use crate::ticket::Outcome;

/// The share of the grace after a failure in which a function of the driver may still return by itself.
const PATIENCE_SHARE: u32 = 5;

/// Most calls that wait to be taken up; whoever brings one more waits.
const QUEUED_MAX: usize = 1024;

/// What a call is to do.
#[derive(Debug)]
pub(crate) enum Work {
    AllReduce(Float),
    Broadcast { root: usize },
    AllGather,
    TreeSum(TreeSum),
}

impl Work {
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::AllReduce(_) => Kind::AllReduce,
            Self::Broadcast { .. } => Kind::Broadcast,
            Self::AllGather => Kind::AllGather,
            Self::TreeSum(_) => Kind::TreeSum,
        }
    }
}

/// When the data of a call is ready, seen from the thread that calls NCCL.
pub(crate) enum Ready {
    Now,
    /// When this event has happened.
    Event(PooledEvent),
    /// When this returns.
    Fence(Box<dyn FnOnce() -> Result<(), String> + Send>),
}

/// Why a call is not even handed over.
pub(crate) enum Refused {
    /// Its arguments cannot work.
    Wrong(String),
    /// The driver refused to say when its data is ready.
    Driver(NcclError),
}

/// A call on its way to the thread.
pub(crate) struct Order {
    pub(crate) work: Work,
    pub(crate) buffer: DeviceBuffer,
    pub(crate) ready: Ready,
    pub(crate) outcome: Arc<Outcome>,
}

/// A function of another library that this rank is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Foreign {
    pub(crate) function: &'static str,
    pub(crate) since: Instant,
    /// Whether it has a deadline although all is well: a fence waits for the caller's own work, which has none.
    pub(crate) limited: bool,
}

impl Foreign {
    /// Whether NCCL is not called in there, nor within a group of its calls.
    fn is_of_driver(&self) -> bool {
        self.function.starts_with("cu")
    }
}

/// One rank's side of a communicator, as far as more than one thread sees it.
pub(crate) struct Shared {
    pub(crate) group: ProcessGroup,
    pub(crate) grace: Duration,
    state: Mutex<State>,
    /// Orders, room for orders, a failure or an end.
    changed: Condvar,
    /// What the watchdog sleeps on.
    watched: Condvar,
    /// What the watchdog ends the communicator with, where its thread cannot.
    ender: OnceLock<Ender>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Order>,
    /// Not over yet, in order.
    open: VecDeque<Arc<Outcome>>,
    /// Number of the last call.
    seq: u64,
    /// Nothing comes any more.
    closing: bool,
    /// The thread is at its end.
    ended: bool,
    failure: Option<(NcclError, Instant)>,
    /// When the watchdog first saw that the group had failed.
    noticed: Option<Instant>,
    wedged: bool,
    /// A thread is about to end the communicator from outside.
    ending: bool,
    foreign: Option<Foreign>,
    joining: Joining,
}

/// How far the thread has come.
#[derive(Default)]
enum Joining {
    #[default]
    Begun,
    Over(Box<Result<Joined, NcclError>>),
    /// Whoever waited for it has it.
    Told,
}

impl Shared {
    pub(crate) fn new(group: &ProcessGroup, grace: Duration) -> Arc<Self> {
        Arc::new(Self {
            group: group.clone(),
            grace,
            state: Mutex::default(),
            changed: Condvar::new(),
            watched: Condvar::new(),
            ender: OnceLock::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn rank(&self) -> usize {
        self.group.rank()
    }

    /// How long a wait for NCCL may take: the group's own errors, which name the rank to blame, come before that.
    pub(crate) fn limit(&self) -> Duration {
        self.group.timeout() + self.grace
    }

    /// The first failure, if there is one.
    pub(crate) fn failure(&self) -> Option<NcclError> {
        self.lock().failure.as_ref().map(|(error, _)| error.clone())
    }

    pub(crate) fn is_wedged(&self) -> bool {
        self.lock().wedged
    }

    /// Hands a call over, or settles it with the first failure.
    ///
    /// *Blocks*: only while [`QUEUED_MAX`] calls are queued.
    pub(crate) fn submit(
        &self,
        work: Work,
        label: Label,
        buffer: DeviceBuffer,
        ready: Result<Ready, Refused>,
    ) -> Arc<Outcome> {
        let mut state = self.lock();
        while state.queue.len() >= QUEUED_MAX && state.failure.is_none() {
            let woken = self.changed.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
        state.seq += 1;
        let call = CallName {
            kind: work.kind(),
            seq: state.seq,
            label,
        };
        let outcome = Outcome::new(call);
        if let Some((error, _)) = &state.failure {
            outcome.settle(Err(error.clone()));
            return outcome;
        }
        let error = match ready {
            Ok(ready) => {
                state.open.push_back(outcome.clone());
                state.queue.push_back(Order {
                    work,
                    buffer,
                    ready,
                    outcome: outcome.clone(),
                });
                drop(state);
                self.changed.notify_all();
                self.watched.notify_all();
                return outcome;
            }
            Err(Refused::Driver(error)) => error.during(call),
            Err(Refused::Wrong(reason)) => NcclError::Call {
                rank: self.rank(),
                call,
                reason,
            },
        };
        drop(state);
        // The peers will issue it: the communicator is out of step.
        self.group.abort_over(error.culprit(), &error.to_string());
        outcome.settle(Err(self.fail(error)));
        outcome
    }

    /// The next call; none when `wait` is over before one comes. `Err` at the end.
    pub(crate) fn next(&self, wait: Option<Duration>) -> Result<Option<Order>, Ended> {
        let mut state = self.lock();
        let until = wait.map(|wait| Instant::now() + wait);
        loop {
            if state.failure.is_some() {
                return Err(Ended);
            }
            if let Some(order) = state.queue.pop_front() {
                drop(state);
                self.changed.notify_all();
                return Ok(Some(order));
            }
            if state.closing && wait.is_none() {
                return Err(Ended);
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            state = match left {
                Some(Duration::ZERO) => return Ok(None),
                Some(left) => {
                    let woken = self.changed.wait_timeout(state, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
                None => {
                    let woken = self.changed.wait(state);
                    woken.unwrap_or_else(PoisonError::into_inner)
                }
            };
        }
    }

    /// The oldest open call is over.
    pub(crate) fn finish(&self, outcome: &Arc<Outcome>, settled: crate::ticket::Settled) {
        self.lock().open.retain(|open| !Arc::ptr_eq(open, outcome));
        outcome.settle(settled);
    }

    /// Keeps the first failure, settles all open calls with it, and gives it back. What is queued is never begun.
    pub(crate) fn fail(&self, error: NcclError) -> NcclError {
        let (first, open, queue) = {
            let mut state = self.lock();
            let latched = state.failure.get_or_insert_with(|| (error, Instant::now()));
            let first = latched.0.clone();
            let open = std::mem::take(&mut state.open);
            (first, open, std::mem::take(&mut state.queue))
        };
        for outcome in open {
            outcome.settle(Err(first.clone()));
        }
        self.changed.notify_all();
        self.watched.notify_all();
        // These were never begun: nothing writes to their memory.
        drop(queue);
        first
    }

    /// Runs a function of another library where the watchdog sees it. Within such a call there may be another.
    pub(crate) fn within<T>(&self, function: &'static str, run: impl FnOnce() -> T) -> T {
        self.foreign(function, true, run)
    }

    /// As [`within`](Self::within), for a function that waits for the caller's own work.
    pub(crate) fn within_unlimited<T>(&self, function: &'static str, run: impl FnOnce() -> T) -> T {
        self.foreign(function, false, run)
    }

    fn foreign<T>(&self, function: &'static str, limited: bool, run: impl FnOnce() -> T) -> T {
        let before = self.lock().foreign.replace(Foreign {
            function,
            since: Instant::now(),
            limited,
        });
        let result = run();
        // What this was called within goes on, and has its time from here: the thread has just shown that it lives.
        self.lock().foreign = before.map(|before| Foreign {
            since: Instant::now(),
            ..before
        });
        result
    }

    /// The thread has joined, or cannot.
    pub(crate) fn joined(&self, joined: Result<Joined, NcclError>) {
        self.lock().joining = Joining::Over(Box::new(joined));
        self.changed.notify_all();
    }

    /// There is a communicator.
    pub(crate) fn began(&self, ender: Ender) {
        let is_first = self.ender.set(ender).is_ok();
        debug_assert!(is_first, "one communicator for each thread");
    }

    /// Waits until the thread has joined, or will not come back.
    pub(crate) fn await_joined(&self) -> Result<Joined, NcclError> {
        let mut state = self.lock();
        loop {
            match std::mem::replace(&mut state.joining, Joining::Told) {
                Joining::Over(joined) => return *joined,
                other => state.joining = other,
            }
            if let (true, Some((error, _))) = (state.wedged || state.ended, &state.failure) {
                return Err(error.clone());
            }
            let woken = self.changed.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Nothing comes any more.
    pub(crate) fn close(&self) {
        self.lock().closing = true;
        self.changed.notify_all();
        self.watched.notify_all();
    }

    /// The thread is at its end.
    pub(crate) fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
        self.watched.notify_all();
    }

    /// Waits until the thread is at its end; false if it never comes there.
    pub(crate) fn await_end(&self) -> bool {
        let mut state = self.lock();
        loop {
            if state.ended {
                return true;
            }
            if state.wedged {
                return false;
            }
            let woken = self.changed.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The watchdog's turn: looks at what the thread is in, and lets callers go when it will not come back. Sleeps up to
    /// `tick`, or for as long as there is nothing to watch. False at the end.
    pub(crate) fn watch(self: &Arc<Self>, tick: Duration) -> bool {
        let mut state = self.lock();
        while state.is_quiet() {
            let woken = self.watched.wait(state);
            state = woken.unwrap_or_else(PoisonError::into_inner);
        }
        if state.ended {
            return false;
        }
        let woken = self.watched.wait_timeout(state, tick);
        let state = woken.unwrap_or_else(PoisonError::into_inner).0;
        let (foreign, failure) = (state.foreign, state.failure.clone());
        drop(state);
        let because = match failure {
            Some(failure) => Some(failure),
            None => self.group.health().err().map(|error| {
                let at = *self.lock().noticed.get_or_insert_with(Instant::now);
                (error.into(), at)
            }),
        };
        let Some(foreign) = foreign else { return true };
        let failed = because.as_ref().map(|(_, at)| *at);
        let now = Instant::now();
        if let Some((error, at)) = &because
            && foreign.is_of_driver()
            && now.saturating_duration_since(foreign.since.max(*at)) > self.grace / PATIENCE_SHARE
        {
            self.end_from_outside(foreign, error);
        }
        let verdict = judge(now, foreign, failed, (self.limit(), self.grace));
        let Some(waited) = verdict else { return true };
        self.wedge(foreign, waited, because.map(|it| it.0));
        false
    }

    /// Aborts the communicator in place of its thread, which is in a function of the driver.
    ///
    /// Such a function may wait for all that the device has, as the caller's does that takes or gives back memory while it holds
    /// a lock that this thread needs; and NCCL's kernels wait for a peer that is gone. The abort is what lets them leave.
    fn end_from_outside(self: &Arc<Self>, foreign: Foreign, error: &NcclError) {
        let Some(ender) = self.ender.get().cloned() else {
            return;
        };
        if std::mem::replace(&mut self.lock().ending, true) {
            return;
        }
        // Before events happen that would pass for results.
        self.fail(error.clone());
        let shared = self.clone();
        let end = move || {
            let is_away = || shared.lock().foreign.is_some_and(|now| now == foreign);
            if !ender.abort(is_away) {
                shared.lock().ending = false;
            }
        };
        // Whoever calls NCCL next waits for it. Without a thread for it all is as it was.
        let name = format!("rank{}/nccl-end", self.group.global_rank(self.rank()));
        let _ = std::thread::Builder::new().name(name).spawn(end);
    }

    fn wedge(&self, foreign: Foreign, waited: Duration, because: Option<NcclError>) {
        let error = NcclError::Wedged {
            rank: self.rank(),
            function: foreign.function,
            waited,
            because: because.map(Box::new),
        };
        self.lock().wedged = true;
        self.group.abort_over(error.culprit(), &error.to_string());
        self.fail(error);
        self.changed.notify_all();
    }
}

impl State {
    /// Nothing that can hang is to be expected.
    fn is_quiet(&self) -> bool {
        matches!(self.joining, Joining::Told)
            && self.open.is_empty()
            && self.failure.is_none()
            && !self.closing
            && !self.ended
    }
}

/// There are no more calls.
#[derive(Debug)]
pub(crate) struct Ended;

/// Whether a function that has not returned is waited for no longer, and how long it was.
fn judge(
    now: Instant,
    foreign: Foreign,
    failed: Option<Instant>,
    (limit, grace): (Duration, Duration),
) -> Option<Duration> {
    let waited = now.saturating_duration_since(foreign.since);
    let over = match failed {
        // It may only just have been begun, to give up.
        Some(failed) => now.saturating_duration_since(foreign.since.max(failed)) > grace,
        None => foreign.limited && waited > limit,
    };
    over.then_some(waited)
}

#[cfg(test)]
mod tests {
    use paceline_collective::GroupOptions;

    use super::*;

    #[test]
    fn a_function_is_watched_to_its_end_also_after_another_within_it() {
        let groups = ProcessGroup::local(1, &GroupOptions::default()).unwrap();
        let shared = Shared::new(&groups[0], Duration::from_secs(5));
        let watched = || shared.lock().foreign.map(|it| (it.function, it.limited));
        shared.within("outer", || {
            shared.within_unlimited("inner", || assert_eq!(watched(), Some(("inner", false))));
            assert_eq!(watched(), Some(("outer", true)));
        });
        assert_eq!(watched(), None);
    }

    #[test]
    fn a_function_is_given_up_after_the_limit_or_a_grace_after_a_failure() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let limits = (Duration::from_secs(65), Duration::from_secs(5));
        for (now, since, limited, failed, expected) in [
            (64, 0, true, None, None),
            (66, 0, true, None, Some(66)),
            (900, 0, false, None, None),
            // Something that has taken long has a grace from the failure on.
            (34, 0, false, Some(30), None),
            (36, 0, false, Some(30), Some(36)),
            // What was begun to give up has one from its beginning on.
            (44, 40, true, Some(30), None),
            (46, 40, true, Some(30), Some(6)),
        ] {
            let foreign = Foreign {
                function: "ncclCommAbort",
                since: at(since),
                limited,
            };
            assert_eq!(
                judge(at(now), foreign, failed.map(at), limits),
                expected.map(Duration::from_secs),
                "{now} {since} {limited} {failed:?}"
            );
        }
    }
}
