//! Rounds that continue another one's processes.

use std::ops::Range;

use super::members::Gone;
use super::{Decision, Known, OTHERS_END, TOO_FEW, Wait};
use crate::elastic::arrange::arrange;
use crate::elastic::record::{
    AgentId, Ending, Member, Page, Phase, Record, Report, RoundId, State, Why,
};

impl Known<'_> {
    /// The round whose processes go on in the round after `record`, if they do.
    pub(super) fn continued(&self, record: &Record, why: &Why) -> Option<RoundId> {
        let has_ended = |member: &Member| match self.page(member.id).map(|seen| &seen.page.state) {
            Some(State::Done(round)) => *round == record.id || record.is_invitation(),
            _ => false,
        };
        let is_wished = match why {
            Why::Failure(report) => report.recovers,
            Why::Joined(_) => false,
            _ => self.rules.recovers_live,
        };
        let since = match record.phase {
            Phase::Running(_) => Some(record.since()),
            Phase::Forming => record.continues,
            Phase::Short | Phase::Ended(_) => None,
        };
        since.filter(|_| is_wished && !record.members.iter().any(has_ended))
    }

    /// The round after `record` that continues it, if the ranks of enough members go on.
    pub(super) fn continuing(&self, record: &Record, gone: &[Gone], why: &Why) -> Option<Record> {
        let continues = self.continued(record, why)?;
        let is_gone = |member: &Member| gone.iter().any(|gone| gone.id == member.id);
        let able = self.able(gone);
        let is_able = |member: &&Member| able.iter().any(|page| page.id == member.id);
        let left = record.members.iter().filter(is_able);
        let mut members: Vec<_> = left.filter(|member| !is_gone(member)).cloned().collect();
        let is_new = |id: AgentId| !record.before.contains(&id);
        if record.is_invitation()
            && record.phase == Phase::Forming
            && !gone.is_empty()
            && gone.iter().all(|gone| is_new(gone.id))
        {
            // The others work on: only nodes that would join are gone.
            return Some(self.going_on(record, continues, members, Why::Admission));
        }
        // The ranks of those that join have no state yet.
        let joins = |member: &Member| {
            self.page(member.id)
                .is_some_and(|seen| seen.page.joins.is_some())
        };
        members.retain(|member| !joins(member));
        let may = self.may_go_on(&members);
        may.then(|| self.going_on(record, continues, members, why.clone()))
    }

    /// Whether a round may continue with these nodes: too few of them keep their ranks until others come, if these can join.
    pub(super) fn may_go_on(&self, members: &[Member]) -> bool {
        let admits = |member: &Member| self.page(member.id).is_some_and(|seen| seen.page.admits);
        let may_wait = !self.rules.is_static && !members.is_empty() && members.iter().all(admits);
        members.len() >= self.rules.nodes_min || may_wait
    }

    /// Whether only nodes whose ranks have all failed would make `next`, which is what becomes of `record`, large enough, and none of
    /// them may come back.
    pub(super) fn waits_in_vain(&self, record: &Record, next: &Record) -> bool {
        let is_short = |record: &Record| record.members.len() < self.rules.nodes_min;
        let is_spent = record.restarts >= self.rules.max_restarts;
        let is_failure = matches!(record.why, Why::Failure(_));
        is_failure && is_spent && is_short(next) && !is_short(record)
    }

    /// What becomes of a round that waits for more nodes.
    pub(super) fn await_nodes(&self, record: &Record) -> Decision {
        let left = self.rules.join_timeout.saturating_sub(self.record_age);
        if !left.is_zero() {
            return Wait::at_most(left, TOO_FEW);
        }
        let ending = self.gave_up(record, record.members.len());
        self.publish_if_quorate(record, &[], ending)
    }

    /// What follows the first failure.
    pub(super) fn after_failure(&self, record: &Record, report: Box<Report>) -> Decision {
        let is_left = record.restarts < self.rules.max_restarts;
        let is_end = self.stop(record).is_some() || report.failure.is_for_good().is_some();
        let (ending, why) = (Ending::Failed(report.clone()), Why::Failure(report));
        match (self.continued(record, &why), is_left) {
            _ if is_end => self.publish_if_quorate(record, &[], ending),
            (Some(_), _) => self.reform(record, &[], why, record.restarts),
            (None, true) => self.reform(record, &[], why, record.restarts + 1),
            (None, false) => self.publish_if_quorate(record, &[], ending),
        }
    }

    /// The round after one that was to continue another and cannot.
    pub(super) fn start_anew(&self, record: &Record) -> Decision {
        let ended = Record {
            continues: None,
            ..record.clone()
        };
        match &record.why {
            Why::Failure(report) if record.restarts >= self.rules.max_restarts => {
                self.publish_if_quorate(record, &[], Ending::Failed(report.clone()))
            }
            Why::Failure(_) => self.reform(&ended, &[], record.why.clone(), record.restarts + 1),
            why => self.reform(&ended, &[], why.clone(), record.restarts),
        }
    }

    fn going_on(
        &self,
        record: &Record,
        continues: RoundId,
        mut members: Vec<Member>,
        why: Why,
    ) -> Record {
        for member in &mut members {
            member.newcomers.clear();
        }
        Record {
            continues: Some(continues),
            members: members.clone(),
            restarts_before: record.restarts_before,
            ..self.forming(Some(record), members, record.restarts, why)
        }
    }

    /// The round in which the ranks of `record` admit others, if some wait or a node asks whether it may start some. All ranks have
    /// followed the invitation before, and those that they have admitted have the job's state.
    pub(super) fn admission(&self, record: &Record) -> Option<Record> {
        let continues = self.continued(record, &Why::Admission)?;
        let pages = (record.members.iter()).map(|member| Some(&self.page(member.id)?.page));
        let mut pages: Vec<&Page> = pages.collect::<Option<_>>()?;
        let is_settled = |page: &&Page| page.begun == record.id && !page.places.is_admitting;
        if !pages.iter().all(is_settled) {
            return None;
        }
        let is_left = record.restarts < self.rules.max_restarts;
        let is_asked = pages
            .iter()
            .any(|page| !page.places.newcomers.is_empty() || is_left && page.places.wanted > 0);
        let joining = self.ready_to_join(record, continues);
        if !is_asked && joining.is_empty() {
            return None;
        }
        pages.extend(joining);
        let order = arrange(&record.ids(), &pages, self.rules.nodes_max);
        let members = order.into_iter().map(|member| {
            let known = record.members.iter().find(|known| known.id == member.id);
            known.cloned().unwrap_or_else(|| {
                let page = pages.iter().find(|page| page.id == member.id);
                let joins = page.and_then(|page| page.joins);
                Member {
                    first: joins.map_or(0, |joins| joins.first),
                    ..member
                }
            })
        });
        Some(self.going_on(record, continues, members.collect(), Why::Admission))
    }

    /// Nodes whose ranks wait to join the job that `since` has started, as many as there is room for, in the order in which they
    /// have come.
    fn ready_to_join(&self, record: &Record, since: RoundId) -> Vec<&Page> {
        let mut taken: Vec<_> = record.members.iter().map(Member::started).collect();
        let mut ready = self.candidates(record);
        ready.retain(|page| {
            let is_ready = page.joins.is_some_and(|joins| joins.since == since)
                && page.state == State::Idle
                && !page.places.newcomers.is_empty();
            let Some(ranks) = page.joining().filter(|_| is_ready) else {
                return false;
            };
            // Two nodes may have taken the same numbers at the same moment; the later one takes others.
            let is_free = !taken.iter().any(|other| overlap(other, &ranks));
            taken.push(ranks);
            is_free
        });
        ready
    }

    /// A node whose ranks have failed comes at the price of a restart, and not again and again.
    fn may_come(&self, record: &Record, page: &Page) -> bool {
        let is_left = record.restarts < self.rules.max_restarts;
        !page.is_spent || is_left && page.failed_joins <= self.rules.max_restarts
    }

    /// Nodes that there is room for, in the order in which they have come.
    fn candidates(&self, record: &Record) -> Vec<&Page> {
        let mut nodes = self.able(&[]);
        nodes.retain(|page| self.may_come(record, page) && record.position(page.id).is_none());
        nodes.sort_by_key(|page| (page.joined, page.id));
        nodes.truncate(self.rules.nodes_max.saturating_sub(record.members.len()));
        nodes
    }

    /// Whether nodes that come join the ranks of this round while these go on.
    pub(super) fn admits(&self, record: &Record) -> bool {
        let admits = |member: &Member| self.page(member.id).is_some_and(|seen| seen.page.admits);
        matches!(record.phase, Phase::Running(_))
            && !self.rules.is_static
            && self.continued(record, &Why::Admission).is_some()
            && record.members.iter().all(admits)
    }

    /// The number for the first rank of this node, if its ranks are to join the job: the lowest that no other node has.
    pub(super) fn to_join(&self, record: &Record) -> Option<usize> {
        let is_next = (self.candidates(record).iter()).any(|page| page.id == self.me);
        // What is known of the others may be old, and its own page in the store too.
        let is_heard = self.contact < self.rules.silent_after();
        if !is_next || !is_heard || !self.may_come(record, self.own) || !self.admits(record) {
            return None;
        }
        let members = record.members.iter().map(Member::started);
        let others = self.pages.iter().filter(|seen| seen.page.id != self.me);
        let others = others.filter(|seen| record.position(seen.page.id).is_none());
        let taken = members.chain(others.filter_map(|seen| seen.page.joining()));
        let taken: Vec<_> = taken.collect();
        let starts = taken.iter().map(|ranks| ranks.end).chain([0]);
        let is_free = |first: &usize| {
            let ranks = *first..first + self.own.nproc;
            !taken.iter().any(|other| overlap(other, &ranks))
        };
        starts.filter(is_free).min()
    }

    /// Whether the ranks here are to join the job and still can.
    pub(super) fn may_wait_to_join(&self, record: &Record) -> bool {
        let since = match record.phase {
            Phase::Running(_) => Some(record.since()),
            Phase::Forming => record.continues,
            Phase::Short | Phase::Ended(_) => None,
        };
        let is_same = since.is_some() && since == self.own.joins.map(|joins| joins.since);
        let is_taken = |ranks: &Range<usize>| {
            (record.members.iter()).any(|member| overlap(&member.started(), ranks))
        };
        let is_free = self.own.joining().is_some_and(|ranks| !is_taken(&ranks));
        is_same && is_free && self.own.state == State::Idle
    }

    /// Puts the ranks into a round that continues another, once all of its nodes are ready.
    pub(super) fn assemble(&self, next: &mut Record) {
        let is_invitation = next.is_invitation();
        for member in &mut next.members {
            let Some(seen) = self.page(member.id) else {
                continue;
            };
            let places = &seen.page.places;
            member.slots.clone_from(&seen.page.slots);
            if is_invitation {
                let slots = places.newcomers.iter().map(|newcomer| newcomer.slot);
                member.slots.extend(slots);
                member.newcomers.clone_from(&places.newcomers);
                let left = self.rules.max_restarts.saturating_sub(next.restarts);
                let granted = places.wanted.min(left);
                member.replacements += granted;
                next.restarts += granted;
                // To have the ranks of a node back that have failed is a restart, too.
                let is_spent = seen.page.is_spent && next.restarts < self.rules.max_restarts;
                next.restarts += u32::from(is_spent);
            } else {
                member.newcomers.clear();
            }
        }
        // A node without ranks can come back.
        next.members.retain(|member| !member.slots.is_empty());
    }

    /// What follows if ranks fail or end before all nodes have said yes to an invitation.
    pub(super) fn interruption(&self, record: &Record) -> Option<Decision> {
        if !record.is_invitation() {
            return None;
        }
        let mut ids = record.ids();
        ids.retain(|id| record.before.contains(id));
        let pages = || ids.iter().filter_map(|id| self.page(*id));
        let failed = pages().find_map(|seen| match &seen.page.state {
            State::Failed(_, report) => Some(report.clone()),
            _ => None,
        });
        if let Some(report) = failed {
            return Some(self.after_failure(record, report));
        }
        let done = pages().filter(|seen| matches!(seen.page.state, State::Done(_)));
        match done.count() {
            0 => None,
            done if done == ids.len() => {
                let ending = self.stop(record).map_or(Ending::Finished, Ending::Stopped);
                Some(self.publish(self.ended(Some(record), ending)))
            }
            _ => Some(Wait::for_news(OTHERS_END)),
        }
    }
}

fn overlap(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}
