//! The averages of weights that an optimizer keeps in its state.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use burn::module::Module;
use burn::tensor::TensorData;
use burn_pack::{Reader, Tensor};
use paceline_ddp::{Slice, ZeroRedundancyOptimizer, weights};

use crate::error::CheckpointError;
use crate::optimizer::{OptimizerRef, records};
use crate::record::{self, unreadable};

/// Ends the name of a parameter's average in an optimizer's state, which is `paceline_nn`'s `Ema`.
const AVERAGE: &str = ".ema";

/// `model` with the averages that `optimizer`, made of `paceline_nn`'s `Ema`, keeps of its parameters; `None` if it keeps none. What has no
/// average stays: running statistics, and parameters that were never stepped. All ranks that share a sharded optimizer call it, with
/// whole parameters in their models.
///
/// *Errors*: failed collectives; a state that cannot be encoded.
pub fn averaged<'a, M: Module>(
    model: &M,
    optimizer: impl Into<OptimizerRef<'a>>,
) -> Result<Option<M>, CheckpointError> {
    let optimizer = optimizer.into();
    let local = match optimizer {
        OptimizerRef::Whole(optimizer) => optimizer,
        OptimizerRef::Sharded(sharded) => sharded.local(),
    };
    let tensors = weights::tensors(model);
    let ids: Vec<(u64, String)> = weights::paths(model);
    let sizes = tensors.iter();
    let sizes = sizes.map(|(_, shape, dtype)| shape.iter().product::<usize>() * dtype.size());
    let mut own = HashMap::new();
    for encoded in records(local, ids.iter().map(|(id, _)| *id).zip(sizes)) {
        let read = encoded.and_then(record::decode);
        let read = read.and_then(|(tensors, _)| averages(tensors));
        own.extend(read.map_err(CheckpointError::Rank0)?);
    }
    if let OptimizerRef::Sharded(sharded) = optimizer {
        own = gathered(model, sharded, own)?;
    }
    if own.is_empty() {
        return Ok(None);
    }
    let values = ids.into_iter();
    let values = values.filter_map(|(id, path)| Some((path, own.remove(&id)?)));
    let values = values.collect();
    Ok(Some(weights::import(model.clone(), values)))
}

/// The whole averages, of each rank's slices. In place of a missing average a rank gives the weights, which all have.
fn gathered<M: Module>(
    model: &M,
    sharded: &ZeroRedundancyOptimizer,
    mut own: HashMap<u64, TensorData>,
) -> Result<HashMap<u64, TensorData>, CheckpointError> {
    let group = sharded.group();
    let have = group.all_gather_bytes(&[u8::from(!own.is_empty())])?;
    if have.concat().iter().all(|has| *has == 0) {
        return Ok(HashMap::new());
    }
    let slices: Vec<Vec<Slice>> = (0..group.world())
        .map(|rank| sharded.slices(rank))
        .collect();
    let paths: HashMap<u64, String> = weights::paths(model).into_iter().collect();
    let mut weights: HashMap<String, TensorData> = weights::export(model).into_iter().collect();
    let mut whole = HashMap::new();
    for (at, Slice { id, range, shape }) in slices[group.rank()].iter().enumerate() {
        let weight = paths.get(id).and_then(|path| weights.remove(path));
        let weight = weight.expect("the optimizer's parameters are the model's");
        let size = weight.dtype().size();
        let bytes = |range: &Range<usize>| range.start * size..range.end * size;
        let mine = match own.remove(id) {
            Some(average) => average.as_bytes().to_vec(),
            None => weight.as_bytes()[bytes(range)].to_vec(),
        };
        let ranges = slices.iter().map(|slices| bytes(&slices[at].range));
        let counts: Vec<usize> = ranges.clone().map(|range| range.len()).collect();
        let mut all = vec![0; counts.iter().sum()];
        group.all_gather_v(&mine, &mut all, &counts)?;
        let mut rest = &all[..];
        let mut values = weight.as_bytes().to_vec();
        for range in ranges {
            let part = rest.split_off(..range.len()).expect("they add up");
            values[range].copy_from_slice(part);
        }
        let values = TensorData::from_bytes_vec(values, shape.clone(), weight.dtype());
        whole.insert(*id, values);
    }
    Ok(whole)
}

/// The averages in the file of an optimizer's state, by the ids of parameters.
pub(crate) fn stored(path: &Path) -> Result<HashMap<u64, TensorData>, String> {
    let reader = Reader::from_file_exact(path).map_err(unreadable)?;
    averages(reader.into_tensors().map_err(unreadable)?)
}

fn averages(tensors: Vec<Tensor>) -> Result<HashMap<u64, TensorData>, String> {
    let named = tensors.into_iter().filter_map(|tensor| {
        let id = tensor.name.strip_suffix(AVERAGE)?.parse().ok()?;
        Some((id, tensor))
    });
    let read = named.map(|(id, tensor)| {
        let (_, dtype, shape, _, bytes) = tensor.into_parts().map_err(unreadable)?;
        Ok((id, TensorData::from_bytes(bytes, shape, dtype)))
    });
    read.collect()
}
