//! Classification of labelled samples and regression, as a task.

use std::marker::PhantomData;

use burn::module::Module;
use burn::tensor::{Device, Tensor, TensorData};
use paceline_checkpoint::SavedModel;
use paceline_collective::ProcessGroup;
use paceline_usage::figures::thousands;
use rayon::prelude::*;
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::config::{ModelSize, TrainConfig};
use crate::data::mixup::mix_opposites;
use crate::data::{self, Dataset, Features, Labels, Schema, Target, Values};
use crate::error::TrainError;
use crate::predictor::{LoadPredictor, Predictor};
use crate::regression::{self, Deviations};
use crate::report::plural;
use crate::scores::{self, Scores};
use crate::task::{Compute, EVALUATION_BATCH, Loss, Metric, Part, Sums, TrainTask, type_name};
use crate::trained::{entry, misfit};

/// Entries of a checkpoint's metadata.
pub(crate) const FEATURES_ENTRY: &str = "features";
pub(crate) const COLUMNS_ENTRY: &str = "columns";
pub(crate) const SCALING_ENTRY: &str = "scaling";
pub(crate) const CLASSES_ENTRY: &str = "classes";
pub(crate) const NUMBER_ENTRY: &str = "number";
pub(crate) const MODEL_ENTRY: &str = "model";

/// Most values of an evaluation batch of images in files: 256 images of 32 x 32 pixels.
const EVALUATION_VALUES: usize = EVALUATION_BATCH * 3 * 32 * 32;

/// Samples of an evaluation batch of images in files.
pub(crate) fn evaluation_images(features: &Features) -> usize {
    (EVALUATION_VALUES / features.count()).clamp(1, EVALUATION_BATCH)
}

/// Samples in plain memory.
pub struct Samples {
    values: Vec<f32>,
    labels: Labels,
    /// The share of each sample that is its own, if the rest is of its opposite in the batch.
    mixed: Option<f64>,
}

/// A model for labelled samples of any kind that `paceline train` reads.
///
/// A program whose `main` is `paceline::trainer::run::<Supervised<MyNet>>()` has the data, the losses and the figures of `paceline train`, with their
/// options.
pub trait Network: Module + 'static {
    /// A network with random weights on `device`, whose generator has the seed of the settings, for samples with these features.
    /// `outputs` is the number of classes, or 1 for a number to predict.
    ///
    /// *Errors*: settings or features that do not fit.
    fn init(
        config: &TrainConfig,
        features: Features,
        outputs: usize,
        device: &Device,
    ) -> Result<Self, TrainError>;

    /// The scores of the classes, before a softmax, or the number, standardised.
    ///
    /// *Shape*: `[batch, features.count()]`, images as `[channels, height, width]` each, to `[batch, outputs]`; in the type of the weights.
    fn forward(&self, features: Features, input: Tensor<2>) -> Tensor<2>;

    /// The network in words.
    fn name(_: &TrainConfig, _: Features) -> String {
        type_name::<Self>()
    }

    /// Number of parts that can be on devices of their own, with `--strategy model`.
    fn parts(_: Features) -> usize {
        1
    }

    /// The network with its parts on `devices`, which are at most as many.
    #[must_use]
    fn place(self, _devices: &[Device]) -> Self {
        self
    }

    /// Which one of the built-in networks it is.
    #[doc(hidden)]
    fn size(_: &TrainConfig) -> Option<ModelSize> {
        None
    }
}

/// Labelled samples and a network that learns them: a classification or a regression.
#[derive(Debug)]
pub struct Supervised<N> {
    pub(crate) data: Dataset,
    network: PhantomData<fn() -> N>,
}

impl<N: Network> Supervised<N> {
    /// Of these samples.
    #[must_use]
    pub fn on(data: Dataset) -> Self {
        Self {
            data,
            network: PhantomData,
        }
    }

    /// What the model says of a batch: scores of the classes, or the standardised number, in f32.
    ///
    /// *Shape*: `[samples, outputs]`.
    fn outputs(&self, model: &N, batch: &Samples, compute: Compute<'_>) -> Tensor<2> {
        let (features, precision) = (self.data.schema.features, compute.precision);
        let input = batch.input(compute.device);
        precision.logits(model.forward(features, precision.input(input)))
    }
}

impl Samples {
    /// *Shape*: `[samples, features]`.
    pub(crate) fn input(&self, device: &Device) -> Tensor<2> {
        let samples = self.labels.len();
        let values = TensorData::new(
            self.values.clone(),
            [samples, self.values.len() / samples.max(1)],
        );
        Tensor::from_data(values, device)
    }

