//! One agent as a state machine, from inputs to commands. It has no clock, no socket and no process.
//!
//! The runtime feeds [`Input`]s with its own monotonic time and carries out [`Command`]s; the simulation does the same
//! with virtual time and many agents. `decide.rs` decides what to do; this file remembers what was done.

mod compare;
mod store;
mod waiting;

use std::collections::BTreeSet;
use std::time::Duration;

use paceline_words::say;

use super::arrange::disagreement;
use super::clocks::Clocks;
use super::decide::{Decision, Known, Loss, Ranks, Rules, Seen, Wait, decide};
use super::leases::Leases;
use super::messages::{Command, Exit, How, Input};
use super::record::{
    AgentId, Complaint, Ending, Joins, Page, Places, Ports, Record, RoundId, State, Why,
};

/// How long the others wait at the end for the last lines of the rank that failed first.
const LINES_WITHIN: Duration = Duration::from_secs(3);

/// If the job ends with the agent that hosts the store, that agent waits so long for the others to learn it.
const LINGER: Duration = Duration::from_secs(2);

/// One agent.
#[derive(Debug, Default)]
pub(crate) struct Agent {
    rules: Rules,
    page: Page,
    ranks: Ranks,
    /// What the ranks were told to do, if they were.
    ending: Option<How>,
    link: Link,
    /// Where the job's store is looked for before anything is known.
    endpoint: String,
    record: Option<Record>,
    record_since: Duration,
    pages: Vec<Page>,
    leases: Leases,
    clocks: Clocks,
    /// When it saw the failure that its page reports as noticed.
    noticed_at: Duration,
    memory: Option<Record>,
    /// The store that `memory` is from, and whose it is.
    home: Option<(String, Option<AgentId>)>,
    dead: BTreeSet<AgentId>,
    highest: u64,
    lost: Option<(Duration, bool)>,
    /// When the last page that the store took was sent.
    contact: Duration,
    /// Whether the agents at this store can decide over the job, and when they last could.
    in_order: bool,
    well_at: Duration,
    beat_at: Duration,
    scan_at: Duration,
    tell_at: Duration,
    scanning: bool,
    publishing: Option<Record>,
    opening: Option<RoundId>,
    /// The round for which the ranks' generation ends.
    regrouping: Option<RoundId>,
    /// The invitation that this agent has said yes to and that was not begun yet. What the ranks do now, they do in that round.
    invited: Option<RoundId>,
    last_turn: Duration,
    /// This process was stopped, or sent no sign of life for so long that the others cannot tell the difference.
    was_away: bool,
    has_gap: bool,
    signal: Option<i32>,
    /// After a signal and without ranks: when it is gone at the latest.
    leaves_at: Option<Duration>,
    over: Option<(Ending, Duration)>,
    /// Why the first place that was asked has no store, when it was asked last.
    unreached: Option<String>,
    waiting: Option<waiting::Waiting>,
    /// What people were told about stores that cannot be used.
    warned: BTreeSet<String>,
    /// Since when every answer says that the token differs.
    refused_since: Option<Duration>,
    /// Whether people were told that the store does not answer.
    has_told_outage: bool,
    exited: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Link {
    #[default]
    Seeking,
    Attaching(String),
    At(String),
}

impl Agent {
    pub(crate) fn new(rules: Rules, page: Page, endpoint: String, now: Duration) -> Self {
        let settings = rules.settings();
        Self {
            rules,
            page: Page { settings, ..page },
            endpoint,
            record_since: now,
            noticed_at: now,
            contact: now,
            well_at: now,
            beat_at: now,
            scan_at: now,
            tell_at: now,
            last_turn: now,
            ..Self::default()
        }
    }

    /// The newest record this agent knows.
    pub(crate) fn memory(&self) -> Option<&Record> {
        self.memory.as_ref()
    }

    pub(crate) fn id(&self) -> AgentId {
        self.page.id
    }

    #[cfg(test)]
    pub(crate) fn state(&self) -> &State {
        &self.page.state
    }

    #[cfg(test)]
    pub(crate) fn ranks(&self) -> Ranks {
        self.ranks
    }

