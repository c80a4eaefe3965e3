//! The scores of a batch's predictions, whole or cut into parts by class.

use burn::tensor::{Device, Int, Tensor};
use paceline_nn::cross_entropy;
use paceline_split::tensor::TensorParallel;

use crate::error::TrainError;
use crate::task::{Loss, Metric, Sums};

/// Scores in f32 of the classes for each prediction, and the right classes, on the device that the model ends on.
pub(crate) struct Scores {
    pub(crate) classes: Classes,
    /// *Shape*: `[predictions]`.
    pub(crate) right: Tensor<1, Int>,
}

/// Where the classes are.
#[allow(
    clippy::large_enum_variant,
    reason = "one exists at a time; tensors are large with CUDA"
)]
pub(crate) enum Classes {
    /// All in one tensor. *Shape*: `[predictions, classes]`.
    Whole(Tensor<2>),
    /// Those of each part of this rank, of so many classes.
    Parts(TensorParallel, Vec<Tensor<2>>, usize),
}

impl Classes {
    /// Where the model ends.
    pub(crate) fn device(&self) -> Device {
        match self {
            Self::Whole(scores) => scores.device(),
            Self::Parts(_, scores, _) => scores[0].device(),
        }
    }
}

impl Scores {
    /// Number of predictions.
    pub(crate) fn count(&self) -> usize {
        self.right.dims()[0]
    }

    /// The mean cross entropy.
    pub(crate) fn loss(self) -> Loss {
        let count = self.count();
        let mean = match self.classes {
            Classes::Whole(scores) => cross_entropy(scores, self.right),
            Classes::Parts(tp, scores, classes) => {
                tp.cross_entropy(scores, classes, self.right).mean()
            }
        };
        Loss::new(mean, count)
    }

    /// The class with the highest score of each prediction, the first of equals.
    ///
    /// *Errors*: failed collectives.
    pub(crate) fn best(&self) -> Result<Tensor<1, Int>, TrainError> {
        Ok(match &self.classes {
            Classes::Whole(scores) => scores.clone().argmax(1).flatten(0, 1),
            Classes::Parts(tp, scores, classes) => tp.argmax(scores.clone(), *classes)?,
        })
    }

    /// The sums over the predictions; the state is the number of right ones.
    ///
    /// *Errors*: failed collectives.
    pub(crate) fn sums(self) -> Result<Sums, TrainError> {
        let best = self.best()?;
        self.sums_with(best)
    }

    /// The same, where the [best](Self::best) classes are known.
    ///
    /// *Errors*: failed collectives.
    pub(crate) fn sums_with(self, best: Tensor<1, Int>) -> Result<Sums, TrainError> {
        let correct: i64 = best.equal(self.right.clone()).int().sum().into_scalar();
        Ok(Sums::of(self.loss()).with(correct as f64))
    }
}

/// The share of right predictions in the sums of scores.
pub(crate) fn accuracy(sums: &Sums) -> Metric {
    Metric::share("accuracy", sums.mean(0))
}
