//! GPT: a language model made of a list of transformer blocks.

use burn::module::{Initializer, Module};
use burn::nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
};
use burn::tensor::{Device, Int, Tensor};
use serde::{Deserialize, Serialize};

use crate::{Block, attention, gelu, in_f32, last_linear, layer_norm, linear, scores, to_device};

/// Standard deviation of the initial weights.
const DEVIATION: f64 = 0.02;

/// The shape of a [`Gpt`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GptConfig {
    /// Number of different tokens.
    pub vocabulary: usize,
    /// Most tokens of a sequence.
    pub context: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Attention heads of a block; they divide `width`.
    pub heads: usize,
    /// Values that represent a token between blocks.
    pub width: usize,
    /// Share of values that dropout sets to zero during training.
    pub dropout: f64,
}

impl GptConfig {
    /// A model with random weights.
    ///
    /// # Panics
    ///
    /// If `heads` does not divide `width`.
    #[must_use]
    pub fn init(&self, device: &Device) -> Gpt {
        let Self { width, heads, .. } = *self;
        assert!(
            heads > 0 && width.is_multiple_of(heads),
            "{heads} heads do not divide a width of {width}"
        );
        let embedding = |count| {
            let config = EmbeddingConfig::new(count, width);
            config.with_initializer(normal(DEVIATION)).init(device)
        };
        let embedding = GptEmbedding {
            tokens: embedding(self.vocabulary),
            positions: embedding(self.context),
            dropout: DropoutConfig::new(self.dropout).init(),
        };
        Gpt {
            embedding: Block::shared(0, embedding),
            blocks: (1..=self.layers)
                .map(|index| Block::new(index, GptBlock::new(self, device)))
                .collect(),
            norm: LayerNormConfig::new(width).init(device),
        }
    }
}

/// A decoder-only transformer: pre-norm blocks, learned positions, GELU, and one matrix for both the input embedding and the
/// output scores.
///
/// Its parts can run apart: the [`embedding`](Self::embedding), each of the [`blocks`](Self::blocks), and the
/// [`head`](Self::head).
///
/// *Memory*: about `12 layers width²` parameters, and `width` for each token of the vocabulary and place in the context.
///
/// *Numerics*: norms run in f32, see [`in_f32`]. There is no dropout on attention weights.
///
/// *Source*: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2).
///
/// *Example*:
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use paceline_nn::gpt::GptConfig;
///
/// let device = Device::flex();
/// let config = GptConfig { vocabulary: 257, context: 16, layers: 2, heads: 2, width: 8, dropout: 0.1 };
/// let scores = config.init(&device).forward(Tensor::<2, Int>::zeros([3, 16], &device));
/// assert_eq!(scores.dims(), [3, 16, 257]);
/// ```
#[derive(Module, Debug)]
pub struct Gpt {
    /// Block 0, which makes the input of the others.
    pub embedding: Block<GptEmbedding>,
    /// The blocks from 1 on, in the order of the forward pass.
    pub blocks: Vec<Block<GptBlock>>,
    /// The norm before the scores.
    pub norm: LayerNorm,
}

impl Gpt {
    /// Scores of the token that follows each one.
    ///
    /// *Shape*: `[batch, length]` to `[batch, length, vocabulary]`, for a length up to the context.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.head(self.hidden(tokens))
    }

    /// The last block's output.
    ///
    /// *Shape*: `[batch, length]` to `[batch, length, width]`.
    pub fn hidden(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = self.embedding.forward(tokens, GptEmbedding::forward);
        let blocks = self.blocks.iter();
        blocks.fold(x, |x, block| block.forward(x, GptBlock::forward))
    }

    /// The scores, from the last block's output.
    ///
    /// *Shape*: `[batch, length, width]` to `[batch, length, vocabulary]`.
    pub fn head(&self, x: Tensor<3>) -> Tensor<3> {
        let x = to_device(x, &self.norm.gamma.val().device());
        let x = in_f32(x, |x| layer_norm(&self.norm, x));
        let tokens = self.embedding.module().tokens.weight.val();
        let tokens = to_device(tokens, &x.device());
        scores(x, tokens)
    }
}

