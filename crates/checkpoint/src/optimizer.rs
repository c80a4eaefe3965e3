//! Optimizer state as bytes: translated to this process's parameter ids, and joined from and cut into ranks' slices.
//!
//! Burn draws ids at random in every process and keys an optimizer's state by them: `"{id}.{field}"`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, DType, Shape, TensorData};
use burn_pack::{Reader, Scalar, Tensor, Writer};
use paceline_collective::ProcessGroup;
use paceline_ddp::{Ddp, Placement, Slice, ZeroRedundancyOptimizer, weights};
use serde::{Deserialize, Serialize};

use crate::error::CheckpointError;

/// Bytes of one rank's state that rank 0 receives at once.
const PIECE_BYTES: usize = 4 << 20;

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
    /// The optimizer with `state`, a record of whole parameters in Burn's format, of which it keeps what belongs to the
    /// parameters that are `held`.
    ///
    /// *Errors*: why the state cannot be read.
    fn load(self, state: Bytes, held: &Held) -> Result<Self, String>;
}

impl LoadOptimizer for ModuleOptimizer {
    fn load(self, state: Bytes, held: &Held) -> Result<Self, String> {
        self.from_bytes(held.cut(state)?).map_err(unreadable)
    }
}

impl LoadOptimizer for ZeroRedundancyOptimizer {
    fn load(self, state: Bytes, held: &Held) -> Result<Self, String> {
        let own = cut(held.cut(state)?, &self.slices(self.group().rank()))?;
        let local = LoadOptimizer::load(self.local().clone(), own, &Held::default())?;
        Ok(self.with_local(local))
    }
}

/// What a rank's model holds of the parameters of a model that is split: nothing of some, slices of others.
#[derive(Debug, Default)]
pub struct Held(HashMap<u64, Option<Part>>);

/// A slice along an axis of a parameter.
#[derive(Debug)]
struct Part {
    axis: usize,
    range: Range<usize>,
    /// Of the whole parameter.
    shape: Vec<usize>,
}

impl Held {
    pub(crate) fn of<M: Module>(ddp: &Ddp, model: &M) -> Self {
        let Some(placement) = ddp.parted() else {
            return Self::default();
        };
        let trained: HashMap<_, _> = ddp.trained().collect();
        let part = |(id, _): (u64, String)| {
            let Some(shape) = trained.get(&id.into()) else {
                return Some((id, None));
            };
            let (axis, range) = placement.slice(id.into())?;
            let shape = placement.whole_shape(id.into(), shape.to_vec());
            Some((id, Some(Part { axis, range, shape })))
        };
        Self(weights::paths(model).into_iter().filter_map(part).collect())
    }

    /// Of a record of whole parameters, what belongs to the held ones.
    fn cut(&self, state: Bytes) -> Result<Bytes, String> {
        if self.0.is_empty() {
            return Ok(state);
        }
        let part = |name: &str| id_of(name).and_then(|id| self.0.get(&id));
        let is_held = |name: &str| !matches!(part(name), Some(None));
        let mut record = Record::read(state)?;
        record.scalars.retain(|name, _| is_held(name));
        record.metadata.retain(|name, _| is_held(name));
        record.entries.retain(|entry| is_held(&entry.name));
        for entry in &mut record.entries {
            let Some(Some(part)) = part(&entry.name) else {
                continue;
            };
            if part.shape == entry.shape {
                let slice = weights::slice(&entry.data(), part.axis, part.range.clone());
                entry.shape = slice.shape().to_vec();
                entry.bytes = slice.into_bytes();
            }
        }
        record.write()
    }
}

/// Why bytes are no optimizer state.
pub(crate) fn unreadable(error: impl std::fmt::Display) -> String {
    format!("the optimizer state cannot be read: {error}")
}

/// The state of one rank, if it could be encoded.
type State = Result<Bytes, String>;

