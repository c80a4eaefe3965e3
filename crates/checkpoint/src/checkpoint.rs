//! The contents of a checkpoint: the program names the parts, and each rank copies what it has of them.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::path::Path;

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, TensorData};
use paceline_ddp::sampler::SamplerState;
use paceline_ddp::weights::{self, Hasher};
use paceline_ddp::{Ddp, OwnTensor, device};
use serde::Serialize;
use serde_json::Value;

use crate::dealt::{Dealt, Optimizer, Own};
use crate::error::CheckpointError;
use crate::files::{self, State};
use crate::optimizer::{self, OptimizerRef};
use crate::share::{Share, Shares};
use crate::tensors::TensorsFile;

const DEALT: &str = "the optimizer's state is dealt to the ranks";

/// The parts of a checkpoint: a model, its optimizer and any other state that the program resumes from.
///
/// Step, seed and gradient scaler come from the `Ddp` that it is [saved](crate::Checkpoints::save) with.
#[derive(Clone)]
pub struct Checkpoint<'a, M> {
    model: &'a M,
    optimizer: OptimizerRef<'a>,
    schedule: Option<&'a ModuleLrScheduler>,
    sampler: Option<SamplerState>,
    value: Result<Value, String>,
    best_step: Option<u64>,
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
            best_step: None,
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

    /// Says which step's checkpoint is the best so far, this one or an earlier one. That is kept besides the newest ones, and
    /// [`SavedModel::best`](crate::SavedModel::best) reads it.
    #[must_use]
    pub fn best_step(mut self, step: Option<u64>) -> Self {
        self.best_step = step;
        self
    }

    pub(crate) fn model(&self) -> &M {
        self.model
    }

    /// Whether each replica of this rank has the whole of what this rank has, in ordinary memory.
    pub(crate) fn is_on_every_replica(&self, ddp: &Ddp) -> bool {
        let is_whole = matches!(self.optimizer, OptimizerRef::Whole(_));
        is_whole && !ddp.has_own_optimizers() && !ddp.has_hook_state() && self.is_on_host()
    }

    /// Whether ranks have parts of the state, the same answer on all of them.
    pub(crate) fn is_dealt(&self, ddp: &Ddp) -> bool {
        ddp.is_split() || ddp.has_hook_state() || matches!(self.optimizer, OptimizerRef::Sharded(_))
    }

    /// At most about as many bytes as the files have.
    pub(crate) fn bytes(&self, ddp: &Ddp) -> u64 {
        let tensors = ddp.tensors(self.model).into_iter();
        let bytes = tensors.map(|(_, shape, dtype)| shape.iter().product::<usize>() * dtype.size());
        // The weights, two moments of each, as Adam has, and an average.
        4 * bytes.sum::<usize>() as u64
    }

    /// Copies what this rank has of dealt state; of what all replicas have, only the first one's copy counts.
    pub(crate) fn copy_dealt(&self, ddp: &Ddp) -> Result<Dealt, CheckpointError> {
        let own = ddp.own_tensors(self.model)?;
        self.copy_part(ddp, own, ddp.group().rank() == 0)
    }

    /// Copies all that this rank has of the state, whichever other ranks have it too.
    pub(crate) fn copy_all(&self, ddp: &Ddp) -> Result<Dealt, CheckpointError> {
        self.copy_part(ddp, ddp.part_tensors(self.model)?, true)
    }

    fn copy_part(
        &self,
        ddp: &Ddp,
        own: Vec<OwnTensor>,
        has_optimizer: bool,
    ) -> Result<Dealt, CheckpointError> {
        let ids = weights::paths(self.model).into_iter();
        let ids: Vec<u64> = ids.map(|(id, _)| id).collect();
        let model = ddp.tensors(self.model);
        let shapes = model.iter().map(|(path, shape, _)| (path.clone(), shape));
        let shapes: HashMap<String, &Vec<usize>> = shapes.collect();
        let mut weights = Own::default();
        for own in own {
            let whole = shapes[&own.path].clone();
            let slice = ddp.placement().and_then(|all| all.slice(own.id));
            let share = Share::new(whole.clone(), slice, own.range);
            weights.add(own.path, whole, share, own.value);
        }
        let mut hook = Own::default();
        for (name, value) in ddp.hook_state()? {
            hook.add(name, value.shape().to_vec(), Share::Whole, value);
        }
        let part = |optimizer: &ModuleOptimizer, slices| {
            let shares = Shares::new(ddp, self.model, slices);
            match self.is_on_host() {
                true => Optimizer::Shared(optimizer.clone(), shares),
                false => Optimizer::Part(Own::of_optimizer(optimizer, &shares, &ids)),
            }
        };
        let replicas = ddp.group();
        let replica = (ddp.has_own_optimizers()).then(|| (replicas.rank(), replicas.world()));
        let optimizer = match self.optimizer {
            OptimizerRef::Whole(optimizer) if has_optimizer || replica.is_some() => {
                part(optimizer, None)
            }
            OptimizerRef::Whole(_) => Optimizer::Part(Ok(Own::default())),
            OptimizerRef::Sharded(optimizer) => {
                let slices = optimizer.slices(optimizer.group().rank());
                part(optimizer.local(), Some(slices))
            }
        };
        Ok(Dealt {
            model,
            ids,
            weights,
            optimizer,
            replica,
            hook,
        })
    }

    fn is_on_host(&self) -> bool {
        let mut devices = self.model.devices().into_iter();
        devices.all(|device| device::name(&device).is_none())
    }

    /// In ordinary memory the optimizer's tensors are shared, not copied: Burn writes in place only to tensors with one
    /// owner, so later steps make new tensors. On a device they are read now, in the order of its queue.
    fn copy_optimizer(&self) -> Result<Encodable, String> {
        let OptimizerRef::Whole(optimizer) = self.optimizer else {
            unreachable!("its state is dealt to the ranks");
        };
        if self.is_on_host() {
            return Ok(Encodable::Shared(optimizer.clone()));
        }
        Ok(Encodable::Encoded(self.optimizer_state()?))
    }

    /// The state of an optimizer that every rank has whole.
    pub(crate) fn optimizer_state(&self) -> Result<Bytes, String> {
        match self.optimizer {
            OptimizerRef::Whole(optimizer) => optimizer::encode(optimizer),
            OptimizerRef::Sharded(_) => Err(DEALT.into()),
        }
    }

    /// The same in records of some parameters each, encoded one by one.
    pub(crate) fn optimizer_records(
        &self,
    ) -> Result<impl Iterator<Item = Result<Bytes, String>>, String> {
        let OptimizerRef::Whole(optimizer) = self.optimizer else {
            return Err(DEALT.into());
        };
        let ids = weights::paths(self.model).into_iter().map(|(id, _)| id);
        let bytes = weights::tensors(self.model).into_iter();
        let bytes = bytes.map(|(_, shape, dtype)| shape.iter().product::<usize>() * dtype.size());
        Ok(optimizer::records(optimizer, ids.zip(bytes)))
    }

    /// Copies the tensors, so that the program may change its own.
    pub(crate) fn copy(&self) -> Result<Copied, String> {
        let mut weights = weights::export(self.model);
        weights.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(Copied {
            weights,
            optimizer: self.copy_optimizer()?,
        })
    }

    /// The state of the learning-rate scheduler.
    pub(crate) fn schedule_state(&self) -> Result<Option<Bytes>, String> {
        let schedule = self.schedule.map(|schedule| schedule.to_record());
        let schedule = schedule.map(|record| record.into_bytes());
        schedule.transpose().map_err(|error| error.to_string())
    }

    /// The state besides tensors and schedule.
    ///
    /// *Errors*: a value that cannot be encoded.
    pub(crate) fn state(&self, ddp: &Ddp) -> Result<State, String> {
        let paths = weights::paths(self.model).into_iter();
        Ok(State {
            ddp: ddp.state_dict(),
            sampler: self.sampler,
            parameters: paths.map(|(id, path)| (path, id)).collect(),
            value: self.value.clone()?,
            best_step: self.best_step,
            ..State::default()
        })
    }
}

