//! Recomputation: a forward pass that leaves nothing on the tape but its place, and is run again in the backward pass.
//!
//! ```text
//! tape:  parents (inputs, used parameters) <- deposits <- rerun <- outputs
//! ```
//!
//! In the backward pass the outputs keep their gradients, the rerun computes the block again on a tape of its own, starting
//! from them, and the deposits hand the gradients of that tape to the parents.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::module::{Module, Param, ParamId};
use burn::tensor::{GradientCheckpointingStrategy, Gradients, Tensor};

use crate::failure::Failure;
use crate::linear::UsedTwice;
use crate::params::{MapParams, map_params};
use crate::pass::BlockRun;
use crate::run::Run;
use crate::supply::Values;
use crate::tape::{Point, Slot, untracked};
use crate::tensors::{MapTensors, Tensors};

/// Counts the runs of [`checkpoint`] in a pass; no block has this index.
const UNNUMBERED: usize = usize::MAX;

/// A checkpointed function uses a tensor of the tape that it did not get as an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "checkpoint: the function captures a tensor that requires a gradient; expected such tensors only in its input and its module"
)]
pub struct CapturedTensor;

/// `f(module, input)`, computed again in the backward pass in place of keeping its intermediate values.
///
/// `f` must return the same for the same arguments, apart from the device's random numbers: both runs begin with the same
/// seed. It comes from the [`Pass`](crate::Pass); without a pass it is drawn from the device. Running statistics are updated
/// once.
///
/// *Shape*: any tensors in and out, see [`Tensors`].
///
/// *Numerics*: the bits of `f(module, input)`. A tensor that is used both inside (more than once) and outside gets the same
/// gradient up to the order of additions; a [`Block`](crate::Block) fixes this order too.
///
/// *Memory*: the input and output until the backward pass, the values inside `f` only while it runs.
///
/// *Cost*: one more forward pass. *Errors*: [`CapturedTensor`] as the failure of the pass; outside of a pass it panics.
///
/// *Source*: Chen et al. 2016, "Training deep nets with sublinear memory cost"; `torch.utils.checkpoint`.
///
/// *Example*:
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor, activation::gelu};
/// use paceline_nn::checkpoint;
///
/// let device = Device::flex().autodiff();
/// let layer: Linear = LinearConfig::new(4, 4).init(&device);
/// let input = Tensor::<2>::ones([2, 4], &device);
/// let output = checkpoint(&layer, input, |layer, x| gelu(layer.forward(x)));
/// assert!(layer.weight.grad(&output.sum().backward()).is_some());
/// ```
pub fn checkpoint<M, I, O>(module: &M, input: I, f: impl Fn(&M, I) -> O + Send + 'static) -> O
where
    M: Module + 'static,
    I: Tensors,
    O: Tensors,
{
    let run = Run::new(module, &input, UNNUMBERED);
    recomputed(module, input, run, f)
}

pub(crate) fn recomputed<M, I, O>(
    module: &M,
    input: I,
    mut run: Run,
    f: impl Fn(&M, I) -> O + Send + 'static,
) -> O
where
    M: Module + 'static,
    I: Tensors,
    O: Tensors,
{
    if run.is_off_tape() && !run.is_supplied() {
        return run.call(BlockRun::First, || f(module, input));
    }
    let mut parents = TakeOff {
        values: run.gather(),
        ..TakeOff::default()
    };
    // Inputs first, as `Block::forward` does: the bits depend on the order of the deposits.
    let values = input.clone().map(&mut parents);
    let off_tape = map_params(module.clone(), &mut parents);
    if run.is_off_tape() || parents.is_empty() {
        let how = match run.is_off_tape() {
            true => BlockRun::First,
            false => BlockRun::Once,
        };
        return run.call(how, || f(&off_tape, input));
    }
    drop(input);
    run.draw_seed();
    // With running statistics of its own, as they are before the first run updates those of the module.
    let saved = module.valid();
    let output = run.call(BlockRun::First, || f(&off_tape, values.clone()));
    drop(off_tape);

    let mut seen = Inspect::default();
    let output = output.map(&mut seen);
    if seen.is_tracked {
        Failure::current().set(CapturedTensor);
        return output;
    }
    let mut tip = None;
    let mut wanted = Wanted::default();
    for parent in parents.found {
        // A parameter that `f` did not read gets no gradient, as without recomputation.
        if !parent.is_used.load(Ordering::Relaxed) {
            continue;
        }
        let is_later = match parent.place {
            Place::Param(id) => run.defers(id),
            Place::Input(_) => false,
        };
        match parent.place {
            Place::Param(id) if is_later => drop(wanted.later.insert(id)),
            Place::Param(id) => drop(wanted.params.insert(id, parent.slot)),
            Place::Input(at) => drop(wanted.inputs.insert(at, parent.slot)),
        }
        tip = Some((parent.deposit)(tip, is_later));
    }
    for (id, is_used, anchor) in parents.supplied {
        if is_used.load(Ordering::Relaxed) {
            wanted.supplied.insert(id, Slot::default());
            tip = tip.or(Some(anchor));
        }
    }
    let Some(tip) = tip else { return output };
    let strategy = parents.strategy;
    let slots: Vec<Slot> = (0..seen.floats).map(|_| Slot::default()).collect();
    let gradients = slots.clone();
    let point = tip.then(move || {
        if run.failure().has_failed() {
            return;
        }
        let taken = wanted.supplied.clone();
        let mut leaves = Leaves::new(wanted, strategy, &run);
        let module = map_params(saved.train(), &mut leaves);
        let input = values.map(&mut leaves);
        let output = run.call(BlockRun::Second, || f(&module, input));
        drop(module);
        leaves.collect(output, gradients);
        run.scatter(&taken);
    });
    output.map(&mut Outputs {
        point,
        slots: slots.into_iter(),
    })
}

/// A tensor of the outer tape that may need a gradient from the block.
struct Parent {
    place: Place,
    is_used: Arc<AtomicBool>,
    slot: Slot,
    /// Makes the point deeper, or only makes sure that there is one for a gradient that is left for later.
    deposit: Box<dyn FnOnce(Option<Point>, bool) -> Point>,
}

enum Place {
    Param(ParamId),
    /// Position among the input's floating-point tensors.
    Input(usize),
}

/// Takes tensors off the tape and remembers those that are on it.
#[derive(Default)]
struct TakeOff {
    found: Vec<Parent>,
    inputs: usize,
    /// Burn's own checkpointing strategy, which `Module::valid` forgets.
    strategy: Option<GradientCheckpointingStrategy>,
    /// Gathered values, which replace placeholders.
    values: Values,
    /// The trained ones among them: whether they were used, and a point that can stand for them on the tape.
    supplied: Vec<(ParamId, Arc<AtomicBool>, Point)>,
}

impl TakeOff {
    fn is_empty(&self) -> bool {
        self.found.is_empty() && self.supplied.is_empty()
    }

    fn found<const D: usize>(&mut self, place: Place, tensor: Tensor<D>, is_used: Arc<AtomicBool>) {
        self.strategy = tensor.gradient_checkpointing_strategy();
        let slot = Slot::default();
        let left = slot.clone();
        self.found.push(Parent {
            place,
            is_used,
            slot,
            deposit: Box::new(move |tip, is_later| {
                if is_later {
                    return tip.unwrap_or_else(|| Point::leaf(&tensor));
                }
                let tip = tip.unwrap_or_else(|| Point::origin(&tensor));
                tip.deposit(tensor, move || left.take())
            }),
        });
    }
}

impl MapParams for TakeOff {
    fn map<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Param<Tensor<D>>> {
        let tensor = param.base();
        let is_trained = tensor.is_tracked();
        if let Some(value) = self.values.take(param) {
            let (param, is_used) = noticed(param.id, value);
            if is_trained {
                self.strategy = tensor.gradient_checkpointing_strategy();
                self.supplied
                    .push((param.id, is_used, Point::leaf(&tensor)));
            }
            return Some(param);
        }
        if !is_trained {
            return None;
        }
        let (param, is_used) = noticed(param.id, untracked(tensor.clone()));
        self.found(Place::Param(param.id), tensor, is_used);
        Some(param)
    }
}

/// `value` as a parameter that notes its first use.
fn noticed<const D: usize>(id: ParamId, value: Tensor<D>) -> (Param<Tensor<D>>, Arc<AtomicBool>) {
    let is_used = Arc::new(AtomicBool::new(false));
    let seen = is_used.clone();
    let (device, shape) = (value.device(), value.shape());
    // Burn calls this at the first access.
    let read = move |_: &_, _| {
        seen.store(true, Ordering::Relaxed);
        value
    };
    let param = Param::uninitialized(id, read, device, false, shape);
    (param, is_used)
}

impl MapTensors for TakeOff {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let place = Place::Input(self.inputs);
        self.inputs += 1;
        if tensor.is_tracked() {
            self.found(place, tensor.clone(), Arc::new(AtomicBool::new(true)));
        }
        untracked(tensor)
    }
}

