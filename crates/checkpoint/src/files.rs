//! The files of one checkpoint: written and synced, read back and verified.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use burn::tensor::{Bytes, DType, TensorData};
use paceline_ddp::sampler::SamplerState;
use paceline_ddp::{DdpState, weights};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

/// Version of the layout written; see the crate's documentation.
const VERSION: u32 = 2;
/// Size limit for reading a file of tensors.
const FILE_BYTES_MAX: u64 = 64 << 30;
/// Size limit for reading `state.json`.
const STATE_BYTES_MAX: u64 = 64 << 20;
const WEIGHTS: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.burnpack";
const SCHEDULE: &str = "schedule.burnpack";
const HOOK: &str = "hook.safetensors";
const STATE: &str = "state.json";

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
    pub(crate) files: BTreeMap<String, String>,
    /// Version 1 has the program's values here instead of in `value`.
    #[serde(flatten, skip_serializing)]
    pub(crate) others: Map<String, Value>,
}

/// A checkpoint in memory.
#[derive(Clone, Debug)]
pub(crate) struct Contents {
    /// Tensors by path.
    pub(crate) weights: Vec<(String, TensorData)>,
    pub(crate) metadata: BTreeMap<String, String>,
    /// By rank, if each has a state of its own; otherwise one.
    pub(crate) optimizers: Vec<Bytes>,
    /// State of the communication hook, by name.
    pub(crate) hook: Vec<(String, TensorData)>,
    pub(crate) schedule: Option<Bytes>,
    pub(crate) state: State,
}

/// Writes the files into `folder` and syncs them.
pub(crate) fn write(folder: &Path, contents: Contents) -> io::Result<()> {
    let Contents {
        weights,
        metadata,
        optimizers,
        hook,
        schedule,
        mut state,
    } = contents;
    state.version = VERSION;
    state.weights_sha256 = weights::sha256(&weights);
    let encoded = encode_weights(&weights, metadata).map_err(io::Error::other)?;
    // Frees the copies of the tensors before waiting for the disk.
    drop(weights);
    let mut put = |name: &str, bytes: &[u8]| {
        let sum = hex(&Sha256::digest(bytes));
        state.files.insert(name.into(), sum);
        write_synced(&folder.join(name), bytes)
    };
    put(WEIGHTS, &encoded)?;
    for (rank, optimizer) in optimizers.iter().enumerate() {
        put(&optimizer_of(rank), optimizer)?;
    }
    if !hook.is_empty() {
        let encoded = encode_weights(&hook, BTreeMap::new()).map_err(io::Error::other)?;
        put(HOOK, &encoded)?;
    }
    if let Some(schedule) = schedule {
        put(SCHEDULE, &schedule)?;
    }
    write_synced(&folder.join(STATE), &serde_json::to_vec_pretty(&state)?)?;
    sync_folder(folder)
}

/// The file of a rank's optimizer state.
fn optimizer_of(rank: usize) -> String {
    match rank {
        0 => OPTIMIZER.into(),
        rank => format!("optimizer-{rank}.burnpack"),
    }
}

fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = fs::File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Makes renames in `folder` durable.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    fs::File::open(folder)?.sync_all()
}

/// Reads and verifies one checkpoint.
pub(crate) fn read(folder: &Path) -> Result<Contents, String> {
    let state = read_file(folder, STATE, STATE_BYTES_MAX)?;
    let mut state: State =
        serde_json::from_slice(&state).map_err(|error| format!("{STATE} is damaged: {error}"))?;
    match state.version {
        1 => state.value = Value::Object(std::mem::take(&mut state.others)),
        VERSION => {}
        other => {
            return Err(format!(
                "{STATE} has version {other}, but this program reads 1 to {VERSION}"
            ));
        }
    }
    let verified = |name: &str| -> Result<Vec<u8>, String> {
        let bytes = read_file(folder, name, FILE_BYTES_MAX)?;
        match state.files.get(name) {
            Some(expected) if *expected == hex(&Sha256::digest(&bytes)) => Ok(bytes),
            Some(_) => Err(format!(
                "{name} does not have the checksum that {STATE} gives"
            )),
            None => Err(format!("{STATE} does not mention {name}")),
        }
    };
    let (weights, metadata) = decode_weights(WEIGHTS, &verified(WEIGHTS)?)?;
    let has = |name: &str| state.files.contains_key(name);
    let hook = has(HOOK).then(|| decode_weights(HOOK, &verified(HOOK)?));
    let ranks = 1 + (1..).take_while(|rank| has(&optimizer_of(*rank))).count();
    let optimizers =
        (0..ranks).map(|rank| Ok(Bytes::from_bytes_vec(verified(&optimizer_of(rank))?)));
    let schedule = has(SCHEDULE).then(|| verified(SCHEDULE));
    Ok(Contents {
        weights,
        metadata,
        optimizers: optimizers.collect::<Result<_, String>>()?,
        hook: hook
            .transpose()?
            .map_or_else(Vec::new, |(tensors, _)| tensors),
        schedule: schedule.transpose()?.map(Bytes::from_bytes_vec),
        state,
    })
}

