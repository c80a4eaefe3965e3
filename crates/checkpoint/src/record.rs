//! `Record`: an optimizer's state in Burn's format, taken apart and put together again.
//!
//! Burn draws ids of parameters at random in every process and keys the state by them: `"{id}.{field}"`.

use std::collections::{BTreeMap, HashMap};

use burn::tensor::{Bytes, DType, Device};
use burn_pack::{Reader, Scalar, Tensor, Writer};
use serde::{Deserialize, Serialize};

/// A tensor of the state, without its values.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    pub(crate) id: Option<u64>,
}

impl Entry {
    pub(crate) fn of(tensor: &Tensor) -> Self {
        Self {
            name: tensor.name.clone(),
            dtype: tensor.dtype,
            shape: tensor.shape.to_vec(),
            id: tensor.param_id,
        }
    }

    pub(crate) fn with(self, bytes: Bytes) -> Tensor {
        Tensor::new(self.name, self.dtype, self.shape, self.id, bytes)
    }

    /// Bytes of its values.
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }

    /// *Errors*: a type in which Burn does not read it: all floats of a state get the default type of the default device.
    pub(crate) fn require_default_type(&self) -> Result<(), String> {
        let default = DType::from(Device::default().settings().float_dtype);
        if !self.dtype.is_float() || self.dtype == default {
            return Ok(());
        }
        let (name, dtype) = (&self.name, self.dtype);
        Err(format!(
            "the optimizer state has {name} in {dtype:?}, but Burn would read it in {default:?}, the default type of \
             `Device::default()`: configure {dtype:?} there first"
        ))
    }

    /// The parameter that it belongs to.
    pub(crate) fn parameter(&self) -> Option<u64> {
        parameter(&self.name)
    }
}

/// The parameter of a name in a record.
fn parameter(name: &str) -> Option<u64> {
    name.split('.').next()?.parse().ok()
}

/// The rest of a state: numbers, and the paths of parameters.
#[derive(Default)]
pub(crate) struct Rest {
    scalars: BTreeMap<String, Scalar>,
    paths: BTreeMap<String, String>,
}

impl Rest {
    pub(crate) fn extend(&mut self, other: Self) {
        self.scalars.extend(other.scalars);
        self.paths.extend(other.paths);
    }

    /// Keeps what belongs to parameters for which `is_kept` is true.
    pub(crate) fn retain(&mut self, is_kept: impl Fn(u64) -> bool) {
        let is_kept = |name: &str| parameter(name).is_none_or(&is_kept);
        self.scalars.retain(|name, _| is_kept(name));
        self.paths.retain(|name, _| is_kept(name));
    }

    /// The record of these and `tensors`.
    pub(crate) fn writer(&self, tensors: Vec<Tensor>) -> Writer {
        let mut writer = Writer::new(tensors);
        for (name, value) in &self.scalars {
            writer = writer.with_scalar(name, *value);
        }
        for (name, path) in &self.paths {
            writer = writer.with_metadata(name, path);
        }
        writer
    }

    /// As [`writer`](Self::writer), in memory.
    pub(crate) fn encode(&self, tensors: Vec<Tensor>) -> Result<Bytes, String> {
        self.encode_to(Vec::new(), tensors)
    }

    /// The same in memory that the caller has.
    fn encode_to(&self, mut words: Vec<u128>, tensors: Vec<Tensor>) -> Result<Bytes, String> {
        let writer = self.writer(tensors);
        let bytes = writer.size().map_err(unreadable)?;
        // Of bytes Burn would make a copy that is aligned.
        words.resize(bytes.div_ceil(size_of::<u128>()), 0);
        let written = writer.write_into(bytemuck::cast_slice_mut(&mut words));
        written.map_err(unreadable)?;
        Ok(Bytes::from_elems(words))
    }

    /// Gives every parameter its id in `ids`.
    ///
    /// *Errors*: an id that `ids` lacks.
    pub(crate) fn rename(&mut self, ids: &HashMap<u64, u64>) -> Result<(), String> {
        let scalars = std::mem::take(&mut self.scalars).into_iter();
        let scalars = scalars.map(|(name, value)| Ok((renamed(&name, ids)?, value)));
        self.scalars = scalars.collect::<Result<_, String>>()?;
        let paths = std::mem::take(&mut self.paths).into_iter();
        let paths = paths.map(|(name, path)| Ok((renamed(&name, ids)?, path)));
        self.paths = paths.collect::<Result<_, String>>()?;
        Ok(())
    }
}

/// The record of a reader.
pub(crate) fn parts(reader: Reader) -> Result<(Vec<Tensor>, Rest), String> {
    let rest = Rest {
        scalars: reader.scalars().clone(),
        paths: reader.metadata().clone(),
    };
    let tensors = reader.into_tensors().map_err(unreadable)?;
    Ok((tensors, rest))
}

/// The record that these bytes are.
pub(crate) fn decode(bytes: Bytes) -> Result<(Vec<Tensor>, Rest), String> {
    parts(Reader::from_bytes(bytes).map_err(unreadable)?)
}

/// `name` with the id that its parameter has in `ids`.
pub(crate) fn renamed(name: &str, ids: &HashMap<u64, u64>) -> Result<String, String> {
    let (id, field) = name
        .split_once('.')
        .map_or((name, None), |(id, field)| (id, Some(field)));
    let new = id.parse().ok().and_then(|id: u64| ids.get(&id));
    let new = new
        .ok_or_else(|| format!("the optimizer state has {name}, which belongs to no parameter"))?;
    Ok(field.map_or_else(|| new.to_string(), |field| format!("{new}.{field}")))
}

/// One record of `records`, with every id replaced by its entry in `ids`. It may be written to `room`.
///
/// *Errors*: bytes that are not optimizer state, or an id that `ids` lacks.
pub(crate) fn with_ids(
    records: Vec<Bytes>,
    room: Vec<u128>,
    ids: &HashMap<u64, u64>,
) -> Result<Bytes, String> {
    let (mut tensors, mut rest) = (Vec::new(), Rest::default());
    for record in records {
        let (some, more) = decode(record)?;
        tensors.extend(some);
        rest.extend(more);
    }
    rest.rename(ids)?;
    for tensor in &mut tensors {
        tensor.name = renamed(&tensor.name, ids)?;
        tensor.param_id = tensor.param_id.and_then(|id| ids.get(&id).copied());
    }
    // Burn's own order differs from process to process.
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    rest.encode_to(room, tensors)
}

pub(crate) fn unreadable(error: impl std::fmt::Display) -> String {
    format!("the optimizer state cannot be read: {error}")
}