/// The slices of all ranks that share an optimizer's state as one record of whole parameters, on the first of them; `None`
/// elsewhere.
///
/// *Blocks*: until that rank has every rank's state. *Memory*: the whole state, on that rank.
pub(crate) fn gather(
    optimizer: &ZeroRedundancyOptimizer,
) -> Result<Option<State>, CheckpointError> {
    let group = optimizer.group();
    let slices = optimizer.slices(group.rank());
    let numbered = slices.iter().zip(0_u64..).map(|(slice, at)| (slice.id, at));
    let own = optimizer.local().into_bytes().map_err(unreadable);
    // Ids differ between processes, places do not.
    let own = own.and_then(|own| with_ids(own, &numbered.clone().collect()));
    // Every rank takes part even if its own state cannot be encoded, which rank 0 then sees.
    let own = own.unwrap_or_else(|_| Bytes::from_bytes_vec(Vec::new()));
    let Some(parts) = gather_bytes(group, &own)? else {
        return Ok(None);
    };
    let ids = numbered.map(|(id, at)| (at, id)).collect();
    let joined = join(parts, |rank| optimizer.slices(rank));
    Ok(Some(joined.and_then(|joined| with_ids(joined, &ids))))
}

/// The state of a model whose parts are on different ranks as one record of whole parameters, on rank 0; `None` elsewhere. `own`
/// is the state of this rank's part, on the first of its replicas.
///
/// *Blocks*, *Memory*: as [`gather`].
pub(crate) fn gather_parts<M: Module>(
    own: Option<State>,
    ddp: &Ddp,
    placement: &dyn Placement,
    model: &M,
) -> Result<Option<State>, CheckpointError> {
    let ids: Vec<u64> = weights::paths(model)
        .into_iter()
        .map(|(id, _)| id)
        .collect();
    let numbers = ids.iter().copied().zip(0_u64..).collect();
    let trained: HashMap<_, _> = ddp.trained().collect();
    let slices = ids.iter().zip(0_u64..).filter_map(|(id, at)| {
        let (axis, range) = placement.slice((*id).into())?;
        let shape = trained.get(&(*id).into())?.to_vec();
        let start = range.start;
        Some((at, Place { axis, start, shape }))
    });
    let header = serde_json::to_vec(&slices.collect::<Places>()).expect("numbers always encode");
    // Every rank takes part even if its own state cannot be encoded, which rank 0 then sees.
    let own = match own.map(|own| with_ids(own?, &numbers)) {
        None => Vec::new(),
        Some(Ok(own)) => [&(header.len() as u64).to_le_bytes()[..], &header, &own].concat(),
        Some(Err(why)) => [&FAILED.to_le_bytes()[..], why.as_bytes()].concat(),
    };
    let Some(parts) = gather_bytes(placement.group(), &own)? else {
        return Ok(None);
    };
    let ids = ids.into_iter().zip(0_u64..).map(|(id, at)| (at, id));
    let joined = join_parts(parts).and_then(|joined| with_ids(joined, &ids.collect()));
    Ok(Some(joined))
}

/// In the place of a header's length: the rest says why a rank has no state.
const FAILED: u64 = u64::MAX;

/// The states of all ranks' optimizers, each with rank 0's ids, on rank 0; `None` elsewhere. `ids` are those of the model's
/// tensors, in one order on all ranks.
///
/// *Blocks*: until rank 0 has every rank's state. *Memory*: all states, on rank 0.
pub(crate) fn gather_own(
    optimizer: &ModuleOptimizer,
    group: &ProcessGroup,
    ids: &[u64],
) -> Result<Option<Vec<Bytes>>, CheckpointError> {
    let numbered = ids.iter().copied().zip(0_u64..);
    let own = optimizer.into_bytes().map_err(unreadable);
    let own = own.and_then(|own| with_ids(own, &numbered.clone().collect()));
    // Every rank takes part even if its own state cannot be encoded, which rank 0 then sees.
    let own = own.unwrap_or_else(|_| Bytes::from_bytes_vec(Vec::new()));
    let parts = gather_bytes(group, &own)?;
    let Some(parts) = parts else { return Ok(None) };
    let ids = numbered.map(|(id, at)| (at, id)).collect();
    let states = parts
        .into_iter()
        .map(|part| with_ids(Bytes::from_bytes_vec(part), &ids));
    let states: Result<_, _> = states.collect();
    states.map(Some).map_err(CheckpointError::Rank0)
}

/// A rank's slices, by number of the parameter.
type Places = BTreeMap<u64, Place>;

/// Where a rank's slice of a parameter lies.
#[derive(Serialize, Deserialize)]
struct Place {
    axis: usize,
    /// The slice's first place along the axis.
    start: usize,
    /// Of the slice.
    shape: Vec<usize>,
}

