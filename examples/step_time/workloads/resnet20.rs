//! ResNet-20 for images of 3x32x32: many small parameters, and batch normalisation.
//!
//! *Source*: He and others, "Deep Residual Learning for Image Recognition", section 4.2, with 1x1 convolutions where the
//! width changes.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::{Device, FloatDType, Tensor};
use paceline::in_f32;
use paceline::nn::{batch_norm_add_relu, batch_norm_relu, conv2d, linear};

#[derive(Module, Debug)]
pub(crate) struct ResNet20 {
    stem: Convolution,
    blocks: Vec<Block>,
    pool: AdaptiveAvgPool2d,
    head: Linear,
}

impl ResNet20 {
    pub(crate) fn new(device: &Device) -> Self {
        let mut blocks = Vec::new();
        let mut width = 16;
        for stage in [16, 32, 64] {
            for _ in 0..3 {
                blocks.push(Block::new(width, stage, device));
                width = stage;
            }
        }
        Self {
            stem: Convolution::new(3, 16, 1, device),
            blocks,
            pool: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(width, 10).init(device),
        }
    }

    /// *Shape*: `[batch, 3, 32, 32]` to `[batch, 10]`.
    pub(crate) fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = self.stem.forward_relu(x);
        let x = self.blocks.iter().fold(x, |x, block| block.forward(x));
        linear(&self.head, self.pool.forward(x).flatten(1, 3))
    }
}

/// Two convolutions with a residual connection.
#[derive(Module, Debug)]
struct Block {
    first: Convolution,
    second: Convolution,
    /// Present if the block changes the width and halves the size.
    shortcut: Option<Conv2d>,
}

impl Block {
    fn new(input: usize, output: usize, device: &Device) -> Self {
        let stride = if input == output { 1 } else { 2 };
        let shortcut = || {
            let config = Conv2dConfig::new([input, output], [1, 1]);
            config
                .with_stride([stride, stride])
                .with_bias(false)
                .init(device)
        };
        Self {
            first: Convolution::new(input, output, stride, device),
            second: Convolution::new(output, output, 1, device),
            shortcut: (input != output).then(shortcut),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = self.first.forward_relu(x.clone());
        let x = match &self.shortcut {
            Some(shortcut) => conv2d(shortcut, x),
            None => x,
        };
        self.second.forward_add_relu(y, x)
    }
}

/// A 3x3 convolution without bias, and batch normalisation.
#[derive(Module, Debug)]
struct Convolution {
    kernel: Conv2d,
    norm: BatchNorm,
}

impl Convolution {
    fn new(input: usize, output: usize, stride: usize, device: &Device) -> Self {
        let kernel = Conv2dConfig::new([input, output], [3, 3])
            .with_stride([stride, stride])
            .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
            .with_bias(false);
        Self {
            kernel: kernel.init(device),
            norm: BatchNormConfig::new(output).init(device),
        }
    }

    fn forward_relu(&self, x: Tensor<4>) -> Tensor<4> {
        in_f32(conv2d(&self.kernel, x), |x| batch_norm_relu(&self.norm, x))
    }

    fn forward_add_relu(&self, x: Tensor<4>, residual: Tensor<4>) -> Tensor<4> {
        in_f32(conv2d(&self.kernel, x), |x| {
            let residual = residual.cast(FloatDType::F32);
            batch_norm_add_relu(&self.norm, x, residual)
        })
    }
}
