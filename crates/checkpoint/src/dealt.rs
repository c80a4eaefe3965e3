//! `Dealt`: state of which each rank has a part. It is copied on every rank, and rank 0 writes it while the ranks send it, one tensor
//! after another, over a group of their own.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use burn::optim::ModuleOptimizer;
use burn::tensor::{Bytes, DType, TensorData};
use burn_pack::Tensor;
use paceline_collective::ProcessGroup;
use paceline_ddp::weights::Hasher;
use serde::{Deserialize, Serialize};

use crate::decide::by_rank_0;
use crate::error::CheckpointError;
use crate::files;
use crate::record::{self, Entry, Rest, unreadable};
use crate::share::{Part, Share, Shares};
use crate::tensors::TensorsFile;

/// Bytes of state that a message has.
const PIECE_BYTES: usize = 4 << 20;
/// Their tag.
const TAG: u32 = u32::MAX;

/// A copy of what this rank has of the state.
pub(crate) struct Dealt {
    /// Path, shape and type of every tensor of the whole model.
    pub(crate) model: Vec<(String, Vec<usize>, DType)>,
    /// The ids of the model's parameters, in one order on all ranks.
    pub(crate) ids: Vec<u64>,
    pub(crate) weights: Own,
    pub(crate) optimizer: Optimizer,
    /// Whose state the optimizer's is: this one of so many replicas', or that of all.
    pub(crate) replica: Option<(usize, usize)>,
    /// What the communication hook keeps.
    pub(crate) hook: Own,
}

/// What a rank has of the optimizer's state, or why that cannot be read: the rank takes part all the same.
pub(crate) enum Optimizer {
    /// A part of the state, not read yet. In ordinary memory its tensors are shared: later steps make new ones.
    Shared(ModuleOptimizer, Shares),
    /// A part of the state; empty if another rank has the same.
    Part(Result<Own, String>),
}

/// What a rank has of a file's tensors.
#[derive(Default)]
pub(crate) struct Own {
    pub(crate) told: Told,
    pub(crate) tensors: HashMap<String, Tensor>,
}

/// What rank 0 learns of it. In the optimizer's state parameters are named by their places in the model, because ids differ between
/// processes.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Told {
    /// Of a part, the entry of the whole tensor.
    pub(crate) entries: Vec<(Entry, Option<Part>)>,
    rest: Vec<u8>,
}

/// A tensor of the whole state.
struct Joined {
    entry: Entry,
    /// The parts of the ranks that have one, or one rank that has it whole.
    parts: Vec<(usize, Option<Part>)>,
}

impl Own {
    /// Adds a tensor, or what the rank has of it; `whole` is the shape of all of it.
    pub(crate) fn add(&mut self, name: String, whole: Vec<usize>, share: Share, value: TensorData) {
        let (dtype, shape) = (value.dtype(), value.shape().to_vec());
        let tensor = Tensor::new(name.clone(), dtype, shape, None, value.into_bytes());
        let entry = Entry {
            shape: whole,
            ..Entry::of(&tensor)
        };
        let part = match share {
            Share::Part(part) => Some(part),
            Share::Whole | Share::Nothing => None,
        };
        self.told.entries.push((entry, part));
        self.tensors.insert(name, tensor);
    }

