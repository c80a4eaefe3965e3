//! `ZeroRedundancyOptimizer`: each rank keeps the optimizer state, at stage 2 the gradients and at stage 3 the weights of its
//! slices of the parameters only (ZeRO).
//!
//! ```text
//!  backward   bucket complete -> reduce_scatter: each rank gets its slice of the average, in the bucket's memory
//!  step       the optimizer updates this rank's slices of the weights
//!             all_gather: every rank's slices, in the same memory -> whole weights on every rank
//! ```
//!
//! The two halves move the bytes of one all-reduce.

mod sharded;
mod shares;
mod stage;
mod trial;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use paceline_collective::ProcessGroup;

use crate::buffer::{self, Value};
use crate::ddp::Ddp;
use crate::error::DdpError;
use crate::plan::BucketPlan;
use crate::reducer::{IN_FLIGHT, Reducer};
pub(crate) use sharded::{Setup, Sharded};
pub(crate) use shares::{CHUNK, Shares};
pub use stage::{ZeroStage, ZeroStageParseError};

/// A Burn optimizer whose state is dealt to the ranks: each keeps and updates about `1 / world` of it, and all ranks get the
/// updated weights.
///
/// As with PyTorch's class of this name, the model stays whole on every rank, and by default its gradients' buckets do too;
/// [`at_stage`](Self::at_stage) deals the gradients and the weights.
///
/// *Numerics*: the bits of the weights are those of the optimizer without it, on any number of ranks. An optimizer that
/// treats elements one by one (SGD, Adam, AdamW, RMSProp, Lion, ...) gets slices of parameters; for any other (Lamb, Adafactor,
/// Muon, clipping per parameter) each rank owns whole parameters. A short trial on small tensors decides, parameter by
/// parameter. L-BFGS is not a `ModuleOptimizer`: it treats the model as one vector, and runs the loss in its step.
///
/// *Memory*: a rank has the optimizer state of `parameters / world` elements, give or take a chunk of 1024 elements for each
/// bucket. *Cost*: per step the bytes of an all-reduce, half of them after the backward pass; the optimizer's time is divided
/// by the number of ranks.
///
/// *Source*: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.
///
/// *Example*:
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::{Device, Tensor};
/// use paceline_collective::{GroupOptions, ProcessGroup};
/// use paceline_ddp::sampler::BatchOptions;
/// use paceline_ddp::{Ddp, DdpOptions, ZeroRedundancyOptimizer};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let group = ProcessGroup::local(1, &GroupOptions::default())?.remove(0);
/// # let device = Device::flex().autodiff();
/// let model: Linear = LinearConfig::new(4, 2).init(&device);
/// let (mut ddp, mut model) = Ddp::new(group, model, DdpOptions::default())?;
/// let mut optimizer = ZeroRedundancyOptimizer::new(&mut ddp, &model, AdamWConfig::new().init())?;
/// for plan in ddp.batches(100, BatchOptions::new(32).epochs(2))? {
///     let reduced = ddp.step_on(&model, &plan, |model, indices| {
///         model.forward(Tensor::<2>::ones([indices.len(), 4], &device)).powf_scalar(2.0).mean()
///     })?;
///     model = optimizer.step(0.1, model, reduced.grads)?;
/// }
/// # Ok(())
/// # }
/// ```
pub struct ZeroRedundancyOptimizer {
    inner: ModuleOptimizer,
    group: ProcessGroup,
    reducer: Arc<dyn Reducer>,
    plan: Arc<BucketPlan>,
    /// By index of the parameter.
    parameters: Vec<(ParamId, Vec<usize>)>,
    shares: Arc<Shares>,
    /// This rank's slices that are not empty.
    owned: HashMap<ParamId, Range<usize>>,
    /// The parameters of which the model has placeholders.
    sharded: Option<Arc<Sharded>>,
}

/// How gradients and weights are dealt to the ranks.
pub(crate) struct Dealt {
    pub(crate) plan: Arc<BucketPlan>,
    pub(crate) shares: Arc<Shares>,
    pub(crate) reducer: Arc<dyn Reducer>,
    pub(crate) sharded: Option<Arc<Sharded>>,
}

/// A parameter, and a rank's part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Burn's id of the parameter.
    pub id: u64,
    /// The elements, row-major, that the rank owns; may be empty.
    pub range: Range<usize>,
    /// The parameter's whole shape.
    pub shape: Vec<usize>,
}

impl Slice {
    /// Whether a tensor of so many elements is this slice of a parameter that several ranks share.
    pub fn is_part(&self, elements: usize) -> bool {
        elements == self.range.len() && elements < self.shape.iter().product()
    }
}

impl ZeroRedundancyOptimizer {
    /// Deals the state of `optimizer` to the ranks. From now on [`Ddp::step`] returns gradients of this rank's slices, which
    /// only this optimizer's [`step`](Self::step) takes. All ranks call it, before their first step.
    ///
    /// *Cost*: nine steps of the optimizer on small tensors.
    ///
    /// *Errors*: no memory for the buckets.
    pub fn new<M: Module>(
        ddp: &mut Ddp,
        model: &M,
        optimizer: ModuleOptimizer,
    ) -> Result<Self, DdpError> {
        let made = Self::at_stage(ddp, model.clone(), optimizer, ZeroStage::Optimizer)?;
        Ok(made.0)
    }

