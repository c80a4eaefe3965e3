//! Decides what an agent does next from what it knows: rounds, restarts and ends are decided here alone. Pure.
//!
//! Every agent decides from its own view, and those that reach the same answer try to publish it; compare-and-set lets one
//! record through. Four rules keep a partition from running the job twice:
//!
//! - A round only starts when *every* member has said that it is ready for it, and an agent says so for one record of a
//!   number only. So two rounds of one number cannot both start if each must hold more than half of the same agents.
//! - The side that has the job's store needs half of the last started round (of those not known to be dead) to go on; a
//!   side that would take the store over needs more than half, until it has started a round. Two sides cannot both have
//!   that.
//! - An agent that comes to a store reports how the job went on elsewhere, as far as it knows. A store that is behind is no
//!   longer the job's.
//! - An agent is known to be dead when its machine refuses the connection to its store, soon after its last sign of life:
//!   a partition does not refuse, it is silent. One that has said goodbye counts as dead, too. Later a refusal proves nothing, because the agent may have gone on
//!   elsewhere before it died. So killed agents do not block the rest; silent ones may.
//! - An agent on the smaller side, or without the store for two thirds of a lease, kills its ranks. The others take over
//!   after five quarters of a lease, when it has done so.
//!
//! Two nodes with a minimum of one: the node that has the store goes on alone when the other falls silent; the other
//! waits, unless the store's agent is known to be dead. Where that is not enough, the store must not run on a node of the
//! job: etcd, or an agent on a third machine.
//!
//! A round that continues another (`Record::continues`) is a generation of the same processes: live recovery. All of the above
//! holds for it. An agent that is ready for it has ended the generation before on its node, so that no rank commits a step of
//! that one any more; the node that is left out has killed its ranks, or cannot complete a step without the others. If the ranks
//! of a member cannot go on, the next round starts all ranks anew. If too few members have any, these wait until others have
//! joined them, or start anew with others where none can join.
//!
//! A store outside of the job (`Rules::outage`) is never taken over. An agent that has lost it cannot begin a round, and its
//! ranks may run on: those of a round that went on without it wait for ranks that were ended. Two rules keep whole rounds
//! apart there:
//!
//! - Half of the last started round must be at the store to begin another one, and end their ranks before it runs.
//! - An agent that has been without the store for `outage` ends its ranks. One that has been silent for 5/4 of that has done
//!   so, or is dead, and no longer counts. So the rest goes on, however many are gone.

mod continuing;
mod members;
mod rules;
mod words;

use std::collections::BTreeSet;
use std::time::Duration;

use paceline_words::{Text, Word, say};

use self::members::{Cause, Gone};
pub(crate) use self::rules::Rules;
pub(crate) use self::words::{Fence, Wait, listed};
use self::words::{
    LEAVING, MAY_COME_BACK, MAY_END, MAY_STILL_RUN, MORE_MAY_COME, NO_LAUNCHER, NO_QUORUM,
    NO_STORE, NOT_ALL_CAME, NOT_READY, OTHER_SETTINGS, OTHERS_END, OWN_RECORD, PORTS, RANKS_RUN,
    TOO_FEW, WHICH_FIRST, too_few, words,
};
use super::arrange::{arrange, by_node_rank, disagreement};
use super::leases::Ages;
use super::record::{AgentId, Ending, Member, Page, Phase, Record, RoundId, State, Why};
use crate::stop::{Meaning, Stop, meaning};

/// One page of the store and how old its signs are.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) page: Page,
    pub(crate) ages: Ages,
}

/// What runs on this node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Ranks {
    #[default]
    None,
    Live(RoundId),
    Ending,
}

/// The store that this agent has lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Loss {
    pub(crate) since: Duration,
    /// Its machine refuses connections to it, or its agent has said goodbye.
    pub(crate) is_proven: bool,
    /// It was at the endpoint, the one place that newcomers know.
    pub(crate) was_at_endpoint: bool,
}

