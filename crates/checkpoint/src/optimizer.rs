//! Optimizer state of a job, saved as one record of whole parameters: references to it, and its way back to the ranks, one tensor at
//! a time.

use std::collections::HashMap;
use std::path::Path;

use burn::module::{ParamGroup, ParamId};
use burn::optim::{ModuleOptimizer, SgdConfig};
use burn::tensor::Bytes;
use burn_pack::{Reader, Tensor};
use paceline_collective::ProcessGroup;
use paceline_ddp::{Slice, ZeroRedundancyOptimizer};

use crate::decide::by_rank_0;
use crate::error::CheckpointError;
use crate::record::{self, Entry, unreadable};
use crate::share::{Share, Shares};

/// Most bytes of the parameters of a record of some, unless there is only one. With two moments of each, the record has less than the
/// 4 MiB above which the allocator of `paceline train` gives memory back to the system.
const RECORD_BYTES: usize = 3 << 19;
/// Most such records: each takes a pass over all parameters.
const RECORDS_MAX: usize = 256;

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

/// The state of `optimizer` as a record.
pub(crate) fn encode(optimizer: &ModuleOptimizer) -> Result<Bytes, String> {
    let state = optimizer.into_bytes();
    state.map_err(|error| format!("the optimizer state cannot be encoded: {error}"))
}

/// The same in records of some parameters each, encoded one by one: Burn copies a record four times, and short ones stay in memory
/// that this process has used before. `parameters` are the ids and sizes of the model's tensors.
pub(crate) fn records(
    optimizer: &ModuleOptimizer,
    parameters: impl Iterator<Item = (u64, usize)> + Clone,
) -> impl Iterator<Item = Result<Bytes, String>> {
    let all: usize = parameters.clone().map(|(_, len)| len).sum();
    let record_bytes = RECORD_BYTES.max(all.div_ceil(RECORDS_MAX));
    let mut groups: Vec<Vec<ParamId>> = vec![Vec::new()];
    let mut bytes = 0;
    for (id, len) in parameters {
        if bytes + len > record_bytes {
            groups.push(Vec::new());
            bytes = 0;
        }
        bytes += len;
        groups.last_mut().expect("one or more").push(id.into());
    }
    let known = ParamGroup::from_ids(groups.concat());
    let groups = groups.into_iter().map(ParamGroup::from_ids);
    let others = groups.map(|group| ParamGroup::all().exclude(group));
    // Last what belongs to no parameter, for the reader to refuse.
    let others: Vec<_> = others.chain([known]).collect();
    others.into_iter().map(move |others| {
        // An optimizer forgets what it has of the parameters of a new group.
        let some = optimizer.clone();
        encode(&some.with_group(others, SgdConfig::new().build(), None))
    })
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

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::{AdamWConfig, GradientsParams};
    use burn::tensor::{Device, Tensor};
    use paceline_ddp::weights;

    use super::*;
    use crate::record::with_ids;

    #[test]
    fn records_of_some_parameters_are_together_the_state_of_all() {
        let device = Device::flex().autodiff();
        let model: Vec<Linear> = vec![
            LinearConfig::new(4, 4).init(&device),
            LinearConfig::new(4, 8).init(&device),
        ];
        let hidden = model[0].forward(Tensor::<2>::ones([3, 4], &device));
        let grads = model[1].forward(hidden).sum().backward();
        let mut optimizer = AdamWConfig::new().init();
        let grads = GradientsParams::from_grads(grads, &model);
        let model = optimizer.step(0.1, model, grads);
        let ids: Vec<u64> = weights::paths(&model).iter().map(|(id, _)| *id).collect();
        assert_eq!(ids.len(), 4);
        let own = ids.iter().map(|id| (*id, *id)).collect();
        let whole = with_ids(vec![encode(&optimizer).unwrap()], Vec::new(), &own).unwrap();
        // The last record is of parameters that are not named.
        for (bytes, named, count) in [
            (0, 4, 2),
            (RECORD_BYTES, 4, 5),
            (RECORD_BYTES / 2, 4, 3),
            (9, 1, 2),
        ] {
            let named = ids[..named].iter().map(|id| (*id, bytes));
            let records: Vec<Bytes> = records(&optimizer, named)
                .collect::<Result<_, _>>()
                .unwrap();
            assert_eq!(records.len(), count);
            for room in [Vec::new(), vec![7; 1 << 16]] {
                let joined = with_ids(records.clone(), room, &own).unwrap();
                assert_eq!(joined[..], whole[..], "{bytes}");
            }
        }
        let few = ids[1..].iter().map(|id| (*id, *id)).collect();
        let error = with_ids(vec![encode(&optimizer).unwrap()], Vec::new(), &few).unwrap_err();
        assert!(error.contains("which belongs to no parameter"), "{error}");
    }
}
