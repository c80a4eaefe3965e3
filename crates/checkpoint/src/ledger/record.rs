//! The records of a ledger.

use paceline_ddp::sampler::BatchLayout;
use serde::{Deserialize, Serialize};

use super::lines::{Hash, Line};

/// Version of the records written.
pub(super) const VERSION: u32 = 1;

/// What a process that begins, or a change within it, makes of the steps that follow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begin {
    /// Version of the ledger's records.
    pub version: u32,
    /// Why the record was written.
    pub cause: Cause,
    /// Steps done. Recorded steps after this one were rolled back.
    pub step: u64,
    /// Seed of the shuffle.
    pub seed: u64,
    /// How the samples of each epoch are dealt to steps and shards.
    pub layout: BatchLayout,
    /// Number of the group of ranks; it grows if the group changes while the job runs.
    pub generation: u64,
    /// Ranks of the job.
    pub world: usize,
    /// For each replica of the model, in order: its first rank, by the number that its process was started with, and the first of the
    /// shards that it computes.
    pub owners: Vec<(usize, usize)>,
    /// After ranks were lost: what happened to them, in the launcher's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Bytes of an unfinished record that were removed from the end of the file before this one was written.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub dropped_bytes: u64,
}

/// Why a [`Begin`] was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The run began.
    Start,
    /// A new process went on with the run.
    Resume,
    /// The ranks or the layout changed within the process.
    Change,
    /// The ranks went back to a state in memory, because a rank's weights were wrong.
    Back,
}

/// A committed step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Steps done, this one included.
    pub step: u64,
    /// The epoch, from 0.
    pub epoch: u64,
    /// Samples of the epoch that all shards had read before.
    pub from: u64,
    /// Samples of the epoch that all shards have read now.
    pub to: u64,
    /// The checksum of every shard's indices.
    pub indices: Hash,
    /// The generation of the ranks that computed it.
    pub generation: u64,
    /// Whether it was skipped because of an infinity or NaN, so that its samples changed nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// If it was not only skipped: the step to whose state the ranks went back, so that the samples since then changed nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back_to: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum Record {
    Begin(Begin),
    Step(Step),
}

impl Line for Record {
    const VERSION: u32 = VERSION;

    fn version(&self) -> Option<u32> {
        match self {
            Self::Begin(begin) => Some(begin.version),
            Self::Step(_) => None,
        }
    }
}

impl Record {
    /// Steps done.
    pub(super) fn step(&self) -> u64 {
        match self {
            Self::Begin(begin) => begin.step,
            Self::Step(step) => step.step,
        }
    }
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}
