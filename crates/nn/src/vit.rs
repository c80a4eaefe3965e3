//! The Vision Transformer: a classifier of images made of a list of transformer blocks.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Initializer, LayerNorm, LayerNormConfig, Linear};
use burn::tensor::{Device, Tensor};

use crate::transformer::{DEVIATION, TransformerBlock, TransformerBlockConfig, normal};
use crate::{Block, conv2d, in_f32, layer_norm, linear, to_device};

/// Added to variances by all norms.
const EPSILON: f64 = 1e-6;

/// The shape of a [`Vit`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VitConfig {
    /// Values of a pixel.
    pub channels: usize,
    /// Height and width of the images, in pixels.
    pub image: [usize; 2],
    /// Side of a patch, in pixels; it divides both.
    pub patch: usize,
    /// Number of classes.
    pub classes: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Attention heads of a block; they divide `width`.
    pub heads: usize,
    /// Values that represent a patch between blocks.
    pub width: usize,
}

impl VitConfig {
    /// DeiT-Ti for ImageNet, which is timm's `vit_tiny_patch16_224`.
    pub const TINY: Self = Self {
        channels: 3,
        image: [224; 2],
        patch: 16,
        classes: 1000,
        layers: 12,
        heads: 3,
        width: 192,
    };

    /// A model with random weights.
    ///
    /// # Panics
    ///
    /// If the side of a patch does not divide those of an image, or `heads` not `width`.
    #[must_use]
    pub fn init(&self, device: &Device) -> Vit {
        let width = self.width;
        let block = TransformerBlockConfig {
            width,
            heads: self.heads,
            is_causal: false,
            dropout: 0.0,
            epsilon: EPSILON,
            residual_deviation: DEVIATION,
        };
        let norm = LayerNormConfig::new(width).with_epsilon(EPSILON);
        Vit {
            embedding: Block::new(0, VitEmbedding::new(self, device)),
            blocks: (1..=self.layers)
                .map(|index| Block::new(index, block.init(device)))
                .collect(),
            norm: norm.init(device),
            head: Linear {
                weight: normal(DEVIATION).init([width, self.classes], device),
                bias: Some(Initializer::Zeros.init([self.classes], device)),
            },
        }
    }
}

/// A Vision Transformer: pre-norm blocks over patches and a class token, learned positions, GELU.
///
/// *Memory*: about `12 layers width²` parameters.
///
/// *Numerics*: norms run in f32, see [`in_f32`]. There is no dropout.
///
/// *Source*: Dosovitskiy and others 2021, "An Image is Worth 16x16 Words"; sizes and initial weights are those of Touvron and others 2021,
/// "Training data-efficient image transformers" (DeiT).
///
/// *Example*:
/// ```
/// use burn::tensor::{Device, Tensor};
/// use paceline_nn::vit::VitConfig;
///
/// let device = Device::flex();
/// let config = VitConfig { image: [32, 32], patch: 4, classes: 10, ..VitConfig::TINY };
/// let scores = config.init(&device).forward(Tensor::zeros([2, 3, 32, 32], &device));
/// assert_eq!(scores.dims(), [2, 10]);
/// ```
#[derive(Module, Debug)]
pub struct Vit {
    /// Block 0, which makes the input of the others.
    pub embedding: Block<VitEmbedding>,
    /// The blocks from 1 on, in the order of the forward pass.
    pub blocks: Vec<Block<TransformerBlock>>,
    /// The norm before the scores.
    pub norm: LayerNorm,
    /// The scores, from the class token.
    pub head: Linear,
}

impl Vit {
    /// Class scores, on the device of the head.
    ///
    /// *Shape*: `[batch, channels, height, width]` to `[batch, classes]`, for images of the model's size.
    pub fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = self.embedding.forward(x, VitEmbedding::forward);
        let blocks = self.blocks.iter();
        let x = blocks.fold(x, |x, block| block.forward(x, TransformerBlock::forward));
        let [batch, _, width] = x.dims();
        let class = x.narrow(1, 0, 1).reshape([batch, width]);
        let class = to_device(class, &self.head.weight.lazy_device());
        linear(&self.head, in_f32(class, |x| layer_norm(&self.norm, x)))
    }
}

/// The class token and a projection of each patch, plus what stands for their positions.
#[derive(Module, Debug)]
pub struct VitEmbedding {
    /// A convolution whose windows are the patches.
    pub patches: Conv2d,
    /// The class token, `[1, 1, width]`.
    pub class: Param<Tensor<3>>,
    /// Of the class token and of each patch, row by row: `[1, 1 + patches, width]`.
    pub positions: Param<Tensor<3>>,
}

impl VitEmbedding {
    fn new(config: &VitConfig, device: &Device) -> Self {
        let VitConfig { patch, width, .. } = *config;
        let [rows, columns] = config.image.map(|side| {
            assert!(
                patch > 0 && side.is_multiple_of(patch),
                "patches of {patch} pixels do not divide a side of {side}"
            );
            side / patch
        });
        let patches = Conv2dConfig::new([config.channels, width], [patch, patch]);
        let tokens = |count| normal(DEVIATION).init([1, count, width], device);
        Self {
            patches: patches.with_stride([patch, patch]).init(device),
            class: tokens(1),
            positions: tokens(1 + rows * columns),
        }
    }

    /// *Shape*: `[batch, channels, height, width]` to `[batch, 1 + patches, width]`.
    pub fn forward(&self, x: Tensor<4>) -> Tensor<3> {
        let [batch, ..] = x.dims();
        let x = conv2d(&self.patches, x).flatten(2, 3).swap_dims(1, 2);
        let class = self.class.val();
        let width = class.dims()[2];
        Tensor::cat(vec![class.expand([batch, 1, width]), x], 1) + self.positions.val()
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Distribution;

    use super::*;

    #[test]
    fn the_size_is_that_of_deit_ti() {
        // Lazy parameters: nothing is allocated.
        let tiny = VitConfig::TINY.init(&Device::flex());
        assert_eq!(tiny.num_params(), 5_717_416);
    }

    #[test]
    fn scores_depend_on_every_pixel_and_on_the_order_of_patches() {
        let device = Device::flex().autodiff();
        let config = VitConfig {
            channels: 2,
            image: [8, 12],
            patch: 4,
            classes: 3,
            layers: 2,
            heads: 2,
            width: 8,
        };
        let vit = config.init(&device);
        let x = Tensor::<4>::random([1, 2, 8, 12], Distribution::Default, &device).require_grad();
        let scores = vit.forward(x.clone());
        let gradients = scores.clone().powf_scalar(2.0).sum().backward();
        let of_pixels = x.grad(&gradients).expect("a gradient").into_data();
        assert!(of_pixels.iter::<f32>().all(|gradient| gradient != 0.0));
        let turned = Tensor::cat(vec![x.clone().narrow(2, 4, 4), x.narrow(2, 0, 4)], 2);
        assert_ne!(vit.forward(turned).into_data(), scores.into_data());
    }
}
