//! Watches the ranks until the last has ended: exits, signals and the job page in, one cause out.

mod recovering;
mod regroup;
mod stopping;

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use paceline_rendezvous::page::{JobPage, Phase, Revocation};
use paceline_rendezvous::process::{Stat, state_text};
use paceline_words::{Lang, Text, say};

use crate::bell::Bell;
use crate::elastic::messages::Order;
use crate::elastic::record::{Complaint, Places, RoundId};
use crate::job::Job;
use crate::judge::{Ending, Fault, Limits, Verdict, WorkerState, judge};
use crate::orphans::Orphans;
use crate::output::Output;
use crate::plan::Plan;
use crate::recovery::{Mended, Roster};
use crate::report::{Failure, FailureKind};
use crate::round::NodePlace;
use crate::signals::Signals;
use crate::stall::Monitor;
use crate::stop::{Asked, is_excused};
use crate::worker::wait_readable;
use crate::workers::{Shared, Workers};

/// How often the launcher looks for orphans that have ended, which no event announces.
const SLOW_LOOK: Duration = Duration::from_secs(2);
/// Once a rank is gone, the pause between two looks for others that wait in vain.
const QUICK_LOOK: Duration = Duration::from_millis(250);
/// Once a thread of a rank has ended with its process, the pause between two looks whether all have: for so long, and later.
const END_LOOK: Duration = Duration::from_micros(200);
const END_SOON: Duration = Duration::from_millis(50);
const LATE_END_LOOK: Duration = Duration::from_millis(10);

/// One job while it runs.
#[derive(Debug)]
pub(crate) struct Supervisor<'a> {
    pub(crate) job: &'a Job,
    pub(crate) workers: &'a mut Workers,
    pub(crate) page: &'a JobPage,
    pub(crate) signals: &'a Signals,
    pub(crate) orphans: &'a Orphans,
    pub(crate) stalls: &'a Monitor,
    pub(crate) plan: &'a Plan,
    pub(crate) shared: &'a Shared<'a>,
    pub(crate) output: &'a mut Output,
    pub(crate) place: &'a NodePlace,
    pub(crate) coordinator: &'a mut dyn Coordinator,
    pub(crate) started: Instant,
    pub(crate) stage: Stage,
    /// When the stage ends.
    pub(crate) until: Option<Instant>,
    pub(crate) seen: Seen,
    /// The newest generation of the ranks that has begun.
    pub(crate) generation: u32,
    pub(crate) roster: Roster,
    /// When the job page was last looked at, since the start.
    pub(crate) looked_at: Duration,
    /// How long after the start all ranks had begun to train, as far as they take in replacements.
    pub(crate) trains_since: Option<Duration>,
    /// When all ranks last went on after the group had failed without a lost rank.
    pub(crate) mended: Option<Mended>,
    /// The failure of a rank that is being killed so that the others can go on, and when it has to have ended.
    pub(crate) given_up: Option<(Failure, Instant)>,
    /// The ranks of several nodes are about to form the next generation.
    pub(crate) regrouping: Option<Regrouping>,
    /// Lines for people when the ranks have followed the invitation that is out; none if none is.
    pub(crate) invitation: Vec<String>,
}

/// Decides over the round as a whole: the restart budget, or the other nodes.
pub(crate) trait Coordinator: std::fmt::Debug {
    /// Readable when there is news.
    fn news(&self) -> Option<BorrowedFd<'_>>;

    /// Takes note of what the supervisor has seen. Returns what the ranks are to do, and when to ask again.
    fn turn(&mut self, seen: &Seen) -> (Option<Order>, Option<Instant>);

    /// These ranks can go on, as was asked by an order; none where not all of them can.
    fn regrouped(&mut self, slots: Option<Vec<usize>>);
}