    /// The sums of what a model says of the samples.
    ///
    /// *Shape*: `[samples, outputs]`.
    pub(crate) fn sums(&self, outputs: Tensor<2>) -> Result<Sums, TrainError> {
        match &self.labels {
            Labels::Classes(labels) => {
                let scores = Scores::of(outputs, labels);
                let (right, best) = (scores.right.clone(), scores.best()?);
                let sums = scores.sums_with(best.clone())?;
                Ok(sums.with_confusion(&right, &best))
            }
            Labels::Numbers(numbers) => {
                let predicted: Vec<f32> = outputs.into_data().iter::<f32>().collect();
                Ok(regression::sums(&predicted, numbers))
            }
        }
    }
}

impl<N: Network> TrainTask for Supervised<N> {
    type Model = N;
    type Batch = Samples;

    const PREDICTOR: Option<LoadPredictor> = Some(Predictor::of_network::<N>);

    fn open(config: &TrainConfig, group: Option<&ProcessGroup>) -> Result<Self, TrainError> {
        Ok(Self::on(data::open(
            config,
            config.resume || group.is_some(),
        )?))
    }

    fn name(&self) -> &str {
        &self.data.name
    }

    fn description(&self) -> String {
        format!(
            "{}: {} to train on, {} held out, {}",
            self.data.name,
            plural(self.data.train().len() as u64, "sample"),
            thousands(self.data.held_out().len() as u64),
            match &self.data.schema.target {
                Target::Classes(classes) => plural(classes.len() as u64, "class"),
                Target::Number { .. } => "a number to predict".to_owned(),
            },
        )
    }

    fn warnings(&self) -> Vec<String> {
        let own = match (&self.data.schema.target, &self.data.labels) {
            (Target::Classes(classes), Labels::Classes(labels)) => {
                self.data.class_warnings(classes, labels)
            }
            (_, Labels::Numbers(numbers)) if numbers.iter().all(|other| *other == numbers[0]) => {
                vec![format!(
                    "every number to predict of {} is the same: there is nothing to learn",
                    self.data.name
                )]
            }
            _ => Vec::new(),
        };
        own.into_iter().chain(self.data.warnings.clone()).collect()
    }

    fn len(&self, part: Part) -> usize {
        match part {
            Part::Train => self.data.train().len(),
            Part::HeldOut => self.data.held_out().len(),
        }
    }

    fn classes(&self) -> &[String] {
        self.data.schema.target.classes()
    }

    fn evaluation_batch(&self) -> usize {
        match &self.data.values {
            Values::Memory(_) | Values::Table(_) | Values::Pixels(_) => EVALUATION_BATCH,
            Values::Images(_) => evaluation_images(&self.data.schema.features),
        }
    }

    /// Of the names of classes, columns and files, and the label of each sample.
    fn digest(&self) -> Option<String> {
        let mut hash = Sha256::new();
        let mut add = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        self.data
            .schema
            .target
            .classes()
            .iter()
            .for_each(|class| add(class));
        add(&json(&self.data.schema.columns));
        // It differs if a value of the training rows of a table does.
        add(&json(&self.data.schema.scaling));
        if let Values::Images(images) = &self.data.values {
            images.names().for_each(add);
        }
        match &self.data.labels {
            Labels::Classes(labels) => labels
                .iter()
                .for_each(|label| hash.update(label.to_le_bytes())),
            Labels::Numbers(labels) => labels
                .iter()
                .for_each(|label| hash.update(label.to_le_bytes())),
        }
        Some(format!("{:x}", hash.finalize()))
    }

    /// The schema and the size of the network.
    fn metadata(&self, config: &TrainConfig) -> Vec<(&'static str, String)> {
        let schema = &self.data.schema;
        let target = match &schema.target {
            Target::Classes(classes) => (CLASSES_ENTRY, json(classes)),
            number @ Target::Number { .. } => (NUMBER_ENTRY, json(number)),
        };
        let mut entries = vec![
            ("data", self.data.name.clone()),
            (FEATURES_ENTRY, json(&schema.features)),
            (COLUMNS_ENTRY, json(&schema.columns)),
            (SCALING_ENTRY, json(&schema.scaling)),
            target,
        ];
        entries.extend(N::size(config).map(|size| (MODEL_ENTRY, json(&size))));
        entries
    }

    fn files(&self) -> Vec<(&'static str, String)> {
        match &self.data.values {
            Values::Images(images) => images.file().into_iter().collect(),
            Values::Memory(_) | Values::Table(_) | Values::Pixels(_) => Vec::new(),
        }
    }

    fn model(&self, config: &TrainConfig, device: &Device) -> Result<N, TrainError> {
        let Schema {
            features, target, ..
        } = &self.data.schema;
        N::init(config, *features, target.outputs(), device)
    }

    fn parts(&self) -> usize {
        N::parts(self.data.schema.features)
    }

    fn place(&self, model: N, devices: &[Device]) -> N {
        model.place(devices)
    }

    fn model_name(&self, config: &TrainConfig) -> String {
        N::name(config, self.data.schema.features)
    }

