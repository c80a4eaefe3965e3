//! Linear layers, and gradients of their weights that are computed later than those of their inputs.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::nn::Linear;
use burn::tensor::module::linear as burns;
use burn::tensor::{Gradients, Shape, Tensor};
use burn_std::{MatmulTransformAction, MatmulTransformAnalysis, MatmulTransformPolicy};
use paceline_kernels::Gemm;

use crate::pass::Pass;
use crate::tape::{Point, plain};
use crate::values::{self, Values, are_readable, of_process};

/// `layer.forward(input)`, and its backward pass, faster on CPUs: on the kernels of this crate's own, if the type is f32. If the current
/// [`Pass`] says so, the gradient of the layer's weight is left for later, see [`WeightGradients`].
///
/// *Shape*: `[.., inputs]` to `[.., outputs]`.
///
/// *Numerics*: on CPUs and in f32, each value is a sum of pieces of up to 256 fused multiply-adds in an order that the shapes fix, so the
/// bits are the same on any number of threads and with any instruction set (`PACELINE_ISA`). Elsewhere they are those of
/// [`Linear::forward`] and of its backward pass. If three or more operations use `input`, their gradients may be added in another order.
///
/// # Panics
///
/// As [`Linear::forward`], and if `PACELINE_ISA` names an instruction set that this processor does not have.
pub fn linear<const D: usize>(layer: &Linear, input: Tensor<D>) -> Tensor<D> {
    let operands = Operands::of(layer, input);
    let Some(left) = left_of(layer) else {
        return multiply(operands);
    };
    let output = operands.output();
    operands.on_tape(output, Some((left, layer.weight.id)))
}

/// The product of `x` and `weight`, plus `bias`: [`linear`] for a weight that is not a layer's.
///
/// *Shape*: `x` is `[.., inputs]`, `weight` is `[inputs, outputs]`, `bias` is `[outputs]`; the result is `[.., outputs]`.
///
/// *Numerics*, *Panics*: as [`linear`].
pub fn product<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    multiply(Operands {
        x,
        weight,
        bias,
        by_rows: false,
    })
}

/// The product of `x` and each row of a matrix, as the head of a language model computes it that shares its embedding.
///
/// *Shape*: `x` is `[.., width]`, `rows` is `[count, width]`; the result is `[.., count]`.
///
/// *Numerics*, *Panics*: as [`linear`].
///
/// *Example*:
/// ```
/// use burn::tensor::{Device, Tensor};
/// use paceline_nn::scores;
///
/// let device = Device::flex();
/// let scores = scores(Tensor::<3>::ones([2, 5, 4], &device), Tensor::ones([9, 4], &device));
/// assert_eq!(scores.dims(), [2, 5, 9]);
/// ```
pub fn scores<const D: usize>(x: Tensor<D>, rows: Tensor<2>) -> Tensor<D> {
    multiply(Operands {
        x,
        weight: rows,
        bias: None,
        by_rows: true,
    })
}

/// A product on the kernels, or else Burn's own.
fn multiply<const D: usize>(operands: Operands<D>) -> Tensor<D> {
    if are_readable(&operands.x) && are_readable(&operands.weight) {
        let output = operands.output();
        return operands.on_tape(output, None);
    }
    let Operands {
        x, weight, bias, ..
    } = operands;
    match operands.by_rows {
        true => burns(x, weight.transpose(), bias),
        false => burns(x, weight, bias),
    }
}

/// [`linear`] for the layer whose output ends a [`Block`](crate::Block) or [`checkpoint`](crate::checkpoint). When the block runs for
/// the second time, only gradients are wanted: it returns zeros then, and saves the product.
///
/// Until the end of the block only operations may follow whose gradients do not depend on this output, such as sums and dropout.
///
/// *Shape*, *Numerics*: as [`linear`]. *Cost*: without recomputation that of `linear`.
///
/// *Source*: the early stop of `torch.utils.checkpoint`.
///
/// *Example*:
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor, activation::gelu};
/// use paceline_nn::{checkpoint, last_linear, linear};
///
/// let device = Device::flex().autodiff();
/// let layer = |from, to| LinearConfig::new(from, to).init(&device);
/// let input = Tensor::<2>::ones([2, 4], &device);
/// let output = checkpoint(&[layer(4, 16), layer(16, 4)], input, |[up, down], x| {
///     x.clone() + last_linear(down, gelu(linear(up, x)))
/// });
/// output.sum().backward();
/// ```
pub fn last_linear<const D: usize>(layer: &Linear, input: Tensor<D>) -> Tensor<D> {
    if !Pass::current().is_some_and(|pass| pass.is_second_run()) {
        return linear(layer, input);
    }
    let left = left_of(layer);
    let x = plain(input.clone());
    let mut shape = x.dims();
    shape[D - 1] = last(layer.weight.val().dims());
    let zeros = Tensor::zeros(shape, (&x.device(), x.dtype()));
    Operands::of(layer, input).on_tape(zeros, left.map(|left| (left, layer.weight.id)))
}

