//! The language model of `paceline_nn::gpt`, cut into parts.

use burn::module::Module;
use burn::nn::{Dropout, Embedding, LayerNorm};
use burn::tensor::{Int, Tensor};
use paceline_nn::gpt::{Gpt, GptEmbedding};
use paceline_nn::{Block, TransformerBlock, attention, gelu, in_f32, layer_norm};

use super::layers::draw;
use super::{
    ColumnParallelLinear, ParallelEmbedding, PartsError, RowParallelLinear, TensorParallel,
};

/// A [`Gpt`] whose heads, inner widths and vocabulary are cut into parts. Norms, positions and the biases of row-parallel layers
/// are whole on every rank, and get the same gradients on all of them.
///
/// *Memory*: `1 / ranks` of the matrices and of the vocabulary, and `context + 6 layers + 2` rows of the width that all ranks have.
///
/// *Cost*: with several ranks and `n = batch x length x width`, each block sends two all-reduces of `4 n` bytes forward and two
/// backward; embedding and scores send one more each. Recomputed blocks send the forward ones twice.
///
/// *Numerics*: the bits depend on the number of parts, not on the ranks. They differ from those of the ordinary model, whose
/// matrices are summed without a tree.
///
/// *Source*: Shoeybi et al. 2019, Megatron-LM.
#[derive(Module, Debug)]
pub struct ParallelGpt {
    embedding: Block<ParallelGptEmbedding>,
    blocks: Vec<Block<ParallelGptBlock>>,
    norm: LayerNorm,
    #[module(skip)]
    tp: TensorParallel,
}

impl ParallelGpt {
    /// Takes this rank's parts out of the whole model, one parameter after another: a lazy model is never whole in memory.
    ///
    /// *Errors*: parts that do not divide the heads, the width, or with sequence parallelism the context; more parts than tokens.
    pub fn from_gpt(gpt: Gpt, tp: &TensorParallel) -> Result<Self, PartsError> {
        let cut = |block: Block<TransformerBlock>| {
            block.try_map(|block| ParallelGptBlock::new(block, tp))
        };
        let embedding = gpt.embedding;
        let embedding = embedding.try_map(|embedding| ParallelGptEmbedding::new(embedding, tp))?;
        Ok(Self {
            embedding,
            blocks: gpt.blocks.into_iter().map(cut).collect::<Result<_, _>>()?,
            norm: gpt.norm,
            tp: tp.clone(),
        })
    }

    /// The scores of this rank's tokens, for each part.
    ///
    /// *Shape*: `[batch, length]` to `[batch, length, tokens of the part]`, for a length up to the context.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Vec<Tensor<3>> {
        let x = (self.embedding).forward(tokens, ParallelGptEmbedding::forward);
        let blocks = self.blocks.iter();
        self.head(blocks.fold(x, |x, block| block.forward(x, ParallelGptBlock::forward)))
    }

    /// Block 0, which makes the input of the others.
    pub fn embedding(&self) -> &Block<ParallelGptEmbedding> {
        &self.embedding
    }

    /// The blocks from 1 on, in the order of the forward pass.
    pub fn blocks(&self) -> &[Block<ParallelGptBlock>] {
        &self.blocks
    }

    /// The scores of this rank's tokens, for each part, from the last block's output.
    pub fn head(&self, x: Vec<Tensor<3>>) -> Vec<Tensor<3>> {
        let x = normed(&self.tp, &self.norm, x);
        self.embedding.module().tokens.scores(self.tp.enter(x))
    }

    /// Number of tokens that the scores are about, on all ranks together.
    pub fn vocabulary(&self) -> usize {
        self.embedding.module().tokens.tokens()
    }

    /// The parts.
    pub fn parts(&self) -> &TensorParallel {
        &self.tp
    }
}

/// [`GptEmbedding`] with the tokens cut into parts.
#[derive(Module, Debug)]
pub struct ParallelGptEmbedding {
    pub(crate) tokens: ParallelEmbedding,
    positions: Embedding,
    dropout: Dropout,
    #[module(skip)]
    tp: TensorParallel,
}

