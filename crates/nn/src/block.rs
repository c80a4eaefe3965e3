//! `Block`: the seam at which the layout of a model acts.

use std::cell::Cell;
use std::collections::VecDeque;

use burn::module::{
    Content, Devices, DisplaySettings, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper,
    ModuleVisitor, Param,
};
use burn::tensor::{Device, GradientCheckpointingStrategy, Tensor};

use crate::checkpoint::recomputed;
use crate::params::{MapParams, map_params};
use crate::pass::{BlockRun, Pass, Recompute};
use crate::run::Run;
use crate::tape::{Point, Slot, custom};
use crate::tensors::{Kind, MapTensors, Tensors};

/// One of the parts that a model is a sequence of, such as a transformer layer.
///
/// A block is its module to everything else: its parameters have the module's paths and ids, so records, optimizers and
/// saved states do not change when a block is put around a module. Only [`forward`](Self::forward) differs. The [`Pass`] of
/// the thread says how it runs, and gives it random numbers of its own.
///
/// *Numerics*: the same bits under every [`Recompute`]. The exception: a block that uses its input in three or more places, one of
/// them directly with a parameter that passes a hook of `Ddp` registered late, differs in last bits if it is not recomputed. The
/// order of additions follows the depth of nodes on the tape; a hook's depth is what lets gradients leave within a block.
///
/// *Example*:
/// ```
/// use burn::module::Module;
/// use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use paceline_nn::{Block, Pass, Recompute};
///
/// #[derive(Module, Debug)]
/// struct Layer {
///     linear: Linear,
///     dropout: Dropout,
/// }
///
/// #[derive(Module, Debug)]
/// struct Net {
///     layers: Vec<Block<Layer>>,
/// }
///
/// impl Net {
///     fn forward(&self, input: Tensor<2>) -> Tensor<2> {
///         self.layers.iter().fold(input, |x, layer| {
///             layer.forward(x, |layer, x| layer.dropout.forward(layer.linear.forward(x.clone())) + x)
///         })
///     }
/// }
///
/// let device = Device::flex().autodiff();
/// let layer = |index| Block::new(index, Layer {
///     linear: LinearConfig::new(8, 8).init(&device),
///     dropout: DropoutConfig::new(0.1).init(),
/// });
/// let net = Net { layers: (0..4).map(layer).collect() };
/// let pass = Pass::new(Recompute::Blocks).with_seed(1);
/// let gradients = pass.enter(|| net.forward(Tensor::ones([2, 8], &device)).sum().backward());
/// assert!(net.layers[0].module().linear.weight.grad(&gradients).is_some());
/// pass.finish().unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Block<M> {
    index: usize,
    is_shared: bool,
    module: M,
}

