//! Ranks that are lost at every point of a step, of the agreement on the step that holds, and of a replacement's joining, in virtual
//! time: thousands of seeds through the pure [`settle`].
//!
//! A rank has a part in each operation, and its result once the parts of all ranks have come. A lost rank's last parts come to
//! some of the others only, and these notice the loss at different moments. A step's result depends on the state before it, as
//! gradients do, so a step that is computed from another state, left out or counted twice has another result.

use std::collections::BTreeMap;

use super::*;

const STEPS: u64 = 6;
/// All-reduces of a step; the last one is that of the tail.
const OPERATIONS: usize = 3;
const SEEDS: u64 = 5_000;
/// More than any run needs.
const EVENTS_MAX: usize = 100_000;

type Settle = fn(&[Standing]) -> Result<Settlement, Apart>;

/// What the ranks of a generation do, one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Op {
    Gather,
    Lend,
    HandOver,
    Reduce { step: u64, operation: usize },
}

#[derive(Clone, Copy, Debug)]
enum Part {
    Standing(Standing),
    /// The last commit: how many there are, and its result.
    Commit(u64, u64),
    /// Commits, the last one's result, and the state after it.
    State(u64, u64, u64),
    /// A gradient of this state, and whether its rank is invited.
    Gradient(u64, bool),
}

#[derive(Debug)]
struct Rank {
    completed: u64,
    result: u64,
    state: u64,
    place: Place,
    at: Op,
    has_sent: bool,
    inbox: BTreeMap<(Op, usize), Part>,
    settlement: Settlement,
    /// Has left its generation, because of a failure or an invitation.
    waits: bool,
    is_alive: bool,
}

impl Rank {
    fn new(place: Place) -> Self {
        Self {
            completed: 0,
            result: 0,
            state: 0,
            place,
            at: Op::Gather,
            has_sent: false,
            inbox: BTreeMap::new(),
            settlement: Settlement::default(),
            waits: false,
            is_alive: true,
        }
    }

    fn commit(&mut self, result: u64) -> Result<(), String> {
        self.completed += 1;
        self.result = result;
        if result != reference(self.completed) {
            return Err(format!("step {} has two results", self.completed));
        }
        self.state = mixed(self.state, result);
        Ok(())
    }

    fn begin_step(&mut self) {
        self.place = Place::Within;
        let step = self.completed + 1;
        self.at = Op::Reduce { step, operation: 0 };
    }
}

fn mixed(a: u64, b: u64) -> u64 {
    let mixed = (a ^ b.rotate_left(32)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb)
}

/// The result of a step of an undisturbed job.
fn reference(step: u64) -> u64 {
    let mut state = 0;
    let mut result = 0;
    for step in 1..=step {
        result = mixed(step, state);
        state = mixed(state, result);
    }
    result
}

/// How often what happened.
#[derive(Debug, Default)]
struct Seen {
    lent: u64,
    /// Only lost ranks had completed a step.
    lost_commit: u64,
    joined: u64,
    lost_while_settling: u64,
}

struct World {
    settle: Settle,
    random: u64,
    ranks: Vec<Rank>,
    members: Vec<usize>,
    flying: Vec<(usize, usize, Op, Part)>,
    has_invitation: bool,
    deaths_left: usize,
    /// The most commits that a rank that is left had when the generation began.
    most: u64,
    seen: Seen,
}

impl World {
    fn new(seed: u64, settle: Settle) -> Self {
        let mut world = Self {
            settle,
            random: mixed(seed, 1),
            ranks: Vec::new(),
            members: Vec::new(),
            flying: Vec::new(),
            has_invitation: false,
            deaths_left: 0,
            most: 0,
            seen: Seen::default(),
        };
        let ranks = 2 + world.below(5);
        world.deaths_left = 1 + world.below(6);
        world.ranks = (0..ranks).map(|_| Rank::new(Place::Within)).collect();
        world.members = (0..ranks).collect();
        world
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random = mixed(self.random, 2);
        (self.random % bound as u64) as usize
    }

    fn is_over(&self) -> bool {
        let alive = self.ranks.iter().filter(|rank| rank.is_alive);
        alive.into_iter().all(|rank| rank.completed == STEPS)
    }

