//! Watches the ranks until the last has ended: exits, signals and the job page in, one cause out.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use paceline_rendezvous::page::{JobPage, Phase, Revocation};
use paceline_rendezvous::process::Stat;
use rustix::process::Signal;

use crate::elastic::messages::How;
use crate::job::Job;
use crate::judge::{Ending, Fault, Verdict, judge};
use crate::orphans::Orphans;
use crate::output::Output;
use crate::plan::Plan;
use crate::recovery::{self, Due, Next, Roster};
use crate::report::{Failure, FailureKind, count};
use crate::round::NodePlace;
use crate::signals::{self, Signals};
use crate::stall::Monitor;
use crate::stop::{Asked, Meaning, is_excused, meaning};
use crate::watchdog::Watchdog;
use crate::worker::{KILLED_ENDS_WITHIN, wait_readable};
use crate::workers::{Shared, Workers};

/// How often the launcher looks for orphans that have ended, which no event announces.
const SLOW_LOOK: Duration = Duration::from_secs(2);
/// Once a rank is gone, the pause between two looks for others that wait in vain.
const QUICK_LOOK: Duration = Duration::from_millis(250);
/// While a lost rank's replacement is on its way, the pause between two looks at the page.
const JOIN_LOOK: Duration = Duration::from_millis(10);

/// One job while it runs.
#[derive(Debug)]
pub(crate) struct Supervisor<'a> {
    pub(crate) job: &'a Job,
    pub(crate) workers: &'a mut Workers,
    pub(crate) page: &'a JobPage,
    pub(crate) signals: &'a Signals,
    pub(crate) watchdog: &'a Watchdog,
    pub(crate) orphans: &'a Orphans,
    pub(crate) stalls: &'a Monitor,
    pub(crate) plan: &'a Plan,
    /// The value of `PACELINE_LAUNCHER`.
    pub(crate) launcher_id: &'a str,
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
    /// The failure of a rank that is being killed so that the others can go on, and when it has to have ended.
    pub(crate) given_up: Option<(Failure, Instant)>,
}

/// Decides over the round as a whole: the restart budget, or the other nodes.
pub(crate) trait Coordinator: std::fmt::Debug {
    /// Readable when there is news.
    fn news(&self) -> Option<BorrowedFd<'_>>;

    /// Takes note of what the supervisor has seen. Returns how the ranks are to end, if they are, and when to ask again.
    fn turn(&mut self, seen: &Seen) -> (Option<How>, Option<Instant>);
}

