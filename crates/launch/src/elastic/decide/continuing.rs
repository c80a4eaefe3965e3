//! Rounds that continue another one's processes.

use super::members::Gone;
use super::{Decision, Known, Wait};
use crate::elastic::record::{Ending, Member, Phase, Record, RoundId, State, Why};

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
        let members: Vec<_> = left.filter(|member| !is_gone(member)).cloned().collect();
        let is_enough = members.len() >= self.rules.nodes_min;
        is_enough.then(|| Record {
            continues: Some(continues),
            members: members.clone(),
            ..self.forming(Some(record), members, record.restarts, why.clone())
        })
    }

    /// The round in which the ranks of `record` admit others, if some wait or a node asks whether it may start some. All ranks have
    /// followed the invitation before.
    pub(super) fn admission(&self, record: &Record) -> Option<Record> {
        let continues = self.continued(record, &Why::Admission)?;
        let pages = || (record.members.iter()).filter_map(|member| self.page(member.id));
        let all_have_begun = pages().all(|seen| seen.page.begun == record.id);
        let is_left = record.restarts < self.rules.max_restarts;
        let is_asked = pages().any(|seen| {
            let places = &seen.page.places;
            !places.newcomers.is_empty() || is_left && places.wanted > 0
        });
        let mut members = record.members.clone();
        for member in &mut members {
            member.newcomers.clear();
        }
        (all_have_begun && is_asked).then(|| Record {
            continues: Some(continues),
            members: members.clone(),
            ..self.forming(Some(record), members, record.restarts, Why::Admission)
        })
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
        let pages = || (record.members.iter()).filter_map(|member| self.page(member.id));
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
            done if done == record.members.len() => {
                let ending = self.stop(record).map_or(Ending::Finished, Ending::Stopped);
                Some(self.publish(self.ended(Some(record), ending)))
            }
            _ => Some(Wait::for_news("the ranks of other nodes end")),
        }
    }
}
