//! Parameters that a block gets from outside when it runs, as ZeRO-3 needs.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};

use burn::module::{Param, ParamId};
use burn::tensor::{Shape, Tensor};

use crate::failure::{BoxError, Failure};
use crate::tape::{Slot, untracked_like};

/// Where blocks get parameters that their modules do not hold, for example because each rank keeps a part of them.
///
/// A block with supplied parameters is always recomputed. It gathers them before its forward pass and drops them after it,
/// gathers them again in the backward pass, and hands the gradients over as soon as they are complete. In the module, each
/// supplied parameter is a placeholder of any shape, with the parameter's id, rank and type.
///
/// *Memory*: the supplied parameters of one block at a time, and their gradients until [`scatter`](Self::scatter) returns.
///
/// *Errors*: an error is the failure of the pass. The block then computes with zeros, so that the pass ends.
///
/// *Source*: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models"; PyTorch's FSDP.
pub trait Supply: fmt::Debug + Send + Sync {
    /// The parameters of block `block` that are supplied, with their shapes. Empty if its module holds them all.
    fn parameters(&self, block: usize) -> Vec<(ParamId, Shape)>;

    /// The values of these parameters, row-major, in the same order, without autodiff. They are cast to the types of their
    /// placeholders.
    ///
    /// Called once for each run of the block: blocks run in forward order, and in reverse in the backward pass. An
    /// implementation may therefore fetch the next block's parameters ahead.
    fn gather(&self, block: usize) -> Result<Vec<Tensor<1>>, BoxError>;

    /// Takes the gradients of these parameters, in the same order and layout; `None` for a parameter that the block did not
    /// use. Called once for each run of the block that the backward pass reaches.
    fn scatter(&self, block: usize, gradients: Vec<Option<Tensor<1>>>) -> Result<(), BoxError>;
}

/// A block's supplied parameters.
#[derive(Clone)]
pub(crate) struct Supplied {
    source: Weak<dyn Supply>,
    block: usize,
    params: Vec<(ParamId, Shape)>,
    failure: Failure,
}

/// A supply returned another number of parameters than it announced.
#[derive(Debug, thiserror::Error)]
#[error("gather for block {block}: expected {expected} parameters, got {got}")]
struct Miscounted {
    block: usize,
    expected: usize,
    got: usize,
}

impl Supplied {
    /// `None` if the block's module holds all its parameters.
    pub(crate) fn new(source: Weak<dyn Supply>, block: usize, failure: Failure) -> Option<Self> {
        let params = alive(&source).parameters(block);
        (!params.is_empty()).then_some(Self {
            source,
            block,
            params,
            failure,
        })
    }

    pub(crate) fn gather(&self) -> Values {
        let gathered = self.failure.attempt(|| {
            let values = alive(&self.source).gather(self.block)?;
            if values.len() != self.params.len() {
                return Err(BoxError::from(Miscounted {
                    block: self.block,
                    expected: self.params.len(),
                    got: values.len(),
                }));
            }
            Ok(values)
        });
        let values: Vec<Option<Tensor<1>>> = match gathered {
            Some(values) => values.into_iter().map(Some).collect(),
            None => self.params.iter().map(|_| None).collect(),
        };
        let values = self.params.iter().cloned().zip(values);
        Values(
            values
                .map(|((id, shape), value)| (id, (shape, value)))
                .collect(),
        )
    }

    /// `gradients` are row-major.
    pub(crate) fn scatter(&self, gradients: &HashMap<ParamId, Slot>) {
        let gradient = |(id, _): &(ParamId, Shape)| gradients.get(id)?.take();
        let gradients = self.params.iter().map(gradient).collect();
        self.failure
            .attempt(|| alive(&self.source).scatter(self.block, gradients));
    }
}

fn alive(source: &Weak<dyn Supply>) -> Arc<dyn Supply> {
    let source = source.upgrade();
    source.expect("the caller keeps the supply until the end of the pass")
}

/// Gathered values, until they are in the module.
#[derive(Default)]
pub(crate) struct Values(HashMap<ParamId, (Shape, Option<Tensor<1>>)>);

impl Values {
    /// The value in place of `placeholder`, off every tape; `None` if it is not supplied. Zeros after a failure.
    pub(crate) fn take<const D: usize>(
        &mut self,
        placeholder: &Param<Tensor<D>>,
    ) -> Option<Tensor<D>> {
        let (shape, value) = self.0.remove(&placeholder.id)?;
        let like = placeholder.base();
        let value = match value {
            Some(value) => value.cast(like.dtype()).reshape(shape),
            None => Tensor::zeros(shape, (&like.device().inner(), like.dtype())),
        };
        Some(untracked_like(value, &like))
    }
}
