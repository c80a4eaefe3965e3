//! Optimizer state of a job: saved as one record of whole parameters, restored by what each rank has of them. State that is
//! dealt to the ranks goes through rank 0 one tensor at a time.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use burn::optim::ModuleOptimizer;
use burn::tensor::Bytes;
use burn_pack::{Reader, Tensor};
use paceline_collective::ProcessGroup;
use paceline_ddp::{Slice, ZeroRedundancyOptimizer};
use serde::{Deserialize, Serialize};

use crate::decide::by_rank_0;
use crate::error::CheckpointError;
use crate::record::{self, Entry, Rest, unreadable, with_ids};
use crate::share::{Part, Share, Shares};

/// Bytes of state that a message has.
const PIECE_BYTES: usize = 4 << 20;
/// Bytes of all ranks' state that rank 0 receives at once.
const GATHERED_BYTES: usize = 64 << 20;

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

/// State that is dealt to the ranks.
pub(crate) struct Dealt<'a> {
    /// The ranks.
    pub(crate) group: &'a ProcessGroup,
    /// This rank's part; `None` if another rank has the same.
    pub(crate) optimizer: Option<&'a ModuleOptimizer>,
    pub(crate) shares: Shares,
    /// The ids of the model's parameters, in one order on all ranks.
    pub(crate) ids: Vec<u64>,
}

/// What a rank has. Parameters are named by their places in the model, because ids differ between processes.
#[derive(Default, Serialize, Deserialize)]
struct Told {
    /// Of a part, the entry of the whole parameter.
    entries: Vec<(Entry, Option<Part>)>,
    rest: Vec<u8>,
}

/// A tensor of the whole state.
struct Joined {
    entry: Entry,
    /// The parts of the ranks that have one, or one rank that has it whole.
    parts: Vec<(usize, Option<Part>)>,
}

