//! Ends ranks: by signals, by orders of the coordinator, and after a failure.

use paceline_rendezvous::page::Revocation;
use paceline_words::say;
use rustix::process::Signal;

use super::{Stage, Supervisor};
use crate::elastic::messages::{How, Order};
use crate::notice;
use crate::signals;
use crate::stop::{Asked, Meaning, meaning};
use crate::worker::KILLED_ENDS_WITHIN;

impl Supervisor<'_> {
    /// Does as the coordinator says.
    pub(super) fn obey(&mut self, order: Order) {
        match order {
            Order::End(how) => self.end(how),
            Order::Regroup(culprit) => self.regroup(culprit),
            Order::GoOn { next, why } => self.go_on_in(&next, &why),
            Order::Begin => self.page.begin_generation(self.page.newest_generation()),
            Order::Release => self.page.release(),
            Order::Stay => {
                let members = self.roster.members().to_vec();
                self.coordinator.regrouped(Some(members));
            }
            Order::Invite {
                next,
                replacements,
                incidents,
            } => self.invite_to(next.as_ref(), replacements, incidents),
        }
    }

    /// Ends the ranks, unless they are already ending sooner.
    fn end(&mut self, how: How) {
        self.seen.is_ordered = true;
        // They do not go on without it after all.
        if let Some(lost) = self.seen.lost.take() {
            self.seen.failure.get_or_insert(lost);
        }
        match (how, self.stage) {
            (_, Stage::Killing)
            | (How::Save | How::Next | How::Over, Stage::Stopping)
            | (How::Save, Stage::Saving)
            | (How::Over, Stage::Reporting) => {}
            // They end by themselves once it is written.
            (How::Next, Stage::Reporting) if self.some_leave_state() => {
                self.enter(Stage::Reporting, self.job.grace);
            }
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

    /// Ends the ranks that have not left by themselves.
    pub(super) fn end_after_a_failure(&mut self) {
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

    /// Whether ranks that are left write their state for the next start.
    fn some_leave_state(&self) -> bool {
        let mut left = self.alive_unblamed();
        left.any(|rank| self.page.slot(rank).leaves_state())
    }

    /// Whether only the blamed rank is left, which reports nothing when it stalls.
    pub(super) fn only_the_blamed_is_alive(&self) -> bool {
        self.alive_unblamed().next().is_none()
    }

    fn alive_unblamed(&self) -> impl Iterator<Item = usize> {
        let blamed = self.seen.failure.as_ref().map(|failure| failure.local_rank);
        let alive = self.workers.alive().map(|(rank, _)| rank);
        alive.filter(move |rank| Some(*rank) != blamed)
    }

    pub(super) fn on_signal(&mut self, signal: i32) {
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
        let line = say!(
            self.job.lang,
            "{signal}: stopping after this step; once more to stop at once without saving",
            "{signal}: 이 스텝을 마치고 중단; 한 번 더 보내면 저장하지 않고 바로 중단"
        );
        notice::line(&line);
        self.enter(Stage::Stopping, self.job.grace);
    }

    /// Lets the ranks know that they should stop when they are ready to. Schedulers send some signals more than once.
    fn ask(&self, asked: Asked, is_first: bool) {
        self.page.request_stop(asked.signal);
        let signal = signals::name(asked.signal);
        if !asked.on_page {
            self.pass_on(asked.signal);
        }
        if is_first {
            let lang = self.job.lang;
            let line = match asked.on_page {
                true => say!(
                    lang,
                    "{signal}: stopping after this step",
                    "{signal}: 이 스텝을 마치고 중단"
                ),
                false => say!(
                    lang,
                    "{signal}: passed on to the ranks",
                    "{signal}: 랭크에 전달함"
                ),
            };
            notice::line(&line);
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

    pub(super) fn kill_the_slow(&mut self) {
        for (rank, worker) in self.workers.alive() {
            let rank = self.place.first_rank + rank;
            let (pid, grace) = (worker.pid(), self.job.grace.as_secs_f64());
            let asked = signals::name(self.seen.asked.map_or(libc::SIGTERM, |asked| asked.signal));
            self.seen.notes.push(say!(
                self.job.lang,
                "rank {rank} (pid {pid}) did not end within {grace} s of {asked} and was killed",
                "랭크 {rank}(pid {pid}): {asked} 후 {grace}초 안에 끝나지 않아 강제 종료함"
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