/// What a product is made of.
struct Operands<const D: usize> {
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    /// The weight has a row for each output, not a column.
    by_rows: bool,
}

impl<const D: usize> Operands<D> {
    fn of(layer: &Linear, x: Tensor<D>) -> Self {
        Self {
            x,
            weight: layer.weight.val(),
            bias: layer.bias.as_ref().map(Param::val),
            by_rows: false,
        }
    }

    /// The product, off every tape.
    fn output(&self) -> Tensor<D> {
        let bias = self.bias.as_ref();
        let all = (
            Values::of(&self.x),
            Values::of(&self.weight),
            Values::of_optional(bias),
        );
        let (x, weight) = (plain(self.x.clone()), plain(self.weight.clone()));
        let (Some(values), Some(matrix), Some(added)) = all else {
            let weight = if self.by_rows {
                weight.transpose()
            } else {
                weight
            };
            return burns(x, weight, bias.cloned().map(plain));
        };
        let [inputs, outputs] = sizes(&weight, self.by_rows);
        assert_eq!(
            last(x.dims()),
            inputs,
            "values of an input of a linear layer"
        );
        let gemm = Gemm {
            rows: rows(&x),
            columns: outputs,
            depth: inputs,
            a_transposed: false,
            b_transposed: self.by_rows,
        };
        let bias = added.as_ref().map(Values::slice);
        let output = of_process().gemm(&gemm, values.slice(), matrix.slice(), bias);
        values::tensor(output, with_last(x.dims(), outputs))
    }

    /// `output` as the product's. The gradient of the weight may be left for later.
    fn on_tape(self, output: Tensor<D>, later: Option<(Left, ParamId)>) -> Tensor<D> {
        let Self {
            x,
            weight,
            bias,
            by_rows,
        } = self;
        let (values, matrix) = (plain(x.clone()), plain(weight.clone()));
        let is_folded = is_folded(&values, last(output.dims()));
        let gradient: Arc<OnceLock<Tensor<D>>> = Arc::default();
        let given = || {
            let gradient = gradient.clone();
            move || gradient.get().cloned()
        };
        // What is deposited last is computed first: parameters' gradients, which may be on their way to other ranks then.
        let mut tip = Point::origin(&x);
        if x.is_tracked() {
            let given = given();
            tip = tip.deposit(x, move || {
                Some(input_gradient(matrix, given()?, by_rows, is_folded))
            });
        }
        let of_weight = {
            let given = given();
            move || Some(weight_gradient(values, given()?, by_rows, is_folded))
        };
        let later = match later {
            Some(later) => {
                if !tip.is_tracked() {
                    tip = Point::leaf(&weight);
                }
                Some((later, of_weight))
            }
            None if weight.is_tracked() => {
                tip = tip.deposit(weight, of_weight);
                None
            }
            None => None,
        };
        if let Some(bias) = bias.filter(Tensor::is_tracked) {
            let given = given();
            tip = tip.deposit(bias, move || Some(bias_gradient(given()?, is_folded)));
        }
        tip.output(output, move |of_output| {
            assert!(gradient.set(of_output).is_ok(), "a step runs once");
            if let Some(((left, id), of_weight)) = later {
                let of_weight = move || of_weight().expect("its gradient has come");
                left.lock().products.push((id, Box::new(of_weight)));
            }
        })
    }
}

/// Where this run of the layer leaves the gradient of its weight, if it does.
fn left_of(layer: &Linear) -> Option<Left> {
    let pass = Pass::current()?;
    pass.left().filter(|left| left.takes(&layer.weight, &pass))
}

