//! The learning rate of every step: linear warm-up, then half a cosine down to zero.

use std::f64::consts::PI;

/// Warm-up and cosine decay, a pure function of the step.
///
/// *Source*: Loshchilov and Hutter, "SGDR" (2017), one cycle without restarts, after the linear warm-up of
/// Goyal et al., "Accurate, Large Minibatch SGD" (2017).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Highest learning rate.
    pub peak: f64,
    /// Steps over which the rate rises.
    pub warmup_steps: u64,
    /// Steps of the whole job.
    pub total_steps: u64,
}

impl Schedule {
    /// A schedule whose warm-up takes the share `warmup` (`0.0..=1.0`) of `total_steps`.
    pub fn new(peak: f64, warmup: f64, total_steps: u64) -> Self {
        Self {
            peak,
            warmup_steps: (total_steps as f64 * warmup).round() as u64,
            total_steps,
        }
    }

    /// Learning rate of `step`, counted from 0.
    pub fn rate(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f64 / self.warmup_steps as f64;
        }
        let decay = self.total_steps.saturating_sub(self.warmup_steps).max(1);
        let done = (step - self.warmup_steps).min(decay) as f64 / decay as f64;
        self.peak * 0.5 * (1.0 + libm::cos(PI * done))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_rises_to_the_peak_and_falls_to_zero() {
        let schedule = Schedule::new(0.1, 0.1, 100);
        assert_eq!(schedule.rate(0), 0.01);
        assert_eq!(schedule.rate(9), 0.1);
        assert_eq!(schedule.rate(10), 0.1);
        assert!((schedule.rate(55) - 0.05).abs() < 1e-12);
        assert!(schedule.rate(99) < 0.001 && schedule.rate(99) > 0.0);
        assert_eq!(schedule.rate(100), 0.0);
    }

    #[test]
    fn no_warm_up_starts_at_the_peak() {
        assert_eq!(Schedule::new(0.1, 0.0, 10).rate(0), 0.1);
    }

    #[test]
    fn nothing_but_warm_up_and_odd_lengths_stay_finite() {
        for (warmup, total) in [(1.0, 10), (0.5, 1), (0.0, 0), (1.0, 0)] {
            let schedule = Schedule::new(0.1, warmup, total);
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
