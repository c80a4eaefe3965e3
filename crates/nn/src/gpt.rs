//! GPT: a language model made of a list of transformer blocks.

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig};
use burn::tensor::{Device, Int, Tensor};
use serde::{Deserialize, Serialize};

use crate::transformer::{DEVIATION, TransformerBlock, TransformerBlockConfig, normal};
use crate::{Block, in_f32, layer_norm, scores, to_device};

/// Added to variances by all norms.
const EPSILON: f64 = 1e-5;

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
        let width = self.width;
        let block = TransformerBlockConfig {
            width,
            heads: self.heads,
            is_causal: true,
            dropout: self.dropout,
            epsilon: EPSILON,
            // Each block adds two residuals; their sum then keeps its size at any depth.
            residual_deviation: DEVIATION / (2.0 * self.layers as f64).sqrt(),
        };
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
                .map(|index| Block::new(index, block.init(device)))
                .collect(),
            norm: LayerNormConfig::new(width)
                .with_epsilon(EPSILON)
                .init(device),
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
    pub blocks: Vec<Block<TransformerBlock>>,
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
        blocks.fold(x, |x, block| block.forward(x, TransformerBlock::forward))
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
