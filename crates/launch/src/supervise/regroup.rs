//! Live recovery over several nodes: what this node's ranks do while the launchers agree on the next generation.
//!
//! ```text
//!  supervisor                        agent                           the other agents
//!    a rank is lost           ---->  its page: failed        ---->   the next round continues this one
//!    ends the generation      <----  regroup                 <----
//!    these slots go on        ---->  its page: ready, slots  ---->   all are ready: the round runs
//!    publishes the next one   <----  go on                   <----
//!
//!    wants to start processes ---->  its page: places        ---->   the next round is an invitation
//!    these slots there are    <----  stay                    <----
//!    works on                 ---->  its page: ready, slots  ---->   all are ready: the round runs
//!    starts processes         <----  invite: so many         <----
//!    these are ready          ---->  its page: places        ---->   an invitation, and all are ready
//!    invites its ranks        <----  invite                  <----
//!    its ranks have followed  ---->  its page: begun         ---->   the next invitation may follow
//! ```

use std::time::Instant;

use paceline_rendezvous::page::Generation;
use paceline_words::{Lang, Text};

use super::{Regrouping, Stage, Supervisor};
use crate::elastic::record::Places;
use crate::judge::Fault;
use crate::notice;
use crate::report::{Failure, ranks_go_on};
use crate::worker::KILLED_ENDS_WITHIN;

impl Supervisor<'_> {
    /// A rank of this node has failed, and it is dead: the others end their generation, and the launchers agree on the next.
    pub(super) fn tell_of_loss(&mut self, failure: Failure) {
        self.page.end_generations(failure.rank);
        let is_new = self.workers.states[failure.local_rank].is_new;
        if is_new && failure.is_for_good().is_some() {
            self.roster.start_no_more();
        }
        self.seen.lost = Some(Failure {
            // The others go on without a replacement whose settings are wrong.
            is_misconfigured: failure.is_misconfigured && !is_new,
            ..failure
        });
        self.regrouping = Some(Regrouping::Told);
    }

    pub(super) fn regroup(&mut self, culprit: Option<usize>) {
        self.read_page();
        if self.stage == Stage::Running && !self.page.is_revoked() {
            self.page.end_generations(culprit);
            let hangs = culprit.and_then(|rank| self.local(rank));
            let hangs = hangs.filter(|rank| {
                // Another process may be about to take the place.
                self.roster.members().contains(rank) && self.workers.states[*rank].exit.is_none()
            });
            if let (Some(rank), None) = (hangs, &self.given_up) {
                let failure = self.describe(rank, Fault::Stalled, None, self.started.elapsed());
                self.workers.kill(rank);
                self.given_up = Some((failure, Instant::now() + KILLED_ENDS_WITHIN));
            }
        }
        self.regrouping = Some(Regrouping::Asked);
        self.regroup_when_dead();
    }

    /// Says which ranks go on, once a rank that is being killed has ended. Says when to look again.
    pub(super) fn regroup_when_dead(&mut self) -> Option<Instant> {
        if self.regrouping != Some(Regrouping::Asked) {
            return None;
        }
        if let Some((failure, until)) = self.given_up.take()
            && self.workers.states[failure.local_rank].exit.is_none()
        {
            let is_over = Instant::now() >= until;
            if !is_over {
                self.given_up = Some((failure, until));
                return Some(until);
            }
            // A process that even SIGKILL does not end could still be heard by the others.
            self.answer(None);
            return None;
        }
        let states = &self.workers.states;
        let goes_on = |rank: &usize| states[*rank].exit.is_none() && !states[*rank].is_new;
        let left = self.roster.members().iter().copied().filter(goes_on);
        let left: Vec<usize> = left.collect();
        let is_able = self.stage == Stage::Running
            && !self.page.is_revoked()
            && left.iter().all(|rank| self.page.slot(*rank).recovers());
        self.answer(is_able.then_some(left));
        None
    }

    fn answer(&mut self, slots: Option<Vec<usize>>) {
        self.regrouping = Some(Regrouping::Told);
        self.coordinator.regrouped(slots);
    }

    /// All nodes are ready. Those of its ranks that have died since are lost in this generation.
    pub(super) fn go_on_in(&mut self, next: &Generation, why: &Text) {
        self.page.explain_generation(next.number, why.of(Lang::En));
        self.page.publish(next);
        self.generation = next.number;
        if let (0, Some(first)) = (next.first, next.members.first()) {
            self.output.show_first(*first);
        }
        self.roster.go_on(&next.members, &self.workers.states);
        self.mark_members();
        self.invitation.clear();
        self.seen.places = Places::default();
        self.seen.lost = None;
        self.seen.complaints.clear();
        self.regrouping = None;
        let lang = self.job.lang;
        let (why, state) = (why.of(lang), ranks_go_on(next.world, next.is_held, lang));
        notice::line(format_args!("{why}; {state}"));
    }

    /// All nodes are ready to admit newcomers, and `replacements` processes may have been started here by now. The ranks work on
    /// until they follow.
    pub(super) fn invite_to(
        &mut self,
        next: Option<&Generation>,
        replacements: u32,
        incidents: Vec<String>,
    ) {
        self.roster.allow(replacements);
        self.seen.places = Places::default();
        let Some(next) = next.filter(|_| self.regrouping.is_none()) else {
            return;
        };
        self.invitation = incidents;
        let has_ended = |slot: &&usize| {
            !self.roster.members().contains(slot) && !self.roster.invited().contains(slot)
        };
        if let Some(slot) = next.members.iter().find(has_ended) {
            let failure = self.describe(*slot, Fault::LeftEarly, None, self.started.elapsed());
            return self.tell_of_loss(failure);
        }
        self.page.invite(next);
    }
}
