//! From sample indices to tensors: the data that loader threads prepare for one step of one rank.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use paceline_ddp::sampler::{StepPlan, micro_batches};

use crate::data::{Dataset, Subset};

/// Samples as plain memory, ready to become tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct Samples {
    values: Vec<f32>,
    labels: Vec<i32>,
    features: usize,
}

impl Samples {
    /// Copies the samples with the given indices.
    pub fn gather(
        subset: &Subset<'_>,
        features: usize,
        indices: impl Iterator<Item = usize>,
    ) -> Self {
        let mut samples = Self {
            values: Vec::new(),
            labels: Vec::new(),
            features,
        };
        for index in indices {
            let (values, label) = subset.sample(index);
            samples.values.extend_from_slice(values);
            samples.labels.push(label as i32);
        }
        samples
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// *Shape*: `[samples, features]` and `[samples]`.
    pub fn tensors(&self, device: &Device) -> (Tensor<2>, Tensor<1, Int>) {
        let shape = [self.len(), self.features];
        (
            Tensor::from_data(TensorData::new(self.values.clone(), shape), device),
            Tensor::from_data(TensorData::new(self.labels.clone(), [self.len()]), device),
        )
    }
}

/// One rank's data for one step: the micro-batches of each of its shards.
pub type RankBatch = Vec<Vec<Samples>>;

/// Prepares the shards `shards` of `plan`, each cut into at most `accumulate` micro-batches.
pub fn load(
    dataset: &Arc<Dataset>,
    plan: &StepPlan,
    shards: Range<usize>,
    accumulate: usize,
) -> RankBatch {
    let features = dataset.features.count();
    let train = dataset.train();
    plan.shards[shards]
        .iter()
        .map(|indices| {
            micro_batches(indices, accumulate)
                .map(|part| Samples::gather(&train, features, part.iter().copied()))
                .collect()
        })
        .collect()
}
