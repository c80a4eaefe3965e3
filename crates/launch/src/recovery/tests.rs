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
    };
    WorkerState {
        exit: Some(exit),
        ..WorkerState::default()
    }
}

const KILLED: Ending = Ending::Signal {
    number: 9,
    core: false,
};

#[test]
fn who_is_left_goes_on_once_the_culprit_is_dead() {
    let lives = WorkerState::default();
    let (killed, finished) = (ended(KILLED), ended(Ending::Code(0)));
    let out = WorkerState {
        is_out: true,
        ..killed
    };
    let go_on = |members: &[usize], lost: &[usize]| {
        Ok(Next::GoOn {
            members: members.into(),
            lost: lost.into(),
        })
    };
    let all = |_| true;
    for (states, culprit, expect) in [
        (vec![lives, killed, lives], 1, go_on(&[0, 2], &[1])),
        (vec![killed, killed, lives], 1, go_on(&[2], &[0, 1])),
        (vec![out, lives, killed, lives], 2, go_on(&[1, 3], &[2])),
        (vec![lives, lives, lives], 2, Ok(Next::Kill)),
        // One that left early is to blame although its code is 0; another that has finished is no loss.
        (vec![finished, finished, lives], 0, go_on(&[2], &[0])),
        (vec![killed], 0, Err(Impossible::NobodyLeft)),
        (vec![out, lives], 1, Err(Impossible::NobodyLeft)),
        (vec![finished, killed], 1, Err(Impossible::NobodyLeft)),
    ] {
        assert_eq!(next(&states, all, culprit), expect, "{states:?}");
    }
    let unable = next(&[lives, killed, lives], |rank| rank != 2, 1);
    assert_eq!(unable, Err(Impossible::NotAble(2)));
    let of_the_dead = next(&[lives, killed, lives], |rank| rank != 1, 1);
    assert_eq!(of_the_dead, go_on(&[0, 2], &[1]));
}

/// What a rank of the simulation is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doing {
    Working,
    /// Its group has failed.
    Waiting,
    Forming,
}

#[derive(Debug, Clone, Copy)]
struct Rank {
    doing: Doing,
    /// Of its group.
    generation: usize,
    /// Whom it blames for the failure of which generation.
    blames: Option<(usize, usize)>,
    is_stuck: bool,
    was_stuck: bool,
    is_dead: bool,
}

struct World {
    dice: Dice,
    now: u64,
    ranks: Vec<Rank>,
    /// What the launcher knows.
    states: Vec<WorkerState>,
    killing: Option<usize>,
    /// Members of each generation, and whether it is over.
    generations: Vec<(Vec<usize>, bool)>,
    /// The job has failed.
    is_over: bool,
}

impl World {
    fn new(seed: u64, ranks: usize) -> Self {
        let rank = Rank {
            doing: Doing::Working,
            generation: 0,
            blames: None,
            is_stuck: false,
            was_stuck: false,
            is_dead: false,
        };
        Self {
            dice: Dice(seed),
            now: 0,
            ranks: vec![rank; ranks],
            states: vec![WorkerState::default(); ranks],
            killing: None,
            generations: vec![((0..ranks).collect(), false)],
            is_over: false,
        }
    }

    fn fault(&mut self) {
        let rank = self.dice.below(self.ranks.len() as u64) as usize;
        match self.dice.below(3) {
            0 => self.ranks[rank].is_dead = true,
            1 => (self.ranks[rank].is_stuck, self.ranks[rank].was_stuck) = (true, true),
            _ => self.ranks[rank].is_stuck = false,
        }
    }

    /// One rank does what it does next.
    fn step(&mut self, me: usize) {
        let Rank {
            doing,
            generation,
            is_stuck,
            is_dead,
            ..
        } = self.ranks[me];
        if is_stuck || is_dead {
            return;
        }
        let (members, is_over) = &self.generations[generation];
        let is_bad = |rank: &&usize| self.ranks[**rank].is_dead || self.ranks[**rank].is_stuck;
        let bad: Vec<usize> = members.iter().filter(is_bad).copied().collect();
        let gave_up = members.iter().find(|rank| {
            let other = &self.ranks[**rank];
            (other.generation, other.doing) == (generation, Doing::Waiting)
        });
        match doing {
            Doing::Working | Doing::Forming if *is_over => self.wait(me, None),
            Doing::Working | Doing::Forming if !bad.is_empty() => {
                let culprit = bad[self.dice.below(bad.len() as u64) as usize];
                self.wait(me, Some(culprit));
            }
            Doing::Working | Doing::Forming if gave_up.is_some() => {
                let other = *gave_up.expect("looked at");
                // It says because of whom, or is blamed itself.
                let said = self.ranks[other].blames.filter(|(of, _)| *of == generation);
                self.wait(me, Some(said.map_or(other, |(_, culprit)| culprit)));
            }
            Doing::Forming => {
                let has_come = |rank: &usize| self.ranks[*rank].generation == generation;
                if members.iter().all(has_come) {
                    self.ranks[me].doing = Doing::Working;
                }
            }
            Doing::Waiting => {
                let newest = self.generations.len() - 1;
                let (members, is_over) = &self.generations[newest];
                if newest > generation && !is_over {
                    assert!(members.contains(&me), "a living rank was fenced: {me}");
                    self.ranks[me].generation = newest;
                    self.ranks[me].doing = Doing::Forming;
                }
            }
            Doing::Working => {}
        }
    }

