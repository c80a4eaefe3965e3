//! The built-in networks: a small convolutional one, residual ones and a Vision Transformer for images, a multi-layer perceptron for tables.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig, PaddingConfig2d,
};
use burn::tensor::{Device, Tensor};
use paceline_ddp::in_f32;
use paceline_nn::resnet::{Basic, Bottleneck, ResNet};
use paceline_nn::vit::{Vit, VitConfig};
use paceline_nn::{batch_norm_relu, conv2d, linear, relu, to_device};
use paceline_split::ModelParallel;

use crate::classify::Network;
use crate::config::{ModelSize, TrainConfig};
use crate::data::Features;
use crate::error::TrainError;

/// Side of the classifier's input feature map, for images of any size.
pub(crate) const POOLED_SIDE: usize = 4;

/// Dropout rate of the hidden units.
const DROPOUT: f64 = 0.25;

/// The names of the modules in each of four parts of a Vision Transformer, for networks on several devices.
const VIT_LAYERS: [&[&str]; 4] = [
    &["embedding", "0", "1", "2"],
    &["3", "4", "5"],
    &["6", "7", "8"],
    &["9", "10", "11", "norm", "head"],
];

/// A classifier for a data set.
#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "one per process")]
pub enum Net {
    /// For images.
    Conv(ConvNet),
    /// ResNet-20 or ResNet-18.
    Basic(ResNet<Basic>),
    /// ResNet-50.
    Bottleneck(ResNet<Bottleneck>),
    /// A Vision Transformer.
    Vit(Vit),
    /// For values without a shape.
    Mlp(Mlp),
}

impl Net {
    /// A network with random weights.
    ///
    /// # Panics
    ///
    /// If `size` is a Vision Transformer whose patches do not divide the images.
    pub fn new(features: Features, classes: usize, size: ModelSize, device: &Device) -> Self {
        match features {
            Features::Image {
                height,
                width,
                channels,
            } => match size {
                ModelSize::Resnet20 => Self::Basic(ResNet::resnet20(channels, classes, device)),
                ModelSize::Resnet18 => Self::Basic(ResNet::resnet18(channels, classes, device)),
                ModelSize::Resnet50 => {
                    Self::Bottleneck(ResNet::resnet50(channels, classes, device))
                }
                ModelSize::VitTiny => {
                    let config = VitConfig {
                        channels,
                        image: [height, width],
                        patch: patch_side([height, width]),
                        classes,
                        ..VitConfig::TINY
                    };
                    Self::Vit(config.init(device))
                }
                _ => Self::Conv(ConvNet::new(channels, classes, size, device)),
            },
            Features::Flat { count } => Self::Mlp(Mlp::new(count, classes, size, device)),
        }
    }

    /// The names of the modules in each layer.
    pub(crate) fn layers(&self) -> &'static [&'static [&'static str]] {
        match self {
            Self::Conv(_) => &ConvNet::LAYERS,
            Self::Basic(net) => net.layers(),
            Self::Bottleneck(net) => net.layers(),
            Self::Vit(_) => &VIT_LAYERS,
            Self::Mlp(_) => &Mlp::LAYERS,
        }
    }
}

impl Network for Net {
    fn init(
        config: &TrainConfig,
        features: Features,
        outputs: usize,
        device: &Device,
    ) -> Result<Self, TrainError> {
        config.model.fits(features).map_err(|why| {
            TrainError::usage(why, "choose another --model, or images of another size")
        })?;
        Ok(Self::new(features, outputs, config.model, device))
    }

    /// On the device of the last layer; normalisation is in f32.
    fn forward(&self, features: Features, input: Tensor<2>) -> Tensor<2> {
        let [batch, _] = input.dims();
        let images = || match features {
            Features::Image {
                height,
                width,
                channels,
            } => input.clone().reshape([batch, channels, height, width]),
            Features::Flat { count } => input.clone().reshape([batch, count, 1, 1]),
        };
        match self {
            Self::Conv(net) => net.forward(images()),
            Self::Basic(net) => net.forward(images()),
            Self::Bottleneck(net) => net.forward(images()),
            Self::Vit(net) => net.forward(images()),
            Self::Mlp(net) => net.forward(input),
        }
    }

    fn name(config: &TrainConfig, features: Features) -> String {
        let name = config.model.name();
        match config.model.is_of_images() {
            true => name,
            false => format!("{name} {}", features.network()),
        }
    }

    fn parts(features: Features) -> usize {
        match features {
            Features::Image { .. } => ConvNet::LAYERS.len(),
            Features::Flat { .. } => Mlp::LAYERS.len(),
        }
    }

    fn place(self, devices: &[Device]) -> Self {
        let layers = self.layers();
        ModelParallel::place_by(self, |part| {
            let of = |layer: &&[&str]| part.path.split('.').any(|name| layer.contains(&name));
            let layer = layers.iter().position(of).unwrap_or(0);
            devices[layer * devices.len() / layers.len()].clone()
        })
    }

