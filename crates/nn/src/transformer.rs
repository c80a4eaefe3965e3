//! The transformer layer of the models here.

use burn::module::{Initializer, Module};
use burn::nn::{Dropout, DropoutConfig, LayerNorm, LayerNormConfig, Linear};
use burn::tensor::{Device, Tensor};

use crate::{attention, gelu, in_f32, last_linear, layer_norm, linear};

/// Standard deviation of the initial weights.
pub(crate) const DEVIATION: f64 = 0.02;

/// The shape of a [`TransformerBlock`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransformerBlockConfig {
    /// Values that represent a place between blocks.
    pub width: usize,
    /// Attention heads; they divide `width`.
    pub heads: usize,
    /// Whether a place sees none after its own.
    pub is_causal: bool,
    /// Share of values that dropout sets to zero during training.
    pub dropout: f64,
    /// Added to variances by the norms.
    pub epsilon: f64,
    /// Standard deviation of the initial weights of the two layers that end in a residual connection.
    pub residual_deviation: f64,
}

impl TransformerBlockConfig {
    /// A block with random weights.
    ///
    /// # Panics
    ///
    /// If `heads` does not divide `width`.
    #[must_use]
    pub fn init(&self, device: &Device) -> TransformerBlock {
        let Self { width, heads, .. } = *self;
        assert!(
            heads > 0 && width.is_multiple_of(heads),
            "{heads} heads do not divide a width of {width}"
        );
        let norm = || {
            let config = LayerNormConfig::new(width).with_epsilon(self.epsilon);
            config.init(device)
        };
        let layer = |from, to, deviation| Linear {
            weight: normal(deviation).init([from, to], device),
            bias: Some(Initializer::Zeros.init([to], device)),
        };
        TransformerBlock {
            attention_norm: norm(),
            query: layer(width, width, DEVIATION),
            key: layer(width, width, DEVIATION),
            value: layer(width, width, DEVIATION),
            output: layer(width, width, self.residual_deviation),
            feed_norm: norm(),
            up: layer(width, 4 * width, DEVIATION),
            down: layer(4 * width, width, self.residual_deviation),
            dropout: DropoutConfig::new(self.dropout).init(),
            heads,
            is_causal: self.is_causal,
        }
    }
}

/// A transformer layer: attention, then two linear layers, each behind a norm and beside a residual connection.
#[derive(Module, Debug)]
pub struct TransformerBlock {
    /// The norm before attention.
    pub attention_norm: LayerNorm,
    /// The queries of all heads, one head after another; so are keys and values.
    pub query: Linear,
    /// The keys.
    pub key: Linear,
    /// The values.
    pub value: Linear,
    /// From the heads back to the width.
    pub output: Linear,
    /// The norm before the two linear layers.
    pub feed_norm: LayerNorm,
    /// The first of them, before GELU.
    pub up: Linear,
    /// The second.
    pub down: Linear,
    /// Acts on both residuals.
    pub dropout: Dropout,
    /// Number of attention heads.
    #[module(skip)]
    pub heads: usize,
    /// Whether a place sees none after its own.
    #[module(skip)]
    pub is_causal: bool,
}

impl TransformerBlock {
    /// *Shape*: `[batch, length, width]`, in and out.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let y = in_f32(x.clone(), |x| layer_norm(&self.attention_norm, x));
        let x = x + self.dropout.forward(self.attend(y));
        let y = in_f32(x.clone(), |x| layer_norm(&self.feed_norm, x));
        let y = last_linear(&self.down, gelu(linear(&self.up, y)));
        x + self.dropout.forward(y)
    }

    fn attend(&self, x: Tensor<3>) -> Tensor<3> {
        let inputs = [&self.query, &self.key, &self.value].map(|layer| linear(layer, x.clone()));
        linear(&self.output, attention(inputs, self.heads, self.is_causal))
    }
}

pub(crate) fn normal(std: f64) -> Initializer {
    Initializer::Normal { mean: 0.0, std }
}
