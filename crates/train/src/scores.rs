//! The scores of a batch's predictions, whole or cut into parts by class.

use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
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
    /// Those of a model that ends on one device.
    ///
    /// *Shape*: `[predictions, classes]`.
    pub(crate) fn of(scores: Tensor<2>, right: &[u32]) -> Self {
        let right: Vec<i32> = right.iter().map(|class| *class as i32).collect();
        let count = right.len();
        Self {
            right: Tensor::from_data(TensorData::new(right, [count]), &scores.device()),
            classes: Classes::Whole(scores),
        }
    }

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

    /// The mean cross entropy with labels of which a share is spread over all classes; language models have no such labels.
    ///
    /// *Source*: Szegedy and others 2016, "Rethinking the Inception Architecture for Computer Vision"; `label_smoothing` of PyTorch's
    /// `CrossEntropyLoss`.
    pub(crate) fn smoothed_loss(self, share: f64) -> Loss {
        let Classes::Whole(scores) = &self.classes else {
            return self.loss();
        };
        if share == 0.0 {
            return self.loss();
        }
        let [count, classes] = scores.dims();
        let right: Tensor<2> = self.right.clone().one_hot(classes).float();
        let moved = scores.clone() * (right - 1.0 / classes as f64);
        // A mean, because a sum over all elements has no fixed order on a GPU.
        let moved = moved.mean() * (share * classes as f64);
        Loss::new(self.loss().mean + moved, count)
    }

    /// The smoothed loss of predictions for mixtures of samples: `mixed` is the share of each sample's own class, and the rest is that of its
    /// opposite, which is the last one for the first.
    ///
    /// *Shape*: `[predictions, classes]`.
    pub(crate) fn mixed_loss(scores: Tensor<2>, own: &[u32], mixed: f64, smoothing: f64) -> Loss {
        let opposite: Vec<u32> = own.iter().rev().copied().collect();
        let [own, opposite] = [own, &opposite].map(|right| {
            let scores = Self::of(scores.clone(), right);
            scores.smoothed_loss(smoothing)
        });
        let mean = own.mean.mul_scalar(mixed) + opposite.mean.mul_scalar(1.0 - mixed);
        Loss::new(mean, own.count)
    }

    /// The mean cross entropy weighted by the right class of each prediction, whose weights have the sum `weight`, with a share that is spread
    /// over all classes, each with its own weight.
    ///
    /// *Source*: PyTorch's `CrossEntropyLoss(weight=.., label_smoothing=..)`.
    pub(crate) fn weighted_loss(self, weights: &[f32], weight: f32, share: f64) -> Loss {
        let count = self.count();
        let Classes::Whole(scores) = self.classes else {
            unreachable!("only language models are cut into parts");
        };
        let weights = Tensor::<1>::from_data(weights, &scores.device());
        let own = weights.clone().select(0, self.right.clone());
        let logs = log_softmax(scores, 1);
        let likely = logs.clone().gather(1, self.right.unsqueeze_dim(1));
        // A mean, because a sum over all elements has no fixed order on a GPU.
        let mut mean = (likely.squeeze_dim::<1>(1) * own).mean();
        if share > 0.0 {
            let all = (logs * weights.unsqueeze()).mean();
            mean = mean * (1.0 - share) + all * share;
        }
        Loss::weighted(mean * -(count as f32 / weight), count, weight)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weighted_and_smoothed_labels_give_pytorchs_loss() {
        let device = Device::flex().autodiff();
        let logits = [[2.0_f32, -1.0, 0.5], [0.0, 3.0, 1.0]];
        let weights = [0.5_f32, 1.0, 2.0];
        // torch.nn.functional.cross_entropy(torch.tensor(logits), torch.tensor([0, 2]), torch.tensor(weights), label_smoothing=share)
        for (share, expected) in [(0.0, 1.784_139), (0.1, 1.778_246), (0.5, 1.754_673)] {
            let scores = Tensor::<2>::from_floats(logits, &device);
            let found = Scores::of(scores, &[0, 2]).weighted_loss(&weights, 2.5, share);
            let mean: f64 = found.mean.into_data().iter::<f64>().sum();
            assert!((mean - expected).abs() < 1e-6, "{mean} {expected}");
        }
    }

    #[test]
    fn smoothed_and_mixed_labels_give_pytorchs_loss_and_gradient() {
        let device = Device::flex().autodiff();
        let logits = [[2.0_f32, -1.0, 0.5], [0.0, 3.0, 1.0]];
        let right = [0_u32, 2];
        for (smoothing, mixed) in [(0.0, 1.0), (0.1, 1.0), (0.5, 1.0), (0.0, 0.75), (0.1, 0.25)] {
            // The cross entropy with probabilities as labels.
            let target = |row: usize, class: usize| {
                let is = |right: u32| f64::from(u8::from(right as usize == class));
                let label = mixed * is(right[row]) + (1.0 - mixed) * is(right[1 - row]);
                smoothing / 3.0 + (1.0 - smoothing) * label
            };
            let (mut loss, mut gradient) = (0.0, Vec::new());
            for (row, scores) in logits.iter().enumerate() {
                let scores = scores.map(f64::from);
                let total: f64 = scores.iter().map(|score| score.exp()).sum();
                for (class, score) in scores.iter().enumerate() {
                    let target = target(row, class);
                    loss -= target * (score - total.ln()) / 2.0;
                    gradient.push((score.exp() / total - target) / 2.0);
                }
            }
            let check = |scores: Tensor<2>, found: Loss| {
                assert_eq!(found.count, 2);
                let gradients = scores.grad(&found.mean.backward()).expect("a gradient");
                let gradients = gradients.into_data().iter::<f64>().collect::<Vec<_>>();
                let mean: f64 = found.mean.into_data().iter::<f64>().sum();
                assert!((mean - loss).abs() < 1e-6, "{mean} {loss}");
                for (found, expected) in gradients.iter().zip(&gradient) {
                    assert!((found - expected).abs() < 1e-6, "{found} {expected}");
                }
            };
            let leaf = || Tensor::<2>::from_floats(logits, &device).require_grad();
            let scores = leaf();
            let found = Scores::mixed_loss(scores.clone(), &right, mixed, smoothing);
            check(scores, found);
            if mixed == 1.0 {
                let scores = leaf();
                let found = Scores::of(scores.clone(), &right).smoothed_loss(smoothing);
                check(scores, found);
            }
        }
    }
}
