//! A model of your own that is a list of blocks, whose blocks ranks share: the classifier of two spirals.
//! `cargo build --release --example blocks`, then `target/release/examples/blocks --nproc-per-node 2 --pp 2 --micro-batches 4`.

use burn::module::{Module, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use paceline::ProcessGroup;
use paceline::nn::{cross_entropy, linear, relu};
use paceline::split::pipeline::Sequential;
use paceline::trainer::{
    Compute, Cuts, Loss, Part, SequentialTask, TrainConfig, TrainError, TrainTask,
};

/// Layers, each of which is a block.
#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
}

impl Sequential<2> for Net {
    type Input = Tensor<2>;
    type Output = Tensor<2>;

    fn block_count(&self) -> usize {
        self.layers.len()
    }

    fn parameters_of(&self, block: usize) -> Vec<ParamId> {
        let Linear { weight, bias, .. } = &self.layers[block];
        bias.iter().map(|bias| bias.id).chain([weight.id]).collect()
    }

    fn first(&self, points: Tensor<2>) -> Tensor<2> {
        relu(linear(&self.layers[0], points))
    }

    fn middle(&self, block: usize, x: Tensor<2>) -> Tensor<2> {
        x.clone() + relu(linear(&self.layers[block], x))
    }

    fn last(&self, x: Tensor<2>) -> Tensor<2> {
        linear(&self.layers[self.layers.len() - 1], x)
    }
}

/// Points on two spirals: coordinates, and which of the spirals.
struct Spirals;

impl TrainTask for Spirals {
    type Model = Net;
    type Batch = (Vec<f32>, Vec<i32>);

    fn open(_: &TrainConfig, _: Option<&ProcessGroup>) -> Result<Self, TrainError> {
        Ok(Self)
    }

    fn name(&self) -> &str {
        "spirals"
    }

    fn len(&self, part: Part) -> usize {
        match part {
            Part::Train => 1024,
            Part::HeldOut => 200,
        }
    }

    fn model(&self, _: &TrainConfig, device: &Device) -> Result<Net, TrainError> {
        let sizes = [(2, 32), (32, 32), (32, 32), (32, 32), (32, 32), (32, 2)];
        let layers = sizes.map(|(from, to)| LinearConfig::new(from, to).init(device));
        Ok(Net {
            layers: layers.into(),
        })
    }

    fn batch(
        &self,
        part: Part,
        _: Option<u64>,
        of: impl Iterator<Item = usize>,
    ) -> Result<Self::Batch, TrainError> {
        let point = |index: usize| {
            let (along, side) = (
                (index / 2) as f32 / self.len(part) as f32,
                (index % 2) as f32,
            );
            let angle = 14.0 * along + std::f32::consts::PI * side;
            ([along * angle.cos(), along * angle.sin()], side as i32)
        };
        let (points, sides): (Vec<[f32; 2]>, Vec<i32>) = of.map(point).unzip();
        Ok((points.concat(), sides))
    }

    fn cuts() -> Cuts<Self> {
        Cuts::blocks::<2>()
    }

    fn loss(&self, net: &Net, batch: &Self::Batch, at: Compute<'_>) -> Result<Loss, TrainError> {
        let output = net.forward_blocks(self.input(batch, at.device));
        Ok(self.loss_of(net, batch, output, at))
    }
}

impl SequentialTask<2> for Spirals {
    fn input(&self, (points, sides): &Self::Batch, device: &Device) -> Tensor<2> {
        Tensor::from_data(TensorData::new(points.clone(), [sides.len(), 2]), device)
    }

    fn weight(&self, (_, sides): &Self::Batch) -> f32 {
        sides.len() as f32
    }

    fn loss_of(
        &self,
        _: &Net,
        (_, sides): &Self::Batch,
        scores: Tensor<2>,
        _: Compute<'_>,
    ) -> Loss {
        let right = Tensor::<1, Int>::from_data(&sides[..], &scores.device());
        Loss::new(cross_entropy(scores, right), sides.len())
    }
}

fn main() -> std::process::ExitCode {
    paceline::trainer::run::<Spirals>()
}
