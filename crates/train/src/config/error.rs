//! What can be wrong with settings, in words for the person who wrote them.

use std::path::{Path, PathBuf};

use super::resume::ResumeConflict;
use super::table::{OPTIONS, OptionRow};

/// Why the settings of a job cannot be used. All of them are the user's to correct: exit code 2.
///
/// Values are quoted as they were written, with their source.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file of settings cannot be read.
    #[error("cannot read the settings in {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file of settings is not TOML.
    #[error("{}:{line}:{column}: not valid TOML: {message}", path.display())]
    NotToml {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// In characters, counted from 1.
        column: usize,
        /// What the parser said.
        message: String,
    },
    /// There is no such setting.
    #[error("unknown setting `{key}` ({origin})")]
    UnknownKey {
        /// The name as written.
        key: String,
        /// Where.
        origin: String,
        /// The known name that is most like it.
        nearest: Option<&'static str>,
    },
    /// The value has the wrong type or is out of range.
    #[error("invalid value `{value}` for `{key}` ({origin}): expected {expected}")]
    BadValue {
        /// The setting.
        key: &'static str,
        /// The value as written.
        value: String,
        /// Where.
        origin: String,
        /// What the value must look like.
        expected: String,
        /// The known word that is most like the value.
        nearest: Option<&'static str>,
    },
    /// The task reads data, and none was named.
    #[error("task {task} needs `data`")]
    NoData {
        /// The task and its source.
        task: String,
    },
    /// The built-in data would be used, and other data was named.
    #[error("task {task} has its data built in, but `data` is {data}")]
    DataUnused {
        /// The task and its source.
        task: String,
        /// The path and its source.
        data: String,
    },
    /// No task was named, and the data does not tell.
    #[error("cannot tell the task from `data` {data}: {why}")]
    TaskUnclear {
        /// The path and its source.
        data: String,
        /// What the path is.
        why: &'static str,
    },
    /// Some shard would have no sample.
    #[error("global batch {global_batch} is smaller than shards {shards}")]
    BatchBelowShards {
        /// The global batch and its source.
        global_batch: String,
        /// The shards and their source.
        shards: String,
    },
    /// Some part of a shard would have no sample.
    #[error(
        "global batch {global_batch} is smaller than shards {shards} times accumulate {accumulate}"
    )]
    BatchBelowParts {
        /// The global batch and its source.
        global_batch: String,
        /// The shards and their source.
        shards: String,
        /// The parts of a shard and their source.
        accumulate: String,
    },
    /// Some rank would have no shard.
    #[error("shards {shards} are fewer than ranks {ranks}")]
    ShardsBelowRanks {
        /// The shards and their source.
        shards: String,
        /// The ranks and their source.
        ranks: String,
    },
    /// One rank without others was asked for, and others as well.
    #[error("strategy {strategy} is one rank, but the job has {ranks}")]
    SingleWithRanks {
        /// The strategy and its source.
        strategy: String,
        /// The ranks and their source.
        ranks: String,
    },
    /// GPUs were asked for, and the CPU as well.
    #[error("device {device} has no GPUs, but `use_gpu` is {gpus}")]
    CpuWithGpus {
        /// The device and its source.
        device: String,
        /// The GPUs and their source.
        gpus: String,
    },
    /// A rank trains on one device.
    #[error("`use_gpu` {gpus} and `nproc_per_node` {ranks} differ: every rank has one GPU")]
    GpusAndRanksDiffer {
        /// The GPUs and their source.
        gpus: String,
        /// The ranks and their source.
        ranks: String,
    },
    /// A run is gone on with in its own folder.
    #[error("cannot resume {} in another folder: `run_dir` is {run_dir}", run.display())]
    RunDirDiffers {
        /// The run.
        run: PathBuf,
        /// The other folder and its source.
        run_dir: String,
    },
    /// Which run to go on with, or where to begin one, is not said.
    #[error("`resume` {resume} needs `run_dir`")]
    AutoWithoutRunDir {
        /// The setting and its source.
        resume: String,
    },
    /// Settings differ that a run keeps for its life.
    #[error("cannot resume {} with other settings{}", run.display(), bullets(conflicts))]
    ResumeConflicts {
        /// The run.
        run: PathBuf,
        /// Each of them.
        conflicts: Vec<ResumeConflict>,
    },
    /// The saved settings of a run lack one.
    #[error("{} lacks `{key}`", path.display())]
    SavedIncomplete {
        /// The file.
        path: PathBuf,
        /// What it lacks.
        key: &'static str,
    },
    /// The saved settings of a run leave one open.
    #[error("`{key}` is {value} ({}), which a job cannot start from", path.display())]
    SavedUnresolved {
        /// The file.
        path: PathBuf,
        /// The setting.
        key: &'static str,
        /// What stands there.
        value: String,
    },
}

impl ConfigError {
    /// What to do about it, where that is known.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Unreadable { .. } | Self::NotToml { .. } => return None,
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

fn bullets(conflicts: &[ResumeConflict]) -> String {
    conflicts
        .iter()
        .map(|conflict| format!("\n  {conflict}"))
        .collect()
}

/// Names that people bring from other tools, which no spelling distance would find.
const SYNONYMS: [(&str, &str); 7] = [
    ("batch_size", "global_batch"),
    ("learning_rate", "lr"),
    ("gpus", "use_gpu"),
    ("accelerator", "device"),
    ("nproc", "nproc_per_node"),
    ("num_workers", "workers"),
    ("gradient_clipping", "clip_norm"),
];

/// The known key that is most like an unknown one.
pub(super) fn nearest_key(unknown: &str) -> Option<&'static str> {
    let unknown = unknown.to_lowercase().replace('-', "_");
    let synonym = SYNONYMS.iter().find(|(name, _)| *name == unknown);
    synonym
        .map(|(_, key)| *key)
        .or_else(|| nearest(&unknown, OPTIONS.iter().map(|row| row.key)))
}

/// The most similar name, if a slip of the fingers explains the difference: an edit for every three letters.
fn nearest(unknown: &str, known: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    known
        .map(|name| (strsim::damerau_levenshtein(unknown, name), name))
        .filter(|(edits, name)| *edits <= name.len().div_ceil(3))
        .min()
        .map(|(_, name)| name)
}
