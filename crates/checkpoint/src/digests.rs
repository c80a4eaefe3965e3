//! Digests of the gradients of a run's last steps, by which a replay on one rank finds the shard and the tensor that differ.
//!
//! Each rank appends to a file of its own, `digests/rank-N.jsonl`, on its own host: a line for each step and shard, in the format
//! of the [ledger](crate::ledger). A rank keeps the number that its process was started with when others are lost.
//!
//! ```json
//! {"n":1, .., "kind":"shard","step":7,"shard":2,"rank":1,"generation":0,"digests":"<16 digits for each parameter>","sum":".."}
//! ```
//!
//! To keep the last `N` steps, the file becomes `rank-N.old.jsonl` after every `N` steps, and a new one begins. A step that is done
//! again, after a crash or a lost rank, is recorded again; the last record of a shard counts.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, BufReader};
use std::num::NonZeroU64;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use paceline_ddp::{Ddp, ShardDigests};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::CheckpointError;
use crate::ledger::chain::Chain;
use crate::ledger::lines::{Entry, Line, Lines};

/// The folder of the files, in that of the checkpoints.
const FOLDER: &str = "digests";
/// Digits of a digest.
const DIGITS: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Record {
    Begin {
        version: u32,
    },
    Shard {
        step: u64,
        shard: usize,
        rank: usize,
        generation: u64,
        digests: Digests,
    },
}

impl Line for Record {
    const VERSION: u32 = 1;

    fn version(&self) -> Option<u32> {
        match self {
            Self::Begin { version } => Some(*version),
            Self::Shard { .. } => None,
        }
    }
}

/// One of each parameter, as text without separators.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Digests(Vec<u64>);

impl Serialize for Digests {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut text = String::with_capacity(DIGITS * self.0.len());
        for digest in &self.0 {
            let _ = write!(text, "{digest:016x}");
        }
        to.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for Digests {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let (digests, rest) = text.as_bytes().as_chunks::<DIGITS>();
        let digest = |digits: &[u8; DIGITS]| {
            let digits = std::str::from_utf8(digits).ok()?;
            let is_plain = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
            u64::from_str_radix(digits, 16).ok().filter(|_| is_plain)
        };
        let digests: Option<Vec<u64>> = digests.iter().map(digest).collect();
        let digests = digests.filter(|_| rest.is_empty());
        let odd = || serde::de::Error::custom("its digests are not of 16 digits each");
        digests.map(Self).ok_or_else(odd)
    }
}

/// The open file of one rank.
#[derive(Debug)]
pub(crate) struct Recorder {
    path: PathBuf,
    keep: NonZeroU64,
    lines: Lines<Record>,
    /// The steps of the file, in multiples of `keep`.
    turn: Option<u64>,
}

impl Recorder {
    /// Opens the file of the process that was started as `rank`, in the folder of a run's checkpoints.
    pub(crate) fn open(
        folder: &Path,
        rank: usize,
        keep: NonZeroU64,
    ) -> Result<Self, CheckpointError> {
        let folder = folder.join(FOLDER);
        let path = folder.join(format!("rank-{rank}.jsonl"));
        let opened = fs::create_dir_all(folder).and_then(|()| begin(&path));
        let (lines, last) = opened.map_err(failed("continue", &path))?;
        let last = last.and_then(|entry| match entry.record {
            Record::Shard { step, .. } => Some(step),
            Record::Begin { .. } => None,
        });
        Ok(Self {
            turn: last.map(|step| turn(step, keep)),
            path,
            keep,
            lines,
        })
    }

    /// Appends the shards of a step.
    pub(crate) fn append(
        &mut self,
        step: u64,
        generation: u64,
        shards: Vec<ShardDigests>,
    ) -> Result<(), CheckpointError> {
        let written = self.write(step, generation, shards);
        written.map_err(failed("write", &self.path))
    }

    fn write(&mut self, step: u64, generation: u64, shards: Vec<ShardDigests>) -> io::Result<()> {
        let now = turn(step, self.keep);
        if self.turn.is_some_and(|turn| turn < now) {
            fs::rename(&self.path, self.path.with_extension("old.jsonl"))?;
            (self.lines, _) = begin(&self.path)?;
        }
        self.turn = Some(now);
        let shards = shards.into_iter().map(|shard| Record::Shard {
            step,
            shard: shard.shard,
            rank: shard.rank,
            generation,
            digests: Digests(shard.tensors),
        });
        self.lines.append_all(SystemTime::now(), shards)
    }
}

fn turn(step: u64, keep: NonZeroU64) -> u64 {
    step.saturating_sub(1) / keep
}

/// An open file with its last record. A new one gets its first record.
fn begin(path: &Path) -> io::Result<(Lines<Record>, Option<Entry<Record>>)> {
    let (mut lines, last) = Lines::open(path)?;
    if lines.count() == 0 {
        let version = Record::VERSION;
        lines.append(SystemTime::now(), Record::Begin { version })?;
    }
    Ok((lines, last))
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    move |source| CheckpointError::Digests {
        action,
        path: path.to_path_buf(),
        source,
    }
}

/// What was recorded of some steps of a run, by all ranks whose files are in its folder.
#[derive(Clone, Debug, Default)]
pub struct Recorded {
    folder: PathBuf,
    shards: BTreeMap<(u64, usize), Recording>,
    steps: Option<(u64, u64)>,
}