/// The gradients of weights that a backward pass leaves for later: those of the layers that run in [`linear`], in a pass that is
/// [`deferring`](Pass::deferring) them. The backward pass computes the gradients of inputs and biases at once, and
/// [`backward`](Self::backward) computes the rest.
///
/// A weight must then be used once, and only in `linear`. Run a layer that is used several times with [`Linear::forward`], or
/// leave its weight out.
///
/// *Numerics*: the bits of one backward pass, with and without recomputed blocks.
///
/// *Memory*: in between, the input of each layer and the gradient of its output. *Cost*: that of one backward pass.
///
/// *Errors*: the failure of the pass if a weight is used twice.
///
/// *Source*: Qi et al. 2023, "Zero bubble pipeline parallelism".
///
/// *Example*:
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use paceline_nn::{Pass, WeightGradients, linear};
///
/// let device = Device::flex().autodiff();
/// let layer: Linear = LinearConfig::new(4, 3).init(&device);
/// let input = Tensor::<2>::ones([2, 4], &device).require_grad();
/// let later = WeightGradients::default();
/// let pass = Pass::default().deferring(&later);
/// let output = pass.enter(|| linear(&layer, input.clone()));
/// later.keep(&layer);
/// let gradients = output.sum().backward();
/// assert!(input.grad(&gradients).is_some() && layer.weight.grad(&gradients).is_none());
/// let gradients = later.backward().unwrap();
/// assert!(layer.weight.grad(&gradients).is_some());
/// ```
#[derive(Clone, Default)]
pub struct WeightGradients {
    left: Left,
    /// The weights that layers have taken off the tape, after the forward pass. Not in `Left`, which the tape holds and which would
    /// keep the tape itself.
    weights: Arc<Mutex<HashMap<ParamId, Tensor<2>>>>,
}

/// What a pass knows of [`WeightGradients`].
#[derive(Clone, Default)]
pub(crate) struct Left {
    left_out: Arc<HashSet<ParamId>>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// Weights that layers have taken off the tape.
    taken: HashSet<ParamId>,
    /// Whether the forward pass has ended.
    is_kept: bool,
    /// In the order of the backward pass.
    products: Vec<(ParamId, Product)>,
}

type Product = Box<dyn FnOnce() -> Tensor<2> + Send>;

impl WeightGradients {
    /// Leaves these parameters out: their gradients are computed in the backward pass.
    #[must_use]
    pub fn except(parameters: impl IntoIterator<Item = ParamId>) -> Self {
        let left = Left {
            left_out: Arc::new(parameters.into_iter().collect()),
            ..Left::default()
        };
        Self {
            left,
            ..Self::default()
        }
    }

    /// Ends the forward pass, and tells where the gradients go: to the parameters of `model`, which it was run with.
    pub fn keep<M: Module>(&self, model: &M) {
        let mut find = Find {
            taken: &self.left.lock().taken.clone(),
            weights: HashMap::new(),
        };
        model.visit(&mut find);
        *self.weights() = find.weights;
        self.left.lock().is_kept = true;
    }

    /// Computes the gradients that were left, those of the last layer first. They go on to the operations that the weights came
    /// from, such as casts. Returns `None` if no gradient was left.
    ///
    /// # Panics
    ///
    /// If a weight was also used outside of `linear`.
    pub fn backward(&self) -> Option<Gradients> {
        let State { products, .. } = std::mem::take(&mut *self.left.lock());
        let weights = std::mem::take(&mut *self.weights());
        // The deposit that is made last runs first.
        let tip = products.into_iter().rev().fold(None, |tip, (id, product)| {
            let Some(weight) = weights.get(&id).cloned() else {
                return tip;
            };
            let tip: Point = tip.unwrap_or_else(|| Point::origin(&weight));
            Some(tip.deposit(weight, move || Some(product())))
        });
        drop(weights);
        tip?.backward()
    }

    /// What a pass needs of it.
    pub(crate) fn left(&self) -> &Left {
        &self.left
    }

    fn weights(&self) -> MutexGuard<'_, HashMap<ParamId, Tensor<2>>> {
        self.weights.lock().expect("no holder panics")
    }
}

impl Left {
    /// Whether a layer has taken this parameter off the tape.
    pub(crate) fn has_taken(&self, id: ParamId) -> bool {
        self.lock().taken.contains(&id)
    }

    /// Whether this run of a layer leaves the gradient of its weight for later. If its values are off every tape, the second run
    /// of its block will.
    fn takes(&self, weight: &Param<Tensor<2>>, pass: &Pass) -> bool {
        let is_off_tape = pass.is_off_tape();
        if self.left_out.contains(&weight.id) || !(is_off_tape || weight.val().is_tracked()) {
            return false;
        }
        let mut state = self.lock();
        let is_first = state.taken.insert(weight.id);
        // Recomputed blocks run again after the forward pass.
        if !is_first && !state.is_kept {
            pass.failure().set(UsedTwice);
        }
        !is_off_tape
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }
}

impl fmt::Debug for WeightGradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeightGradients").finish_non_exhaustive()
    }
}

impl fmt::Debug for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Left").finish_non_exhaustive()
    }
}

/// A weight whose gradient is left for later is used twice.
#[derive(Debug, thiserror::Error)]
#[error(
    "linear: a weight is used more than once in a pass that leaves its gradient for later; expected `Linear::forward` for such \
     a layer"
)]
pub(crate) struct UsedTwice;

