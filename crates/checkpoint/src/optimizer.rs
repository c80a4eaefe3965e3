//! Optimizer state of a job, saved as one record of whole parameters: references to it, and its way back to the ranks, one tensor at
//! a time.

use std::collections::HashMap;
use std::path::Path;

use burn::optim::ModuleOptimizer;
use burn::tensor::Bytes;
use burn_pack::{Reader, Tensor};
use paceline_collective::ProcessGroup;
use paceline_ddp::{Slice, ZeroRedundancyOptimizer};

use crate::decide::by_rank_0;
use crate::error::CheckpointError;
use crate::record::{self, Entry, unreadable};
use crate::share::{Share, Shares};

/// An optimizer whose state a checkpoint holds: Burn's own, or one whose state is dealt to the ranks. Both are saved as one
/// record of whole parameters, so a training may resume with the other, or on another number of ranks.
#[derive(Clone, Copy)]
pub enum OptimizerRef<'a> {
    /// Every rank has the whole state.
    Whole(&'a ModuleOptimizer),
    /// Each rank has its slices; all ranks take part in a save.
    Sharded(&'a ZeroRedundancyOptimizer),
}

impl<'a> From<&'a ModuleOptimizer> for OptimizerRef<'a> {
    fn from(optimizer: &'a ModuleOptimizer) -> Self {
        Self::Whole(optimizer)
    }
}

impl<'a> From<&'a ZeroRedundancyOptimizer> for OptimizerRef<'a> {
    fn from(optimizer: &'a ZeroRedundancyOptimizer) -> Self {
        Self::Sharded(optimizer)
    }
}

/// An optimizer that takes the state of a checkpoint.
pub trait LoadOptimizer: Sized {
    /// This rank's slices of the parameters; `None` if it has the state of all parameters of its model.
    fn slices(&self) -> Option<Vec<Slice>>;

    /// The optimizer with `state`, a record of what this rank has in Burn's format.
    ///
    /// *Errors*: why the state cannot be read.
    fn load(self, state: Bytes) -> Result<Self, String>;
}

impl LoadOptimizer for ModuleOptimizer {
    fn slices(&self) -> Option<Vec<Slice>> {
        None
    }

    fn load(self, state: Bytes) -> Result<Self, String> {
        self.from_bytes(state).map_err(unreadable)
    }
}

impl LoadOptimizer for ZeroRedundancyOptimizer {
    fn slices(&self) -> Option<Vec<Slice>> {
        Some(Self::slices(self, self.group().rank()))
    }

    fn load(self, state: Bytes) -> Result<Self, String> {
        let local = LoadOptimizer::load(self.local().clone(), state)?;
        Ok(self.with_local(local))
    }
}

/// Sends the record in rank 0's file `path` to all ranks, one tensor at a time, and returns what this rank has of it, with its
/// ids: `ids` are those by saved id. Without `shares` it keeps nothing.
///
/// *Memory*: one tensor besides those that the rank keeps. *Errors*: the inner one is the same on all ranks.
pub(crate) fn read(
    group: &ProcessGroup,
    path: Option<&Path>,
    ids: &HashMap<u64, u64>,
    shares: Option<&Shares>,
) -> Result<Result<Bytes, String>, CheckpointError> {
    let mut tensors = Vec::new();
    let header = by_rank_0(group, || {
        let reader = Reader::from_file_exact(path.unwrap_or(Path::new("")));
        let rest;
        (tensors, rest) = record::parts(reader.map_err(unreadable)?)?;
        let entries: Vec<Entry> = tensors.iter().map(Entry::of).collect();
        Ok::<_, String>((entries, rest.encode(Vec::new())?.to_vec()))
    })?;
    let (entries, rest) = match header {
        Ok(header) => header,
        Err(why) => return Ok(Err(why)),
    };
    let rename = || {
        let mut rest = record::decode(Bytes::from_bytes_vec(rest))?.1;
        rest.rename(ids)?;
        let entries = entries.into_iter().map(|mut entry| {
            entry.require_default_type()?;
            entry.name = record::renamed(&entry.name, ids)?;
            entry.id = entry.id.and_then(|id| ids.get(&id).copied());
            Ok(entry)
        });
        Ok::<_, String>((entries.collect::<Result<Vec<_>, String>>()?, rest))
    };
    let (entries, mut rest) = match rename() {
        Ok(renamed) => renamed,
        Err(why) => return Ok(Err(why)),
    };
    let mut kept = Vec::new();
    let mut tensors = tensors.into_iter();
    for mut entry in entries {
        let own = tensors.next().map(Tensor::into_bytes).transpose();
        let own = own.map_err(|error| CheckpointError::Rank0(unreadable(error)))?;
        let sent = group.broadcast_long(own.as_deref(), entry.len(), 0)?;
        let bytes = sent
            .map(Bytes::from_bytes_vec)
            .or(own)
            .expect("received, or sent");
        match shares.map(|shares| shares.of(entry.parameter())) {
            None | Some(Share::Nothing) => {}
            Some(Share::Part(part)) if part.whole == entry.shape => {
                let bytes = part.cut(&bytes, entry.dtype.size());
                entry.shape.clone_from(&part.own);
                kept.push(entry.with(bytes));
            }
            Some(_) => kept.push(entry.with(bytes)),
        }
    }
    let Some(shares) = shares else {
        return Ok(Ok(Bytes::from_bytes_vec(Vec::new())));
    };
    rest.retain(|id| shares.has(id));
    Ok(rest.encode(kept))
}
