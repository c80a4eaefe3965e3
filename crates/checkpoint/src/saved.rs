//! A loaded checkpoint: the same on every rank, restored into model and optimizer. A process that replaces a lost rank gets the same
//! from another rank's memory, and ranks that go back have it in their own.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};

use burn::lr_scheduler::LrSchedulerRecord;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::Module;
use burn::tensor::{Bytes, DType, TensorData};
use paceline_collective::ProcessGroup;
use paceline_ddp::sampler::SamplerState;
use paceline_ddp::{Ddp, Give, Given, weights};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::average;
use crate::checkpoint::Checkpoint;
use crate::decide::by_rank_0;
use crate::error::CheckpointError;
use crate::files::{self, Contents, State};
use crate::folder;
use crate::optimizer::{self, LoadOptimizer};
use crate::record::with_ids;
use crate::share::Shares;
use crate::tensors::stored;

/// The newest whole checkpoint, the same on every rank.
#[derive(Debug)]
pub struct Saved {
    told: Told,
    /// The tensors, in the files that rank 0 sees; `None` once restored, and on the other ranks.
    contents: Option<Contents>,
    /// The tensors that are in memory.
    in_memory: Option<InMemory>,
    is_restored: bool,
}

/// Where a checkpoint may be.
pub(crate) struct Places<'a> {
    pub(crate) files: &'a Path,
    pub(crate) memory: Option<&'a Path>,
    /// The one that was just made of what the surviving ranks had left.
    pub(crate) joined: Option<&'a Path>,
    /// Whether the one in memory has just come from another host's.
    pub(crate) is_brought: bool,
}

/// Where a checkpoint came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    /// The folder of checkpoints.
    File,
    /// The memory of rank 0's host.
    Memory,
    /// The memory of another host.
    OtherMemory,
    /// The memory of the ranks that were left when one was lost, see [`Checkpoints::leave`](crate::Checkpoints::leave).
    Survivors,
    /// The ranks that went on when this process was lost.
    Peers,
}

/// The tensors of a checkpoint that was never a file.
#[derive(Debug)]
pub(crate) struct InMemory {
    /// `None` if the model has them: those of another rank travel by themselves.
    pub(crate) weights: Option<Vec<(String, TensorData)>>,
    /// The optimizer's state: records of some parameters each.
    pub(crate) optimizer: Vec<Bytes>,
    /// Memory for one record of these.
    pub(crate) room: Vec<u128>,
}

/// The part that rank 0 sends to the others.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Told {
    path: PathBuf,
    origin: Origin,
    pub(crate) state: State,
    metadata: BTreeMap<String, String>,
    schedule: Option<Vec<u8>>,
    /// Number of saved optimizer states.
    optimizers: usize,
    damaged: Vec<String>,
}

impl Told {
    /// What `checkpoint` has besides its tensors.
    ///
    /// *Errors*: what cannot be encoded, in words.
    pub(crate) fn of<M: Module>(
        path: &Path,
        origin: Origin,
        checkpoint: &Checkpoint<'_, M>,
        ddp: &Ddp,
    ) -> Result<Self, String> {
        let schedule = checkpoint.schedule_state()?;
        Ok(Self {
            path: path.to_path_buf(),
            origin,
            state: checkpoint.state(ddp)?,
            metadata: BTreeMap::new(),
            schedule: schedule.map(|schedule| schedule.to_vec()),
            optimizers: 1,
            damaged: Vec::new(),
        })
    }
}

impl Saved {
    /// A state that this rank had in its memory.
    pub(crate) fn from_memory(told: Told, tensors: InMemory) -> Self {
        Self {
            told,
            contents: None,
            in_memory: Some(tensors),
            is_restored: false,
        }
    }

    /// Reads the newest whole checkpoint of step `last` or before in `folder` on rank 0 and sends it to all ranks, even while a job
    /// writes there; `None` if there is no checkpoint.
    ///
    /// *Blocks*: until rank 0 has read it.
    ///
    /// *Errors*: `NoneValid` if all are damaged (`Rank0` on the other ranks); failed collectives.
    pub fn at_or_before(
        last: u64,
        folder: &Path,
        group: &ProcessGroup,
    ) -> Result<Option<Self>, CheckpointError> {
        let places = Places {
            files: folder,
            memory: None,
            joined: None,
            is_brought: false,
        };
        Self::newest(last, &places, group)
    }