    /// As [`new`](Self::new), at any stage. At stage 3 the model that it returns has placeholders: use it with [`Ddp::step`],
    /// [`Ddp::evaluate`] and [`Ddp::export`] only.
    ///
    /// A model whose stages or tensors are on several ranks: after [`Ddp::join_parts`] and [`Ddp::set_placement`]. The replicas of
    /// what this rank has, which are the ranks of [`Ddp::group`], then share its state.
    ///
    /// *Example*: ZeRO-3
    /// ```
    /// # use burn::module::Module;
    /// # use burn::optim::AdamWConfig;
    /// # use paceline_ddp::{Ddp, DdpError, ZeroRedundancyOptimizer, ZeroStage};
    /// # fn shard<M: Module>(ddp: &mut Ddp, model: M) -> Result<(), DdpError> {
    /// let optimizer = AdamWConfig::new().init();
    /// let (optimizer, model) =
    ///     ZeroRedundancyOptimizer::at_stage(ddp, model, optimizer, ZeroStage::Parameters)?;
    /// # drop((optimizer, model));
    /// # Ok(())
    /// # }
    /// ```
    pub fn at_stage<M: Module>(
        ddp: &mut Ddp,
        model: M,
        optimizer: ModuleOptimizer,
        stage: ZeroStage,
    ) -> Result<(Self, M), DdpError> {
        let whole = trial::whole_only(&model, &optimizer);
        let (dealt, model) = ddp.deal(model, stage, |id| whole.contains(&id))?;
        let Dealt {
            plan,
            shares,
            reducer,
            sharded,
        } = dealt;
        let group = ddp.group().clone();
        let parameters = ddp.parameters();
        let parameters = parameters
            .iter()
            .map(|entry| (entry.id, entry.shape.clone()));
        let parameters: Vec<_> = parameters.collect();
        let ids = parameters.iter().map(|(id, _)| *id).enumerate();
        let owned = ids.map(|(index, id)| (id, shares.owned(&plan, index, group.rank())));
        let made = Self {
            inner: optimizer,
            owned: owned.filter(|(_, range)| !range.is_empty()).collect(),
            reducer,
            group,
            plan,
            parameters,
            shares,
            sharded,
        };
        Ok((made, model))
    }

    /// Updates this rank's slices with the gradients of [`Ddp::step`], and returns the model with all ranks' updates.
    ///
    /// *Blocks*: until all ranks have sent their slices, at most the group's timeout per bucket.
    ///
    /// *Errors*: failed collectives; a device that cannot be read.
    pub fn step<M: Module>(
        &mut self,
        rate: impl Into<ModuleLearningRate>,
        model: M,
        grads: GradientsParams,
    ) -> Result<M, DdpError> {
        let sharded = self.sharded.as_deref();
        let taken = sharded.map(Sharded::take_slices).unwrap_or_default();
        let taken = taken.into_iter().map(|(index, values)| {
            let (id, shape) = &self.parameters[index];
            (*id, (values, shape.clone().into()))
        });
        let own = buffer::sliced(model.clone(), &self.owned, taken.collect());
        let own = self.inner.step(rate, own, grads);
        let is_owned = |id| self.owned.contains_key(&id);
        let is_dealt = |id| sharded.is_some_and(|sharded| sharded.contains(id));
        let mut updated: HashMap<ParamId, Value> = match self.reducer.is_on_host() {
            true => {
                let read = buffer::read_parameters(own, is_owned)?.into_iter();
                read.map(|(id, values)| (id, Value::Host(values))).collect()
            }
            false => {
                let tensors = buffer::flat_parameters(&own, is_owned).into_iter();
                let values = tensors.map(|(id, tensor)| (id, Value::Device(Box::new(tensor))));
                values.collect()
            }
        };
        let ids = self.parameters.iter().map(|(id, _)| id).enumerate();
        let mut values = HashMap::new();
        for (index, id) in ids {
            match (updated.remove(id), sharded) {
                (Some(own), Some(sharded)) if is_dealt(*id) => {
                    sharded.put_slice(index, own);
                }
                (Some(own), _) => drop(values.insert(index, own)),
                (None, _) => {}
            }
        }
        let first = sharded.map_or(0, Sharded::buckets);
        let (mut model, buckets) = (model, self.plan.tail());
        // A few at once: their memory may be pooled.
        for next in first..buckets + IN_FLIGHT {
            if next < buckets {
                self.reducer.send_weights(next, &values)?;
            }
            let Some(bucket) = next.checked_sub(IN_FLIGHT).filter(|at| *at >= first) else {
                continue;
            };
            let arrived = self.reducer.receive_weights(bucket)?.values.into_iter();
            let arrived = arrived.map(|(index, value)| (self.parameters[index].0, value));
            model = buffer::write_parameters(model, arrived.collect());
        }
        Ok(model)
    }

    /// The slices of a rank, in the order of the model's parameters.
    pub fn slices(&self, rank: usize) -> Vec<Slice> {
        let parameters = self.parameters.iter().enumerate();
        let slices = parameters.map(|(index, (id, shape))| Slice {
            id: id.val(),
            range: self.shares.owned(&self.plan, index, rank),
            shape: shape.clone(),
        });
        slices.collect()
    }

    /// The process group whose ranks share the state.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// The group that gathers blocks' parameters at stage 3, with memory and threads of its own.
    pub fn gathers(&self) -> Option<&ProcessGroup> {
        self.sharded.as_deref().map(Sharded::gathers)
    }

    /// The optimizer with this rank's part of the state.
    pub fn local(&self) -> &ModuleOptimizer {
        &self.inner
    }

    /// The same with another state of this rank's slices.
    #[must_use]
    pub fn with_local(self, inner: ModuleOptimizer) -> Self {
        Self { inner, ..self }
    }
}
