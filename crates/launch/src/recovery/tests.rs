//! A table of scenes, and jobs whose ranks die, hang and come back by random schedules in virtual time.

use std::time::Duration;

use super::*;
use crate::elastic::simulation::Dice;
use crate::judge::{Ending, Exit, Fault, Limits, Verdict, judge};

fn ended(how: Ending) -> WorkerState {
    let exit = Exit {
        at: Duration::ZERO,
        how,
        excused: false,
        is_early: false,
    };
    WorkerState {
        exit: Some(exit),
        ..WorkerState::default()
    }
}

const STOPPED_MAX: Duration = Duration::from_secs(2);
const READY_WITHIN: Duration = Duration::from_secs(4);

const KILLED: Ending = Ending::Signal {
    number: 9,
    core: false,
};

#[test]
fn who_is_left_goes_on_once_the_culprit_is_dead() {
    let lives = WorkerState::default();
    let (killed, finished) = (ended(KILLED), ended(Ending::Code(0)));
    let new = WorkerState {
        is_new: true,
        ..lives
    };
    let go_on = |members: &[usize], lost: &[usize]| {
        Ok(Next::GoOn {
            members: members.into(),
            lost: lost.into(),
        })
    };
    let all = |_| true;
    let roster = |members: &[usize]| Roster {
        members: members.to_vec(),
        ..Roster::new(0, 0)
    };
    for (members, states, culprit, expect) in [
        (
            &[0, 1, 2][..],
            vec![lives, killed, lives],
            1,
            go_on(&[0, 2], &[1]),
        ),
        (
            &[0, 1, 2],
            vec![killed, killed, lives],
            1,
            go_on(&[2], &[0, 1]),
        ),
        (
            &[1, 2, 3],
            vec![killed, lives, killed, lives],
            2,
            go_on(&[1, 3], &[2]),
        ),
        (&[0, 1, 2], vec![lives, lives, lives], 2, Ok(Next::Kill)),
        // A replacement has the last rank, and is left out while it is new.
        (
            &[2, 1, 0],
            vec![lives, killed, lives],
            1,
            go_on(&[2, 0], &[1]),
        ),
        (&[2, 1, 0], vec![new, killed, lives], 1, go_on(&[2], &[1])),
        (&[1, 0], vec![new, killed], 1, Err(Impossible::NobodyLeft)),
        // One that left early is to blame although its code is 0; another that has finished is no loss.
        (
            &[0, 1, 2],
            vec![finished, finished, lives],
            0,
            go_on(&[2], &[0]),
        ),
        (&[0], vec![killed], 0, Err(Impossible::NobodyLeft)),
        (&[1], vec![lives, lives], 1, Err(Impossible::NobodyLeft)),
        (
            &[0, 1],
            vec![finished, killed],
            1,
            Err(Impossible::NobodyLeft),
        ),
    ] {
        let next = roster(members).after_failure(&states, all, Some(culprit));
        assert_eq!(next, expect, "{members:?} {states:?}");
    }
    // Without a culprit all that live go on.
    for (members, states, expect) in [
        (
            &[0, 1, 2][..],
            vec![lives, lives, lives],
            go_on(&[0, 1, 2], &[]),
        ),
        (&[0, 1, 2], vec![lives, killed, finished], go_on(&[0], &[1])),
        (&[2, 1, 0], vec![new, lives, lives], go_on(&[2, 1], &[])),
    ] {
        let next = roster(members).after_failure(&states, all, None);
        assert_eq!(next, expect, "{members:?} {states:?}");
    }
    let (three, one_dead) = (roster(&[0, 1, 2]), [lives, killed, lives]);
    let unable = three.after_failure(&one_dead, |rank| rank != 2, Some(1));
    assert_eq!(unable, Err(Impossible::NotAble(2)));
    let of_the_dead = three.after_failure(&one_dead, |rank| rank != 1, Some(1));
    assert_eq!(of_the_dead, go_on(&[0, 2], &[1]));
}