    fn wait(&mut self, me: usize, culprit: Option<usize>) {
        let culprit = culprit.filter(|culprit| *culprit != me);
        let generation = self.ranks[me].generation;
        self.ranks[me].doing = Doing::Waiting;
        self.ranks[me].blames = culprit.map(|culprit| (generation, culprit));
    }

    /// The launcher looks, as `Supervisor::look_for_a_cause` does.
    fn look(&mut self) {
        if self.is_over {
            return;
        }
        let now = Duration::from_millis(self.now);
        let newest = self.generations.len() - 1;
        for (state, rank) in self.states.iter_mut().zip(&self.ranks) {
            if rank.is_dead && state.exit.is_none() {
                state.exit = Some(Exit {
                    at: now,
                    how: KILLED,
                    excused: false,
                });
            }
            state.blames = rank
                .blames
                .filter(|(of, _)| *of == newest)
                .map(|(_, who)| who);
            let waits = rank.doing == Doing::Waiting && rank.generation == newest;
            state.waits_since = waits.then(|| state.waits_since.unwrap_or(now));
        }
        if let Some(rank) = self.killing {
            if self.states[rank].exit.is_some() {
                self.killing = None;
                self.go_on(rank);
            }
            return;
        }
        if let Verdict::Failed { rank, fault, .. } =
            judge(&self.states, None, now, &Limits::default())
        {
            assert!(
                fault != Fault::Stalled || self.ranks[rank].was_stuck,
                "rank {rank} never hung"
            );
            self.go_on(rank);
        }
    }

    fn go_on(&mut self, culprit: usize) {
        match next(&self.states, |_| true, culprit) {
            Ok(Next::Kill) => {
                self.end_newest();
                // It takes until the next look.
                self.ranks[culprit].is_dead = true;
                self.killing = Some(culprit);
            }
            Ok(Next::GoOn { members, lost }) => {
                self.end_newest();
                let newest = &self.generations[self.generations.len() - 1].0;
                assert!(lost.contains(&culprit) && lost.iter().all(|rank| newest.contains(rank)));
                assert!(members.len() < newest.len(), "generations only get smaller");
                for (rank, state) in self.states.iter_mut().enumerate() {
                    state.is_out |= !members.contains(&rank);
                    state.waits_since = None;
                }
                self.generations.push((members, false));
            }
            Err(why) => {
                assert_eq!(why, Impossible::NobodyLeft);
                self.is_over = true;
            }
        }
    }

    fn end_newest(&mut self) {
        self.generations.last_mut().expect("there is the first").1 = true;
    }
}

#[test]
fn after_any_faults_all_living_ranks_are_in_one_generation() {
    let (mut recovered, mut doubled, mut over) = (0, 0, 0);
    for seed in 0..3_000 {
        let mut world = World::new(seed, 2 + (seed % 6) as usize);
        let ranks = world.ranks.len();
        let faults = 1 + world.dice.below(4);
        let mut struck = 0;
        // The ranks take turns at random, the launcher among them; then all faults are over and all get enough turns.
        for turn in 0..4_000 {
            world.now += world.dice.below(20);
            match world.dice.below(ranks as u64 + 2) as usize {
                rank if rank < ranks => world.step(rank),
                rank if rank == ranks => world.look(),
                _ if struck < faults && turn < 400 && world.dice.chance(20) => {
                    struck += 1;
                    if world.ranks.iter().any(|rank| rank.doing != Doing::Working) {
                        doubled += 1;
                    }
                    world.fault();
                }
                _ => {}
            }
        }
        let newest = world.generations.len() - 1;
        let lives = |rank: &usize| !world.ranks[*rank].is_dead;
        let living: Vec<usize> = (0..ranks).filter(lives).collect();
        if living.is_empty() || living.iter().all(|rank| world.ranks[*rank].is_stuck) {
            continue;
        }
        if world.is_over {
            // Nobody was left beside ranks that others had waited for in vain.
            let hung = |rank: &usize| world.ranks[*rank].was_stuck;
            assert!(living.iter().all(hung), "seed {seed}");
            over += 1;
            continue;
        }
        let scene = (&world.ranks, &world.generations, &world.states);
        assert_eq!(
            world.generations[newest].0, living,
            "seed {seed}: {scene:?}"
        );
        for rank in living {
            let Rank {
                doing, generation, ..
            } = world.ranks[rank];
            assert_eq!((doing, generation), (Doing::Working, newest), "seed {seed}");
        }
        recovered += usize::from(newest > 0);
    }
    assert!(
        recovered > 1_000 && doubled > 500 && over < recovered / 10,
        "{recovered}, {doubled}, {over}"
    );
}
