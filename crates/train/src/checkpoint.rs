//! Checkpoints: what is saved, how it survives a crash in the middle, and how the newest good one is found.
//!
//! ```text
//! checkpoints/step-0000000345/
//!   model.safetensors    weights and running statistics by path
//!   optimizer.burnpack   optimizer state, in Burn's own format
//!   state.json           step, position in the data, seed, settings, SHA-256 of the other files
//! ```
//!
//! A checkpoint is written into a hidden folder beside its place, synced, and renamed, so it is there as a whole or not at
//! all. What the disk may still lose or change is found by the checksums, and then the one before is used.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, TensorData};
use paceline_ddp::GradScalerState;
use paceline_ddp::sampler::SamplerState;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::TrainError;

/// Version of the layout; others are refused.
const VERSION: u32 = 1;
/// Largest file that is read back.
const FILE_BYTES_MAX: u64 = 64 << 30;
const WEIGHTS: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.burnpack";
const STATE: &str = "state.json";

/// Everything besides tensors. The learning rate and the device's randomness follow from `step` and `seed`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Version of the layout.
    pub version: u32,
    /// Steps done.
    pub step: u64,
    /// Where the run stands in its data.
    pub sampler: SamplerState,
    /// Job seed.
    pub seed: u64,
    /// Steps of the whole job, which the learning-rate schedule depends on.
    pub total_steps: u64,
    /// Sum of losses and of samples of the epoch so far.
    pub epoch_sums: [f64; 2],
    /// The gradient scaler, where the job has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaler: Option<GradScalerState>,
    /// SHA-256 over the weights, see `paceline_ddp::weights::sha256`.
    pub weights_sha256: String,
    /// SHA-256 of the other files.
    pub files: BTreeMap<String, String>,
}

/// A checkpoint in memory.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Tensors by path.
    pub weights: Vec<(String, TensorData)>,
    /// Optimizer state as bytes.
    pub optimizer: Vec<u8>,
    /// Everything else.
    pub state: State,
}

/// Writes `checkpoint` below `folder` and then removes all but the newest `keep`.
///
/// *Errors*: any step failing leaves earlier checkpoints as they were and nothing half-written under a name that
/// [`newest`] would read.
pub fn save(folder: &Path, keep: usize, checkpoint: &Checkpoint) -> Result<PathBuf, TrainError> {
    let place = folder.join(format!("step-{:010}", checkpoint.state.step));
    let file_error = |source| TrainError::File {
        action: "write checkpoint",
        path: place.clone(),
        source,
    };
    fs::create_dir_all(folder).map_err(file_error)?;
    let beside = tempfile::Builder::new()
        .prefix(".writing-")
        .tempdir_in(folder)
        .map_err(file_error)?;
    write_files(beside.path(), checkpoint).map_err(file_error)?;
    publish(beside, &place).map_err(file_error)?;
    prune(folder, keep);
    Ok(place)
}

fn write_files(folder: &Path, checkpoint: &Checkpoint) -> std::io::Result<()> {
    let weights = encode_weights(&checkpoint.weights).map_err(std::io::Error::other)?;
    let mut state = checkpoint.state.clone();
    state.version = VERSION;
    state.files = [(WEIGHTS, &weights), (OPTIMIZER, &checkpoint.optimizer)]
        .map(|(name, bytes)| (name.to_string(), hex(&Sha256::digest(bytes))))
        .into();
    write_synced(&folder.join(WEIGHTS), &weights)?;
    write_synced(&folder.join(OPTIMIZER), &checkpoint.optimizer)?;
    write_synced(&folder.join(STATE), &serde_json::to_vec_pretty(&state)?)?;
    sync_folder(folder)
}

/// Moves the finished folder to its place; one that is already there (torn, or of the same step) makes room first.
fn publish(beside: tempfile::TempDir, place: &Path) -> std::io::Result<()> {
    let parent = place.parent().unwrap_or(Path::new("."));
    if place.exists() {
        let old = tempfile::Builder::new()
            .prefix(".old-")
            .tempdir_in(parent)?;
        fs::rename(place, old.path().join("checkpoint"))?;
    }
    fs::rename(beside.path(), place)?;
    // The folder has moved away; there is nothing left to remove.
    let _ = beside.keep();
    sync_folder(parent)
}

