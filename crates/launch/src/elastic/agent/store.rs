//! Where the job's store is: finds it, replaces a lost one, and tells agents that look in the wrong place.

use std::time::Duration;

use paceline_words::say;

use super::{Agent, Link, Ranks};
use crate::elastic::messages::{Answer, Command, Found};
use crate::elastic::record::{AgentId, Page, Record, State};

/// Most stores that one scan dials.
const CANDIDATES_MAX: usize = 8;
/// Most different warnings about stores that cannot be used.
const WARNINGS_MAX: usize = 16;

impl Agent {
    /// Learns from another agent how the job went on elsewhere: this store is behind then.
    pub(super) fn adopt(&mut self, now: Duration) {
        let told = self.pages.iter().filter_map(|page| page.memory.as_deref());
        if let Some(newest) = told.max_by_key(|record| record.stage())
            && Some(newest.stage()) > self.memory.as_ref().map(Record::stage)
        {
            self.memory = Some(newest.clone());
            self.highest = self.highest.max(newest.id.number);
            self.lost.get_or_insert((now, false));
        }
    }

    pub(super) fn leave_store(&mut self, now: Duration) {
        if self.lost.is_none() && self.memory.is_some() {
            self.lost = Some((self.contact, false));
        }
        self.link = Link::Seeking;
        self.record = None;
        // One that has said goodbye has no ranks any more and does not come back under its name, as if its machine had refused.
        let left = self.pages.iter();
        let left = left.filter(|page| matches!(page.state, State::Left(_)));
        self.dead.extend(left.map(|page| page.id));
        if let (Some((_, is_proven)), Some((_, Some(host)))) = (&mut self.lost, &self.home) {
            *is_proven |= self.dead.contains(host);
        }
        self.pages.clear();
        self.leases.forget();
        self.publishing = None;
        self.scan_at = now;
    }

    /// Where the store may be: its last place, then the members of the last round in their order.
    pub(super) fn candidates(&self) -> Vec<String> {
        if self.rules.outage.is_some() {
            return vec![self.endpoint.clone()];
        }
        let home = self.home.iter().map(|(store, _)| store.clone());
        let members = self.memory.iter().flat_map(|memory| &memory.members);
        let mut found: Vec<String> = Vec::new();
        let all = home
            .chain(members.map(|member| member.standby.clone()))
            .chain([self.endpoint.clone()]);
        for store in all {
            if !found.contains(&store) && found.len() < CANDIDATES_MAX {
                found.push(store);
            }
        }
        found
    }

    pub(super) fn on_found(&mut self, now: Duration, found: &[Found], commands: &mut Vec<Command>) {
        self.scanning = false;
        self.scan_at = now + self.rules.beat_every();
        let why = |found: &Found| match &found.answer {
            Answer::Store(_) => None,
            Answer::Refused => Some(format!("{}: connection refused", found.store)),
            Answer::Unresolved(what)
            | Answer::WrongToken(what)
            | Answer::Stranger(what)
            | Answer::Silent(what) => Some(what.clone()),
        };
        self.unreached = found.iter().find_map(why);
        let is_refused = |found: &Found| matches!(found.answer, Answer::WrongToken(_));
        self.refused_since = match found.iter().any(is_refused) {
            true => self.refused_since.or(Some(now)),
            false => None,
        };
        for found in found {
            match &found.answer {
                Answer::Refused => self.on_refused(now, &found.store),
                Answer::Unresolved(what) => {
                    let seconds = self.rules.join_timeout.as_secs();
                    let text = say!(
                        self.rules.lang,
                        "{what}; still trying (gives up after {seconds} s)",
                        "{what}; 계속 시도 중({seconds}초 뒤 포기)"
                    );
                    self.warn_once(text, commands);
                }
                Answer::WrongToken(what) | Answer::Stranger(what) => {
                    self.warn_once(what.clone(), commands);
                }
                Answer::Silent(what) if self.rules.outage.is_some() && !self.has_told_outage => {
                    self.has_told_outage = true;
                    commands.push(Command::Notice(self.outage_notice(what)));
                }
                Answer::Store(_) | Answer::Silent(_) => {}
            }
        }
        let newest = self.memory.as_ref().map(Record::stage);
        let stage = |found: &Found| match &found.answer {
            Answer::Store(Some(record)) if Some(record.stage()) >= newest => Some(record.stage()),
            _ => None,
        };
        // The job has come farthest there; of equals the first counts.
        let active = found
            .iter()
            .rev()
            .filter_map(|found| Some((stage(found)?, found)))
            .max_by_key(|(stage, _)| *stage);
        let (found, is_active) = match active {
            Some((_, found)) => (found, true),
            None => {
                // Newcomers have other candidates than those who remember a round: the endpoint is what all know.
                let first = found
                    .iter()
                    .filter(|found| matches!(found.answer, Answer::Store(_)))
                    .min_by_key(|found| found.store != self.endpoint);
                match first {
                    Some(found) => (found, false),
                    None => return,
                }
            }
        };
        let stays = match &self.link {
            Link::Seeking => false,
            Link::Attaching(_) => true,
            Link::At(store) => {
                let here = self.current().map(Record::stage);
                *store == found.store || is_active && here >= stage(found) && here.is_some()
            }
        };
        if !stays {
            if matches!(self.link, Link::At(_)) {
                self.leave_store(now);
            }
            self.leases.forget();
            self.link = Link::Attaching(found.store.clone());
            commands.push(Command::Attach(found.store.clone()));
        }
    }

