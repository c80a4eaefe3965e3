//! One record of a ledger: its line of JSON, and the checksum that ties it to the record before.

use std::fmt;

use paceline_ddp::sampler::BatchLayout;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest, Sha256};

/// Version of the records written.
pub(super) const VERSION: u32 = 1;
/// Bytes between the checksummed part of a line and its end: `,"sum":"0123456789abcdef"}`.
const TAIL: usize = 26;

/// The first 64 bits of a SHA-256: enough to find accidents. It does not stop a forger, who can compute every checksum again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hash(u64);

impl Hash {
    fn of(bytes: &[u8]) -> Self {
        let digest: [u8; 32] = Sha256::digest(bytes).into();
        let first = digest.first_chunk().expect("a SHA-256 is longer");
        Self(u64::from_be_bytes(*first))
    }

    /// Of the samples of a step: for each shard their number and their indices, as 64-bit words.
    pub(super) fn of_indices(shards: &[Vec<usize>]) -> Self {
        let words = |shard: &Vec<usize>| {
            let len = std::iter::once(shard.len());
            let words = len.chain(shard.iter().copied());
            words
                .flat_map(|word| (word as u64).to_le_bytes())
                .collect::<Vec<u8>>()
        };
        Self::of(&shards.iter().flat_map(words).collect::<Vec<u8>>())
    }

    /// A random one, the name of a new ledger.
    pub(super) fn random() -> Self {
        use std::hash::{BuildHasher, Hasher};
        Self(std::hash::RandomState::new().build_hasher().finish())
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Serialize for Hash {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let hash = u64::from_str_radix(&text, 16);
        hash.map(Self).map_err(serde::de::Error::custom)
    }
}

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
    /// For each replica of the model, in order: its first rank, and the first of the shards that it computes.
    pub owners: Vec<(usize, usize)>,
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
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum Record {
    Begin(Begin),
    Step(Step),
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

/// A record in its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    /// Its number, from 0.
    pub(super) n: u64,
    /// The ledger it belongs to.
    pub(super) ledger: Hash,
    /// The checksum of the record before.
    pub(super) previous: Hash,
    /// When it was written, in milliseconds since 1970.
    pub(super) at_ms: u64,
    #[serde(flatten)]
    pub(super) record: Record,
}

impl Entry {
    /// Its line, with the line's end, and its checksum.
    pub(super) fn encode(&self) -> (String, Hash) {
        let mut line = serde_json::to_string(self).expect("plain data encodes");
        line.pop();
        let sum = Hash::of(line.as_bytes());
        line.push_str(&tail(sum));
        line.push('\n');
        (line, sum)
    }

    /// The record of a line without its end, and its checksum.
    ///
    /// *Errors*: a reason in words if the line is not what [`encode`](Self::encode) wrote.
    pub(super) fn decode(line: &[u8]) -> Result<(Self, Hash), String> {
        let split = line.len().checked_sub(TAIL);
        let (body, end) = split.map_or((line, &[][..]), |at| line.split_at(at));
        let sum = Hash::of(body);
        let expected = tail(sum);
        if end != expected.as_bytes() {
            let end = String::from_utf8_lossy(end).into_owned();
            return Err(format!("it ends with `{end}`, expected `{expected}`"));
        }
        let entry = serde_json::from_slice(&[body, b"}"].concat());
        let entry: Self = entry.map_err(|error| error.to_string())?;
        match &entry.record {
            Record::Begin(begin) if begin.version != VERSION => {
                let version = begin.version;
                Err(format!(
                    "it has version {version}, but this program reads {VERSION}"
                ))
            }
            _ => Ok((entry, sum)),
        }
    }
}

fn tail(sum: Hash) -> String {
    format!(",\"sum\":\"{sum}\"}}")
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}
