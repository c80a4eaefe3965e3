//! Layers cut into parts. A rank has its parts of a parameter in one tensor, with the path and id of the whole parameter.

use burn::module::{Module, Param, ParamId};
use burn::nn::{Embedding, Linear};
use burn::tensor::module::embedding;
use burn::tensor::{Int, Tensor};
use paceline_nn::tape::{Point, plain};
use paceline_nn::{product, scores};

use super::exchange::Like;
use super::operations::Slots;
use super::{PartsError, TensorParallel};

/// A linear layer whose outputs are cut: part `p` has the columns [`share`](TensorParallel::share)`(outputs, p)` of the weight,
/// and the same part of the bias. It needs no exchange; [`copy`](TensorParallel::copy) or [`enter`](TensorParallel::enter) makes
/// its input.
///
/// *Shape*: `[.., inputs]` for each part of this rank to `[.., outputs / parts]`.
///
/// *Memory*: the weights of this rank's parts; with several parts, once more while it computes.
///
/// *Source*: Shoeybi et al. 2019, Megatron-LM.
#[derive(Module, Debug)]
pub struct ColumnParallelLinear {
    weight: Param<Tensor<2>>,
    bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    tp: TensorParallel,
}

impl ColumnParallelLinear {
    /// The columns of this rank's parts.
    ///
    /// *Errors*: the parts do not divide the outputs.
    pub fn new(whole: Linear, tp: &TensorParallel) -> Result<Self, PartsError> {
        tp.divides(whole.weight.lazy_shape()[1], "outputs of a linear layer")?;
        Ok(Self {
            weight: tp.slice_of(whole.weight, 1),
            bias: whole.bias.map(|bias| tp.slice_of(bias, 0)),
            tp: tp.clone(),
        })
    }

    /// The outputs of this rank's parts, from the input of each.
    pub fn forward<const D: usize>(&self, inputs: Vec<Tensor<D>>) -> Vec<Tensor<D>> {
        let even = |len| vec![len / self.tp.local().len(); self.tp.local().len()];
        let weight = self.weight.val();
        let lens = even(weight.dims()[1]);
        let weights = self.tp.by_part(weight, 1, &lens).into_iter();
        let biases = self.bias.as_ref().map(|bias| bias.val());
        let mut biases = biases.map(|bias| self.tp.by_part(bias, 0, &lens).into_iter());
        let parts = inputs.into_iter().zip(weights);
        parts
            .map(|(input, weight)| product(input, weight, biases.as_mut().and_then(Iterator::next)))
            .collect()
    }
}

/// A linear layer whose inputs are cut: part `p` has the rows [`share`](TensorParallel::share)`(inputs, p)` of the weight. The
/// outputs of all parts are added, and then the bias, which all ranks have.
///
/// *Shape*: `[.., inputs / parts]` for each part of this rank to activations of `[.., outputs]`.
///
/// *Memory*: as [`ColumnParallelLinear`]. *Cost*: [`leave`](TensorParallel::leave).
///
/// *Source*: Shoeybi et al. 2019, Megatron-LM.
#[derive(Module, Debug)]
pub struct RowParallelLinear {
    weight: Param<Tensor<2>>,
    bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    tp: TensorParallel,
}

impl RowParallelLinear {
    /// The rows of this rank's parts, and the bias.
    ///
    /// *Errors*: the parts do not divide the inputs.
    pub fn new(whole: Linear, tp: &TensorParallel) -> Result<Self, PartsError> {
        tp.divides(whole.weight.lazy_shape()[0], "inputs of a linear layer")?;
        Ok(Self {
            weight: tp.slice_of(whole.weight, 0),
            bias: whole.bias.inspect(draw),
            tp: tp.clone(),
        })
    }

    /// The sum over all parts, from the input of each of this rank's.
    pub fn forward<const D: usize>(&self, inputs: Vec<Tensor<D>>) -> Vec<Tensor<D>> {
        let weight = self.weight.val();
        let lens = vec![weight.dims()[0] / inputs.len(); inputs.len()];
        let parts = inputs
            .into_iter()
            .zip(self.tp.by_part(weight, 0, &lens))
            .map(|(input, weight)| product(input, weight, None));
        let sum = self.tp.leave(parts.collect());
        let Some(bias) = &self.bias else { return sum };
        let add = |bias: &Param<Tensor<1>>, x: Tensor<D>| x + bias.val().unsqueeze();
        self.tp.on_activations(bias, sum, add)
    }
}

