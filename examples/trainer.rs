//! Your own model and data with the trainer and the options of `paceline train`: learns y = sin(x), and reports R² on held-out samples.
//! `cargo build --release --example trainer`, then `target/release/examples/trainer --epochs 5 --nproc-per-node 2`.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};
use paceline::nn::{linear, relu};
use paceline::trainer::{Loss, Metric, Part, Sums, TrainConfig, TrainError, TrainTask};
use paceline::{Precision, ProcessGroup};

#[derive(Module, Debug)]
struct Net {
    layers: [Linear; 2],
}

struct Sine;

impl Sine {
    /// What the model says, and what is right.
    fn outputs(net: &Net, batch: &[f32], device: &Device) -> (Tensor<2>, Tensor<2>) {
        let x = TensorData::new(batch.to_vec(), [batch.len(), 1]);
        let x = Tensor::<2>::from_data(x, device);
        let y = linear(&net.layers[1], relu(linear(&net.layers[0], x.clone())));
        (y, x.sin())
    }
}

impl TrainTask for Sine {
    type Model = Net;
    type Batch = Vec<f32>;

    fn open(_: &TrainConfig, _: Option<&ProcessGroup>) -> Result<Self, TrainError> {
        Ok(Self)
    }

    fn name(&self) -> &str {
        "sine"
    }

    fn len(&self, part: Part) -> usize {
        match part {
            Part::Train => 1024,
            Part::HeldOut => 200,
        }
    }

    fn model(&self, _: &TrainConfig, device: &Device) -> Result<Net, TrainError> {
        let layers = [(1, 64), (64, 1)].map(|(from, to)| LinearConfig::new(from, to).init(device));
        Ok(Net { layers })
    }

    fn batch(
        &self,
        part: Part,
        indices: impl Iterator<Item = usize>,
    ) -> Result<Vec<f32>, TrainError> {
        let step = 6.4 / self.len(part) as f32;
        Ok(indices.map(|index| index as f32 * step - 3.2).collect())
    }

    fn loss(
        &self,
        net: &Net,
        batch: &Vec<f32>,
        _: Precision,
        device: &Device,
    ) -> Result<Loss, TrainError> {
        let (y, right) = Self::outputs(net, batch, device);
        Ok(Loss::new((y - right).square().mean(), batch.len()))
    }

    fn evaluate(
        &self,
        net: &Net,
        batch: &Vec<f32>,
        _: Precision,
        device: &Device,
    ) -> Result<Sums, TrainError> {
        let (y, right) = Self::outputs(net, batch, device);
        let [sum, squares] = [right.clone().sum(), right.clone().square().sum()];
        let loss = Loss::new((y - right).square().mean(), batch.len());
        Ok(Sums::of(loss)
            .with(sum.into_scalar::<f32>().into())
            .with(squares.into_scalar::<f32>().into()))
    }

    fn metrics(sums: &Sums) -> Vec<Metric> {
        let variance = sums.mean(1) - sums.mean(0).powi(2);
        vec![Metric::number("r2", 1.0 - sums.mean_loss() / variance)]
    }
}

fn main() -> std::process::ExitCode {
    paceline::trainer::run::<Sine>()
}