#[derive(Default)]
struct Inspect {
    floats: usize,
    is_tracked: bool,
}

impl MapTensors for Inspect {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.floats += 1;
        self.is_tracked |= tensor.is_tracked();
        tensor
    }
}

struct Outputs {
    point: Point,
    slots: std::vec::IntoIter<Slot>,
}

impl MapTensors for Outputs {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let slot = self.slots.next().expect("one slot for each tensor");
        let keep = move |gradient| slot.put(Some(gradient));
        self.point.output(tensor, keep)
    }
}

/// The slots of tensors that need a gradient.
#[derive(Default)]
struct Wanted {
    params: HashMap<ParamId, Slot>,
    inputs: HashMap<usize, Slot>,
    /// Parameters whose gradients are left for later.
    later: HashSet<ParamId>,
    /// For row-major gradients.
    supplied: HashMap<ParamId, Slot>,
}

type Collect = Box<dyn FnOnce(&mut Gradients)>;

/// Makes leaves of the block's own tape.
struct Leaves {
    wanted: Wanted,
    strategy: Option<GradientCheckpointingStrategy>,
    values: Values,
    failure: Failure,
    inputs: usize,
    collect: Vec<Collect>,
}

impl Leaves {
    fn new(wanted: Wanted, strategy: Option<GradientCheckpointingStrategy>, run: &Run) -> Self {
        Self {
            wanted,
            strategy,
            values: run.gather(),
            failure: run.failure(),
            inputs: 0,
            collect: Vec::new(),
        }
    }

