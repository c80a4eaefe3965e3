//! Warnings about a job before it begins, from its settings and data.

use crate::config::TrainConfig;
use crate::data::Dataset;
use crate::error::TrainError;
use crate::report::plural;
use crate::setup::sharded_batches;

/// A warning for each sign that the job is not what the user intended.
///
/// *Errors*: the data does not fit the batch and shards.
pub fn warnings(config: &TrainConfig, dataset: &Dataset) -> Result<Vec<String>, TrainError> {
    let batches = sharded_batches(config, dataset, None)?;
    let steps = batches.steps_per_epoch() * config.epochs as u64;
    let samples = dataset.train().len();
    let large_batch = (config.global_batch > samples).then(|| {
        format!(
            "global batch {} is larger than the training data of {}: every step uses all of it",
            config.global_batch,
            plural(samples as u64, "sample")
        )
    });
    let label = dataset.labels.first();
    let one_class = (dataset.labels.iter().all(|other| Some(other) == label)).then(|| {
        format!(
            "every label of {} is {}: with one class there is nothing to learn",
            dataset.name,
            label.copied().unwrap_or_default()
        )
    });
    let classes = (dataset.classes > samples).then(|| {
        format!(
            "{} has {} for {}: labels are class numbers from 0, and the largest is {}",
            dataset.name,
            plural(dataset.classes as u64, "class"),
            plural(samples as u64, "training sample"),
            dataset.classes - 1
        )
    });
    let trace = config.trace.filter(|step| *step >= steps).map(|step| {
        format!(
            "`trace` is {step}, but the job has only {}, counted from 0",
            plural(steps, "step")
        )
    });
    Ok([large_batch, one_class, classes, trace]
        .into_iter()
        .flatten()
        .collect())
}
