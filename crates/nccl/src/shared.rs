//! State shared by callers, the NCCL thread and its watchdog: lanes, orders, open calls, the first failure.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, LockResult, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use paceline_collective::ProcessGroup;

use crate::call::{CallName, DeviceBuffer, Float, Kind, Label, TreeSum};
use crate::communicator::Joined;
use crate::error::NcclError;
use crate::nccl::Ender;
use crate::pool::PooledEvent;
use crate::ticket::Outcome;

/// After a failure, a driver function may take this fraction of the grace to return by itself.
const PATIENCE_SHARE: u32 = 5;

/// Maximum number of queued calls; a further caller waits.
const QUEUED_MAX: usize = 1024;

/// The value of a lock or wait. Every critical section leaves its state consistent, so a panic in one is no reason to fail.
pub(crate) fn unpoisoned<T>(result: LockResult<T>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}

/// The operation of a call.
#[derive(Debug)]
pub(crate) enum Work {
    AllReduce(Float),
    Max(Float),
    /// With the numbers of each rank's part.
    ReduceScatter(Float, Arc<[usize]>),
    /// With the bytes of each rank's part.
    AllGather(Arc<[usize]>),
    TreeSum(TreeSum),
    /// To this rank.
    Send(usize),
    /// From this rank.
    Receive(usize),
}

impl Work {
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::AllReduce(_) => Kind::AllReduce,
            Self::Max(_) => Kind::Max,
            Self::ReduceScatter(..) => Kind::ReduceScatter,
            Self::AllGather(_) => Kind::AllGather,
            Self::TreeSum(_) => Kind::TreeSum,
            Self::Send(_) => Kind::Send,
            Self::Receive(_) => Kind::Receive,
        }
    }
}

/// When the data of a call is ready, as seen by the NCCL thread.
pub(crate) enum Ready {
    Now,
    /// When this event has happened.
    Event(PooledEvent),
    /// When this returns.
    Fence(Box<dyn FnOnce() -> Result<(), String> + Send>),
}

/// Why a call is refused before it is queued.
pub(crate) enum Refused {
    /// Invalid arguments.
    Wrong(String),
    /// The driver cannot record when its data is ready.
    Driver(NcclError),
}

/// Ranks that are connected by one communicator of NCCL's, as they are watched.
#[derive(Clone)]
pub(crate) struct Lane {
    pub(crate) group: ProcessGroup,
    /// A sub-group of the same ranks, which finds the missing ones if NCCL stalls. `None` for one rank.
    pub(crate) control: Option<ProcessGroup>,
}

impl Lane {
    fn health(&self) -> Result<(), NcclError> {
        let health = self.group.health();
        health.map_err(|error| self.named(error.into()))
    }

    /// An error of this lane. Ranks have numbers of their own in a sub-group, so its name is added.
    fn named(&self, error: NcclError) -> NcclError {
        if !self.group.is_subgroup() || error.is_named() {
            return error;
        }
        NcclError::Along {
            group: self.group.name().into(),
            rank: error.culprit().map(|rank| self.group.global_rank(rank)),
            error: Box::new(error),
        }
    }
}

/// What the NCCL thread is to do next.
pub(crate) enum Order {
    Call(Call),
    /// Connect the ranks of another group.
    Join(ProcessGroup),
}

/// A queued call.
pub(crate) struct Call {
    pub(crate) lane: usize,
    pub(crate) work: Work,
    pub(crate) buffer: DeviceBuffer,
    pub(crate) ready: Ready,
    pub(crate) outcome: Arc<Outcome>,
}

/// A foreign function in which the NCCL thread currently is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Foreign {
    pub(crate) function: &'static str,
    pub(crate) since: Instant,
    /// Whether it has a deadline without a failure. A fence waits for the caller's own work, which has none.
    pub(crate) limited: bool,
}

impl Foreign {
    /// Whether it is the driver's, so that the thread is neither in NCCL nor in a group of NCCL calls.
    fn is_of_driver(&self) -> bool {
        self.function.starts_with("cu")
    }
}