    /// The same for all places.
    pub(crate) fn newest(
        last: u64,
        places: &Places<'_>,
        group: &ProcessGroup,
    ) -> Result<Option<Self>, CheckpointError> {
        let mut contents = None;
        let told = by_rank_0(group, || {
            let folders = [Some(places.files), places.memory];
            let folders: Vec<&Path> = folders.into_iter().flatten().collect();
            let Some(found) = folder::newest(&folders, last)? else {
                return Ok::<_, CheckpointError>(None);
            };
            let is_in_memory = places
                .memory
                .is_some_and(|folder| found.path.starts_with(folder));
            let read = contents.insert(found.contents);
            let origin = match is_in_memory {
                false => Origin::File,
                true if places.joined == Some(&found.path) => Origin::Survivors,
                true if places.is_brought => Origin::OtherMemory,
                true => Origin::Memory,
            };
            Ok(Some(Told {
                path: found.path,
                origin,
                state: std::mem::take(&mut read.state),
                metadata: std::mem::take(&mut read.metadata),
                schedule: read.schedule.as_ref().map(|schedule| schedule.to_vec()),
                optimizers: read.optimizers.len(),
                damaged: found.damaged,
            }))
        })??;
        Ok(told.map(|told| Self {
            told,
            contents,
            in_memory: None,
            is_restored: false,
        }))
    }

    /// Gives a checkpoint piece by piece, as [`from_peer`](Self::from_peer) reads it. The model and the state of `Ddp` travel by
    /// themselves.
    pub(crate) fn to_peer<M: Module>(
        path: &Path,
        checkpoint: &Checkpoint<'_, M>,
        ddp: &Ddp,
        give: &mut Give<'_>,
    ) -> Result<(), CheckpointError> {
        let unusable = |what| CheckpointError::File {
            action: "hand over the state of",
            path: path.to_path_buf(),
            source: io::Error::other(what),
        };
        let told = Told::of(path, Origin::Peers, checkpoint, ddp).map_err(unusable)?;
        give(&serde_json::to_vec(&told).expect("plain data encodes"))?;
        for record in checkpoint.optimizer_records().map_err(unusable)? {
            give(&record.map_err(unusable)?)?;
        }
        Ok(())
    }

    /// The state of a job that this process has joined, from [`to_peer`](Self::to_peer).
    pub(crate) fn from_peer(path: &Path, given: Given) -> Result<Self, CheckpointError> {
        let mut pieces = given.pieces.into_iter();
        let told = serde_json::from_slice(pieces.next().as_deref().unwrap_or_default());
        let told = told.map_err(|error| CheckpointError::Misfit {
            path: path.to_path_buf(),
            what: format!("the state from another rank cannot be read: {error}"),
        })?;
        let tensors = InMemory {
            weights: None,
            optimizer: pieces.collect(),
            room: given.room,
        };
        Ok(Self::from_memory(told, tensors))
    }

    /// Restores model, optimizer, gradient scaler, state of the communication hook, step and seed. All ranks call it; a process
    /// that has [joined](Ddp::has_joined) them calls it alone.
    ///
    /// *Blocks*: until every rank has rank 0's weights, unless they are in the ranks' own memory.
    ///
    /// *Errors*: `Misfit` if the checkpoint is from another model; failed collectives.
    pub fn restore<M: Module, O: LoadOptimizer>(
        &mut self,
        ddp: &mut Ddp,
        model: M,
        optimizer: O,
    ) -> Result<(M, O), CheckpointError> {
        if std::mem::replace(&mut self.is_restored, true) {
            return Err(self.misfit("it was already restored".into()));
        }
        if let Some(InMemory {
            weights: own,
            optimizer: records,
            room,
        }) = self.in_memory.take()
        {
            let state =
                with_ids(records, room, &self.ids(&model)).map_err(|what| self.misfit(what))?;
            let optimizer = optimizer.load(state).map_err(|what| self.misfit(what))?;
            let Some(own) = own else {
                return Ok((model, optimizer));
            };
            ddp.go_back(&self.told.state.ddp)?;
            let model = weights::import(model, own.into_iter().collect());
            return Ok((model, optimizer));
        }
        let contents = self.contents.take();
        let mut fitted = HashMap::new();
        by_rank_0(ddp.model_group(), || {
            let saved = contents.as_ref().map_or(&[][..], |read| &read.weights);
            let saved = saved
                .iter()
                .map(|tensor| (tensor.name.clone(), tensor.lazy()));
            fitted =
                fit(saved.collect(), &ddp.tensors(&model)).map_err(|what| self.misfit(what))?;
            Ok::<_, CheckpointError>(())
        })??;
        let (group, ids) = (ddp.model_group(), self.ids(&model));
        // Replicas share one state now, or each has its own; one that did not exist then begins with the first one's.
        let own = match ddp.group().rank() {
            replica if ddp.has_own_optimizers() && replica < self.told.optimizers => replica,
            _ => 0,
        };
        let shares = Shares::new(ddp, &model, optimizer.slices());
        let mut state = Bytes::from_bytes_vec(Vec::new());
        for rank in 0..self.told.optimizers {
            let path = contents.as_ref().map(|read| &*read.optimizers[rank]);
            let kept = (rank == own).then_some(&shares);
            let read = optimizer::read(group, path, &ids, kept)?;
            let read = read.map_err(|what| self.misfit(what))?;
            if rank == own {
                state = read;
            }
        }
        let optimizer = optimizer.load(state).map_err(|what| self.misfit(what))?;
        let model = ddp.load_state_dict(model, &self.told.state.ddp, fitted)?;
        let hook = contents.map_or_else(Vec::new, |read| read.hook);
        let hook = hook
            .iter()
            .map(|tensor| (tensor.name.clone(), tensor.lazy()));
        ddp.load_hook_state(hook.collect())?;
        Ok((model, optimizer))
    }