fn write_synced(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = fs::File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Makes renames in `folder` durable.
fn sync_folder(folder: &Path) -> std::io::Result<()> {
    fs::File::open(folder)?.sync_all()
}

/// Removes all but the newest `keep`, and what interrupted writes have left. Failing to remove harms nothing.
fn prune(folder: &Path, keep: usize) {
    let found = list(folder);
    for old in found.iter().rev().skip(keep.max(1)) {
        let _ = fs::remove_dir_all(old);
    }
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(".writing-") || name.starts_with(".old-") {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// The checkpoints in `folder`, oldest first.
pub fn list(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| step_of(path).is_some())
        .collect();
    found.sort_by_key(|path| step_of(path));
    found
}

fn step_of(path: &Path) -> Option<u64> {
    path.file_name()?
        .to_str()?
        .strip_prefix("step-")?
        .parse()
        .ok()
}

/// Reads the newest checkpoint in `folder` that is whole, with what was wrong with newer ones.
///
/// *Errors*: `NoCheckpoint` with every reason.
pub fn newest(folder: &Path) -> Result<(PathBuf, Checkpoint, Vec<String>), TrainError> {
    let mut reasons = Vec::new();
    for path in list(folder).into_iter().rev() {
        match read(&path) {
            Ok(checkpoint) => return Ok((path, checkpoint, reasons)),
            Err(reason) => reasons.push(format!("{}: {reason}", path.display())),
        }
    }
    Err(TrainError::NoCheckpoint {
        path: folder.to_path_buf(),
        reasons: reasons
            .iter()
            .map(|reason| format!("\n  {reason}"))
            .collect(),
    })
}

/// Reads one checkpoint and verifies all of it.
pub fn read(folder: &Path) -> Result<Checkpoint, String> {
    let state = read_file(&folder.join(STATE))?;
    let state: State =
        serde_json::from_slice(&state).map_err(|error| format!("{STATE} is damaged: {error}"))?;
    if state.version != VERSION {
        return Err(format!(
            "{STATE} has version {}, this program reads {VERSION}",
            state.version
        ));
    }
    let verified = |name: &str| -> Result<Vec<u8>, String> {
        let bytes = read_file(&folder.join(name))?;
        match state.files.get(name) {
            Some(expected) if *expected == hex(&Sha256::digest(&bytes)) => Ok(bytes),
            Some(_) => Err(format!(
                "{name} does not have the checksum that {STATE} gives"
            )),
            None => Err(format!("{STATE} does not mention {name}")),
        }
    };
    Ok(Checkpoint {
        weights: decode_weights(&verified(WEIGHTS)?)?,
        optimizer: verified(OPTIMIZER)?,
        state,
    })
}

fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let size = fs::metadata(path)
        .map_err(|error| format!("{name}: {error}"))?
        .len();
    if size > FILE_BYTES_MAX {
        return Err(format!(
            "{name} has {size} bytes, more than the {FILE_BYTES_MAX} allowed"
        ));
    }
    fs::read(path).map_err(|error| format!("{name}: {error}"))
}

/// `checkpoint`'s tensors by path, if they are exactly those of `model` with the same shapes and types.
pub fn fit(
    path: &Path,
    weights: Vec<(String, TensorData)>,
    model: &[(String, TensorData)],
) -> Result<HashMap<String, TensorData>, TrainError> {
    let misfit = |what| TrainError::Misfit {
        path: path.to_path_buf(),
        what,
    };
    let saved: HashMap<String, TensorData> = weights.into_iter().collect();
    for (name, data) in model {
        let Some(found) = saved.get(name) else {
            return Err(misfit(format!("it has no {name}")));
        };
        if found.shape() != data.shape() || found.dtype() != data.dtype() {
            return Err(misfit(format!(
                "{name} is {:?} {:?}, the model's is {:?} {:?}",
                found.shape().to_vec(),
                found.dtype(),
                data.shape().to_vec(),
                data.dtype()
            )));
        }
    }
    match saved
        .keys()
        .find(|name| !model.iter().any(|(known, _)| known == *name))
    {
        Some(extra) => Err(misfit(format!("the model has no {extra}"))),
        None => Ok(saved),
    }
}

fn encode_weights(tensors: &[(String, TensorData)]) -> Result<Vec<u8>, String> {
    let views: Result<Vec<(&str, TensorView<'_>)>, String> = tensors
        .iter()
        .map(|(name, data)| {
            let dtype = to_safetensors(data.dtype()).ok_or_else(|| {
                format!(
                    "{name} has type {:?}, which safetensors lacks",
                    data.dtype()
                )
            })?;
            let view = TensorView::new(dtype, data.shape().to_vec(), data.as_bytes())
                .map_err(|error| format!("{name}: {error}"))?;
            Ok((name.as_str(), view))
        })
        .collect();
    safetensors::serialize(views?, None).map_err(|error| error.to_string())
}

fn decode_weights(bytes: &[u8]) -> Result<Vec<(String, TensorData)>, String> {
    let tensors = SafeTensors::deserialize(bytes).map_err(|error| format!("{WEIGHTS}: {error}"))?;
    tensors
        .tensors()
        .into_iter()
        .map(|(name, view)| {
            let dtype = from_safetensors(view.dtype())
                .ok_or_else(|| format!("{WEIGHTS}: {name} has type {:?}", view.dtype()))?;
            let shape = view.shape().to_vec();
            let data = TensorData::from_bytes_vec(view.data().to_vec(), shape, dtype);
            Ok((name, data))
        })
        .collect()
}

fn to_safetensors(dtype: DType) -> Option<Dtype> {
    Some(match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::I16 => Dtype::I16,
        DType::I8 => Dtype::I8,
        DType::U64 => Dtype::U64,
        DType::U32 => Dtype::U32,
        DType::U16 => Dtype::U16,
        DType::U8 => Dtype::U8,
        _ => return None,
    })
}

fn from_safetensors(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::I16 => DType::I16,
        Dtype::I8 => DType::I8,
        Dtype::U64 => DType::U64,
        Dtype::U32 => DType::U32,
        Dtype::U16 => DType::U16,
        Dtype::U8 => DType::U8,
        _ => return None,
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use paceline_ddp::sampler::{BatchLayout, Padding};

    use super::*;

    fn checkpoint(step: u64) -> Checkpoint {
        Checkpoint {
            weights: vec![
                ("a".into(), TensorData::new(vec![1.0f32, step as f32], [2])),
                ("b".into(), TensorData::new(vec![1i64, 2, 3, 4], [2, 2])),
            ],
            optimizer: vec![7; 100],
            state: State {
                version: VERSION,
                step,
                sampler: SamplerState {
                    seed: 1,
                    epoch: 2,
                    consumed: 3,
                    layout: BatchLayout {
                        len: 10,
                        shards: 1,
                        global_batch: 1,
                        shuffle: true,
                        drop_last: false,
                        padding: Padding::None,
                    },
                },
                seed: 1,
                total_steps: 100,
                epoch_sums: [0.1, 2.0],
                scaler: None,
                weights_sha256: "x".into(),
                files: BTreeMap::new(),
            },
        }
    }

    fn folder_with(steps: &[u64]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for step in steps {
            save(folder.path(), 10, &checkpoint(*step)).expect("saved");
        }
        folder
    }

    #[test]
    fn what_is_saved_is_read_back() {
        let folder = folder_with(&[5]);
        let (path, found, reasons) = newest(folder.path()).expect("found");
        assert!(path.ends_with("step-0000000005"));
        assert!(reasons.is_empty());
        let mut weights = found.weights.clone();
        weights.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(weights, checkpoint(5).weights);
        assert_eq!(found.optimizer, checkpoint(5).optimizer);
        assert_eq!(found.state.sampler, checkpoint(5).state.sampler);
    }

    #[test]
    fn the_newest_whole_checkpoint_is_found_whatever_happened_to_later_ones() {
        type Damage = fn(&Path);
        let damage: [(&str, Damage); 5] = [
            ("truncated", |p| {
                let file = fs::OpenOptions::new()
                    .write(true)
                    .open(p.join(WEIGHTS))
                    .expect("open");
                file.set_len(10).expect("cut");
            }),
            ("flipped", |p| {
                let mut bytes = fs::read(p.join(OPTIMIZER)).expect("read");
                bytes[50] ^= 1;
                fs::write(p.join(OPTIMIZER), bytes).expect("write");
            }),
            ("no state", |p| {
                fs::remove_file(p.join(STATE)).expect("remove")
            }),
            ("half a state", |p| {
                fs::write(p.join(STATE), b"{\"version\": 1,").expect("write")
            }),
            ("another version", |p| {
                let text = fs::read_to_string(p.join(STATE)).expect("read");
                fs::write(
                    p.join(STATE),
                    text.replace("\"version\": 1", "\"version\": 99"),
                )
                .expect("write");
            }),
        ];
        for (what, damage) in damage {
            let folder = folder_with(&[9, 10, 100]);
            damage(&folder.path().join("step-0000000100"));
            let (path, found, reasons) = newest(folder.path()).expect(what);
            assert!(path.ends_with("step-0000000010"), "{what}");
            assert_eq!(found.state.step, 10);
            assert_eq!(reasons.len(), 1, "{what}");
        }
    }

    #[test]
    fn a_folder_without_a_whole_checkpoint_says_what_is_wrong_with_each() {
        let folder = folder_with(&[1]);
        fs::remove_file(folder.path().join("step-0000000001").join(WEIGHTS)).expect("remove");
        let error = newest(folder.path())
            .expect_err("nothing to read")
            .to_string();
        assert!(
            error.contains("no valid checkpoint") && error.contains(WEIGHTS),
            "{error}"
        );
        assert!(newest(Path::new("/nonexistent")).is_err());
    }

    #[test]
    fn old_checkpoints_and_leftovers_of_interrupted_writes_go() {
        let folder = folder_with(&[1, 2, 3]);
        fs::create_dir(folder.path().join(".writing-abc")).expect("leftover");
        save(folder.path(), 2, &checkpoint(4)).expect("saved");
        let names: Vec<String> = fs::read_dir(folder.path())
            .expect("list")
            .map(|e| e.expect("entry").file_name().to_string_lossy().into_owned())
            .collect();
        assert_eq!(names.len(), 2, "{names:?}");
        assert!(
            names.contains(&"step-0000000003".into()) && names.contains(&"step-0000000004".into())
        );
    }

    #[test]
    fn a_step_saved_twice_is_replaced() {
        let folder = folder_with(&[4]);
        fs::remove_file(folder.path().join("step-0000000004").join(STATE)).expect("torn");
        save(folder.path(), 3, &checkpoint(4)).expect("saved again");
        assert_eq!(newest(folder.path()).expect("found").1.state.step, 4);
    }

    #[test]
    fn a_failed_write_leaves_the_earlier_checkpoint() {
        let folder = folder_with(&[1]);
        let mut bad = checkpoint(2);
        bad.weights
            .push(("a".into(), TensorData::new(vec![true], [1])));
        let error = save(folder.path(), 1, &bad).expect_err("a type that cannot be saved");
        assert!(
            error.to_string().starts_with("cannot write checkpoint"),
            "{error}"
        );
        assert_eq!(newest(folder.path()).expect("found").1.state.step, 1);
        assert_eq!(fs::read_dir(folder.path()).expect("list").count(), 1);
    }

    #[test]
    fn a_checkpoint_of_another_model_is_refused_by_name() {
        let model = checkpoint(1).weights;
        let check = |saved: Vec<(String, TensorData)>, expect: &str| {
            let error = fit(Path::new("c"), saved, &model)
                .expect_err("refused")
                .to_string();
            assert!(error.contains(expect), "{error}");
        };
        assert!(fit(Path::new("c"), model.clone(), &model).is_ok());
        check(vec![model[0].clone()], "it has no b");
        let mut more = model.clone();
        more.push(("c".into(), TensorData::new(vec![0f32], [1])));
        check(more, "the model has no c");
        let other = TensorData::new(vec![1.0f32, 2.0, 3.0], [3]);
        check(
            vec![("a".into(), other), model[1].clone()],
            "a is [3] F32, the model's is [2] F32",
        );
    }
}
