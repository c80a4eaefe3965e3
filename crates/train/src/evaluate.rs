//! Evaluation on held-out data: every sample exactly once, split over the ranks.

use std::ops::Range;

use burn::tensor::Device;
use paceline_collective::ProcessGroup;
use paceline_ddp::sampler::{EvalOptions, eval_split};
use paceline_ddp::{Ddp, Precision};

use crate::error::TrainError;
use crate::stages::Stages;
use crate::task::{Part, TrainTask};

/// Sums over evaluated predictions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sums {
    /// Sum of the predictions' losses.
    pub(crate) loss: f64,
    /// Right predictions.
    pub(crate) correct: u64,
    /// Predictions.
    pub(crate) predictions: u64,
}

impl Sums {
    pub(crate) fn add(self, other: Self) -> Self {
        Self {
            loss: self.loss + other.loss,
            correct: self.correct + other.correct,
            predictions: self.predictions + other.predictions,
        }
    }

    /// Mean loss.
    pub(crate) fn mean_loss(&self) -> f64 {
        self.loss / self.predictions.max(1) as f64
    }

    /// Share of right predictions, `0.0..=1.0`.
    pub(crate) fn accuracy(&self) -> f64 {
        self.correct as f64 / self.predictions.max(1) as f64
    }
}

/// Evaluates `net`, which is on `device`, on the held-out samples in the training precision.
///
/// *Numerics*: batches belong to shards and sums are added in shard order, so the result does not depend on the
/// number of ranks.
///
/// *Blocks*: until all ranks have evaluated their part.
pub(crate) fn evaluate<T: TrainTask>(
    ddp: &mut Ddp,
    task: &T,
    net: &T::Model,
    device: &Device,
    precision: Precision,
    stages: Option<&mut (dyn Stages<T> + 'static)>,
    group: &ProcessGroup,
) -> Result<Sums, TrainError> {
    if task.len(Part::HeldOut) == 0 {
        return Ok(Sums::default());
    }
    let split = split(task, Part::HeldOut, ddp.shard_count())?;
    let device = device.clone().inner();
    let one_batch = |net: &T::Model, indices: &Range<usize>| {
        let batch = task.batch(Part::HeldOut, indices.clone());
        task.scores(net, &batch, precision, &device).sums()
    };
    if let Some(stages) = stages {
        let shards = &split[ddp.shards()];
        let mine = stages.evaluate(ddp, net, task, shards, precision, &device)?;
        let all = group.all_gather_bytes(&encode(&mine))?.concat();
        return Ok(total(&all));
    }
    let all = ddp.with_recovery(|ddp| {
        let mine: Result<Vec<Sums>, TrainError> = ddp.evaluate(net, |net| {
            let shards = split[ddp.shards()].iter();
            let one_batch = |indices: &Range<usize>| one_batch(net, indices);
            shards.map(|batches| of_shard(batches, one_batch)).collect()
        })?;
        let all = ddp.group().all_gather_bytes(&encode(&mine?))?;
        Ok::<_, TrainError>(all.concat())
    })?;
    Ok(total(&all))
}

/// The batches of each shard, of a part that is not empty.
pub(crate) fn split<T: TrainTask>(
    task: &T,
    part: Part,
    shards: usize,
) -> Result<Vec<Vec<Range<usize>>>, TrainError> {
    Ok(eval_split(&EvalOptions {
        len: task.len(part),
        shards,
        batch: task.evaluation_batch(),
    })?)
}

/// The sums over a shard's batches, in order.
pub(crate) fn of_shard(
    batches: &[Range<usize>],
    one_batch: impl FnMut(&Range<usize>) -> Result<Sums, TrainError>,
) -> Result<Sums, TrainError> {
    let mut sums = batches.iter().map(one_batch);
    sums.try_fold(Sums::default(), |all, sums| Ok(all.add(sums?)))
}

/// The sums of all ranks' shards, which are in the order of ranks.
fn total(all: &[u8]) -> Sums {
    decode(all).into_iter().fold(Sums::default(), Sums::add)
}

/// Encodes sums as bytes: exact, unlike text.
fn encode(sums: &[Sums]) -> Vec<u8> {
    let words = sums
        .iter()
        .flat_map(|s| [s.loss.to_bits(), s.correct, s.predictions]);
    words.flat_map(u64::to_le_bytes).collect()
}

fn decode(bytes: &[u8]) -> Vec<Sums> {
    let (words, _) = bytes.as_chunks::<8>();
    let sums = words
        .as_chunks::<3>()
        .0
        .iter()
        .map(|words| words.map(u64::from_le_bytes));
    let sums = sums.map(|[loss, correct, predictions]| Sums {
        loss: f64::from_bits(loss),
        correct,
        predictions,
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
                predictions: u64::MAX,
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