#[test]
fn a_lost_rank_is_replaced_while_restarts_are_left() {
    let lives = WorkerState::default();
    let new = WorkerState {
        is_out: true,
        is_new: true,
        ..lives
    };
    let due = |roster: &mut Roster, states: &[WorkerState], ready: &[usize]| {
        roster.due(&Seen {
            states,
            admits: &|_| true,
            is_ready: &|rank| ready.contains(&rank),
            has_room: true,
            now: Duration::ZERO,
            ready_within: Duration::MAX,
        })
    };
    let mut roster = Roster::new(3, 2);
    let mut states = [lives, ended(KILLED), ended(KILLED)];
    roster.go_on(&[0], &states);
    // Not as long as another one cannot admit it.
    let refusing = Seen {
        states: &states,
        admits: &|_| false,
        is_ready: &|_| false,
        has_room: true,
        now: Duration::ZERO,
        ready_within: Duration::MAX,
    };
    assert_eq!(roster.due(&refusing), None);
    let crowded = Seen {
        admits: &|_| true,
        has_room: false,
        ..refusing
    };
    assert_eq!(roster.due(&crowded), None);
    assert_eq!(due(&mut roster, &states, &[]), Some(Due::Start(1)));
    states[1] = new;
    assert_eq!(due(&mut roster, &states, &[]), Some(Due::Start(2)));
    states[2] = new;
    assert_eq!(due(&mut roster, &states, &[]), None);
    assert_eq!(
        due(&mut roster, &states, &[2]),
        Some(Due::Invite(vec![0, 2]))
    );
    assert_eq!(
        due(&mut roster, &states, &[1, 2]),
        None,
        "one invitation at a time"
    );
    assert_eq!(roster.admit(), [2]);
    states[2].is_out = false;
    assert_eq!(
        due(&mut roster, &states, &[1, 2]),
        Some(Due::Invite(vec![0, 2, 1]))
    );
    // The one that is invited dies: the others form a generation without it, and no restart is left.
    states[1] = ended(KILLED);
    let lost = Due::Lost {
        rank: 1,
        is_invited: true,
    };
    assert_eq!(due(&mut roster, &states, &[]), Some(lost));
    assert_eq!(due(&mut roster, &states, &[]), None);
    assert_eq!(
        (roster.started(), roster.left(), roster.is_changing()),
        (2, 0, false)
    );
    // A rank that left by itself is not replaced, and nobody is while the job ends.
    let mut roster = Roster::new(2, 1);
    roster.go_on(&[1], &[ended(Ending::Code(0)), lives]);
    assert_eq!(due(&mut roster, &[lives, lives], &[]), None);
    let mut roster = Roster::new(2, 1);
    let states = [ended(KILLED), ended(Ending::Code(0))];
    roster.go_on(&[1], &states);
    assert_eq!(due(&mut roster, &states, &[]), None);
}

#[test]
fn a_replacement_that_does_not_get_ready_is_killed_once_and_replaced() {
    let lives = WorkerState::default();
    let new = WorkerState {
        is_out: true,
        is_new: true,
        started: Duration::from_secs(10),
        ..lives
    };
    let due = |roster: &mut Roster, states: &[WorkerState], seconds| {
        roster.due(&Seen {
            states,
            admits: &|_| true,
            is_ready: &|_| false,
            has_room: true,
            now: Duration::from_secs(seconds),
            ready_within: Duration::from_secs(5),
        })
    };
    let mut roster = Roster::new(2, 2);
    let mut states = [lives, ended(KILLED)];
    roster.go_on(&[0], &states);
    assert_eq!(due(&mut roster, &states, 10), Some(Due::Start(1)));
    states[1] = new;
    assert_eq!(due(&mut roster, &states, 14), None);
    assert_eq!(due(&mut roster, &states, 15), Some(Due::Kill(1)));
    assert_eq!(due(&mut roster, &states, 16), None);
    states[1].exit = ended(KILLED).exit;
    let lost = Due::Lost {
        rank: 1,
        is_invited: false,
    };
    assert_eq!(due(&mut roster, &states, 17), Some(lost));
    assert_eq!(due(&mut roster, &states, 17), Some(Due::Start(1)));
    let [seconds, minute] = [20, 60].map(Duration::from_secs);
    assert_eq!(ready_within(minute, seconds), minute);
    assert_eq!(ready_within(seconds, minute), 2 * minute);
}

