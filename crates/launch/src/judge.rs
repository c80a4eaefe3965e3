//! Which rank is to blame: a pure decision over what the launcher has seen, without a clock and without I/O.
//!
//! The first failure in time is the cause, with one exception: a rank that failed *because of* another says so
//! (its slot of the job page names the rank it blames, or the page was revoked in that rank's name). Such a rank is
//! a victim. The rank it blames gets a short time to end by itself, because a rank that panics tells its peers
//! before it is gone; if it does not end, it is reported as stalled.
//!
//! A rank that waits for the next generation does not hang, whatever others say of it. Both ends of a broken connection blame each
//! other, and both live. Then no rank is lost, if the ranks can go on at all ([`Limits::all_may_go_on`]).

use std::time::Duration;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It exited with this code.
    Code(i32),
    /// A signal ended it.
    Signal {
        /// The signal's number.
        number: i32,
        /// Whether it left a core dump.
        core: bool,
    },
}

impl Ending {
    /// Whether it is exit code 0.
    pub fn is_success(self) -> bool {
        self == Self::Code(0)
    }
}

/// The end of one worker, as the launcher saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// When, since the job's start.
    pub at: Duration,
    /// How.
    pub how: Ending,
    /// Whether the launcher asked for this end: it is then no failure.
    pub excused: bool,
    /// Whether the rank had promised to say that it is done, and had not said so.
    pub is_early: bool,
}

impl Exit {
    pub(crate) fn is_failure(&self) -> bool {
        !self.excused && (self.is_early || !self.how.is_success())
    }

    pub(crate) fn fault(&self) -> Fault {
        match self.how.is_success() {
            true => Fault::LeftEarly,
            false => Fault::Ended(self.how),
        }
    }
}

/// What is known of one worker; its place in the slice is its rank on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WorkerState {
    /// Its end, if it has ended.
    pub exit: Option<Exit>,
    /// The rank it says it fails because of.
    pub blames: Option<usize>,
    /// Since when, counted from the job's start, it has been inside one collective operation, or looking for the others.
    pub in_collective_since: Option<Duration>,
    /// For how long a signal or a debugger has stopped it, if it is stopped.
    pub stopped_for: Option<Duration>,
    /// The time after which a stopped rank counts as one that hangs; `None` waits for it.
    pub stopped_max: Option<Duration>,
    /// Since when, counted from the job's start, it has waited for the next generation because of the rank it blames.
    pub waits_since: Option<Duration>,
    /// Whether the generation that has begun goes on without it: nothing that it does is a failure of the job.
    pub is_out: bool,
    /// Whether it replaces a lost rank and has not the job's state yet.
    pub is_new: bool,
    /// When its process was started, if it replaces a lost rank; since the job's start.
    pub started: Duration,
}

impl WorkerState {
    fn is_stopped_too_long(&self) -> bool {
        let is_member = self.exit.is_none() && !self.is_out;
        let times = self.stopped_for.zip(self.stopped_max);
        is_member && times.is_some_and(|(stopped, most)| stopped >= most)
    }
}

/// How long the judge waits before it takes silence for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// A blamed rank has this long to end by itself, from the end of the rank that blames it.
    pub blamed_may_end: Duration,
    /// How long another rank must have been in one collective, with a rank already gone with exit code 0, before
    /// the rank that is gone is said to have left early.
    pub left_early_after: Duration,
    /// Whether ranks may all go on if those that blame each other live, as both ends of a broken connection do.
    pub all_may_go_on: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            blamed_may_end: Duration::from_secs(1),
            // Whatever a rank that is gone has sent is in shared memory or in a socket buffer; taking it from there
            // is a matter of milliseconds, so two seconds are no progress at all.
            left_early_after: Duration::from_secs(2),
            all_may_go_on: false,
        }
    }
}

/// In what way the rank to blame failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It ended with an error.
    Ended(Ending),
    /// It exited with code 0 while another rank needed it, or before it had said that it is done, as it had promised.
    LeftEarly,
    /// It is alive, another rank gave up waiting for it, and it did not end.
    Stalled,
}

/// The judge's decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing failed and at least one rank still runs. With a time: look again then.
    Running(Option<Duration>),
    /// All ended, none failed.
    Finished,
    /// A victim blames a rank that is alive; decide at that time, or when it ends.
    Waiting {
        /// The rank that is blamed.
        on: usize,
        /// The time, since the job's start.
        until: Duration,
    },
    /// No rank is lost, but the group has failed: all that live may form another one.
    AllGoOn {
        /// The rank that waits for that.
        by: usize,
        /// The rank because of which it does, if it blames one.
        because_of: Option<usize>,
    },
    /// The job has failed.
    Failed {
        /// The rank to blame.
        rank: usize,
        /// What it did.
        fault: Fault,
        /// The rank that reported it, unless it is the failed rank's own end.
        reported_by: Option<usize>,
    },
}