/// Joins ranks' records: slices by their places along the axis; of what several have, one.
fn join_parts(parts: Vec<Vec<u8>>) -> Result<Bytes, String> {
    let mut joined = Record::default();
    let mut names = HashSet::new();
    let mut slices: BTreeMap<String, (usize, BTreeMap<usize, Entry>)> = BTreeMap::new();
    for part in parts.into_iter().filter(|part| !part.is_empty()) {
        let (len, rest) = part
            .split_first_chunk()
            .ok_or("a rank sent too few bytes")?;
        let len = u64::from_le_bytes(*len);
        if len == FAILED {
            return Err(String::from_utf8_lossy(rest).into_owned());
        }
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let (header, record) = rest
            .split_at_checked(len)
            .ok_or("a rank sent too few bytes")?;
        let places: Places = serde_json::from_slice(header).map_err(unreadable)?;
        let record = Record::read(Bytes::from_bytes_vec(record.to_vec()))?;
        joined.scalars.extend(record.scalars);
        joined.metadata.extend(record.metadata);
        for entry in record.entries {
            let place = id_of(&entry.name).and_then(|at| places.get(&at));
            match place.filter(|place| place.shape == entry.shape) {
                Some(place) => {
                    let slice = slices.entry(entry.name.clone());
                    let (_, found) = slice.or_insert((place.axis, BTreeMap::new()));
                    found.insert(place.start, entry);
                }
                None if names.insert(entry.name.clone()) => joined.entries.push(entry),
                None => {}
            }
        }
    }
    let whole = slices.into_values().filter_map(|(axis, found)| {
        let data: Vec<TensorData> = found.values().map(Entry::data).collect();
        let whole = weights::concat(&data, axis);
        let entry = found.into_values().next()?;
        Some(Entry {
            shape: whole.shape().to_vec(),
            bytes: whole.into_bytes(),
            ..entry
        })
    });
    joined.entries.extend(whole);
    joined.write()
}

/// Every rank's bytes on rank 0, piece by piece.
fn gather_bytes(group: &ProcessGroup, own: &[u8]) -> Result<Option<Vec<Vec<u8>>>, CheckpointError> {
    let mut lens = vec![0_i64; group.world()];
    group.all_gather(&[own.len() as i64], &mut lens)?;
    let longest = lens.iter().copied().max().unwrap_or(0) as usize;
    let is_root = group.rank() == 0;
    let mut parts = vec![Vec::new(); if is_root { lens.len() } else { 0 }];
    let mut received = vec![0_u8; PIECE_BYTES * parts.len()];
    let mut sent = vec![0_u8; PIECE_BYTES];
    for start in (0..longest).step_by(PIECE_BYTES) {
        let piece = &own[start.min(own.len())..(start + PIECE_BYTES).min(own.len())];
        sent[..piece.len()].copy_from_slice(piece);
        group.gather(&sent, is_root.then_some(&mut received[..]), 0)?;
        let pieces = received.chunks(PIECE_BYTES);
        for ((part, len), piece) in parts.iter_mut().zip(&lens).zip(pieces) {
            let missing = (*len as usize).saturating_sub(part.len());
            part.extend_from_slice(&piece[..missing.min(PIECE_BYTES)]);
        }
    }
    Ok(is_root.then_some(parts))
}

/// A tensor of an optimizer's state.
struct Entry {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    id: Option<u64>,
    bytes: Bytes,
}

impl Entry {
    fn data(&self) -> TensorData {
        TensorData::from_bytes(self.bytes.clone(), self.shape.clone(), self.dtype)
    }
}

/// A state, taken apart.
#[derive(Default)]
struct Record {
    entries: Vec<Entry>,
    scalars: BTreeMap<String, Scalar>,
    metadata: BTreeMap<String, String>,
}

impl Record {
    fn read(state: Bytes) -> Result<Self, String> {
        let reader = Reader::from_bytes(state).map_err(unreadable)?;
        let (scalars, metadata) = (reader.scalars().clone(), reader.metadata().clone());
        let entry = |tensor: Tensor| {
            let (name, dtype, shape, id, bytes) = tensor.into_parts().map_err(unreadable)?;
            Ok::<_, String>(Entry {
                name,
                dtype,
                shape: shape.to_vec(),
                id,
                bytes,
            })
        };
        let entries = reader.into_tensors().map_err(unreadable)?;
        Ok(Self {
            entries: entries.into_iter().map(entry).collect::<Result<_, _>>()?,
            scalars,
            metadata,
        })
    }

