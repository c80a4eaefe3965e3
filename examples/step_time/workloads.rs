//! The timed workloads: their shapes, synthetic data and sizes.

pub(crate) mod mlp;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use paceline::Precision;
use paceline::nn::gpt::{Gpt, GptConfig};
use paceline::nn::resnet::{Basic, Bottleneck, ResNet};
use paceline::nn::vit::{Vit, VitConfig};

use mlp::Mlp;

/// A model and its data.
pub(crate) trait Workload: Module {
    /// The model's input.
    type Input: Clone;

    const NAME: &'static str;
    /// Default number of samples per shard.
    const BATCH: usize;

    fn new(device: &Device) -> Self;

    /// A shard's synthetic inputs in this precision and their classes, the same on every device. Step time does not depend on
    /// their values.
    fn samples(
        batch: usize,
        shard: usize,
        precision: Precision,
        device: &Device,
    ) -> (Self::Input, Tensor<1, Int>);

    /// Class scores, one row per prediction.
    fn scores(&self, input: Self::Input) -> Tensor<2>;
}

/// A network that classifies noise of this shape.
macro_rules! classifies_images {
    ($net:ty, $new:expr, $name:literal, $batch:literal, [$($side:literal),+], $rank:literal) => {
        impl Workload for $net {
            type Input = Tensor<$rank>;

            const NAME: &'static str = $name;
            const BATCH: usize = $batch;

            fn new(device: &Device) -> Self {
                $new(device)
            }

            fn samples(
                batch: usize,
                shard: usize,
                precision: Precision,
                device: &Device,
            ) -> (Self::Input, Tensor<1, Int>) {
                images([batch, $($side),+], shard, precision, device)
            }

            fn scores(&self, input: Self::Input) -> Tensor<2> {
                self.forward(input)
            }
        }
    };
}

/// Many small parameters, and batch normalisation.
pub(crate) type ResNet20 = ResNet<Basic>;

/// Many convolutions, and layers whose activations outgrow the caches.
pub(crate) type ResNet50 = ResNet<Bottleneck>;

fn resnet20(device: &Device) -> ResNet20 {
    ResNet::resnet20(3, 10, device)
}

fn resnet50(device: &Device) -> ResNet50 {
    ResNet::resnet50(3, 1000, device)
}

fn vit(device: &Device) -> Vit {
    VitConfig::TINY.init(device)
}

classifies_images!(Mlp, Mlp::new, "mlp", 128, [784], 2);
classifies_images!(ResNet20, resnet20, "resnet20", 64, [3, 32, 32], 4);
classifies_images!(ResNet50, resnet50, "resnet50", 4, [3, 224, 224], 4);
classifies_images!(Vit, vit, "vit", 8, [3, 224, 224], 4);

const GPT: GptConfig = GptConfig {
    vocabulary: 512,
    context: 128,
    layers: 4,
    heads: 4,
    width: 256,
    dropout: 0.0,
};

impl Workload for Gpt {
    type Input = Tensor<2, Int>;

    const NAME: &'static str = "gpt";
    const BATCH: usize = 8;

    fn new(device: &Device) -> Self {
        GPT.init(device)
    }

    fn samples(
        batch: usize,
        shard: usize,
        _: Precision,
        device: &Device,
    ) -> (Self::Input, Tensor<1, Int>) {
        let count = batch * GPT.context;
        let text = |from: usize| -> Vec<i32> {
            (from..from + count)
                .map(|at| ((at + 37 * shard) % 500) as i32)
                .collect()
        };
        let tokens = Tensor::from_data(TensorData::new(text(0), [batch, GPT.context]), device);
        let next = Tensor::from_data(TensorData::new(text(1), [count]), device);
        (tokens, next)
    }

    fn scores(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        self.forward(tokens).flatten(0, 1)
    }
}

/// Noise of this shape, one sample per row, and a class for each sample.
fn images<const D: usize>(
    shape: [usize; D],
    shard: usize,
    precision: Precision,
    device: &Device,
) -> (Tensor<D>, Tensor<1, Int>) {
    let data = TensorData::new(noise(shard, shape.iter().product()), shape);
    let images = precision.input(Tensor::from_data(data, device));
    (images, digits(shape[0], device))
}

/// `count` values from -1 to 1 that differ between shards.
fn noise(shard: usize, count: usize) -> Vec<f32> {
    let mut state = shard as u64;
    // SplitMix64; an f32 holds the upper 24 bits exactly.
    let value = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(value).take(count).collect()
}

/// The classes 0 to 9 in turn.
fn digits(batch: usize, device: &Device) -> Tensor<1, Int> {
    let classes: Vec<i32> = (0..batch as i32).map(|sample| sample % 10).collect();
    Tensor::from_data(TensorData::new(classes, [batch]), device)
}
