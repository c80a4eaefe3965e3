//! The best epoch so far by a figure of the held-out data, and when there has been no better one for too long.

use serde::{Deserialize, Serialize};

use crate::records::Figure;
use crate::report::plural;

/// The best epoch, and how many have followed it. It is in checkpoints, so that a resumed job goes on counting.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Best {
    epoch: Option<BestEpoch>,
    /// Epochs since then.
    bad_epochs: u64,
}

/// The epoch whose figure no other has reached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct BestEpoch {
    epoch: u64,
    /// Steps done at its end.
    step: u64,
    /// The bits of the figure: JSON has no infinity.
    bits: u64,
    /// The figure in words.
    text: String,
}

impl Best {
    /// Takes in the epoch that ends with `step`. A figure that is not a number is never the best.
    pub(super) fn take_in(&mut self, epoch: u64, step: u64, figure: Figure) {
        let best = self.epoch.as_ref();
        let best = best.map(|best| f64::from_bits(best.bits));
        let is_better = match (best, figure.higher_is_better) {
            (None, _) => !figure.value.is_nan(),
            (Some(best), true) => figure.value > best,
            (Some(best), false) => figure.value < best,
        };
        if !is_better {
            self.bad_epochs += 1;
            return;
        }
        self.bad_epochs = 0;
        self.epoch = Some(BestEpoch {
            epoch,
            step,
            bits: figure.value.to_bits(),
            text: figure.text,
        });
    }

    /// Steps done at the end of the best epoch.
    pub(super) fn step(&self) -> Option<u64> {
        self.epoch.as_ref().map(|best| best.step)
    }

    /// Whether so many epochs have followed the best one.
    pub(super) fn is_over(&self, patience: Option<u64>) -> bool {
        patience.is_some_and(|patience| self.bad_epochs >= patience)
    }

    /// Why the job ends before its last epoch.
    pub(super) fn reason(&self, step: u64, monitor: &str) -> String {
        format!(
            "stopped early after step {step}: {} without a better {monitor}",
            plural(self.bad_epochs, "epoch"),
        )
    }

    /// The best epoch in words; nothing if there is none.
    pub(super) fn render(&self) -> Option<String> {
        let BestEpoch { epoch, text, .. } = self.epoch.as_ref()?;
        let words: Vec<&str> = text.split_whitespace().collect();
        Some(format!("best epoch {epoch}: {}", words.join(" ")))
    }

    /// The best epoch as a record.
    pub(super) fn record(&self, monitor: &str) -> Option<serde_json::Value> {
        let BestEpoch {
            epoch, step, bits, ..
        } = self.epoch.as_ref()?;
        Some(serde_json::json!({
            "epoch": epoch, "step": step, "monitor": monitor, "value": f64::from_bits(*bits),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::HeldOut;
    use crate::task::Metric;

    /// The best epoch and the epochs since then after these figures, once written to a checkpoint and read again after each.
    fn after(higher_is_better: bool, values: &[f64]) -> (Option<u64>, u64) {
        let mut best = Best::default();
        for (epoch, value) in (1..).zip(values) {
            let figure = Figure {
                value: *value,
                higher_is_better,
                text: String::new(),
            };
            best.take_in(epoch, 10 * epoch, figure);
            let saved = serde_json::to_string(&best).expect("it encodes");
            best = serde_json::from_str(&saved).expect("it decodes");
        }
        let epoch = best.epoch.map(|best| best.epoch);
        (epoch, best.bad_epochs)
    }

    #[test]
    fn a_better_epoch_starts_the_count_again_and_an_equal_one_does_not() {
        let third = 1.0 / 3.0;
        assert_eq!(after(false, &[1.0, third, third]), (Some(2), 1));
        assert_eq!(after(false, &[1.0, 2.0, 0.5, 0.6]), (Some(3), 1));
        assert_eq!(after(true, &[0.1, 0.9, 0.8, 0.9]), (Some(2), 2));
    }

    #[test]
    fn what_is_not_a_number_is_never_the_best() {
        assert_eq!(after(false, &[f64::NAN, f64::NAN]), (None, 2));
        assert_eq!(after(true, &[f64::NAN, 0.5, f64::NAN]), (Some(2), 1));
    }

    #[test]
    fn a_figure_is_found_by_its_key_and_knows_its_direction() {
        let metrics = vec![Metric::share("accuracy", 0.5), Metric::number("mae", 2.0)];
        let metrics = HeldOut::new(1.5, metrics).expect("names of their own");
        let found = |key| {
            let figure = metrics.figure(key)?;
            Some((figure.value, figure.higher_is_better))
        };
        assert_eq!(found("held_out_loss"), Some((1.5, false)));
        assert_eq!(found("accuracy"), Some((0.5, true)));
        assert_eq!(found("mae"), Some((2.0, false)));
        assert_eq!(found("f1"), None);
    }
}
