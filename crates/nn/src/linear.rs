//! Linear layers, and gradients of their weights that are computed later than those of their inputs.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::nn::Linear;
use burn::tensor::module::linear as multiply;
use burn::tensor::{Gradients, Shape, Tensor};
use burn_std::{MatmulTransformAction, MatmulTransformAnalysis, MatmulTransformPolicy};

use crate::pass::Pass;
use crate::tape::{Point, custom, plain, untracked};

/// `layer.forward(input)`. If the current [`Pass`] says so, the gradient of the layer's weight is left for later, see
/// [`WeightGradients`].
///
/// *Shape*: `[.., inputs]` to `[.., outputs]`.
///
/// *Numerics*: the bits of [`Linear::forward`] and of its backward pass. If three or more operations use `input`, their
/// gradients may be added in another order.
pub fn linear<const D: usize>(layer: &Linear, input: Tensor<D>) -> Tensor<D> {
    let Some(left) = left_of(layer) else {
        return layer.forward(input);
    };
    let (id, weight) = (layer.weight.id, untracked(layer.weight.val()));
    let values = plain(input.clone());
    let is_folded = is_folded(&values, last(weight.dims()));
    let output = multiply(input, weight, layer.bias.as_ref().map(Param::val));
    let point = match output.is_tracked() {
        true => Point::origin(&output),
        false => Point::leaf(&output),
    };
    custom(output.clone(), output, &point, move |gradient| {
        let of_output = gradient.clone();
        let of_weight = move || weight_gradient(values, of_output, is_folded);
        left.lock().products.push((id, Box::new(of_weight)));
        Some(gradient)
    })
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
    match Pass::current().is_some_and(|pass| pass.is_second_run()) {
        true => only_gradients(layer, input),
        false => linear(layer, input),
    }
}

/// Zeros for the layer's output, and its backward pass.
fn only_gradients<const D: usize>(layer: &Linear, input: Tensor<D>) -> Tensor<D> {
    let left = left_of(layer);
    let weight = layer.weight.val();
    let (values, matrix) = (plain(input.clone()), plain(weight.clone()));
    let (outputs, is_folded) = (last(weight.dims()), is_folded(&values, last(weight.dims())));
    let mut shape = values.dims();
    shape[D - 1] = outputs;
    let zeros = Tensor::zeros(shape, (&values.device(), values.dtype()));
    let gradient: Arc<Mutex<Option<Tensor<D>>>> = Arc::default();
    let given = || {
        let gradient = gradient.clone();
        move || gradient.lock().expect("no holder panics").clone()
    };
    let mut tip = Point::origin(&input);
    if input.is_tracked() {
        let given = given();
        let of_input = move || Some(input_gradient(matrix, given()?, is_folded));
        tip = tip.deposit(input, of_input);
    }
    let of_weight = {
        let given = given();
        move || Some(weight_gradient(values, given()?, is_folded))
    };
    let later = match left {
        Some(left) => {
            if !tip.is_tracked() {
                tip = Point::leaf(&weight);
            }
            Some((left, of_weight))
        }
        None if weight.is_tracked() => {
            tip = tip.deposit(weight, of_weight);
            None
        }
        None => None,
    };
    if let Some(bias) = layer.bias.as_ref().map(Param::val)
        && bias.is_tracked()
    {
        let given = given();
        tip = tip.deposit(bias, move || Some(bias_gradient(given()?, is_folded)));
    }
    let id = layer.weight.id;
    tip.output(zeros, move |of_output| {
        *gradient.lock().expect("no holder panics") = Some(of_output);
        if let Some((left, of_weight)) = later {
            let of_weight = move || of_weight().expect("its gradient has come");
            left.lock().products.push((id, Box::new(of_weight)));
        }
    })
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

/// What Burn's backward pass computes for the weight, with the same products and sums.
fn weight_gradient<const D: usize>(
    x: Tensor<D>,
    gradient: Tensor<D>,
    is_folded: bool,
) -> Tensor<2> {
    if is_folded {
        return folded(x).transpose().matmul(folded(gradient));
    }
    let size = [last(x.dims()), last(gradient.dims())];
    summed(x.transpose().matmul(gradient), D - 2).reshape(size)
}

/// The same for the input.
fn input_gradient<const D: usize>(
    weight: Tensor<2>,
    gradient: Tensor<D>,
    is_folded: bool,
) -> Tensor<D> {
    if is_folded {
        let mut dims = gradient.dims();
        dims[D - 1] = weight.dims()[0];
        return folded(gradient).matmul(weight.transpose()).reshape(dims);
    }
    gradient.matmul(weight.unsqueeze::<D>().transpose())
}

/// The same for the bias.
fn bias_gradient<const D: usize>(gradient: Tensor<D>, is_folded: bool) -> Tensor<1> {
    let outputs = last(gradient.dims());
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
    let columns = last(x.dims());
    let rows = x.shape().num_elements() / columns;
    x.reshape([rows, columns])
}

fn last<const D: usize>(dims: [usize; D]) -> usize {
    dims[D - 1]
}