/// The copied tensors of a checkpoint, by path and in its order.
pub(crate) struct Copied {
    weights: Vec<(String, TensorData)>,
    optimizer: Encodable,
}

/// Optimizer state, encoded or not yet.
enum Encodable {
    Shared(ModuleOptimizer),
    Encoded(Bytes),
}

impl Copied {
    /// Writes the tensors into `folder`, and returns the hash of the weights.
    pub(crate) fn write(
        self,
        folder: &Path,
        metadata: BTreeMap<String, String>,
    ) -> io::Result<String> {
        let mut hasher = Hasher::default();
        for (name, data) in &self.weights {
            hasher.add(name, data);
        }
        let weights = File::create(folder.join(files::WEIGHTS))?;
        write_tensors(&weights, &self.weights, metadata)?;
        let path = folder.join(files::optimizer_of(0));
        match self.optimizer {
            Encodable::Shared(optimizer) => {
                let written = optimizer.save(path);
                written.map_err(|error| io::Error::other(error.to_string()))?;
            }
            Encodable::Encoded(state) => std::fs::write(path, &state[..])?,
        }
        Ok(hasher.finish())
    }
}

/// Writes tensors as one safetensors file, with their names and `metadata` in its header.
///
/// *Errors*: the system's; a type that the format lacks.
pub fn write_tensors(
    file: &File,
    tensors: &[(String, TensorData)],
    metadata: BTreeMap<String, String>,
) -> io::Result<()> {
    let infos = tensors.iter();
    let infos = infos.map(|(name, data)| (name.clone(), data.shape().to_vec(), data.dtype()));
    let infos: Vec<_> = infos.collect();
    let mut file = TensorsFile::new(file, &infos, metadata)?;
    for (name, data) in tensors {
        file.put(name, data)?;
    }
    Ok(())
}
