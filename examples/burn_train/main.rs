//! Ordinary burn-train code, data-parallel by one line.
//!
//! ```text
//! cargo build --release --package burn-train-example
//! cargo run --release -- run --nproc-per-node 2 target/release/burn_train
//! ```
//!
//! Rank 0 shows Burn's own progress lines and summary. Without the launcher it trains on one rank and prints the same hash,
//! because the data is cut into four shards in both cases.

use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep,
    TrainingStrategy,
};
use paceline::{DdpOptions, DdpStrategy, weights};

#[derive(Module, Debug)]
struct Net {
    hidden: Linear,
    output: Linear,
}

impl Net {
    fn classify(&self, batch: Points) -> ClassificationOutput {
        let output = self.output.forward(relu(self.hidden.forward(batch.x)));
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), batch.ring.clone());
        ClassificationOutput::new(loss, output, batch.ring)
    }
}

impl TrainStep for Net {
    type Input = Points;
    type Output = ClassificationOutput;

    fn step(&self, batch: Points) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = Points;
    type Output = ClassificationOutput;

    fn step(&self, batch: Points) -> ClassificationOutput {
        self.classify(batch)
    }
}

/// Points of the plane, each with the number of its ring, one of three.
#[derive(Clone, Debug)]
struct Points {
    x: Tensor<2>,
    ring: Tensor<1, Int>,
}

struct Rings;

impl Batcher<usize, Points> for Rings {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Points {
        let radius = |i: &usize| (i % 3) as f32 + 0.5 + (i % 7) as f32 / 10.0;
        let x = |i: &usize| [radius(i) * (*i as f32).cos(), radius(i) * (*i as f32).sin()];
        let xs: Vec<f32> = items.iter().flat_map(x).collect();
        let rings: Vec<i32> = items.iter().map(|i| (i % 3) as i32).collect();
        Points {
            x: Tensor::from_data(TensorData::new(xs, [items.len(), 2]), device),
            ring: Tensor::from_data(TensorData::new(rings, [items.len()]), device),
        }
    }
}

fn loader(items: std::ops::Range<usize>, batch: usize) -> Arc<dyn DataLoader<Points>> {
    let builder = DataLoaderBuilder::new(Rings).batch_size(batch).shuffle(1);
    builder.build(InMemDataset::new(items.collect()))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let group = paceline::init()?;
    let device = Device::flex().autodiff();
    device.seed(0);
    let model = Net {
        hidden: LinearConfig::new(2, 64).init(&device),
        output: LinearConfig::new(64, 3).init(&device),
    };
    let strategy = DdpStrategy::new(group.clone(), DdpOptions::default());
    // For metrics and checkpoints. To resume, use a folder that all ranks see.
    let directory = tempfile::tempdir()?;
    // The batch size is that of a shard: 4 * 125 samples a step.
    let (train, valid) = (loader(0..3000, 125), loader(3000..3600, 300));
    let result = SupervisedTraining::new(directory.path(), train, valid)
        .with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy))) // the one line
        .metrics((LossMetric::new(), AccuracyMetric::new()))
        .with_application_logger(None)
        .num_epochs(5)
        .summary()
        .launch(Learner::new(model, AdamWConfig::new().init(), 3e-2));
    if let Some(error) = result.error {
        return Err(error.to_string().into());
    }
    let hash = weights::sha256(&weights::export(&result.model));
    println!("rank {}: weights sha256: {hash}", group.rank());
    Ok(())
}
