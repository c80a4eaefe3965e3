//! The learning rate of every step: a warm-up, then one of PyTorch's schedules.

use std::f64::consts::PI;

use crate::config::{LrSchedule, TrainConfig};

/// The highest learning rate in the first one of a one-cycle schedule. *Source*: `div_factor` of PyTorch's `OneCycleLR`.
const CYCLE_BEGIN: f64 = 25.0;
/// The first learning rate in the last one. *Source*: `final_div_factor`, likewise.
const CYCLE_END: f64 = 1e4;

/// Warm-up and decay, a pure function of the step.
///
/// *Source*: the linear warm-up of Goyal et al., "Accurate, Large Minibatch SGD" (2017), and PyTorch's formulas. `Cosine` is
/// `CosineAnnealingLR` after Loshchilov and Hutter, "SGDR" (2017), one cycle without restarts; `Linear` is `LinearLR`; `Step` is `StepLR`, by
/// epochs of the whole job; `OneCycle` is `OneCycleLR` after Smith and Topin, "Super-Convergence" (2018), whose rise is the warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Highest learning rate.
    pub peak: f64,
    /// Steps over which the rate rises.
    pub warmup_steps: u64,
    /// Steps of the whole job.
    pub total_steps: u64,
    /// How the rate falls then.
    pub decay: Decay,
}

/// How a learning rate falls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// Like half a cosine, to `end`.
    Cosine {
        /// Learning rate after the last step.
        end: f64,
    },
    /// Like a straight line, to `end`.
    Linear {
        /// Learning rate after the last step.
        end: f64,
    },
    /// By a factor, again and again.
    Step {
        /// Steps between two of them.
        every: u64,
        /// The factor.
        gamma: f64,
    },
    /// Like half a cosine, after a rise like one.
    OneCycle {
        /// Learning rate of the last step.
        end: f64,
    },
    /// Not at all.
    Constant,
}

impl Schedule {
    /// The schedule of a job.
    #[must_use]
    pub fn new(config: &TrainConfig, steps_per_epoch: u64) -> Self {
        let (peak, epochs) = (config.lr, config.epochs as u64);
        let total_steps = steps_per_epoch * epochs;
        let end = config.min_lr.unwrap_or(0.0);
        Self {
            peak,
            warmup_steps: (total_steps as f64 * config.warmup).round() as u64,
            total_steps,
            decay: match config.lr_schedule {
                LrSchedule::Cosine => Decay::Cosine { end },
                LrSchedule::Linear => Decay::Linear { end },
                LrSchedule::Step => Decay::Step {
                    every: steps_per_epoch * config.lr_step_size.unwrap_or(epochs.div_ceil(3)),
                    gamma: config.lr_gamma,
                },
                LrSchedule::OneCycle => Decay::OneCycle {
                    end: config.min_lr.unwrap_or(peak / CYCLE_BEGIN / CYCLE_END),
                },
                LrSchedule::Constant => Decay::Constant,
            },
        }
    }

    /// Learning rate of `step`, counted from 0.
    #[must_use]
    pub fn rate(&self, step: u64) -> f64 {
        if let Decay::OneCycle { end } = self.decay {
            return self.one_cycle(step, end);
        }
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f64 / self.warmup_steps as f64;
        }
        let steps = self.total_steps.saturating_sub(self.warmup_steps).max(1);
        let done = (step - self.warmup_steps).min(steps) as f64 / steps as f64;
        match self.decay {
            Decay::Cosine { end } => annealed(self.peak, end, done),
            Decay::Linear { end } => end + (self.peak - end) * (1.0 - done),
            Decay::Step { every, gamma } => {
                self.peak * libm::pow(gamma, (step / every.max(1)) as f64)
            }
            Decay::OneCycle { .. } | Decay::Constant => self.peak,
        }
    }

    /// The rate is highest in the last step of the warm-up, and `end` in the last one of all.
    fn one_cycle(&self, step: u64, end: f64) -> f64 {
        let top = self.warmup_steps.saturating_sub(1);
        if step < top {
            let begin = self.peak / CYCLE_BEGIN;
            return annealed(begin, self.peak, step as f64 / top as f64);
        }
        let steps = self.total_steps.saturating_sub(1 + top).max(1);
        let done = (step - top).min(steps) as f64 / steps as f64;
        annealed(self.peak, end, done)
    }
}