impl Dealt<'_> {
    /// Writes one record of whole parameters to `path`, with rank 0's ids. All ranks call it, and rank 0 gives the path; without
    /// one nothing is written.
    ///
    /// *Memory*: on rank 0 one tensor and its parts; on every rank its own part. *Blocks*: until rank 0 has every rank's state.
    pub(crate) fn write(self, path: Option<&Path>) -> Result<(), CheckpointError> {
        let group = self.group;
        let own = self.own();
        let (told, own) = match own {
            Ok((told, own)) => (Ok(told), own),
            // The rank takes part all the same, and rank 0 learns why it has nothing.
            Err(why) => (Err(why), HashMap::new()),
        };
        let told = serde_json::to_vec::<Result<Told, String>>(&told).expect("plain data encodes");
        let all = gather_bytes(group, &told)?;
        let (mut joined, mut rest) = (Vec::new(), Rest::default());
        let order = by_rank_0(group, || {
            (joined, rest) = join(all.as_deref().unwrap_or_default())?;
            let order = joined.iter().map(|joined: &Joined| {
                let whole = joined.parts.iter().find(|(_, part)| part.is_none());
                (joined.entry.name.clone(), whole.map(|(rank, _)| *rank))
            });
            Ok::<_, String>(order.collect::<VecDeque<_>>())
        })?;
        let gathering = Gathering {
            group: group.clone(),
            own,
            order: order.map_err(CheckpointError::Rank0)?,
            failed: None,
        };
        let gathering = Arc::new(Mutex::new(gathering));
        let written = match path {
            Some(path) => self.write_joined(path, joined, rest, &gathering),
            None => Ok(()),
        };
        let mut gathering = lock(&gathering);
        while !gathering.order.is_empty() && gathering.failed.is_none() {
            // After a failed write the other ranks still send.
            let _ = gathering.next();
        }
        gathering.failed.take().map_or(Ok(()), Err)?;
        written.map_err(|source| CheckpointError::File {
            action: "write checkpoint",
            path: path.unwrap_or(Path::new("")).to_path_buf(),
            source,
        })
    }

    /// This rank's tensors, and what the others have to know of them.
    fn own(&self) -> Result<(Told, HashMap<String, Tensor>), String> {
        let Some(optimizer) = self.optimizer else {
            return Ok((Told::default(), HashMap::new()));
        };
        let places = self.ids.iter().copied().zip(0_u64..).collect();
        let (tensors, mut rest) = record::decode(optimizer.into_bytes().map_err(unreadable)?)?;
        rest.rename(&places)?;
        let mut entries = Vec::with_capacity(tensors.len());
        let mut own = HashMap::with_capacity(tensors.len());
        for tensor in tensors {
            let mut entry = Entry::of(&tensor);
            let part = match self.shares.of(entry.parameter()) {
                Share::Part(part) if part.own == entry.shape => Some(part.clone()),
                _ => None,
            };
            if let Some(part) = &part {
                entry.shape.clone_from(&part.whole);
            }
            entry.name = record::renamed(&entry.name, &places)?;
            own.insert(entry.name.clone(), tensor);
            entries.push((entry, part));
        }
        let rest = rest.encode(Vec::new())?.to_vec();
        Ok((Told { entries, rest }, own))
    }

    fn write_joined(
        &self,
        path: &Path,
        joined: Vec<Joined>,
        mut rest: Rest,
        gathering: &Arc<Mutex<Gathering>>,
    ) -> io::Result<()> {
        let ids: HashMap<u64, u64> = (0_u64..).zip(self.ids.iter().copied()).collect();
        rest.rename(&ids).map_err(io::Error::other)?;
        let tensors = joined.into_iter().map(|Joined { mut entry, parts }| {
            entry.name = record::renamed(&entry.name, &ids)?;
            let id = entry.parameter();
            let (entry, shape) = (entry.clone(), entry.shape);
            let gathering = gathering.clone();
            let (name, dtype, len) = (entry.name.clone(), entry.dtype, entry.len());
            let gather = move || {
                let sent = lock(&gathering).next();
                let sent = sent.map_err(|()| "the ranks failed".to_owned());
                let whole = sent.and_then(|sent| put_together(&entry, &parts, sent));
                whole.map_err(burn_pack::Error::IoError)
            };
            Ok(Tensor::deferred(name, dtype, shape, id, len, gather))
        });
        let tensors: Result<Vec<_>, String> = tensors.collect();
        let writer = rest.writer(tensors.map_err(io::Error::other)?);
        let written = writer.write_to_file_in_place(path);
        written.map_err(|error| io::Error::other(error.to_string()))
    }
}

/// The tensors that are still to be sent to rank 0.
struct Gathering {
    group: ProcessGroup,
    own: HashMap<String, Tensor>,
    /// Names, each with the one rank that sends it, unless several do.
    order: VecDeque<(String, Option<usize>)>,
    failed: Option<CheckpointError>,
}

impl Gathering {
    /// The next tensor's bytes of every rank; empty elsewhere than on rank 0.
    fn next(&mut self) -> Result<Vec<Vec<u8>>, ()> {
        let (name, sender) = self.order.pop_front().ok_or(())?;
        let is_sent = sender.is_none_or(|rank| rank == self.group.rank());
        let own = self.own.remove(&name).filter(|_| is_sent);
        let own = own.map(Tensor::into_bytes).transpose();
        let own = own
            .unwrap_or_default()
            .map_or_else(Vec::new, |own| own.to_vec());
        let sent = gather_bytes(&self.group, &own);
        let sent = sent.map_err(|error| self.failed = Some(error))?;
        Ok(sent.unwrap_or_default())
    }
}