    /// Maps the checkpoint's parameter ids to the current ones.
    fn ids<M: Module>(&self, model: &M) -> HashMap<u64, u64> {
        let saved = &self.told.state.parameters;
        // Version 1 numbered the parameters.
        let then = |at: usize, path: &str| saved.get(path).copied().unwrap_or(at as u64 + 1);
        let now = weights::paths(model).into_iter().enumerate();
        now.map(|(at, (id, path))| (then(at, &path), id)).collect()
    }

    /// `schedule` with its saved state; unchanged if the checkpoint has none.
    ///
    /// *Errors*: `Misfit` if the state cannot be read.
    pub fn schedule(
        &self,
        schedule: ModuleLrScheduler,
    ) -> Result<ModuleLrScheduler, CheckpointError> {
        let Some(saved) = &self.told.schedule else {
            return Ok(schedule);
        };
        let record = LrSchedulerRecord::from_bytes(Bytes::from_bytes_vec(saved.clone()));
        let record = record.map_err(|error| {
            self.misfit(format!("the schedule's state cannot be read: {error}"))
        })?;
        Ok(schedule.load_record(record))
    }

    /// The position in the data.
    ///
    /// *Errors*: `Misfit` if none was saved.
    pub fn sampler(&self) -> Result<&SamplerState, CheckpointError> {
        let sampler = self.told.state.sampler.as_ref();
        sampler.ok_or_else(|| self.misfit("it has no position in the data".into()))
    }

    /// The program's own value.
    ///
    /// *Errors*: `Misfit` if it is of another type.
    pub fn value<V: DeserializeOwned>(&self) -> Result<V, CheckpointError> {
        V::deserialize(&self.told.state.value)
            .map_err(|error| self.misfit(format!("its value cannot be read: {error}")))
    }

    /// Steps done.
    pub fn step(&self) -> u64 {
        self.told.state.ddp.step
    }

    /// The saved metadata.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.told.metadata
    }

    /// The checkpoint's folder.
    pub fn path(&self) -> &Path {
        &self.told.path
    }

    /// Where it came from.
    pub fn origin(&self) -> Origin {
        self.told.origin
    }

    /// Newer checkpoints that were skipped as damaged, each with the reason.
    pub fn damaged(&self) -> &[String] {
        &self.told.damaged
    }

    fn misfit(&self, what: String) -> CheckpointError {
        CheckpointError::Misfit {
            path: self.told.path.clone(),
            what,
        }
    }
}

/// Maps `saved` by path, if its tensors match those of `model` in number, shape and type.
fn fit(
    saved: Vec<(String, TensorData)>,
    model: &[(String, Vec<usize>, DType)],
) -> Result<HashMap<String, TensorData>, String> {
    let mut saved: HashMap<String, TensorData> = saved.into_iter().collect();
    for (name, shape, dtype) in model {
        let Some(found) = saved.get_mut(name) else {
            return Err(format!("it has no {name}"));
        };
        if found.shape().to_vec() != *shape || found.dtype() != stored(*dtype) {
            return Err(format!(
                "{name} is {:?} {:?}, the model's is {shape:?} {dtype:?}",
                found.shape().to_vec(),
                found.dtype(),
            ));
        }
        if found.dtype() != *dtype {
            *found = found.clone().convert_dtype(*dtype);
        }
    }
    let is_extra = |name: &&String| !model.iter().any(|(known, ..)| known == *name);
    match saved.keys().find(is_extra) {
        Some(extra) => Err(format!("the model has no {extra}")),
        None => Ok(saved),
    }
}

/// A saved model by itself, for programs that use it and do not train on: with the averages of its weights, if the optimizer
/// [keeps some](crate::averaged).
#[derive(Debug)]
pub struct SavedModel {
    path: PathBuf,
    metadata: BTreeMap<String, String>,
    weights: Vec<(String, TensorData)>,
}

impl SavedModel {
    /// Reads the newest whole checkpoint in `folder`, even while a job writes there; `None` if there is no checkpoint.
    ///
    /// *Errors*: `NoneValid` if all are damaged or cannot be read.
    pub fn newest(folder: &Path) -> Result<Option<Self>, CheckpointError> {
        let newest = folder::newest_by(&[folder], u64::MAX, Self::read)?;
        Ok(newest.map(|newest| newest.contents))
    }

