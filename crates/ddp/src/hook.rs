//! Takes each gradient from Burn's autodiff as soon as it is complete. The only file that depends on the order in which Burn
//! runs its tape.
//!
//! Every trainable parameter passes an identity operation, the *hook*, before the model uses it. In the
//! backward pass the hook's step receives the parameter's whole gradient (all its uses summed)
//! and gives it to a [`GradientSink`] instead of leaving it on the leaf.
//!
//! Burn runs its tape by node depth, deepest first, and a node is one deeper than its deepest parent. A
//! hook whose only parent is a leaf has depth 1, so all hooks would run at the very end. Each
//! hook therefore has a second, untracked parent, its *token*, whose depth is chosen: parameters
//! registered later get deeper tokens, so a hook runs right after the operations that use its parameter
//! and long before the backward pass reaches the layers before it. `hook/tests.rs` fails if the
//! traversal order ever changes.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

#[cfg(feature = "cube")]
use burn::backend::Cube;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, Backend, BackendTensor, Dispatch, DispatchAutodiffContext, DispatchTensor,
    DispatchTensorKind, Flex, TensorMetadata, backend_extension,
};
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Device, Shape, Tensor};

/// Distance in depth between the tokens of consecutive parameters: more operations than a layer
/// normally has between two of its parameters, so that hooks stay in order. A layer with more operations is still correct;
/// its hook only fires later than it could.
const TOKEN_STRIDE: usize = 64;

/// Receives complete gradients in the order in which the backward pass finishes them.
pub(crate) trait GradientSink: Send + Sync {
    /// The gradient of parameter `index`, row-major, for the current backward pass. On a GPU it may not be computed yet; only
    /// a read waits for it.
    fn gradient(&self, index: usize, gradient: Tensor<1>);
}

/// The state of a hook's backward step: where it delivers.
#[derive(Clone)]
pub(crate) struct HookTarget {
    sink: Arc<dyn GradientSink>,
    index: usize,
}

impl fmt::Debug for HookTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HookTarget({})", self.index)
    }
}

/// The hook as a backend operation; without autodiff it is the identity.
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub(crate) trait GradHook: Backend {
    /// Returns `param` unchanged and delivers its gradient to `target` in the backward pass.
    fn grad_hook(
        param: FloatTensor<Self>,
        token: FloatTensor<Self>,
        target: HookTarget,
    ) -> FloatTensor<Self> {
        let _ = (token, target);
        param
    }
}

impl GradHook for Flex {}
#[cfg(feature = "cube")]
impl GradHook for Cube {}

/// Converts a back end's own tensor to one of any back end.
pub(crate) trait Lift: Backend {
    fn lift(tensor: FloatTensor<Self>) -> DispatchTensorKind;
}

impl Lift for Flex {
    fn lift(tensor: FloatTensor<Self>) -> DispatchTensorKind {
        DispatchTensorKind::Flex(BackendTensor::Float(tensor))
    }
}

#[cfg(feature = "cube")]
impl Lift for Cube {
    fn lift(tensor: FloatTensor<Self>) -> DispatchTensorKind {
        DispatchTensorKind::Cube(BackendTensor::Float(tensor))
    }
}

impl<B: GradHook + Lift, C: CheckpointStrategy> GradHook for Autodiff<B, C> {
    fn grad_hook(
        param: FloatTensor<Self>,
        token: FloatTensor<Self>,
        target: HookTarget,
    ) -> FloatTensor<Self> {
        let (primitive, node) = param.into_parts();
        let (_, token_node) = token.into_parts();
        match HookStep
            .prepare::<C>([node, token_node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish(target, primitive),
            OpsKind::UnTracked(prep) => prep.finish(primitive),
        }
    }
}

#[derive(Debug)]
struct HookStep;

impl<B: Lift> Backward<B, 2> for HookStep {
    type State = HookTarget;

    fn backward(
        self,
        ops: Ops<HookTarget, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        // Takes the gradient out of the tape without registering it for the leaf: the reduced gradient comes from the bucket,
        // and keeping both would double the memory.
        let gradient = grads.consume::<B>(&ops.node);
        let target = ops.state;
        let len = gradient.shape().num_elements();
        let flat = B::float_reshape(gradient, Shape::from([len]));
        let flat = Tensor::from_dispatch(DispatchTensor {
            kind: B::lift(flat),
            autodiff: DispatchAutodiffContext::Disabled,
        });
        target.sink.gradient(target.index, flat);
    }
}

/// The tokens of a model's parameters, made once and reused in every step.
pub(crate) struct Tokens {
    tokens: Vec<Tensor<1>>,
}

impl Tokens {
    /// Builds `count` tokens at depths `0, 64, 128, ...` on the autodiff device `device`.
    ///
    /// *Cost*: `64 * count` one-element additions, once.
    pub(crate) fn new(count: usize, device: &Device) -> Self {
        let mut tokens = Vec::with_capacity(count);
        let mut tip = Tensor::<1>::zeros([1], device);
        for _ in 0..count {
            tokens.push(tip.clone());
            for _ in 0..TOKEN_STRIDE {
                tip = tip.add_scalar(0.0);
            }
        }
        Self { tokens }
    }
}

/// Returns `model` with every parameter of `index` behind a hook that delivers to `sink`, and the number of hooks.
///
/// A hooked model serves one forward and backward pass: Burn consumes the tape.
pub(crate) fn hook_model<M: Module>(
    model: M,
    index: &HashMap<ParamId, usize>,
    tokens: &Tokens,
    sink: &Arc<dyn GradientSink>,
) -> (M, usize) {
    let mut mapper = HookMapper {
        index,
        tokens,
        sink,
        shared: HashMap::new(),
    };
    let hooked = model.map(&mut mapper);
    (hooked, mapper.shared.len())
}

struct HookMapper<'a> {
    index: &'a HashMap<ParamId, usize>,
    tokens: &'a Tokens,
    sink: &'a Arc<dyn GradientSink>,
    /// Hooked tensors by parameter. A tied parameter appears several times in a model but must pass a single hook; otherwise
    /// each use would deliver a part of its gradient.
    shared: HashMap<ParamId, Box<dyn Any>>,
}

impl ModuleMapper for HookMapper<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(&index) = self.index.get(&param.id) else {
            return param;
        };
        let (id, tensor, mapper) = param.consume();
        let hooked = match self
            .shared
            .get(&id)
            .and_then(|t| t.downcast_ref::<Tensor<D>>())
        {
            Some(hooked) => hooked.clone(),
            None => {
                let target = HookTarget {
                    sink: self.sink.clone(),
                    index,
                };
                let token = self.tokens.tokens[index].clone();
                let hooked = Tensor::from_dispatch(Dispatch::grad_hook(
                    tensor.into_dispatch(),
                    token.into_dispatch(),
                    target,
                ));
                self.shared.insert(id, Box::new(hooked.clone()));
                hooked
            }
        };
        Param::from_mapped_value(id, hooked, mapper)
    }
}

#[cfg(test)]
mod tests;
