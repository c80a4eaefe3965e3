//! State that ranks leave in their host's memory when another rank is lost, and the checkpoint that the next start makes of it.
//!
//! A rank writes all that it has of the state before the step that failed into one file, `left-STEP-PART-PARTS`. Replicas have the same
//! part, so the first of them to come writes it. A file gets its name once it is whole, and ends with a SHA-256 of the rest.
//! Ranks may be one step apart, so only a [step of which every part is there](newest_whole) counts. Its files become one
//! checkpoint as a save makes it, and everything after that is as with any other.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::thread;

use burn::module::Module;
use burn::tensor::{Bytes, DType};
use burn_pack::Tensor;
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_ddp::Ddp;
use paceline_rendezvous::notice;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::checkpoint::Checkpoint;
use crate::dealt::{Dealt, Optimizer, Own, Told};
use crate::error::{CheckpointError, failed_in};
use crate::files::{self, State};
use crate::folder::Writing;
use crate::ledger::Committed;
use crate::memory;

/// Bytes of the length that begins a file, and of the checksum that ends it.
const LEN_BYTES: u64 = 8;
const SUM_BYTES: u64 = 32;
/// Ends the name of a file that is being written.
const UNFINISHED: &str = ".writing";
/// A file whose presence says that nothing counts, because replicas have different weights.
const REFUSED: &str = "left-refused";

/// What the name of a file says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Piece {
    /// Steps done.
    step: u64,
    /// Parts of the state; each has the number of its first replica's rank.
    parts: usize,
    part: usize,
}

impl Piece {
    /// What this rank has before the next step.
    fn of(ddp: &Ddp) -> Self {
        let replicas = ddp.group();
        Self {
            step: ddp.next_step(),
            parts: ddp.model_group().world() / replicas.world(),
            part: replicas.global_rank(0),
        }
    }

    fn name(self) -> String {
        let Self { step, parts, part } = self;
        format!("left-{step}-{part}-{parts}")
    }

    fn named(name: &str) -> Option<Self> {
        let mut numbers = name.strip_prefix("left-")?.split('-');
        let piece = Self {
            step: numbers.next()?.parse().ok()?,
            part: numbers.next()?.parse().ok()?,
            parts: numbers.next()?.parse().ok()?,
        };
        numbers.next().is_none().then_some(piece)
    }
}

/// The pieces of the newest step of which every part is there.
fn newest_whole(pieces: &[Piece]) -> Option<Vec<Piece>> {
    let mut steps: BTreeMap<(u64, usize), Vec<Piece>> = BTreeMap::new();
    for piece in pieces {
        let of_step = steps.entry((piece.step, piece.parts)).or_default();
        of_step.push(*piece);
    }
    let is_whole = |((_, parts), pieces): &((u64, usize), Vec<Piece>)| {
        let found: HashSet<usize> = pieces.iter().map(|piece| piece.part).collect();
        found.len() == *parts
    };
    let mut newest_first = steps.into_iter().rev();
    newest_first.find(is_whole).map(|(_, pieces)| pieces)
}

/// What a file begins with; the tensors' bytes follow, those of the weights first.
#[derive(Serialize, Deserialize)]
struct Header {
    state: State,
    schedule: Option<Vec<u8>>,
    model: Vec<(String, Vec<usize>, DType)>,
    ids: Vec<u64>,
    weights: Told,
    optimizer: Told,
    /// Bytes of each tensor.
    lens: Vec<u64>,
    /// Records of the last step, which a lost rank 0 may not have written.
    unwritten: Vec<Committed>,
}

/// Writes all that this rank has of `checkpoint`, unless a replica does.
pub(crate) fn write<M: Module>(
    folder: &Path,
    ddp: &Ddp,
    checkpoint: &Checkpoint<'_, M>,
    unwritten: &[Committed],
) -> Result<(), CheckpointError> {
    if !checkpoint.is_on_every_replica(ddp) {
        return Ok(());
    }
    let place = folder.join(Piece::of(ddp).name());
    let beside = PathBuf::from(format!("{}{UNFINISHED}", place.display()));
    let failed = || failed_in(folder);
    memory::make(folder).map_err(failed())?;
    let file = match File::create_new(&beside) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        created => created.map_err(failed())?,
    };
    // A replica was faster.
    if place.exists() {
        return fs::remove_file(&beside).map_err(failed());
    }
    let written = checkpoint.copy_all(ddp).and_then(|dealt| {
        let put = || {
            let (header, tensors) = encode(ddp, checkpoint, dealt, unwritten)?;
            let bytes = header.lens.iter().sum();
            memory::has_room(folder, bytes)?;
            put(file, &header, tensors)?;
            fs::rename(&beside, &place)
        };
        put().map_err(failed())
    });
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