/// Finds the weights that gradients go to.
struct Find<'a> {
    taken: &'a HashSet<ParamId>,
    weights: HashMap<ParamId, Tensor<2>>,
}

impl ModuleVisitor for Find<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.taken.contains(&param.id) {
            let weight: Box<dyn std::any::Any> = Box::new(param.val());
            let weight = weight
                .downcast::<Tensor<2>>()
                .expect("weights are matrices");
            self.weights.insert(param.id, *weight);
        }
    }
}

/// The gradient of the weight; if not on the kernels, with the products and sums of Burn's backward pass.
fn weight_gradient<const D: usize>(
    x: Tensor<D>,
    gradient: Tensor<D>,
    by_rows: bool,
    is_folded: bool,
) -> Tensor<2> {
    let size = [last(x.dims()), last(gradient.dims())];
    if let (Some(values), Some(of_output)) = (Values::of(&x), Values::of(&gradient)) {
        let (left, right, [rows, columns]) = match by_rows {
            true => (of_output, values, [size[1], size[0]]),
            false => (values, of_output, size),
        };
        let gemm = Gemm {
            rows,
            columns,
            depth: self::rows(&x),
            a_transposed: true,
            b_transposed: false,
        };
        let product = of_process().gemm(&gemm, left.slice(), right.slice(), None);
        return values::tensor(product, [rows, columns]);
    }
    let of_weight = match is_folded {
        true => folded(x).transpose().matmul(folded(gradient)),
        false => summed(x.transpose().matmul(gradient), D - 2).reshape(size),
    };
    if by_rows {
        of_weight.transpose()
    } else {
        of_weight
    }
}

/// The same for the input.
fn input_gradient<const D: usize>(
    weight: Tensor<2>,
    gradient: Tensor<D>,
    by_rows: bool,
    is_folded: bool,
) -> Tensor<D> {
    let [inputs, outputs] = sizes(&weight, by_rows);
    let dims = with_last(gradient.dims(), inputs);
    if let (Some(matrix), Some(of_output)) = (Values::of(&weight), Values::of(&gradient)) {
        let gemm = Gemm {
            rows: rows(&gradient),
            columns: inputs,
            depth: outputs,
            a_transposed: false,
            b_transposed: !by_rows,
        };
        let product = of_process().gemm(&gemm, of_output.slice(), matrix.slice(), None);
        return values::tensor(product, dims);
    }
    let back = if by_rows { weight } else { weight.transpose() };
    match is_folded {
        true => folded(gradient).matmul(back).reshape(dims),
        false => gradient.matmul(back.unsqueeze::<D>()),
    }
}

/// The same for the bias.
fn bias_gradient<const D: usize>(gradient: Tensor<D>, is_folded: bool) -> Tensor<1> {
    let outputs = last(gradient.dims());
    if let Some(values) = Values::of(&gradient) {
        let sums = of_process().column_sums(values.slice(), outputs);
        return values::tensor(sums, [outputs]);
    }
    match is_folded {
        true => summed(folded(gradient), 1).reshape([outputs]),
        false => summed(gradient, D - 1).reshape([outputs]),
    }
}

/// The sums over the first `dims` dimensions, one after another.
fn summed<const D: usize>(values: Tensor<D>, dims: usize) -> Tensor<D> {
    (0..dims).fold(values, |sum, dim| match sum.dims()[dim] {
        1 => sum,
        _ => sum.sum_dim(dim),
    })
}

/// Whether Burn computes the layer as one product of two matrices, and not as one for each place in the first dimensions.
fn is_folded<const D: usize>(x: &Tensor<D>, outputs: usize) -> bool {
    if D <= 2 {
        return true;
    }
    let weight = Shape::new([last(x.dims()), outputs]);
    let analysis = MatmulTransformAnalysis::from_shapes(&x.shape(), &weight);
    MatmulTransformPolicy::default().action(&analysis) != MatmulTransformAction::Keep
}

/// All rows in one matrix.
fn folded<const D: usize>(x: Tensor<D>) -> Tensor<2> {
    let size = [rows(&x), last(x.dims())];
    x.reshape(size)
}

/// Inputs and outputs.
fn sizes(weight: &Tensor<2>, by_rows: bool) -> [usize; 2] {
    let [rows, columns] = weight.dims();
    if by_rows {
        [columns, rows]
    } else {
        [rows, columns]
    }
}

/// Rows in all first dimensions together.
fn rows<const D: usize>(x: &Tensor<D>) -> usize {
    x.dims()[..D - 1].iter().product()
}

fn with_last<const D: usize>(mut dims: [usize; D], size: usize) -> [usize; D] {
    dims[D - 1] = size;
    dims
}

fn last<const D: usize>(dims: [usize; D]) -> usize {
    dims[D - 1]
}
