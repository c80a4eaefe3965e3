//! Residual networks for images: ResNet-20 for small ones, ResNet-18 and ResNet-50 for those of ImageNet's size.
//!
//! *Source*: He and others 2016, "Deep Residual Learning for Image Recognition". ResNet-18 and ResNet-50 are those of torchvision, with the stride on
//! the 3x3 convolution of a bottleneck; ResNet-20 has 1x1 convolutions without a norm where the width changes.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::{Device, FloatDType, Tensor};

use crate::{batch_norm, batch_norm_add_relu, batch_norm_relu, conv2d, in_f32, linear, to_device};

/// A residual network.
///
/// *Example*:
/// ```
/// use burn::tensor::{Device, Tensor};
/// use paceline_nn::resnet::ResNet;
///
/// let device = Device::flex();
/// let net = ResNet::resnet20(3, 10, &device);
/// let scores = net.forward(Tensor::zeros([2, 3, 32, 32], &device));
/// assert_eq!(scores.dims(), [2, 10]);
/// ```
#[derive(Module, Debug)]
pub struct ResNet<B: Residual> {
    stem: Convolution,
    /// After the stem of a network for large images.
    largest: Option<MaxPool2d>,
    blocks: Vec<B>,
    mean: AdaptiveAvgPool2d,
    head: Linear,
}

/// A block of a [`ResNet`].
pub trait Residual: Module {
    /// Applies the block.
    ///
    /// *Shape*: `[batch, input, height, width]` to `[batch, output, height, width]`, with the sides divided by the stride.
    fn forward(&self, x: Tensor<4>) -> Tensor<4>;

    /// Where the block begins.
    fn device(&self) -> Device;
}

impl ResNet<Basic> {
    /// ResNet-20, for images of 32x32 pixels.
    #[must_use]
    pub fn resnet20(channels: usize, classes: usize, device: &Device) -> Self {
        let stem = Convolution::new([channels, 16], 3, 1, device);
        let stages = [(3, 16), (3, 32), (3, 64)];
        let (blocks, width) = stacked(16, 1, &stages, |widths, stride| {
            Basic::new(widths, stride, false, device)
        });
        Self::new(stem, None, blocks, [width, classes], device)
    }

    /// ResNet-18, for images of 224x224 pixels.
    #[must_use]
    pub fn resnet18(channels: usize, classes: usize, device: &Device) -> Self {
        let stem = Convolution::new([channels, 64], 7, 2, device);
        let stages = [(2, 64), (2, 128), (2, 256), (2, 512)];
        let (blocks, width) = stacked(64, 1, &stages, |widths, stride| {
            Basic::new(widths, stride, true, device)
        });
        Self::new(stem, Some(largest()), blocks, [width, classes], device)
    }
}

impl ResNet<Bottleneck> {
    /// ResNet-50, for images of 224x224 pixels.
    #[must_use]
    pub fn resnet50(channels: usize, classes: usize, device: &Device) -> Self {
        let stem = Convolution::new([channels, 64], 7, 2, device);
        let stages = [(3, 64), (4, 128), (6, 256), (3, 512)];
        let (blocks, width) = stacked(64, Bottleneck::WIDENED, &stages, |widths, stride| {
            Bottleneck::new(widths, stride, device)
        });
        Self::new(stem, Some(largest()), blocks, [width, classes], device)
    }
}

impl<B: Residual> ResNet<B> {
    fn new(
        stem: Convolution,
        largest: Option<MaxPool2d>,
        blocks: Vec<B>,
        [width, classes]: [usize; 2],
        device: &Device,
    ) -> Self {
        Self {
            stem,
            largest,
            blocks,
            mean: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(width, classes).init(device),
        }
    }

    /// The names of the modules in each of four parts, for networks on several devices. The path of a parameter contains one of them.
    #[must_use]
    pub fn layers(&self) -> &'static [&'static [&'static str]] {
        match self.blocks.len() {
            8 => &[
                &["stem", "0", "1"],
                &["2", "3"],
                &["4", "5"],
                &["6", "7", "head"],
            ],
            9 => &[
                &["stem", "0", "1"],
                &["2", "3"],
                &["4", "5", "6"],
                &["7", "8", "head"],
            ],
            _ => &[
                &["stem", "0", "1", "2"],
                &["3", "4", "5", "6"],
                &["7", "8", "9", "10", "11"],
                &["12", "13", "14", "15", "head"],
            ],
        }
    }