    /// Takes the inputs, and returns the commands and when to call again at the latest.
    pub(crate) fn on(
        &mut self,
        now: Duration,
        inputs: impl IntoIterator<Item = Input>,
    ) -> (Vec<Command>, Duration) {
        let mut commands = Vec::new();
        let limit = self.rules.fence_after();
        let pause = now.saturating_sub(self.last_turn);
        if pause >= self.rules.silent_after() {
            // This agent's knowledge of the others is old.
            self.leases.look(now, &self.pages, Duration::ZERO);
            // An agent that was only busy ending its ranks was not away: its signs of life went out meanwhile.
            self.was_away = pause >= limit;
        }
        for input in inputs {
            self.take(now, input, &mut commands);
        }
        self.was_away &= now.saturating_sub(self.contact) >= limit;
        self.was_away |= std::mem::take(&mut self.has_gap);
        self.last_turn = now;
        self.leave(now, &mut commands);
        let wake = if self.signal.is_some() || self.exited {
            now + self.rules.beat_every()
        } else {
            self.act(now, &mut commands)
        };
        self.was_away = false;
        self.begin_with_the_others(&mut commands);
        self.release(&mut commands);
        self.keep_in_touch(now, &mut commands);
        (commands, wake.min(self.next_chore(now)))
    }

    fn take(&mut self, now: Duration, input: Input, commands: &mut Vec<Command>) {
        match input {
            Input::Tick => {}
            Input::Found(found) => self.on_found(now, &found, commands),
            Input::Attached { store, joined } if self.link == Link::Attaching(store.clone()) => {
                self.link = Link::At(store);
                self.page.joined = joined;
                self.page.hosts = self.is_host();
                self.say(now, true, commands);
            }
            Input::Look {
                store,
                at,
                record,
                pages,
            } if self.is_at(&store) => {
                self.clocks.keep(&pages);
                for page in pages.iter().filter(|page| page.id != self.page.id) {
                    self.clocks.hear(at, page);
                }
                self.on_look((now, at), record, pages, commands);
            }
            Input::Beaten { store, sent } if self.is_at(&store) => {
                self.has_gap |= sent.saturating_sub(self.contact) >= self.rules.fence_after();
                self.contact = self.contact.max(sent);
            }
            Input::Published { store, record } if self.is_at(&store) => {
                self.on_published(now, record, commands);
            }
            Input::Broken { store } if self.is_at(&store) || self.is_attaching(&store) => {
                self.leave_store(now);
            }
            Input::Opened(round, ports) if self.opening == Some(round) => {
                self.opening = None;
                self.set_state(now, State::Ready(round, ports), commands);
            }
            Input::Places(places) => {
                self.page.admits |= places.admits;
                self.page.places = places;
                self.settle();
                self.say(now, true, commands);
            }
            Input::Begun(round) if self.ranks == Ranks::Live(round) => {
                self.page.begun = round;
                self.settle();
                self.say(now, true, commands);
            }
            Input::Complaints(complaints) => {
                if let Ranks::Live(round) = self.ranks {
                    let complaint = |one| Complaint { round, ..one };
                    self.page.complaints = complaints.into_iter().map(complaint).collect();
                    self.say(now, true, commands);
                }
            }
            Input::Regrouped { round, slots } if self.regrouping == Some(round) => {
                self.regrouping = None;
                let is_current = self.record.as_ref().is_some_and(|r| r.id == round);
                match slots {
                    _ if !is_current => {}
                    Some(slots) => self.join_in(now, round, slots, commands),
                    None => self.set_state(now, State::Unable(round), commands),
                }
            }
            Input::RankFailed(mut report) => {
                if let (Ranks::Live(round), None, None) = (self.ranks, self.ending, self.signal) {
                    let round = self.invited.unwrap_or(round);
                    self.opening = None;
                    let noticed_us = self.noticed_at.as_micros();
                    report.is_later =
                        self.page.noticed == Some(round) && noticed_us < u128::from(report.at_us);
                    self.set_state(now, State::Failed(round, report), commands);
                }
            }
            Input::Stop(stop) => {
                self.page.stop = Some(stop);
                self.say(now, true, commands);
            }
            Input::Lines(report) => {
                self.page.told = Some(report);
                self.say(now, true, commands);
            }
            Input::RanksEnded { well } => {
                self.opening = None;
                self.page.places = Places::default();
                self.page.admits = false;
                if self.page.joins.take().is_some() && self.ending.is_none() {
                    self.page.is_spent = true;
                    self.page.failed_joins += 1;
                }
                if let (true, None, None, Ranks::Live(round)) =
                    (well, self.signal, self.ending, self.ranks)
                {
                    let round = self.invited.unwrap_or(round);
                    self.set_state(now, State::Done(round), commands);
                } else if let Some(signal) = self.signal {
                    self.set_state(now, State::Left(Some(signal)), commands);
                } else if !matches!(self.page.state, State::Failed(..)) {
                    self.set_state(now, State::Idle, commands);
                }
                self.ranks = Ranks::None;
                self.ending = None;
                self.invited = None;
            }
            Input::Signal(signal) if self.signal.is_none() => {
                self.signal = Some(signal);
                let state = match self.page.state.round() {
                    Some(round) if self.ranks != Ranks::None => State::Leaving(round, signal),
                    _ => State::Left(Some(signal)),
                };
                self.set_state(now, state, commands);
            }
            _ => {}
        }
        if self.signal.is_some() && self.ranks == Ranks::None {
            let linger = match self.rules.is_static {
                true => LINGER,
                false => self.rules.beat_every(),
            };
            self.leaves_at.get_or_insert(now + linger);
        }
    }

