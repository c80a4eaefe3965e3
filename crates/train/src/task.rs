//! `TrainTask`: what the trainer needs to know of data and a model.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Device, Int, Tensor};
use paceline_collective::ProcessGroup;
use paceline_ddp::Precision;
use paceline_usage::figures::thousands;

use crate::config::TrainConfig;
use crate::cuts::Cuts;
use crate::error::TrainError;
use crate::optimizer;
use crate::predictor::LoadPredictor;
use crate::report::plural;

/// Samples of one evaluation batch, unless a task has another number.
pub(crate) const EVALUATION_BATCH: usize = 256;

/// A part of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The samples to train on.
    Train,
    /// The samples to evaluate on.
    HeldOut,
}

/// What predictions are counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// One prediction for each sample.
    Samples,
    /// One prediction for each token of a text.
    Tokens,
}

impl Unit {
    /// The number as one of samples and as one of tokens.
    pub(crate) fn split(self, count: f64) -> [Option<f64>; 2] {
        match self {
            Self::Samples => [Some(count), None],
            Self::Tokens => [None, Some(count)],
        }
    }

    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Samples => "samples",
            Self::Tokens => "tokens",
        }
    }
}

/// The loss of a batch.
#[derive(Debug)]
pub struct Loss {
    pub(crate) mean: Tensor<1>,
    pub(crate) count: usize,
    pub(crate) weight: f32,
}

impl Loss {
    /// The mean over `count` predictions, which is the weight of the batch among the others of its step.
    ///
    /// *Shape*: `[1]`.
    #[must_use]
    pub fn new(mean: Tensor<1>, count: usize) -> Self {
        Self::weighted(mean, count, count as f32)
    }

    /// The same, where predictions have weights: a mean weighted by them, and their sum. The loss of a step is then the weighted mean over all of its
    /// predictions, as PyTorch's `CrossEntropyLoss(weight=..)` has it for a batch.
    ///
    /// *Shape*: `[1]`.
    #[must_use]
    pub fn weighted(mean: Tensor<1>, count: usize, weight: f32) -> Self {
        Self {
            mean,
            count,
            weight,
        }
    }

    /// *Errors*: more values than one, or no prediction.
    pub(crate) fn checked(self, of: &str) -> Result<Self, TrainError> {
        let [values] = self.mean.dims();
        if !(self.weight.is_finite() && self.weight >= 0.0) {
            return Err(TrainError::usage(
                format!("the loss of a batch of {of} has the weight {}", self.weight),
                "give `Loss::weighted` the sum of the weights, each 0 or more",
            ));
        }
        match (values, self.count) {
            (1, 1..) => Ok(self),
            (1, 0) => Err(TrainError::usage(
                format!("the loss of a batch of {of} is over 0 predictions"),
                "give `Loss::new` the number of predictions in the batch",
            )),
            _ => Err(TrainError::usage(
                format!("the loss of a batch of {of} has {values} values"),
                "return their mean, as `loss.mean()`",
            )),
        }
    }
}

/// Where and in which type a batch is computed.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Compute<'a> {
    /// The device that the model begins on.
    pub device: &'a Device,
    /// The type of the layers. If it is mixed, inputs go through [`Precision::input`] and results through [`Precision::logits`].
    pub precision: Precision,
}

impl<'a> Compute<'a> {
    pub(crate) fn new(device: &'a Device, precision: Precision) -> Self {
        Self { device, precision }
    }
}

/// Sums over evaluated predictions, from which [metrics](TrainTask::metrics) are computed.
///
/// *Numerics*: the sums of batches are added in the order of shards, so they have the same bits on any number of ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sums {
    /// Sum of the predictions' losses.
    pub loss: f64,
    /// Predictions.
    pub count: u64,
    /// Further sums, whatever the task's metrics need, as many in each batch.
    pub states: Vec<f64>,
    /// Of a classification: how often samples of one class, the first, were taken for another one or rightly for the same. With it the end of
    /// a training has the figures of each of the [classes](TrainTask::classes).
    pub confusion: BTreeMap<[u32; 2], u64>,
}

impl Sums {
    /// The sums of one batch, without further ones. Waits for the loss.
    #[must_use]
    pub fn of(loss: Loss) -> Self {
        let mean: f32 = loss.mean.into_scalar();
        Self {
            loss: f64::from(mean) * loss.count as f64,
            count: loss.count as u64,
            ..Self::default()
        }
    }

    /// The same with a further sum over the batch.
    #[must_use]
    pub fn with(mut self, state: f64) -> Self {
        self.states.push(state);
        self
    }

