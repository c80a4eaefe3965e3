//! Opens the configured data set.

use std::path::Path;

use super::csv::CsvOptions;
use super::{DataError, Dataset, Features, Schema, csv, digits, idx, images};
use crate::config::{Task, TrainConfig};

/// Loads the labelled data set of `config`.
///
/// *Errors*: those of the format. Resolving settings already refuses a task without its path.
pub fn open(config: &TrainConfig) -> Result<Dataset, DataError> {
    let path = config.data.clone().unwrap_or_default();
    match config.task {
        Task::Digits => Ok(digits::load()),
        Task::Idx => idx::load(&path),
        Task::Images => images::load(&path, config.preparation()),
        Task::Csv => csv::load(&CsvOptions {
            path,
            label_column: config.label_column.clone(),
        }),
        Task::Lm => unreachable!("a language model has no labels"),
    }
}

/// Loads labelled data to evaluate a classifier of `config` with this schema on, all of it held out: a CSV file for a table, an image folder or an
/// IDX folder for images.
///
/// *Errors*: those of the format; data that does not fit the schema.
pub fn open_as(config: &TrainConfig, path: &Path, schema: &Schema) -> Result<Dataset, DataError> {
    match schema.features {
        Features::Image { .. } if schema.is_of_files() => images::load_as(path, schema),
        Features::Image { .. } => idx::load_as(path, schema),
        Features::Flat { .. } => {
            let options = CsvOptions {
                path: path.to_owned(),
                label_column: config.label_column.clone(),
            };
            csv::load_as(&options, schema)
        }
    }
}