/// All that one agent knows at one moment. Times are ages, by its own clock.
#[derive(Debug)]
pub(crate) struct Known<'a> {
    pub(crate) rules: &'a Rules,
    pub(crate) me: AgentId,
    /// What this agent says; its page in the store may be older.
    pub(crate) own: &'a Page,
    pub(crate) ranks: Ranks,
    /// Whether it is connected to a store.
    pub(crate) is_attached: bool,
    /// Whether that store runs in this agent.
    pub(crate) is_host: bool,
    /// That store's record, unless it is older than `memory`.
    pub(crate) record: Option<&'a Record>,
    /// How long the record has been as it is.
    pub(crate) record_age: Duration,
    /// The newest record that this agent has ever seen.
    pub(crate) memory: Option<&'a Record>,
    pub(crate) pages: &'a [Seen],
    pub(crate) dead: &'a BTreeSet<AgentId>,
    /// No round with this number or a lower one may be begun.
    pub(crate) highest: u64,
    pub(crate) lost: Option<Loss>,
    /// Since the store last took a sign of life from this agent.
    pub(crate) contact: Duration,
    /// This agent was stopped for so long that the others may have given it up.
    pub(crate) was_away: bool,
    /// Since the job was last seen in order by this agent, or since its start.
    pub(crate) waited: Duration,
    /// A record of this agent is on its way to the store.
    pub(crate) is_publishing: bool,
    /// Where no store was reached last, and why not.
    pub(crate) unreached: Option<&'a str>,
    /// For how long the store has refused this agent's token.
    pub(crate) refused: Option<Duration>,
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Nothing now.
    Wait(Wait),
    /// Put this record in place of the one that was seen.
    Publish(Box<Record>),
    /// End what runs, then say yes to this round.
    Prepare(RoundId),
    /// Start the ranks of the record's round.
    Start,
    /// Start ranks that the others are to admit, the first with this number.
    Join(usize),
    /// End the ranks in good order: this agent is not part of the round.
    Stop,
    /// Kill the ranks at once: the others may go on without this agent.
    Fence(Fence),
    /// The job is over.
    End(Ending),
}

/// Decides.
pub(crate) fn decide(known: &Known<'_>) -> Decision {
    if let Some(reason) = known.must_fence() {
        return Decision::Fence(reason);
    }
    if !known.is_attached {
        return known.give_up_or_wait();
    }
    if let Some(why) = known.record.and_then(|record| known.why_not_in(record)) {
        return Decision::End(Ending::Misplaced(why));
    }
    let lead = match (known.record, known.memory) {
        (Some(record), _) => match &record.phase {
            Phase::Ended(ending) => return Decision::End(ending.clone()),
            Phase::Short => known.refill(record),
            Phase::Forming => known.lead_forming(record),
            Phase::Running(_) => known.lead_running(record),
        },
        (None, Some(memory)) => known.take_over(memory),
        (None, None) => known.gather(),
    };
    match lead {
        Decision::Publish(_) if known.is_publishing => Wait::for_news(OWN_RECORD),
        Decision::Wait(wait) => match known.record.and_then(|record| known.follow(record)) {
            Some(own) => own,
            None => Decision::Wait(wait),
        },
        lead => lead,
    }
}

/// Whether those `here` may go on without the rest of `voters`. Half is enough for the side that has the job's store.
fn is_quorate(
    voters: &[AgentId],
    dead: &BTreeSet<AgentId>,
    here: impl Fn(AgentId) -> bool,
    has_store: bool,
) -> bool {
    let voters: Vec<_> = voters.iter().filter(|id| !dead.contains(id)).collect();
    let present = voters.iter().filter(|id| here(***id)).count();
    2 * present > voters.len() || has_store && 2 * present == voters.len()
}

