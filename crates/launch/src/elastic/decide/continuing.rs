//! Rounds that continue another one's processes.

use super::Known;
use super::members::Gone;
use crate::elastic::record::{Member, Phase, Record, RoundId, State, Why};

impl Known<'_> {
    /// The round whose processes go on in the round after `record`, if they do.
    pub(super) fn continued(&self, record: &Record, why: &Why) -> Option<RoundId> {
        let has_ended = |member: &Member| {
            let page = self.page(member.id).map(|seen| &seen.page.state);
            page == Some(&State::Done(record.id))
        };
        let is_wished = match why {
            Why::Failure(report) => report.recovers,
            Why::Joined(_) => false,
            _ => self.rules.recovers_live,
        };
        let since = match record.phase {
            Phase::Running(_) => Some(record.continues.unwrap_or(record.id)),
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
}
