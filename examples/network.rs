//! Your own model on the data that `paceline train` reads, with its losses and all of its options: a table, images, IDX files, or the digits.
//! `cargo build --release --example network`, then
//! `target/release/examples/network --data digits/png --epochs 10 --mixup 0.2 --nproc-per-node 2`.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use paceline::nn::{gelu, linear};
use paceline::trainer::{Features, Network, Supervised, TrainConfig, TrainError};

const WIDTH: usize = 64;

/// A perceptron whose hidden layers add to their input.
#[derive(Module, Debug)]
struct Residual {
    first: Linear,
    layers: Vec<Linear>,
    last: Linear,
}

impl Network for Residual {
    fn init(
        _: &TrainConfig,
        features: Features,
        outputs: usize,
        device: &Device,
    ) -> Result<Self, TrainError> {
        let layer = |from, to| LinearConfig::new(from, to).init(device);
        Ok(Self {
            first: layer(features.count(), WIDTH),
            layers: (0..2).map(|_| layer(WIDTH, WIDTH)).collect(),
            last: layer(WIDTH, outputs),
        })
    }

    fn forward(&self, _: Features, input: Tensor<2>) -> Tensor<2> {
        let first = linear(&self.first, input);
        let add = |x: Tensor<2>, layer| x.clone() + linear(layer, gelu(x));
        linear(&self.last, self.layers.iter().fold(first, add))
    }
}

fn main() -> std::process::ExitCode {
    paceline::trainer::run::<Supervised<Residual>>()
}