/// Each token's embedding plus that of its position.
#[derive(Module, Debug)]
pub struct GptEmbedding {
    /// A row for each token; also the output matrix.
    pub tokens: Embedding,
    /// A row for each place in the context.
    pub positions: Embedding,
    /// Acts on the sum.
    pub dropout: Dropout,
}

impl GptEmbedding {
    /// *Shape*: `[batch, length]` to `[batch, length, width]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [_, length] = tokens.dims();
        let positions = Tensor::<1, Int>::arange(0..length as i64, &tokens.device());
        let positions = self.positions.forward(positions.unsqueeze());
        self.dropout
            .forward(self.tokens.forward(tokens) + positions)
    }
}

/// A transformer layer: attention over the tokens so far, then two linear layers, each behind a norm and beside a residual
/// connection.
#[derive(Module, Debug)]
pub struct GptBlock {
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
}

impl GptBlock {
    fn new(config: &GptConfig, device: &Device) -> Self {
        let width = config.width;
        let norm = || LayerNormConfig::new(width).init(device);
        let layer = |from, to, deviation| Linear {
            weight: normal(deviation).init([from, to], device),
            bias: Some(Initializer::Zeros.init([to], device)),
        };
        // Each block adds two residuals; their sum then keeps its size at any depth.
        let residual = DEVIATION / (2.0 * config.layers as f64).sqrt();
        Self {
            attention_norm: norm(),
            query: layer(width, width, DEVIATION),
            key: layer(width, width, DEVIATION),
            value: layer(width, width, DEVIATION),
            output: layer(width, width, residual),
            feed_norm: norm(),
            up: layer(width, 4 * width, DEVIATION),
            down: layer(4 * width, width, residual),
            dropout: DropoutConfig::new(config.dropout).init(),
            heads: config.heads,
        }
    }

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
        linear(&self.output, attention(inputs, self.heads, true))
    }
}

fn normal(std: f64) -> Initializer {
    Initializer::Normal { mean: 0.0, std }
}

#[cfg(test)]
mod tests {
    use burn::module::Param;
    use burn::tensor::TensorData;

    use super::*;

    const CONFIG: GptConfig = GptConfig {
        vocabulary: 11,
        context: 6,
        layers: 2,
        heads: 2,
        width: 8,
        dropout: 0.0,
    };

    fn tokens(values: [i32; 6]) -> Tensor<2, Int> {
        Tensor::from_data(TensorData::new(values.to_vec(), [1, 6]), &Device::flex())
    }

    #[test]
    fn a_score_depends_on_no_later_token() {
        let gpt = CONFIG.init(&Device::flex());
        let early = |values| gpt.forward(tokens(values)).slice([0..1, 0..4]).into_data();
        let late = |values| gpt.forward(tokens(values)).slice([0..1, 4..6]).into_data();
        let (a, b) = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8]);
        assert_eq!(early(a), early(b));
        assert_ne!(late(a), late(b));
    }

    #[test]
    fn the_sizes_are_those_of_gpt_2() {
        let gpt_2 = GptConfig {
            vocabulary: 50_257,
            context: 1024,
            layers: 12,
            heads: 12,
            width: 768,
            dropout: 0.1,
        };
        // Lazy parameters: nothing is allocated.
        assert_eq!(gpt_2.init(&Device::flex()).num_params(), 124_439_808);
    }

    #[test]
    fn every_parameter_gets_a_gradient() {
        let device = Device::flex().autodiff();
        let gpt = CONFIG.init(&device);
        let tokens = Tensor::<2, Int>::ones([2, 6], &device);
        let gradients = gpt.forward(tokens).powf_scalar(2.0).mean().backward();
        let embedding = gpt.embedding.module();
        let missing = |param: &Param<Tensor<2>>| param.val().grad(&gradients).is_none();
        assert!(!missing(&embedding.tokens.weight) && !missing(&embedding.positions.weight));
        for block in &gpt.blocks {
            let block = block.module();
            for layer in [
                &block.query,
                &block.key,
                &block.value,
                &block.output,
                &block.up,
                &block.down,
            ] {
                assert!(!missing(&layer.weight));
            }
        }
    }
}