impl<M: Module + 'static> Block<M> {
    /// Makes `module` the block with this index. The indices of a model's blocks differ, and are in the order of the forward
    /// pass.
    pub fn new(index: usize, module: M) -> Self {
        Self {
            index,
            is_shared: false,
            module,
        }
    }

    /// A block whose parameters are also read outside of it, as a language model's head reads those of the embedding. No
    /// layout takes them out of the module.
    pub fn shared(index: usize, module: M) -> Self {
        Self {
            is_shared: true,
            ..Self::new(index, module)
        }
    }

    /// The block's index.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The module.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// The block with another module in its place, such as a part of it.
    ///
    /// *Errors*: those of `change`.
    pub fn try_map<N, E>(self, change: impl FnOnce(M) -> Result<N, E>) -> Result<Block<N>, E> {
        Ok(Block {
            index: self.index,
            is_shared: self.is_shared,
            module: change(self.module)?,
        })
    }

    /// Runs `f(module, input)` as the current [`Pass`] says; without a pass it just runs.
    ///
    /// `f` is run again if the block is recomputed. It must therefore not capture a tensor that requires a gradient, and must
    /// depend on nothing but its arguments, captured constants, and the device's random numbers. Under [`Recompute::Burn`]
    /// pass masks and other tensors in the input too, because Burn does not mix checkpointing strategies.
    ///
    /// An input on another device than the module is copied to it first, so the blocks of a model may be on several devices.
    ///
    /// *Shape*: any tensors in and out, see [`Tensors`].
    ///
    /// *Numerics*: the gradients of all uses of a tensor inside the block are added first. For the bits of tensors that three
    /// or more blocks use, such as an encoder's output in a decoder, put the tensor that flows from block to block first.
    ///
    /// *Memory*, *Cost*, *Errors*: as for [`checkpoint`](crate::checkpoint) if the block is recomputed.
    pub fn forward<I, O>(&self, input: I, f: impl Fn(&M, I) -> O + Send + 'static) -> O
    where
        I: Tensors,
        O: Tensors,
    {
        let policy = Pass::current().map_or(Recompute::None, |pass| pass.recompute());
        let run = Run::new(&self.module, &input, self.index);
        let input = run.near(input);
        if run.is_off_tape() || run.is_supplied() || policy.includes(self.index) {
            return recomputed(&self.module, input, run, f);
        }
        let strategy = policy == Recompute::Burn;
        let mut enter = Enter {
            strategy: strategy.then_some(GradientCheckpointingStrategy::Balanced),
            ..Enter::default()
        };
        let input = input.map(&mut enter);
        let mut join = Join(enter);
        let input = input.map(&mut join);
        let module = map_params(self.module.clone(), &mut join);
        let output = run.call(BlockRun::Once, || f(&module, input));
        match join.0.before {
            Some(before) if strategy => output.map(&mut SetStrategy(before)),
            _ => output,
        }
    }
}

thread_local! {
    /// Index of a block, and whether it is shared.
    static VISITED: Cell<Option<(usize, bool)>> = const { Cell::new(None) };
}

/// The index of the outermost block that a visitor or mapper is in on this thread.
///
/// *Example*: the parameters of each block
/// ```
/// use std::collections::HashMap;
///
/// use burn::module::{Module, ModuleVisitor, Param, ParamId};
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use paceline_nn::{Block, visited_block};
///
/// struct Owners(HashMap<ParamId, Option<usize>>);
///
/// impl ModuleVisitor for Owners {
///     fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
///         self.0.insert(param.id, visited_block());
///     }
/// }
///
/// let linear = || LinearConfig::new(2, 2).init(&Device::flex());
/// let model = (linear(), vec![Block::new(0, linear()), Block::new(1, linear())]);
/// let mut owners = Owners(HashMap::new());
/// model.visit(&mut owners);
/// assert_eq!(owners.0[&model.0.weight.id], None);
/// assert_eq!(owners.0[&model.1[1].module().weight.id], Some(1));
/// ```
pub fn visited_block() -> Option<usize> {
    VISITED.get().map(|(index, _)| index)
}

/// Whether a visitor or mapper is in a [shared](Block::shared) block on this thread.
pub fn visited_is_shared() -> bool {
    VISITED.get().is_some_and(|(_, is_shared)| is_shared)
}

/// While it lives, the thread is in the block; in a nested one it stays in the outer one.
struct Within(Option<(usize, bool)>);

impl Within {
    fn enter<M>(block: &Block<M>) -> Self {
        let outer = VISITED.get();
        let (index, is_shared) = outer.unwrap_or((block.index, false));
        VISITED.set(Some((index, is_shared || block.is_shared)));
        Self(outer)
    }
}

impl Drop for Within {
    fn drop(&mut self) {
        VISITED.set(self.0);
    }
}

/// Goes through the inputs: the gradients of the uses inside the block are added in a slot before they reach an input, as
/// when the block is recomputed.
#[derive(Default)]
struct Enter {
    tip: Option<Point>,
    slots: VecDeque<Slot>,
    /// The checkpointing strategy inside the block, if not that of its tensors.
    strategy: Option<GradientCheckpointingStrategy>,
    /// The strategy outside.
    before: Option<GradientCheckpointingStrategy>,
}

