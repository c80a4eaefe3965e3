//! What can be wrong with a ledger.

use std::ops::Range;

use serde::Serialize;

use super::cover::Epoch;
use super::lines::{Hash, LINE_BYTES_MAX};

/// Why a ledger proves nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// A line is not what was written.
    #[error("line {line} was changed: {why}")]
    Changed {
        /// The line, from 1.
        line: u64,
        /// How that shows.
        why: String,
    },
    /// A line is longer than any record.
    #[error("line {line} has more than {LINE_BYTES_MAX} bytes")]
    TooLong {
        /// The line, from 1.
        line: u64,
    },
    /// A record of another run.
    #[error("line {line} is of another run: its ledger is {found}, expected {expected}")]
    OtherRun {
        /// The line, from 1.
        line: u64,
        /// The ledger that the record is of.
        found: Hash,
        /// The ledger that the first record is of.
        expected: Hash,
    },
    /// Records are not there.
    #[error("{} before line {line}", missing(.records))]
    Missing {
        /// The line after the gap, from 1.
        line: u64,
        /// Numbers of the missing records.
        records: Range<u64>,
    },
    /// A record stands twice.
    #[error("line {line} repeats record {record}")]
    Doubled {
        /// The line, from 1.
        line: u64,
        /// Number of the record.
        record: u64,
    },
    /// A record stands after a later one.
    #[error("line {line} is out of order: it has record {record}, after record {after}")]
    OutOfOrder {
        /// The line, from 1.
        line: u64,
        /// Number of the record.
        record: u64,
        /// Number of the latest record before it.
        after: u64,
    },
    /// A whole record that continues another one than that before it.
    #[error(
        "line {line} continues another record: it was written after {found}, expected {expected}"
    )]
    OtherHistory {
        /// The line, from 1.
        line: u64,
        /// Checksum of the record that it continues.
        found: Hash,
        /// Checksum of the record before it.
        expected: Hash,
    },
    /// There are no records of some steps.
    #[error("no record of {}", numbered(.steps))]
    LostSteps {
        /// Their numbers.
        steps: Range<u64>,
    },
    /// A step that used samples out of turn.
    #[error(
        "step {step} used samples {}..{} of epoch {}, expected {}..{} of epoch {}",
        found.1.start, found.1.end, found.0, expected.1.start, expected.1.end, expected.0
    )]
    OutOfTurn {
        /// The step.
        step: u64,
        /// Epoch and samples that it used.
        found: (u64, Range<u64>),
        /// Epoch and samples that follow those of the step before.
        expected: (u64, Range<u64>),
    },
    /// A step that used other samples than the sampler deals.
    #[error(
        "step {step} used samples with checksum {found}, but the sampler deals those with {expected}"
    )]
    OtherSamples {
        /// The step.
        step: u64,
        /// Checksum in the ledger.
        found: Hash,
        /// Checksum of the samples by the sampler.
        expected: Hash,
    },
    /// The settings of a [`Begin`](super::Begin) do not continue the steps before it, or are impossible.
    #[error("the run cannot go on after step {step} as recorded: {why}")]
    Settings {
        /// The step.
        step: u64,
        /// What does not fit.
        why: String,
    },
    /// An epoch whose steps, all of them as the sampler deals them, do not use every sample once.
    #[error("epoch {epoch} left {} samples unused and repeated {}", .of.unused, .of.repeated)]
    Uneven {
        /// The epoch, from 0.
        epoch: u64,
        /// How its samples were used.
        of: Epoch,
    },
    /// There is a checkpoint of a step after the last one.
    #[error("the last recorded step is {last}, but there is a checkpoint of step {checkpoint}")]
    Behind {
        /// The last recorded step.
        last: u64,
        /// The step of the newest checkpoint.
        checkpoint: u64,
    },
}

impl Serialize for Fault {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

fn missing(records: &Range<u64>) -> String {
    match records.end - records.start {
        1 => format!("record {} is missing", records.start),
        _ => format!(
            "records {} to {} are missing",
            records.start,
            records.end - 1
        ),
    }
}

fn numbered(steps: &Range<u64>) -> String {
    match steps.end - steps.start {
        1 => format!("step {}", steps.start),
        _ => format!("steps {} to {}", steps.start, steps.end - 1),
    }
}
