//! Opens the configured data set.

use std::path::Path;

use super::{DataError, Dataset, Features, Labels, Mixup, Schema, digits, idx, images, table};
use crate::config::{ClassWeights, Task, TrainConfig};
use images::Inspection;
use table::TableOptions;

/// Loads the labelled data set of `config`, as the run in `run_dir` began with it if it `has_begun`.
///
/// *Errors*: those of the format. Resolving settings already refuses a task without its path.
pub fn open(config: &TrainConfig, has_begun: bool) -> Result<Dataset, DataError> {
    let path = config.data.clone().unwrap_or_default();
    let mut dataset = match config.task {
        Task::Digits => digits::load(config.held_out, config.split_seed),
        Task::Idx => idx::load(&path)?,
        Task::Images => {
            let inspection = Inspection::of_run(config, has_begun)?;
            let share = (config.held_out, config.split_seed);
            images::load(&path, config.preparation(), share, inspection)?
        }
        Task::Csv => table::load(&TableOptions::new(config, &path))?,
        Task::Lm => unreachable!("a language model has no labels"),
    };
    dataset.class_weights = match config.class_weights {
        ClassWeights::None => None,
        ClassWeights::Balanced => dataset.balanced(),
    };
    let has_classes = matches!(dataset.labels, Labels::Classes(_));
    dataset.mixup = (has_classes && config.mixup > 0.0).then_some(Mixup {
        alpha: config.mixup,
        seed: config.seed,
    });
    dataset.label_smoothing = config.label_smoothing;
    Ok(dataset)
}

/// Loads labelled data to evaluate a model of `config` with this schema on, all of it held out: a table, an image folder or an IDX folder.
///
/// *Errors*: those of the format; data that does not fit the schema.
pub fn open_as(config: &TrainConfig, path: &Path, schema: &Schema) -> Result<Dataset, DataError> {
    match schema.features {
        Features::Image { .. } if schema.is_of_files() => {
            images::load_as(path, schema, Inspection::of(config.bad_samples))
        }
        Features::Image { .. } => idx::load_as(path, schema),
        Features::Flat { .. } => table::load_as(&TableOptions::new(config, path), schema),
    }
}