    fn play(mut self) -> Result<Seen, String> {
        for _ in 0..EVENTS_MAX {
            if self.is_over() {
                return Ok(self.seen);
            }
            self.event()?;
        }
        let at = self.members.iter().map(|member| &self.ranks[*member]);
        Err(format!("the ranks hang: {:?}", at.collect::<Vec<_>>()))
    }

    fn event(&mut self) -> Result<(), String> {
        let members = self.members.iter().copied();
        let left: Vec<usize> = (members.filter(|member| self.ranks[*member].is_alive)).collect();
        if left.iter().all(|member| self.ranks[*member].waits) {
            self.next_generation();
            return Ok(());
        }
        let who = left[self.below(left.len())];
        match self.below(60) {
            0 if self.deaths_left > 0 && left.len() > 1 => self.die(who),
            1 if self.ranks.iter().any(|rank| !rank.is_alive) => self.has_invitation = true,
            // It notices that a rank is lost.
            2..8 if left.len() < self.members.len() => self.ranks[who].waits = true,
            8..34 if !self.flying.is_empty() => {
                let at = self.below(self.flying.len());
                let (from, to, op, part) = self.flying.swap_remove(at);
                self.ranks[to].inbox.insert((op, from), part);
            }
            _ if !self.ranks[who].waits => self.advance(who)?,
            _ => {}
        }
        Ok(())
    }

    fn die(&mut self, who: usize) {
        self.deaths_left -= 1;
        self.ranks[who].is_alive = false;
        let own = self.flying.extract_if(.., |(from, ..)| *from == who);
        for (from, to, op, part) in own.collect::<Vec<_>>() {
            if self.below(2) == 0 {
                self.flying.push((from, to, op, part));
            }
        }
        let Rank { completed, at, .. } = self.ranks[who];
        let others = self.ranks.iter().filter(|rank| rank.is_alive);
        let most = others.map(|rank| rank.completed).max().unwrap_or(0);
        self.seen.lost_commit += u64::from(completed > most);
        let is_settling = !matches!(at, Op::Reduce { .. });
        self.seen.lost_while_settling += u64::from(is_settling && self.most > 0);
    }

    /// As the launcher decides: those that are left after a loss, or else all with one that is invited.
    fn next_generation(&mut self) {
        let ranks = &mut self.ranks;
        let before = self.members.len();
        // One that has not joined is invited again later.
        for member in &self.members {
            ranks[*member].is_alive &= ranks[*member].place != Place::New;
        }
        self.members.retain(|member| ranks[*member].is_alive);
        if self.members.len() == before && std::mem::take(&mut self.has_invitation) {
            self.members.push(ranks.len());
            ranks.push(Rank::new(Place::New));
        }
        self.flying.clear();
        let completed = self.members.iter().map(|member| ranks[*member].completed);
        self.most = completed.max().unwrap_or(0);
        for member in &self.members {
            let rank = &mut ranks[*member];
            rank.inbox.clear();
            (rank.at, rank.has_sent, rank.waits) = (Op::Gather, false, false);
        }
    }

    /// Sends its part of the operation, or takes the result.
    fn advance(&mut self, who: usize) -> Result<(), String> {
        let rank = &self.ranks[who];
        let (at, place) = (rank.at, self.position(who));
        if rank.completed == STEPS && matches!(at, Op::Reduce { .. }) {
            return Ok(());
        }
        let Settlement { lender, giver, .. } = rank.settlement;
        let senders = match at {
            Op::Gather | Op::Reduce { .. } => self.members.clone(),
            Op::Lend => vec![self.members[lender.expect("a lender lends")]],
            Op::HandOver if rank.place == Place::New => vec![self.members[giver.expect("a giver")]],
            Op::HandOver => Vec::new(),
        };
        if !rank.has_sent {
            let part = match at {
                Op::Gather => Some(Part::Standing(Standing {
                    place: rank.place,
                    completed: rank.completed,
                })),
                Op::Lend => {
                    (lender == Some(place)).then_some(Part::Commit(rank.completed, rank.result))
                }
                Op::HandOver => (giver == Some(place)).then_some(Part::State(
                    rank.completed,
                    rank.result,
                    rank.state,
                )),
                Op::Reduce { operation, .. } => {
                    let is_invited = operation + 1 == OPERATIONS && self.has_invitation;
                    Some(Part::Gradient(rank.state, is_invited))
                }
            };
            for to in self.members.iter().filter(|_| part.is_some()) {
                let part = part.expect("it has one");
                if *to == who {
                    self.ranks[who].inbox.insert((at, who), part);
                } else {
                    self.flying.push((who, *to, at, part));
                }
            }
            self.ranks[who].has_sent = true;
            return Ok(());
        }
        let parts = senders
            .iter()
            .map(|from| rank.inbox.get(&(at, *from)).copied());
        match parts.collect::<Option<Vec<Part>>>() {
            Some(parts) => self.complete(who, &parts),
            None => Ok(()),
        }
    }

