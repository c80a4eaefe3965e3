//! ViT-Tiny for images of 3x224x224 in patches of 16x16: attention that sees every place.
//!
//! *Source*: Dosovitskiy and others, "An Image is Worth 16x16 Words"; the size is that of Touvron and others, "Training data-efficient image
//! transformers".

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use paceline::in_f32;
use paceline::nn::{attention, conv2d, gelu, layer_norm, linear};

const PATCH: usize = 16;
const PATCHES: usize = (224 / PATCH) * (224 / PATCH);
const WIDTH: usize = 192;
const HEADS: usize = 3;
const LAYERS: usize = 12;

#[derive(Module, Debug)]
pub(crate) struct Vit {
    patches: Conv2d,
    /// What the class is read from, before the patches.
    class: Param<Tensor<3>>,
    places: Param<Tensor<3>>,
    layers: Vec<Layer>,
    norm: LayerNorm,
    head: Linear,
}

impl Vit {
    pub(crate) fn new(device: &Device) -> Self {
        let patches = Conv2dConfig::new([3, WIDTH], [PATCH, PATCH]).with_stride([PATCH, PATCH]);
        let rows = |count: usize| {
            let normal = Initializer::Normal {
                mean: 0.0,
                std: 0.02,
            };
            normal.init([1, count, WIDTH], device)
        };
        Self {
            patches: patches.init(device),
            class: rows(1),
            places: rows(1 + PATCHES),
            layers: (0..LAYERS).map(|_| Layer::new(device)).collect(),
            norm: norm(device),
            head: LinearConfig::new(WIDTH, 1000).init(device),
        }
    }

    /// *Shape*: `[batch, 3, 224, 224]` to `[batch, 1000]`.
    pub(crate) fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let [batch, ..] = x.dims();
        let x = conv2d(&self.patches, x).flatten(2, 3).swap_dims(1, 2);
        let class = self.class.val().expand([batch, 1, WIDTH]);
        let x = Tensor::cat(vec![class, x], 1) + self.places.val();
        let x = self.layers.iter().fold(x, |x, layer| layer.forward(x));
        // The head reads nothing but the class.
        let x = x.narrow(1, 0, 1).reshape([batch, WIDTH]);
        linear(&self.head, in_f32(x, |x| layer_norm(&self.norm, x)))
    }
}

/// Attention and two linear layers, each behind a norm and beside a residual connection.
#[derive(Module, Debug)]
struct Layer {
    attention_norm: LayerNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    feed_norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Layer {
    fn new(device: &Device) -> Self {
        let layer = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            attention_norm: norm(device),
            query: layer(WIDTH, WIDTH),
            key: layer(WIDTH, WIDTH),
            value: layer(WIDTH, WIDTH),
            output: layer(WIDTH, WIDTH),
            feed_norm: norm(device),
            up: layer(WIDTH, 4 * WIDTH),
            down: layer(4 * WIDTH, WIDTH),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let y = in_f32(x.clone(), |x| layer_norm(&self.attention_norm, x));
        let inputs = [&self.query, &self.key, &self.value].map(|layer| linear(layer, y.clone()));
        let x = x + linear(&self.output, attention(inputs, HEADS, false));
        let y = in_f32(x.clone(), |x| layer_norm(&self.feed_norm, x));
        x + linear(&self.down, gelu(linear(&self.up, y)))
    }
}

fn norm(device: &Device) -> LayerNorm {
    LayerNormConfig::new(WIDTH).with_epsilon(1e-6).init(device)
}
