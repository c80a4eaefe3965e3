//! Processes that join a job that runs, in place of lost ranks or on a node that has come: they start, some die, and the others
//! admit them between two steps.

use super::*;
use crate::elastic::record::{Newcomer, Places};

/// The places of a node's ranks that take no part in the training.
#[derive(Debug, Default)]
pub(super) struct Seats {
    /// Without a process.
    pub(super) empty: Vec<usize>,
    /// How many processes are not ready.
    starting: usize,
    /// Processes that wait for an invitation.
    ready: Vec<usize>,
    /// Those that the round's ranks are invited to admit.
    pub(super) invited: Vec<usize>,
    /// Those that were admitted and have not the job's state yet.
    pub(super) new: Vec<usize>,
    /// How many may have been started, and how many were.
    allowed: u32,
    used: u32,
}

impl Running {
    /// The generation has ended: those without the state wait again.
    pub(super) fn take_back(&mut self) {
        let seats = &mut self.seats;
        self.slots.retain(|slot| !seats.new.contains(slot));
        seats.ready.append(&mut seats.invited);
        seats.ready.append(&mut seats.new);
    }
}

impl World {
    /// Says what a supervisor says of the places of lost ranks.
    pub(super) fn tell_places(&mut self, node: usize) {
        let running = self.nodes[node].ranks.as_ref();
        let Some(running) = running.filter(|running| running.waits_for.is_none()) else {
            return;
        };
        let seats = &running.seats;
        let newcomer = |slot: &usize| Newcomer {
            slot: *slot,
            pid: 1,
        };
        // A node joins with all its ranks at once.
        let may_join = !running.slots.is_empty() || seats.starting == 0;
        let waits = seats.invited.is_empty() && may_join;
        let waiting = seats.ready.iter().filter(|_| waits);
        let places = Places {
            wanted: (seats.empty.len() as u32).saturating_sub(seats.allowed - seats.used),
            newcomers: waiting.map(newcomer).collect(),
            admits: self.admits,
            is_admitting: !seats.new.is_empty(),
        };
        self.give(node, Input::Places(places));
    }

    /// A node starts ranks that are to join the job.
    pub(super) fn join(&mut self, node: usize, record: Record) {
        let token = self.dice.next();
        let (nproc, since) = (self.nodes[node].nproc, record.since());
        self.nodes[node].joins += 1;
        self.nodes[node].ranks = Some(Running {
            record,
            token,
            failed: false,
            slots: Vec::new(),
            waits_for: None,
            seats: Seats {
                starting: nproc,
                ..Seats::default()
            },
            has_begun: RoundId::default(),
            is_released: false,
        });
        for slot in 0..nproc {
            self.start_one(node, since, slot);
        }
    }

    fn start_one(&mut self, node: usize, since: RoundId, slot: usize) {
        let takes = ms(200 + self.dice.below(2000));
        let attempt = (since, self.nodes[node].joins);
        self.after(takes, Event::Joins(node, attempt, slot));
    }

    /// A node obeys an invitation: its ranks work on.
    pub(super) fn invite(&mut self, node: usize, mut running: Running, record: Record) {
        let id = self.nodes[node].agent.id();
        let own = record.members.iter().find(|member| member.id == id);
        let own = own.expect("checked").clone();
        let seats = &mut running.seats;
        seats.allowed = own.replacements;
        for newcomer in &own.newcomers {
            let at = seats.ready.iter().position(|slot| *slot == newcomer.slot);
            seats
                .invited
                .push(seats.ready.remove(at.expect("it waits")));
        }
        let dies = self.dice.chance(self.newcomers_die);
        let dying = seats.invited.first().copied().filter(|_| dies);
        let mut starting = Vec::new();
        while seats.used < seats.allowed && !seats.empty.is_empty() {
            seats.used += 1;
            seats.starting += 1;
            starting.push(seats.empty.remove(0));
        }
        let (token, round, since) = (running.token, record.id, record.since());
        let is_idle = running.slots.is_empty();
        let is_same = !record.has_newcomers();
        running.record = record;
        if is_same {
            running.has_begun = round;
        }
        self.nodes[node].ranks = Some(running);
        for slot in starting {
            self.start_one(node, since, slot);
        }
        if let Some(slot) = dying {
            let report = Report {
                failure: Failure {
                    rank: own.first + slot,
                    local_rank: slot,
                    ..Failure::example(FailureKind::ExitCode(7))
                },
                at_us: self.clock_of(node).as_micros() as u64,
                is_later: false,
                recovers: true,
            };
            let dies = ms(self.dice.below(100));
            self.after(dies, Event::RankFails(node, token, Box::new(report)));
        }
        if is_idle {
            let work = self.work + ms(self.dice.below(300));
            self.after(work, Event::RanksEnd(node, token, true));
        }
        if is_same {
            self.tell_places(node);
        } else {
            let step = ms(self.dice.below(300));
            self.after(step, Event::Begin(round));
        }
    }