/// The part of a rank's communicator that several threads use.
pub(crate) struct Shared {
    /// The first lane's.
    pub(crate) group: ProcessGroup,
    pub(crate) grace: Duration,
    lanes: Mutex<Vec<Lane>>,
    /// Held while a further lane joins.
    joins: Mutex<()>,
    state: Mutex<State>,
    /// Signals orders, room for orders, a failure or the end.
    changed: Condvar,
    /// Wakes the watchdog.
    watched: Condvar,
    /// Lets the watchdog end the lanes if their thread cannot.
    enders: Mutex<Vec<Ender>>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Order>,
    /// Unfinished calls, in order.
    open: VecDeque<Arc<Outcome>>,
    /// Number of the last call.
    seq: u64,
    /// No more calls will be submitted.
    closing: bool,
    /// The communicator ends without its peers.
    leaving: bool,
    /// The thread has ended.
    ended: bool,
    failure: Option<(NcclError, Instant)>,
    /// When the watchdog first saw that the group had failed.
    noticed: Option<Instant>,
    wedged: bool,
    /// Another thread is ending the communicator.
    ending: bool,
    foreign: Option<Foreign>,
    joining: Joining,
}

/// The progress of the latest join.
#[derive(Default)]
enum Joining {
    #[default]
    Begun,
    Over(Box<Result<Joined, NcclError>>),
    /// The waiting caller has the result.
    Told,
}

