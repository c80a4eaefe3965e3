//! A trained model, evaluated on its held-out data or on other data.

use std::path::Path;
use std::sync::Arc;

use paceline_checkpoint::CheckpointError;
use paceline_ddp::Precision;
use serde::Serialize;

use crate::classes::{ClassFigures, Confused, confused, figures};
use crate::classify::{Samples, Supervised};
use crate::config::{Task, TrainConfig};
use crate::data::{self, Target};
use crate::error::TrainError;
use crate::evaluate::{of_shards, split};
use crate::generate::Generator;
use crate::language::Text;
use crate::model::Net;
use crate::predictor::{LoadPredictor, Predictor};
use crate::regression::Deviations;
use crate::task::{Compute, Part, Sums, TrainTask};
use crate::trained::Which;

/// What an evaluation has found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// The checkpoint's folder.
    pub checkpoint: String,
    /// Name of the data.
    pub data: String,
    /// Samples, or tokens of a text.
    pub predictions: u64,
    /// Mean cross entropy, or mean squared error of standardised numbers.
    pub loss: f64,
    /// Its exponential, for language models.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
    /// Share of right predictions, `0.0..=1.0`; none of numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// How far predicted numbers are off; none for classes.
    #[serde(flatten)]
    pub deviations: Option<Deviations>,
    /// Each class; none for language models.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<ClassFigures>,
    /// How often each class was taken for which one, without the pairs that never were, by classes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub confusion: Vec<Confused>,
    /// Signs that the data is not what the user intended.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Evaluates a checkpoint of the run in `config.run_dir`, which `load` loads unless it is one of a language model, in f32 on the CPU: on the run's held-out data, or on all of the data in
/// `data`, which is read as the run's data was.
///
/// *Numerics*: on the held-out data of a run in f32 on the CPU, the same bits as the run's own evaluation of this checkpoint, if it made one.
///
/// *Errors*: no checkpoint; data that cannot be used or does not fit the model; data of the run with other columns, classes or scaling than then.
pub fn eval(
    config: &TrainConfig,
    data: Option<&Path>,
    which: Which,
    load: LoadPredictor,
) -> Result<Evaluation, TrainError> {
    match config.task {
        Task::Digits | Task::Idx | Task::Csv | Task::Images => {
            samples(config, data, &load(config, which)?)
        }
        Task::Lm => language(config, data, which),
    }
}

fn samples(
    config: &TrainConfig,
    path: Option<&Path>,
    model: &Predictor,
) -> Result<Evaluation, TrainError> {
    let data = match path {
        Some(path) => data::open_as(config, path, &model.schema)?,
        None => data::open(config, true)?,
    };
    if data.schema != model.schema {
        return Err(TrainError::usage(
            format!(
                "{} has other columns, classes or scaling than when the run was trained on it",
                data.name
            ),
            "name data to evaluate on with --data",
        ));
    }
    // For its samples: the model may be another one.
    let task = Arc::new(Supervised::<Net>::on(data));
    let score = |batch: &Samples| batch.sums(model.scores(batch.input(&model.device)));
    let mut sums = sums(&task, Part::HeldOut, config, shards(config, path), score)?;
    let confusion = confused(std::mem::take(&mut sums.confusion));
    let deviations = match model.schema.target {
        Target::Number { deviation, .. } => Some(Deviations::of(&sums, deviation)),
        Target::Classes(_) => None,
    };
    Ok(Evaluation {
        classes: figures(model.schema.target.classes(), &confusion),
        confusion,
        warnings: task.data.warnings.clone(),
        accuracy: deviations.is_none().then(|| sums.mean(0)),
        deviations,
        ..evaluation(&model.checkpoint, task.name(), &sums)?
    })
}

fn language(
    config: &TrainConfig,
    path: Option<&Path>,
    which: Which,
) -> Result<Evaluation, TrainError> {
    let model = Generator::of_run(&config.run_dir, which)?;
    let config = TrainConfig {
        // The tokenizer is the run's.
        resume: true,
        data: path.map(Path::to_owned).or_else(|| config.data.clone()),
        ..config.clone()
    };
    let task = Arc::new(Text::open(&config, None)?);
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
    let compute = Compute::new(&model.device, Precision::F32);
    for &part in parts {
        let score = |batch: &_| task.scores(&model.gpt, batch, compute).sums();
        all = all.add(sums(&task, part, &config, shards(&config, path), score)?);
    }
    Ok(Evaluation {
        perplexity: Some(libm::exp(all.mean_loss())),
        accuracy: Some(all.mean(0)),
        ..evaluation(&model.checkpoint, task.name(), &all)?
    })
}

/// Those of the run for its own data, so that sums are added in the same order.
fn shards(config: &TrainConfig, path: Option<&Path>) -> usize {
    path.map_or(config.shards, |_| 1)
}

/// The sums over a part of the data, in the order of a run with so many shards.
fn sums<T: TrainTask>(
    task: &Arc<T>,
    part: Part,
    config: &TrainConfig,
    shards: usize,
    score: impl FnMut(&T::Batch) -> Result<Sums, TrainError>,
) -> Result<Sums, TrainError> {
    if task.len(part) == 0 {
        return Ok(Sums::default());
    }
    let shards = of_shards(task, part, &split(&**task, part, shards)?, config, score)?;
    Ok(shards.into_iter().fold(Sums::default(), Sums::add))
}

/// What every evaluation has.
fn evaluation(checkpoint: &Path, data: &str, sums: &Sums) -> Result<Evaluation, TrainError> {
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
        perplexity: None,
        accuracy: None,
        deviations: None,
        classes: Vec::new(),
        confusion: Vec::new(),
        warnings: Vec::new(),
    })
}