    /// The state of `optimizer`, of whose parameters the rank has `shares`. `ids` are those of the model's parameters.
    ///
    /// *Errors*: why it cannot be read.
    pub(crate) fn of_optimizer(
        optimizer: &ModuleOptimizer,
        shares: &Shares,
        ids: &[u64],
    ) -> Result<Self, String> {
        let places = ids.iter().copied().zip(0_u64..).collect();
        let (tensors, mut rest) = record::decode(optimizer.into_bytes().map_err(unreadable)?)?;
        rest.rename(&places)?;
        let mut entries = Vec::with_capacity(tensors.len());
        let mut own = HashMap::with_capacity(tensors.len());
        for tensor in tensors {
            let mut entry = Entry::of(&tensor);
            let part = match shares.of(entry.parameter()) {
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
        Ok(Self {
            told: Told { entries, rest },
            tensors: own,
        })
    }
}

impl Dealt {
    /// Writes the tensors into rank 0's `folder`, and returns the hash of the weights. All ranks call it; without a folder nothing is
    /// written.
    ///
    /// *Memory*: on rank 0 one tensor and its parts. Each rank frees its tensors as it sends them. *Blocks*:
    /// until rank 0 has every rank's state.
    pub(crate) fn write(
        self,
        group: &ProcessGroup,
        folder: Option<&Path>,
        metadata: BTreeMap<String, String>,
    ) -> Result<String, CheckpointError> {
        let path = |name: &str| folder.map(|folder| folder.join(name));
        let mut hasher = Hasher::default();
        let hash = |name: &str, data: &TensorData| hasher.add(name, data);
        let (model, ids) = (Some(&self.model[..]), &self.ids);
        // Before anything waits: what later steps replace is freed.
        let own = match self.optimizer {
            Optimizer::Shared(optimizer, shares) => Own::of_optimizer(&optimizer, &shares, ids),
            Optimizer::Part(own) => own,
        };
        let weights = path(files::WEIGHTS);
        let weights = (weights.as_deref(), metadata);
        let weights = write_tensors(group, self.weights, model, weights, hash);
        let (replica, replicas) = self.replica.unwrap_or((0, 1));
        let (mut own, mut optimizer) = (Some(own), Ok(()));
        for writes in 0..replicas {
            let is_own = self.replica.is_none() || writes == replica;
            let own = own
                .take_if(|_| is_own)
                .unwrap_or_else(|| Ok(Own::default()));
            // The others do not know of a failed write, and send all the same.
            let record = path(&files::optimizer_of(writes)).filter(|_| optimizer.is_ok());
            optimizer = optimizer.and(write_record(group, own, ids, record.as_deref()));
        }
        let hook = path(files::HOOK).filter(|_| optimizer.is_ok());
        let hook = (hook.as_deref(), BTreeMap::new());
        let hook = write_tensors(group, self.hook, None, hook, |_, _| {});
        weights.and(optimizer).and(hook)?;
        Ok(hasher.finish())
    }
}

/// Writes a file of tensors, if there are any: those of `expected`, or all that the ranks have. Gives each to `each`, in the order of
/// the names.
fn write_tensors(
    group: &ProcessGroup,
    own: Own,
    expected: Option<&[(String, Vec<usize>, DType)]>,
    (path, metadata): (Option<&Path>, BTreeMap<String, String>),
    mut each: impl FnMut(&str, &TensorData),
) -> Result<(), CheckpointError> {
    let (joined, _, mut gathering) = meet(group, Ok(own))?;
    let write = |path: &Path| {
        let found = joined.iter().map(|Joined { entry, .. }| {
            let Entry {
                name, shape, dtype, ..
            } = entry;
            (name.clone(), shape.clone(), *dtype)
        });
        let found: Vec<_> = found.collect();
        let expected = expected.unwrap_or(&found);
        if let Some((missing, ..)) = expected.iter().find(|tensor| !found.contains(tensor)) {
            return Err(io::Error::other(format!("no rank has {missing}")));
        }
        if found.is_empty() {
            return Ok(());
        }
        let file = File::create(path)?;
        let mut file = TensorsFile::new(&file, expected, metadata)?;
        for Joined { entry, parts } in &joined {
            let sent = gathering.next().map_err(|()| failed())?;
            let whole = put_together(entry, parts, sent).map_err(io::Error::other)?;
            let data = TensorData::from_bytes(whole, entry.shape.clone(), entry.dtype);
            each(&entry.name, &data);
            file.put(&entry.name, &data)?;
        }
        Ok(())
    };
    let written = path.map_or(Ok(()), write);
    gathering.end(path, written)
}

/// Writes an optimizer's state as one record of whole parameters, with rank 0's ids.
fn write_record(
    group: &ProcessGroup,
    own: Result<Own, String>,
    ids: &[u64],
    path: Option<&Path>,
) -> Result<(), CheckpointError> {
    let (joined, mut rest, gathering) = meet(group, own)?;
    let gathering = Arc::new(Mutex::new(gathering));
    let write = |path: &Path| {
        let ids: HashMap<u64, u64> = (0_u64..).zip(ids.iter().copied()).collect();
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
    };
    let written = path.map_or(Ok(()), write);
    lock(&gathering).end(path, written)
}

fn unwritten(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    move |source| CheckpointError::File {
        action: "write checkpoint",
        path: path.to_path_buf(),
        source,
    }
}

fn failed() -> io::Error {
    io::Error::other("the ranks failed")
}

/// Tells rank 0 what each rank has; returns there the whole tensors, in the order of their names.
fn meet(
    group: &ProcessGroup,
    own: Result<Own, String>,
) -> Result<(Vec<Joined>, Rest, Gathering), CheckpointError> {
    let (told, own) = match own {
        Ok(own) => (Ok(own.told), own.tensors),
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
    Ok((joined, rest, gathering))
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

    /// Sends the rest, even after a failed write: the other ranks do so too.
    fn end(&mut self, path: Option<&Path>, written: io::Result<()>) -> Result<(), CheckpointError> {
        while !self.order.is_empty() && self.failed.is_none() {
            let _ = self.next();
        }
        self.failed.take().map_or(Ok(()), Err)?;
        written.map_err(unwritten(path.unwrap_or(Path::new(""))))
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

/// Every rank's bytes on rank 0, piece by piece.
fn gather_bytes(group: &ProcessGroup, own: &[u8]) -> Result<Option<Vec<Vec<u8>>>, CheckpointError> {
    let mut lens = vec![0_i64; group.world()];
    group.all_gather(&[own.len() as i64], &mut lens)?;
    if group.rank() > 0 {
        let mut pieces = own.chunks(PIECE_BYTES);
        pieces.try_for_each(|piece| group.send(piece, 0, TAG))?;
        return Ok(None);
    }
    let others = (1..).zip(&lens[1..]).map(|(rank, len)| {
        let mut sent = vec![0; *len as usize];
        let mut pieces = sent.chunks_mut(PIECE_BYTES);
        pieces.try_for_each(|piece| group.recv(piece, rank, TAG))?;
        Ok(sent)
    });
    [Ok(own.to_vec())]
        .into_iter()
        .chain(others)
        .collect::<Result<_, _>>()
        .map(Some)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}
