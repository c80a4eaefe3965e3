//! What goes through a module and puts tensors in it, or makes gradients for it.

use std::collections::HashMap;
use std::ops::Range;

use burn::module::{ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Bool, Int, Shape, Tensor, TensorData};

use super::{InnerIfAutodiff as _, Value, slice_shape};

pub(super) struct Import {
    pub(super) path: Vec<String>,
    pub(super) values: HashMap<String, TensorData>,
}

impl Import {
    fn take(&mut self) -> Option<TensorData> {
        self.values.remove(&self.path.join("."))
    }
}

impl ModuleMapper for Import {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.take() {
            None => param,
            Some(data) => param.map(|old| {
                let dtype = data.dtype();
                Tensor::<D>::from_data(data, (&old.device(), dtype))
                    .set_require_grad(old.is_require_grad())
            }),
        }
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        match self.take() {
            None => param,
            Some(data) => param.map(|old| {
                let dtype = data.dtype();
                Tensor::<D, Int>::from_data(data, (&old.device(), dtype))
            }),
        }
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        match self.take() {
            None => param,
            Some(data) => param.map(|old| Tensor::<D, Bool>::from_data(data, &old.device())),
        }
    }
}

pub(super) struct Write<'a> {
    pub(super) values: &'a HashMap<ParamId, TensorData>,
}

impl ModuleMapper for Write<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.values.get(&param.id) {
            None => param,
            Some(data) => param.map(|old| {
                let written = Tensor::<D>::from_data(data.clone(), (&old.device(), data.dtype()));
                written.set_require_grad(old.is_require_grad())
            }),
        }
    }
}

pub(super) struct Replace {
    pub(super) values: HashMap<ParamId, Value>,
}

impl ModuleMapper for Replace {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(value) = self.values.remove(&param.id) else {
            return param;
        };
        param.map(|old| {
            let (shape, dtype) = (old.shape(), old.dtype());
            let written = value.tensor(&old.device().inner(), shape, dtype);
            let written = match old.is_autodiff() {
                true => Tensor::from_inner(written),
                false => written,
            };
            written.set_require_grad(old.is_require_grad())
        })
    }
}

pub(super) struct Slice<'a> {
    pub(super) ranges: &'a HashMap<ParamId, Range<usize>>,
    pub(super) values: HashMap<ParamId, (Value, Shape)>,
}

/// The shape of `len` elements of a parameter of shape `whole`: that of a slice, unless they are all.
fn shape_of<const D: usize>(len: usize, whole: Shape) -> Shape {
    match len == whole.num_elements() {
        true => whole,
        false => Shape::from(slice_shape::<D>(len)),
    }
}

impl ModuleMapper for Slice<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(range) = self.ranges.get(&param.id) else {
            return param;
        };
        let (id, tensor, mapper) = param.consume();
        if let Some((values, whole)) = self.values.remove(&id) {
            let (device, dtype) = (tensor.device().inner(), tensor.dtype());
            let slice = values.tensor(&device, shape_of::<D>(range.len(), whole), dtype);
            let slice = Tensor::from_inner(slice).require_grad();
            return Param::from_mapped_value(id, slice, mapper);
        }
        let slice = match range.len() == tensor.shape().num_elements() {
            true => tensor,
            false => {
                let len = tensor.shape().num_elements();
                let flat = tensor.inner_if_autodiff().reshape([len]);
                let slice = flat.slice([range.clone()]);
                let slice = slice.reshape(slice_shape::<D>(range.len()));
                Tensor::from_inner(slice).require_grad()
            }
        };
        Param::from_mapped_value(id, slice, mapper)
    }
}

pub(super) struct MakeGradients {
    pub(super) grads: GradientsParams,
    pub(super) values: HashMap<ParamId, (Value, Shape)>,
}

impl ModuleVisitor for MakeGradients {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some((value, whole)) = self.values.remove(&param.id) else {
            return;
        };
        let tensor = param.base();
        let dtype = tensor.dtype();
        let shape = shape_of::<D>(value.len(), whole);
        let gradient: Tensor<D> = value.tensor(&tensor.device().inner(), shape, dtype);
        self.grads.register(param.id, gradient);
    }
}
