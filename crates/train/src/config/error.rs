//! Mistakes in settings, in words for the person who wrote them.

use std::path::{Path, PathBuf};

use super::table::{OPTIONS, OptionRow};

/// Why the settings of a job cannot be used. All of them are the user's to correct: exit code 2.
///
/// Values are quoted as they were written, with their source.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the message of a variant says what its fields are"
)]
pub enum ConfigError {
    /// The file of settings cannot be read.
    #[error("cannot read the settings in {}: {source}", path.display())]
    Unreadable {
        path: PathBuf,
        source: std::io::Error,
    },
    /// The file of settings is not TOML.
    #[error("{}:{line}:{column}: not valid TOML: {message}", path.display())]
    NotToml {
        path: PathBuf,
        line: usize,
        column: usize,
        message: String,
    },
    /// The file names a setting and gives it no value.
    #[error("{}:{line}: `{key}` has no value", path.display())]
    NoValue {
        path: PathBuf,
        line: usize,
        key: String,
    },
    /// A table in the file, where settings do not stand.
    #[error("unknown table `[{table}]` ({origin}): settings do not stand in tables")]
    InTable { table: String, origin: String },
    /// There is no such setting.
    #[error("unknown setting `{key}` ({origin})")]
    UnknownKey {
        key: String,
        origin: String,
        nearest: Option<&'static str>,
    },
    /// The value has the wrong type or is out of range.
    #[error("invalid value `{value}` for `{key}` ({origin}): expected {expected}")]
    BadValue {
        key: &'static str,
        value: String,
        origin: String,
        expected: String,
        nearest: Option<&'static str>,
    },
    /// The task reads data, and none was named.
    #[error("task {task} needs `data`")]
    NoData { task: String },
    /// The built-in data would be used, and other data was named.
    #[error("task {task} has its data built in, but `data` is {data}")]
    DataUnused { task: String, data: String },
    /// No task was named, and the data does not tell.
    #[error("cannot tell the task from `data` {data}: {why}")]
    TaskUnclear { data: String, why: &'static str },
    /// Some shard would have no sample.
    #[error("global batch {global_batch} is smaller than shards {shards}")]
    BatchBelowShards {
        global_batch: String,
        shards: String,
    },
    /// Some part of a shard would have no sample.
    #[error(
        "global batch {global_batch} is smaller than shards {shards} times accumulate {accumulate}"
    )]
    BatchBelowParts {
        global_batch: String,
        shards: String,
        accumulate: String,
    },
    /// Some rank would have no shard.
    #[error("shards {shards} are fewer than ranks {ranks}")]
    ShardsBelowRanks { shards: String, ranks: String },
    /// One rank without others was asked for, and others as well.
    #[error("strategy {strategy} is one rank, but the job has {ranks}")]
    SingleWithRanks { strategy: String, ranks: String },
    /// GPUs were asked for, and the CPU as well.
    #[error("device {device} has no GPUs, but `use_gpu` is {gpus}")]
    CpuWithGpus { device: String, gpus: String },
    /// A rank trains on one device.
    #[error("`use_gpu` {gpus} and `nproc_per_node` {ranks} differ: every rank has one GPU")]
    GpusAndRanksDiffer { gpus: String, ranks: String },
    /// A run is gone on with in its own folder.
    #[error("cannot resume {} in another folder: `run_dir` is {run_dir}", run.display())]
    RunDirDiffers { run: PathBuf, run_dir: String },
    /// Which run to go on with, or where to begin one, is not said.
    #[error("`resume` {resume} needs `run_dir`")]
    AutoWithoutRunDir { resume: String },
    /// Settings differ that a run keeps for its life.
    #[error("cannot resume {} with other settings{}", run.display(), bullets(conflicts))]
    ResumeConflicts {
        run: PathBuf,
        conflicts: Vec<String>,
    },
    /// The saved settings of a run lack one.
    #[error("{} lacks `{key}`", path.display())]
    SavedIncomplete { path: PathBuf, key: &'static str },
    /// The saved settings of a run leave one open.
    #[error("`{key}` is {value} ({}), which a job cannot start from", path.display())]
    SavedUnresolved {
        path: PathBuf,
        key: &'static str,
        value: String,
    },
}

