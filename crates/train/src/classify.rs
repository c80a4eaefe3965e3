//! Classification of labelled samples, as a task.

use burn::tensor::{Device, Tensor, TensorData};
use paceline_collective::ProcessGroup;
use paceline_split::ModelParallel;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use crate::config::TrainConfig;
use crate::data::{self, Dataset, Features, Schema, Values};
use crate::error::TrainError;
use crate::model::{ConvNet, Mlp, Net};
use crate::report::plural;
use crate::scores::{self, Classes, Scores};
use crate::task::{Compute, EVALUATION_BATCH, Loss, Metric, Part, Sums, TrainTask};

/// Entries of a checkpoint's metadata.
pub(crate) const FEATURES_ENTRY: &str = "features";
pub(crate) const COLUMNS_ENTRY: &str = "columns";
pub(crate) const SCALING_ENTRY: &str = "scaling";
pub(crate) const CLASSES_ENTRY: &str = "classes";
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
    labels: Vec<i32>,
}

impl TrainTask for Dataset {
    type Model = Net;
    type Batch = Samples;

    fn open(config: &TrainConfig, _: Option<&ProcessGroup>) -> Result<Self, TrainError> {
        Ok(data::open(config)?)
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> String {
        format!(
            "{}: {} to train on, {} held out, {}",
            self.name,
            plural(self.train().len() as u64, "sample"),
            self.held_out().len(),
            plural(self.schema.classes.len() as u64, "class"),
        )
    }

    fn warnings(&self) -> Vec<String> {
        let samples = self.train().len();
        let label = self.labels.first();
        let one_class = self.labels.iter().all(|other| Some(other) == label);
        let one_class = one_class.then(|| {
            format!(
                "every label of {} is {}: with one class there is nothing to learn",
                self.name,
                self.schema.classes[label.copied().unwrap_or_default() as usize]
            )
        });
        let classes = &self.schema.classes;
        let are_numbers = classes
            .last()
            .is_some_and(|last| last.parse() == Ok(classes.len() - 1));
        let classes = (classes.len() > samples).then(|| {
            let few = format!(
                "{} has {} for {}",
                self.name,
                plural(classes.len() as u64, "class"),
                plural(samples as u64, "training sample"),
            );
            match are_numbers {
                true => format!(
                    "{few}: labels are class numbers from 0, and the largest is {}",
                    classes.len() - 1
                ),
                false => few,
            }
        });
        let left_out = match &self.values {
            Values::Images(images) => images.warning(),
            Values::Memory(_) => None,
        };
        let warnings = one_class.into_iter().chain(classes);
        warnings.chain(left_out).collect()
    }

    fn len(&self, part: Part) -> usize {
        match part {
            Part::Train => self.train().len(),
            Part::HeldOut => self.held_out().len(),
        }
    }

    fn classes(&self) -> &[String] {
        &self.schema.classes
    }

    fn evaluation_batch(&self) -> usize {
        match &self.values {
            Values::Memory(_) => EVALUATION_BATCH,
            Values::Images(_) => evaluation_images(&self.schema.features),
        }
    }

    /// Of the names of classes and files, and which class each sample has.
    fn digest(&self) -> Option<String> {
        let mut hash = Sha256::new();
        let mut add = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        self.schema.classes.iter().for_each(|class| add(class));
        if let Values::Images(images) = &self.values {
            images.names().for_each(add);
        }
        for label in &self.labels {
            hash.update(label.to_le_bytes());
        }
        Some(format!("{:x}", hash.finalize()))
    }

    /// The schema and the size of the network.
    fn metadata(&self, config: &TrainConfig) -> Vec<(&'static str, String)> {
        let json = |value: Result<String, serde_json::Error>| value.expect("it always encodes");
        let schema = &self.schema;
        vec![
            ("data", self.name.clone()),
            (
                FEATURES_ENTRY,
                json(serde_json::to_string(&schema.features)),
            ),
            (COLUMNS_ENTRY, json(serde_json::to_string(&schema.columns))),
            (SCALING_ENTRY, json(serde_json::to_string(&schema.scaling))),
            (CLASSES_ENTRY, json(serde_json::to_string(&schema.classes))),
            (MODEL_ENTRY, json(serde_json::to_string(&config.model))),
        ]
    }

    fn model(&self, config: &TrainConfig, device: &Device) -> Result<Net, TrainError> {
        let Schema {
            features, classes, ..
        } = &self.schema;
        Ok(Net::new(*features, classes.len(), config.model, device))
    }

    fn parts(&self) -> usize {
        match self.schema.features {
            Features::Image { .. } => ConvNet::LAYERS.len(),
            Features::Flat { .. } => Mlp::LAYERS.len(),
        }
    }

    fn place(&self, model: Net, devices: &[Device]) -> Net {
        let layers = model.layers();
        ModelParallel::place_by(model, |part| {
            let of = |layer: &&[&str]| part.path.split('.').any(|name| layer.contains(&name));
            let layer = layers.iter().position(of).unwrap_or(0);
            devices[layer * devices.len() / layers.len()].clone()
        })
    }

    fn model_name(&self, config: &TrainConfig) -> String {
        match config.model.is_resnet() {
            true => format!("{:?}", config.model).to_lowercase(),
            false => {
                format!("{:?} {}", config.model, self.schema.features.network()).to_lowercase()
            }
        }
    }

    fn batch(
        &self,
        part: Part,
        epoch: Option<u64>,
        indices: impl Iterator<Item = usize>,
    ) -> Result<Samples, TrainError> {
        let subset = match part {
            Part::Train => self.train(),
            Part::HeldOut => self.held_out(),
        };
        let indices: Vec<usize> = indices.collect();
        let width = self.schema.features.count();
        let mut values = vec![0.0; indices.len() * width];
        let read = |(index, values): (&usize, &mut [f32])| subset.read(*index, epoch, values);
        let labels: Result<Vec<u32>, _> = match (&self.values, epoch) {
            // Nothing else computes during an evaluation.
            (Values::Images(_), None) => {
                let samples = indices.par_iter().zip(values.par_chunks_mut(width));
                samples.map(read).collect()
            }
            _ => indices
                .iter()
                .zip(values.chunks_mut(width))
                .map(read)
                .collect(),
        };
        let labels = labels?.into_iter().map(|label| label as i32).collect();
        Ok(Samples { values, labels })
    }

    fn loss(&self, model: &Net, batch: &Samples, compute: Compute<'_>) -> Result<Loss, TrainError> {
        let scores = self.scores(model, batch, compute);
        Ok(scores.smoothed_loss(compute.label_smoothing))
    }

    fn evaluate(
        &self,
        model: &Net,
        batch: &Samples,
        compute: Compute<'_>,
    ) -> Result<Sums, TrainError> {
        let scores = self.scores(model, batch, compute);
        let (right, best) = (scores.right.clone(), scores.best()?);
        let sums = scores.sums_with(best.clone())?;
        Ok(sums.with_confusion(&right, &best))
    }

    fn metrics(sums: &Sums) -> Vec<Metric> {
        vec![scores::accuracy(sums)]
    }
}

impl Dataset {
    /// The scores of a batch.
    pub(crate) fn scores(&self, model: &Net, batch: &Samples, compute: Compute<'_>) -> Scores {
        let Compute {
            device, precision, ..
        } = compute;
        let count = batch.labels.len();
        let values = TensorData::new(batch.values.clone(), [count, self.schema.features.count()]);
        let labels = TensorData::new(batch.labels.clone(), [count]);
        let input = Tensor::from_data(values, device);
        let scores = precision.logits(model.forward(self.schema.features, precision.input(input)));
        Scores {
            right: Tensor::from_data(labels, &scores.device()),
            classes: Classes::Whole(scores),
        }
    }
}
