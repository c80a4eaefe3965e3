//! A rank's side of a group, and the threads on which its calls run.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use paceline_collective::{Error, ProcessGroup};
use paceline_rendezvous::page::Phase;
use paceline_rendezvous::store::Server;
use parking_lot::Mutex;

use crate::call::{Asked, Kind};
use crate::failure::{Failure, panic_text};
use crate::handles::tables;
use crate::recorder::Recorder;
use crate::work::{Outcome, Work};
use crate::worker::Worker;

/// Receives that make progress at the same time. A further one waits behind another, which matters only if its message is the one that a
/// peer must get rid of first.
const RECEIVERS_MAX: usize = 64;
/// How long the end of a group waits for calls that are on their way.
const GRACE: Duration = Duration::from_secs(2);

/// Longest message that is sent by its caller's thread. There is room for thousands before that would wait for a receiver.
///
/// *Units*: bytes.
const SHORT_BYTES: usize = 4096;

/// A call on the group's thread.
type Execute = Box<dyn FnOnce(&ProcessGroup) -> Result<Option<usize>, Error> + Send>;

/// A member of a group, with its threads.
pub(crate) struct Group {
    group: ProcessGroup,
    timeout_ms: AtomicU64,
    /// Runs the operations between all ranks.
    calls: Arc<Worker>,
    /// By destination: a send may wait until its receiver has taken earlier ones.
    senders: Mutex<HashMap<usize, Arc<Worker>>>,
    receivers: Mutex<Vec<Arc<Worker>>>,
    /// The store in which the group formed, if this rank hosts it: sub-groups form there too.
    _server: Option<Server>,
}

impl Group {
    pub(crate) fn new(group: ProcessGroup, server: Option<Server>) -> Self {
        let timeout = u64::try_from(group.timeout().as_millis()).unwrap_or(u64::MAX);
        Self {
            calls: Arc::new(Worker::new(group.thread_name("calls"))),
            timeout_ms: AtomicU64::new(timeout),
            group,
            senders: Mutex::default(),
            receivers: Mutex::default(),
            _server: server,
        }
    }

    /// A group of some of this one's ranks, which alone take part.
    pub(crate) fn subgroup(
        &self,
        name: &str,
        members: &[usize],
        timeout_ms: u64,
    ) -> Result<Self, Failure> {
        let group = self.group.subgroup(name, members);
        let group = Self::new(group.map_err(|error| Failure::from(&error))?, None);
        group.set_timeout(timeout_ms);
        Ok(group)
    }

    /// The group that follows this one, see [`crate::paceline_next_generation`].
    pub(crate) fn next_generation(&self) -> Result<Self, Failure> {
        let next = match self.group.health() {
            Ok(()) => self.group.admit(),
            Err(_) => self.group.next_generation(),
        };
        let next = Self::new(next.map_err(|error| Failure::from(&error))?, None);
        next.set_timeout(self.timeout_ms.load(Ordering::Relaxed));
        Ok(next)
    }

    pub(crate) fn processes(&self) -> &ProcessGroup {
        &self.group
    }

    /// The deadline of each later operation between all ranks that brings none of its own.
    pub(crate) fn set_timeout(&self, timeout_ms: u64) {
        self.timeout_ms.store(timeout_ms, Ordering::Relaxed);
    }

    /// Publishes what this rank does, for those who look at the job or wait for it.
    pub(crate) fn set_phase(&self, phase: Phase, step: u64) {
        self.group.set_phase(phase, step);
    }

    /// Gives up: this rank's calls and those of all its peers fail.
    pub(crate) fn abort(&self, why: &str) {
        self.group.abort(why);
    }

    /// Does a call and returns when it is over.
    pub(crate) fn run(&self, asked: Asked) -> Outcome {
        let since = Instant::now();
        let outcome = self.run_unrecorded(asked);
        tables().record(|recorder| recorder.waited(since));
        outcome
    }

    fn run_unrecorded(&self, asked: Asked) -> Outcome {
        if !matches!(asked.kind, Kind::Send | Kind::Recv) {
            let execute = || self.execute(&asked);
            if let Some(outcome) = self.calls.run_if_idle(execute) {
                return outcome;
            }
        }
        let outcome = self.submit(asked)?.wait(None);
        outcome.expect("a wait without a limit ends with the call")
    }