impl Known<'_> {
    /// Whether the agents at this store may change its record.
    pub(crate) fn is_in_order(&self) -> bool {
        self.record
            .is_some_and(|record| self.has_quorum(record, &self.able(&[])))
    }

    fn must_fence(&self) -> Option<Fence> {
        let Ranks::Live(round) = self.ranks else {
            return None;
        };
        let limit = self.rules.fence_after();
        if self.was_away {
            return Some(Fence::WasAway);
        }
        if self.contact >= limit {
            return Some(Fence::NoContact);
        }
        // A round that was to continue with these ranks cannot have begun without them.
        let waits_for_me =
            |memory: &Record| memory.continues.is_some() && memory.position(self.me).is_some();
        let went_on = |memory: &Record| memory.id.number > round.number && !waits_for_me(memory);
        if self.record.is_none() && self.memory.is_some_and(went_on) {
            return Some(Fence::NoQuorum);
        }
        if self.rules.outage.is_some() {
            return None;
        }
        let record = self.record.filter(|_| self.is_attached)?;
        let in_sight = |id| {
            id == self.me
                || self.page(id).is_some_and(|seen| {
                    seen.ages.silent < limit || matches!(seen.page.state, State::Done(_))
                })
        };
        let alone = matches!(record.phase, Phase::Running(_))
            && !is_quorate(&record.ids(), self.dead, in_sight, true);
        alone.then_some(Fence::NoQuorum)
    }

    /// This agent's own part in the record's round, if it has one now.
    fn follow(&self, record: &Record) -> Option<Decision> {
        let is_member = record.position(self.me).is_some();
        let idle = matches!(self.ranks, Ranks::None);
        let state = &self.own.state;
        let own = state.round() == Some(record.id);
        match &record.phase {
            Phase::Forming if is_member => {
                let is_ready = own && matches!(state, State::Ready(..) | State::Unable(_));
                let accepted = self.own.accepted;
                let acceptable = record.id == accepted || record.id.number > accepted.number;
                // Ranks that have ended are at no invitation.
                let is_over = record.is_invitation()
                    && (idle || matches!(state, State::Failed(..) | State::Done(_)));
                (!is_ready && !is_over && acceptable).then_some(Decision::Prepare(record.id))
            }
            Phase::Running(_) if is_member && own => {
                let may_start = match record.continues {
                    None => idle,
                    Some(_) => matches!(self.ranks, Ranks::Live(_)),
                } && matches!(state, State::Ready(..));
                may_start.then_some(Decision::Start)
            }
            _ if idle => self.to_join(record).map(Decision::Join),
            _ => (!self.may_wait_to_join(record)).then_some(Decision::Stop),
        }
    }

    /// Why this agent is in no round of the job: a member that lives has other settings.
    fn why_not_in(&self, record: &Record) -> Option<Text> {
        let is_late =
            !matches!(record.phase, Phase::Ended(_)) && record.position(self.me).is_none();
        let is_member = |page: &&Page| record.position(page.id).is_some();
        let mut members = self.living();
        members.retain(is_member);
        is_late.then(|| self.disagreement(&members)).flatten()
    }

    /// How this agent's settings and those of others differ.
    fn disagreement(&self, others: &[&Page]) -> Option<Text> {
        disagreement(&self.page(self.me)?.page, others)
    }

    /// What keeps this side from deciding.
    fn missing(&self) -> Word {
        match (self.is_attached, self.memory) {
            (false, None) => NO_LAUNCHER,
            (false, Some(_)) => NO_STORE,
            (true, _) => NO_QUORUM,
        }
    }

    /// No store: how long to go on looking for one.
    fn give_up_or_wait(&self) -> Decision {
        let patience = match self.memory {
            None => self.rules.join_timeout,
            Some(_) => self.rules.patience(),
        };
        let mut left = patience.saturating_sub(self.waited);
        if let (None, Some(refused), Some(why)) = (self.memory, self.refused, self.unreached) {
            let more = self.rules.refused_for().saturating_sub(refused);
            if more.is_zero() {
                return Decision::End(Ending::Refused(Text::new(|_| why.to_owned())));
            }
            left = left.min(more);
        }
        if !left.is_zero() {
            return Wait::at_most(left, self.missing());
        }
        let seconds = self.waited.as_secs_f64();
        Decision::End(match self.memory {
            None => {
                let why = self.unreached.map(|why| format!(" ({why})"));
                let why = why.unwrap_or_default();
                Ending::TooFew(Text::new(|lang| {
                    say!(
                        lang,
                        "no store was reached within {seconds:.0} s{why}",
                        "{seconds:.0}초 안에 스토어에 연결하지 못함{why}"
                    )
                }))
            }
            Some(_) if self.rules.outage.is_some() && !self.is_attached => {
                Ending::Lost(Text::new(|lang| {
                    say!(
                        lang,
                        "etcd was not reached within {seconds:.0} s",
                        "{seconds:.0}초 안에 etcd에 연결하지 못함"
                    )
                }))
            }
            Some(_) if self.rules.outage.is_some() => Ending::Lost(Text::new(|lang| {
                say!(
                    lang,
                    "in {seconds:.0} s half of the last round's nodes did not come together",
                    "{seconds:.0}초 안에 마지막 라운드의 노드가 절반도 모이지 않음"
                )
            })),
            Some(_) => Ending::Lost(Text::new(|lang| {
                say!(
                    lang,
                    "the job's store was lost, and in {seconds:.0} s more than half of the last round's nodes did not come \
                     together to replace it",
                    "작업의 스토어를 잃었고, {seconds:.0}초 안에 마지막 라운드 노드의 과반이 모이지 않아 스토어를 대신하지 못함"
                )
            })),
        })
    }

    /// The first round: all have come, or enough have and no more come.
    fn gather(&self) -> Decision {
        if let Some(why) = self.disagreement(&self.living()) {
            return self.publish(self.ended(None, Ending::Misplaced(why)));
        }
        let here = self.pages.iter().filter(|seen| self.is_here(seen));
        let here: Vec<_> = here.map(|seen| &seen.page).collect();
        if self.disagreement(&here).is_some() {
            return Wait::at_most(self.rules.beat_every(), OTHER_SETTINGS);
        }
        let able = self.able(&[]);
        if self.rules.is_static {
            return match by_node_rank(&able, self.rules.nodes_max) {
                Err(why) => self.publish(self.ended(None, Ending::Misplaced(why))),
                Ok(order) if order.len() == self.rules.nodes_max => {
                    self.publish(self.forming(None, order, 0, Why::Start))
                }
                Ok(_) => self.wait_for_more(able.len()),
            };
        }
        match self.last_call(&able, self.rules.nodes_max) {
            Some(Duration::ZERO) if able.len() >= self.rules.nodes_min => {
                let order = arrange(&[], &able, self.rules.nodes_max);
                self.publish(self.forming(None, order, 0, Why::Start))
            }
            Some(left) if able.len() >= self.rules.nodes_min => Wait::at_most(left, MORE_MAY_COME),
            _ => self.wait_for_more(able.len()),
        }
    }

    fn wait_for_more(&self, have: usize) -> Decision {
        let left = self.rules.join_timeout.saturating_sub(self.waited);
        if !left.is_zero() {
            return Wait::at_most(left, NOT_ALL_CAME);
        }
        let why = too_few(have, self.rules.nodes_min, self.rules.join_timeout);
        self.publish(self.ended(None, Ending::TooFew(why)))
    }

    /// How much longer to wait for more agents; zero when there are `full`.
    fn last_call(&self, agents: &[&Page], full: usize) -> Option<Duration> {
        if agents.len() >= full {
            return Some(Duration::ZERO);
        }
        let newest = agents
            .iter()
            .filter_map(|page| self.page(page.id))
            .map(|seen| seen.ages.known)
            .min()?;
        Some(self.rules.last_call.saturating_sub(newest))
    }

    fn lead_forming(&self, record: &Record) -> Decision {
        if self.is_one_leaving(record) {
            return Wait::for_news(LEAVING);
        }
        let gone = self.departed(record);
        if !gone.is_empty() {
            return self.reform(record, &gone, Why::Lost(words(&gone)), record.restarts);
        }
        if let Some(decision) = self.interruption(record) {
            return decision;
        }
        let state = |member: &Member| self.page(member.id).map(|seen| &seen.page.state);
        if record
            .members
            .iter()
            .any(|member| state(member) == Some(&State::Unable(record.id)))
        {
            return self.start_anew(record);
        }
        let ready = |member: &&Member| matches!(state(member), Some(State::Ready(round, _)) if *round == record.id);
        let slow: Vec<_> = record.members.iter().filter(|m| !ready(m)).collect();
        if slow.is_empty() {
            let mut next = record.clone();
            if record.continues.is_some() {
                self.assemble(&mut next);
                if !self.may_go_on(&next.members) || self.waits_in_vain(record, &next) {
                    return self.start_anew(record);
                }
            }
            let Some(State::Ready(_, ports)) = next.members.first().and_then(state) else {
                return Wait::for_news(PORTS);
            };
            next.phase = Phase::Running(*ports);
            return self.publish(next);
        }
        let left = self.rules.ready_timeout.saturating_sub(self.record_age);
        if !left.is_zero() {
            return Wait::at_most(left, NOT_READY);
        }
        let gone: Vec<_> = slow
            .into_iter()
            .map(|member| Gone {
                id: member.id,
                why: Text::new(|lang| {
                    let host = &member.host;
                    say!(
                        lang,
                        "host {host} did not get ready",
                        "호스트 {host}: 준비되지 않음"
                    )
                }),
                is_able: false,
                signal: None,
            })
            .collect();
        self.reform(record, &gone, Why::Lost(words(&gone)), record.restarts)
    }

    fn lead_running(&self, record: &Record) -> Decision {
        if self.is_one_leaving(record) {
            return Wait::for_news(LEAVING);
        }
        let (gone, stop) = (self.departed(record), self.stop(record));
        if !gone.is_empty() {
            return match stop {
                // The whole job was asked, not the node that is gone.
                Some(stop) if meaning(stop.signal) == Meaning::Ask => {
                    self.publish_if_quorate(record, &gone, Ending::Stopped(stop))
                }
                _ => self.reform(record, &gone, Why::Lost(words(&gone)), record.restarts),
            };
        }
        let state = |member: &Member| self.page(member.id).map(|seen| &seen.page.state);
        match self.first_failure(record) {
            Cause::None => {
                let blame = self.hung(record);
                if let Some(blame) = blame.filter(|_| self.rules.recovers_live && stop.is_none()) {
                    let why = match blame.is_cut {
                        true => Why::Cut(blame.complaint),
                        false if !blame.left.is_zero() => {
                            return Wait::at_most(blame.left, MAY_END);
                        }
                        false => Why::Hung(blame.complaint),
                    };
                    return self.reform(record, &[], why, record.restarts);
                }
            }
            Cause::Wait(left) => {
                return Wait::at_most(left, WHICH_FIRST);
            }
            Cause::Found(report) => return self.after_failure(record, report),
        }
        let done = |member: &&Member| matches!(state(member), Some(State::Done(_)));
        let done = record.members.iter().filter(done).count();
        if done == record.members.len() {
            let ending = stop.map_or(Ending::Finished, Ending::Stopped);
            return self.publish(self.ended(Some(record), ending));
        }
        // A job that is about to end is not started anew for a newcomer.
        if done > 0 {
            return Wait::for_news(RANKS_RUN);
        }
        if let Some(next) = self.admission(record).filter(|_| stop.is_none()) {
            return match self.has_quorum(record, &self.able(&[])) {
                true => self.publish(next),
                false => self.give_up_or_wait(),
            };
        }
        if self.rules.is_short(record) && stop.is_none() {
            return self.await_nodes(record);
        }
        let is_full = record.members.len() >= self.rules.nodes_max;
        if self.rules.is_static || is_full || self.admits(record) {
            return Wait::for_news(RANKS_RUN);
        }
        let room = self.rules.nodes_max - record.members.len();
        // The page of one that was just left out may still say that its ranks run.
        let has_ranks = |page: &Page| matches!(page.state, State::Running(_));
        let mut newcomers = self.able(&[]);
        newcomers.retain(|page| record.position(page.id).is_none() && !has_ranks(page));
        // A node whose ranks have failed comes back at the price of a restart.
        let is_left = record.restarts < self.rules.max_restarts;
        newcomers.retain(|page| is_left || !page.is_spent);
        let price = u32::from(newcomers.iter().any(|page| page.is_spent));
        match self.last_call(&newcomers, room) {
            Some(Duration::ZERO) if !newcomers.is_empty() => {
                let why = Why::Joined(newcomers.len().min(room));
                self.reform(record, &[], why, record.restarts + price)
            }
            Some(left) => Wait::at_most(left, MORE_MAY_COME),
            None => Wait::for_news(RANKS_RUN),
        }
    }

    /// Too few for a round: begin one as soon as there are enough.
    fn refill(&self, record: &Record) -> Decision {
        let mut able = self.able(&[]);
        let is_left = record.restarts < self.rules.max_restarts;
        able.retain(|page| is_left || has_paid(page, record));
        if able.len() >= self.rules.nodes_min {
            return self.reform(record, &[], record.why.clone(), record.restarts);
        }
        let left = self.rules.join_timeout.saturating_sub(self.record_age);
        if !left.is_zero() {
            return Wait::at_most(left, TOO_FEW);
        }
        self.publish(self.ended(Some(record), self.gave_up(record, able.len())))
    }

    /// The end of a job that has waited in vain, with so many nodes.
    fn gave_up(&self, record: &Record, have: usize) -> Ending {
        let why = too_few(have, self.rules.nodes_min, self.rules.join_timeout);
        Ending::Lost(match &record.why {
            Why::Lost(names) => Text::new(|lang| {
                let names = listed(names, lang);
                format!("{names}; {}", why.of(lang))
            }),
            _ => why,
        })
    }

    /// The next round after `record`, without the agents that are gone.
    fn reform(&self, record: &Record, gone: &[Gone], why: Why, restarts: u32) -> Decision {
        let mut able = self.able(gone);
        if !self.has_quorum(record, &able) {
            return self.give_up_or_wait();
        }
        if self.rules.is_static && !gone.is_empty() {
            let ending = match gone.iter().find_map(|gone| gone.signal) {
                Some(signal) => Ending::Stopped(Stop {
                    signal,
                    step: self.stop(record).and_then(|stop| stop.step),
                }),
                None => Ending::Lost(Text::new(|lang| listed(&words(gone), lang))),
            };
            return self.publish(self.ended(Some(record), ending));
        }
        if let Some(next) = self.continuing(record, gone, &why) {
            return self.publish(next);
        }
        // To start the ranks of a node anew that have failed is a restart of the job, once.
        let is_paid = |page: &Page| restarts > record.restarts || has_paid(page, record);
        let is_left = restarts < self.rules.max_restarts;
        able.retain(|page| is_left || is_paid(page));
        let restarts = restarts + u32::from(!able.iter().all(|page| is_paid(page)));
        let order = match self.rules.is_static {
            true => record.members.clone(),
            false => arrange(&record.ids(), &able, self.rules.nodes_max),
        };
        if order.len() >= self.rules.nodes_min {
            return self.publish(self.forming(Some(record), order, restarts, why));
        }
        if record.phase == Phase::Short {
            return Wait::for_news(TOO_FEW);
        }
        self.publish(Record {
            id: self.next_id(),
            phase: Phase::Short,
            continues: None,
            members: order,
            before: started(record),
            taken_over: is_taken_over(record),
            restarts,
            restarts_before: restarts,
            why,
        })
    }

    /// Whether enough of the last started round are here to decide over the job. Those that fall silent at this moment may
    /// be the other side of a partition, a page that never changed may be one that they have left behind, and an agent
    /// that said yes to another record of this number belongs to its side.
    fn has_quorum(&self, record: &Record, able: &[&Page]) -> bool {
        let limit = self.rules.silent_after();
        let is_there = |seen: &Seen| seen.ages.confirmed && seen.ages.silent < limit;
        let is_ours =
            |page: &Page| page.accepted == record.id || page.accepted.number < record.id.number;
        let here = |id| {
            able.iter().any(|page| page.id == id && is_ours(page))
                && (id == self.me || self.page(id).is_some_and(is_there))
        };
        let mut voters = started(record);
        if let Some(gone_after) = self.rules.gone_after() {
            // A page is removed only when its agent was left out by enough of the others.
            let is_gone = |seen: &Seen| seen.ages.silent >= gone_after;
            voters.retain(|id| self.page(*id).is_some_and(|seen| !is_gone(seen)));
        }
        is_quorate(&voters, self.dead, here, record.breaks_ties())
    }

    /// The job's store is gone and this agent has come to another one.
    fn take_over(&self, memory: &Record) -> Decision {
        if let Phase::Ended(ending) = &memory.phase {
            return Decision::End(ending.clone());
        }
        let loss = self.lost.unwrap_or(Loss {
            since: Duration::ZERO,
            is_proven: false,
            was_at_endpoint: false,
        });
        if self.rules.is_static {
            let left = self.rules.lease.saturating_sub(loss.since);
            if !left.is_zero() && !loss.is_proven {
                return Wait::at_most(left, MAY_COME_BACK);
            }
            return Decision::End(Ending::Lost(Text::new(|lang| {
                say!(
                    lang,
                    "the node with the job's store is gone",
                    "작업의 스토어가 있던 노드가 사라짐"
                )
            })));
        }
        let is_outside = self.rules.outage.is_some();
        // Any agent may begin in a store outside of the job: a record that is gone there is gone for all.
        // So does one that knows that the lost store's agent is dead: the one in whose store it is may have come too late to know.
        if !self.is_host && !is_outside && !loss.is_proven {
            return self.give_up_or_wait();
        }
        let was_started = matches!(memory.phase, Phase::Running(_)) || !memory.before.is_empty();
        let left = match (loss.is_proven, was_started || is_outside) {
            (true, _) => Duration::ZERO,
            (false, true) => self.rules.take_over_after().saturating_sub(loss.since),
            // No rank has run yet, so there is nothing worth the risk of two stores.
            (false, false) => return self.give_up_or_wait(),
        };
        if !left.is_zero() {
            return Wait::at_most(left, MAY_STILL_RUN);
        }
        // A store that was used before may still hold pages of the dead.
        let mut able = self.able(&[]);
        able.retain(|page| {
            page.id == self.me || self.page(page.id).is_some_and(|seen| seen.ages.confirmed)
        });
        let here = |id| able.iter().any(|page| page.id == id);
        // A round that was seen forming may have been started since, or not.
        let voters = match memory.phase {
            Phase::Running(_) => vec![memory.ids()],
            Phase::Short => vec![memory.before.clone()],
            _ => vec![memory.ids(), memory.before.clone()],
        };
        let quorate = voters
            .iter()
            .all(|voters| voters.is_empty() || is_quorate(voters, self.dead, here, false));
        if !quorate {
            return self.give_up_or_wait();
        }
        let anew = || {
            let order = arrange(&memory.ids(), &able, self.rules.nodes_max);
            self.forming(Some(memory), order, memory.restarts, Why::StoreLost)
        };
        let continuing = self.continuing(memory, &[], &Why::StoreLost);
        let mut next = continuing.unwrap_or_else(anew);
        next.taken_over = true;
        if next.continues.is_none() && next.members.len() < self.rules.nodes_min {
            // Those that are missing come to the endpoint, where a store of theirs is found.
            if loss.was_at_endpoint {
                return self.give_up_or_wait();
            }
            next.phase = Phase::Short;
        }
        self.publish(next)
    }

    /// Agents that can take part in a round: those that are here and have this agent's settings.
    fn able(&self, gone: &[Gone]) -> Vec<&Page> {
        let settings = self.page(self.me).map(|own| own.page.settings);
        let is_able = |seen: &&Seen| {
            self.is_here(seen)
                && settings.is_none_or(|settings| settings == seen.page.settings)
                && !(gone.iter()).any(|gone| gone.id == seen.page.id && !gone.is_able)
        };
        let able = self.pages.iter().filter(is_able);
        able.map(|seen| &seen.page).collect()
    }

    /// Agents that have given a sign of life, unlike those that only left a page behind.
    fn living(&self) -> Vec<&Page> {
        let living = self.pages.iter();
        let living = living.filter(|seen| self.is_here(seen) && seen.ages.confirmed);
        living.map(|seen| &seen.page).collect()
    }

    fn is_here(&self, seen: &Seen) -> bool {
        seen.ages.silent < self.rules.lease
            && !self.dead.contains(&seen.page.id)
            && !matches!(seen.page.state, State::Left(_) | State::Leaving(..))
    }

    fn page(&self, id: AgentId) -> Option<&Seen> {
        self.pages.iter().find(|seen| seen.page.id == id)
    }

    /// Ends the job, if this side of a partition may.
    fn publish_if_quorate(&self, record: &Record, gone: &[Gone], ending: Ending) -> Decision {
        if self.has_quorum(record, &self.able(gone)) {
            self.publish(self.ended(Some(record), ending))
        } else {
            self.give_up_or_wait()
        }
    }

    fn publish(&self, record: Record) -> Decision {
        Decision::Publish(Box::new(record))
    }

    fn next_id(&self) -> RoundId {
        let seen = self.pages.iter().map(|seen| seen.page.accepted.number);
        RoundId {
            number: self.highest.max(seen.max().unwrap_or(0)) + 1,
            by: self.me,
        }
    }

    fn forming(
        &self,
        after: Option<&Record>,
        members: Vec<Member>,
        restarts: u32,
        why: Why,
    ) -> Record {
        let record = Record {
            id: self.next_id(),
            phase: Phase::Forming,
            continues: None,
            members,
            before: after.map(started).unwrap_or_default(),
            taken_over: after.is_some_and(is_taken_over),
            restarts,
            restarts_before: restarts,
            why,
        };
        record.with_new_processes()
    }

    fn ended(&self, record: Option<&Record>, ending: Ending) -> Record {
        let phase = Phase::Ended(ending);
        match record {
            Some(record) => Record {
                phase,
                ..record.clone()
            },
            None => Record {
                phase,
                ..self.forming(None, Vec::new(), 0, Why::Start)
            },
        }
    }
}

/// Whether to start this node's ranks in the round after `record` is no restart: none of them have failed, or the price was paid
/// for a round that has not started.
fn has_paid(page: &Page, record: &Record) -> bool {
    let has_started = record.continues.is_some() || matches!(record.phase, Phase::Running(_));
    !page.is_spent || !has_started && record.position(page.id).is_some()
}

/// The agents of the last round that was started, as of `record`.
fn started(record: &Record) -> Vec<AgentId> {
    match record.phase {
        Phase::Running(_) => record.ids(),
        _ => record.before.clone(),
    }
}

/// Whether the round after `record` still is the first in a store that took another's place.
fn is_taken_over(record: &Record) -> bool {
    record.taken_over && !matches!(record.phase, Phase::Running(_))
}

#[cfg(test)]
mod tests;
