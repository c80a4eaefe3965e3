//! `TrainTask`: what the trainer needs to know of a task.

use burn::module::Module;
use burn::tensor::Device;
use paceline_collective::{DeviceMesh, ProcessGroup};
use paceline_ddp::{Ddp, DdpOptions, Precision};
use paceline_split::pipeline::PipelineOptions;

use crate::config::TrainConfig;
use crate::error::TrainError;
use crate::layout::Layout;
use crate::plan::Shape;
use crate::scores::Scores;
use crate::stages::Stages;

/// A part of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The samples to train on.
    Train,
    /// The samples to evaluate on.
    HeldOut,
}

/// What predictions are counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
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

/// A task: samples that become batches, a model, and scores of classes for each prediction in a batch.
///
/// The trainer minimises the cross entropy of the predictions. A sample may hold several predictions, as a sequence of tokens
/// does; losses and rates are per prediction.
pub(crate) trait TrainTask: Sized + Send + Sync + 'static {
    /// The trained model.
    type Model: Module;
    /// Samples in plain memory, ready to become tensors.
    type Batch: Send + Sync + 'static;

    /// What a prediction is.
    const UNIT: Unit;

    /// What a sample is called in reports: `sample`, `sequence`.
    const SAMPLE: &'static str;

    /// Loads the data as one rank of `group`. Before ranks start, `group` is `None`.
    ///
    /// *Errors*: data that cannot be used.
    fn open(config: &TrainConfig, group: Option<&ProcessGroup>) -> Result<Self, TrainError>;

    /// Short name of the data.
    fn name(&self) -> &str;

    /// Name and size of the data, for the header.
    fn description(&self) -> String;

    /// Signs that the data is not what the user intended.
    fn warnings(&self) -> Vec<String>;

    /// Number of samples.
    fn len(&self, part: Part) -> usize;

    /// Samples of an evaluation batch.
    fn evaluation_batch(&self) -> usize;

    /// Entries that a checkpoint needs so that other programs can use the model.
    fn metadata(&self, config: &TrainConfig) -> Vec<(&'static str, String)>;

    /// Files that ranks read from the run directory.
    fn files(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    /// A model with random weights, or what this rank has of it.
    ///
    /// *Errors*: a layout that does not fit the model.
    fn model(
        &self,
        config: &TrainConfig,
        device: &Device,
        layout: &Layout,
    ) -> Result<Self::Model, TrainError>;

    /// Number of the model's parts that can be on devices of their own.
    fn parts(&self) -> usize;

    /// The model with its parts on `devices`.
    fn place(&self, model: Self::Model, devices: &[Device]) -> Self::Model;

    /// What a plan needs to know of a model that is a list of equal layers.
    fn shape(&self, _: Precision) -> Shape {
        Shape::default()
    }

    /// The model in words.
    fn model_name(&self, config: &TrainConfig) -> String;

    /// Copies the samples with the given indices.
    fn batch(&self, part: Part, indices: impl Iterator<Item = usize>) -> Self::Batch;

    /// The scores of a batch, from a model that begins on `device`.
    fn scores(
        &self,
        model: &Self::Model,
        batch: &Self::Batch,
        precision: Precision,
        device: &Device,
    ) -> Scores;

    /// The time of each block of a model, measured on one micro-batch.
    fn block_costs(&self, _: &TrainConfig, _: &Device) -> Vec<f64> {
        unreachable!("the settings refuse stages of any model but a language model")
    }

    /// Cuts a model into stages, one rank's of which are returned with their replicas.
    fn pipeline(
        _: Self::Model,
        _: DeviceMesh,
        _: PipelineOptions,
        _: DdpOptions,
    ) -> Result<Staged<Self>, TrainError> {
        unreachable!("the settings refuse stages of any model but a language model")
    }
}

/// A rank's stages, their replicas and their model.
pub(crate) type Staged<T> = (Box<dyn Stages<T>>, Ddp, <T as TrainTask>::Model);