/// What the supervisor found out.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Without its last lines and victims, which are known when all is over.
    pub(crate) failure: Option<Failure>,
    /// The failure because of which the ranks of several nodes are about to go on without one.
    pub(crate) lost: Option<Failure>,
    /// The ranks here that wait for the next generation, and the rank that each blames; itself if it blames none.
    pub(crate) complaints: Vec<Complaint>,
    /// On several nodes, what to say of the places of lost ranks.
    pub(crate) places: Places,
    /// The newest generation of the ranks that has begun.
    pub(crate) generation: u32,
    /// The last request to stop, whatever became of it.
    pub(crate) asked: Option<Asked>,
    /// SIGKILL was sent to what was left.
    pub(crate) killed: bool,
    /// The coordinator has the ranks end, so their ends are no failures.
    pub(crate) is_ordered: bool,
    /// The coordinator has them save first, although the job was not asked to stop.
    pub(crate) is_saved: bool,
    pub(crate) notes: Vec<String>,
    /// How many processes were started in place of lost ranks.
    pub(crate) replaced: u32,
    /// When the first rank was started.
    pub(crate) started: Option<Instant>,
}

/// How far this node is with the next generation of several nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Regrouping {
    /// The coordinator knows that a rank is lost, or which ranks go on.
    Told,
    /// It waits for the end of a rank that was killed.
    Asked,
}

/// How far the end of the round has come. Every stage but the first has a deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Running,
    /// After a failure: the other ranks report and leave by themselves.
    Reporting,
    /// They were asked to save for the next round, and can still agree on the step.
    Saving,
    /// They were asked to leave.
    Stopping,
    /// They were killed. A process that has not ended by then hangs in the kernel.
    Killing,
}

