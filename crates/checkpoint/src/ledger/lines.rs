//! Files of records, each a line of JSON with the checksum of the line before it: one writer appends and never changes a line.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::marker::PhantomData;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest, Sha256};

/// Longest line: the record of a job with as many replicas as there can be shards fits.
pub(crate) const LINE_BYTES_MAX: u64 = 2 << 20;
/// Bytes between the checksummed part of a line and its end: `,"sum":"0123456789abcdef"}`.
const TAIL: usize = 26;

/// A kind of record.
pub(crate) trait Line: Serialize + DeserializeOwned {
    /// The version that this program reads and writes.
    const VERSION: u32;

    /// The version of the records that follow, if this one names it.
    fn version(&self) -> Option<u32>;
}

/// An open file of records.
#[derive(Debug)]
pub(crate) struct Lines<R> {
    file: File,
    name: Hash,
    next: u64,
    previous: Hash,
    dropped_bytes: u64,
    of: PhantomData<R>,
}

impl<R: Line> Lines<R> {
    /// Opens the file at `path`, or creates it, to append after its last whole record, which it returns. Removes a torn end.
    ///
    /// *Errors*: the system's; the last record is damaged.
    pub(crate) fn open(path: &Path) -> io::Result<(Self, Option<Entry<R>>)> {
        let mut options = OpenOptions::new();
        let mut file = options.create(true).read(true).append(true).open(path)?;
        let len = file.seek(SeekFrom::End(0))?;
        let (end, last) = match last_record(&mut file, len)? {
            Some((end, entry, sum)) => (end, Some((entry, sum))),
            None => (0, None),
        };
        if end < len {
            file.set_len(end)?;
        }
        let (next, name, previous) = match &last {
            Some((entry, sum)) => (entry.n + 1, entry.ledger, *sum),
            None => (0, Hash::random(), Hash::default()),
        };
        let lines = Self {
            file,
            name,
            next,
            previous,
            dropped_bytes: len - end,
            of: PhantomData,
        };
        Ok((lines, last.map(|(entry, _)| entry)))
    }

    /// Number of records.
    pub(crate) fn count(&self) -> u64 {
        self.next
    }

    /// Bytes of a torn record that opening the file has removed; 0 from the second call on.
    pub(crate) fn take_dropped_bytes(&mut self) -> u64 {
        std::mem::take(&mut self.dropped_bytes)
    }

    pub(crate) fn append(&mut self, at: SystemTime, record: R) -> io::Result<()> {
        self.append_all(at, [record])
    }

    pub(crate) fn append_all(
        &mut self,
        at: SystemTime,
        records: impl IntoIterator<Item = R>,
    ) -> io::Result<()> {
        let (mut next, mut previous) = (self.next, self.previous);
        let mut text = String::new();
        for record in records {
            let entry = Entry {
                n: next,
                ledger: self.name,
                previous,
                at_ms: millis(at),
                record,
            };
            let (line, sum) = entry.encode();
            text.push_str(&line);
            (next, previous) = (next + 1, sum);
        }
        // One write, so that a process that is killed leaves a line whole or not at all.
        self.file.write_all(text.as_bytes())?;
        (self.next, self.previous) = (next, previous);
        Ok(())
    }
}

pub(crate) fn millis(at: SystemTime) -> u64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The last record of a file of `len` bytes, where it ends, and its checksum; `None` if the file has no whole line.
///
/// *Errors*: the last whole line is no record.
fn last_record<R: Line>(file: &mut File, len: u64) -> io::Result<Option<(u64, Entry<R>, Hash)>> {
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

/// The first 64 bits of a SHA-256: enough to find accidents. It does not stop a forger, who can compute every checksum again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hash(u64);

impl Hash {
    pub(crate) fn of(bytes: &[u8]) -> Self {
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

    /// A random one, the name of a new file.
    pub(crate) fn random() -> Self {
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

/// A record in its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(bound = "R: Line")]
pub(crate) struct Entry<R> {
    /// Its number, from 0.
    pub(crate) n: u64,
    /// The file it belongs to.
    pub(crate) ledger: Hash,
    /// The checksum of the record before.
    pub(crate) previous: Hash,
    /// When it was written, in milliseconds since 1970.
    pub(crate) at_ms: u64,
    #[serde(flatten)]
    pub(crate) record: R,
}

impl<R: Line> Entry<R> {
    /// Its line, with the line's end, and its checksum.
    pub(crate) fn encode(&self) -> (String, Hash) {
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
    pub(crate) fn decode(line: &[u8]) -> Result<(Self, Hash), String> {
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
        match entry.record.version() {
            Some(version) if version != R::VERSION => {
                let reads = R::VERSION;
                Err(format!(
                    "it has version {version}, but this program reads {reads}"
                ))
            }
            _ => Ok((entry, sum)),
        }
    }
}

fn tail(sum: Hash) -> String {
    format!(",\"sum\":\"{sum}\"}}")
}