    /// The same with the right class of each prediction and the class that the model took it for.
    ///
    /// *Shape*: `[predictions]`, both.
    #[must_use]
    pub fn with_confusion(mut self, right: &Tensor<1, Int>, taken_for: &Tensor<1, Int>) -> Self {
        let [right, taken_for] = [right, taken_for].map(|tensor| tensor.to_data());
        for pair in right.iter::<u32>().zip(taken_for.iter::<u32>()) {
            *self.confusion.entry(pair.into()).or_default() += 1;
        }
        self
    }

    /// Mean loss.
    #[must_use]
    pub fn mean_loss(&self) -> f64 {
        self.loss / self.count.max(1) as f64
    }

    /// A further sum over the number of predictions; 0 if there is no such sum.
    #[must_use]
    pub fn mean(&self, state: usize) -> f64 {
        self.states.get(state).copied().unwrap_or_default() / self.count.max(1) as f64
    }

    /// The sums of both. Where nothing was evaluated there are no states.
    pub(crate) fn add(mut self, mut other: Self) -> Self {
        let len = self.states.len().max(other.states.len());
        self.states.resize(len, 0.0);
        other.states.resize(len, 0.0);
        let states = self.states.iter().zip(&other.states);
        for (pair, count) in other.confusion {
            *self.confusion.entry(pair).or_default() += count;
        }
        Self {
            loss: self.loss + other.loss,
            count: self.count + other.count,
            states: states.map(|(one, other)| one + other).collect(),
            confusion: self.confusion,
        }
    }
}

/// A figure of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    pub(crate) name: &'static str,
    pub(crate) value: f64,
    pub(crate) higher_is_better: bool,
    pub(crate) text: String,
}

impl Metric {
    /// A number, such as a mean error, which is better if it is lower; `name` is its key in `metrics.jsonl`.
    #[must_use]
    pub fn number(name: &'static str, value: f64) -> Self {
        Self {
            name,
            value,
            higher_is_better: false,
            text: format!("{name} {value:.4}"),
        }
    }

    /// A share, `0.0..=1.0`, such as an accuracy, which people read in percent, and which is better if it is higher.
    #[must_use]
    pub fn share(name: &'static str, value: f64) -> Self {
        Self {
            name,
            value,
            higher_is_better: true,
            text: format!("{name} {:>6.2} %", value * 100.0),
        }
    }

    /// The same with its direction, which `--monitor` follows: a coefficient of determination is a number that is better if it is higher.
    #[must_use]
    pub fn higher_is_better(self, higher_is_better: bool) -> Self {
        Self {
            higher_is_better,
            ..self
        }
    }

    /// The same with another text for people.
    #[must_use]
    pub fn shown(self, text: String) -> Self {
        Self { text, ..self }
    }
}

/// A step of the optimizer that has been done.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Step {
    /// Its number, from 1.
    pub number: u64,
    /// Its epoch, from 1.
    pub epoch: u64,
    /// The mean loss of all ranks.
    pub loss: f64,
    /// The learning rate.
    pub lr: f64,
    /// Norm of the gradients, if they are clipped.
    pub grad_norm: Option<f64>,
}

