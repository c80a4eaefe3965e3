//! The notices while this node waits for others: why, which nodes came, which are missing, and where the launchers meet.

use std::time::Duration;

use paceline_words::{Lang, Word, count, say, shortened, span};

use super::{Agent, Ranks};
use crate::elastic::messages::Command;
use crate::elastic::record::{Page, Phase, State};

/// Most nodes that one notice names.
const NAMED_MAX: usize = 8;

/// A wait of this node.
#[derive(Debug)]
pub(super) struct Waiting {
    since: Duration,
    /// The last notice, and when it was given.
    told: Option<(Duration, String)>,
}

impl Agent {
    /// Says why this node waits, when it has waited for a while and whenever the answer has changed, but not more often.
    ///
    /// *Returns*: when to look again.
    pub(super) fn tell_waiting(
        &mut self,
        now: Duration,
        why: Word,
        commands: &mut Vec<Command>,
    ) -> Duration {
        let is_idle = self.ranks == Ranks::None && self.signal.is_none() && self.over.is_none();
        let Some(text) = self.waits_for(why).filter(|_| is_idle) else {
            self.waiting = None;
            return Duration::MAX;
        };
        let waiting = self.waiting.get_or_insert(Waiting {
            since: now,
            told: None,
        });
        let before = waiting.told.as_ref();
        let due = before.map_or(waiting.since, |(at, _)| *at) + self.rules.notice_after;
        if before.is_some_and(|(_, told)| *told == text) {
            return Duration::MAX;
        }
        if now < due {
            return due;
        }
        waiting.told = Some((now, text.clone()));
        commands.push(Command::Notice(text));
        Duration::MAX
    }

    /// What this node waits for, if it waits for other nodes.
    fn waits_for(&self, why: Word) -> Option<String> {
        let (lang, why) = (self.rules.lang, why.of(self.rules.lang));
        let what = if self.pages.is_empty() {
            // The reason names the address itself.
            let place = match &self.unreached {
                Some(reason) if self.is_warned_of(reason) => return None,
                Some(reason) => format!("({reason})"),
                None => {
                    let places = self.candidates().join(", ");
                    say!(lang, "at {places}", "({places} 확인 중)")
                }
            };
            format!("{why} {place}")
        } else {
            match self.current() {
                None => {
                    let (here, endpoint) = (self.attendance(), &self.endpoint);
                    let note = self.rules.endpoint_note;
                    say!(
                        lang,
                        "{here}; the launchers meet at {endpoint}{note}",
                        "{here}; 런처가 만나는 곳: {endpoint}{note}"
                    )
                }
                Some(record) if record.phase == Phase::Short => {
                    format!("{why}, {}", self.attendance())
                }
                Some(record) if record.position(self.page.id).is_none() => {
                    let nodes = record.members.len();
                    let most = count(lang, self.rules.nodes_max, "node", "노드");
                    say!(
                        lang,
                        "the job runs on {nodes} of at most {most}",
                        "작업이 최대 {most} 중 {nodes}개에서 실행 중"
                    )
                }
                Some(_) => return None,
            }
        };
        Some(say!(lang, "waiting: {what}", "대기 중: {what}"))
    }

    /// Which nodes are here and which are missing.
    fn attendance(&self) -> String {
        let gone = |page: &&Page| matches!(page.state, State::Left(_));
        let mut here: Vec<_> = self.pages.iter().filter(|page| !gone(page)).collect();
        here.sort_by_key(|page| (page.node_rank, page.joined));
        let (min, max) = (self.rules.nodes_min, self.rules.nodes_max);
        let lang = self.rules.lang;
        let wanted = match (self.rules.is_static, min == max) {
            (true, _) | (_, true) => max.to_string(),
            _ => span(min, max, lang),
        };
        let names = some_of(here.iter().map(|page| page.name(lang)), lang);
        let have = if here.len() == 1 { "has" } else { "have" };
        let missing = if self.rules.is_static {
            let is_here = |rank: &usize| here.iter().any(|page| page.node_rank == Some(*rank));
            let missing = (0..max).filter(|rank| !is_here(rank));
            let name = |rank: usize| say!(lang, "node {rank}", "노드 {rank}");
            some_of(missing.map(name), lang)
        } else {
            match min.saturating_sub(here.len()) {
                0 => String::new(),
                missing => say!(lang, "at least {missing}", "최소 {missing}개"),
            }
        };
        let here = here.len();
        let joined = say!(
            lang,
            "{here} of {wanted} nodes {have} joined ({names})",
            "노드 {wanted}개 중 {here}개가 옴({names})"
        );
        match missing.as_str() {
            "" => joined,
            _ => say!(
                lang,
                "{joined}, missing: {missing}",
                "{joined}, 오지 않음: {missing}"
            ),
        }
    }
}