    /// Whether a warning has told people why no store is reached.
    pub(super) fn is_warned_of(&self, reason: &str) -> bool {
        self.warned.iter().any(|text| text.starts_with(reason))
    }

    pub(super) fn warn_once(&mut self, text: String, commands: &mut Vec<Command>) {
        if self.warned.len() < WARNINGS_MAX && self.warned.insert(text.clone()) {
            commands.push(Command::Notice(say!(
                self.rules.lang,
                "warning: {text}",
                "경고: {text}"
            )));
        }
    }

    fn outage_notice(&self, what: &str) -> String {
        let lang = self.rules.lang;
        let then = match (self.ranks, self.rules.outage) {
            (Ranks::Live(_), Some(outage)) => say!(
                lang,
                "the ranks run on without it for {} s",
                "랭크는 그것 없이 {}초 동안 계속함",
                outage.as_secs()
            ),
            _ => say!(lang, "it is tried again", "다시 시도함"),
        };
        format!("{what}; {then}")
    }

    /// Tells people that a store outside of the job is back, if they were told that it was gone.
    pub(super) fn end_outage(&mut self, now: Duration, commands: &mut Vec<Command>) {
        if std::mem::take(&mut self.has_told_outage) {
            let lang = self.rules.lang;
            let text = match self.lost {
                Some((since, _)) => {
                    let seconds = now.saturating_sub(since).as_secs_f64();
                    say!(
                        lang,
                        "etcd is back after {seconds:.1} s",
                        "{seconds:.1}초 만에 etcd가 돌아옴"
                    )
                }
                None => say!(lang, "etcd answers now", "이제 etcd가 응답함"),
            };
            commands.push(Command::Notice(text));
        }
    }

    /// Whether this agent stays until the others know about the end: the one with the store; of those that share one outside
    /// of the job, the first that is still there.
    pub(super) fn closes(&self, now: Duration) -> bool {
        if self.rules.outage.is_none() {
            return self.is_host();
        }
        self.others_here(now).all(|id| id > self.page.id)
    }

    /// The other agents that have neither left nor fallen silent.
    pub(super) fn others_here(&self, now: Duration) -> impl Iterator<Item = AgentId> {
        let here = self.pages.iter().filter(move |page| {
            page.id != self.page.id
                && !matches!(page.state, State::Left(_))
                && self.leases.ages(now, page.id).silent < self.rules.lease
        });
        here.map(|page| page.id)
    }

    /// The other agents that give no sign of life any more.
    pub(crate) fn silent(&self, now: Duration) -> Vec<AgentId> {
        let silent = self.pages.iter().filter(|page| {
            page.id != self.page.id && self.leases.ages(now, page.id).silent >= self.rules.lease
        });
        silent.map(|page| page.id).collect()
    }

    /// Takes a refusal for a death, unless that agent may have gone on without this side before: within a lease of its last
    /// sign of life it had neither been given up nor begun to look for another store.
    pub(super) fn on_refused(&mut self, now: Duration, store: &str) {
        let limit = self.rules.lease * 5 / 6;
        if let (Some((home, host)), Some((since, is_proven))) = (&self.home, &mut self.lost)
            && home == store
            && now.saturating_sub(*since) < limit
        {
            *is_proven = true;
            self.dead.extend(host.filter(|id| *id != self.page.id));
        }
        if self.current().is_none() {
            return;
        }
        for page in &self.pages {
            let ages = self.leases.ages(now, page.id);
            let in_time = ages.confirmed && ages.silent < limit;
            if page.standby == store && in_time && page.id != self.page.id {
                self.dead.insert(page.id);
            }
        }
    }

    /// Takes another agent's store at the address of the lost one for a refusal: the lost one does not listen there any more.
    pub(super) fn find_successor(&mut self, now: Duration) {
        let (Link::At(store), Some((home, Some(before)))) = (&self.link, &self.home) else {
            return;
        };
        let hosts = |page: &Page| page.hosts && page.standby == *store && page.id != *before;
        if self.current().is_none() && home == store && self.pages.iter().any(hosts) {
            self.on_refused(now, &store.clone());
        }
    }

    /// Whether this agent has the job's store, and the endpoint is another one.
    pub(super) fn is_away_from_endpoint(&self) -> bool {
        let has_job = self
            .current()
            .is_some_and(|record| !record.members.is_empty());
        has_job && self.is_host() && self.page.standby != self.endpoint && self.over.is_none()
    }

    /// Newcomers know the endpoint alone. When the job's store is elsewhere, its agent leaves a page there, so that an agent
    /// that was started again on the endpoint's host finds the job instead of beginning it anew.
    pub(super) fn notice_for_endpoint(&self) -> Option<Page> {
        let record = self.current().filter(|_| self.is_away_from_endpoint())?;
        Some(Page {
            // This agent's own page stays: it does not leave.
            id: AgentId(!self.page.id.0),
            state: State::Left(None),
            memory: Some(Box::new(record.clone())),
            ..self.page.clone()
        })
    }

    pub(super) fn needs_store(&self) -> bool {
        match &self.link {
            Link::Seeking => true,
            Link::Attaching(_) => false,
            Link::At(_) if self.over.is_some() => false,
            Link::At(_) if self.memory.is_none() => false,
            Link::At(_) => self.current().is_none() || !self.in_order,
        }
    }
}
