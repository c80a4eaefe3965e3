//! ResNet-50 for images of 3x224x224: many convolutions, and layers whose activations outgrow the caches.
//!
//! *Source*: He and others, "Deep Residual Learning for Image Recognition", with the stride on a block's 3x3 convolution, as in torchvision.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::{Device, Tensor};
use paceline::in_f32;
use paceline::nn::{batch_norm, conv2d, linear, relu};

/// Blocks of each stage and their inner width.
const STAGES: [(usize, usize); 4] = [(3, 64), (4, 128), (6, 256), (3, 512)];

#[derive(Module, Debug)]
pub(crate) struct ResNet50 {
    stem: Convolution,
    largest: MaxPool2d,
    blocks: Vec<Bottleneck>,
    mean: AdaptiveAvgPool2d,
    head: Linear,
}

impl ResNet50 {
    pub(crate) fn new(device: &Device) -> Self {
        let mut blocks = Vec::new();
        let mut width = 64;
        for (stage, (count, inner)) in STAGES.into_iter().enumerate() {
            for block in 0..count {
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                blocks.push(Bottleneck::new(width, inner, stride, device));
                width = 4 * inner;
            }
        }
        let largest = MaxPool2dConfig::new([3, 3])
            .with_strides([2, 2])
            .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1));
        Self {
            stem: Convolution::new([3, 64], 7, 2, device),
            largest: largest.init(),
            blocks,
            mean: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(width, 1000).init(device),
        }
    }

    /// *Shape*: `[batch, 3, 224, 224]` to `[batch, 1000]`.
    pub(crate) fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = self.largest.forward(relu(self.stem.forward(x)));
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        linear(&self.head, self.mean.forward(x).flatten(1, 3))
    }
}

/// A 3x3 convolution between two of 1x1, with a residual connection.
#[derive(Module, Debug)]
struct Bottleneck {
    narrow: Convolution,
    middle: Convolution,
    widen: Convolution,
    /// Present if the block changes the width.
    shortcut: Option<Convolution>,
}

impl Bottleneck {
    fn new(input: usize, inner: usize, stride: usize, device: &Device) -> Self {
        let output = 4 * inner;
        let shortcut = || Convolution::new([input, output], 1, stride, device);
        Self {
            narrow: Convolution::new([input, inner], 1, 1, device),
            middle: Convolution::new([inner, inner], 3, stride, device),
            widen: Convolution::new([inner, output], 1, 1, device),
            shortcut: (input != output).then(shortcut),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = relu(self.narrow.forward(x.clone()));
        let y = self.widen.forward(relu(self.middle.forward(y)));
        let x = match &self.shortcut {
            Some(shortcut) => shortcut.forward(x),
            None => x,
        };
        relu(y + x)
    }
}

/// A convolution without bias that pads by half its side, and batch normalisation.
#[derive(Module, Debug)]
struct Convolution {
    kernel: Conv2d,
    norm: BatchNorm,
}

impl Convolution {
    fn new(channels: [usize; 2], side: usize, stride: usize, device: &Device) -> Self {
        let pad = side / 2;
        let kernel = Conv2dConfig::new(channels, [side, side])
            .with_stride([stride, stride])
            .with_padding(PaddingConfig2d::Explicit(pad, pad, pad, pad))
            .with_bias(false);
        Self {
            kernel: kernel.init(device),
            norm: BatchNormConfig::new(channels[1]).init(device),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        in_f32(conv2d(&self.kernel, x), |x| batch_norm(&self.norm, x))
    }
}