    fn size(config: &TrainConfig) -> Option<ModelSize> {
        Some(config.model)
    }
}

impl ModelSize {
    /// Whether the network can be of such samples.
    ///
    /// *Errors*: why not, in words.
    pub(crate) fn fits(self, features: Features) -> Result<(), String> {
        let Features::Image { height, width, .. } = features else {
            return Ok(());
        };
        let patch = patch_side([height, width]);
        let is_whole = height.is_multiple_of(patch) && width.is_multiple_of(patch);
        match self == Self::VitTiny && !is_whole {
            false => Ok(()),
            true => Err(format!(
                "vit-tiny cuts images of {height} x {width} pixels into patches of {patch} x {patch}, which do not divide them"
            )),
        }
    }
}

/// Side of the patches of an image with these sides, in pixels: 16 as for ImageNet, or less, so that a small image has some 64 patches too.
pub(crate) fn patch_side(sides: [usize; 2]) -> usize {
    match sides.into_iter().min() {
        Some(128..) => VitConfig::TINY.patch,
        Some(64..) => 8,
        _ => 4,
    }
}

/// Two convolutions with batch normalisation, pooling, and a hidden layer with dropout.
#[derive(Module, Debug)]
pub struct ConvNet {
    conv1: Conv2d,
    norm1: BatchNorm,
    conv2: Conv2d,
    norm2: BatchNorm,
    pool: AdaptiveAvgPool2d,
    hidden: Linear,
    dropout: Dropout,
    output: Linear,
}

impl ConvNet {
    pub(crate) const LAYERS: [&[&str]; 4] = [
        &["conv1", "norm1"],
        &["conv2", "norm2"],
        &["hidden"],
        &["output"],
    ];

    fn new(channels: usize, classes: usize, size: ModelSize, device: &Device) -> Self {
        let (first, second, hidden) = match size {
            ModelSize::Tiny => (4, 8, 16),
            ModelSize::Base => (32, 64, 128),
            // The other sizes are those of language models.
            _ => (16, 32, 64),
        };
        let conv = |from: usize, to: usize| {
            // No bias: batch normalisation follows and has its own.
            Conv2dConfig::new([from, to], [3, 3])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .with_bias(false)
                .init(device)
        };
        Self {
            conv1: conv(channels, first),
            norm1: BatchNormConfig::new(first).init(device),
            conv2: conv(first, second),
            norm2: BatchNormConfig::new(second).init(device),
            pool: AdaptiveAvgPool2dConfig::new([POOLED_SIDE, POOLED_SIDE]).init(),
            hidden: LinearConfig::new(second * POOLED_SIDE * POOLED_SIDE, hidden).init(device),
            dropout: DropoutConfig::new(DROPOUT).init(),
            output: LinearConfig::new(hidden, classes).init(device),
        }
    }

    fn forward(&self, input: Tensor<4>) -> Tensor<2> {
        let x = conv2d(&self.conv1, input);
        let x = in_f32(x, |x| batch_norm_relu(&self.norm1, x));
        let x = conv2d(&self.conv2, near(x, &self.conv2.weight));
        let x = in_f32(x, |x| batch_norm_relu(&self.norm2, x));
        let x: Tensor<2> = self.pool.forward(x).flatten(1, 3);
        let x = linear(&self.hidden, near(x, &self.hidden.weight));
        let x = self.dropout.forward(relu(x));
        linear(&self.output, near(x, &self.output.weight))
    }
}

/// Two hidden layers with batch normalisation and dropout.
#[derive(Module, Debug)]
pub struct Mlp {
    first: Linear,
    norm: BatchNorm,
    second: Linear,
    dropout: Dropout,
    output: Linear,
}

impl Mlp {
    pub(crate) const LAYERS: [&[&str]; 3] = [&["first", "norm"], &["second"], &["output"]];

    fn new(inputs: usize, classes: usize, size: ModelSize, device: &Device) -> Self {
        let hidden = match size {
            ModelSize::Tiny => 16,
            ModelSize::Base => 512,
            _ => 128,
        };
        Self {
            first: LinearConfig::new(inputs, hidden).init(device),
            norm: BatchNormConfig::new(hidden).init(device),
            second: LinearConfig::new(hidden, hidden).init(device),
            dropout: DropoutConfig::new(DROPOUT).init(),
            output: LinearConfig::new(hidden, classes).init(device),
        }
    }

    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        let x = relu(in_f32(linear(&self.first, input), |x| self.norm.forward(x)));
        let x = linear(&self.second, near(x, &self.second.weight));
        let x = self.dropout.forward(relu(x));
        linear(&self.output, near(x, &self.output.weight))
    }
}

/// `x` on the device of `weight`, if layers are on several devices.
fn near<const D: usize, const E: usize>(x: Tensor<D>, weight: &Param<Tensor<E>>) -> Tensor<D> {
    to_device(x, &weight.lazy_device())
}
