//! Reads a ledger, and proves that every sample of every epoch was used exactly once, or says where it was not.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::chain::Chain;
use super::cover::{Epoch, cover};
use super::fault::Fault;
use super::lines::Entry;
use super::path;
use super::record::{Begin, Record, Step};
use crate::error::CheckpointError;
use crate::folder;

/// What a ledger says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Audit {
    /// The file.
    pub path: PathBuf,
    /// Whole records.
    pub records: u64,
    /// Bytes of an unfinished record at the end, which a crash leaves.
    pub torn_bytes: u64,
    /// Steps that count: those that were not rolled back.
    pub steps: u64,
    /// Steps that were rolled back.
    pub rolled_back: u64,
    /// Steps that count but changed nothing, because they had an infinity or NaN. Those that were given up are not among them.
    pub skipped: u64,
    /// The epochs, the last one perhaps unfinished.
    pub epochs: Vec<Epoch>,
    /// What happened to the run, in order.
    pub attempts: Vec<Attempt>,
    /// Everything that is wrong. The proof holds if it is empty.
    pub faults: Vec<Fault>,
}

/// The steps between two [`Begin`]s.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Attempt {
    /// How it began.
    pub begin: Begin,
    /// When it began, in milliseconds since 1970.
    pub began_ms: u64,
    /// When its last step ended.
    pub ended_ms: u64,
    /// When its last step that counts ended.
    pub kept_until_ms: u64,
    /// Its last step, or the one before its first if it has none.
    pub last_step: u64,
    /// Steps that it did.
    pub steps: u64,
    /// Steps of it that count.
    pub kept: u64,
    /// Steps that changed nothing because the ranks went back in one of its steps that count.
    pub given_up: Vec<GivenUp>,
}

/// Steps that count but changed nothing: the last one had an infinity or NaN, and the ranks went back to a state before the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct GivenUp {
    /// The first one.
    pub first: u64,
    /// The last one.
    pub last: u64,
    /// Samples that they used.
    pub samples: u64,
    /// When the last one ended, in milliseconds since 1970.
    pub at_ms: u64,
}

/// Reads the ledger in `folder`, which holds a run's checkpoints, and checks it. Needs no data: the sampler deals the samples
/// again.
///
/// *Cost*: a shuffle per epoch, and 80 bytes of memory per step and 9 per sample.
///
/// *Errors*: the file cannot be read. Everything that is wrong with it is in [`Audit::faults`].
pub fn audit(folder: &Path) -> Result<Audit, CheckpointError> {
    let path = path(folder);
    let failed = |source| CheckpointError::Ledger {
        action: "read",
        path: path.clone(),
        source,
    };
    let file = File::open(&path).map_err(failed)?;
    let mut audit = read(BufReader::new(file)).map_err(failed)?;
    let newest = folder::list(folder)
        .last()
        .and_then(|path| folder::step_of(path));
    let last = audit.attempts.last().map_or(0, |attempt| attempt.last_step);
    if let Some(checkpoint) = newest.filter(|checkpoint| *checkpoint > last) {
        audit.faults.push(Fault::Behind { last, checkpoint });
    }
    audit.path = path;
    Ok(audit)
}

/// A step that counts, of the attempt at this place.
pub(super) struct Kept {
    pub(super) step: Step,
    pub(super) attempt: usize,
    at_ms: u64,
}

/// The same of the ledger in `lines`.
pub(super) fn read(mut lines: impl BufRead) -> io::Result<Audit> {
    let mut audit = Audit::default();
    let mut chain = Chain::default();
    let mut kept: Vec<Kept> = Vec::new();
    let mut faults = Vec::new();
    audit.torn_bytes = chain.read(&mut lines, |entry| {
        audit.records += 1;
        audit.add(entry, &mut kept, &mut faults);
        faults.len()
    })?;
    audit.faults = chain.end();
    for step in &kept {
        let attempt = &mut audit.attempts[step.attempt];
        attempt.kept += 1;
        attempt.kept_until_ms = step.at_ms;
    }
    audit.steps = kept.len() as u64;
    let skipped = kept.iter().filter(|kept| kept.step.skipped).count();
    audit.skipped = (skipped - give_up(&mut audit.attempts, &kept)) as u64;
    // Records that cannot be trusted prove nothing: what they say of steps would only follow from that.
    if audit.faults.is_empty() {
        audit.faults = faults;
    }
    if audit.faults.is_empty() {
        let (epochs, fault) = cover(&audit.attempts, &kept);
        audit.epochs = epochs;
        audit.faults.extend(fault);
    }
    Ok(audit)
}

/// Tells the attempts which steps they gave up; returns how many of these were skipped.
fn give_up(attempts: &mut [Attempt], kept: &[Kept]) -> usize {
    let (mut skipped, mut begin) = (0, 0);
    for (at, last) in kept.iter().enumerate() {
        let Some(back_to) = last.step.back_to else {
            continue;
        };
        let given_up = kept[begin..=at].iter().rev();
        let given_up = given_up.map(|kept| &kept.step);
        let (mut first, mut samples) = (last.step.step, 0_u64);
        for step in given_up.take_while(|step| step.step > back_to) {
            first = step.step;
            samples = step.to.saturating_sub(step.from).saturating_add(samples);
            skipped += usize::from(step.skipped);
        }
        begin = at + 1;
        attempts[last.attempt].given_up.push(GivenUp {
            first,
            last: last.step.step,
            samples,
            at_ms: last.at_ms,
        });
    }
    skipped
}

impl Audit {
    fn add(&mut self, entry: Entry<Record>, kept: &mut Vec<Kept>, faults: &mut Vec<Fault>) {
        let at_ms = entry.at_ms;
        match entry.record {
            Record::Begin(begin) => {
                let before = kept.len();
                while kept.last().is_some_and(|last| last.step.step > begin.step) {
                    kept.pop();
                }
                self.rolled_back += (before - kept.len()) as u64;
                let last = kept.last().map_or(0, |kept| kept.step.step);
                if begin.step > last {
                    let steps = last + 1..begin.step.saturating_add(1);
                    faults.push(Fault::LostSteps { steps });
                }
                self.attempts.push(Attempt {
                    last_step: begin.step,
                    began_ms: at_ms,
                    ended_ms: at_ms,
                    kept_until_ms: at_ms,
                    steps: 0,
                    kept: 0,
                    given_up: Vec::new(),
                    begin,
                });
            }
            Record::Step(step) => {
                // Only a ledger without its first record has none; that is a fault of the chain.
                let Some(attempt) = self.attempts.last_mut() else {
                    return;
                };
                let expected = attempt.last_step.saturating_add(1);
                if step.step > expected {
                    faults.push(Fault::LostSteps {
                        steps: expected..step.step,
                    });
                } else if step.step < expected || step.generation != attempt.begin.generation {
                    let (after, generation) = (attempt.last_step, step.generation);
                    let why = format!("step {} of generation {generation} follows", step.step);
                    faults.push(Fault::Settings { step: after, why });
                }
                attempt.last_step = step.step;
                attempt.ended_ms = at_ms;
                attempt.steps += 1;
                let attempt = self.attempts.len() - 1;
                kept.push(Kept {
                    step,
                    attempt,
                    at_ms,
                });
            }
        }
    }
}