impl Shared {
    pub(crate) fn new(group: &ProcessGroup, grace: Duration) -> Arc<Self> {
        Arc::new(Self {
            group: group.clone(),
            grace,
            lanes: Mutex::new(vec![Lane {
                group: group.clone(),
                control: None,
            }]),
            joins: Mutex::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
            watched: Condvar::new(),
            enders: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        unpoisoned(self.state.lock())
    }

    /// The rank's number in the first lane.
    pub(crate) fn rank(&self) -> usize {
        self.group.rank()
    }

    pub(crate) fn lanes(&self) -> Vec<Lane> {
        unpoisoned(self.lanes.lock()).clone()
    }

    pub(crate) fn lane(&self, lane: usize) -> Lane {
        unpoisoned(self.lanes.lock())[lane].clone()
    }

    /// Watches the ranks of a lane that begins to connect.
    pub(crate) fn watch_lane(&self, number: usize, lane: Lane) {
        let mut lanes = unpoisoned(self.lanes.lock());
        lanes.truncate(number);
        lanes.push(lane);
    }

    /// The failure of any lane's group.
    pub(crate) fn health(&self) -> Result<(), NcclError> {
        let lanes = unpoisoned(self.lanes.lock());
        lanes.iter().try_for_each(Lane::health)
    }

    /// The limit of a wait for NCCL in a lane: the group's own errors, which name the rank to blame, come first.
    pub(crate) fn limit_of(&self, lane: usize) -> Duration {
        self.lane(lane).group.timeout() + self.grace
    }

    /// The longest limit of any lane.
    pub(crate) fn limit(&self) -> Duration {
        let lanes = unpoisoned(self.lanes.lock());
        let longest = lanes.iter().map(|lane| lane.group.timeout()).max();
        longest.unwrap_or_default() + self.grace
    }

    /// The first failure, if there is one.
    pub(crate) fn failure(&self) -> Option<NcclError> {
        self.lock().failure.as_ref().map(|(error, _)| error.clone())
    }

    pub(crate) fn is_wedged(&self) -> bool {
        self.lock().wedged
    }

    /// Queues a call, or settles it with the first failure.
    ///
    /// *Blocks*: only while [`QUEUED_MAX`] calls are queued.
    pub(crate) fn submit(
        &self,
        (lane, work): (usize, Work),
        label: Label,
        buffer: DeviceBuffer,
        ready: Result<Ready, Refused>,
    ) -> Arc<Outcome> {
        let is_full =
            |state: &mut State| state.queue.len() >= QUEUED_MAX && state.failure.is_none();
        let mut state = unpoisoned(self.changed.wait_while(self.lock(), is_full));
        state.seq += 1;
        let call = CallName {
            kind: work.kind(),
            seq: state.seq,
            label,
        };
        let outcome = Outcome::new(call);
        if let Some(error) = state.refusal(self.rank()) {
            outcome.settle(Err(error));
            return outcome;
        }
        let error = match ready {
            Ok(ready) => {
                state.open.push_back(outcome.clone());
                state.queue.push_back(Order::Call(Call {
                    lane,
                    work,
                    buffer,
                    ready,
                    outcome: outcome.clone(),
                }));
                drop(state);
                self.changed.notify_all();
                self.watched.notify_all();
                return outcome;
            }
            Err(Refused::Driver(error)) => error.during(call),
            Err(Refused::Wrong(reason)) => {
                let rank = self.lane(lane).group.rank();
                let what = format!("called NCCL's {call} with invalid arguments: {reason}");
                NcclError::of_rank(rank, format!("rank {rank} {what}"))
            }
        };
        drop(state);
        // The peers will issue the call, so the ranks are out of step.
        outcome.settle(Err(self.give_up(lane, error)));
        outcome
    }

    /// Has another group's ranks join, and waits for the result.
    pub(crate) fn join(&self, group: &ProcessGroup) -> Result<Joined, NcclError> {
        let _one = unpoisoned(self.joins.lock());
        let mut state = self.lock();
        if let Some(error) = state.refusal(self.rank()) {
            return Err(error);
        }
        state.joining = Joining::Begun;
        state.queue.push_back(Order::Join(group.clone()));
        drop(state);
        self.changed.notify_all();
        self.watched.notify_all();
        self.await_joined()
    }

    /// The next order; `None` if none comes within `wait`. `Err` at the end.
    pub(crate) fn next(&self, wait: Option<Duration>) -> Result<Option<Order>, Ended> {
        let is_idle = |state: &mut State| {
            let is_over = state.failure.is_some() || (state.closing && wait.is_none());
            state.queue.is_empty() && !is_over
        };
        let state = self.lock();
        let mut state = match wait {
            Some(wait) => unpoisoned(self.changed.wait_timeout_while(state, wait, is_idle)).0,
            None => unpoisoned(self.changed.wait_while(state, is_idle)),
        };
        if state.failure.is_some() {
            return Err(Ended);
        }
        let order = state.queue.pop_front();
        drop(state);
        match order {
            None if wait.is_none() => Err(Ended),
            None => Ok(None),
            order => {
                self.changed.notify_all();
                Ok(order)
            }
        }
    }

    /// A call is over.
    pub(crate) fn finish(&self, outcome: &Arc<Outcome>, settled: crate::ticket::Settled) {
        self.lock().open.retain(|open| !Arc::ptr_eq(open, outcome));
        outcome.settle(settled);
    }

    /// Latches and returns the first failure, and settles all open calls with it. Queued calls are never begun.
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
        // Never begun, so nothing writes to their memory.
        drop(queue);
        first
    }

    /// Latches a lane's failure, and ends the waiting of the ranks of all lanes. Returns the first failure.
    pub(crate) fn give_up(&self, lane: usize, error: NcclError) -> NcclError {
        let mut lanes = self.lanes();
        let own = lanes.remove(lane);
        let culprit = error.culprit().filter(|_| !error.is_named());
        let is_known = error.is_known();
        let first = self.fail(own.named(error));
        let text = first.to_string();
        // Those of a group that has failed know why.
        if !is_known && own.group.health().is_ok() {
            own.group.abort_over(culprit, &text);
        }
        for other in lanes {
            if other.group.health().is_ok() {
                other.group.abort(&text);
            }
        }
        first
    }

    /// Tells the ranks of all lanes that this one gives up, and latches it.
    pub(crate) fn abandon(&self, doing: &str, why: &str) {
        for lane in self.lanes() {
            lane.group.abort(why);
        }
        self.fail(NcclError::system(self.rank(), doing, why));
    }

    /// Runs a foreign function under the watchdog. Calls may be nested.
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
        // The enclosing call continues, and its time starts anew: the thread has just made progress.
        self.lock().foreign = before.map(|before| Foreign {
            since: Instant::now(),
            ..before
        });
        result
    }

    /// Reports the result of the join.
    pub(crate) fn joined(&self, joined: Result<Joined, NcclError>) {
        self.lock().joining = Joining::Over(Box::new(joined));
        self.changed.notify_all();
    }

