//! The times that agents report when ranks of several nodes have failed, so that the failures can be put in order.

use std::time::Duration;

use super::Agent;
use crate::elastic::clocks::Reading;
use crate::elastic::record::{AgentId, Page, State};

impl Agent {
    /// Puts the ways between this agent and the others on its page. Returns whether the others should know at once.
    pub(super) fn compare_clocks(&mut self, now: Duration) -> bool {
        let Some(record) = &self.record else {
            return false;
        };
        let round = record.id;
        let has_failed = |page: &&Page| matches!(&page.state, State::Failed(of, _) if *of == round);
        let failed = self.pages.iter().filter(has_failed);
        let first = record.members.first().map(|member| member.id);
        if first == Some(self.page.id) {
            let others = failed.filter(|page| page.id != self.page.id);
            let way = |page: &Page| Some((page.id, self.clocks.least_us(now, page.id)?));
            let ways: Vec<_> = others.filter_map(way).collect();
            let ids = |ways: &[(AgentId, i64)]| ways.iter().map(|(id, _)| *id).collect::<Vec<_>>();
            let is_news = !ways.is_empty() && ids(&ways) != ids(&self.page.ways);
            if is_news || ways.is_empty() {
                self.page.ways = ways;
            }
            return is_news;
        }
        let is_own = matches!(&self.page.state, State::Failed(of, _) if *of == round);
        let is_asked = is_own
            && failed.count() > 1
            && (self.pages.iter())
                .any(|page| Some(page.id) == first && page.noticed == Some(round));
        if !is_asked || self.page.way.is_some_and(|way| way.round == round) {
            return false;
        }
        self.page.way = first
            .and_then(|first| self.clocks.least_us(now, first))
            .map(|least_us| Reading { round, least_us });
        self.page.way.is_some()
    }
}
