//! Live recovery on this node: the next generation after a loss, and the processes in place of lost ranks.

use std::time::{Duration, Instant};

use paceline_rendezvous::page::Phase;
use paceline_words::{Lang, Text, say};

use super::{Stage, Supervisor};
use crate::elastic::record::{Newcomer, Places};
use crate::error_file;
use crate::judge::Fault;
use crate::notice;
use crate::recovery::{self, Due, Impossible, Mended, Next, Recovery};
use crate::report::{Failure, ranks_go_on};
use crate::stop::Asked;
use crate::worker::KILLED_ENDS_WITHIN;

/// While a lost rank's replacement is on its way, the pause between two looks at the page.
const JOIN_LOOK: Duration = Duration::from_millis(10);

impl Supervisor<'_> {
    /// Has the ranks that are left go on, if they can; else the failure is the job's. Says when to look again.
    pub(super) fn go_on_without(&mut self, failure: Failure, was_killed: bool) -> Option<Instant> {
        if let Some(first) = self.finished() {
            return self.end_without(&failure, first);
        }
        let is_new = self.workers.states[failure.local_rank].is_new;
        // With a common error, the others end too.
        let ends_alone = !failure.is_common && failure.is_for_good().is_none();
        let is_live = self.job.recovers_live()
            && self.stage == Stage::Running
            && (is_new || ends_alone)
            && !self.page.is_revoked();
        let recovers = |rank| self.page.slot(rank).recovers();
        match is_live.then(|| self.next_without(Some(failure.local_rank))) {
            Some(Ok(Next::GoOn { .. }) | Err(Impossible::NobodyLeft))
                if self.is_on_several_nodes() && recovers(failure.local_rank) =>
            {
                self.tell_of_loss(failure);
                None
            }
            Some(Ok(Next::GoOn { members, lost })) => {
                if is_new && failure.is_for_good().is_some() {
                    self.roster.start_no_more();
                }
                let lost = self.lost(&failure, lost);
                self.publish(Some(failure.rank), &members, &incidents(&lost));
                Some(Instant::now())
            }
            Some(Ok(Next::Kill)) if !was_killed => {
                self.page.end_generations(failure.rank);
                self.workers.kill(failure.local_rank);
                let until = Instant::now() + KILLED_ENDS_WITHIN;
                self.given_up = Some((failure, until));
                Some(until)
            }
            Some(Err(why)) => {
                // A program without it that was not asked for it has nothing to say.
                let is_asked = self.job.recovery == Recovery::Live;
                if is_asked || (0..self.workers.states.len()).any(recovers) {
                    let (lang, why) = (self.job.lang, why.text(self.job.lang));
                    let note = say!(lang, "no live recovery: {why}", "실시간 복구 안 함: {why}");
                    self.seen.notes.push(note);
                }
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

    /// Whether all ranks that live may go on if the group fails without a lost rank.
    pub(super) fn all_may_go_on(&self) -> bool {
        let may = || Mended::may_again(self.mended, self.step(), self.started.elapsed());
        self.job.recovers_live()
            && !self.is_on_several_nodes()
            && self.stage == Stage::Running
            && !self.page.is_revoked()
            && self.finished().is_none()
            && may()
            && self.next_without(None).is_ok()
    }

    /// Has all ranks that live form a group again. Says when to look again.
    pub(super) fn go_on_together(
        &mut self,
        by: usize,
        because_of: Option<usize>,
    ) -> Option<Instant> {
        let Ok(Next::GoOn { members, lost }) = self.next_without(None) else {
            return Some(Instant::now());
        };
        let now = self.started.elapsed();
        self.mended = Some(Mended::again(self.mended, self.step(), now));
        let cause = |lang| {
            let who = self.name(by, lang);
            match because_of.map(|other| self.name(other, lang)) {
                Some(other) => say!(
                    lang,
                    "{who} lost {other}, which lives",
                    "{who}: {other} 쪽 연결이 끊김, 상대는 살아 있음"
                ),
                None => say!(
                    lang,
                    "{who} lost the others, which live",
                    "{who}: 다른 랭크 쪽 연결이 모두 끊김, 상대는 살아 있음"
                ),
            }
        };
        let lost = lost.into_iter().filter_map(|rank| {
            let exit = self.workers.states[rank].exit?;
            Some(self.describe(rank, exit.fault(), None, now))
        });
        let lost: Vec<Failure> = lost.collect();
        let incidents = Text::new(|lang| {
            let lost = lost.iter().map(|failure| failure.incident(lang));
            let all: Vec<String> = std::iter::once(cause(lang)).chain(lost).collect();
            all.join("; ")
        });
        self.publish(None, &members, &incidents);
        Some(Instant::now())
    }

    /// What follows the failure of `culprit`, or of the group if no rank is to blame.
    fn next_without(&self, culprit: Option<usize>) -> Result<Next, Impossible> {
        let recovers = |rank| self.page.slot(rank).recovers();
        (self.roster).after_failure(&self.workers.states, recovers, culprit)
    }

    /// The step that the ranks are in, as far as they say so.
    fn step(&self) -> u64 {
        let slots = (0..self.workers.states.len()).map(|rank| self.page.slot(rank));
        let steps = slots.filter_map(|slot| Some(slot.activity()?.0.step));
        steps.max().unwrap_or(0)
    }

    /// The first rank of this node, if it has said that the job is done.
    fn finished(&self) -> Option<usize> {
        let first = self.roster.members().first().copied()?;
        let (activity, _) = self.page.slot(first).activity()?;
        let is_done = activity.phase == Phase::Finished;
        (self.job.recovers_live() && self.stage == Stage::Running && is_done).then_some(first)
    }

    /// Ends a rank that fails after the job is done, and those that wait for it. Their ends are no failures.
    fn end_without(&mut self, failure: &Failure, first: usize) -> Option<Instant> {
        let lang = self.job.lang;
        let (incident, first) = (failure.incident(lang), self.place.first_rank + first);
        let line = say!(
            lang,
            "{incident}; rank {first} had said before that the job is done",
            "{incident}; 그 전에 랭크 {first}에서 작업이 끝났다고 알림"
        );
        notice::line(&line);
        for (rank, state) in self.workers.states.iter_mut().enumerate() {
            state.is_out |= rank == failure.local_rank || state.waits_since.is_some();
        }
        self.kill_outsiders();
        Some(Instant::now())
    }

    /// Ends those that the generation goes on without.
    fn kill_outsiders(&self) {
        let alive = self.workers.alive().map(|(rank, _)| rank);
        let is_out = |rank: &usize| self.workers.states[*rank].is_out;
        alive
            .filter(is_out)
            .for_each(|rank| self.workers.kill(rank));
    }

    /// "rank 1 (pid 4711)".
    fn name(&self, rank: usize, lang: Lang) -> String {
        let (global, pid) = (self.place.first_rank + rank, self.workers.pid(rank));
        say!(
            lang,
            "rank {global} (pid {pid})",
            "랭크 {global}(pid {pid})"
        )
    }

    /// The failure of each rank that was lost.
    fn lost(&self, failure: &Failure, lost: Vec<usize>) -> Vec<Failure> {
        let now = self.started.elapsed();
        let lost = lost.into_iter().map(|rank| {
            let exit = self.workers.states[rank].exit;
            match exit.filter(|_| rank != failure.local_rank) {
                Some(exit) => self.describe(rank, exit.fault(), None, now),
                None => failure.clone(),
            }
        });
        lost.collect()
    }

    /// Publishes the next generation, because of global rank `culprit` if it is one, and says on standard error why there is one.
    pub(super) fn publish(&mut self, culprit: Option<usize>, members: &[usize], incidents: &Text) {
        self.page.end_generations(culprit);
        if let Some(first) = members.first() {
            self.output.show_first(*first);
        }
        let next = self.page.newest_generation().saturating_add(1);
        self.page.explain_generation(next, incidents.of(Lang::En));
        self.generation = self.page.publish_generation(members);
        self.invitation.clear();
        self.roster.go_on(members, &self.workers.states);
        self.mark_members();
        let lang = self.job.lang;
        let left = ranks_go_on(members.len(), false, lang);
        let mut incident = format!("{}; {left}", incidents.of(lang));
        if self.roster.left() == 0 && self.roster.started() > 0 {
            incident += &say!(
                lang,
                ", no restart is left for a replacement",
                ", 대체 랭크를 시작할 재시작 횟수가 남지 않음"
            );
        }
        notice::line(&incident);
    }

    /// Takes note that the ranks have followed an invitation.
    pub(super) fn note_admitted(&mut self) {
        let begun = self.page.begun_generation();
        if begun == self.generation {
            return;
        }
        self.generation = begun;
        self.roster.admit();
        self.mark_members();
        for incident in self.invitation.drain(..) {
            notice::line(&incident);
        }
    }

    /// Invites the ranks of this node, which is the only one.
    fn invite(&mut self, members: &[usize]) {
        let lang = self.job.lang;
        let now = ranks_go_on(members.len(), false, lang);
        let line = |rank: &usize| {
            let who = self.name(*rank, lang);
            say!(
                lang,
                "{who} joins as a replacement; {now}",
                "{who}: 대체 랭크로 합류; {now}"
            )
        };
        self.invitation = self.roster.invited().iter().map(line).collect();
        self.page.invite_generation(members);
    }

    pub(super) fn is_on_several_nodes(&self) -> bool {
        self.job.cluster.is_some()
    }

    pub(super) fn mark_members(&mut self) {
        for (rank, state) in self.workers.states.iter_mut().enumerate() {
            state.is_out = !self.roster.members().contains(&rank);
            state.waits_since = None;
        }
    }

    /// Starts processes in place of lost ranks and invites the others to admit them. Says when to look again.
    pub(super) fn fill_places(&mut self) -> Option<Instant> {
        let is_running = self.stage == Stage::Running && self.seen.asked.is_none();
        self.seen.places = Places::default();
        if !self.job.recovers_live() || !is_running || self.given_up.is_some() {
            return None;
        }
        let ready_within = self.ready_within();
        let page = self.page;
        while self.regrouping.is_none() {
            let seen = recovery::Seen {
                states: &self.workers.states,
                admits: &|rank| page.slot(rank).admits(),
                is_ready: &|rank| page.slot(rank).is_ready_to_join(),
                has_room: !self.workers.is_one_leaving(),
                now: self.started.elapsed(),
                ready_within,
            };
            match self.roster.due(&seen) {
                Some(Due::Lost { rank, is_invited }) => self.lose_replacement(rank, is_invited),
                Some(Due::Kill(rank)) => self.kill_replacement(rank),
                Some(Due::Start(rank)) => self.start_replacement(rank),
                // The launchers have to agree on it first.
                Some(Due::Invite(_)) if self.is_on_several_nodes() => {}
                Some(Due::Invite(members)) => self.invite(&members),
                None => {
                    self.seen.places = self.places(&seen);
                    break;
                }
            }
        }
        let soon = Instant::now() + JOIN_LOOK;
        let is_changing = self.roster.is_changing() || !self.invitation.is_empty();
        is_changing.then_some(soon)
    }

    /// What the other nodes have to know of the places of lost ranks here.
    fn places(&self, seen: &recovery::Seen<'_>) -> Places {
        let newcomer = |slot: &usize| Newcomer {
            slot: *slot,
            pid: self.workers.pid(*slot),
        };
        // One invitation at a time.
        let waiting = (self.roster.invited().iter()).filter(|_| self.invitation.is_empty());
        let mut members = self.roster.members().iter();
        Places {
            admits: self.trains_since.is_some(),
            is_admitting: members.any(|rank| self.workers.states[*rank].is_new),
            wanted: self.roster.wanted(seen),
            newcomers: waiting.map(newcomer).collect(),
        }
    }

    fn start_replacement(&mut self, rank: usize) {
        let number = self.roster.started();
        let (job, plan) = (self.job, self.plan);
        let started = (self.workers).replace(job, plan, self.shared, self.output, (rank, number));
        self.seen.replaced = number;
        self.workers.states[rank].started = self.started.elapsed();
        if let Err(error) = started {
            self.roster.start_no_more();
            let (lang, rank) = (self.job.lang, self.place.first_rank + rank);
            let line = say!(
                lang,
                "rank {rank} is not replaced: {error}",
                "랭크 {rank}: 대체하지 못함, {error}"
            );
            notice::line(&line);
        }
    }

    /// How long a replacement may take until it is ready.
    fn ready_within(&self) -> Duration {
        let members = self.roster.members().iter();
        let timeouts = members.filter_map(|rank| self.page.slot(*rank).timeout());
        let timeout = timeouts.max().unwrap_or(Duration::MAX);
        recovery::ready_within(timeout, self.trains_since.unwrap_or_default())
    }

    /// Notes when all ranks have begun to train.
    pub(super) fn note_training(&mut self, now: Duration) {
        let mut members = self.roster.members().iter();
        if self.trains_since.is_none() && members.all(|rank| self.page.slot(*rank).admits()) {
            self.trains_since = Some(now);
        }
    }

    /// Ends a replacement that does not get ready.
    fn kill_replacement(&self, rank: usize) {
        let failure = self.describe(rank, Fault::Stalled, None, self.started.elapsed());
        let incident = replacement_of(&failure, self.job.lang);
        let line = say!(
            self.job.lang,
            "{incident}; it is killed",
            "{incident}; 강제 종료함"
        );
        notice::line(&line);
        self.workers.kill(rank);
    }

    /// A replacement has ended before the others admitted it.
    fn lose_replacement(&mut self, rank: usize, is_invited: bool) {
        let Some(exit) = self.workers.states[rank].exit else {
            return;
        };
        let failure = self.describe(rank, exit.fault(), None, exit.at);
        if failure.is_for_good().is_some() || !exit.is_failure() {
            self.roster.start_no_more();
        }
        let is_joining = self.roster.members().is_empty();
        let incident = Text::new(|lang| match is_joining {
            true => {
                let incident = failure.incident(lang);
                say!(
                    lang,
                    "{incident}, before it had joined",
                    "{incident}, 합류하기 전"
                )
            }
            false => replacement_of(&failure, lang),
        });
        // What was here of the lost rank's was removed when the replacement started.
        let error = (self.output.error_file(rank)).and_then(|path| error_file::read(&path));
        let error = error.map_or(String::new(), |error| error.in_lines(self.job.lang));
        if is_invited && !self.is_on_several_nodes() {
            let members = self.roster.members().to_vec();
            self.publish(Some(failure.rank), &members, &incident);
            notice::lines(&error);
            return;
        }
        let lang = self.job.lang;
        let none_left = match self.roster.left() {
            0 if !is_joining => say!(
                lang,
                "; no restart is left for another one",
                "; 다시 대체할 재시작 횟수가 남지 않음"
            ),
            _ => String::new(),
        };
        notice::line(format_args!("{}{none_left}", incident.of(lang)));
        notice::lines(&error);
        if is_invited && !self.invitation.is_empty() {
            self.tell_of_loss(failure);
        }
    }

    /// Ends the replacements that wait for ranks that have all ended.
    pub(super) fn dismiss_replacements(&self) {
        let states = &self.workers.states;
        let is_over = self.seen.failure.is_some()
            || self.seen.asked.is_some_and(Asked::is_ending)
            || !self.roster.members().is_empty()
                && (states.iter()).all(|state| state.is_out || state.exit.is_some());
        if is_over {
            self.kill_outsiders();
        }
    }
}

/// A sentence for each of these.
fn incidents(lost: &[Failure]) -> Text {
    Text::new(|lang| {
        let incidents = lost.iter().map(|failure| failure.incident(lang));
        incidents.collect::<Vec<_>>().join("; ")
    })
}

fn replacement_of(failure: &Failure, lang: Lang) -> String {
    let incident = failure.incident(lang);
    say!(lang, "replacement of {incident}", "대체 {incident}")
}