    /// Ends an agent that got a signal, when no rank runs here any more. If the job's store is here, the others get a moment to read that:
    /// where nothing answers for its address any more, as for a pod's, its silence alone might be a partition.
    fn leave(&mut self, now: Duration, commands: &mut Vec<Command>) {
        let (Some(signal), Some(leaves_at), false) = (self.signal, self.leaves_at, self.exited)
        else {
            return;
        };
        let is_read = |page: &Page| page.id == self.page.id || matches!(page.state, State::Left(_));
        let is_awaited = self.is_host() && !self.pages.iter().all(is_read);
        if !is_awaited || now >= leaves_at {
            self.exited = true;
            commands.push(Command::Exit(Exit::Signal(signal)));
        }
    }

    /// Decides and acts until there is nothing more to do.
    fn act(&mut self, now: Duration, commands: &mut Vec<Command>) -> Duration {
        for _ in 0..8 {
            let seen = self.seen(now);
            self.in_order = self.known(now, &seen).is_in_order();
            if self.in_order {
                self.well_at = now;
            }
            let decision = decide(&self.known(now, &seen));
            self.was_away = false;
            match decision {
                Decision::Wait(Wait { why, left }) => {
                    let told = self.tell_waiting(now, why, commands);
                    return left.map_or(Duration::MAX, |left| now + left).min(told);
                }
                Decision::Publish(record) => {
                    self.highest = self.highest.max(record.id.number);
                    self.publishing = Some((*record).clone());
                    commands.push(Command::Publish {
                        expected: self.record.clone().map(Box::new),
                        new: record,
                    });
                }
                Decision::Prepare(round) => {
                    if !self.prepare(now, round, commands) {
                        return Duration::MAX;
                    }
                }
                Decision::Start => {
                    let Some(record) = self.record.clone() else {
                        return Duration::MAX;
                    };
                    self.ranks = Ranks::Live(record.id);
                    self.invited = None;
                    self.page.is_spent = false;
                    self.page.places = Places::default();
                    if !record.is_invitation() {
                        self.page.stop = None;
                    }
                    if !(record.is_invitation() && record.has_newcomers()) {
                        self.page.begun = record.id;
                    }
                    self.set_state(now, State::Running(record.id), commands);
                    commands.push(Command::Start(Box::new(record)));
                }
                Decision::Join(first) => {
                    let Some(record) = self.record.clone() else {
                        return Duration::MAX;
                    };
                    let since = record.since();
                    self.ranks = Ranks::Live(record.id);
                    self.page.joins = Some(Joins { since, first });
                    self.set_state(now, State::Idle, commands);
                    commands.push(Command::Join(Box::new(record), first));
                }
                Decision::Stop => {
                    self.end_ranks(How::Next, commands);
                    return Duration::MAX;
                }
                Decision::Fence(why) => {
                    let is_outside = self.rules.outage.is_some();
                    let (lang, why) = (self.rules.lang, why.word(is_outside).of(self.rules.lang));
                    commands.push(Command::Notice(say!(
                        lang,
                        "{why}: its ranks are ended",
                        "{why}: 이 노드의 랭크를 끝냄"
                    )));
                    self.end_ranks(How::Kill, commands);
                }
                Decision::End(ending) => {
                    return self.end(now, ending, commands);
                }
            }
        }
        now + self.rules.beat_every()
    }