/// The last record of a shard in a step.
#[derive(Clone, Debug)]
struct Recording {
    at_ms: u64,
    rank: usize,
    generation: u64,
    digests: Vec<u64>,
}

/// A comparison of a step with what was recorded of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compared {
    /// Shards whose digests were compared.
    pub shards: usize,
    /// Shards that have no record: their rank was lost before it wrote, or its file is elsewhere.
    pub unrecorded: usize,
    /// The first shard that differs.
    pub difference: Option<Difference>,
}

/// A shard whose gradients are not those that were recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The step, counted as the ledger does: steps done, this one included.
    pub step: u64,
    /// The shard.
    pub shard: usize,
    /// The rank that computed it in the run, by the number that its process was started with.
    pub rank: usize,
    /// The generation of the ranks that it was one of then.
    pub generation: u64,
    /// Paths of the parameters whose gradients differ, in the model's order.
    pub tensors: Vec<String>,
}

impl Recorded {
    /// Reads the records of `steps` in the folder of a run's checkpoints, even while the run goes on.
    ///
    /// *Memory*: 8 bytes for each of these steps, shard and parameter.
    ///
    /// *Errors*: a file that cannot be read or is damaged.
    pub fn read(folder: &Path, steps: RangeInclusive<u64>) -> Result<Self, CheckpointError> {
        let folder = folder.join(FOLDER);
        let mut recorded = Self::default();
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        let paths = entries.map(|entry| entry.path());
        let is_record = |path: &PathBuf| path.extension().is_some_and(|end| end == "jsonl");
        let mut paths: Vec<PathBuf> = paths.filter(is_record).collect();
        // A rank's newer file comes first: it may become the older one meanwhile.
        paths.sort();
        for path in &paths {
            let added = recorded.add(path, &steps);
            added.map_err(failed("read", path))?;
        }
        recorded.folder = folder;
        Ok(recorded)
    }

    fn add(&mut self, path: &Path, steps: &RangeInclusive<u64>) -> io::Result<()> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            file => file?,
        };
        let mut chain = Chain::default();
        chain.read(&mut BufReader::new(file), |entry: Entry<Record>| {
            self.take(entry, steps);
            0
        })?;
        match chain.end().first() {
            None => Ok(()),
            Some(fault) => Err(io::Error::other(fault.to_string())),
        }
    }

    fn take(&mut self, entry: Entry<Record>, steps: &RangeInclusive<u64>) {
        let at_ms = entry.at_ms;
        let Record::Shard {
            step,
            shard,
            rank,
            generation,
            digests: Digests(digests),
        } = entry.record
        else {
            return;
        };
        let (first, last) = self.steps.unwrap_or((step, step));
        self.steps = Some((first.min(step), last.max(step)));
        let before = self.shards.get(&(step, shard));
        if steps.contains(&step) && before.is_none_or(|before| before.at_ms <= at_ms) {
            let recording = Recording {
                at_ms,
                rank,
                generation,
                digests,
            };
            self.shards.insert((step, shard), recording);
        }
    }

    /// The first and the last recorded step, whether they were asked for or not.
    pub fn steps(&self) -> Option<(u64, u64)> {
        self.steps
    }

    /// The ranks that computed the recorded shards of a step, sorted.
    pub fn ranks(&self, step: u64) -> Vec<usize> {
        let shards = self.shards.range((step, 0)..=(step, usize::MAX));
        let mut ranks: Vec<usize> = shards.map(|(_, recording)| recording.rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Compares the last step of `ddp`, which has [`DdpOptions::record`](paceline_ddp::DdpOptions::record), with what was
    /// recorded of it: of all its shards, or of those that `rank` computed. A step without any record compares nothing.
    ///
    /// *Errors*: `Digests` if the model has another number of parameters.
    pub fn compare(&self, ddp: &Ddp, rank: Option<usize>) -> Result<Compared, CheckpointError> {
        let step = ddp.next_step();
        let mut compared = Compared::default();
        let is_recorded = !self.ranks(step).is_empty();
        for own in ddp.digests().into_iter().filter(|_| is_recorded) {
            let Some(recorded) = self.shards.get(&(step, own.shard)) else {
                compared.unrecorded += usize::from(rank.is_none());
                continue;
            };
            if rank.is_some_and(|rank| recorded.rank != rank) {
                continue;
            }
            let (then, now) = (recorded.digests.len(), own.tensors.len());
            if then != now {
                let what =
                    format!("they are of a model with {then} parameters, but this one has {now}");
                return Err(failed("use", &self.folder)(io::Error::other(what)));
            }
            compared.shards += 1;
            let digests = own.tensors.iter().zip(&recorded.digests);
            let differing = ddp.parameter_paths().zip(digests);
            let differing = differing.filter(|(_, (now, then))| now != then);
            let tensors: Vec<String> = differing.map(|(path, _)| path.to_owned()).collect();
            if !tensors.is_empty() && compared.difference.is_none() {
                compared.difference = Some(Difference {
                    step,
                    shard: own.shard,
                    rank: recorded.rank,
                    generation: recorded.generation,
                    tensors,
                });
            }
        }
        Ok(compared)
    }
}

#[cfg(test)]
mod tests;
