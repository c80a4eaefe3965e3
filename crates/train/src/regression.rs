//! Numbers that a model predicts, and how far they are off.

use serde::Serialize;

use crate::task::{Metric, Sums};

/// The sums over a batch of standardised numbers; the states are the sums of absolute errors, of the right numbers, and of their squares.
pub(crate) fn sums(predicted: &[f32], right: &[f32]) -> Sums {
    let mut sums = Sums {
        count: right.len() as u64,
        states: vec![0.0; 3],
        ..Sums::default()
    };
    for (predicted, right) in predicted.iter().zip(right) {
        let (predicted, right) = (f64::from(*predicted), f64::from(*right));
        let error = predicted - right;
        sums.loss += error * error;
        sums.states[0] += error.abs();
        sums.states[1] += right;
        sums.states[2] += right * right;
    }
    sums
}

/// How far predicted numbers are off, as scikit-learn has it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Deviations {
    /// Mean absolute error, in the unit of the numbers.
    pub mae: f64,
    /// Root mean squared error, in the unit of the numbers.
    pub rmse: f64,
    /// Share of the numbers' variance that is predicted, at most 1.
    pub r2: f64,
}

impl Deviations {
    /// Those of sums over numbers that were divided by `deviation`.
    pub(crate) fn of(sums: &Sums, deviation: f64) -> Self {
        let mean = sums.mean(1);
        let variance = sums.mean(2) - mean * mean;
        // What is left of equal numbers is rounding.
        let variance = if variance > 1e-12 * mean * mean {
            variance
        } else {
            0.0
        };
        Self {
            mae: sums.mean(0) * deviation,
            rmse: sums.mean_loss().sqrt() * deviation,
            r2: match (variance > 0.0, sums.mean_loss() > 0.0) {
                (true, _) => 1.0 - sums.mean_loss() / variance,
                // Numbers that are all the same leave nothing to explain.
                (false, true) => 0.0,
                (false, false) => 1.0,
            },
        }
    }

    /// As the figures of an evaluation.
    pub(crate) fn metrics(self) -> Vec<Metric> {
        vec![
            Metric::number("mae", self.mae),
            Metric::number("rmse", self.rmse),
            Metric::number("r2", self.r2).higher_is_better(true),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_are_those_of_scikit_learn() {
        // mean_absolute_error, root_mean_squared_error and r2_score of the example in its documentation, for a deviation of 2.
        let figures =
            |predicted: &[f32], right: &[f32]| Deviations::of(&sums(predicted, right), 2.0);
        let Deviations { mae, rmse, r2 } = figures(&[2.5, 0.0, 2.0, 8.0], &[3.0, -0.5, 2.0, 7.0]);
        assert_eq!((mae, rmse), (1.0, 2.0 * 0.375_f64.sqrt()));
        assert!((r2 - 0.948_608_137_044_967_9).abs() < 1e-12, "{r2}");
        // Batches add up.
        let parts = sums(&[2.5], &[3.0]).add(sums(&[0.0, 2.0, 8.0], &[-0.5, 2.0, 7.0]));
        assert_eq!(parts, sums(&[2.5, 0.0, 2.0, 8.0], &[3.0, -0.5, 2.0, 7.0]));
        // Right numbers that are all the same.
        assert_eq!(figures(&[1.0, 1.0], &[1.0, 1.0]).r2, 1.0);
        assert_eq!(figures(&[1.0, 2.0], &[1.0, 1.0]).r2, 0.0);
        assert_eq!(figures(&[0.2; 1000], &[0.1; 1000]).r2, 0.0);
    }
}
