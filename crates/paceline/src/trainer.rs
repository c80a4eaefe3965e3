//! The trainer of `paceline train`, for your own model and data.
//!
//! A program says what it trains in a [`TrainTask`], and its `main` is [`run`]. It then has the command line of `paceline train`, without the
//! options of built-in data and models: ranks, shards, checkpoints and resuming, recovery, ZeRO, precision, evaluation, metrics, `--explain`, a
//! settings file and `PACELINE_*` variables.
//!
//! A model for labelled samples of the kinds that `paceline train` reads (a table, images, IDX files) is a [`Network`], and the program's task
//! [`Supervised`] with it: the command line then has the options of data and losses too, and the commands `eval` and `predict`.
//!
//! ```text
//! my-program --nproc-per-node 4 --epochs 3
//! my-program --resume
//! my-program predict new.csv
//! paceline run --nproc-per-node 4 my-program --epochs 3
//! ```
//!
//! # Example
//!
//! ```no_run
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::{Device, Tensor, TensorData};
//! use paceline::trainer::{Compute, Loss, Part, TrainConfig, TrainError, TrainTask};
//! use paceline::ProcessGroup;
//!
//! /// y = 2 x + 1
//! struct Line;
//!
//! impl TrainTask for Line {
//!     type Model = Linear;
//!     type Batch = Vec<f32>;
//!
//!     fn open(_: &TrainConfig, _: Option<&ProcessGroup>) -> Result<Self, TrainError> {
//!         Ok(Self)
//!     }
//!
//!     fn name(&self) -> &str {
//!         "line"
//!     }
//!
//!     fn len(&self, part: Part) -> usize {
//!         match part {
//!             Part::Train => 1000,
//!             Part::HeldOut => 100,
//!         }
//!     }
//!
//!     fn model(&self, _: &TrainConfig, device: &Device) -> Result<Linear, TrainError> {
//!         Ok(LinearConfig::new(1, 1).init(device))
//!     }
//!
//!     fn batch(&self, _: Part, _: Option<u64>, indices: impl Iterator<Item = usize>) -> Result<Vec<f32>, TrainError> {
//!         Ok(indices.map(|index| index as f32 / 1000.0).collect())
//!     }
//!
//!     fn loss(&self, model: &Linear, batch: &Vec<f32>, compute: Compute<'_>) -> Result<Loss, TrainError> {
//!         let count = batch.len();
//!         let x = Tensor::<2>::from_data(TensorData::new(batch.clone(), [count, 1]), compute.device);
//!         let y = model.forward(x.clone());
//!         Ok(Loss::new((y - x * 2.0 - 1.0).square().mean(), count))
//!     }
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     paceline::trainer::run::<Line>()
//! }
//! ```

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use paceline_train::config::UserProgram;

pub use paceline_train::config::TrainConfig;
pub use paceline_train::data::Features;
pub use paceline_train::{
    Answer, Compute, Cuts, Loss, Metric, Network, Part, Parts, Prediction, Predictor,
    SequentialTask, Step, StepFigures, Sums, Supervised, TrainError, TrainTask, Unit, Which,
};

use crate::cli::program::{Asked, parse};
use crate::commands::{self, Program};

/// Trains as this process's command line asks: as a rank if a launcher started it, else with ranks that it starts, which are this program
/// again. Or evaluates or applies what an earlier run has trained, with `eval` and `predict` of [`Supervised`]. Prints errors, and returns the
/// exit code of `paceline train`.
///
/// *Blocks*: until the job has ended.
#[must_use]
pub fn run<T: TrainTask>() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let name = words.first().and_then(|word| Path::new(word).file_name());
    let name = name.map_or("program".into(), |name| name.to_string_lossy());
    let name = name
        .strip_suffix(std::env::consts::EXE_SUFFIX)
        .unwrap_or(&name);
    let user = UserProgram {
        name: name.to_string(),
        reads_data: T::PREDICTOR.is_some(),
    };
    let program = Program::of::<T>(user.clone());
    let result = match parse(&user, &words) {
        Ok(Asked::Train(args)) => commands::train::train(&program, &args),
        Ok(Asked::Eval(args)) => commands::eval::run(&program, &args),
        Ok(Asked::Predict(args)) => commands::predict::run(&program, &args),
        Ok(Asked::Worker(args)) => commands::rank::worker(&program, &args),
        Err(stop) => return stop.report().into(),
    };
    result.unwrap_or_else(|failure| failure.report()).into()
}

/// The words after `--` on this process's command line, which are the program's own: [`run`] hands them to each rank.
#[must_use]
pub fn args() -> Vec<OsString> {
    std::env::args_os()
        .skip_while(|word| word != "--")
        .skip(1)
        .collect()
}