impl ParallelGptEmbedding {
    /// This rank's parts. *Errors*: more parts than tokens; with sequence parallelism, parts that do not divide the context.
    pub fn new(whole: GptEmbedding, tp: &TensorParallel) -> Result<Self, PartsError> {
        tp.divides_sequence(whole.positions.weight.lazy_shape()[0])?;
        let tokens = ParallelEmbedding::new(whole.tokens, tp)?;
        draw(&whole.positions.weight);
        Ok(Self {
            tokens,
            positions: whole.positions,
            dropout: whole.dropout,
            tp: tp.clone(),
        })
    }

    /// *Shape*: `[batch, length]` to activations of `[batch, length, width]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Vec<Tensor<3>> {
        let ([_, length], device) = (tokens.dims(), tokens.device());
        let x = self.tokens.forward(tokens);
        let mut places = self.tp.places(length).into_iter();
        let x = self.tp.on_activations(&self.positions, x, |positions, x| {
            let place = places.next().expect("a place for each tensor");
            let place = Tensor::<1, Int>::arange(place.start as i64..place.end as i64, &device);
            x + positions.forward(place.unsqueeze())
        });
        self.tp.dropout(&self.dropout, x)
    }
}

/// A [`TransformerBlock`] with its heads and its inner width cut into parts.
///
/// *Memory*: `12 width² / ranks` weights. *Cost*: see [`ParallelGpt`].
#[derive(Module, Debug)]
pub struct ParallelGptBlock {
    attention_norm: LayerNorm,
    query: ColumnParallelLinear,
    key: ColumnParallelLinear,
    value: ColumnParallelLinear,
    output: RowParallelLinear,
    feed_norm: LayerNorm,
    up: ColumnParallelLinear,
    down: RowParallelLinear,
    dropout: Dropout,
    /// Of one part.
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    is_causal: bool,
    #[module(skip)]
    tp: TensorParallel,
}

impl ParallelGptBlock {
    /// This rank's parts. *Errors*: parts that do not divide the heads.
    pub fn new(whole: TransformerBlock, tp: &TensorParallel) -> Result<Self, PartsError> {
        tp.divides(whole.heads, "attention heads")?;
        Ok(Self {
            attention_norm: whole.attention_norm,
            query: ColumnParallelLinear::new(whole.query, tp)?,
            key: ColumnParallelLinear::new(whole.key, tp)?,
            value: ColumnParallelLinear::new(whole.value, tp)?,
            output: RowParallelLinear::new(whole.output, tp)?,
            feed_norm: whole.feed_norm,
            up: ColumnParallelLinear::new(whole.up, tp)?,
            down: RowParallelLinear::new(whole.down, tp)?,
            dropout: whole.dropout,
            heads: whole.heads / tp.parts(),
            is_causal: whole.is_causal,
            tp: tp.clone(),
        })
    }

    /// *Shape*: activations of `[batch, length, width]`, in and out.
    pub fn forward(&self, x: Vec<Tensor<3>>) -> Vec<Tensor<3>> {
        let tp = &self.tp;
        let y = tp.enter(normed(tp, &self.attention_norm, x.clone()));
        let (query, key) = (self.query.forward(y.clone()), self.key.forward(y.clone()));
        let heads = query.into_iter().zip(key).zip(self.value.forward(y));
        let y = heads.map(|((query, key), value)| {
            attention([query, key, value], self.heads, self.is_causal)
        });
        let y = self.output.forward(y.collect());
        let x = add(x, tp.dropout(&self.dropout, y));
        let y = tp.enter(normed(tp, &self.feed_norm, x.clone()));
        let y = self.up.forward(y).into_iter().map(gelu).collect();
        let y = self.down.forward(y);
        add(x, tp.dropout(&self.dropout, y))
    }
}

fn normed(tp: &TensorParallel, norm: &LayerNorm, x: Vec<Tensor<3>>) -> Vec<Tensor<3>> {
    tp.on_activations(norm, x, |norm, x| in_f32(x, |x| layer_norm(norm, x)))
}

fn add(x: Vec<Tensor<3>>, y: Vec<Tensor<3>>) -> Vec<Tensor<3>> {
    x.into_iter().zip(y).map(|(x, y)| x + y).collect()
}
