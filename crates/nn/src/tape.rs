//! Backward steps of our own on Burn's autodiff tape. With `values.rs` the only file of this crate that knows Burn's internals.
//!
//! Burn runs its tape by node depth, deepest first, and a node is one deeper than its deepest parent. Every function here
//! makes a node with two parents: one that may get a gradient, and a [`Point`], which fixes the place in that order.
//!
//! A step must not use a tensor of the tape that it runs on: Burn holds the tape's lock, which is not reentrant. A backward
//! pass on another tape is fine.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex};

#[cfg(feature = "cube")]
use burn::backend::Cube;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients as Registered;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, Backend, BackendTensor, BackendTypes, Dispatch, DispatchAutodiffContext,
    DispatchTensor, DispatchTensorKind, Flex, TensorMetadata, backend_extension,
};
use burn::tensor::{Device, FloatDType, Gradients, Shape, Tensor};

/// `output`, which was computed elsewhere, as a function of `parent`. In the backward pass `step` gets the gradient of the
/// output and returns the parent's.
///
/// If `step` returns `None`, a leaf gets no gradient, and any other parent gets zeros, because its own step needs one.
/// Without autodiff, or if neither `parent` nor `after` is tracked, `step` never runs.
///
/// *Shape*: the step's result has the shape of `parent`.
pub fn custom<const D: usize, const E: usize>(
    output: Tensor<E>,
    parent: Tensor<D>,
    after: &Point,
    step: impl FnOnce(Tensor<E>) -> Option<Tensor<D>> + Send + 'static,
) -> Tensor<E> {
    let step = Step::new(true, move |gradient| {
        let gradient = gradient.expect("a step that takes a gradient gets one");
        step(Tensor::from_dispatch(gradient)).map(|gradient| plain(gradient).into_dispatch())
    });
    node(output, parent, after, step)
}

/// A place on the tape without a value.
#[derive(Clone, Debug)]
pub struct Point(Tensor<1>);

impl Point {
    /// The start of a tape, on the device and with the checkpointing strategy of `like`.
    pub fn origin<const D: usize>(like: &Tensor<D>) -> Self {
        Self(untracked_like(
            Tensor::zeros([1], &like.device().inner()),
            like,
        ))
    }

    /// The start of a tape on `device`.
    pub fn on(device: &Device) -> Self {
        Self(Tensor::zeros([1], device))
    }

    /// A tracked start of a tape, for a node without a tracked parent of its own; on the device of `like`.
    pub fn leaf<const D: usize>(like: &Tensor<D>) -> Self {
        Self(Self::origin(like).0.require_grad())
    }

    /// A point `depth` nodes deeper. It is not tracked.
    ///
    /// *Cost*: `depth` operations on one element.
    #[must_use]
    pub fn deeper(&self, depth: usize) -> Self {
        Self((0..depth).fold(self.0.clone(), |tip, _| tip.add_scalar(0.0)))
    }

    /// Frees the nodes that nothing refers to any more. Burn does this in a backward pass only.
    pub fn sweep(&self) {
        drop(Self::leaf(&self.0).backward());
    }

    /// Whether a backward pass from here reaches anything.
    pub fn is_tracked(&self) -> bool {
        self.0.is_tracked()
    }

    /// A deeper point. When the backward pass has passed it, `parent` gets the gradient that `gradient` returns; see
    /// [`custom`] for `None`.
    ///
    /// A chain of deposits gives one step any number of parents.
    #[must_use]
    pub fn deposit<const D: usize>(
        self,
        parent: Tensor<D>,
        gradient: impl FnOnce() -> Option<Tensor<D>> + Send + 'static,
    ) -> Self {
        let step = Step::new(false, move |_| {
            gradient().map(|gradient| plain(gradient).into_dispatch())
        });
        Self(node(self.0.clone(), parent, &self, step))
    }

    /// [`deposit`](Self::deposit) of what `slot` has then. Nothing if `parent` is not tracked.
    pub(crate) fn deposit_from<const D: usize>(self, parent: Tensor<D>, slot: &Slot) -> Self {
        if !parent.is_tracked() {
            return self;
        }
        let slot = slot.clone();
        self.deposit(parent, move || slot.take())
    }

    /// A deeper point at which the backward pass runs `step`, before the deposits that this point was made from.
    #[must_use]
    pub fn then(self, step: impl FnOnce() + Send + 'static) -> Self {
        let parent = untracked(self.0.clone());
        let step = Step::new(false, move |_| {
            step();
            None
        });
        Self(node(self.0.clone(), parent, &self, step))
    }

    /// `values`, which were computed elsewhere, as an output of this point. The backward pass gives their gradient to `keep`
    /// before it reaches the point.
    pub fn output<const D: usize>(
        &self,
        values: Tensor<D>,
        keep: impl FnOnce(Tensor<D>) + Send + 'static,
    ) -> Tensor<D> {
        let step = Step::new(true, move |gradient| {
            let gradient = gradient.expect("a step that takes a gradient gets one");
            keep(Tensor::from_dispatch(gradient));
            None
        });
        node(values, untracked(self.0.clone()), self, step)
    }

    /// Runs the backward pass from here. With deposits of given gradients this is a backward pass that starts from them.
    ///
    /// Returns `None` if the point is not tracked.
    pub fn backward(self) -> Option<Gradients> {
        self.is_tracked().then(|| self.0.backward())
    }
}

/// The values of `tensor`, without autodiff.
pub fn plain<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    tensor.inner()
}

