//! Which faults a job gets, and when: a pure function of a seed.

use std::time::Duration;

use clap::ValueEnum;
use paceline_rendezvous::page::Phase;
use serde::Serialize;

/// Faults are spread over this share of a run, so that the last ones do not come after its end.
const SPREAD: f64 = 0.95;
/// One fault in so many comes right after another one, while the job is still busy with that.
const FOLLOWS_ONE_IN: u64 = 4;
/// A fault that follows comes at most so long after the one before.
const FOLLOWS_WITHIN: Duration = Duration::from_millis(30);
/// The shortest time for which a fault lasts that lasts.
const HOLD_MIN: Duration = Duration::from_millis(20);
/// What a rank is doing when a fault hits it, each as often as the others where it can be had.
const PHASES: [Phase; 8] = [
    Phase::Forward,
    Phase::Backward,
    Phase::Communication,
    Phase::BetweenSteps,
    Phase::Evaluation,
    Phase::Checkpoint,
    Phase::Rendezvous,
    Phase::DataLoader,
];

/// Something that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Fault {
    /// A rank is killed (SIGKILL), as by the kernel when memory runs out.
    Kill,
    /// A rank crashes (SIGABRT).
    Abort,
    /// A rank exits with code 0.
    Exit,
    /// A rank gets no more memory for a while.
    Memory,
    /// A rank stands still for a while (SIGSTOP, later SIGCONT).
    Stop,
    /// A rank gets a tenth of its time for a while.
    Slow,
    /// A TCP connection of a rank breaks.
    Cut,
    /// A rank receives nothing on a TCP connection for a while.
    Stall,
    /// A launcher is killed, with its ranks.
    Agent,
    /// A bit of a rank's weights flips.
    Corrupt,
}

impl Fault {
    /// Its name on the command line.
    pub(super) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    /// Whether its rank is lost at once.
    pub(super) fn is_deadly(self) -> bool {
        matches!(self, Self::Kill | Self::Abort | Self::Exit | Self::Agent)
    }

    /// Whether a rank may be lost by it.
    pub(super) fn may_kill(self) -> bool {
        self.is_deadly() || matches!(self, Self::Memory | Self::Cut)
    }

    /// Whether it lasts for a while.
    pub(super) fn lasts(self) -> bool {
        matches!(self, Self::Stop | Self::Slow | Self::Memory | Self::Stall)
    }
}

/// When a fault comes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Moment {
    /// At this share of the run, from 0 to 1.
    At(f64),
    /// So long after the fault before it.
    After(Duration),
}

/// One fault of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Strike {
    /// Its place in the plan.
    pub(super) index: usize,
    pub(super) fault: Fault,
    pub(super) moment: Moment,
    /// Chooses the target among those that there are, by the remainder.
    pub(super) pick: u64,
    /// How long it lasts; zero if it does not last.
    pub(super) hold: Duration,
}

impl Strike {
    /// What its target should be doing. One that follows another takes what it finds.
    pub(super) fn phase(&self) -> Option<Phase> {
        let place = (self.pick >> 32) as usize % PHASES.len();
        matches!(self.moment, Moment::At(_)).then_some(PHASES[place])
    }
}

/// What a plan is made of.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Recipe<'a> {
    pub(super) seed: u64,
    pub(super) count: usize,
    /// Every fault comes as often as every other, give or take one.
    pub(super) faults: &'a [Fault],
    /// The longest time for which a fault lasts.
    pub(super) hold_max: Duration,
}

/// The faults in the order in which they come: one at a random moment of each of `count` equal parts of the run, or right
/// after the one before.
pub(super) fn plan(recipe: &Recipe<'_>) -> Vec<Strike> {
    let mut random = Random(recipe.seed);
    let mut deck = Vec::new();
    let part = SPREAD / recipe.count.max(1) as f64;
    let strike = |index: usize| {
        if deck.is_empty() {
            deck.extend_from_slice(recipe.faults);
        }
        let fault = deck.swap_remove(random.below(deck.len() as u64) as usize);
        let follows = index > 0 && random.below(FOLLOWS_ONE_IN) == 0;
        let share = random.share();
        let moment = match follows {
            true => Moment::After(FOLLOWS_WITHIN.mul_f64(share)),
            false => Moment::At((index as f64 + share) * part),
        };
        let span = recipe.hold_max.saturating_sub(HOLD_MIN);
        let hold = HOLD_MIN + span.mul_f64(random.share());
        Strike {
            index,
            fault,
            moment,
            pick: random.next(),
            hold: if fault.lasts() { hold } else { Duration::ZERO },
        }
    };
    (0..recipe.count).map(strike).collect()
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// From 0 to 1, less than 1.
    fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(seed: u64, count: usize) -> Recipe<'static> {
        Recipe {
            seed,
            count,
            faults: &[Fault::Kill, Fault::Stop, Fault::Slow],
            hold_max: Duration::from_secs(1),
        }
    }

    #[test]
    fn a_plan_depends_on_its_seed_and_on_nothing_else() {
        for seed in [0, 7, u64::MAX] {
            assert_eq!(plan(&recipe(seed, 20)), plan(&recipe(seed, 20)));
        }
        assert_ne!(plan(&recipe(7, 20)), plan(&recipe(8, 20)));
        // The order of a seed must not change: reports name it.
        let faults: Vec<Fault> = (plan(&recipe(7, 6)).iter()).map(|one| one.fault).collect();
        use Fault::{Kill, Slow, Stop};
        assert_eq!(faults, [Kill, Slow, Stop, Kill, Slow, Stop]);
    }

    #[test]
    fn every_fault_comes_as_often_as_the_others() {
        for (seed, count) in [(1, 3), (2, 7), (3, 20), (4, 100)] {
            let strikes = plan(&recipe(seed, count));
            assert_eq!(strikes.len(), count);
            for fault in recipe(seed, count).faults {
                let is_it = |strike: &&Strike| strike.fault == *fault;
                let times = strikes.iter().filter(is_it).count();
                assert!(
                    (count / 3..=count.div_ceil(3)).contains(&times),
                    "{fault:?}: {times} of {count}"
                );
            }
        }
    }

    #[test]
    fn moments_rise_within_the_run_and_some_faults_come_at_once() {
        let strikes = plan(&recipe(5, 200));
        let moments = strikes.iter().map(|strike| strike.moment);
        let shares: Vec<f64> = (moments.clone())
            .filter_map(|moment| match moment {
                Moment::At(share) => Some(share),
                Moment::After(_) => None,
            })
            .collect();
        assert!(shares.is_sorted() && shares[0] >= 0.0 && shares[shares.len() - 1] < SPREAD);
        let follow = strikes.len() - shares.len();
        assert!(
            (20..80).contains(&follow),
            "{follow} of 200 follow another one"
        );
        assert!(matches!(strikes[0].moment, Moment::At(_)));
        for moment in moments {
            assert!(!matches!(moment, Moment::After(gap) if gap >= FOLLOWS_WITHIN));
        }
    }

    #[test]
    fn only_what_lasts_has_a_duration() {
        for strike in plan(&recipe(6, 100)) {
            let range = HOLD_MIN..=Duration::from_secs(1);
            match strike.fault.lasts() {
                true => assert!(range.contains(&strike.hold), "{strike:?}"),
                false => assert_eq!(strike.hold, Duration::ZERO),
            }
        }
    }
}
