//! Mapping a model's parameters so that a tied parameter stays one tensor.

use std::any::Any;
use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::Tensor;

/// What [`map_params`] does with each floating-point parameter.
pub trait MapParams {
    /// The replacement of `param`, or `None` to leave it.
    fn map<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Param<Tensor<D>>>;
}

/// Maps the floating-point parameters of a module. A tied parameter is mapped once, and its replacement takes all its places.
pub fn map_params<M: Module>(module: M, each: &mut impl MapParams) -> M {
    module.map(&mut Once {
        each,
        done: HashMap::new(),
    })
}

struct Once<'a, E> {
    each: &'a mut E,
    done: HashMap<ParamId, Box<dyn Any>>,
}

impl<E: MapParams> ModuleMapper for Once<'_, E> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let done = self.done.get(&param.id);
        if let Some(done) = done.and_then(|done| done.downcast_ref::<Param<Tensor<D>>>()) {
            return done.clone();
        }
        match self.each.map(&param) {
            None => param,
            Some(mapped) => {
                self.done.insert(mapped.id, Box::new(mapped.clone()));
                mapped
            }
        }
    }
}