impl MapTensors for Enter {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        if tensor.is_tracked() {
            let slot = Slot::default();
            self.slots.push_back(slot.clone());
            let tip = self.tip.take();
            let tip = tip.unwrap_or_else(|| Point::origin(&tensor));
            self.tip = Some(tip.deposit(tensor.clone(), move || slot.take()));
        }
        tensor
    }
}

/// Puts a node between each tensor and its uses inside the block.
struct Join(Enter);

impl Join {
    fn set<const D: usize, K: Kind>(&self, tensor: Tensor<D, K>) -> Tensor<D, K> {
        match self.0.strategy {
            Some(strategy) => SetStrategy(strategy).any(tensor),
            None => tensor,
        }
    }
}

impl MapTensors for Join {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.0.before = self.0.before.or(tensor.gradient_checkpointing_strategy());
        let tensor = match &self.0.tip {
            Some(tip) if tensor.is_tracked() => {
                let slot = self.0.slots.pop_front().expect("one slot for each input");
                tip.output(tensor, move |gradient| slot.put(Some(gradient)))
            }
            _ => tensor,
        };
        self.set(tensor)
    }

    fn any<const D: usize, K: Kind>(&mut self, tensor: Tensor<D, K>) -> Tensor<D, K> {
        self.set(tensor)
    }
}

impl MapParams for Join {
    fn map<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Param<Tensor<D>>> {
        let (id, mut tensor, mapper) = param.clone().consume();
        self.0.before = self.0.before.or(tensor.gradient_checkpointing_strategy());
        if tensor.is_tracked() {
            let after = self.0.tip.clone();
            let after = after.unwrap_or_else(|| Point::origin(&tensor));
            tensor = custom(tensor.clone(), tensor, &after, Some);
        } else if self.0.strategy.is_none() {
            return None;
        }
        Some(Param::from_mapped_value(id, self.set(tensor), mapper))
    }
}

/// Changes Burn's checkpointing strategy for the operations that follow.
struct SetStrategy(GradientCheckpointingStrategy);

impl MapTensors for SetStrategy {
    fn any<const D: usize, K: Kind>(&mut self, tensor: Tensor<D, K>) -> Tensor<D, K> {
        match tensor.gradient_checkpointing_strategy() {
            Some(_) => tensor.with_gradient_checkpointing_strategy(self.0),
            None => tensor,
        }
    }
}

impl<M: Module> Module for Block<M> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.module.collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.with(|module| module.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.with(|module| module.to_device(device))
    }

    fn train(self) -> Self {
        self.with(Module::train)
    }

    fn valid(&self) -> Self {
        Self {
            index: self.index,
            is_shared: self.is_shared,
            module: self.module.valid(),
        }
    }

    fn materialize(self) -> Self {
        self.with(Module::materialize)
    }

    fn num_params(&self) -> usize {
        self.module.num_params()
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let _within = Within::enter(self);
        self.module.visit(visitor);
    }

    fn map<Mapper: ModuleMapper>(self, mapper: &mut Mapper) -> Self {
        let _within = Within::enter(&self);
        self.with(|module| module.map(mapper))
    }
}

impl<M> Block<M> {
    fn with(self, change: impl FnOnce(M) -> M) -> Self {
        Self {
            index: self.index,
            is_shared: self.is_shared,
            module: change(self.module),
        }
    }
}

impl<M: ModuleDisplay> ModuleDisplayDefault for Block<M> {
    fn content(&self, content: Content) -> Option<Content> {
        self.module.content(content)
    }

    fn num_params(&self) -> usize {
        self.module.num_params()
    }
}

impl<M: ModuleDisplay> ModuleDisplay for Block<M> {
    fn format(&self, settings: DisplaySettings) -> String {
        self.module.format(settings)
    }
}
