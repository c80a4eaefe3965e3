//! The trainer and its built-in tasks: from settings to a trained model, as one rank of a group.
//!
//! - [`config`]: layered settings, each with its source.
//! - [`data`]: the built-in digits, MNIST-format folders, tables, image folders, texts.
//! - [`TrainTask`]: data, a model and a loss; the built-in tasks are such ones. [`train`] and [`train_task`]: the loop, for every task; [`eval()`]: a trained model on other data; [`Predictor`]: its classes or numbers for samples without labels;
//!   [`Generator`]: text from a trained language model;
//!   [`replay()`]: its steps computed again on one rank; [`run_dir`]: its files on disk, besides checkpoints.

#![warn(clippy::print_stderr)] // it panics where the terminal is gone

mod classes;
mod classify;
pub mod config;
mod console;
mod cuts;
pub mod data;
mod error;
mod eval;
mod evaluate;
mod export;
mod foresee;
mod generate;
mod init;
mod language;
mod layout;
pub mod model;
mod observe;
mod optimizer;
pub mod plan;
mod predictor;
pub mod probe;
mod protobuf;
mod records;
mod regression;
mod replay;
mod report;
pub mod run_dir;
mod scalars;
pub mod schedule;
mod scores;
mod setup;
mod stages;
mod task;
mod tensorboard;
mod tokenizer;
mod torch_names;
mod trained;
mod trainer;

pub use classes::{ClassFigures, Confused, class_table, most_confused, printable};
pub use classify::{Network, Supervised};
pub use console::{COLUMNS_VARIABLE, Output};
pub use cuts::{Cuts, InputOf, OutputOf, Parts, SequentialTask};
pub use error::{FailureClass, TrainError};
pub use eval::{Evaluation, eval};
pub use export::{Exported, Format, export};
pub use foresee::{Foreseen, foresee, foresee_task};
pub use generate::{GenerateOptions, Generator};
pub use predictor::{Answer, LoadPredictor, Prediction, Predictor};
pub use regression::Deviations;
pub use replay::{Replay, Replayed, replay};
pub use scalars::scalars;
pub use setup::use_threads;
pub use task::{Compute, Loss, Metric, Part, Step, StepFigures, Sums, TrainTask, Unit};
pub use trained::Which;
pub use trainer::{End, train, train_task};