impl Supervisor<'_> {
    /// Returns when all ranks have ended, or when even SIGKILL does not end one. The end of `workers` reaps the last ones.
    pub(crate) fn run(&mut self) {
        let mut slow_look = Instant::now() + SLOW_LOOK;
        let mut ends_since = None;
        let bell = (self.job.recovers_live()).then(|| Bell::of(self.page).ok());
        let bell = bell.flatten();
        loop {
            bell.iter().for_each(Bell::silence);
            while let Some(signal) = self.signals.next() {
                self.on_signal(signal);
            }
            let (asked, is_ordered) = (self.seen.asked, self.seen.is_ordered);
            let now = self.started.elapsed();
            self.workers.reap(now, self.shared, |rank, how| {
                is_ordered || is_excused(how, asked, self.page.slot(rank).stopped())
            });
            let mut look_again = None;
            if self.seen.failure.is_none() && !is_ordered {
                look_again = match self.regrouping {
                    None => self.look_for_a_cause(),
                    Some(_) => self.regroup_when_dead(),
                };
                if self.regrouping.is_none() {
                    look_again = look_again.into_iter().chain(self.fill_places()).min();
                }
                if self.seen.failure.is_some() && self.stage == Stage::Running {
                    self.enter(Stage::Reporting, self.job.report_time);
                }
            }
            self.seen.generation = self.generation;
            let (order, ask_again) = self.coordinator.turn(&self.seen);
            if let Some(order) = order {
                self.obey(order);
                // The coordinator may have been told something.
                look_again = Some(Instant::now());
            }
            self.dismiss_replacements();
            if self.workers.alive().next().is_none() {
                return;
            }
            let is_over = self.until.is_some_and(|until| Instant::now() >= until);
            match self.stage {
                Stage::Reporting if is_over || self.only_the_blamed_is_alive() => {
                    self.end_after_a_failure();
                }
                Stage::Saving | Stage::Stopping if is_over => self.kill_the_slow(),
                Stage::Killing if is_over => return,
                _ => {}
            }
            if Instant::now() >= slow_look {
                self.orphans.reap(&self.workers.pids());
                slow_look = Instant::now() + SLOW_LOOK;
            }
            let mut alive = self.workers.alive();
            let ends = alive
                .any(|(rank, worker)| self.page.slot(rank).has_let_go() && worker.is_failing());
            let now = Instant::now();
            ends_since = ends_since.or(Some(now)).filter(|_| ends);
            let look_at_end = ends_since.map(|since| match now - since < END_SOON {
                true => now + END_LOOK,
                false => now + LATE_END_LOOK,
            });
            let wakes = [self.until, look_again, ask_again, look_at_end];
            let wakes = wakes.into_iter().flatten();
            self.sleep_until(wakes.fold(slow_look, Instant::min), bell.as_ref());
        }
    }

    fn enter(&mut self, stage: Stage, within: Duration) {
        self.stage = stage;
        self.until = Some(Instant::now() + within);
    }

    /// Sleeps until a rank ends or rings, a signal arrives or it is time.
    fn sleep_until(&self, wake: Instant, bell: Option<&Bell>) {
        let mut fds: Vec<_> = self.workers.unreaped().map(AsFd::as_fd).collect();
        fds.push(self.signals.as_fd());
        fds.extend(self.coordinator.news());
        fds.extend(bell.map(Bell::as_fd));
        wait_readable(&fds, wake.saturating_duration_since(Instant::now()));
    }

    /// Asks the judge; on a failure tells the ranks at once. Says when to ask again.
    fn look_for_a_cause(&mut self) -> Option<Instant> {
        if let (Some(stalled), None) = (self.stalls.to_abort(), self.seen.asked) {
            let now = self.started.elapsed();
            let mut failure = self.describe(stalled.local_rank, Fault::Stalled, None, now);
            if let FailureKind::Stalled { state } = &mut failure.kind {
                *state = Text::new(|lang| format!("{}; {}", state.of(lang), stalled.why.of(lang)));
            }
            self.fail(failure);
            return None;
        }
        if let Some((failure, until)) = self.given_up.take() {
            let lives = self.workers.states[failure.local_rank].exit.is_none();
            if lives && Instant::now() < until {
                self.given_up = Some((failure, until));
                return Some(until);
            }
            return self.go_on_without(failure, true);
        }
        // Ranks that wait for the next generation have not ended; no event announces them.
        let mut slots = (0..self.workers.states.len()).map(|rank| self.page.slot(rank));
        let is_watched = self.job.recovers_live() && slots.any(|slot| slot.recovers());
        if !is_watched && self.workers.states.iter().all(|state| state.exit.is_none()) {
            return None;
        }
        self.read_page();
        let now = self.started.elapsed();
        let revoked_for = self
            .page
            .revocation()
            .and_then(|revocation| revocation.rank)
            .and_then(|rank| self.local(rank));
        let limits = Limits {
            all_may_go_on: self.all_may_go_on(),
            ..self.job.limits
        };
        let soon = now + QUICK_LOOK;
        match judge(&self.workers.states, revoked_for, now, &limits) {
            Verdict::Running(look_again) => {
                Some(self.started + look_again.map_or(soon, |look_again| look_again.min(soon)))
            }
            Verdict::Waiting { until, .. } => Some(self.started + until.min(soon)),
            Verdict::Finished => None,
            Verdict::AllGoOn { by, because_of } => self.go_on_together(by, because_of),
            Verdict::Failed {
                rank,
                fault,
                reported_by,
            } => {
                let failure = self.describe(rank, fault, reported_by, now);
                self.go_on_without(failure, false)
            }
        }
    }

    /// Tells the ranks and keeps the failure for the report.
    fn fail(&mut self, failure: Failure) {
        // A rank may have revoked the page first and known less. Its text stays on the page; the report has this one.
        self.page.revoke(&Revocation {
            rank: Some(failure.rank),
            text: failure.headline(Lang::En),
        });
        self.seen.failure = Some(failure);
    }

    fn read_page(&mut self) {
        let now = self.started.elapsed();
        self.note_admitted();
        // Of a pause of this process only a part counts: its ranks may have been stopped together with it.
        let since_last_look = now.saturating_sub(self.looked_at).min(4 * QUICK_LOOK);
        self.looked_at = now;
        let has_ended = |state: &WorkerState| state.exit.is_some();
        let is_ending = self.workers.states.iter().any(has_ended);
        self.seen.complaints.clear();
        for rank in 0..self.workers.states.len() {
            let (slot, pid) = (self.page.slot(rank), self.workers.pid(rank));
            let blamed = slot.victim_in(self.generation);
            let blames = blamed.and_then(|rank| self.local(rank));
            let waits = slot.awaits() == Some(self.generation);
            if waits && !self.workers.states[rank].is_out {
                let by = self.place.first_rank + rank;
                self.seen.complaints.push(Complaint {
                    round: RoundId::default(),
                    by,
                    of: blamed.unwrap_or(by),
                    step: slot.activity().map_or(0, |(activity, _)| activity.step),
                });
            }
            let state = &mut self.workers.states[rank];
            state.blames = blames;
            state.is_new &= !slot.has_joined();
            state.waits_since = waits.then(|| state.waits_since.unwrap_or(now));
            state.in_collective_since = slot
                .activity()
                // Looking for the others needs all of them, as a collective does.
                .filter(|(activity, _)| {
                    activity.op.is_some() || activity.phase == Phase::Rendezvous
                })
                .map(|(_, since)| now.saturating_sub(since));
            let is_stopped = state.exit.is_none() && Stat::read(pid).is_some_and(Stat::is_stopped);
            let until_now = |stopped: Duration| stopped + since_last_look;
            state.stopped_for =
                is_stopped.then(|| state.stopped_for.map_or(Duration::ZERO, until_now));
            // A job that is started again after a loss may be stopped as a whole for as long as its user likes.
            let is_needed = is_ending || (self.job.recovers_live() && slot.recovers());
            state.stopped_max = slot.timeout().filter(|_| is_needed);
        }
        self.note_training(now);
    }

    fn describe(
        &self,
        rank: usize,
        fault: Fault,
        reported_by: Option<usize>,
        now: Duration,
    ) -> Failure {
        let pid = self.workers.pid(rank);
        let kind = match fault {
            Fault::Ended(Ending::Code(code)) => FailureKind::ExitCode(code),
            Fault::Ended(Ending::Signal { number, core }) => FailureKind::signal(number, core),
            Fault::LeftEarly => FailureKind::LeftEarly,
            Fault::Stalled => {
                let stat = Stat::read(pid);
                let state = Text::new(|lang| state_text(stat, lang));
                FailureKind::Stalled { state }
            }
        };
        let slot = self.page.slot(rank);
        let word = slot.victim_in(self.generation);
        Failure {
            rank: self.place.first_rank + rank,
            local_rank: rank,
            pid,
            kind,
            is_misconfigured: slot.is_misconfigured(),
            reported_by: reported_by.map(|rank| self.place.first_rank + rank),
            after: self.workers.states[rank].exit.map_or(now, |exit| exit.at),
            error: None,
            last_lines: Vec::new(),
            are_on_console: false,
            activity: self.activity(rank),
            log: None,
            victims: Vec::new(),
            is_common: word == Some(self.place.first_rank + rank),
            node: self.place.node(),
            blames: word.filter(|rank| self.local(*rank).is_none()),
            also: Vec::new(),
        }
    }

    /// The local rank of a rank of this node.
    fn local(&self, rank: usize) -> Option<usize> {
        let local = rank.checked_sub(self.place.first_rank)?;
        (local < self.workers.states.len()).then_some(local)
    }

    /// What a rank was doing last, if it ever said so.
    fn activity(&self, rank: usize) -> Option<Text> {
        let (activity, since) = self.page.slot(rank).activity()?;
        if activity.phase == Phase::Finished {
            return None;
        }
        let alive = self.workers.states[rank].exit.is_none();
        Some(Text::new(|lang| {
            let (activity, seconds) = (activity.text(lang), since.as_secs_f64());
            match alive {
                true => say!(
                    lang,
                    "{activity}, for {seconds:.1} s",
                    "{activity}, {seconds:.1}초 동안"
                ),
                false => activity,
            }
        }))
    }
}
