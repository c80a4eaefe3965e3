//! `Deferred`: weights that Burn has not made yet. They stay out of a model until it is known which rank keeps them.

use std::any::Any;
use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Tensor, TensorData};
use paceline_collective::ProcessGroup;
use paceline_nn::{MapParams, map_params};

use crate::buffer::{Entry, InnerIfAutodiff};
use crate::error::DdpError;
use crate::placement;

/// The parameters without values of a model that has placeholders in their places.
#[derive(Default)]
pub(crate) struct Deferred(HashMap<ParamId, Lazy>);

/// A parameter, and its shape.
struct Lazy {
    param: Box<dyn Any + Send + Sync>,
    shape: Vec<usize>,
}

impl Deferred {
    /// Takes the parameters without values out of `model`.
    pub(crate) fn take<M: Module>(model: M) -> (Self, M) {
        let mut taken = Self::default();
        let model = model.map(&mut taken);
        (taken, model)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Gives the entries of a model with placeholders the shapes that its tensors will have.
    pub(crate) fn complete(&self, entries: &mut [Entry]) {
        for entry in entries {
            if let Some(Lazy { shape, .. }) = self.0.get(&entry.id) {
                entry.shape.clone_from(shape);
            }
        }
    }

    /// Gives `each` the value of every parameter, one after another in registration order, and puts what it returns into
    /// `model`. Rank 0 makes the values, in the order of random numbers in which Burn would have made them.
    ///
    /// *Memory*: one parameter, besides those that `each` keeps. *Blocks*: until rank 0 has sent them.
    ///
    /// *Errors*: a value that is not of the device's default type; failed collectives.
    pub(crate) fn make<M: Module>(
        self,
        model: M,
        group: &ProcessGroup,
        each: impl FnMut(ParamId, TensorData) -> Option<TensorData>,
    ) -> Result<M, DdpError> {
        let mut make = Make {
            lazy: self.0,
            group,
            each,
            failed: None,
        };
        let model = map_params(model, &mut make);
        make.failed.map_or(Ok(model), Err)
    }
}

impl ModuleMapper for Deferred {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let shape = param.lazy_shape().to_vec();
        if param.is_initialized() || shape.contains(&0) {
            return param;
        }
        let placeholder = Tensor::zeros([0; D], &param.lazy_device());
        let placeholder = param.clone().transform_for_load(placeholder, param.id);
        let (id, param) = (param.id, Box::new(param));
        self.0.insert(id, Lazy { param, shape });
        placeholder
    }
}

struct Make<'a, F> {
    lazy: HashMap<ParamId, Lazy>,
    group: &'a ProcessGroup,
    each: F,
    failed: Option<DdpError>,
}

impl<F: FnMut(ParamId, TensorData) -> Option<TensorData>> Make<'_, F> {
    /// The value for this rank's model in the place of `placeholder`.
    fn value<const D: usize>(
        &mut self,
        placeholder: &Param<Tensor<D>>,
        Lazy { param, shape }: Lazy,
    ) -> Result<Option<TensorData>, DdpError> {
        let dtype = placeholder.base().dtype();
        let mut own = None;
        if self.group.rank() == 0 {
            let param = param.downcast::<Param<Tensor<D>>>();
            let param = param.expect("its placeholder has its rank");
            let value = param.into_value().inner_if_autodiff().into_data();
            if value.dtype() != dtype || value.shape().to_vec() != shape {
                let why = "initial weights are not of the type and shape that Burn announced";
                return Err(DdpError::Sharded(why));
            }
            own = Some(value);
        }
        let value = placement::broadcast_tensor(self.group, own, shape, dtype)?;
        Ok((self.each)(placeholder.id, value))
    }
}

impl<F: FnMut(ParamId, TensorData) -> Option<TensorData>> MapParams for Make<'_, F> {
    fn map<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Param<Tensor<D>>> {
        if self.failed.is_some() {
            return None;
        }
        let lazy = self.lazy.remove(&param.id)?;
        match self.value(param, lazy) {
            Ok(value) => value.map(|value| {
                param.clone().map(|old| {
                    let dtype = value.dtype();
                    Tensor::<D>::from_data(value, (&old.device(), dtype))
                        .set_require_grad(old.is_require_grad())
                })
            }),
            Err(error) => {
                self.failed = Some(error);
                None
            }
        }
    }
}