/// What the supervisor found out.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Without its last lines and victims, which are known when all is over.
    pub(crate) failure: Option<Failure>,
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
    /// Returns when all ranks have ended, or when even SIGKILL does not end one.
    pub(crate) fn run(&mut self) {
        let mut slow_look = Instant::now() + SLOW_LOOK;
        loop {
            while let Some(signal) = self.signals.next() {
                self.on_signal(signal);
            }
            let (asked, is_ordered) = (self.seen.asked, self.seen.is_ordered);
            self.workers
                .reap(self.started.elapsed(), self.watchdog, |rank, how| {
                    is_ordered || is_excused(how, asked, self.page.slot(rank).stopped())
                });
            let mut look_again = None;
            if self.seen.failure.is_none() && !is_ordered {
                look_again = self.look_for_a_cause();
                look_again = look_again.into_iter().chain(self.fill_places()).min();
                if self.seen.failure.is_some() && self.stage == Stage::Running {
                    self.enter(Stage::Reporting, self.job.report_time);
                }
            }
            let (order, ask_again) = self.coordinator.turn(&self.seen);
            if let Some(how) = order {
                self.obey(how);
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
            let wakes = [self.until, look_again, ask_again].into_iter().flatten();
            self.sleep_until(wakes.fold(slow_look, Instant::min));
        }
    }

    fn enter(&mut self, stage: Stage, within: Duration) {
        self.stage = stage;
        self.until = Some(Instant::now() + within);
    }

    /// Sleeps until a rank ends, a signal arrives or it is time.
    fn sleep_until(&self, wake: Instant) {
        let mut fds: Vec<_> = self
            .workers
            .alive()
            .map(|(_, worker)| worker.as_fd())
            .collect();
        fds.push(self.signals.as_fd());
        fds.extend(self.coordinator.news());
        wait_readable(&fds, wake.saturating_duration_since(Instant::now()));
    }

    /// Ends the ranks as the coordinator says, unless they are already ending sooner.
    fn obey(&mut self, how: How) {
        self.seen.is_ordered = true;
        match (how, self.stage) {
            (_, Stage::Killing)
            | (How::Save | How::Next | How::Over, Stage::Stopping)
            | (How::Save, Stage::Saving)
            | (How::Over, Stage::Reporting) => {}
            (How::Kill, _) => self.kill(),
            (How::Save, Stage::Running) if self.all_poll() => self.save(),
            (how, _) => {
                self.page.revoke(&Revocation {
                    rank: None,
                    text: "the round is over".to_owned(),
                });
                if how == How::Over {
                    self.enter(Stage::Reporting, self.job.report_time);
                } else {
                    self.end_after_a_failure();
                }
            }
        }
    }

    /// Asks the judge; on a failure tells the ranks at once. Says when to ask again.
    fn look_for_a_cause(&mut self) -> Option<Instant> {
        if let (Some(stalled), None) = (self.stalls.to_abort(), self.seen.asked) {
            let now = self.started.elapsed();
            let mut failure = self.describe(stalled.local_rank, Fault::Stalled, None, now);
            if let FailureKind::Stalled { state } = &mut failure.kind {
                *state = format!("{state}; {}", stalled.why);
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
        let is_watched = self.job.recovers_live();
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
        match judge(&self.workers.states, revoked_for, now, &self.job.limits) {
            Verdict::Running(look_again) => {
                let soon = now + QUICK_LOOK;
                Some(self.started + look_again.map_or(soon, |look_again| look_again.min(soon)))
            }
            Verdict::Waiting { until, .. } => Some(self.started + until),
            Verdict::Finished => None,
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

    /// Has the ranks that are left go on, if they can; else the failure is the job's. Says when to look again.
    fn go_on_without(&mut self, failure: Failure, was_killed: bool) -> Option<Instant> {
        let is_new = self.workers.states[failure.local_rank].is_new;
        let is_live = self.job.recovers_live()
            && self.stage == Stage::Running
            && (is_new || failure.is_for_good().is_none())
            && !self.page.is_revoked();
        let recovers = |rank| self.page.slot(rank).recovers();
        let states = &self.workers.states;
        let next = || {
            let culprit = failure.local_rank;
            self.roster.after_failure(states, recovers, culprit)
        };
        match is_live.then(next) {
            Some(Ok(Next::GoOn { members, lost })) => {
                if is_new && failure.is_for_good().is_some() {
                    self.roster.start_no_more();
                }
                let incidents = self.incidents(&failure, lost);
                self.publish(failure.rank, &members, &incidents.join("; "));
                Some(Instant::now())
            }
            Some(Ok(Next::Kill)) if !was_killed => {
                let newest = self.page.newest_generation();
                self.page.end_generation(newest, failure.rank);
                self.workers.kill(failure.local_rank);
                let until = Instant::now() + KILLED_ENDS_WITHIN;
                self.given_up = Some((failure, until));
                Some(until)
            }
            Some(Err(why)) => {
                self.seen.notes.push(format!("no live recovery: {why}"));
                self.fail(failure);
                None
            }
            // A process that even SIGKILL does not end could still be heard by the others.
            Some(Ok(Next::Kill)) | None => {
                self.fail(failure);
                None
            }
        }
    }

    /// A sentence for each rank that was lost.
    fn incidents(&self, failure: &Failure, lost: Vec<usize>) -> Vec<String> {
        let now = self.started.elapsed();
        let incidents = lost.into_iter().map(|rank| {
            let how = self.workers.states[rank].exit.map(|exit| exit.how);
            match how.filter(|_| rank != failure.local_rank) {
                Some(how) => self.describe(rank, Fault::Ended(how), None, now).incident(),
                None => failure.incident(),
            }
        });
        incidents.collect()
    }

    /// Publishes the next generation, without global rank `culprit`, and says on standard error why there is one.
    fn publish(&mut self, culprit: usize, members: &[usize], incidents: &str) {
        let newest = self.page.newest_generation();
        self.page.end_generation(newest, culprit);
        if let Some(first) = members.first() {
            self.output.show_first(*first);
        }
        self.generation = self.page.publish_generation(members);
        self.roster.go_on(members, &self.workers.states);
        self.mark_members();
        let verb = if members.len() == 1 { "goes" } else { "go" };
        let left = count(members.len(), "rank");
        let mut incident = format!("{incidents}; {left} {verb} on");
        if self.roster.left() == 0 && self.roster.started() > 0 {
            incident.push_str(", no restart is left for a replacement");
        }
        eprintln!("{incident}");
    }

    /// Takes note that the ranks have followed an invitation.
    fn note_admitted(&mut self) {
        let begun = self.page.begun_generation();
        if begun == self.generation {
            return;
        }
        self.generation = begun;
        let admitted = self.roster.admit();
        self.mark_members();
        let now = count(self.roster.members().len(), "rank");
        for rank in admitted {
            let (global, pid) = (self.place.first_rank + rank, self.workers.pid(rank));
            eprintln!("rank {global} (pid {pid}) joins as a replacement; {now} go on");
        }
    }

    fn mark_members(&mut self) {
        for (rank, state) in self.workers.states.iter_mut().enumerate() {
            state.is_out = !self.roster.members().contains(&rank);
            state.waits_since = None;
        }
    }

    /// Starts processes in place of lost ranks and invites the others to admit them. Says when to look again.
    fn fill_places(&mut self) -> Option<Instant> {
        let is_running = self.stage == Stage::Running && self.seen.asked.is_none();
        if !self.job.recovers_live() || !is_running || self.given_up.is_some() {
            return None;
        }
        loop {
            let page = self.page;
            let seen = recovery::Seen {
                states: &self.workers.states,
                admits: &|rank| page.slot(rank).admits(),
                is_ready: &|rank| page.slot(rank).is_ready_to_join(),
            };
            match self.roster.due(&seen) {
                Some(Due::Lost { rank, is_invited }) => self.lose_replacement(rank, is_invited),
                Some(Due::Start(rank)) => self.start_replacement(rank),
                Some(Due::Invite(members)) => {
                    self.page.invite_generation(&members);
                }
                None => break,
            }
        }
        let soon = Instant::now() + JOIN_LOOK;
        self.roster.is_changing().then_some(soon)
    }

    fn start_replacement(&mut self, rank: usize) {
        let shared = Shared {
            page: self.page,
            place: self.place,
            launcher_id: self.launcher_id,
            watchdog: self.watchdog,
        };
        let number = self.roster.started();
        let (job, plan) = (self.job, self.plan);
        let started = (self.workers).replace(job, plan, &shared, self.output, (rank, number));
        self.seen.replaced = number;
        if let Err(error) = started {
            self.roster.start_no_more();
            let rank = self.place.first_rank + rank;
            eprintln!("rank {rank} is not replaced: {error}");
        }
    }

    /// A replacement has ended before the others admitted it.
    fn lose_replacement(&mut self, rank: usize, is_invited: bool) {
        let Some(exit) = self.workers.states[rank].exit else {
            return;
        };
        let failure = self.describe(rank, Fault::Ended(exit.how), None, exit.at);
        if failure.is_for_good().is_some() || exit.how.is_success() {
            self.roster.start_no_more();
        }
        let incident = format!("replacement of {}", failure.incident());
        if is_invited {
            let members = self.roster.members().to_vec();
            return self.publish(failure.rank, &members, &incident);
        }
        let none_left = match self.roster.left() {
            0 => "; no restart is left for another one",
            _ => "",
        };
        eprintln!("{incident}{none_left}");
    }

    /// Ends the replacements that wait for ranks that have all ended.
    fn dismiss_replacements(&self) {
        let states = &self.workers.states;
        let is_over = self.seen.failure.is_some()
            || self.seen.asked.is_some_and(Asked::is_ending)
            || (states.iter()).all(|state| state.is_out || state.exit.is_some());
        if is_over {
            let waiting = self.workers.alive().map(|(rank, _)| rank);
            waiting
                .filter(|rank| states[*rank].is_out)
                .for_each(|rank| self.workers.kill(rank));
        }
    }

    /// Tells the ranks and keeps the failure for the report.
    fn fail(&mut self, failure: Failure) {
        // A rank may have revoked the page first and known less. Its text stays on the page; the report has this one.
        self.page.revoke(&Revocation {
            rank: Some(failure.rank),
            text: failure.headline(),
        });
        self.seen.failure = Some(failure);
    }

    /// Ends the ranks that have not left by themselves.
    fn end_after_a_failure(&mut self) {
        // One that looks at the page acts on SIGTERM at its next step boundary, which it does not reach any more.
        if self.all_poll() {
            return self.kill();
        }
        let polls = |rank| self.page.slot(rank).polls_stop();
        for (_, worker) in self.workers.alive().filter(|(rank, _)| polls(*rank)) {
            worker.signal_group(Signal::KILL);
        }
        self.stop(Signal::TERM)
    }

    /// Whether only the blamed rank is left, which reports nothing when it stalls.
    fn only_the_blamed_is_alive(&self) -> bool {
        let blamed = self.seen.failure.as_ref().map(|failure| failure.local_rank);
        self.workers.alive().all(|(rank, _)| Some(rank) == blamed)
    }

    fn read_page(&mut self) {
        let now = self.started.elapsed();
        self.note_admitted();
        for rank in 0..self.workers.states.len() {
            let (slot, pid) = (self.page.slot(rank), self.workers.pid(rank));
            let blames = slot.victim_in(self.generation);
            let blames = blames.and_then(|rank| self.local(rank));
            let waits = slot.awaits() == Some(self.generation);
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
            state.stopped = state.exit.is_none() && Stat::read(pid).is_some_and(Stat::is_stopped);
        }
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
            Fault::Stalled => FailureKind::Stalled {
                state: Stat::read(pid).map_or_else(|| "gone".to_owned(), Stat::state_text),
            },
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
    fn activity(&self, rank: usize) -> Option<String> {
        let (activity, since) = self.page.slot(rank).activity()?;
        if activity.phase == Phase::Finished {
            return None;
        }
        let alive = self.workers.states[rank].exit.is_none();
        let since = if alive {
            format!(", for {:.1} s", since.as_secs_f64())
        } else {
            String::new()
        };
        Some(format!("{activity}{since}"))
    }

    fn on_signal(&mut self, signal: i32) {
        let meaning = meaning(signal);
        if meaning == Meaning::Pass {
            return self.pass_on(signal);
        }
        let asked = Asked {
            signal,
            on_page: (0..self.workers.states.len()).any(|rank| self.page.slot(rank).polls_stop()),
        };
        let is_first = self.seen.asked.is_none();
        if meaning == Meaning::End || is_first {
            self.seen.asked = Some(asked);
        }
        match (meaning, self.stage) {
            (Meaning::End, Stage::Running | Stage::Saving) => self.ask_to_end(asked),
            (Meaning::End, Stage::Reporting) => self.stop(Signal::TERM),
            (Meaning::End, Stage::Stopping) => self.kill(),
            (_, Stage::Running) => self.ask(asked, is_first),
            _ => {}
        }
    }

    fn all_poll(&self) -> bool {
        let mut alive = self.workers.alive();
        alive.all(|(rank, _)| self.page.slot(rank).polls_stop())
    }

    /// Has the ranks save within the grace, in a step that those of all nodes agree on.
    fn save(&mut self) {
        self.seen.is_saved = true;
        self.page.request_stop(libc::SIGTERM);
        self.enter(Stage::Saving, self.job.grace);
    }

    /// Has the ranks end within the grace.
    fn ask_to_end(&mut self, asked: Asked) {
        self.page.request_stop(asked.signal);
        if !asked.on_page {
            return self.stop(Signal::from_named_raw(asked.signal).unwrap_or(Signal::TERM));
        }
        let signal = signals::name(asked.signal);
        eprintln!("{signal}: stopping after this step; once more to stop at once without saving");
        self.enter(Stage::Stopping, self.job.grace);
    }

    /// Lets the ranks know that they should stop when they are ready to. Schedulers send some signals more than once.
    fn ask(&self, asked: Asked, is_first: bool) {
        self.page.request_stop(asked.signal);
        let signal = signals::name(asked.signal);
        if !asked.on_page {
            self.pass_on(asked.signal);
        }
        if is_first && asked.on_page {
            eprintln!("{signal}: stopping after this step");
        } else if is_first {
            eprintln!("{signal}: passed on to the ranks");
        }
    }

    /// To the ranks' own processes only: a helper process that does not handle the signal would end.
    fn pass_on(&self, signal: i32) {
        if let Some(signal) = Signal::from_named_raw(signal) {
            self.workers.signal(signal);
        }
    }

    fn stop(&mut self, signal: Signal) {
        self.workers.signal_groups(signal);
        self.enter(Stage::Stopping, self.job.grace);
    }

    fn kill_the_slow(&mut self) {
        for (rank, worker) in self.workers.alive() {
            let rank = self.place.first_rank + rank;
            let (pid, grace) = (worker.pid(), self.job.grace.as_secs_f64());
            let asked = signals::name(self.seen.asked.map_or(libc::SIGTERM, |asked| asked.signal));
            self.seen.notes.push(format!(
                "rank {rank} (pid {pid}) did not end within {grace} s of {asked} and was killed"
            ));
        }
        self.kill()
    }

    fn kill(&mut self) {
        self.seen.killed = true;
        self.workers.signal_groups(Signal::KILL);
        self.enter(Stage::Killing, KILLED_ENDS_WITHIN);
    }
}