    /// Reports that a lane has a communicator.
    pub(crate) fn began(&self, ender: Ender) {
        unpoisoned(self.enders.lock()).push(ender);
    }

    /// Waits for the result of a join, or until the thread is wedged.
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
            state = unpoisoned(self.changed.wait(state));
        }
    }

    /// Announces that no more calls will come.
    pub(crate) fn close(&self) {
        self.lock().closing = true;
        self.changed.notify_all();
        self.watched.notify_all();
    }

    /// Announces the same, and that the communicator is aborted then.
    pub(crate) fn leave(&self) {
        self.lock().leaving = true;
        self.close();
    }

    /// Whether the communicator ends without its peers, which may be gone.
    pub(crate) fn is_leaving(&self) -> bool {
        self.lock().leaving || self.health().is_err()
    }

    /// Reports that the thread has ended.
    pub(crate) fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
        self.watched.notify_all();
    }

    /// Waits for the thread's end; false if it is wedged.
    pub(crate) fn await_end(&self) -> bool {
        let is_running = |state: &mut State| !state.ended && !state.wedged;
        let state = unpoisoned(self.changed.wait_while(self.lock(), is_running));
        state.ended
    }

    /// One round of the watchdog: checks the function that the thread is in, and releases callers if it will not return.
    /// Sleeps up to `tick`, or while there is nothing to watch. False at the end.
    pub(crate) fn watch(self: &Arc<Self>, tick: Duration) -> bool {
        let is_quiet = |state: &mut State| state.is_quiet();
        let state = unpoisoned(self.watched.wait_while(self.lock(), is_quiet));
        if state.ended {
            return false;
        }
        let state = unpoisoned(self.watched.wait_timeout(state, tick)).0;
        let (foreign, failure) = (state.foreign, state.failure.clone());
        drop(state);
        let because = match failure {
            Some(failure) => Some(failure),
            None => self.health().err().map(|error| {
                let at = *self.lock().noticed.get_or_insert_with(Instant::now);
                (error, at)
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

    /// Aborts all lanes in place of their thread, which is in a driver function.
    ///
    /// That function may wait for all of the device's work: directly, or for a lock held by a caller that allocates or frees
    /// memory. That work includes NCCL's kernels, which wait for a dead peer; only the abort ends them.
    fn end_from_outside(self: &Arc<Self>, foreign: Foreign, error: &NcclError) {
        let enders = unpoisoned(self.enders.lock()).clone();
        if enders.is_empty() {
            return;
        }
        if std::mem::replace(&mut self.lock().ending, true) {
            return;
        }
        // First of all, so that the aborted kernels' events do not pass for results.
        self.fail(error.clone());
        let shared = self.clone();
        let end = move || {
            let is_away = || shared.lock().foreign.is_some_and(|now| now == foreign);
            let ended = enders.iter().map(|ender| ender.abort(is_away));
            if ended.filter(|ended| !ended).count() > 0 {
                shared.lock().ending = false;
            }
        };
        // The next NCCL call waits for the abort. If no thread can be started, nothing changes.
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
        self.give_up(0, error);
        self.changed.notify_all();
    }
}

impl State {
    /// Why no more orders are taken, if so.
    fn refusal(&self, rank: usize) -> Option<NcclError> {
        match &self.failure {
            Some((error, _)) => Some(error.clone()),
            None => self.closing.then(|| {
                NcclError::system(rank, "go on calling NCCL", "its communicator has ended")
            }),
        }
    }

    /// Whether nothing can hang.
    fn is_quiet(&self) -> bool {
        matches!(self.joining, Joining::Told)
            && self.open.is_empty()
            && self.failure.is_none()
            && !self.closing
            && !self.ended
    }
}

/// No more calls will come.
#[derive(Debug)]
pub(crate) struct Ended;

/// How long a function has been waited for, if it is given up now.
fn judge(
    now: Instant,
    foreign: Foreign,
    failed: Option<Instant>,
    (limit, grace): (Duration, Duration),
) -> Option<Duration> {
    let waited = now.saturating_duration_since(foreign.since);
    let over = match failed {
        // It may have begun after the failure, to clean up.
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