    fn known<'a>(&'a self, now: Duration, seen: &'a [Seen]) -> Known<'a> {
        Known {
            rules: &self.rules,
            me: self.page.id,
            own: &self.page,
            ranks: self.ranks,
            is_attached: matches!(self.link, Link::At(_)) && !self.pages.is_empty(),
            is_host: self.is_host(),
            record: self.current(),
            record_age: now.saturating_sub(self.record_since),
            memory: self.memory.as_ref(),
            pages: seen,
            dead: &self.dead,
            highest: self.highest,
            lost: self.lost.map(|(at, is_proven)| Loss {
                since: now.saturating_sub(at),
                is_proven,
                was_at_endpoint: (self.home.as_ref())
                    .is_some_and(|(home, _)| *home == self.endpoint),
            }),
            contact: now.saturating_sub(self.contact),
            was_away: self.was_away,
            waited: now.saturating_sub(self.well_at),
            is_publishing: self.publishing.is_some(),
            unreached: self.unreached.as_deref(),
            refused: self.refused_since.map(|at| now.saturating_sub(at)),
        }
    }

    fn seen(&self, now: Duration) -> Vec<Seen> {
        let seen = |page: &Page| Seen {
            page: page.clone(),
            ages: self.leases.ages(now, page.id),
        };
        self.pages.iter().map(seen).collect()
    }

    /// The store's record, unless a newer one is known: the store of a side that has been left behind.
    fn current(&self) -> Option<&Record> {
        let newest = self.memory.as_ref().map(Record::stage);
        self.record
            .as_ref()
            .filter(|record| Some(record.stage()) >= newest)
    }

    fn is_at(&self, store: &str) -> bool {
        matches!(&self.link, Link::At(at) if at == store)
    }

    fn is_attaching(&self, store: &str) -> bool {
        matches!(&self.link, Link::Attaching(to) if to == store)
    }

    /// Whether the store that it is at runs in this agent.
    pub(crate) fn is_host(&self) -> bool {
        self.is_at(&self.page.standby)
    }

    fn on_look(
        &mut self,
        (now, at): (Duration, Duration),
        record: Option<Record>,
        pages: Vec<Page>,
        commands: &mut Vec<Command>,
    ) {
        if record.as_ref().map(Record::stage) < self.record.as_ref().map(Record::stage) {
            // It was read before a change that is known already.
            return;
        }
        self.leases.look(now, &pages, self.rules.lease / 2);
        self.pages = pages;
        self.adopt(now);
        self.find_successor(now);
        self.end_outage(now, commands);
        self.set_record(now, record);
        self.tell_disagreement(commands);
        for page in &self.pages {
            if matches!(page.state, State::Left(_)) {
                self.dead.insert(page.id);
            }
        }
        let failed = self
            .record
            .as_ref()
            .filter(|r| has_failed(&self.pages, r.id));
        let failed = failed.map(|record| record.id);
        let mut is_news = self.compare_clocks(now);
        if failed.is_some() && self.page.noticed != failed {
            // When all have noticed, it is settled which failure was the first.
            self.page.noticed = failed;
            self.noticed_at = at;
            is_news = true;
        }
        if is_news {
            self.say(now, true, commands);
        }
    }

    /// Says that a node has come to the running job with other settings. That node ends by itself.
    fn tell_disagreement(&mut self, commands: &mut Vec<Command>) {
        let is_member = |record: &Record| record.position(self.page.id).is_some();
        if self.current().is_some_and(is_member) {
            let pages: Vec<&Page> = self.pages.iter().collect();
            if let Some(text) = disagreement(&self.page, &pages) {
                let (lang, text) = (self.rules.lang, text.of(self.rules.lang));
                let text = say!(
                    lang,
                    "{text}; the job that runs keeps its settings",
                    "{text}; 실행 중인 작업은 설정을 유지함"
                );
                self.warn_once(text, commands);
            }
        }
    }

    fn set_record(&mut self, now: Duration, record: Option<Record>) {
        if record != self.record {
            self.record_since = now;
            self.record = record;
            self.publishing = None;
        }
        if let Some(record) = self.current().cloned() {
            self.highest = self.highest.max(record.id.number);
            let host = self.pages.iter().find(|page| page.hosts);
            if let Link::At(store) = &self.link {
                self.home = Some((store.clone(), host.map(|page| page.id)));
            }
            self.memory = Some(record);
            self.lost = None;
        }
    }

