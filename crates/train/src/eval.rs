//! A trained model, evaluated on its held-out data or on other data.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use burn::tensor::{Int, Tensor};
use paceline_checkpoint::CheckpointError;
use paceline_ddp::Precision;
use serde::Serialize;

use crate::classifier::Classifier;
use crate::config::{Task, TrainConfig};
use crate::data;
use crate::error::TrainError;
use crate::evaluate::{of_shard, split};
use crate::generate::Generator;
use crate::language::Text;
use crate::task::{Compute, Part, Sums, TrainTask};

/// What an evaluation has found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// The checkpoint's folder.
    pub checkpoint: String,
    /// Name of the data.
    pub data: String,
    /// Samples, or tokens of a text.
    pub predictions: u64,
    /// Mean cross entropy.
    pub loss: f64,
    /// Its exponential, for language models.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
    /// Share of right predictions, `0.0..=1.0`.
    pub accuracy: f64,
    /// Each class; none for language models.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<ClassFigures>,
    /// How often each class was taken for which one, without the pairs that never were, by classes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub confusion: Vec<Confused>,
}

/// The figures of one class.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassFigures {
    /// Its name.
    pub name: String,
    /// Samples of this class.
    pub samples: u64,
    /// Right predictions of this class over all predictions of it; `None` if it was never predicted.
    pub precision: Option<f64>,
    /// Right predictions of this class over its samples; `None` if it has no sample.
    pub recall: Option<f64>,
    /// Harmonic mean of precision and recall; `None` if the class neither occurs nor is predicted.
    pub f1: Option<f64>,
}

/// How often samples of one class were taken for another one, or rightly for the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Confused {
    /// The class of the samples, an index.
    pub of: u32,
    /// The class that the model took them for.
    pub taken_for: u32,
    /// Samples.
    pub count: u64,
}

/// Evaluates the newest checkpoint of the run in `config.run_dir` in f32 on the CPU: on the run's held-out data, or on all of the data in
/// `data`, which is read as the run's data was.
///
/// *Numerics*: on the held-out data of a run in f32 on the CPU, the same bits as the run's own evaluation of this checkpoint, if it made one.
///
/// *Errors*: no checkpoint; data that cannot be used or does not fit the model; data of the run with other columns, classes or scaling than then.
pub fn eval(config: &TrainConfig, data: Option<&Path>) -> Result<Evaluation, TrainError> {
    match config.task {
        Task::Digits | Task::Idx | Task::Csv | Task::Images => classes(config, data),
        Task::Lm => language(config, data),
    }
}

fn classes(config: &TrainConfig, path: Option<&Path>) -> Result<Evaluation, TrainError> {
    let model = Classifier::of_run(&config.run_dir)?;
    let task = match path {
        Some(path) => data::open_as(config, path, &model.schema)?,
        None => data::open(config)?,
    };
    if task.schema != model.schema {
        return Err(TrainError::usage(
            format!(
                "{} has other columns, classes or scaling than when the run was trained on it",
                task.name
            ),
            "name data to evaluate on with --data",
        ));
    }
    let mut table = BTreeMap::new();
    let compute = Compute {
        device: &model.device,
        precision: Precision::F32,
    };
    let score = |samples: &Range<usize>| {
        let batch = task.batch(Part::HeldOut, None, samples.clone())?;
        let scores = task.scores(&model.net, &batch, compute);
        let best = scores.best()?;
        count(&scores.right, &best, &mut table);
        scores.sums_with(best)
    };
    let sums = sums(&task, Part::HeldOut, shards(config, path), score)?;
    let confusion = table.into_iter();
    let confusion: Vec<_> = confusion
        .map(|((of, taken_for), count)| Confused {
            of,
            taken_for,
            count,
        })
        .collect();
    Ok(Evaluation {
        classes: figures(&model.schema.classes, &confusion),
        confusion,
        ..evaluation(&model.checkpoint, &task.name, sums, None)?
    })
}