/// The tensors of the whole state, of what the ranks have told.
fn join(told: &[Vec<u8>]) -> Result<(Vec<Joined>, Rest), String> {
    let (mut joined, mut rest) = (BTreeMap::<String, Joined>::new(), Rest::default());
    for (rank, told) in told.iter().enumerate() {
        let told: Result<Told, String> = serde_json::from_slice(told).map_err(unreadable)?;
        let told = told?;
        if !told.rest.is_empty() {
            rest.extend(record::decode(Bytes::from_bytes_vec(told.rest))?.1);
        }
        for (entry, part) in told.entries {
            let known = joined.entry(entry.name.clone()).or_insert_with(|| Joined {
                entry,
                parts: Vec::new(),
            });
            // Of what several ranks have whole, one is enough.
            if known.parts.is_empty() || part.is_some() {
                known.parts.push((rank, part));
            }
        }
    }
    Ok((joined.into_values().collect(), rest))
}

/// A tensor of the whole state, of what the ranks have sent.
fn put_together(
    entry: &Entry,
    parts: &[(usize, Option<Part>)],
    mut sent: Vec<Vec<u8>>,
) -> Result<Bytes, String> {
    let size = entry.dtype.size();
    let mut whole = Vec::new();
    for (rank, part) in parts {
        let bytes = std::mem::take(&mut sent[*rank]);
        match part {
            None => whole = bytes,
            Some(part) => {
                whole.resize(entry.len(), 0);
                let expected = part.own.iter().product::<usize>() * size;
                if bytes.len() != expected {
                    return Err(format!(
                        "{} of rank {rank}: expected {expected} bytes, got {}",
                        entry.name,
                        bytes.len()
                    ));
                }
                part.join(&bytes, &mut whole, size);
            }
        }
    }
    Ok(Bytes::from_bytes_vec(whole))
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
    // All ranks learn of a state that cannot be encoded.
    let told = own.as_ref().err().map_or(&[][..], |why| why.as_bytes());
    let told = group.all_gather_bytes(told)?;
    if let Some((rank, why)) = (told.iter().enumerate()).find(|(_, why)| !why.is_empty()) {
        let why = String::from_utf8_lossy(why);
        return Err(CheckpointError::Rank0(format!("rank {rank}: {why}")));
    }
    let own = own.map_err(CheckpointError::Rank0)?;
    let parts = gather_bytes(group, &own)?;
    let Some(parts) = parts else { return Ok(None) };
    let ids = numbered.map(|(id, at)| (at, id)).collect();
    let states = parts
        .into_iter()
        .map(|part| with_ids(Bytes::from_bytes_vec(part), &ids));
    let states: Result<_, _> = states.collect();
    states.map(Some).map_err(CheckpointError::Rank0)
}

/// Every rank's bytes on rank 0, piece by piece.
fn gather_bytes(group: &ProcessGroup, own: &[u8]) -> Result<Option<Vec<Vec<u8>>>, CheckpointError> {
    let mut lens = vec![0_i64; group.world()];
    group.all_gather(&[own.len() as i64], &mut lens)?;
    let longest = lens.iter().copied().max().unwrap_or(0) as usize;
    let piece_bytes = (GATHERED_BYTES / lens.len()).clamp(1, PIECE_BYTES);
    let piece_bytes = piece_bytes.min(longest.max(1));
    let is_root = group.rank() == 0;
    let mut parts = vec![Vec::new(); if is_root { lens.len() } else { 0 }];
    let mut received = vec![0_u8; piece_bytes * parts.len()];
    let mut sent = vec![0_u8; piece_bytes];
    for start in (0..longest).step_by(piece_bytes) {
        let piece = &own[start.min(own.len())..(start + piece_bytes).min(own.len())];
        sent[..piece.len()].copy_from_slice(piece);
        group.gather(&sent, is_root.then_some(&mut received[..]), 0)?;
        let pieces = received.chunks(piece_bytes);
        for ((part, len), piece) in parts.iter_mut().zip(&lens).zip(pieces) {
            let missing = (*len as usize).saturating_sub(part.len());
            part.extend_from_slice(&piece[..missing.min(piece_bytes)]);
        }
    }
    Ok(is_root.then_some(parts))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}
