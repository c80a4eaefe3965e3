//! Opens the configured data set.

use super::csv::CsvOptions;
use super::{DataError, Dataset, csv, digits, idx};
use crate::config::{Task, TrainConfig};

/// Loads the labelled data set of `config`.
///
/// *Errors*: those of the format. Resolving settings already refuses a task without its path.
pub fn open(config: &TrainConfig) -> Result<Dataset, DataError> {
    let path = config.data.clone().unwrap_or_default();
    match config.task {
        Task::Digits => Ok(digits::load()),
        Task::Idx => idx::load(&path),
        Task::Csv => csv::load(&CsvOptions {
            path,
            label_column: config.label_column.clone(),
        }),
        Task::Lm => unreachable!("a language model has no labels"),
    }
}
