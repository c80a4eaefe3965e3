//! Evaluation on held-out data: every sample exactly once, split over the ranks.

use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::Device;
use paceline_ddp::sampler::{EvalOptions, eval_split};
use paceline_ddp::{Ddp, Precision};
use serde::{Deserialize, Serialize};

use crate::batches::Samples;
use crate::data::Dataset;
use crate::error::TrainError;
use crate::model::Net;

/// Samples of one evaluation batch.
const BATCH: usize = 256;

/// Sums over evaluated samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sums {
    /// Sum of the samples' losses.
    pub loss: f64,
    /// Samples classified correctly.
    pub correct: u64,
    /// Samples.
    pub samples: u64,
}

impl Sums {
    fn add(self, other: Self) -> Self {
        Self {
            loss: self.loss + other.loss,
            correct: self.correct + other.correct,
            samples: self.samples + other.samples,
        }
    }

    /// Mean loss.
    pub fn mean_loss(&self) -> f64 {
        self.loss / self.samples.max(1) as f64
    }

    /// Share classified correctly, `0.0..=1.0`.
    pub fn accuracy(&self) -> f64 {
        self.correct as f64 / self.samples.max(1) as f64
    }
}

/// Evaluates `net`, which is on `device`, on the held-out samples in the training precision.
///
/// *Numerics*: batches belong to shards and sums are added in shard order, so the result does not depend on the
/// number of ranks.
///
/// *Blocks*: until all ranks have evaluated their part.
pub fn evaluate(
    ddp: &Ddp,
    net: &Net,
    device: &Device,
    dataset: &Dataset,
    precision: Precision,
) -> Result<Sums, TrainError> {
    if dataset.held_out().is_empty() {
        return Ok(Sums::default());
    }
    let split = eval_split(&EvalOptions {
        len: dataset.held_out().len(),
        shards: ddp.shard_count(),
        batch: BATCH,
    })?;
    let net = ddp.valid(net);
    let device = device.clone().inner();
    let mine: Vec<Sums> = split[ddp.shards()]
        .iter()
        .map(|batches| {
            let of = |batch: &std::ops::Range<usize>| {
                let samples =
                    Samples::gather(&dataset.held_out(), dataset.features.count(), batch.clone());
                one_batch(&net, &samples, precision, &device)
            };
            batches.iter().map(of).fold(Sums::default(), Sums::add)
        })
        .collect();
    let all = ddp.group().all_gather_bytes(&encode(&mine))?;
    let all: Vec<Sums> = all.iter().flat_map(|bytes| decode(bytes)).collect();
    Ok(all.into_iter().fold(Sums::default(), Sums::add))
}

fn one_batch(net: &Net, samples: &Samples, precision: Precision, device: &Device) -> Sums {
    let (input, labels) = samples.tensors(device);
    let scores = precision.logits(net.forward(precision.input(input)));
    let right = scores
        .clone()
        .argmax(1)
        .flatten::<1>(0, 1)
        .equal(labels.clone());
    let correct: i64 = right.int().sum().into_scalar();
    let loss: f32 = CrossEntropyLossConfig::new()
        .init(device)
        .forward(scores, labels)
        .into_scalar();
    Sums {
        loss: f64::from(loss) * samples.len() as f64,
        correct: correct as u64,
        samples: samples.len() as u64,
    }
}

/// Encodes sums as bytes: exact, unlike text.
fn encode(sums: &[Sums]) -> Vec<u8> {
    let words = sums
        .iter()
        .flat_map(|s| [s.loss.to_bits(), s.correct, s.samples]);
    words.flat_map(u64::to_le_bytes).collect()
}

fn decode(bytes: &[u8]) -> Vec<Sums> {
    let (words, _) = bytes.as_chunks::<8>();
    let sums = words
        .as_chunks::<3>()
        .0
        .iter()
        .map(|words| words.map(u64::from_le_bytes));
    let sums = sums.map(|[loss, correct, samples]| Sums {
        loss: f64::from_bits(loss),
        correct,
        samples,
    });
    sums.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_travel_exactly() {
        let sums = vec![
            Sums {
                loss: 0.1 + 0.2,
                correct: 3,
                samples: u64::MAX,
            },
            Sums::default(),
        ];
        assert_eq!(decode(&encode(&sums)), sums);
    }

    #[test]
    fn nothing_evaluated_is_no_division_by_zero() {
        assert_eq!(Sums::default().accuracy(), 0.0);
        assert_eq!(Sums::default().mean_loss(), 0.0);
    }
}