    /// Class scores, on the device of the last layer.
    ///
    /// *Shape*: `[batch, channels, height, width]` to `[batch, classes]`, in the type of the weights; normalisation is in f32.
    pub fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = self.stem.forward_relu(x);
        let x = match &self.largest {
            Some(largest) => largest.forward(x),
            None => x,
        };
        let next = |x, block: &B| block.forward(to_device(x, &block.device()));
        let x = self.blocks.iter().fold(x, next);
        let x: Tensor<2> = self.mean.forward(x).flatten(1, 3);
        linear(&self.head, to_device(x, &self.head.weight.lazy_device()))
    }
}

/// The blocks of all stages, each a number of blocks and their inner width, and the width that they end with.
fn stacked<B>(
    mut width: usize,
    widened: usize,
    stages: &[(usize, usize)],
    block: impl Fn([usize; 2], usize) -> B,
) -> (Vec<B>, usize) {
    let mut blocks = Vec::new();
    for (stage, (count, inner)) in stages.iter().enumerate() {
        for index in 0..*count {
            let stride = if stage > 0 && index == 0 { 2 } else { 1 };
            blocks.push(block([width, *inner], stride));
            width = widened * inner;
        }
    }
    (blocks, width)
}

/// The pooling behind the stem of a network for large images.
fn largest() -> MaxPool2d {
    let config = MaxPool2dConfig::new([3, 3]).with_strides([2, 2]);
    let config = config.with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1));
    config.init()
}

/// Two 3x3 convolutions with a residual connection.
#[derive(Module, Debug)]
pub struct Basic {
    first: Convolution,
    second: Convolution,
    /// Present if the block changes the width and halves the size.
    shortcut: Option<Conv2d>,
    shortcut_norm: Option<BatchNorm>,
}

impl Basic {
    fn new(widths: [usize; 2], stride: usize, has_norms: bool, device: &Device) -> Self {
        let [input, output] = widths;
        let is_changed = input != output;
        let shortcut = is_changed.then(|| convolution(widths, 1, stride, device));
        let norm = || BatchNormConfig::new(output).init(device);
        Self {
            first: Convolution::new(widths, 3, stride, device),
            second: Convolution::new([output, output], 3, 1, device),
            shortcut,
            shortcut_norm: (is_changed && has_norms).then(norm),
        }
    }
}

impl Residual for Basic {
    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = self.first.forward_relu(x.clone());
        let x = match &self.shortcut {
            Some(shortcut) => conv2d(shortcut, x),
            None => x,
        };
        let x = match &self.shortcut_norm {
            Some(norm) => in_f32(x, |x| batch_norm(norm, x)),
            None => x,
        };
        self.second.forward_add_relu(y, x)
    }

    fn device(&self) -> Device {
        self.first.kernel.weight.lazy_device()
    }
}

/// A 3x3 convolution between two of 1x1, with a residual connection.
#[derive(Module, Debug)]
pub struct Bottleneck {
    narrow: Convolution,
    middle: Convolution,
    widen: Convolution,
    /// Present if the block changes the width.
    shortcut: Option<Convolution>,
}

impl Bottleneck {
    /// The width of a block's output in inner widths.
    const WIDENED: usize = 4;

    fn new([input, inner]: [usize; 2], stride: usize, device: &Device) -> Self {
        let output = Self::WIDENED * inner;
        let shortcut = || Convolution::new([input, output], 1, stride, device);
        Self {
            narrow: Convolution::new([input, inner], 1, 1, device),
            middle: Convolution::new([inner, inner], 3, stride, device),
            widen: Convolution::new([inner, output], 1, 1, device),
            shortcut: (input != output).then(shortcut),
        }
    }
}

impl Residual for Bottleneck {
    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = self.narrow.forward_relu(x.clone());
        let y = self.middle.forward_relu(y);
        let x = match &self.shortcut {
            Some(shortcut) => shortcut.forward(x),
            None => x,
        };
        self.widen.forward_add_relu(y, x)
    }

    fn device(&self) -> Device {
        self.narrow.kernel.weight.lazy_device()
    }
}

/// A convolution without bias, and batch normalisation.
#[derive(Module, Debug)]
struct Convolution {
    kernel: Conv2d,
    norm: BatchNorm,
}

impl Convolution {
    fn new(widths: [usize; 2], side: usize, stride: usize, device: &Device) -> Self {
        Self {
            kernel: convolution(widths, side, stride, device),
            norm: BatchNormConfig::new(widths[1]).init(device),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        in_f32(conv2d(&self.kernel, x), |x| batch_norm(&self.norm, x))
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

/// A convolution without bias that pads by half its side.
fn convolution(widths: [usize; 2], side: usize, stride: usize, device: &Device) -> Conv2d {
    let pad = side / 2;
    let config = Conv2dConfig::new(widths, [side, side]).with_stride([stride, stride]);
    let config = config.with_padding(PaddingConfig2d::Explicit(pad, pad, pad, pad));
    config.with_bias(false).init(device)
}