/// An embedding whose rows are cut: part `p` has those of the tokens [`share`](TensorParallel::share)`(tokens, p)`. The parts need
/// not divide the number of tokens.
///
/// *Shape*: `[batch, length]` to activations of `[batch, length, width]`.
///
/// *Memory*: as [`ColumnParallelLinear`]. *Cost*: [`leave`](TensorParallel::leave).
///
/// *Numerics*: the values of the whole embedding: all parts but one add zeros.
///
/// *Source*: Shoeybi et al. 2019, Megatron-LM.
#[derive(Module, Debug)]
pub struct ParallelEmbedding {
    weight: Param<Tensor<2>>,
    #[module(skip)]
    tokens: usize,
    #[module(skip)]
    tp: TensorParallel,
}

impl ParallelEmbedding {
    /// The rows of this rank's parts.
    ///
    /// *Errors*: fewer tokens than parts.
    pub fn new(whole: Embedding, tp: &TensorParallel) -> Result<Self, PartsError> {
        let tokens = whole.weight.lazy_shape()[0];
        if tokens < tp.parts() {
            return Err(PartsError::Few {
                parts: tp.parts(),
                size: tokens,
                what: "tokens",
            });
        }
        Ok(Self {
            weight: tp.slice_of(whole.weight, 0),
            tokens,
            tp: tp.clone(),
        })
    }

    /// Each token's row.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Vec<Tensor<3>> {
        let parts = self.tp.local().zip(self.by_part()).map(|(part, weight)| {
            let places = self.tp.places_in(part, self.tokens, &tokens);
            let rows = embedding(weight, places.index);
            rows.mask_fill(places.elsewhere.unsqueeze_dim::<3>(2), 0.0)
        });
        self.tp.leave(parts.collect())
    }

    /// The scores of this rank's tokens, from activations that have [entered](TensorParallel::enter): the product with the
    /// transposed rows.
    ///
    /// *Shape*: `[.., width]` for each part of this rank to `[.., tokens of the part]`.
    pub fn scores<const D: usize>(&self, inputs: Vec<Tensor<D>>) -> Vec<Tensor<D>> {
        let parts = inputs.into_iter().zip(self.by_part());
        parts.map(|(input, rows)| scores(input, rows)).collect()
    }

    /// The id of the rows.
    pub(crate) fn id(&self) -> ParamId {
        self.weight.id
    }

    /// Number of tokens, of all parts.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    fn by_part(&self) -> Vec<Tensor<2>> {
        let lens = self.tp.local();
        let lens = lens.map(|part| self.tp.share(self.tokens, part).len());
        let lens: Vec<usize> = lens.collect();
        self.tp.by_part(self.weight.val(), 0, &lens)
    }
}

/// Makes a lazy parameter draw its values now, in the order of the whole model.
pub(super) fn draw<const D: usize>(param: &Param<Tensor<D>>) {
    let _ = param.val();
}

impl TensorParallel {
    /// This rank's slice of a parameter along `axis`, in memory of its own so that the whole can be freed.
    fn slice_of<const D: usize>(&self, whole: Param<Tensor<D>>, axis: usize) -> Param<Tensor<D>> {
        whole.map(|tensor| {
            let range = self.share_of_rank(tensor.dims()[axis], self.group.rank());
            let slice = plain(tensor.clone()).slice_dim(axis, range).into_data();
            let slice = Tensor::<D>::from_data(slice, (&tensor.device(), tensor.dtype()));
            slice.set_require_grad(tensor.is_require_grad())
        })
    }

    /// The parts of this rank's slice, which have `lens` elements along `axis`. The slice gets their gradients in one piece.
    pub(super) fn by_part<const D: usize>(
        &self,
        slice: Tensor<D>,
        axis: usize,
        lens: &[usize],
    ) -> Vec<Tensor<D>> {
        if lens.len() == 1 {
            return vec![slice];
        }
        let (device, dtype) = (slice.device().inner(), slice.dtype());
        let mut start = 0;
        let parts = lens.iter().map(|len| {
            let part = plain(slice.clone()).narrow(axis, start, *len);
            start += len;
            // As contiguous as on a rank that has only this part.
            Tensor::from_data(part.into_data(), (&device, dtype))
        });
        let parts: Vec<Tensor<D>> = parts.collect();
        let likes: Vec<_> = parts.iter().map(Like::of).collect();
        let slots = Slots::new(parts.len());
        let gradients = slots.clone();
        let point = Point::origin(&slice).deposit(slice, move || {
            Some(Tensor::cat(gradients.take(&likes), axis))
        });
        slots.outputs(&point, parts)
    }
}