/// Has the next start use nothing of what the ranks leave.
pub(crate) fn refuse(folder: &Path) -> Result<(), CheckpointError> {
    let refuse = || {
        memory::make(folder)?;
        File::create(folder.join(REFUSED)).map(drop)
    };
    refuse().map_err(failed_in(folder))
}

fn encode<M: Module>(
    ddp: &Ddp,
    checkpoint: &Checkpoint<'_, M>,
    dealt: Dealt,
    unwritten: &[Committed],
) -> io::Result<(Header, Vec<Bytes>)> {
    let schedule = checkpoint.schedule_state().map_err(io::Error::other)?;
    let state = checkpoint.state(ddp).map_err(io::Error::other)?;
    let Dealt {
        model,
        ids,
        weights,
        optimizer,
        ..
    } = dealt;
    let optimizer = match optimizer {
        Optimizer::Shared(optimizer, shares) => Own::of_optimizer(&optimizer, &shares, &ids),
        Optimizer::Part(own) => own,
    };
    let mut tensors = Vec::new();
    let mut take = |own: Own| {
        let Own {
            told,
            tensors: mut own,
        } = own;
        for (entry, _) in &told.entries {
            let tensor = own.remove(&entry.name).expect("every entry has its tensor");
            let bytes = tensor.into_bytes();
            tensors.push(bytes.map_err(|error| io::Error::other(error.to_string()))?);
        }
        Ok::<_, io::Error>(told)
    };
    let weights = take(weights)?;
    let optimizer = take(optimizer.map_err(io::Error::other)?)?;
    let header = Header {
        state,
        schedule: schedule.map(|schedule| schedule.to_vec()),
        model,
        ids,
        weights,
        optimizer,
        lens: tensors.iter().map(|bytes| bytes.len() as u64).collect(),
        unwritten: unwritten.to_vec(),
    };
    Ok((header, tensors))
}

/// A file and the checksum of what has passed.
struct Summed<F> {
    file: F,
    sum: Sha256,
}

impl<F> Summed<F> {
    fn new(file: F) -> Self {
        let sum = Sha256::new();
        Self { file, sum }
    }
}

impl<F: Write> Write for Summed<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.sum.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl<F: Read> Read for Summed<F> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(bytes)?;
        self.sum.update(&bytes[..read]);
        Ok(read)
    }
}

fn put(file: File, header: &Header, tensors: Vec<Bytes>) -> io::Result<()> {
    let header = serde_json::to_vec(header)?;
    let mut to = Summed::new(BufWriter::new(file));
    to.write_all(&(header.len() as u64).to_le_bytes())?;
    to.write_all(&header)?;
    for bytes in tensors {
        to.write_all(&bytes)?;
    }
    let sum = to.sum.finalize_reset();
    to.file.write_all(&sum)?;
    to.file.flush()
}

/// Reads a file.
///
/// *Errors*: it is not whole.
fn take(path: &Path) -> io::Result<(Header, Dealt)> {
    let damaged = |what: &str| io::Error::other(format!("{}: {what}", path.display()));
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut from = Summed::new(BufReader::new(file));
    let mut len = [0; LEN_BYTES as usize];
    from.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    let rest = size.checked_sub(LEN_BYTES + SUM_BYTES);
    let rest = rest.and_then(|rest| rest.checked_sub(len));
    let rest = rest.ok_or_else(|| damaged("its header is longer than the file"))?;
    let mut header = vec![0; len as usize];
    from.read_exact(&mut header)?;
    let mut header: Header = serde_json::from_slice(&header)?;
    let total = (header.lens.iter()).try_fold(0_u64, |sum, len| sum.checked_add(*len));
    let entries = header.weights.entries.len() + header.optimizer.entries.len();
    if total != Some(rest) || header.lens.len() != entries {
        return Err(damaged("its tensors do not fill it"));
    }
    let mut lens = header.lens.iter();
    let mut own = |told: Told| {
        let mut tensors = HashMap::with_capacity(told.entries.len());
        for ((entry, part), len) in told.entries.iter().zip(&mut lens) {
            let mut bytes = vec![0; *len as usize];
            from.read_exact(&mut bytes)?;
            let shape = part.as_ref().map_or(&entry.shape, |part| &part.own);
            let bytes = Bytes::from_bytes_vec(bytes);
            let name = entry.name.clone();
            let tensor = Tensor::new(name.clone(), entry.dtype, shape.clone(), None, bytes);
            tensors.insert(name, tensor);
        }
        Ok::<_, io::Error>(Own { told, tensors })
    };
    let weights = own(std::mem::take(&mut header.weights))?;
    let optimizer = own(std::mem::take(&mut header.optimizer))?;
    let sum = from.sum.finalize_reset();
    let mut expected = [0; SUM_BYTES as usize];
    from.file.read_exact(&mut expected)?;
    if sum[..] != expected {
        return Err(damaged("its checksum is wrong"));
    }
    let dealt = Dealt {
        model: std::mem::take(&mut header.model),
        ids: std::mem::take(&mut header.ids),
        weights,
        optimizer: Optimizer::Part(Ok(optimizer)),
        replica: None,
        hook: Own::default(),
    };
    Ok((header, dealt))
}

