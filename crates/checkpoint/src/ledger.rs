//! The ledger of a run: which samples each committed step used. Rank 0 appends to one file, `ledger.jsonl`, beside the
//! checkpoints.
//!
//! A line is a JSON object with its number `n`, the random name `ledger` of the file, the checksum `previous` of the line
//! before, the time `at_ms`, and its own checksum `sum`. There are two kinds:
//!
//! ```json
//! {"n":0, .., "kind":"begin","version":1,"cause":"start","step":0,"seed":0,"layout":{"len":1437, ..},
//!  "generation":0,"world":4,"owners":[[0,0],[1,2],[2,4],[3,6]],"sum":".."}
//! {"n":1, .., "kind":"step","step":1,"epoch":0,"from":0,"to":64,"indices":"..","generation":0,"sum":".."}
//! ```
//!
//! `begin` says how the samples of the following steps are dealt, and to whom: a replica of the model that begins at rank `r`
//! computes the shards from its own first one to the next replica's. It also says that the steps after `step` were rolled
//! back, because their weights were lost with the processes that had them. `step` has the number of the step, the samples of
//! the epoch that all shards had read before and after it, and a checksum of their indices.
//!
//! Records are appended and never changed. A crash can tear the last line only; the next process removes it and says so in
//! its `begin`. A checkpoint is published after the ledger up to its step is on disk, so a run never resumes after a step that
//! its ledger lacks. [`audit`] reads the file and proves what it can.

mod audit;
mod cover;
mod fault;
mod record;
#[cfg(test)]
mod tests;

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use paceline_collective::ProcessGroup;
use paceline_ddp::Ddp;
use paceline_ddp::sampler::{BatchLayout, StepPlan};

pub use audit::{Attempt, Audit, audit};
pub use cover::Epoch;
pub use fault::Fault;
pub use record::{Begin, Cause, Hash, Step};
use record::{Entry, Record, VERSION};

/// Its name, in the folder of the checkpoints.
const NAME: &str = "ledger.jsonl";
/// Longest line: the record of a job with as many replicas as there can be shards fits.
const LINE_BYTES_MAX: u64 = 2 << 20;

/// The place of the ledger in a folder of checkpoints.
pub fn path(folder: &Path) -> PathBuf {
    folder.join(NAME)
}

/// An open ledger, on the rank that writes it.
#[derive(Debug)]
pub(crate) struct Ledger {
    file: File,
    name: Hash,
    next: u64,
    previous: Hash,
    dropped_bytes: u64,
    began: SystemTime,
    /// The last step that a process of this job recorded before this one opened the file; 0 if no process did.
    step: u64,
    /// Whether a process of this job recorded before this one.
    is_taken_over: bool,
    /// What the last `begin` said; `None` until this process has written one.
    terms: Option<Terms>,
}

/// What all steps after a `begin` have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Terms {
    seed: u64,
    layout: BatchLayout,
    generation: u64,
    world: usize,
    owners: Vec<(usize, usize)>,
}

/// A step that is done, to be recorded.
#[derive(Debug)]
pub(crate) struct Committed {
    terms: Terms,
    step: Step,
}

impl Committed {
    /// The step of `plan`, which `ddp` has just done as part of the job `group`.
    pub(crate) fn new(group: &ProcessGroup, ddp: &Ddp, plan: &StepPlan) -> Self {
        let replicas = ddp.group();
        let generation = replicas.generation();
        let first_shard = |replica| ddp.tree().range(replica).start;
        let owners = (0..replicas.world()).map(|at| (replicas.global_rank(at), first_shard(at)));
        let range = plan.range();
        Self {
            terms: Terms {
                seed: plan.after.seed,
                layout: plan.after.layout,
                generation,
                world: group.world(),
                owners: owners.collect(),
            },
            step: Step {
                step: ddp.next_step(),
                epoch: plan.epoch,
                from: range.start,
                to: range.end,
                indices: Hash::of_indices(&plan.shards),
                generation,
                skipped: ddp.has_skipped(),
            },
        }
    }