#[test]
fn all_go_on_without_a_loss_in_each_step_and_for_some_seconds_in_one() {
    let at = Duration::from_millis;
    let may = |before, step, now| Mended::may_again(before, step, at(now));
    assert!(may(None, 7, 0));
    let once = Some(Mended::again(None, 7, at(1_000)));
    assert!(!may(once, 7, 1_099) && may(once, 7, 1_100) && may(once, 8, 1_001));
    // Ranks that do not say their step yet do not make it another one.
    let twice = Some(Mended::again(once, 0, at(5_900)));
    assert!(!may(twice, 7, 5_999) && !may(twice, 7, 6_000) && may(twice, 8, 6_000));
    let later = Some(Mended::again(twice, 8, at(9_000)));
    assert!(may(later, 8, 13_999) && !may(later, 8, 14_000));
}

/// What a rank of the simulation is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doing {
    Working,
    /// Its group has failed.
    Waiting,
    Forming,
    /// It has a group and lacks the job's state.
    Receiving,
    /// A replacement that is not ready.
    Starting,
}

#[derive(Debug, Clone, Copy)]
struct Rank {
    doing: Doing,
    /// Of its group.
    generation: usize,
    /// Whom it blames for the failure of which generation.
    blames: Option<(usize, usize)>,
    /// In which generation it sees a connection end, and to whom; to itself for the one to the store.
    sees_end: Option<(usize, usize)>,
    is_stuck: bool,
    was_stuck: bool,
    is_dead: bool,
    is_new: bool,
}

struct Generation {
    members: Vec<usize>,
    is_over: bool,
    /// Its ranks have agreed to follow the invitation.
    is_agreed: bool,
}

struct World {
    dice: Dice,
    now: u64,
    ranks: Vec<Rank>,
    /// What the launcher knows.
    states: Vec<WorkerState>,
    killing: Option<usize>,
    generations: Vec<Generation>,
    /// The newest generation that has begun.
    begun: usize,
    /// The one that the launcher knows of.
    known: usize,
    /// When the launcher last looked.
    looked_at: Duration,
    roster: Roster,
    /// How often all went on after a connection had failed.
    mended: u32,
    /// The job has failed.
    is_over: bool,
}

impl World {
    fn new(seed: u64, ranks: usize) -> Self {
        let rank = Rank {
            doing: Doing::Working,
            generation: 0,
            blames: None,
            sees_end: None,
            is_stuck: false,
            was_stuck: false,
            is_dead: false,
            is_new: false,
        };
        let replacements_max = (seed % 5) as u32;
        let first = Generation {
            members: (0..ranks).collect(),
            is_over: false,
            is_agreed: false,
        };
        Self {
            dice: Dice(seed),
            now: 0,
            ranks: vec![rank; ranks],
            states: vec![WorkerState::default(); ranks],
            killing: None,
            generations: vec![first],
            begun: 0,
            known: 0,
            looked_at: Duration::ZERO,
            roster: Roster::new(ranks, replacements_max),
            mended: 0,
            is_over: false,
        }
    }

    fn fault(&mut self) {
        let ranks = self.ranks.len() as u64;
        let [rank, other] = [(); 2].map(|()| self.dice.below(ranks) as usize);
        match self.dice.below(5) {
            0 => self.ranks[rank].is_dead = true,
            // One end of a connection, or both.
            1 => self.ranks[rank].sees_end = Some((self.ranks[rank].generation, other)),
            2 if self.ranks[rank].generation == self.ranks[other].generation => {
                for (one, end) in [(rank, other), (other, rank)] {
                    self.ranks[one].sees_end = Some((self.ranks[one].generation, end));
                }
            }
            3 => (self.ranks[rank].is_stuck, self.ranks[rank].was_stuck) = (true, true),
            _ => self.ranks[rank].is_stuck = false,
        }
    }

