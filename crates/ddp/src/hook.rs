//! Takes each gradient from Burn's autodiff as soon as it is complete, by the order in which Burn runs its tape.
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

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, Tensor};
use paceline_nn::tape::{Point, custom};
use paceline_nn::{MapParams, map_params};

/// Distance in depth between the tokens of consecutive parameters: more operations than a layer
/// normally has between two of its parameters, so that hooks run early. Those of a layer with more operations only run later than they could.
/// Their order is that of the tokens in any case, because a hook's parents are a leaf and its token; the reducers rely on it
/// (`Micro::is_ordered`).
const TOKEN_STRIDE: usize = 64;

/// Tokens that are made before Burn's tape is swept: the steps between two tokens take about 100 kB.
const TOKENS_PER_SWEEP: usize = 16;

/// Receives complete gradients in the order in which the backward pass finishes them.
pub(crate) trait GradientSink: Send + Sync {
    /// The gradient of parameter `index`, row-major, for the current backward pass. On a GPU it may not be computed yet; only
    /// a read waits for it.
    fn gradient(&self, index: usize, gradient: Tensor<1>);
}

/// The tokens of a model's parameters, made once and reused in every step.
pub(crate) struct Tokens {
    points: Vec<Point>,
    /// Gradients are delivered on this device, for a model whose parameters are on several.
    device: Device,
}

impl Tokens {
    /// Builds `count` tokens at depths `0, 64, 128, ...` on the autodiff device `device`.
    ///
    /// *Cost*: `64 * count` one-element additions, once.
    pub(crate) fn new(count: usize, device: &Device) -> Self {
        let origin = Point::on(device);
        let mut points = Vec::with_capacity(count);
        let mut tip = origin.clone();
        for index in 0..count {
            points.push(tip.clone());
            tip = tip.deeper(TOKEN_STRIDE);
            if index % TOKENS_PER_SWEEP == 0 {
                origin.sweep();
            }
        }
        Self {
            points,
            device: device.clone().inner(),
        }
    }

    /// Gives the parameter `order[k]` the token at depth `64 k`.
    pub(crate) fn reorder(&mut self, order: &[usize]) {
        let mut points = self.points.clone();
        for (point, index) in self.points.iter().zip(order) {
            points[*index] = point.clone();
        }
        self.points = points;
    }
}

/// The parameters in the order of their first use in a forward pass.
#[derive(Default)]
pub(crate) struct Uses(Mutex<Vec<usize>>);

impl Uses {
    fn lock(&self) -> MutexGuard<'_, Vec<usize>> {
        self.0
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn in_order(&self) -> Vec<usize> {
        self.lock().clone()
    }

    fn note(&self, index: usize) {
        let mut uses = self.lock();
        if !uses.contains(&index) {
            uses.push(index);
        }
    }
}

/// Returns `model` with every parameter of `index` behind a hook that delivers to `sink`, and the number of hooks.
///
/// A hooked model serves one forward and backward pass: Burn consumes the tape. With `uses`, each parameter notes its first
/// use there.
pub(crate) fn hook_model<M: Module>(
    model: M,
    index: &HashMap<ParamId, usize>,
    tokens: &Tokens,
    sink: &Arc<dyn GradientSink>,
    uses: Option<&Arc<Uses>>,
) -> (M, usize) {
    let mut hooks = Hooks {
        index,
        tokens,
        sink,
        uses,
        count: 0,
    };
    let hooked = map_params(model, &mut hooks);
    (hooked, hooks.count)
}

/// A tied parameter passes a single hook; otherwise each use would deliver a part of its gradient.
struct Hooks<'a> {
    index: &'a HashMap<ParamId, usize>,
    tokens: &'a Tokens,
    sink: &'a Arc<dyn GradientSink>,
    uses: Option<&'a Arc<Uses>>,
    count: usize,
}

impl MapParams for Hooks<'_> {
    fn map<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Param<Tensor<D>>> {
        let index = *self.index.get(&param.id)?;
        self.count += 1;
        let (id, tensor, mapper) = param.clone().consume();
        let len = tensor.shape().num_elements();
        // Burn frees a tape that is dropped before its backward pass only in a later one, and the process group must not live so
        // long: its end is how other ranks learn that this one has left.
        let sink = Arc::downgrade(self.sink);
        let device = self.tokens.device.clone();
        // The gradient is not registered for the leaf: the reduced gradient comes from the bucket, and keeping both would
        // double the memory.
        let deliver = move |gradient: Tensor<D>| {
            if let Some(sink) = sink.upgrade() {
                sink.gradient(index, gradient.reshape([len]).to_device(&device));
            }
            None
        };
        let hooked = custom(tensor.clone(), tensor, &self.tokens.points[index], deliver);
        let Some(uses) = self.uses.cloned() else {
            return Some(Param::from_mapped_value(id, hooked, mapper));
        };
        let (device, shape) = (hooked.device(), hooked.shape());
        // Burn calls this at the first access.
        let read = move |_: &_, _| {
            uses.note(index);
            hooked
        };
        Some(Param::uninitialized(id, read, device, false, shape))
    }
}

#[cfg(test)]
mod tests;
