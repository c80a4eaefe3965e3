//! Whether an optimizer treats each element of a parameter by itself, found out by trying.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Tensor, TensorData};

use crate::buffer::slice_shape;

/// Elements of a trial parameter of one dimension. More dimensions multiply it, see [`shape`].
const ELEMENTS: usize = 8;
/// Steps of the trial: the first ones of an optimizer with state differ from later ones.
const STEPS: usize = SCALES.len();
/// Of the gradients: small and large, so that a clipping by norm shows.
const SCALES: [f32; 3] = [1e-3, 1.0, 1e4];

/// The parameters of `model` that `optimizer` does not treat element by element: it computes a norm, a factorization or a
/// clipping over the whole parameter.
///
/// Small tensors take the parameters' places, with their paths, ids and ranks. Three steps on whole ones and on two slices of
/// each are compared bit for bit.
pub(super) fn whole_only<M: Module>(model: &M, optimizer: &ModuleOptimizer) -> HashSet<ParamId> {
    let whole = run(model, optimizer, |values| values);
    let left = run(model, optimizer, |values| values[..split(&values)].to_vec());
    let right = run(model, optimizer, |values| values[split(&values)..].to_vec());
    let differs = |(id, values): &(&ParamId, &Vec<f64>)| {
        let cut = left[*id].iter().chain(&right[*id]);
        !cut.map(|value| value.to_bits())
            .eq(values.iter().map(|value| value.to_bits()))
    };
    let differing = whole.iter().filter(differs);
    differing.map(|(id, _)| *id).collect()
}

fn split(values: &[f32]) -> usize {
    values.len() * 3 / 8
}

/// The trial's weights after all steps, where `cut` takes a part of each tensor.
fn run<M: Module>(
    model: &M,
    optimizer: &ModuleOptimizer,
    cut: fn(Vec<f32>) -> Vec<f32>,
) -> HashMap<ParamId, Vec<f64>> {
    let mut small = model.clone().map(&mut Shrink { cut });
    let mut optimizer = optimizer.clone().load_record(OptimizerRecord::default());
    for step in 0..STEPS {
        let mut gradients = Gradients {
            cut,
            step,
            made: GradientsParams::new(),
        };
        small.visit(&mut gradients);
        small = optimizer.step(0.1, small, gradients.made);
    }
    let mut read = Read(HashMap::new());
    small.visit(&mut read);
    read.0
}

/// The shape of a trial parameter: several rows and columns, so that a factorization shows.
fn shape<const D: usize>() -> [usize; D] {
    let mut shape = [2; D];
    shape[D - 1] = ELEMENTS;
    shape[0] = ELEMENTS;
    shape
}

/// Numbers of all signs and sizes, the same in every process.
fn numbers(len: usize, salt: usize) -> Vec<f32> {
    let mixed = (0..len).map(|at| (at * 7919 + salt * 104_729 + 13) % 1009);
    mixed.map(|at| (at as f32 - 504.0) / 100.0).collect()
}

struct Shrink {
    cut: fn(Vec<f32>) -> Vec<f32>,
}

impl ModuleMapper for Shrink {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_require_grad() {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        let values = part::<D>(self.cut, 0);
        let small = Tensor::<D>::from_data(values, (&tensor.device(), tensor.dtype()));
        Param::from_mapped_value(id, small.require_grad(), mapper)
    }
}

/// What `cut` takes of a trial tensor.
fn part<const D: usize>(cut: fn(Vec<f32>) -> Vec<f32>, salt: usize) -> TensorData {
    let whole = numbers(shape::<D>().iter().product(), salt);
    let len = whole.len();
    let values = cut(whole);
    match values.len() == len {
        true => TensorData::new(values, shape::<D>()),
        false => {
            let shape = slice_shape::<D>(values.len());
            TensorData::new(values, shape)
        }
    }
}

struct Gradients {
    cut: fn(Vec<f32>) -> Vec<f32>,
    step: usize,
    made: GradientsParams,
}

impl ModuleVisitor for Gradients {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_require_grad() {
            return;
        }
        let tensor = param.base();
        let device = (&tensor.device().inner(), tensor.dtype());
        let gradient = Tensor::<D>::from_data(part::<D>(self.cut, self.step + 1), device);
        self.made
            .register(param.id, gradient.mul_scalar(SCALES[self.step]));
    }
}

/// The values in f64, which has those of every other type.
struct Read(HashMap<ParamId, Vec<f64>>);

impl ModuleVisitor for Read {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            let data = param.val().inner().into_data();
            self.0.insert(param.id, data.iter().collect());
        }
    }
}