/// A list with commas that stays readable with a thousand nodes.
fn some_of(names: impl Iterator<Item = String>, lang: Lang) -> String {
    shortened(names.collect(), NAMED_MAX, lang)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elastic::agent::Link;
    use crate::elastic::decide::Rules;
    use crate::elastic::record::AgentId;

    fn page(id: u64, host: &str, node_rank: Option<usize>) -> Page {
        Page {
            host: host.to_owned(),
            node_rank,
            ..Page::new(AgentId(id))
        }
    }

    fn agent(nodes: (usize, usize), is_static: bool) -> Agent {
        let rules = Rules {
            nodes_min: nodes.0,
            nodes_max: nodes.1,
            is_static,
            notice_after: Duration::from_secs(2),
            ..Rules::example()
        };
        let own = page(1, "a", is_static.then_some(1));
        Agent::new(rules, own, "node0:29501".to_owned(), Duration::ZERO)
    }

    #[track_caller]
    fn says(agent: &mut Agent, at: u64) -> Option<String> {
        let seeking = Word::new("no launcher of the job answers", "응답하는 런처가 없음");
        let mut commands = Vec::new();
        agent.tell_waiting(Duration::from_secs(at), seeking, &mut commands);
        commands.pop().map(|command| match command {
            Command::Notice(text) => text,
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn a_wait_is_told_after_a_while_and_again_when_it_changes() {
        let mut agent = agent((3, 3), true);
        assert_eq!(says(&mut agent, 0), None);
        assert_eq!(
            says(&mut agent, 2).as_deref(),
            Some("waiting: no launcher of the job answers at node0:29501")
        );
        agent.link = Link::At("node0:29501".to_owned());
        agent.pages = vec![page(2, "b", Some(0)), page(1, "a", Some(1))];
        assert_eq!(says(&mut agent, 3), None, "not so soon");
        let expect = "waiting: 2 of 3 nodes have joined (node 0 on b, node 1 on a), missing: node 2; the launchers meet at \
                      node0:29501";
        assert_eq!(says(&mut agent, 4).as_deref(), Some(expect));
        assert_eq!(says(&mut agent, 60), None, "it has not changed");
        agent.rules.lang = Lang::Ko;
        let expect = "대기 중: 노드 3개 중 2개가 옴(노드 0(b), 노드 1(a)), 오지 않음: 노드 2; 런처가 만나는 곳: node0:29501";
        assert_eq!(says(&mut agent, 70).as_deref(), Some(expect));
    }

    #[test]
    fn nodes_without_numbers_are_counted() {
        let mut agent = agent((2, 4), false);
        agent.pages = vec![page(1, "a", None)];
        says(&mut agent, 0);
        let expect = "waiting: 1 of 2 to 4 nodes has joined (a), missing: at least 1; the launchers meet at node0:29501";
        assert_eq!(says(&mut agent, 2).as_deref(), Some(expect));
        agent.pages.push(page(2, "b", None));
        let expect =
            "waiting: 2 of 2 to 4 nodes have joined (a, b); the launchers meet at node0:29501";
        assert_eq!(says(&mut agent, 5).as_deref(), Some(expect));
    }

    #[test]
    fn a_thousand_names_are_cut_short() {
        let text = some_of((0..10).map(|node| node.to_string()), Lang::En);
        assert_eq!(text, "0, 1, 2, 3, 4, 5, 6, 7 and 2 more");
    }
}