    /// A process that is to join is ready, or has ended.
    pub(super) fn joins(&mut self, node: usize, attempt: (RoundId, u32), slot: usize) {
        let dies = self.dice.chance(self.newcomers_die);
        let joins = self.nodes[node].joins;
        let running = self.nodes[node].ranks.as_mut();
        // Not those of an attempt that was given up.
        let is_its = |running: &&mut Running| (running.record.since(), joins) == attempt;
        let Some(running) = running.filter(is_its) else {
            return;
        };
        let seats = &mut running.seats;
        seats.starting = seats.starting.saturating_sub(1);
        match dies {
            true => seats.empty.push(slot),
            false => seats.ready.push(slot),
        }
        let has_ended = running.slots.is_empty() && seats.starting == 0 && seats.ready.is_empty();
        let token = running.token;
        self.tell_places(node);
        if has_ended {
            self.after(ms(10), Event::RanksEnd(node, token, false));
        }
    }

    /// The ranks of a round follow the invitation, once all of them have it. Until then they work on.
    pub(super) fn begin(&mut self, round: RoundId) {
        let runs = |node: &Node| {
            let ranks = node.ranks.as_ref();
            ranks.is_some_and(|ranks| ranks.record.id == round)
        };
        let Some(first) = self.nodes.iter().position(runs) else {
            return;
        };
        let running = self.nodes[first].ranks.as_ref().expect("it runs");
        let members = running.record.ids();
        let place = |id: &AgentId| (self.nodes.iter()).position(|node| node.agent.id() == *id);
        let places: Vec<_> = members.iter().filter_map(place).collect();
        let follows = |place: &usize| {
            let ranks = self.nodes[*place].ranks.as_ref();
            let works = |ranks: &Running| {
                ranks.record.id == round && !ranks.failed && ranks.waits_for.is_none()
            };
            ranks.is_some_and(works) && self.reaches(first, *place) && !self.nodes[*place].stopped
        };
        if !places.iter().all(follows) {
            return self.after(ms(100), Event::Begin(round));
        }
        for place in places {
            let running = self.nodes[place].ranks.as_ref();
            // One whose ranks are all new is told by the others.
            if running.is_some_and(|running| !running.slots.is_empty()) {
                self.begin_here(place);
            }
        }
    }

    pub(super) fn begin_here(&mut self, node: usize) {
        let Some(running) = &mut self.nodes[node].ranks else {
            return;
        };
        let round = running.record.id;
        if running.has_begun == round || running.failed || running.waits_for.is_some() {
            return;
        }
        running.has_begun = round;
        let seats = &mut running.seats;
        seats.new = std::mem::take(&mut seats.invited);
        running.slots.extend(&seats.new);
        self.tell_places(node);
        self.give(node, Input::Begun(round));
        let takes = ms(self.dice.below(200));
        self.after(takes, Event::Settled(node, round));
    }

    /// The ranks that were admitted have the job's state.
    pub(super) fn settled(&mut self, node: usize, round: RoundId) {
        let running = self.nodes[node].ranks.as_mut();
        let same = |running: &&mut Running| running.record.id == round && !running.failed;
        if let Some(running) = running.filter(same) {
            running.seats.new.clear();
            self.tell_places(node);
        }
    }
}
