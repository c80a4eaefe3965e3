//! Translates optimizer state to this process's parameter ids.
//!
//! Burn draws ids at random in every process and keys an optimizer's state by them: `"{id}.{field}"`.

use std::collections::HashMap;

use burn::tensor::Bytes;
use burn_pack::{Reader, Tensor, Writer};

/// `state` with every id replaced by its entry in `ids`.
///
/// *Errors*: bytes that are not optimizer state, or an id that `ids` lacks.
pub(crate) fn with_ids(state: Bytes, ids: &HashMap<u64, u64>) -> Result<Bytes, String> {
    if ids.iter().all(|(from, to)| from == to) {
        return Ok(state);
    }
    let renamed = |name: &str| -> Result<String, String> {
        let (id, field) = name
            .split_once('.')
            .map_or((name, None), |(id, field)| (id, Some(field)));
        let new = id.parse().ok().and_then(|id: u64| ids.get(&id));
        let new = new.ok_or_else(|| {
            format!("the optimizer state has {name}, which belongs to no parameter")
        })?;
        Ok(field.map_or_else(|| new.to_string(), |field| format!("{new}.{field}")))
    };
    let said = |error: burn_pack::Error| format!("the optimizer state cannot be read: {error}");
    let reader = Reader::from_bytes(state).map_err(said)?;
    let (scalars, metadata) = (reader.scalars().clone(), reader.metadata().clone());
    let tensor = |tensor: Tensor| {
        let (name, dtype, shape, id, bytes) = tensor.into_parts().map_err(said)?;
        let id = id.map(|id| ids.get(&id).copied().unwrap_or(id));
        Ok::<_, String>(Tensor::new(renamed(&name)?, dtype, shape, id, bytes))
    };
    let tensors = reader.into_tensors().map_err(said)?.into_iter().map(tensor);
    let mut writer = Writer::new(tensors.collect::<Result<_, String>>()?);
    for (name, value) in &scalars {
        writer = writer.with_scalar(&renamed(name)?, *value);
    }
    for (name, value) in &metadata {
        writer = writer.with_metadata(&renamed(name)?, value);
    }
    writer.into_bytes().map_err(said)
}
