//! Processes in place of lost ranks: they start, some die, and the others admit them between two steps.

use super::*;
use crate::elastic::record::{Newcomer, Places};

/// The places of a node's lost ranks.
#[derive(Debug, Default)]
pub(super) struct Seats {
    /// Without a process.
    pub(super) empty: Vec<usize>,
    /// Processes that wait for an invitation.
    ready: Vec<usize>,
    /// Those that the round's ranks are invited to admit.
    pub(super) invited: Vec<usize>,
    /// How many may have been started, and how many were.
    allowed: u32,
    used: u32,
}

impl Seats {
    /// The generation that they were invited to has ended.
    pub(super) fn take_back(&mut self) {
        self.ready.append(&mut self.invited);
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
        let waiting = seats.ready.iter().filter(|_| seats.invited.is_empty());
        let places = Places {
            wanted: (seats.empty.len() as u32).saturating_sub(seats.allowed - seats.used),
            newcomers: waiting.map(newcomer).collect(),
        };
        self.give(node, Input::Places(places));
    }

    /// A node obeys an invitation: its ranks work on.
    pub(super) fn invite(&mut self, node: usize, mut running: Running, record: Record) {
        let id = self.nodes[node].agent.id();
        let own = record.members.iter().find(|member| member.id == id);
        let own = own.expect("checked").clone();
        let seats = &mut running.seats;
        seats.allowed = own.replacements;
        let mut has_died = None;
        for newcomer in &own.newcomers {
            match seats.ready.iter().position(|slot| *slot == newcomer.slot) {
                Some(at) => seats.invited.push(seats.ready.remove(at)),
                None => has_died = Some(newcomer.slot),
            }
        }
        if has_died.is_none() && self.dice.chance(self.replacements_die) {
            has_died = seats.invited.first().copied();
        }
        let mut starting = Vec::new();
        while seats.used < seats.allowed && !seats.empty.is_empty() {
            seats.used += 1;
            starting.push(seats.empty.remove(0));
        }
        let (token, round, since) = (running.token, record.id, record.since());
        let (nobody_is_new, at) = (!record.has_newcomers(), own.first);
        running.record = record;
        self.nodes[node].ranks = Some(running);
        for slot in starting {
            let takes = ms(200 + self.dice.below(2000));
            self.after(takes, Event::Replaced(node, since, slot));
        }
        if let Some(slot) = has_died {
            let report = Report {
                failure: Failure {
                    rank: at + slot,
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
        if nobody_is_new {
            self.tell_places(node);
        } else {
            let step = ms(self.dice.below(300));
            self.after(step, Event::Begin(round));
        }
    }

    /// A process in place of a lost rank is ready, or has ended.
    pub(super) fn replaced(&mut self, node: usize, since: RoundId, slot: usize) {
        let dies = self.dice.chance(self.replacements_die);
        let running = self.nodes[node].ranks.as_mut();
        let Some(running) = running.filter(|running| running.record.since() == since) else {
            return;
        };
        match dies {
            true => running.seats.empty.push(slot),
            false => running.seats.ready.push(slot),
        }
        self.tell_places(node);
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
            let running = self.nodes[place].ranks.as_mut().expect("it runs");
            if running.has_begun != round {
                running.has_begun = round;
                let seats = &mut running.seats;
                running.slots.append(&mut seats.invited);
                self.give(place, Input::Begun(round));
                self.tell_places(place);
            }
        }
    }
}