/// The values of `tensor`, with autodiff but off every tape. Layers that look at the device behave as in training.
pub fn untracked<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    let like = tensor.clone();
    untracked_like(tensor, &like)
}

/// The values of `tensor` off every tape, with autodiff and the checkpointing strategy of `like`.
pub fn untracked_like<const D: usize, const E: usize>(
    tensor: Tensor<D>,
    like: &Tensor<E>,
) -> Tensor<D> {
    match like.gradient_checkpointing_strategy() {
        None => plain(tensor),
        Some(strategy) => plain(tensor)
            .autodiff()
            .with_gradient_checkpointing_strategy(strategy),
    }
}

/// A gradient on its way from one tape to another.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slot(Arc<Mutex<Option<Box<dyn Any + Send>>>>);

impl Slot {
    pub(crate) fn put<const D: usize>(&self, gradient: Option<Tensor<D>>) {
        *self.0.lock().expect("no holder panics") = gradient.map(|tensor| Box::new(tensor) as _);
    }

    pub(crate) fn take<const D: usize>(&self) -> Option<Tensor<D>> {
        let gradient = self.0.lock().expect("no holder panics").take()?;
        let gradient = gradient.downcast();
        Some(*gradient.expect("a slot belongs to one tensor"))
    }
}

fn node<const D: usize, const E: usize>(
    output: Tensor<E>,
    parent: Tensor<D>,
    after: &Point,
    step: Step,
) -> Tensor<E> {
    let output = untracked_like(output, &parent);
    Tensor::from_dispatch(Dispatch::node(
        output.into_dispatch(),
        parent.into_dispatch(),
        after.0.clone().into_dispatch(),
        step,
    ))
}

type Run = dyn FnOnce(Option<DispatchTensor>) -> Option<DispatchTensor> + Send;

/// What a node does in the backward pass. `Clone` because Burn demands it; it runs once.
#[derive(Clone)]
pub(crate) struct Step {
    takes_gradient: bool,
    run: Arc<Mutex<Option<Box<Run>>>>,
}

impl Step {
    fn new(
        takes_gradient: bool,
        run: impl FnOnce(Option<DispatchTensor>) -> Option<DispatchTensor> + Send + 'static,
    ) -> Self {
        Self {
            takes_gradient,
            run: Arc::new(Mutex::new(Some(Box::new(run)))),
        }
    }
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Step")
    }
}

/// The node as a backend operation; without autodiff it is `output` alone.
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub(crate) trait NodeOps: Backend {
    fn node(
        output: FloatTensor<Self>,
        parent: FloatTensor<Self>,
        after: FloatTensor<Self>,
        step: Step,
    ) -> FloatTensor<Self> {
        let _ = (parent, after, step);
        output
    }
}

/// Converts between a back end's own tensor and one of any back end.
pub(crate) trait Lift: Backend {
    fn lift(tensor: FloatTensor<Self>) -> DispatchTensorKind;
    fn lower(kind: DispatchTensorKind) -> FloatTensor<Self>;
}

macro_rules! back_end {
    ($name:ident) => {
        impl NodeOps for $name {}

        impl Lift for $name {
            fn lift(tensor: FloatTensor<Self>) -> DispatchTensorKind {
                DispatchTensorKind::$name(BackendTensor::Float(tensor))
            }

            fn lower(kind: DispatchTensorKind) -> FloatTensor<Self> {
                match kind {
                    DispatchTensorKind::$name(tensor) => tensor.float(),
                    other => panic!("a step returned a tensor of another back end: {other:?}"),
                }
            }
        }
    };
}

back_end!(Flex);
#[cfg(feature = "cube")]
back_end!(Cube);

impl<B: NodeOps + Lift, C: CheckpointStrategy> NodeOps for Autodiff<B, C> {
    fn node(
        output: FloatTensor<Self>,
        parent: FloatTensor<Self>,
        after: FloatTensor<Self>,
        step: Step,
    ) -> FloatTensor<Self> {
        let output = output.into_primitive();
        let like = Like {
            shape: parent.shape(),
            device: parent.device(),
            dtype: parent.dtype().into(),
        };
        let (_, parent) = parent.into_parts();
        let (_, after) = after.into_parts();
        match NodeStep
            .prepare::<C>([parent, after])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish((step, like), output),
            OpsKind::UnTracked(prep) => prep.finish(output),
        }
    }
}

/// What zeros in place of a parent's gradient look like.
#[derive(Clone, Debug)]
struct Like<D> {
    shape: Shape,
    device: D,
    dtype: FloatDType,
}

#[derive(Debug)]
struct NodeStep;

impl<B: Lift> Backward<B, 2> for NodeStep {
    type State = (Step, Like<<B as BackendTypes>::Device>);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Registered,
        _checkpointer: &mut Checkpointer,
    ) {
        let (step, like) = ops.state;
        let gradient = step.takes_gradient.then(|| DispatchTensor {
            kind: B::lift(grads.consume::<B>(&ops.node)),
            autodiff: DispatchAutodiffContext::Disabled,
        });
        let run = step.run.lock().expect("no holder panics").take();
        let run = run.expect("a step runs once");
        let result = run(gradient).map(|gradient| B::lower(gradient.kind));
        let [parent, _] = ops.parents;
        let Some(parent) = parent else { return };
        // A leaf has no step of its own that would need a gradient.
        let is_leaf = parent.order == 0;
        let zeros = || B::float_zeros(like.shape, &like.device, like.dtype);
        if let Some(gradient) = result.or_else(|| (!is_leaf).then(zeros)) {
            grads.register::<B>(parent.id, gradient);
        }
    }
}