impl ConfigError {
    /// What to do about it, where that is known.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Unreadable { .. } | Self::NotToml { .. } => return None,
            Self::NoValue { key, .. } => match super::option(key) {
                Some(row) => format!("give it one, or remove the line; {}", about(row)),
                None => "give it one, or remove the line".to_owned(),
            },
            Self::InTable { table, .. } => format!("remove the line `[{table}]`"),
            Self::UnknownKey { nearest, .. } => nearest.map_or_else(
                || "`paceline train --help` lists the settings".to_owned(),
                did_you_mean,
            ),
            Self::BadValue { key, nearest, .. } => match nearest {
                Some(word) => did_you_mean(word),
                None => return super::option(key).map(about),
            },
            Self::NoData { .. } => "name the IDX folder or the CSV file with --data".to_owned(),
            Self::DataUnused { .. } => {
                "leave out --task to have it guessed, or leave out --data".to_owned()
            }
            Self::TaskUnclear { .. } => "say what it is: --task idx or --task csv".to_owned(),
            Self::BatchBelowShards { .. } => {
                "every shard needs a sample: raise --global-batch or lower --shards".to_owned()
            }
            Self::BatchBelowParts { .. } => {
                "every part of a shard needs a sample: raise --global-batch or lower --accumulate"
                    .to_owned()
            }
            Self::ShardsBelowRanks { .. } => {
                "every rank needs a shard: lower --nproc-per-node, or raise --shards in a new run"
                    .to_owned()
            }
            Self::SingleWithRanks { .. } => {
                "use --strategy ddp for several ranks, or --nproc-per-node auto".to_owned()
            }
            Self::CpuWithGpus { .. } => {
                "leave out --device to train on GPUs, or use --use-gpu 0 to train on the CPU"
                    .to_owned()
            }
            Self::GpusAndRanksDiffer { .. } => {
                "use --nproc-per-node auto, which is one rank per GPU".to_owned()
            }
            Self::RunDirDiffers { .. } => {
                "leave `run_dir` out: a run goes on in its own folder".to_owned()
            }
            Self::AutoWithoutRunDir { .. } => {
                "name the folder to begin or to go on in: --run-dir DIR".to_owned()
            }
            Self::ResumeConflicts { .. } => {
                "leave them out to go on as the run began, or start a new run without --resume"
                    .to_owned()
            }
            Self::SavedIncomplete { .. } | Self::SavedUnresolved { .. } => {
                "the file is damaged: restore it, or start a new run".to_owned()
            }
        };
        Some(hint)
    }

    pub(super) fn unreadable(path: &Path, source: std::io::Error) -> Self {
        Self::Unreadable {
            path: path.to_owned(),
            source,
        }
    }

    pub(super) fn unknown_key(key: &str, origin: String) -> Self {
        Self::UnknownKey {
            key: key.to_owned(),
            origin,
            nearest: nearest_key(key),
        }
    }

    pub(super) fn bad_value(row: &'static OptionRow, value: &str, origin: String) -> Self {
        Self::BadValue {
            key: row.key,
            value: value.to_owned(),
            origin,
            expected: row.kind.expected(),
            nearest: nearest(value.trim_matches('"'), row.kind.words().iter().copied()),
        }
    }
}

paceline_rendezvous::debug_with_hint!(ConfigError);

fn did_you_mean(name: &str) -> String {
    format!("did you mean `{name}`?")
}

fn about(row: &'static OptionRow) -> String {
    format!(
        "`{}`: {} [default: {}]",
        row.key,
        row.help,
        row.fallback_text()
    )
}

fn bullets(conflicts: &[String]) -> String {
    conflicts
        .iter()
        .map(|conflict| format!("\n  {conflict}"))
        .collect()
}

/// Names of other tools that no spelling distance would find.
const SYNONYMS: [(&str, &str); 15] = [
    ("batch_size", "global_batch"),
    ("train_batch_size", "global_batch"),
    ("per_device_train_batch_size", "global_batch"),
    ("learning_rate", "lr"),
    ("num_epochs", "epochs"),
    ("max_epochs", "epochs"),
    ("num_train_epochs", "epochs"),
    ("output_dir", "run_dir"),
    ("log_dir", "run_dir"),
    ("dataset", "data"),
    ("gpus", "use_gpu"),
    ("accelerator", "device"),
    ("nproc", "nproc_per_node"),
    ("num_workers", "workers"),
    ("gradient_clipping", "clip_norm"),
];

/// The setting that other tools call by this name.
#[must_use]
pub fn synonym(name: &str) -> Option<&'static OptionRow> {
    let name = name.to_lowercase().replace('-', "_");
    let (_, key) = SYNONYMS.iter().find(|(other, _)| *other == name)?;
    super::option(key)
}

/// The known key that is most like an unknown one.
pub(super) fn nearest_key(unknown: &str) -> Option<&'static str> {
    let like = || {
        let unknown = unknown.to_lowercase().replace('-', "_");
        nearest(&unknown, OPTIONS.iter().map(|row| row.key))
    };
    synonym(unknown).map(|row| row.key).or_else(like)
}

/// The most similar name, if a slip of the fingers explains the difference: an edit for every three letters.
fn nearest(unknown: &str, known: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    known
        .map(|name| (strsim::damerau_levenshtein(unknown, name), name))
        .filter(|(edits, name)| *edits <= name.len().div_ceil(3))
        .min()
        .map(|(_, name)| name)
}
