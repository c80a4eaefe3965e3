//! The contents of a checkpoint: the program names the parts, and only the writing rank copies them.

use std::collections::BTreeMap;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, TensorData};
use paceline_ddp::sampler::SamplerState;
use paceline_ddp::{Ddp, device, weights};
use serde::Serialize;
use serde_json::Value;

use crate::error::CheckpointError;
use crate::optimizer::{self, OptimizerRef};

/// The parts of a checkpoint: a model, its optimizer and any other state that the program resumes from.
///
/// Step, seed and gradient scaler come from the `Ddp` that it is [saved](crate::Checkpoints::save) with.
#[derive(Clone)]
pub struct Checkpoint<'a, M> {
    model: &'a M,
    optimizer: OptimizerRef<'a>,
    schedule: Option<&'a ModuleLrScheduler>,
    pub(crate) sampler: Option<SamplerState>,
    pub(crate) value: Result<Value, String>,
}

impl<'a, M: Module> Checkpoint<'a, M> {
    /// A checkpoint of a model and its optimizer, which may be sharded.
    pub fn new(model: &'a M, optimizer: impl Into<OptimizerRef<'a>>) -> Self {
        Self {
            model,
            optimizer: optimizer.into(),
            schedule: None,
            sampler: None,
            value: Ok(Value::Null),
        }
    }

    /// Adds the position in the data: [`StepPlan::after`](paceline_ddp::sampler::StepPlan::after) of the last step.
    #[must_use]
    pub fn sampler(mut self, state: &SamplerState) -> Self {
        self.sampler = Some(*state);
        self
    }

    /// Adds the learning-rate scheduler. Not needed if the rate is a function of the step.
    #[must_use]
    pub fn schedule(mut self, schedule: &'a ModuleLrScheduler) -> Self {
        self.schedule = Some(schedule);
        self
    }

    /// Adds the program's own value, for example its best loss so far. The save fails if JSON cannot hold the value.
    #[must_use]
    pub fn value(mut self, value: &impl Serialize) -> Self {
        self.value = serde_json::to_value(value).map_err(|error| error.to_string());
        self
    }

    /// Joins on rank 0 the state that is dealt to the ranks. All ranks call it.
    pub(crate) fn gather(&self, ddp: &Ddp) -> Result<Gathered, CheckpointError> {
        let optimizers = match self.optimizer {
            OptimizerRef::Whole(optimizer) if ddp.has_own_optimizers() => {
                let ids = weights::paths(self.model).into_iter();
                let ids: Vec<u64> = ids.map(|(id, _)| id).collect();
                optimizer::gather_own(optimizer, ddp.group(), &ids)?
            }
            _ => self.gather_optimizer(ddp)?.map(|state| vec![state]),
        };
        let mut hook = Vec::new();
        ddp.export_hook_state(|name, data| {
            hook.push((name, data));
            Ok::<_, CheckpointError>(())
        })?;
        let mut weights = Vec::new();
        if ddp.is_split() {
            let is_root = ddp.model_group().rank() == 0;
            ddp.export(self.model, |path, data| {
                weights.extend(is_root.then(|| (path.to_owned(), data)));
                Ok::<_, CheckpointError>(())
            })?;
        }
        Ok(Gathered {
            optimizers,
            hook,
            weights,
        })
    }

    /// The optimizer's state as one record, on rank 0, unless every rank has all of it.
    fn gather_optimizer(&self, ddp: &Ddp) -> Result<Option<Bytes>, CheckpointError> {
        let parted = ddp.parted();
        let mut state = match self.optimizer {
            OptimizerRef::Whole(optimizer) => {
                let is_sent = parted.is_some() && ddp.group().rank() == 0;
                is_sent.then(|| optimizer.into_bytes().map_err(optimizer::unreadable))
            }
            OptimizerRef::Sharded(optimizer) => optimizer::gather(optimizer)?,
        };
        if let Some(placement) = parted {
            state = optimizer::gather_parts(state, ddp, placement, self.model)?;
        }
        state.transpose().map_err(CheckpointError::Rank0)
    }

    /// In ordinary memory the optimizer's tensors are shared, not copied: Burn writes in place only to tensors with one
    /// owner, so later steps make new tensors. On a device they are read now, in the order of its queue.
    fn copy_optimizer(&self, gathered: Option<Vec<Bytes>>) -> Result<Optimizer, String> {
        let optimizer = match (gathered, self.optimizer) {
            (Some(states), _) => return Ok(Optimizer::Encoded(states)),
            (None, OptimizerRef::Whole(optimizer)) => optimizer,
            (None, OptimizerRef::Sharded(optimizer)) => optimizer.local(),
        };
        let mut devices = self.model.devices().into_iter();
        if devices.all(|device| device::name(&device).is_none()) {
            return Ok(Optimizer::Shared(optimizer.clone()));
        }
        encode(optimizer).map(|state| Optimizer::Encoded(vec![state]))
    }

    /// Copies the tensors, so that the program may change its own.
    pub(crate) fn copy(&self, gathered: Gathered) -> Result<Copied, String> {
        let Gathered {
            optimizers,
            hook,
            weights,
        } = gathered;
        let paths = weights::paths(self.model).into_iter();
        let schedule = self
            .schedule
            .map(|schedule| schedule.to_record().into_bytes());
        Ok(Copied {
            weights: match weights.is_empty() {
                true => weights::export(self.model),
                false => weights,
            },
            optimizer: self.copy_optimizer(optimizers)?,
            hook,
            schedule: schedule.transpose().map_err(|error| error.to_string())?,
            parameters: paths.map(|(id, path)| (path, id)).collect(),
        })
    }
}

/// The state that was dealt to the ranks, on rank 0; empty if each rank has all of it.
#[derive(Default)]
pub(crate) struct Gathered {
    /// Of each rank, if each has its own; otherwise one.
    optimizers: Option<Vec<Bytes>>,
    hook: Vec<(String, TensorData)>,
    weights: Vec<(String, TensorData)>,
}

/// The copied tensors of a checkpoint.
pub(crate) struct Copied {
    pub(crate) weights: Vec<(String, TensorData)>,
    pub(crate) optimizer: Optimizer,
    /// State of the communication hook, by name.
    pub(crate) hook: Vec<(String, TensorData)>,
    pub(crate) schedule: Option<Bytes>,
    /// Ids of parameters by path.
    pub(crate) parameters: BTreeMap<String, u64>,
}

/// Optimizer state, encoded or not yet.
pub(crate) enum Optimizer {
    Shared(ModuleOptimizer),
    Encoded(Vec<Bytes>),
}

impl Optimizer {
    pub(crate) fn encode(self) -> Result<Vec<Bytes>, String> {
        match self {
            Self::Shared(optimizer) => encode(&optimizer).map(|state| vec![state]),
            Self::Encoded(states) => Ok(states),
        }
    }
}

fn encode(optimizer: &ModuleOptimizer) -> Result<Bytes, String> {
    let bytes = optimizer.into_bytes();
    bytes.map_err(|error| format!("the optimizer state cannot be encoded: {error}"))
}