    fn position(&self, who: usize) -> usize {
        let mut members = self.members.iter();
        members.position(|member| *member == who).expect("a member")
    }

    fn complete(&mut self, who: usize, parts: &[Part]) -> Result<(), String> {
        let rank = &mut self.ranks[who];
        rank.has_sent = false;
        match rank.at {
            Op::Gather => {
                let standings = parts.iter().map(|part| match part {
                    Part::Standing(standing) => *standing,
                    other => panic!("{other:?}"),
                });
                let settled = (self.settle)(&standings.collect::<Vec<_>>());
                rank.settlement = settled.map_err(|error| error.to_string())?;
                rank.at = match rank.settlement.lender {
                    Some(_) => Op::Lend,
                    None => Op::HandOver,
                };
            }
            Op::Lend => {
                if let [Part::Commit(completed, result)] = parts
                    && rank.place != Place::New
                    && rank.completed < *completed
                {
                    self.seen.lent += 1;
                    rank.commit(*result)?;
                }
                rank.at = Op::HandOver;
            }
            Op::HandOver => {
                if let [Part::State(completed, result, state)] = parts {
                    (rank.completed, rank.result, rank.state) = (*completed, *result, *state);
                    self.seen.joined += 1;
                }
                if rank.completed != self.most {
                    return Err(format!("step {} was committed and is lost", self.most));
                }
                rank.begin_step();
            }
            Op::Reduce { step, operation } => {
                let gradients = parts.iter().map(|part| match part {
                    Part::Gradient(state, is_invited) => (*state, *is_invited),
                    other => panic!("{other:?}"),
                });
                let (states, invited): (Vec<u64>, Vec<bool>) = gradients.unzip();
                if states.iter().any(|state| *state != states[0]) {
                    return Err(format!("step {step} is computed from different states"));
                }
                if operation + 1 < OPERATIONS {
                    let operation = operation + 1;
                    rank.at = Op::Reduce { step, operation };
                    return Ok(());
                }
                rank.commit(mixed(step, states[0]))?;
                rank.begin_step();
                if invited.contains(&true) {
                    (rank.place, rank.waits) = (Place::Between, true);
                }
            }
        }
        Ok(())
    }
}

fn play_all(settle: Settle) -> Result<Seen, String> {
    let mut all = Seen::default();
    for seed in 0..SEEDS {
        let seen = World::new(seed, settle).play();
        let seen = seen.map_err(|what| format!("seed {seed}: {what}"))?;
        all.lent += seen.lent;
        all.lost_commit += seen.lost_commit;
        all.joined += seen.joined;
        all.lost_while_settling += seen.lost_while_settling;
    }
    Ok(all)
}

#[test]
fn no_step_has_two_results_and_none_that_was_committed_is_lost() {
    let seen = play_all(settle).unwrap_or_else(|what| panic!("{what}"));
    let counts = [
        seen.lent,
        seen.lost_commit,
        seen.joined,
        seen.lost_while_settling,
    ];
    assert!(counts.iter().all(|count| *count > 100), "{seen:?}");
}

#[test]
fn a_wrong_decision_is_found() {
    let nobody_lends: Settle = |all| {
        let settled = settle(all)?;
        Ok(Settlement {
            lender: None,
            ..settled
        })
    };
    let first_lends: Settle = |all| {
        let settled = settle(all)?;
        let lender = settled.lender.map(|_| 0);
        Ok(Settlement { lender, ..settled })
    };
    let last_gives: Settle = |all| {
        let settled = settle(all)?;
        let giver = settled.giver.map(|_| all.len() - 1);
        Ok(Settlement { giver, ..settled })
    };
    for wrong in [nobody_lends, first_lends, last_gives] {
        play_all(wrong).expect_err("a seed that shows it");
    }
}