    fn write(self) -> Result<Bytes, String> {
        let tensor = |entry: Entry| {
            let shape = Shape::from(entry.shape);
            Tensor::new(entry.name, entry.dtype, shape, entry.id, entry.bytes)
        };
        let mut writer = Writer::new(self.entries.into_iter().map(tensor).collect());
        for (name, value) in &self.scalars {
            writer = writer.with_scalar(name, *value);
        }
        for (name, value) in &self.metadata {
            writer = writer.with_metadata(name, value);
        }
        writer.into_bytes().map_err(unreadable)
    }
}

/// The parameter of an entry.
fn id_of(name: &str) -> Option<u64> {
    name.split('.').next()?.parse().ok()
}

fn elements(shape: &[usize]) -> usize {
    shape.iter().product()
}

/// Joins the ranks' states: a parameter's slices lie one after another, in rank order. Parameters are named by their places
/// in a rank's `slices`.
fn join(parts: Vec<Vec<u8>>, slices: impl Fn(usize) -> Vec<Slice>) -> Result<Bytes, String> {
    let mut joined = Record::default();
    let mut cut: BTreeMap<String, (Entry, Vec<Bytes>)> = BTreeMap::new();
    let mut names = HashSet::new();
    for (rank, part) in parts.into_iter().enumerate() {
        let slices = slices(rank);
        let part = Record::read(Bytes::from_bytes_vec(part))?;
        joined.scalars.extend(part.scalars);
        joined.metadata.extend(part.metadata);
        for mut entry in part.entries {
            let place = id_of(&entry.name).and_then(|at| usize::try_from(at).ok());
            let slice = place.and_then(|at| slices.get(at));
            let slice = slice.filter(|slice| slice.is_part(elements(&entry.shape)));
            if let Some(slice) = slice {
                let bytes = entry.bytes.clone();
                entry.shape = slice.shape.clone();
                let parts = cut.entry(entry.name.clone()).or_insert((entry, Vec::new()));
                parts.1.push(bytes);
            } else if names.insert(entry.name.clone()) {
                // Whole, or a number that all owners have alike.
                joined.entries.push(entry);
            }
        }
    }
    joined
        .entries
        .extend(cut.into_values().map(|(entry, parts)| {
            let parts: Vec<&[u8]> = parts.iter().map(|part| &part[..]).collect();
            let bytes = Bytes::from_bytes_vec(parts.concat());
            Entry { bytes, ..entry }
        }));
    joined.write()
}

/// This rank's slices of a record of whole parameters.
fn cut(state: Bytes, slices: &[Slice]) -> Result<Bytes, String> {
    let slices: HashMap<u64, &Slice> = slices.iter().map(|slice| (slice.id, slice)).collect();
    let slice_of = |name: &str| id_of(name).and_then(|id| slices.get(&id).copied());
    let is_owned = |name: &str| slice_of(name).is_none_or(|slice| !slice.range.is_empty());
    let mut record = Record::read(state)?;
    record.scalars.retain(|name, _| is_owned(name));
    record.metadata.retain(|name, _| is_owned(name));
    record.entries.retain(|entry| is_owned(&entry.name));
    for entry in &mut record.entries {
        let slice = slice_of(&entry.name).filter(|slice| slice.shape == entry.shape);
        let Some(Slice { range, shape, .. }) =
            slice.filter(|slice| slice.is_part(slice.range.len()))
        else {
            continue;
        };
        let each = entry.bytes.len() / elements(shape);
        let own = entry.bytes[range.start * each..range.end * each].to_vec();
        entry.bytes = Bytes::from_bytes_vec(own);
        entry.shape.fill(1);
        *entry
            .shape
            .last_mut()
            .expect("a cut parameter has dimensions") = range.len();
    }
    record.write()
}

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
    let mut record = Record::read(state)?;
    for entry in &mut record.entries {
        entry.name = renamed(&entry.name)?;
        entry.id = entry.id.map(|id| ids.get(&id).copied().unwrap_or(id));
    }
    let scalars = std::mem::take(&mut record.scalars).into_iter();
    record.scalars = scalars
        .map(|(name, value)| Ok((renamed(&name)?, value)))
        .collect::<Result<_, String>>()?;
    let metadata = std::mem::take(&mut record.metadata).into_iter();
    record.metadata = metadata
        .map(|(name, value)| Ok((renamed(&name)?, value)))
        .collect::<Result<_, String>>()?;
    record.write()
}
