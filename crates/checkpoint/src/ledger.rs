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
//! computes the shards from its own first one to the next replica's. Ranks have the numbers that their processes were started with, also
//! after others were lost, and `why` tells that in the launcher's words. It also says that the steps after `step` were rolled
//! back, because their weights were lost with the processes that had them. `step` has the number of the step, the samples of
//! the epoch that all shards had read before and after it, and a checksum of their indices. With `"skipped":true` it changed
//! nothing, and with `"back_to":N` the steps after step N changed nothing either, because the ranks went back to their state then.
//!
//! Records are appended and never changed. A crash can tear the last line only; the next process removes it and says so in
//! its `begin`. A checkpoint is published after the ledger up to its step is on disk, so a run never resumes after a step that
//! its ledger lacks. [`audit`] reads the file and proves what it can.

mod audit;
pub(crate) mod chain;
mod cover;
mod fault;
pub(crate) mod lines;
mod record;
#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use paceline_collective::ProcessGroup;
use paceline_ddp::Ddp;
use paceline_ddp::sampler::{BatchLayout, StepPlan};
use serde::{Deserialize, Serialize};

pub use audit::{Attempt, Audit, GivenUp, audit};
pub use cover::Epoch;
pub use fault::Fault;
pub use lines::Hash;
use lines::{Lines, millis};
pub use record::{Begin, Cause, Step};
use record::{Record, VERSION};

/// Its name, in the folder of the checkpoints.
const NAME: &str = "ledger.jsonl";

/// The place of the ledger in a folder of checkpoints.
pub fn path(folder: &Path) -> PathBuf {
    folder.join(NAME)
}

/// An open ledger, on the rank that writes it.
#[derive(Debug)]
pub(crate) struct Ledger {
    lines: Lines<Record>,
    began: SystemTime,
    /// The last step that a process of this job recorded before this one opened the file; 0 if no process did.
    step: u64,
    /// The last step that any process recorded.
    recorded: u64,
    /// Whether a process of this job recorded before this one.
    is_taken_over: bool,
    /// What the last `begin` said; `None` until this process has written one.
    terms: Option<Terms>,
}

/// What all steps after a `begin` have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Terms {
    seed: u64,
    layout: BatchLayout,
    generation: u64,
    world: usize,
    owners: Vec<(usize, usize)>,
    #[serde(default)]
    why: Option<String>,
}

/// A step that is done, to be recorded.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Committed {
    terms: Terms,
    step: Step,
    /// Whether it is the first one after the ranks have gone back.
    goes_back: bool,
}

impl Committed {
    /// The step of `plan`, which `ddp` has just done as part of the job `group`; `why` is the reason for its generation.
    pub(crate) fn new(
        group: &ProcessGroup,
        ddp: &Ddp,
        plan: &StepPlan,
        why: Option<String>,
    ) -> Self {
        let replicas = ddp.group();
        let generation = replicas.generation();
        let first_shard = |replica| ddp.tree().range(replica).start;
        let owners = (0..replicas.world()).map(|at| (replicas.started_rank(at), first_shard(at)));
        let range = plan.range();
        Self {
            terms: Terms {
                seed: plan.after.seed,
                layout: plan.after.layout,
                generation,
                world: group.world(),
                owners: owners.collect(),
                why,
            },
            step: Step {
                step: ddp.next_step(),
                epoch: plan.epoch,
                from: range.start,
                to: range.end,
                indices: Hash::of_indices(&plan.shards),
                generation,
                skipped: ddp.has_skipped(),
                back_to: None,
            },
            goes_back: false,
        }
    }

    /// Whether the ranks have gone back before it.
    pub(crate) fn after(mut self, goes_back: bool) -> Self {
        self.goes_back = goes_back;
        self
    }

    /// The ranks go back to the state after step `back_to`, and give up the steps since then with this one.
    pub(crate) fn giving_up(mut self, back_to: Option<u64>) -> Self {
        self.step.back_to = back_to;
        self
    }

    pub(crate) fn generation(&self) -> u64 {
        self.step.generation
    }
}

impl Ledger {
    /// Opens the ledger in `folder` for a process that `began` then, after its last whole record.
    pub(crate) fn open(folder: &Path, began: SystemTime) -> io::Result<Self> {
        let (lines, last) = Lines::<Record>::open(&path(folder))?;
        let recorded = last.as_ref().map_or(0, |entry| entry.record.step());
        // This process became rank 0 while it ran.
        let taken_over = last.filter(|entry| entry.at_ms >= millis(began));
        Ok(Self {
            lines,
            began,
            recorded,
            is_taken_over: taken_over.is_some(),
            step: taken_over.map_or(0, |entry| entry.record.step()),
            terms: None,
        })
    }

    /// Whether the process that wrote before this one has not recorded this step.
    pub(crate) fn lacks(&self, committed: &Committed) -> bool {
        committed.goes_back || committed.step.step > self.step
    }

    /// Whether no process has recorded this step, which was done before this one began.
    pub(crate) fn has_missed(&self, committed: &Committed) -> bool {
        committed.step.step > self.recorded
    }

    /// Appends a step.
    pub(crate) fn record(&mut self, committed: &Committed) -> io::Result<()> {
        let Committed { terms, .. } = committed;
        if committed.goes_back || self.terms.as_ref() != Some(terms) {
            // A rank that became rank 0 goes on with the ledger of another process.
            let is_first = self.terms.is_none() && !self.is_taken_over && terms.generation == 0;
            let begin = Begin {
                version: VERSION,
                cause: match (is_first, self.lines.count()) {
                    _ if committed.goes_back => Cause::Back,
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
                why: terms.why.clone(),
                dropped_bytes: self.lines.take_dropped_bytes(),
            };
            let at = if is_first {
                self.began
            } else {
                SystemTime::now()
            };
            self.lines.append(at, Record::Begin(begin))?;
            self.terms = Some(terms.clone());
        }
        let step = Record::Step(committed.step);
        self.lines.append(SystemTime::now(), step)
    }
}