/// Decides from the workers, the rank in whose name the page was revoked by a worker, and the time since the start.
///
/// The revocation counts for workers that ended with a plain exit code: a process killed by a signal that the
/// launcher did not send did not fail because of a peer.
pub fn judge(
    workers: &[WorkerState],
    revoked_for: Option<usize>,
    now: Duration,
    limits: &Limits,
) -> Verdict {
    let first = (0..workers.len())
        .filter_map(|rank| match failure_of(workers, rank) {
            Some(exit) if matches!(exit.how, Ending::Code(_)) => Some((exit.at, 1, rank)),
            Some(exit) => Some((exit.at, 0, rank)),
            None => Some((complaint_of(workers, rank)?, 2, rank)),
        })
        // At the same moment a signal comes before an exit code: a kill does not follow from a peer. An end comes before a
        // complaint, which may be about it.
        .min();
    if let Some((at, _, rank)) = first {
        return follow(workers, revoked_for, (rank, at), now, limits);
    }
    if let Some(rank) = workers.iter().position(WorkerState::is_stopped_too_long) {
        return Verdict::Failed {
            rank,
            fault: Fault::Stalled,
            reported_by: None,
        };
    }
    if let Some(verdict) = left_early(workers, now, limits) {
        return verdict;
    }
    // It could not form the group, and no other rank is the cause.
    let gave_up = |worker: &WorkerState| is_heard(worker) && worker.waits_since.is_some();
    if let Some(by) = workers
        .iter()
        .position(gave_up)
        .filter(|_| limits.all_may_go_on)
    {
        return Verdict::AllGoOn {
            by,
            because_of: None,
        };
    }
    if workers.iter().all(|worker| worker.exit.is_some()) {
        Verdict::Finished
    } else {
        Verdict::Running(None)
    }
}

fn failure_of(workers: &[WorkerState], rank: usize) -> Option<Exit> {
    let worker = workers.get(rank).filter(|worker| !worker.is_out)?;
    worker.exit.filter(Exit::is_failure)
}

/// Since when a living rank has waited for the next generation because of another one.
fn complaint_of(workers: &[WorkerState], rank: usize) -> Option<Duration> {
    let worker = &workers[rank];
    let since = worker.waits_since.filter(|_| is_heard(worker))?;
    blamed_by(workers, None, rank).map(|_| since)
}

fn is_heard(worker: &WorkerState) -> bool {
    !worker.is_out && worker.exit.is_none()
}

/// The rank that `rank` blames, if it is another one of this machine.
fn blamed_by(workers: &[WorkerState], revoked_for: Option<usize>, rank: usize) -> Option<usize> {
    let own_word = workers[rank].blames;
    let ended_by_code = matches!(
        failure_of(workers, rank),
        Some(Exit {
            how: Ending::Code(_),
            ..
        })
    );
    own_word
        .or(revoked_for.filter(|_| ended_by_code))
        .filter(|&blamed| blamed != rank && workers.get(blamed).is_some_and(|it| !it.is_out))
}

/// Follows who blames whom from the first failure to the rank at the end of the chain.
fn follow(
    workers: &[WorkerState],
    revoked_for: Option<usize>,
    (first, at): (usize, Duration),
    now: Duration,
    limits: &Limits,
) -> Verdict {
    let (mut rank, mut reported_by) = (first, None);
    // A chain without a circle has at most as many links as there are workers.
    for _ in 0..workers.len() {
        match blamed_by(workers, revoked_for, rank) {
            Some(blamed) => (rank, reported_by) = (blamed, Some(rank)),
            None => return sentence(workers, (rank, reported_by), at, now, limits),
        }
    }
    // Ranks that blame each other: none is proven right. One that lives and complains may be right about some rank of the
    // circle; else the first failure in time stands.
    if complaint_of(workers, first).is_some() {
        if limits.all_may_go_on {
            // Each of them has noticed by itself that it lost another one, which a rank that hangs does not.
            return Verdict::AllGoOn {
                by: first,
                because_of: blamed_by(workers, revoked_for, first),
            };
        }
        return sentence(workers, (rank, reported_by), at, now, limits);
    }
    let fault = failure_of(workers, first).map_or(Fault::Stalled, |exit| exit.fault());
    Verdict::Failed {
        rank: first,
        fault,
        reported_by: None,
    }
}

fn sentence(
    workers: &[WorkerState],
    (rank, reported_by): (usize, Option<usize>),
    reported_at: Duration,
    now: Duration,
    limits: &Limits,
) -> Verdict {
    let fault = match workers[rank].exit {
        Some(exit) if exit.is_failure() => {
            return Verdict::Failed {
                rank,
                fault: exit.fault(),
                reported_by: None,
            };
        }
        Some(_) => Fault::LeftEarly,
        None if limits.all_may_go_on && workers[rank].waits_since.is_some() => {
            return Verdict::AllGoOn {
                by: reported_by.unwrap_or(rank),
                because_of: reported_by.map(|_| rank),
            };
        }
        None if now < reported_at + limits.blamed_may_end => {
            return Verdict::Waiting {
                on: rank,
                until: reported_at + limits.blamed_may_end,
            };
        }
        None => Fault::Stalled,
    };
    Verdict::Failed {
        rank,
        fault,
        reported_by,
    }
}

/// A rank that is gone with exit code 0 while another waits in a collective for too long.
fn left_early(workers: &[WorkerState], now: Duration, limits: &Limits) -> Option<Verdict> {
    let gone = workers.iter().enumerate().filter_map(|(rank, worker)| {
        worker
            .exit
            .filter(|exit| !exit.excused && !worker.is_out)
            .map(|exit| (exit.at, rank))
    });
    let (gone_at, rank) = gone.min()?;
    let waiting = workers
        .iter()
        .enumerate()
        // A stopped process makes no progress in an operation that all others have finished.
        .filter(|(_, worker)| {
            worker.exit.is_none() && worker.stopped_for.is_none() && !worker.is_out
        })
        .filter_map(|(other, worker)| {
            worker
                .in_collective_since
                .map(|since| (since.max(gone_at), other))
        });
    let (since, reported_by) = waiting.min()?;
    let due = since + limits.left_early_after;
    Some(if now < due {
        Verdict::Running(Some(due))
    } else {
        Verdict::Failed {
            rank,
            fault: Fault::LeftEarly,
            reported_by: Some(reported_by),
        }
    })
}

#[cfg(test)]
mod tests;
