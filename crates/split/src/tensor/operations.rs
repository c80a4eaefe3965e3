//! Megatron's f and g: one tensor for each part out of a tensor, and the sum of the parts' tensors.

use std::iter::repeat;
use std::sync::{Arc, Mutex, MutexGuard};

use burn::tensor::Tensor;
use paceline_nn::Failure;
use paceline_nn::tape::{Point, plain};

use super::TensorParallel;
use super::exchange::Like;

impl TensorParallel {
    /// Megatron's *f*: `input`, which all ranks have alike, once for each part of this rank. In the backward pass it gets the
    /// sum of all parts' gradients, on all ranks alike.
    ///
    /// *Shape*: as many tensors as [`local`](Self::local) parts, each of the shape of `input`.
    ///
    /// *Cost*: nothing forward; backward an all-reduce of the input's elements, in f32, if there are several ranks.
    pub fn copy<const D: usize>(&self, input: Tensor<D>) -> Vec<Tensor<D>> {
        let copies = vec![input.clone(); self.local().len()];
        let slots = Slots::new(copies.len());
        let (tp, gradients, failure) = (self.clone(), slots.clone(), Failure::current());
        let like = Like::of(&input);
        let point = Point::origin(&input).deposit(input, move || {
            let parts = gradients.take(repeat(&like));
            Some(
                failure
                    .attempt(|| tp.sum(parts))
                    .unwrap_or_else(|| like.zeros()),
            )
        });
        slots.outputs(&point, copies)
    }

    /// Megatron's *g*: the sum of all parts' tensors, on all ranks alike. In the backward pass every part gets its gradient.
    ///
    /// *Shape*: one tensor for each [`local`](Self::local) part, all of one shape, which is the result's.
    ///
    /// *Cost*: an all-reduce of the result's elements, in f32, if there are several ranks; nothing backward.
    pub fn reduce<const D: usize>(&self, parts: Vec<Tensor<D>>) -> Tensor<D> {
        let values = parts.iter().cloned().map(plain).collect();
        let sum = Failure::current().attempt(|| self.sum(values));
        let sum = sum.unwrap_or_else(|| Like::of(&parts[0]).zeros());
        let slots = Slots::new(1);
        let point = deposits(parts, |_| {
            let slots = slots.clone();
            move || slots.get(0)
        });
        slots.outputs(&point, vec![sum]).remove(0)
    }
}

/// A point from which each of `parents` gets the gradient that its function returns.
pub(super) fn deposits<const D: usize, F>(
    parents: Vec<Tensor<D>>,
    gradient: impl Fn(usize) -> F,
) -> Point
where
    F: FnOnce() -> Option<Tensor<D>> + Send + 'static,
{
    let origin = Point::origin(&parents[0]);
    let parents = parents.into_iter().enumerate();
    parents.fold(origin, |point, (at, parent)| {
        point.deposit(parent, gradient(at))
    })
}

/// The gradients of an operation's outputs, on their way to its inputs.
#[derive(Clone)]
pub(super) struct Slots<const D: usize>(Arc<Mutex<Vec<Option<Tensor<D>>>>>);

impl<const D: usize> Slots<D> {
    pub(super) fn new(count: usize) -> Self {
        Self(Arc::new(Mutex::new(vec![None; count])))
    }

    pub(super) fn filled(values: Vec<Tensor<D>>) -> Self {
        let slots = Self::new(0);
        slots.fill(values);
        slots
    }

    /// Takes one out.
    pub(super) fn pull(&self, at: usize) -> Option<Tensor<D>> {
        self.lock().get_mut(at)?.take()
    }

    pub(super) fn put(&self, at: usize, gradient: Tensor<D>) {
        self.lock()[at] = Some(gradient);
    }

    /// The values that [`fill`](Self::fill) left, or a gradient.
    pub(super) fn get(&self, at: usize) -> Option<Tensor<D>> {
        self.lock().get(at)?.clone()
    }

    pub(super) fn fill(&self, values: Vec<Tensor<D>>) {
        *self.lock() = values.into_iter().map(Some).collect();
    }

    /// All gradients; zeros like the output for one that the loss does not depend on.
    pub(super) fn take<'a>(&self, likes: impl IntoIterator<Item = &'a Like<D>>) -> Vec<Tensor<D>> {
        let taken = std::mem::take(&mut *self.lock()).into_iter();
        taken
            .zip(likes)
            .map(|(slot, like)| slot.unwrap_or_else(|| like.zeros()))
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Tensor<D>>>> {
        self.0.lock().expect("no holder panics")
    }

    /// `values` as outputs of `point`, whose gradients come here.
    pub(super) fn outputs(&self, point: &Point, values: Vec<Tensor<D>>) -> Vec<Tensor<D>> {
        let outputs = values.into_iter().enumerate();
        outputs
            .map(|(at, values)| {
                let slots = self.clone();
                point.output(values, move |gradient| slots.put(at, gradient))
            })
            .collect()
    }
}