    /// One rank does what it does next.
    fn step(&mut self, me: usize) {
        let Rank {
            doing,
            generation,
            sees_end,
            is_stuck,
            is_dead,
            is_new,
            ..
        } = self.ranks[me];
        if is_stuck || is_dead {
            return;
        }
        let lost = sees_end.filter(|(of, _)| *of == generation);
        let Generation {
            members, is_over, ..
        } = &self.generations[generation];
        let is_bad = |rank: &&usize| self.ranks[**rank].is_dead || self.ranks[**rank].is_stuck;
        let bad: Vec<usize> = members.iter().filter(is_bad).copied().collect();
        let gave_up = members.iter().find(|rank| {
            let other = &self.ranks[**rank];
            (other.generation, other.doing) == (generation, Doing::Waiting)
        });
        match doing {
            Doing::Starting => self.ranks[me].doing = Doing::Waiting,
            Doing::Working | Doing::Forming | Doing::Receiving if *is_over => self.wait(me, None),
            // It has the result in which they agreed.
            Doing::Working if self.generations[generation].is_agreed => {
                self.begun = self.begun.max(generation + 1);
                self.ranks[me].doing = Doing::Waiting;
                self.ranks[me].blames = None;
                self.form(me);
            }
            Doing::Working | Doing::Forming | Doing::Receiving if lost.is_some() => {
                self.wait(me, lost.map(|(_, other)| other));
            }
            Doing::Working | Doing::Forming | Doing::Receiving if !bad.is_empty() => {
                let culprit = bad[self.dice.below(bad.len() as u64) as usize];
                self.wait(me, Some(culprit));
            }
            Doing::Working | Doing::Forming | Doing::Receiving if gave_up.is_some() => {
                let other = *gave_up.expect("looked at");
                // It says because of whom, or is blamed itself.
                let said = self.ranks[other].blames.filter(|(of, _)| *of == generation);
                self.wait(me, Some(said.map_or(other, |(_, culprit)| culprit)));
            }
            Doing::Forming => {
                let has_come = |rank: &usize| self.ranks[*rank].generation >= generation;
                if members.iter().all(has_come) {
                    let next = [Doing::Working, Doing::Receiving][usize::from(is_new)];
                    self.ranks[me].doing = next;
                }
            }
            Doing::Waiting => self.form(me),
            Doing::Receiving => {
                let gives = |rank: &&usize| {
                    let other = &self.ranks[**rank];
                    (other.generation, other.doing, other.is_new)
                        == (generation, Doing::Working, false)
                };
                assert!(
                    members.iter().any(|rank| !self.ranks[*rank].is_new),
                    "no member has the state"
                );
                if members.iter().find(gives).is_some() {
                    self.ranks[me].doing = Doing::Working;
                    self.ranks[me].is_new = false;
                }
            }
            Doing::Working => {
                // An operation of all is complete, and a member was invited.
                let works = |rank: &usize| {
                    let other = &self.ranks[*rank];
                    (other.generation, other.doing) == (generation, Doing::Working)
                };
                let is_invited =
                    generation == self.begun && self.generations.len() - 1 > generation;
                if is_invited && members.iter().all(works) {
                    self.generations[generation].is_agreed = true;
                }
            }
        }
    }

    /// A rank that waits goes on with the generation that has begun.
    fn form(&mut self, me: usize) {
        let begun = &self.generations[self.begun];
        let rank = &mut self.ranks[me];
        if begun.is_over || (self.begun <= rank.generation && !(rank.is_new && self.begun == 0)) {
            return;
        }
        if begun.members.contains(&me) {
            rank.doing = Doing::Forming;
            rank.generation = self.begun;
        } else {
            assert!(rank.is_new, "a living rank was fenced: {me}");
        }
    }

