//! The contents of a checkpoint: the program names the parts, and they are copied, or written as the ranks send them.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, TensorData};
use paceline_ddp::sampler::SamplerState;
use paceline_ddp::weights::{self, Hasher};
use paceline_ddp::{Ddp, device};
use serde::Serialize;
use serde_json::Value;

use crate::error::CheckpointError;
use crate::files;
use crate::optimizer::{self, Dealt, OptimizerRef};
use crate::share::Shares;
use crate::tensors::TensorsFile;

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

    /// Whether ranks have parts of the state.
    pub(crate) fn is_dealt(&self, ddp: &Ddp) -> bool {
        ddp.is_split() || matches!(self.optimizer, OptimizerRef::Sharded(_))
    }

    /// Writes model and optimizer, of which ranks have parts, into rank 0's `folder`, and returns the hash of the weights. All ranks
    /// call it; without a folder nothing is written.
    ///
    /// *Memory*: one tensor of the whole state on rank 0, and on every rank its own part of the optimizer's state.
    pub(crate) fn write_dealt(
        &self,
        ddp: &Ddp,
        folder: Option<&Path>,
        metadata: &BTreeMap<String, String>,
    ) -> Result<String, CheckpointError> {
        let tensors = ddp.tensors(self.model);
        let failed = |path: PathBuf| {
            move |source| CheckpointError::File {
                action: "write checkpoint",
                path,
                source,
            }
        };
        let mut hasher = Hasher::default();
        let path = folder.map(|folder| folder.join(files::WEIGHTS));
        let file = path.map(|path| {
            TensorsFile::create(&path, &tensors, metadata.clone()).map_err(failed(path))
        });
        let mut file = file.transpose();
        if ddp.is_split() || folder.is_some() {
            ddp.export(self.model, |name, data| {
                // After a failed write the other ranks still send.
                if let (Ok(Some(open)), Some(folder)) = (&mut file, folder) {
                    hasher.add(name, &data);
                    if let Err(error) = open.put(name, &data) {
                        file = Err(failed(folder.join(files::WEIGHTS))(error));
                    }
                }
                Ok::<_, CheckpointError>(())
            })?;
        }
        let (optimizer, slices) = match self.optimizer {
            OptimizerRef::Whole(optimizer) => {
                ((ddp.group().rank() == 0).then_some(optimizer), None)
            }
            OptimizerRef::Sharded(optimizer) => {
                let slices = optimizer.slices(optimizer.group().rank());
                (Some(optimizer.local()), Some(slices))
            }
        };
        let ids = weights::paths(self.model).into_iter();
        let dealt = Dealt {
            group: ddp.model_group(),
            optimizer,
            shares: Shares::new(ddp, self.model, slices),
            ids: ids.map(|(id, _)| id).collect(),
        };
        let folder = folder.filter(|_| file.is_ok());
        let path = folder.map(|folder| folder.join(files::optimizer_of(0)));
        let written = dealt.write(path.as_deref());
        file?;
        written.map(|()| hasher.finish())
    }

    /// The states of all ranks' optimizers on rank 0, if each rank has its own. All ranks call it.
    pub(crate) fn gather_own(&self, ddp: &Ddp) -> Result<Option<Vec<Bytes>>, CheckpointError> {
        match self.optimizer {
            OptimizerRef::Whole(optimizer) if ddp.has_own_optimizers() => {
                let ids = weights::paths(self.model).into_iter();
                let ids: Vec<u64> = ids.map(|(id, _)| id).collect();
                optimizer::gather_own(optimizer, ddp.group(), &ids)
            }
            _ => Ok(None),
        }
    }

    /// In ordinary memory the optimizer's tensors are shared, not copied: Burn writes in place only to tensors with one
    /// owner, so later steps make new tensors. On a device they are read now, in the order of its queue.
    fn copy_optimizer(&self, gathered: Option<Vec<Bytes>>) -> Result<Optimizer, String> {
        let optimizer = match (gathered, self.optimizer) {
            (Some(states), _) => return Ok(Optimizer::Encoded(states)),
            (None, OptimizerRef::Whole(optimizer)) => optimizer,
            (None, OptimizerRef::Sharded(_)) => unreachable!("its state is dealt to the ranks"),
        };
        let mut devices = self.model.devices().into_iter();
        if devices.all(|device| device::name(&device).is_none()) {
            return Ok(Optimizer::Shared(optimizer.clone()));
        }
        let state = optimizer.into_bytes();
        let state =
            state.map_err(|error| format!("the optimizer state cannot be encoded: {error}"))?;
        Ok(Optimizer::Encoded(vec![state]))
    }

    /// Copies the tensors, so that the program may change its own.
    pub(crate) fn copy(&self, optimizers: Option<Vec<Bytes>>) -> Result<Copied, String> {
        let mut weights = weights::export(self.model);
        weights.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(Copied {
            weights,
            optimizer: self.copy_optimizer(optimizers)?,
        })
    }

    /// The state of the learning-rate scheduler.
    pub(crate) fn schedule_state(&self) -> Result<Option<Bytes>, String> {
        let schedule = self.schedule.map(|schedule| schedule.to_record());
        let schedule = schedule.map(|record| record.into_bytes());
        schedule.transpose().map_err(|error| error.to_string())
    }

    /// Ids of parameters by path.
    pub(crate) fn parameters(&self) -> BTreeMap<String, u64> {
        let paths = weights::paths(self.model).into_iter();
        paths.map(|(id, path)| (path, id)).collect()
    }
}

/// The copied tensors of a checkpoint, by path and in its order.
pub(crate) struct Copied {
    weights: Vec<(String, TensorData)>,
    optimizer: Optimizer,
}

/// Optimizer state, encoded or not yet.
enum Optimizer {
    Shared(ModuleOptimizer),
    Encoded(Vec<Bytes>),
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
        write_tensors(&folder.join(files::WEIGHTS), self.weights, metadata)?;
        match self.optimizer {
            Optimizer::Shared(optimizer) => {
                let written = optimizer.save(folder.join(files::optimizer_of(0)));
                written.map_err(|error| io::Error::other(error.to_string()))?;
            }
            Optimizer::Encoded(states) => {
                for (rank, state) in states.iter().enumerate() {
                    std::fs::write(folder.join(files::optimizer_of(rank)), &state[..])?;
                }
            }
        }
        Ok(hasher.finish())
    }
}

/// Writes tensors as one safetensors file.
pub(crate) fn write_tensors(
    path: &Path,
    tensors: Vec<(String, TensorData)>,
    metadata: BTreeMap<String, String>,
) -> io::Result<()> {
    let infos = tensors.iter();
    let infos = infos.map(|(name, data)| (name.clone(), data.shape().to_vec(), data.dtype()));
    let infos: Vec<_> = infos.collect();
    let mut file = TensorsFile::create(path, &infos, metadata)?;
    for (name, data) in tensors {
        file.put(&name, &data)?;
    }
    Ok(())
}