/// Makes a checkpoint of the newest step of which the ranks have left every part, and returns its place; `None` if there is no such step,
/// or if a checkpoint of it or of a later one was `saved`. `record` gets the records of that step before. What they have left is
/// removed in any case. On rank 0 alone.
pub(crate) fn join(
    folder: &Path,
    saved: Option<u64>,
    metadata: BTreeMap<String, String>,
    record: impl FnOnce(&[Committed]) -> Result<(), CheckpointError>,
) -> Result<Option<PathBuf>, CheckpointError> {
    let names = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let names: Vec<_> = names.filter(|name| name.starts_with("left-")).collect();
    let mut pieces: Vec<Piece> = (names.iter())
        .filter_map(|name| Piece::named(name))
        .collect();
    pieces.sort_unstable();
    if names.iter().any(|name| name == REFUSED) {
        pieces.clear();
    }
    let newest = newest_whole(&pieces);
    if let (None, Some(Piece { step, parts, .. })) = (&newest, pieces.last()) {
        let found = pieces.iter().filter(|piece| piece.step == *step).count();
        notice!(
            WARN,
            "the ranks that were left had {found} of {parts} parts of the state after step {step}, too few to go on from"
        );
    }
    let is_news = |pieces: &Vec<Piece>| saved.is_none_or(|saved| saved < pieces[0].step);
    let newest = newest.filter(is_news);
    let joined = newest.map(|pieces| join_all(folder, &pieces, metadata, record));
    for name in names {
        let _ = fs::remove_file(folder.join(name));
    }
    joined.transpose()
}

fn join_all(
    folder: &Path,
    pieces: &[Piece],
    metadata: BTreeMap<String, String>,
    record: impl FnOnce(&[Committed]) -> Result<(), CheckpointError>,
) -> Result<PathBuf, CheckpointError> {
    let failed = || failed_in(folder);
    let paths = pieces.iter().map(|piece| folder.join(piece.name()));
    let paths: Vec<_> = paths.collect();
    let sizes = paths.iter().map(|path| Ok(fs::metadata(path)?.len()));
    let bytes: io::Result<u64> = sizes.sum();
    let prepared = bytes.and_then(|bytes| memory::prepare(folder, bytes));
    prepared.map_err(failed())?;
    let read: io::Result<Vec<_>> = paths.iter().map(|path| take(path)).collect();
    let (mut headers, parts): (Vec<_>, Vec<_>) = read.map_err(failed())?.into_iter().unzip();
    let missed = headers.iter().map(|header| &header.unwritten[..]);
    let missed = missed.max_by_key(|records| records.len());
    record(missed.unwrap_or_default())?;
    let header = headers.swap_remove(0);
    let writing = Writing::begin(folder, pieces[0].step)?;
    // As the ranks that left them would save.
    let ranks = ProcessGroup::local(parts.len(), &GroupOptions::default())?;
    let hash = thread::scope(|scope| {
        let ranks = ranks.into_iter().zip(parts).map(|(group, part)| {
            let (metadata, folder) = (metadata.clone(), writing.path());
            scope.spawn(move || {
                let folder = (group.rank() == 0).then_some(folder);
                part.write(&group, folder, metadata)
            })
        });
        let ranks: Vec<_> = ranks.collect();
        let written = ranks.into_iter().map(|rank| {
            rank.join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        written.collect::<Vec<_>>().swap_remove(0)
    })?;
    if let Some(schedule) = header.schedule {
        let written = fs::write(writing.path().join(files::SCHEDULE), schedule);
        written.map_err(writing.failed())?;
    }
    let state = State {
        weights_sha256: hash,
        ..header.state
    };
    writing.finish(1, state)
}

#[cfg(test)]
mod tests;