    fn on_published(&mut self, now: Duration, record: Record, commands: &mut Vec<Command>) {
        // Another record that has won comes with the pages that belong to it: beside older ones its members would seem to be gone.
        if self.publishing.as_ref() == Some(&record) {
            self.set_record(now, Some(record));
            for page in &self.pages {
                let is_gone = self.leases.ages(now, page.id).silent >= self.rules.lease;
                if is_gone && !matches!(page.state, State::Left(_) | State::Done(_)) {
                    commands.push(Command::Forget(page.id));
                }
            }
        }
    }

    /// Says yes to a round as soon as no rank of an older one runs. Returns whether there is more to decide at once.
    fn prepare(&mut self, now: Duration, round: RoundId, commands: &mut Vec<Command>) -> bool {
        if self.opening == Some(round) {
            return false;
        }
        let record = self.record.clone().filter(|record| record.id == round);
        let continuing = record.filter(|record| record.continues.is_some());
        match (self.ranks, &continuing) {
            (Ranks::None, _) => {}
            (Ranks::Live(_), Some(record)) => {
                if self.regrouping != Some(round) {
                    self.regrouping = Some(round);
                    commands.push(Command::Regroup(Box::new(record.clone())));
                }
                return false;
            }
            // They are being killed.
            (Ranks::Ending, Some(_)) => return false,
            (_, None) => {
                let how = self.how_ranks_end_for(round);
                self.end_ranks(how, commands);
                return false;
            }
        }
        if continuing.is_some() {
            self.join_in(now, round, Vec::new(), commands);
            return false;
        }
        self.page.accepted = round;
        let place = self.record.as_ref().and_then(|r| r.position(self.page.id));
        if place == Some(0) {
            self.opening = Some(round);
            commands.push(Command::Open(round));
            return false;
        }
        self.set_state(now, State::Ready(round, Ports::default()), commands);
        true
    }

    /// Says yes to a round that continues another, with these ranks. If none goes on here, another node comes first.
    fn join_in(
        &mut self,
        now: Duration,
        round: RoundId,
        slots: Vec<usize>,
        commands: &mut Vec<Command>,
    ) {
        self.page.accepted = round;
        let is_invitation = (self.record.as_ref()).is_some_and(Record::is_invitation);
        self.invited = is_invitation.then_some(round);
        let has_ranks = !slots.is_empty();
        if self.page.joins.is_none() {
            self.page.is_spent = !has_ranks;
        }
        self.page.slots = slots;
        if has_ranks {
            self.opening = Some(round);
            commands.push(Command::Open(round));
        } else {
            self.set_state(now, State::Ready(round, Ports::default()), commands);
        }
    }

    /// Once the others have admitted its ranks and these have the job's state, this node is one of them.
    fn settle(&mut self) {
        let has_begun = self.ranks == Ranks::Live(self.page.begun);
        if has_begun && !self.page.places.is_admitting {
            self.page.joins = None;
        }
    }

    /// Has the ranks that join a job begin when those that admit them have begun: these may be within a long step for now.
    fn begin_with_the_others(&self, commands: &mut Vec<Command>) {
        let round = self.record.as_ref().map(|record| record.id);
        let (Some(round), Some(_)) = (round, self.page.joins) else {
            return;
        };
        let has_begun = |page: &Page| page.begun == round && page.joins.is_none();
        let is_due = self.ranks == Ranks::Live(round)
            && self.page.begun != round
            && self.pages.iter().any(has_begun);
        if is_due && self.page.state == State::Running(round) {
            commands.push(Command::Begin);
        }
    }

    /// Has ranks that wait for more nodes go on if the job is to stop, which they do after a step.
    fn release(&self, commands: &mut Vec<Command>) {
        let short = |record: &&Record| self.rules.is_short(record);
        let Some(record) = self.record.as_ref().filter(short) else {
            return;
        };
        let is_asked = |page: &Page| page.stop.is_some() && record.position(page.id).is_some();
        let runs = self.page.state == State::Running(record.id);
        if runs && (is_asked(&self.page) || self.pages.iter().any(is_asked)) {
            commands.push(Command::Release);
        }
    }

    /// Ranks can agree on a step only while none is missing: that is so if the next round is the present one and newcomers.
    fn how_ranks_end_for(&self, round: RoundId) -> How {
        let record = self.record.as_ref().filter(|record| record.id == round);
        let is_joined = record.is_some_and(|record| matches!(record.why, Why::Joined(_)));
        match self.ranks {
            Ranks::Live(old) if is_joined && old.number + 1 == round.number => How::Save,
            // They were asked already, and no node was lost since.
            Ranks::Ending if is_joined && self.ending == Some(How::Save) => How::Save,
            _ => How::Next,
        }
    }