/// A task's own figures of a step, by name.
pub type StepFigures = Vec<(&'static str, f64)>;

/// Data, a model and a loss, for the trainer: what a `LightningModule` and its `DataModule` are to Lightning's `Trainer`.
///
/// A sample may hold several predictions, as a sequence of tokens does; losses and rates are per prediction.
///
/// The functions are called on each rank. With the same settings they must give all ranks the same. If the name of the data, the number of
/// samples, the [digest](Self::digest) or the model differ, the job ends with an error that names the rank.
pub trait TrainTask: Sized + Send + Sync + 'static {
    /// The trained model.
    type Model: Module;
    /// Samples in plain memory, ready to become tensors.
    type Batch: Send + Sync + 'static;

    /// What a prediction is.
    const UNIT: Unit = Unit::Samples;

    /// What a sample is called in reports: `sample`, `sequence`.
    const SAMPLE: &'static str = "sample";

    /// Loads a trained model, for a task on labelled samples as `paceline train` reads them: its program has the options for data and their losses,
    /// `eval` and `predict`.
    #[doc(hidden)]
    const PREDICTOR: Option<LoadPredictor> = None;

    /// Loads the data as one rank of `group`. Before ranks start, `group` is `None`.
    ///
    /// *Errors*: data that cannot be used. The first call ends the job before any rank starts.
    fn open(config: &TrainConfig, group: Option<&ProcessGroup>) -> Result<Self, TrainError>;

    /// Short name of the data.
    fn name(&self) -> &str;

    /// Name and size of the data, for the header.
    fn description(&self) -> String {
        let held_out = match self.len(Part::HeldOut) {
            0 => "none".to_owned(),
            count => thousands(count as u64),
        };
        format!(
            "{}: {} to train on, {held_out} held out",
            self.name(),
            plural(self.len(Part::Train) as u64, Self::SAMPLE),
        )
    }

    /// Signs that the data is not what the user intended.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }

    /// Number of samples. Without held-out ones nothing is evaluated.
    fn len(&self, part: Part) -> usize;

    /// A digest of what ranks that read the data by themselves could see differently, such as the order of files and classes.
    /// A difference ends the job before the first step.
    fn digest(&self) -> Option<String> {
        None
    }

    /// Samples of an evaluation batch.
    fn evaluation_batch(&self) -> usize {
        EVALUATION_BATCH
    }

    /// The names of the classes that the [confusion](Sums::confusion) of an evaluation is of.
    fn classes(&self) -> &[String] {
        &[]
    }

    /// Entries that a checkpoint needs so that other programs can use the model.
    fn metadata(&self, _: &TrainConfig) -> Vec<(&'static str, String)> {
        vec![("data", self.name().to_owned())]
    }

    /// Files that ranks read from the run directory.
    fn files(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    /// A model with random weights on `device`, whose generator has the seed of the settings.
    ///
    /// *Errors*: settings that do not fit the model.
    fn model(&self, config: &TrainConfig, device: &Device) -> Result<Self::Model, TrainError>;

    /// The model in words.
    fn model_name(&self, _: &TrainConfig) -> String {
        type_name::<Self::Model>()
    }

    /// Number of the model's parts that can be on devices of their own, with `--strategy model`.
    fn parts(&self) -> usize {
        1
    }

    /// The model with its parts on `devices`, which are at most as many.
    fn place(&self, model: Self::Model, _devices: &[Device]) -> Self::Model {
        model
    }

    /// How ranks share the model, with `--pp` and `--tp`; by default they do not, and these settings are refused.
    fn cuts() -> Cuts<Self> {
        Cuts::none()
    }

    /// The optimizer; by default that of the settings. In a pipeline `model` is a stage.
    ///
    /// *Errors*: an optimizer that does not fit the model.
    fn optimizer(
        &self,
        config: &TrainConfig,
        model: &Self::Model,
    ) -> Result<ModuleOptimizer, TrainError> {
        optimizer::of_settings(config, model)
    }

    /// Reads the samples with the given indices, mostly on a thread of the loader, ahead of their use. `epoch` is that of training, and
    /// `None` in an evaluation: augmented samples must be a pure function of the epoch and the index.
    ///
    /// *Errors*: samples that cannot be read. They end the job.
    fn batch(
        &self,
        part: Part,
        epoch: Option<u64>,
        indices: impl Iterator<Item = usize>,
    ) -> Result<Self::Batch, TrainError>;

    /// The loss that the trainer minimises, of a batch of training samples.
    ///
    /// *Errors*: failed collectives of the task's own.
    fn loss(
        &self,
        model: &Self::Model,
        batch: &Self::Batch,
        compute: Compute<'_>,
    ) -> Result<Loss, TrainError>;

    /// Follows each step of the optimizer, on each rank, unless the step was skipped because its numbers were not finite. It may change the
    /// model, alike on all ranks, and returns figures of the step by name, which rank 0 writes with the others of the step. With `--pp`,
    /// `--tp` or `--zero 3` a rank has only its part of the model.
    ///
    /// *Errors*: end the job.
    fn after_step(
        &self,
        model: Self::Model,
        _: &Step,
    ) -> Result<(Self::Model, StepFigures), TrainError> {
        Ok((model, Vec::new()))
    }

    /// The sums of a batch of held-out samples, as in [`loss`](Self::loss) but without gradients; by default those of the loss.
    ///
    /// *Errors*: failed collectives of the task's own.
    fn evaluate(
        &self,
        model: &Self::Model,
        batch: &Self::Batch,
        compute: Compute<'_>,
    ) -> Result<Sums, TrainError> {
        Ok(Sums::of(self.loss(model, batch, compute)?))
    }

    /// The figures of an evaluation besides the mean loss, from the sums over all held-out samples. With `--monitor` it is also called on
    /// [`Sums::default`], for the names.
    fn metrics(&self, _: &Sums) -> Vec<Metric> {
        Vec::new()
    }
}

/// The name of a type without its path, in small letters.
pub(crate) fn type_name<T>() -> String {
    let name = std::any::type_name::<T>();
    name.rsplit("::").next().unwrap_or(name).to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_evaluated_is_no_division_by_zero() {
        assert_eq!(Sums::default().mean(0), 0.0);
        assert_eq!(Sums::default().mean_loss(), 0.0);
    }
}
