//! Your own model and data, with the trainer and the options of `paceline train`: learns y = sin(x).
//! `cargo build --release --example trainer`, then `target/release/examples/trainer --epochs 5 --nproc-per-node 2`.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};
use paceline::ProcessGroup;
use paceline::nn::{linear, relu};
use paceline::trainer::{Compute, Loss, Metric, Part, Sums, TrainConfig, TrainError, TrainTask};

#[derive(Module, Debug)]
struct Net {
    layers: [Linear; 2],
}

impl Net {
    /// What is wrong with the results for these inputs.
    fn errors(&self, x: &[f32], device: &Device) -> Tensor<2> {
        let x = Tensor::<2>::from_data(TensorData::new(x.to_vec(), [x.len(), 1]), device);
        let y = linear(&self.layers[1], relu(linear(&self.layers[0], x.clone())));
        y - x.sin()
    }
}

struct Sine;

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
        _: Option<u64>,
        of: impl Iterator<Item = usize>,
    ) -> Result<Vec<f32>, TrainError> {
        let step = 6.4 / self.len(part) as f32;
        Ok(of.map(|index| index as f32 * step - 3.2).collect())
    }

    fn loss(&self, net: &Net, x: &Vec<f32>, at: Compute<'_>) -> Result<Loss, TrainError> {
        let errors = net.errors(x, at.device);
        Ok(Loss::new(errors.square().mean(), x.len()))
    }

    fn evaluate(&self, net: &Net, x: &Vec<f32>, at: Compute<'_>) -> Result<Sums, TrainError> {
        let errors = net.errors(x, at.device).abs().sum();
        let sums = Sums::of(self.loss(net, x, at)?);
        Ok(sums.with(errors.into_scalar::<f32>().into()))
    }

    fn metrics(&self, sums: &Sums) -> Vec<Metric> {
        vec![Metric::number("mae", sums.mean(0))] // the mean absolute error
    }
}

fn main() -> std::process::ExitCode {
    paceline::trainer::run::<Sine>()
}