    /// Reads the checkpoint that the newest one in `folder` calls the [best](Checkpoint::best_step); `None` if it names none, or if there is
    /// no checkpoint.
    ///
    /// *Errors*: `NoneValid` if it is gone, damaged or cannot be read.
    pub fn best(folder: &Path) -> Result<Option<Self>, CheckpointError> {
        let mut tried = None;
        loop {
            let newest = folder::newest_by(&[folder], u64::MAX, files::best_step)?;
            let Some(best) = newest.and_then(|newest| newest.contents) else {
                return Ok(None);
            };
            let path = folder.join(folder::name_of(best));
            match Self::read(&path) {
                Ok(saved) => return Ok(Some(saved)),
                // A job that writes there may have replaced it by a better one meanwhile.
                Err(_) if tried != Some(best) => tried = Some(best),
                Err(reason) => {
                    return Err(CheckpointError::NoneValid {
                        path: folder.to_path_buf(),
                        reasons: vec![format!("{}, the best: {reason}", path.display())],
                    });
                }
            }
        }
    }

    /// The mean of the newest `count` whole checkpoints in `folder`, with what the newest says of itself; `None` if there is no checkpoint.
    ///
    /// *Numerics*: sums in f64 from the newest on, rounded once. Tensors of whole numbers are those of the newest.
    ///
    /// *Errors*: `TooFew`; `NoneValid` if all are damaged; `Misfit` if two of them are of different models.
    pub fn mean_of_newest(folder: &Path, count: usize) -> Result<Option<Self>, CheckpointError> {
        let read = |last| folder::newest_by(&[folder], last, Self::read);
        let Some(newest) = read(u64::MAX)? else {
            return Ok(None);
        };
        let mut mean = newest.contents;
        let values = |data: &TensorData| data.iter::<f64>().collect::<Vec<f64>>();
        let mut sums: Vec<Vec<f64>> = mean.weights.iter().map(|(_, data)| values(data)).collect();
        let mut last = folder::step_of(&newest.path);
        for found in 1..count {
            let before = last.and_then(|step| step.checked_sub(1));
            let next = before.map(read).transpose()?.flatten();
            let next = next.ok_or_else(|| CheckpointError::TooFew {
                path: folder.to_path_buf(),
                found,
                count,
            })?;
            let [own, other] = [&mean, &next.contents].map(|model| {
                let tensors = model.weights.iter();
                tensors.map(|(name, data)| (name, data.shape(), data.dtype()))
            });
            if !own.eq(other) {
                return Err(CheckpointError::Misfit {
                    path: next.path,
                    what: format!("its model is not that of {}", mean.path.display()),
                });
            }
            for (sum, (_, data)) in sums.iter_mut().zip(&next.contents.weights) {
                let values = sum.iter_mut().zip(data.iter::<f64>());
                values.for_each(|(sum, value)| *sum += value);
            }
            last = folder::step_of(&next.path);
        }
        for ((_, data), sum) in mean.weights.iter_mut().zip(sums) {
            if data.dtype().is_float() {
                let values: Vec<f64> = sum.iter().map(|sum| sum / count as f64).collect();
                let values = TensorData::new(values, data.shape().to_vec());
                *data = values.convert_dtype(data.dtype());
            }
        }
        Ok(Some(mean))
    }

    fn read(path: &Path) -> Result<Self, String> {
        let contents = files::read(path)?;
        let mut averages = average::stored(&contents.optimizers[0])?;
        let ids = &contents.state.parameters;
        let weights = contents.weights.into_iter().map(|tensor| {
            let average = ids.get(&tensor.name).and_then(|id| averages.remove(id));
            let data = average.map_or_else(|| tensor.read(), Ok);
            let data = data.map_err(|error| format!("{}: {error}", tensor.name))?;
            Ok((tensor.name, data))
        });
        let mut weights = weights.collect::<Result<Vec<_>, String>>()?;
        // The header's order is lost when it is read.
        weights.sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(Self {
            weights,
            metadata: contents.metadata,
            path: path.to_path_buf(),
        })
    }

    /// The saved metadata.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The checkpoint's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The weights and running statistics, by path.
    pub fn tensors(&self) -> &[(String, TensorData)] {
        &self.weights
    }

    /// `model` with the saved weights.
    ///
    /// *Errors*: `Misfit` if they are those of another model.
    pub fn restore<M: Module>(self, model: M) -> Result<M, CheckpointError> {
        let values = fit(self.weights, &weights::tensors(&model));
        let values = values.map_err(|what| CheckpointError::Misfit {
            path: self.path,
            what,
        })?;
        Ok(weights::import(model, values))
    }
}
