//! A language model of four pre-norm transformer layers: width 256, 4 heads, sequence 128, vocabulary 512.

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Bool, Device, Int, Tensor};
use paceline::in_f32;

/// Tokens in a sequence.
pub(crate) const SEQUENCE: usize = 128;
const VOCABULARY: usize = 512;
const WIDTH: usize = 256;
const HEADS: usize = 4;
const LAYERS: usize = 4;

#[derive(Module, Debug)]
pub(crate) struct Gpt {
    token: Embedding,
    position: Embedding,
    layers: Vec<Layer>,
    head: Linear,
}

impl Gpt {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            token: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            position: EmbeddingConfig::new(SEQUENCE, WIDTH).init(device),
            layers: (0..LAYERS).map(|_| Layer::new(device)).collect(),
            head: LinearConfig::new(WIDTH, VOCABULARY).init(device),
        }
    }

    /// Scores of the next token. `mask` is true where attention is forbidden.
    ///
    /// *Shape*: `[batch, 128]` and `[batch, 128, 128]` to `[batch * 128, 512]`.
    pub(crate) fn forward(&self, tokens: Tensor<2, Int>, mask: Tensor<3, Bool>) -> Tensor<2> {
        let [batch, sequence] = tokens.dims();
        let places = Tensor::<1, Int>::arange(0..sequence as i64, &tokens.device());
        let x = self.token.forward(tokens) + self.position.forward(places.unsqueeze());
        let layers = self.layers.iter();
        let x = layers.fold(x, |x, layer| layer.forward(x, mask.clone()));
        let scores = self.head.forward(x);
        scores.reshape([batch * sequence, VOCABULARY])
    }
}

#[derive(Module, Debug)]
struct Layer {
    attention_norm: LayerNorm,
    attention: MultiHeadAttention,
    feed_norm: LayerNorm,
    feed: PositionWiseFeedForward,
}

impl Layer {
    fn new(device: &Device) -> Self {
        let attention = MultiHeadAttentionConfig::new(WIDTH, HEADS).with_dropout(0.0);
        let feed = PositionWiseFeedForwardConfig::new(WIDTH, 4 * WIDTH).with_dropout(0.0);
        Self {
            attention_norm: LayerNormConfig::new(WIDTH).init(device),
            attention: attention.init(device),
            feed_norm: LayerNormConfig::new(WIDTH).init(device),
            feed: feed.init(device),
        }
    }

    fn forward(&self, x: Tensor<3>, mask: Tensor<3, Bool>) -> Tensor<3> {
        let y = in_f32(x.clone(), |x| self.attention_norm.forward(x));
        let y = MhaInput::self_attn(y).mask_attn(mask);
        let x = x + self.attention.forward(y).context;
        let y = in_f32(x.clone(), |x| self.feed_norm.forward(x));
        x + self.feed.forward(y)
    }
}