    /// A leaf whose gradient `put` gets after the backward pass.
    fn leaf<const D: usize>(
        &mut self,
        tensor: Tensor<D>,
        put: impl FnOnce(Option<Tensor<D>>) + 'static,
    ) -> Tensor<D> {
        let leaf = tensor.require_grad();
        let same = leaf.clone();
        self.collect
            .push(Box::new(move |all| put(same.grad_remove(all))));
        leaf
    }

    /// Runs the backward pass from the gradients of `output`, and puts those of the leaves into their slots.
    fn collect<O: Tensors>(self, output: O, gradients: Vec<Slot>) {
        let mut start = Start {
            tip: None,
            gradients: gradients.into_iter(),
        };
        // Dropped at once: only the tape holds the values inside the block now.
        drop(output.map(&mut start));
        if let Some(mut gradients) = start.tip.and_then(Point::backward) {
            self.collect.into_iter().for_each(|put| put(&mut gradients));
        }
    }
}

impl MapParams for Leaves {
    fn map<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Param<Tensor<D>>> {
        let (id, tensor, mapper) = param.clone().consume();
        let mut tensor = self.values.take(param).unwrap_or(untracked(tensor));
        if let Some(strategy) = self.strategy {
            tensor = tensor.with_gradient_checkpointing_strategy(strategy);
        }
        if let Some(slot) = self.wanted.params.remove(&id) {
            tensor = self.leaf(tensor, move |gradient| slot.put(gradient));
        } else if self.wanted.later.contains(&id) {
            let failure = self.failure.clone();
            tensor = self.leaf(tensor, move |gradient| {
                if gradient.is_some() {
                    failure.set(UsedTwice);
                }
            });
        } else if let Some(slot) = self.wanted.supplied.remove(&id) {
            let len = tensor.shape().num_elements();
            tensor = self.leaf(tensor, move |gradient| {
                slot.put(gradient.map(|gradient| gradient.reshape::<1, _>([len])));
            });
        }
        Some(Param::from_mapped_value(id, tensor, mapper))
    }
}

impl MapTensors for Leaves {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let slot = self.wanted.inputs.remove(&self.inputs);
        self.inputs += 1;
        match slot {
            // A new node: the first run has used the old one.
            Some(slot) => self.leaf(untracked(tensor), move |gradient| slot.put(gradient)),
            None => tensor,
        }
    }
}

/// Starts the backward pass: puts the gradients that the outputs have kept on the block's own tape.
struct Start {
    tip: Option<Point>,
    gradients: std::vec::IntoIter<Slot>,
}

impl MapTensors for Start {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let slot = self.gradients.next();
        let gradient = slot.and_then(|slot| slot.take::<D>());
        if gradient.is_some() {
            let tip = self.tip.take();
            let tip = tip.unwrap_or_else(|| Point::origin(&tensor));
            self.tip = Some(tip.deposit(tensor.clone(), move || gradient));
        }
        tensor
    }
}