    pub(crate) fn generation(&self) -> u64 {
        self.step.generation
    }
}

impl Ledger {
    /// Opens the ledger in `folder` for a process that `began` then, after its last whole record.
    pub(crate) fn open(folder: &Path, began: SystemTime) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let options = options.create(true).read(true).append(true);
        let mut file = options.open(path(folder))?;
        let len = file.seek(SeekFrom::End(0))?;
        let last = last_record(&mut file, len)?;
        // This process became rank 0 while it ran.
        let is_taken_over = matches!(&last, Some((_, entry, _)) if entry.at_ms >= millis(began));
        let step = match &last {
            Some((_, entry, _)) if is_taken_over => entry.record.step(),
            _ => 0,
        };
        let (end, next, name, previous) = match last {
            Some((end, entry, sum)) => (end, entry.n + 1, entry.ledger, sum),
            None => (0, 0, Hash::random(), Hash::default()),
        };
        if end < len {
            file.set_len(end)?;
        }
        Ok(Self {
            file,
            name,
            next,
            previous,
            dropped_bytes: len - end,
            began,
            step,
            is_taken_over,
            terms: None,
        })
    }

    /// Whether the process that wrote before this one has not recorded this step.
    pub(crate) fn lacks(&self, committed: &Committed) -> bool {
        committed.step.step > self.step
    }

    /// Appends a step.
    pub(crate) fn record(&mut self, committed: &Committed) -> io::Result<()> {
        let Committed { terms, .. } = committed;
        if self.terms.as_ref() != Some(terms) {
            // A rank that became rank 0 goes on with the ledger of another process.
            let is_first = self.terms.is_none() && !self.is_taken_over && terms.generation == 0;
            let begin = Begin {
                version: VERSION,
                cause: match (is_first, self.next) {
                    (false, _) => Cause::Change,
                    (true, 0) => Cause::Start,
                    (true, _) => Cause::Resume,
                },
                step: committed.step.step.saturating_sub(1),
                seed: terms.seed,
                layout: terms.layout,
                generation: terms.generation,
                world: terms.world,
                owners: terms.owners.clone(),
                dropped_bytes: std::mem::take(&mut self.dropped_bytes),
            };
            let at = if is_first {
                self.began
            } else {
                SystemTime::now()
            };
            self.append(at, Record::Begin(begin))?;
            self.terms = Some(terms.clone());
        }
        self.append(SystemTime::now(), Record::Step(committed.step))
    }

    fn append(&mut self, at: SystemTime, record: Record) -> io::Result<()> {
        let entry = Entry {
            n: self.next,
            ledger: self.name,
            previous: self.previous,
            at_ms: millis(at),
            record,
        };
        let (line, sum) = entry.encode();
        // One write, so that a process that is killed leaves a line whole or not at all.
        self.file.write_all(line.as_bytes())?;
        (self.next, self.previous) = (self.next + 1, sum);
        Ok(())
    }

    /// The file, to be synced by another thread.
    pub(crate) fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }
}

fn millis(at: SystemTime) -> u64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The last record of a file of `len` bytes, and where it ends; `None` if the file has no whole line.
///
/// *Errors*: the last whole line is no record of a ledger.
fn last_record(file: &mut File, len: u64) -> io::Result<Option<(u64, Entry, Hash)>> {
    let start = len.saturating_sub(2 * LINE_BYTES_MAX);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(len - start).read_to_end(&mut bytes)?;
    let mut lines = bytes.rsplit(|byte| *byte == b'\n');
    // Torn, or empty after the end of the last line.
    let torn = lines.next().map_or(0, |line| line.len() as u64);
    match (lines.next(), start) {
        (Some(line), _) => {
            let damaged = |why| io::Error::other(format!("its last record is damaged: {why}"));
            let (entry, sum) = Entry::decode(line).map_err(damaged)?;
            Ok(Some((len - torn, entry, sum)))
        }
        (None, 0) => Ok(None),
        (None, _) => Err(io::Error::other(format!(
            "its last {torn} bytes are no record"
        ))),
    }
}