    fn end_ranks(&mut self, how: How, commands: &mut Vec<Command>) {
        if self.ranks == Ranks::None {
            return;
        }
        let worse = match self.ending {
            None => true,
            Some(How::Save) => how != How::Save,
            Some(ending) => ending != How::Kill && how == How::Kill,
        };
        if worse {
            self.ending = Some(how);
            commands.push(Command::EndRanks(how));
        }
        self.ranks = Ranks::Ending;
    }

    /// Ends in order: the ranks, the last lines, the other agents, this agent.
    fn end(&mut self, now: Duration, ending: Ending, commands: &mut Vec<Command>) -> Duration {
        let (_, since) = *self.over.get_or_insert((ending.clone(), now));
        if self.ranks != Ranks::None {
            self.end_ranks(How::Over, commands);
            return Duration::MAX;
        }
        let waited = now.saturating_sub(since);
        let mut ending = ending;
        if let Ending::Failed(report) = &mut ending {
            let own = (self.page.told.as_ref()).filter(|own| own.is_same(report));
            let told = (self.pages.iter().filter_map(|page| page.told.as_ref()))
                .find(|told| told.is_same(report));
            match own.or(told) {
                Some(told) => {
                    let also = std::mem::take(&mut report.failure.also);
                    report.clone_from(told);
                    report.failure.also = also;
                }
                None if waited < LINES_WITHIN => return since + LINES_WITHIN,
                None => {}
            }
        }
        if self.closes(now) && waited < self.rules.close_timeout {
            let has_others = self.others_here(now).next().is_some();
            if has_others {
                return (since + self.rules.close_timeout).min(now + self.rules.beat_every());
            }
        }
        self.exited = true;
        self.set_state(now, State::Left(None), commands);
        commands.push(Command::Exit(Exit::Job(ending)));
        Duration::MAX
    }

    fn set_state(&mut self, now: Duration, state: State, commands: &mut Vec<Command>) {
        let urgent = !matches!(state, State::Running(_));
        self.page.state = state;
        self.say(now, urgent, commands);
    }

    /// Writes this agent's page to the store, which is a sign of life too.
    fn say(&mut self, now: Duration, urgent: bool, commands: &mut Vec<Command>) {
        if !matches!(self.link, Link::At(_)) {
            return;
        }
        self.page.beat += 1;
        let is_known_here = self.current().is_some();
        self.page.memory = self.memory.clone().filter(|_| !is_known_here).map(Box::new);
        self.beat_at = now + self.rules.beat_every();
        commands.push(Command::Page {
            page: Box::new(self.page.clone()),
            urgent,
        });
    }

    /// Sends signs of life, and looks for a store if there is none or if this one cannot decide over the job.
    fn keep_in_touch(&mut self, now: Duration, commands: &mut Vec<Command>) {
        if self.exited {
            return;
        }
        if now >= self.beat_at {
            self.say(now, false, commands);
            self.beat_at = now + self.rules.beat_every();
        }
        if now >= self.tell_at
            && let Some(page) = self.notice_for_endpoint()
        {
            self.tell_at = now + self.rules.lease;
            commands.push(Command::Tell {
                store: self.endpoint.clone(),
                page: Box::new(page),
            });
        }
        if self.needs_store() && now >= self.scan_at && !self.scanning {
            self.scanning = true;
            commands.push(Command::Scan(self.candidates()));
        }
    }

    fn next_chore(&self, now: Duration) -> Duration {
        if self.exited {
            return Duration::MAX;
        }
        let scan = (self.needs_store() && !self.scanning).then_some(self.scan_at);
        let fence =
            matches!(self.ranks, Ranks::Live(_)).then(|| self.contact + self.rules.fence_after());
        let tell = self.is_away_from_endpoint().then_some(self.tell_at);
        let chores = [scan, fence, tell].into_iter().flatten();
        chores.fold(self.beat_at, Duration::min).max(now)
    }
}

fn has_failed(pages: &[Page], round: RoundId) -> bool {
    let failed = |page: &Page| matches!(&page.state, State::Failed(of, _) if *of == round);
    pages.iter().any(failed)
}
