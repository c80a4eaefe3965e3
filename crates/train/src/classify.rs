//! Classification of labelled samples, as a task.

use burn::tensor::{Device, Tensor, TensorData};
use paceline_collective::ProcessGroup;
use paceline_ddp::Precision;
use paceline_split::ModelParallel;

use crate::config::TrainConfig;
use crate::data::{self, Dataset, Features};
use crate::error::TrainError;
use crate::layout::Layout;
use crate::model::{ConvNet, Mlp, Net};
use crate::report::plural;
use crate::scores::{Classes, Scores};
use crate::task::{Part, TrainTask, Unit};

/// Samples of one evaluation batch.
const EVALUATION_BATCH: usize = 256;

/// Samples in plain memory.
pub(crate) struct Samples {
    values: Vec<f32>,
    labels: Vec<i32>,
}

impl TrainTask for Dataset {
    type Model = Net;
    type Batch = Samples;

    const UNIT: Unit = Unit::Samples;
    const SAMPLE: &'static str = "sample";

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
            plural(self.classes as u64, "class"),
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
                label.copied().unwrap_or_default()
            )
        });
        let classes = (self.classes > samples).then(|| {
            format!(
                "{} has {} for {}: labels are class numbers from 0, and the largest is {}",
                self.name,
                plural(self.classes as u64, "class"),
                plural(samples as u64, "training sample"),
                self.classes - 1
            )
        });
        one_class.into_iter().chain(classes).collect()
    }

    fn len(&self, part: Part) -> usize {
        match part {
            Part::Train => self.train().len(),
            Part::HeldOut => self.held_out().len(),
        }
    }

    fn evaluation_batch(&self) -> usize {
        EVALUATION_BATCH
    }

    /// The input scaling and the class names.
    fn metadata(&self) -> Vec<(&'static str, String)> {
        let json = |value: Result<String, serde_json::Error>| value.expect("it always encodes");
        let classes: Vec<String> = (0..self.classes).map(|class| class.to_string()).collect();
        vec![
            ("data", self.name.clone()),
            ("features", json(serde_json::to_string(&self.features))),
            ("scaling", json(serde_json::to_string(&self.scaling))),
            ("classes", json(serde_json::to_string(&classes))),
        ]
    }

    fn model(&self, config: &TrainConfig, device: &Device, _: &Layout) -> Result<Net, TrainError> {
        Ok(Net::new(self.features, self.classes, config.model, device))
    }

    fn parts(&self) -> usize {
        match self.features {
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
        format!("{:?} {}", config.model, self.features.network()).to_lowercase()
    }

    fn batch(&self, part: Part, indices: impl Iterator<Item = usize>) -> Samples {
        let subset = match part {
            Part::Train => self.train(),
            Part::HeldOut => self.held_out(),
        };
        let mut samples = Samples {
            values: Vec::new(),
            labels: Vec::new(),
        };
        for index in indices {
            let (values, label) = subset.sample(index);
            samples.values.extend_from_slice(values);
            samples.labels.push(label as i32);
        }
        samples
    }

    fn scores(
        &self,
        model: &Net,
        batch: &Samples,
        precision: Precision,
        device: &Device,
    ) -> Scores {
        let count = batch.labels.len();
        let values = TensorData::new(batch.values.clone(), [count, self.features.count()]);
        let labels = TensorData::new(batch.labels.clone(), [count]);
        let input = Tensor::from_data(values, device);
        let scores = precision.logits(model.forward(precision.input(input)));
        Scores {
            right: Tensor::from_data(labels, &scores.device()),
            classes: Classes::Whole(scores),
        }
    }
}