    fn wait(&mut self, me: usize, culprit: Option<usize>) {
        let culprit = culprit.filter(|culprit| *culprit != me);
        let generation = self.ranks[me].generation;
        self.ranks[me].doing = Doing::Waiting;
        self.ranks[me].blames = culprit.map(|culprit| (generation, culprit));
    }

    /// The launcher looks, as `Supervisor::look_for_a_cause` and `fill_places` do.
    fn look(&mut self) {
        if self.is_over {
            return;
        }
        if self.begun != self.known {
            self.known = self.begun;
            self.roster.admit();
            self.mark_members();
        }
        let now = Duration::from_millis(self.now);
        for (state, rank) in self.states.iter_mut().zip(&self.ranks) {
            if rank.is_dead && state.exit.is_none() {
                state.exit = Some(Exit {
                    at: now,
                    how: KILLED,
                    excused: false,
                    is_early: false,
                });
            }
            let blames = rank.blames.filter(|(of, _)| *of == self.known);
            state.blames = blames.map(|(_, who)| who);
            let waits = rank.doing == Doing::Waiting && rank.generation == self.known;
            state.waits_since = waits.then(|| state.waits_since.unwrap_or(now));
            state.is_new = rank.is_new;
            // All that hang are stopped processes.
            let stopped = |stopped: Duration| stopped + now.saturating_sub(self.looked_at);
            let is_stopped = rank.is_stuck && !rank.is_dead;
            state.stopped_for =
                is_stopped.then(|| state.stopped_for.map_or(Duration::ZERO, stopped));
            state.stopped_max = Some(STOPPED_MAX);
        }
        self.looked_at = now;
        if let Some(rank) = self.killing {
            if self.states[rank].exit.is_some() {
                self.killing = None;
                self.go_on(Some(rank));
            }
            return;
        }
        let next = self.roster.after_failure(&self.states, |_| true, None);
        let limits = Limits {
            all_may_go_on: next.is_ok(),
            ..Limits::default()
        };
        match judge(&self.states, None, now, &limits) {
            Verdict::Failed { rank, fault, .. } => {
                assert!(
                    fault != Fault::Stalled || self.ranks[rank].was_stuck,
                    "rank {rank} never hung"
                );
                self.go_on(Some(rank));
            }
            Verdict::AllGoOn { .. } => {
                self.mended += 1;
                self.go_on(None);
            }
            _ => {}
        }
        if !self.is_over && self.killing.is_none() {
            self.fill_places(now);
        }
    }

    fn fill_places(&mut self, now: Duration) {
        let ranks = &self.ranks;
        let due = self.roster.due(&Seen {
            states: &self.states,
            admits: &|_| true,
            is_ready: &|rank| ranks[rank].is_new && ranks[rank].doing != Doing::Starting,
            has_room: true,
            now,
            ready_within: READY_WITHIN,
        });
        match due {
            Some(Due::Start(rank)) => {
                self.states[rank] = WorkerState {
                    is_out: true,
                    is_new: true,
                    started: now,
                    ..WorkerState::default()
                };
                self.ranks[rank] = Rank {
                    doing: Doing::Starting,
                    generation: 0,
                    blames: None,
                    sees_end: None,
                    is_stuck: false,
                    was_stuck: false,
                    is_dead: false,
                    is_new: true,
                };
            }
            Some(Due::Invite(members)) => {
                assert_eq!(self.known, self.generations.len() - 1);
                self.publish(members);
            }
            Some(Due::Lost { is_invited, .. }) if is_invited => {
                let members = self.roster.members().to_vec();
                self.go_on_with(&members);
            }
            Some(Due::Kill(rank)) => {
                assert!(self.ranks[rank].was_stuck, "a replacement that works");
                self.ranks[rank].is_dead = true;
            }
            Some(Due::Lost { .. }) | None => {}
        }
    }

    fn publish(&mut self, members: Vec<usize>) {
        self.generations.push(Generation {
            members,
            is_over: false,
            is_agreed: false,
        });
    }

