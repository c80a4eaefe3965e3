//! The files of one checkpoint: sealed with their checksums, read back and verified.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use burn::tensor::Bytes;
use paceline_ddp::DdpState;
use paceline_ddp::sampler::SamplerState;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::tensors::{self, Stored};

/// Version of the layout written; see the crate's documentation.
const VERSION: u32 = 2;
/// Size limit for reading `state.json` and the scheduler's state.
pub(crate) const STATE_BYTES_MAX: u64 = 64 << 20;
pub(crate) const WEIGHTS: &str = "model.safetensors";
pub(crate) const SCHEDULE: &str = "schedule.burnpack";
pub(crate) const HOOK: &str = "hook.safetensors";
const OPTIMIZER: &str = "optimizer.burnpack";
pub(crate) const STATE: &str = "state.json";

/// `state.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    #[serde(default)]
    pub(crate) version: u32,
    #[serde(flatten)]
    pub(crate) ddp: DdpState,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sampler: Option<SamplerState>,
    #[serde(default)]
    pub(crate) value: Value,
    /// Ids of parameters by path; empty in version 1.
    #[serde(default)]
    pub(crate) parameters: BTreeMap<String, u64>,
    pub(crate) weights_sha256: String,
    /// The step of the best checkpoint so far, if the program compares them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) best_step: Option<u64>,
    pub(crate) files: BTreeMap<String, String>,
    /// Version 1 has the program's values here instead of in `value`.
    #[serde(flatten, skip_serializing)]
    pub(crate) others: Map<String, Value>,
}

/// A whole checkpoint. Its tensors are still in its files.
#[derive(Debug)]
pub(crate) struct Contents {
    /// Tensors by path.
    pub(crate) weights: Vec<Stored>,
    pub(crate) metadata: BTreeMap<String, String>,
    /// By rank, if each has a state of its own; otherwise one.
    pub(crate) optimizers: Vec<PathBuf>,
    /// State of the communication hook, by name.
    pub(crate) hook: Vec<Stored>,
    pub(crate) schedule: Option<Bytes>,
    pub(crate) state: State,
}

/// Completes a checkpoint of the files in `folder`: syncs them, and writes their checksums with `state`.
pub(crate) fn seal(folder: &Path, mut state: State) -> io::Result<()> {
    state.version = VERSION;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        File::open(entry.path())?.sync_all()?;
        state.files.insert(name, checksum(&entry.path())?);
    }
    let place = folder.join(STATE);
    fs::write(&place, serde_json::to_vec_pretty(&state)?)?;
    File::open(place)?.sync_all()?;
    sync_folder(folder)
}

/// The file of a rank's optimizer state.
pub(crate) fn optimizer_of(rank: usize) -> String {
    match rank {
        0 => OPTIMIZER.into(),
        rank => format!("optimizer-{rank}.burnpack"),
    }
}

/// Makes renames in `folder` durable.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Reads and verifies one checkpoint.
///
/// *Memory*: no tensors.
pub(crate) fn read(folder: &Path) -> Result<Contents, String> {
    let mut state = decode(&read_file(folder, STATE)?)?;
    match state.version {
        1 => state.value = Value::Object(std::mem::take(&mut state.others)),
        VERSION => {}
        other => {
            return Err(format!(
                "{STATE} has version {other}, but this program reads 1 to {VERSION}"
            ));
        }
    }
    let verified = |name: &str| -> Result<PathBuf, String> {
        let path = folder.join(name);
        let found = checksum(&path).map_err(|error| format!("{name}: {error}"))?;
        match state.files.get(name) {
            Some(expected) if *expected == found => Ok(path),
            Some(_) => Err(format!(
                "{name} does not have the checksum that {STATE} gives"
            )),
            None => Err(format!("{STATE} does not mention {name}")),
        }
    };
    let stored = |name: &str| {
        let opened = tensors::open(&verified(name)?);
        opened.map_err(|error| format!("{name}: {error}"))
    };
    let has = |name: &str| state.files.contains_key(name);
    let (weights, metadata) = stored(WEIGHTS)?;
    let hook = has(HOOK).then(|| stored(HOOK)).transpose()?;
    let ranks = 1 + (1..).take_while(|rank| has(&optimizer_of(*rank))).count();
    let optimizers = (0..ranks).map(|rank| verified(&optimizer_of(rank)));
    let schedule = has(SCHEDULE).then(|| {
        verified(SCHEDULE)?;
        read_file(folder, SCHEDULE)
    });
    Ok(Contents {
        weights,
        metadata,
        optimizers: optimizers.collect::<Result<_, String>>()?,
        hook: hook.map_or_else(Vec::new, |(tensors, _)| tensors),
        schedule: schedule.transpose()?.map(Bytes::from_bytes_vec),
        state,
    })
}

/// The step of the checkpoint that was the best when the one in `folder` was saved.
pub(crate) fn best_step(folder: &Path) -> Result<Option<u64>, String> {
    Ok(decode(&read_file(folder, STATE)?)?.best_step)
}

fn decode(state: &[u8]) -> Result<State, String> {
    serde_json::from_slice(state).map_err(|error| format!("{STATE} is damaged: {error}"))
}

/// Whether this is the name of a file, and no path out of its folder.
pub(crate) fn is_plain(name: &str) -> bool {
    Path::new(name).file_name() == Some(name.as_ref())
}

/// The files that a `state.json` names besides itself.
///
/// *Errors*: it is not one, or names something that is not a file in its folder.
#[cfg(feature = "object-store")]
pub(crate) fn names(state: &[u8]) -> Result<Vec<String>, String> {
    let names: Vec<String> = decode(state)?.files.into_keys().collect();
    let is_foreign = |name: &&String| !is_plain(name) || *name == STATE;
    match names.iter().find(is_foreign) {
        Some(name) => Err(format!(
            "{STATE} names {name:?}, which is not a file of a checkpoint"
        )),
        None => Ok(names),
    }
}

fn read_file(folder: &Path, name: &str) -> Result<Vec<u8>, String> {
    let path = folder.join(name);
    let in_file = |error| format!("{name}: {error}");
    let size = fs::metadata(&path).map_err(in_file)?.len();
    if size > STATE_BYTES_MAX {
        return Err(format!(
            "{name} has {size} bytes, more than the {STATE_BYTES_MAX} allowed"
        ));
    }
    fs::read(&path).map_err(in_file)
}

/// SHA-256 of a file, as lower-case hexadecimal.
fn checksum(path: &Path) -> io::Result<String> {
    let mut hasher = Sha256::new();
    io::copy(&mut File::open(path)?, &mut hasher)?;
    let digest = hasher.finalize();
    Ok(digest.iter().map(|byte| format!("{byte:02x}")).collect())
}