    fn batch(
        &self,
        part: Part,
        epoch: Option<u64>,
        indices: impl Iterator<Item = usize>,
    ) -> Result<Samples, TrainError> {
        let subset = match part {
            Part::Train => self.data.train(),
            Part::HeldOut => self.data.held_out(),
        };
        let indices: Vec<usize> = indices.collect();
        let width = self.data.schema.features.count();
        let mut values = vec![0.0; indices.len() * width];
        let read = |(index, values): (&usize, &mut [f32])| subset.read(*index, epoch, values);
        match (&self.data.values, epoch) {
            // Nothing else but the batch before computes during an evaluation.
            (Values::Images(_) | Values::Table(_) | Values::Pixels(_), None) => {
                let samples = indices.par_iter().zip(values.par_chunks_mut(width));
                samples.map(read).collect::<Result<(), _>>()?;
            }
            _ => indices
                .iter()
                .zip(values.chunks_mut(width))
                .try_for_each(read)?,
        }
        let mixup = self.data.mixup.zip(epoch).zip(indices.first());
        let mixed = mixup.map(|((mixup, epoch), first)| mixup.share(epoch, *first));
        if let Some(share) = mixed {
            mix_opposites(&mut values, width, share);
        }
        Ok(Samples {
            values,
            labels: subset.labels(&indices),
            mixed,
        })
    }

    fn loss(&self, model: &N, batch: &Samples, compute: Compute<'_>) -> Result<Loss, TrainError> {
        let outputs = self.outputs(model, batch, compute);
        Ok(match (&batch.labels, &self.data.class_weights) {
            (Labels::Classes(labels), None) => match batch.mixed {
                None => Scores::of(outputs, labels).smoothed_loss(self.data.label_smoothing),
                Some(share) => {
                    Scores::mixed_loss(outputs, labels, share, self.data.label_smoothing)
                }
            },
            (Labels::Classes(labels), Some(weights)) => {
                let weight = labels.iter().map(|label| weights[*label as usize]).sum();
                Scores::of(outputs, labels).weighted_loss(
                    weights,
                    weight,
                    self.data.label_smoothing,
                )
            }
            (Labels::Numbers(numbers), _) => {
                let count = numbers.len();
                let right = TensorData::new(numbers.clone(), [count, 1]);
                let right = Tensor::from_data(right, &outputs.device());
                Loss::new((outputs - right).square().mean(), count)
            }
        })
    }

    fn evaluate(
        &self,
        model: &N,
        batch: &Samples,
        compute: Compute<'_>,
    ) -> Result<Sums, TrainError> {
        batch.sums(self.outputs(model, batch, compute))
    }

    fn metrics(&self, sums: &Sums) -> Vec<Metric> {
        match self.data.schema.target {
            Target::Classes(_) => vec![scores::accuracy(sums)],
            Target::Number { deviation, .. } => Deviations::of(sums, deviation).metrics(),
        }
    }
}

/// The schema in a checkpoint's [metadata](TrainTask::metadata).
///
/// *Errors*: `Misfit`.
pub(crate) fn saved_schema(saved: &SavedModel) -> Result<Schema, TrainError> {
    let schema = Schema {
        features: entry(saved, FEATURES_ENTRY)?,
        columns: entry(saved, COLUMNS_ENTRY)?,
        scaling: entry(saved, SCALING_ENTRY)?,
        target: match saved.metadata().contains_key(NUMBER_ENTRY) {
            true => entry(saved, NUMBER_ENTRY)?,
            false => Target::Classes(entry(saved, CLASSES_ENTRY)?),
        },
    };
    schema.check().map_err(|what| misfit(saved, what))?;
    Ok(schema)
}

/// A value in a checkpoint's metadata.
fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("it always encodes")
}

impl Dataset {
    fn class_warnings(&self, classes: &[String], labels: &[u32]) -> Vec<String> {
        let samples = self.train().len();
        let label = labels.first();
        let one_class = labels.iter().all(|other| Some(other) == label);
        let one_class = one_class.then(|| {
            format!(
                "every label of {} is {}: with one class there is nothing to learn",
                self.name,
                classes[label.copied().unwrap_or_default() as usize]
            )
        });
        let are_numbers = classes
            .last()
            .is_some_and(|last| last.parse() == Ok(classes.len() - 1));
        let many = (classes.len() > samples).then(|| {
            let few = format!(
                "{} has {} for {}",
                self.name,
                plural(classes.len() as u64, "class"),
                plural(samples as u64, "training sample"),
            );
            match are_numbers {
                true => format!(
                    "{few}: labels are class numbers from 0, and the largest is {}; to predict a number, add --objective regression",
                    classes.len() - 1
                ),
                false => few,
            }
        });
        one_class.into_iter().chain(many).collect()
    }
}