    /// Puts a call on its way.
    pub(crate) fn submit(&self, asked: Asked) -> Result<Arc<Work>, Failure> {
        let (kind, is_short) = (asked.kind, asked.bytes() <= SHORT_BYTES);
        match kind {
            Kind::Recv => {
                let receive = asked.post(&self.group);
                let receive =
                    receive.map_err(|error| Failure::during(kind.name(), &self.group, &error))?;
                let mut receivers = self.receivers.lock();
                let place = free_receiver(&mut receivers, &self.group);
                self.queue(
                    &receivers[place],
                    kind,
                    Box::new(move |_: &ProcessGroup| receive().map(Some)),
                )
            }
            Kind::Send => {
                let sender = self.sender(asked.destination());
                let execute = move |group: &ProcessGroup| asked.execute(group).map(|()| None);
                if is_short {
                    let now = || attempt(&self.group, kind, || execute(&self.group));
                    if let Some(outcome) = sender.run_if_idle(now) {
                        return Ok(Work::over(outcome));
                    }
                }
                self.queue(&sender, kind, Box::new(execute))
            }
            _ => {
                let timeout = self.timeout(&asked);
                let execute = move |group: &ProcessGroup| {
                    set_timeout(group, timeout);
                    let outcome = asked.execute(group).map(|()| None);
                    tables().record(Recorder::landed);
                    outcome
                };
                tables().record(Recorder::handed_over);
                self.queue(&self.calls, kind, Box::new(execute))
            }
        }
    }

    /// Ends the group on this rank. Calls that are on their way have two seconds; a rank that ends for a reason gives up at once, and its
    /// peers get the reason.
    pub(crate) fn close(&self, why: Option<&str>) {
        let mut workers = vec![self.calls.clone()];
        workers.extend(self.senders.lock().values().cloned());
        workers.extend(self.receivers.lock().iter().cloned());
        let started = Instant::now();
        let is_over =
            |worker: &Arc<Worker>| worker.is_idle_within(GRACE.saturating_sub(started.elapsed()));
        match why {
            Some(why) => self.abort(why),
            None if workers.iter().all(&is_over) => {}
            None => self.abort("it destroyed the group while operations were on their way"),
        }
        for worker in workers {
            worker.close();
        }
    }

    fn execute(&self, asked: &Asked) -> Outcome {
        attempt(&self.group, asked.kind, || {
            set_timeout(&self.group, self.timeout(asked));
            asked.execute(&self.group).map(|()| None)
        })
    }

    fn queue(&self, worker: &Worker, kind: Kind, execute: Execute) -> Result<Arc<Work>, Failure> {
        // The group itself ends with its threads, so they do not keep it.
        let group = self.group.clone();
        let work = Arc::new(Work::default());
        let settled = work.clone();
        let job = move || settled.settle(attempt(&group, kind, || execute(&group)));
        let queued = worker.submit(Box::new(job));
        queued.map_err(|error| Failure::new("other", format!("{}: {error}", kind.name())))?;
        Ok(work)
    }

    fn timeout(&self, asked: &Asked) -> Duration {
        let own = self.timeout_ms.load(Ordering::Relaxed);
        Duration::from_millis(match asked.timeout_ms {
            0 => own,
            brought => brought,
        })
    }

    fn sender(&self, to: usize) -> Arc<Worker> {
        let mut senders = self.senders.lock();
        let name = || self.group.thread_name(&format!("send{to}"));
        let sender = senders
            .entry(to)
            .or_insert_with(|| Arc::new(Worker::new(name())));
        sender.clone()
    }
}

/// The place of a thread that waits for no message, or if there can be no more, of one that does.
fn free_receiver(receivers: &mut Vec<Arc<Worker>>, group: &ProcessGroup) -> usize {
    let idle = receivers.iter().position(|worker| worker.is_idle());
    let number = receivers.len();
    match idle {
        Some(place) => place,
        None if number == RECEIVERS_MAX => 0,
        None => {
            let name = group.thread_name(&format!("recv{number}"));
            receivers.push(Arc::new(Worker::new(name)));
            number
        }
    }
}

/// The outcome of a call. After an error of this rank alone the peers must not wait for it.
fn attempt(
    group: &ProcessGroup,
    kind: Kind,
    run: impl FnOnce() -> Result<Option<usize>, Error>,
) -> Outcome {
    let result = catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        let text = panic_text(&*panic);
        group.abort(&text);
        Failure::new("bug", format!("{}: {text}", kind.name()))
    })?;
    result.map_err(|error| {
        if group.health().is_ok() {
            group.abort(&error.to_string());
        }
        Failure::during(kind.name(), group, &error)
    })
}

fn set_timeout(group: &ProcessGroup, timeout: Duration) {
    if group.timeout() != timeout {
        group.set_timeout(timeout);
    }
}