/// A cosine from `start` to `end`, of which the share `done` is done.
fn annealed(start: f64, end: f64, done: f64) -> f64 {
    end + (start - end) * 0.5 * (1.0 + libm::cos(PI * done))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(decay: Decay, warmup_steps: u64, total_steps: u64) -> Schedule {
        Schedule {
            peak: 0.1,
            warmup_steps,
            total_steps,
            decay,
        }
    }

    #[track_caller]
    fn check(schedule: Schedule, expected: &[(u64, f64)]) {
        for (step, rate) in expected {
            let found = schedule.rate(*step);
            let near = (found - rate).abs() <= 1e-12 * rate.abs().max(1e-3);
            assert!(near, "step {step}: {found}, expected {rate}");
        }
    }

    const COSINE: Decay = Decay::Cosine { end: 0.0 };

    #[test]
    fn the_rate_rises_to_the_peak_and_falls_to_zero() {
        let schedule = schedule(COSINE, 10, 100);
        assert_eq!(schedule.rate(0), 0.01);
        assert_eq!(schedule.rate(9), 0.1);
        assert_eq!(schedule.rate(10), 0.1);
        assert!((schedule.rate(55) - 0.05).abs() < 1e-12);
        assert!(schedule.rate(99) < 0.001 && schedule.rate(99) > 0.0);
        assert_eq!(schedule.rate(100), 0.0);
    }

    #[test]
    fn rates_are_those_of_pytorchs_formulas() {
        // CosineAnnealingLR: eta_min + (base - eta_min) (1 + cos(pi t / T_max)) / 2
        let half = 0.02 + 0.08 * (1.0 + (PI / 4.0).cos()) / 2.0;
        let cosine = Decay::Cosine { end: 0.02 };
        check(
            schedule(cosine, 0, 8),
            &[(0, 0.1), (2, half), (4, 0.06), (8, 0.02)],
        );
        // LinearLR with start_factor 1: base (1 + (end_factor - 1) t / total_iters)
        let linear = Decay::Linear { end: 0.02 };
        check(
            schedule(linear, 4, 12),
            &[(0, 0.025), (3, 0.1), (4, 0.1), (6, 0.08), (12, 0.02)],
        );
        // StepLR: base gamma^(epoch // step_size), here of 3 epochs of 10 steps
        let step = Decay::Step {
            every: 30,
            gamma: 0.5,
        };
        check(
            schedule(step, 2, 100),
            &[
                (0, 0.05),
                (1, 0.1),
                (29, 0.1),
                (30, 0.05),
                (60, 0.025),
                (99, 0.0125),
            ],
        );
        // OneCycleLR(max_lr=0.1, total_steps=11, pct_start=4/11): cosines from 0.004 to 0.1 at step 3, and to 0.1 / 25 / 1e4 at step 10
        let end = 0.1 / 25.0 / 1e4;
        let cycle = Decay::OneCycle { end };
        let third = 0.1 + (0.004 - 0.1) * 0.5 * (1.0 + (PI / 3.0).cos());
        let down = end + (0.1 - end) * 0.5 * (1.0 + (PI * 2.0 / 7.0).cos());
        check(
            schedule(cycle, 4, 11),
            &[(0, 0.004), (1, third), (3, 0.1), (5, down), (10, end)],
        );
        check(schedule(Decay::Constant, 2, 9), &[(0, 0.05), (8, 0.1)]);
    }

    #[test]
    fn no_warm_up_starts_at_the_peak() {
        for decay in [COSINE, Decay::OneCycle { end: 0.0 }, Decay::Constant] {
            assert_eq!(schedule(decay, 0, 10).rate(0), 0.1);
        }
    }

    #[test]
    fn nothing_but_warm_up_and_odd_lengths_stay_finite() {
        let decays = [
            COSINE,
            Decay::Linear { end: 0.0 },
            Decay::Step {
                every: 0,
                gamma: 0.1,
            },
            Decay::OneCycle { end: 0.0 },
            Decay::Constant,
        ];
        for (warmup, total) in [(10, 10), (1, 1), (0, 0), (1, 2)] {
            for decay in decays {
                let schedule = schedule(decay, warmup, total);
                for step in 0..20 {
                    let rate = schedule.rate(step);
                    assert!(
                        rate.is_finite() && (0.0..=0.1).contains(&rate),
                        "{schedule:?} {step}"
                    );
                }
            }
        }
    }
}