fn language(config: &TrainConfig, path: Option<&Path>) -> Result<Evaluation, TrainError> {
    let model = Generator::of_run(&config.run_dir)?;
    let config = TrainConfig {
        // The tokenizer is the run's.
        resume: true,
        data: path.map(Path::to_owned).or_else(|| config.data.clone()),
        ..config.clone()
    };
    let task = Text::open(&config, None)?;
    if !task.fits(&model.config) {
        let path = model.checkpoint;
        let what =
            "its model has another context or vocabulary than config.toml and the tokenizer".into();
        return Err(CheckpointError::Misfit { path, what }.into());
    }
    let parts = match path {
        Some(_) => &[Part::Train, Part::HeldOut][..],
        None => &[Part::HeldOut],
    };
    let mut all = Sums::default();
    let compute = Compute {
        device: &model.device,
        precision: Precision::F32,
    };
    for &part in parts {
        let score = |sequences: &Range<usize>| {
            let batch = task.batch(part, None, sequences.clone())?;
            let scores = task.scores(&model.gpt, &batch, compute);
            scores.sums()
        };
        all = all.add(sums(&task, part, shards(&config, path), score)?);
    }
    let perplexity = Some(libm::exp(all.mean_loss()));
    evaluation(&model.checkpoint, task.name(), all, perplexity)
}

/// Those of the run for its own data, so that sums are added in the same order.
fn shards(config: &TrainConfig, path: Option<&Path>) -> usize {
    path.map_or(config.shards, |_| 1)
}

/// The sums over a part of the data, in the order of a run with so many shards.
fn sums<T: TrainTask>(
    task: &T,
    part: Part,
    shards: usize,
    mut score: impl FnMut(&Range<usize>) -> Result<Sums, TrainError>,
) -> Result<Sums, TrainError> {
    if task.len(part) == 0 {
        return Ok(Sums::default());
    }
    let split = split(task, part, shards)?;
    let mut shards = split.iter().map(|batches| of_shard(batches, &mut score));
    shards.try_fold(Sums::default(), |all, shard| Ok(all.add(shard?)))
}

fn evaluation(
    checkpoint: &Path,
    data: &str,
    sums: Sums,
    perplexity: Option<f64>,
) -> Result<Evaluation, TrainError> {
    if sums.count == 0 {
        return Err(TrainError::usage(
            format!("{data} has nothing to evaluate on"),
            "name data to evaluate on with --data",
        ));
    }
    Ok(Evaluation {
        checkpoint: checkpoint.display().to_string(),
        data: data.to_owned(),
        predictions: sums.count,
        loss: sums.mean_loss(),
        perplexity,
        accuracy: sums.mean(0),
        classes: Vec::new(),
        confusion: Vec::new(),
    })
}

/// Counts which class each sample was taken for.
fn count(right: &Tensor<1, Int>, best: &Tensor<1, Int>, table: &mut BTreeMap<(u32, u32), u64>) {
    let numbers = |tensor: &Tensor<1, Int>| tensor.to_data().iter::<u32>().collect::<Vec<_>>();
    for pair in numbers(right).into_iter().zip(numbers(best)) {
        *table.entry(pair).or_default() += 1;
    }
}

/// The figures of each class.
fn figures(names: &[String], confusion: &[Confused]) -> Vec<ClassFigures> {
    // Samples of the class, samples taken for it, samples rightly taken for it.
    let mut counts = vec![[0_u64; 3]; names.len()];
    for confused in confusion {
        let (of, taken_for) = (confused.of as usize, confused.taken_for as usize);
        counts[of][0] += confused.count;
        counts[taken_for][1] += confused.count;
        counts[of][2] += u64::from(of == taken_for) * confused.count;
    }
    let share = |part: u64, all: u64| (all > 0).then(|| part as f64 / all as f64);
    let figures = names.iter().zip(counts);
    let figures = figures.map(|(name, [samples, taken, right])| ClassFigures {
        name: name.clone(),
        samples,
        precision: share(right, taken),
        recall: share(right, samples),
        f1: share(2 * right, samples + taken),
    });
    figures.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_of_classes_are_those_of_the_textbook() {
        let confused = |of, taken_for, count| Confused {
            of,
            taken_for,
            count,
        };
        let confusion = [
            confused(0, 0, 6),
            confused(0, 1, 2),
            confused(1, 0, 1),
            confused(1, 1, 3),
        ];
        let names = ["no", "yes", "never"].map(str::to_owned);
        let figures = figures(&names, &confusion);
        let rows: Vec<_> = figures
            .iter()
            .map(|row| (row.samples, row.precision, row.recall, row.f1))
            .collect();
        assert_eq!(
            rows,
            [
                (8, Some(6.0 / 7.0), Some(0.75), Some(0.8)),
                (4, Some(0.6), Some(0.75), Some(2.0 / 3.0)),
                (0, None, None, None),
            ]
        );
    }
}