fn read_file(folder: &Path, name: &str, bytes_max: u64) -> Result<Vec<u8>, String> {
    let path = folder.join(name);
    let in_file = |error| format!("{name}: {error}");
    let size = fs::metadata(&path).map_err(in_file)?.len();
    if size > bytes_max {
        return Err(format!(
            "{name} has {size} bytes, more than the {bytes_max} allowed"
        ));
    }
    fs::read(&path).map_err(in_file)
}

fn encode_weights(
    tensors: &[(String, TensorData)],
    metadata: BTreeMap<String, String>,
) -> Result<Vec<u8>, String> {
    let views: Result<Vec<_>, String> = tensors.iter().map(encode_tensor).collect();
    let metadata: HashMap<String, String> = metadata.into_iter().collect();
    let metadata = (!metadata.is_empty()).then_some(metadata);
    safetensors::serialize(views?, metadata).map_err(|error| error.to_string())
}

fn encode_tensor((name, data): &(String, TensorData)) -> Result<(String, TensorView<'_>), String> {
    let dtype = DTYPES.iter().find(|(_, burn)| *burn == data.dtype());
    let (dtype, _) = dtype.ok_or_else(|| {
        format!(
            "{name} has type {:?}, which safetensors lacks",
            data.dtype()
        )
    })?;
    let view = TensorView::new(*dtype, data.shape().to_vec(), data.as_bytes());
    let view = view.map_err(|error| format!("{name}: {error}"))?;
    Ok((name.clone(), view))
}

type Weights = (Vec<(String, TensorData)>, BTreeMap<String, String>);

fn decode_weights(file: &str, bytes: &[u8]) -> Result<Weights, String> {
    let in_file = |error| format!("{file}: {error}");
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(in_file)?;
    let tensors = SafeTensors::deserialize(bytes).map_err(in_file)?;
    let tensors = tensors.tensors().into_iter();
    let weights: Result<_, String> = tensors.map(|tensor| decode_tensor(file, tensor)).collect();
    let metadata = header.metadata().clone().unwrap_or_default();
    Ok((weights?, metadata.into_iter().collect()))
}

fn decode_tensor(
    file: &str,
    (name, view): (String, TensorView<'_>),
) -> Result<(String, TensorData), String> {
    let dtype = DTYPES.iter().find(|(dtype, _)| *dtype == view.dtype());
    let (_, dtype) = dtype.ok_or_else(|| format!("{file}: {name} has type {:?}", view.dtype()))?;
    let data = TensorData::from_bytes_vec(view.data().to_vec(), view.shape().to_vec(), *dtype);
    Ok((name, data))
}

/// The types that safetensors and Burn share.
const DTYPES: [(Dtype, DType); 12] = [
    (Dtype::F64, DType::F64),
    (Dtype::F32, DType::F32),
    (Dtype::F16, DType::F16),
    (Dtype::BF16, DType::BF16),
    (Dtype::I64, DType::I64),
    (Dtype::I32, DType::I32),
    (Dtype::I16, DType::I16),
    (Dtype::I8, DType::I8),
    (Dtype::U64, DType::U64),
    (Dtype::U32, DType::U32),
    (Dtype::U16, DType::U16),
    (Dtype::U8, DType::U8),
];

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