    fn go_on_with(&mut self, members: &[usize]) {
        self.end_all();
        self.publish(members.to_vec());
        self.begun = self.generations.len() - 1;
        self.known = self.begun;
        self.roster.go_on(members, &self.states);
        self.mark_members();
    }

    fn mark_members(&mut self) {
        for (rank, state) in self.states.iter_mut().enumerate() {
            state.is_out = !self.roster.members().contains(&rank);
            state.waits_since = None;
        }
    }

    fn go_on(&mut self, culprit: Option<usize>) {
        let next = self.roster.after_failure(&self.states, |_| true, culprit);
        match next {
            Ok(Next::Kill) => {
                self.end_all();
                // It takes until the next look.
                let culprit = culprit.expect("there is one to kill");
                self.ranks[culprit].is_dead = true;
                self.killing = Some(culprit);
            }
            Ok(Next::GoOn { members, lost }) => {
                let before = self.roster.members();
                assert!(culprit.iter().all(|culprit| lost.contains(culprit)));
                assert!(lost.iter().all(|rank| before.contains(rank)));
                assert!(members.len() + lost.len() <= before.len());
                self.go_on_with(&members);
            }
            Err(why) => {
                assert_eq!(why, Impossible::NobodyLeft);
                self.end_all();
                self.is_over = true;
            }
        }
    }

    fn end_all(&mut self) {
        for generation in &mut self.generations {
            generation.is_over = true;
        }
    }
}

#[test]
fn after_any_faults_all_living_ranks_are_in_one_generation_and_lost_ones_are_replaced() {
    let (mut recovered, mut doubled, mut joined, mut over, mut mended) = (0, 0, 0, 0, 0);
    for seed in 0..6_000 {
        let mut world = World::new(seed, 2 + (seed % 6) as usize);
        let ranks = world.ranks.len();
        let faults = 1 + world.dice.below(5);
        let mut struck = 0;
        // The ranks take turns at random, the launcher among them; then all faults are over and all get enough turns.
        for turn in 0..6_000 {
            world.now += world.dice.below(20);
            match world.dice.below(ranks as u64 + 2) as usize {
                rank if rank < ranks => world.step(rank),
                rank if rank == ranks => world.look(),
                _ if struck < faults && turn < 600 && world.dice.chance(20) => {
                    struck += 1;
                    if world.ranks.iter().any(|rank| rank.doing != Doing::Working) {
                        doubled += 1;
                    }
                    world.fault();
                }
                _ => {}
            }
        }
        let lives = |rank: &usize| !world.ranks[*rank].is_dead;
        let living: Vec<usize> = (0..ranks).filter(lives).collect();
        if world.is_over {
            // Nobody was left beside ranks that others had waited for in vain, and replacements.
            let hung = |rank: &usize| world.ranks[*rank].was_stuck || world.ranks[*rank].is_new;
            assert!(living.iter().all(hung), "seed {seed}");
            over += 1;
            continue;
        }
        let scene = format!("seed {seed}: {:?} {:?}", world.ranks, world.roster);
        let mut members = world.generations[world.begun].members.clone();
        members.sort_unstable();
        assert_eq!(members, living, "{scene}");
        for rank in living.iter().copied() {
            let Rank {
                doing,
                generation,
                is_new,
                ..
            } = world.ranks[rank];
            let state = (doing, generation, is_new);
            assert_eq!(state, (Doing::Working, world.begun, false), "{scene}");
        }
        assert!(
            living.len() == ranks || world.roster.left() == 0,
            "a place is empty, {scene}"
        );
        mended += world.mended;
        recovered += usize::from(world.begun > 0);
        joined += usize::from(world.roster.started() > 0 && members.len() == ranks);
    }
    // The schedules did reach what they are for.
    let reached = (recovered, doubled, joined, over, mended);
    assert!(
        recovered > 2_000 && doubled > 1_000 && joined > 1_000 && over > 3 && mended > 1_000,
        "{reached:?}"
    );
}
