//! Errors in settings, for the person who wrote them.

use std::path::{Path, PathBuf};

use paceline_rendezvous::env;

use super::table::{OPTIONS, OptionRow};

/// Why the settings of a job cannot be used. The user can correct all of them: exit code 2.
///
/// Values are quoted as they were written, with their source.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the message of a variant says what its fields are"
)]
pub enum ConfigError {
    /// The settings file cannot be read.
    #[error("cannot read the settings in {}: {source}", path.display())]
    Unreadable {
        path: PathBuf,
        source: std::io::Error,
    },
    /// The settings file is not TOML.
    #[error("{}:{line}:{column}: not valid TOML: {message}", path.display())]
    NotToml {
        path: PathBuf,
        line: usize,
        column: usize,
        message: String,
    },
    /// A setting in the file has no value.
    #[error("{}:{line}: `{key}` has no value", path.display())]
    NoValue {
        path: PathBuf,
        line: usize,
        key: String,
    },
    /// The file has a table.
    #[error("unknown table `[{table}]` ({origin}): settings are top-level keys")]
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
    /// The task needs data, but none is set.
    #[error("task {task} needs `data`")]
    NoData { task: String },
    /// The task uses built-in data, but other data is set.
    #[error("task {task} uses built-in data, but `data` is {data}")]
    DataUnused { task: String, data: String },
    /// The task has no such setting, or not with this value.
    #[error("`{key}` is {value}, but task {task} has {}", words.unwrap_or("no such setting"))]
    TaskMisfit {
        key: &'static str,
        value: String,
        task: String,
        words: Option<&'static str>,
    },
    /// Only a tokenizer that is trained has a number of tokens to choose.
    #[error("`vocab` is {vocab}, but `tokenizer` is not bpe")]
    VocabWithoutBpe { vocab: String },
    /// Every head has the same share of the width.
    #[error("{heads} attention heads do not divide a width of {width}")]
    HeadsOfWidth { heads: usize, width: usize },
    /// No task is set, and the data does not determine it.
    #[error("cannot tell the task from `data` {data}: {why}")]
    TaskUnclear { data: String, why: &'static str },
    /// Some shard would have no sample.
    #[error("global batch {global_batch} is smaller than shards {shards}")]
    BatchBelowShards {
        global_batch: String,
        shards: String,
    },
    /// Some micro-batch would have no sample.
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
    /// The strategy uses one rank, but more are set.
    #[error("strategy {strategy} uses one rank, but the job has {ranks}")]
    SingleWithRanks { strategy: String, ranks: String },
    /// Both GPUs and the CPU are set.
    #[error("device {device} has no GPUs, but `use_gpu` is {gpus}")]
    CpuWithGpus { device: String, gpus: String },
    /// A rank trains on one device.
    #[error("`use_gpu` {gpus} and `nproc_per_node` {ranks} differ: every rank has one GPU")]
    GpusAndRanksDiffer { gpus: String, ranks: String },
    /// A run can only be resumed in its own folder.
    #[error("cannot resume {} in another folder: `run_dir` is {run_dir}", run.display())]
    RunDirDiffers { run: PathBuf, run_dir: String },
    /// The folder of the run to resume or begin is not set.
    #[error("`resume` {resume} needs `run_dir`")]
    AutoWithoutRunDir { resume: String },
    /// Settings that a run keeps for its life differ.
    #[error("cannot resume {} with other settings{}", run.display(), bullets(conflicts))]
    ResumeConflicts {
        run: PathBuf,
        conflicts: Vec<String>,
    },
    /// The saved settings of a run lack a setting.
    #[error("{} lacks `{key}`", path.display())]
    SavedIncomplete { path: PathBuf, key: &'static str },
    /// A saved setting of a run is not resolved.
    #[error("`{key}` is {value} ({}), but saved settings must be resolved", path.display())]
    SavedUnresolved {
        path: PathBuf,
        key: &'static str,
        value: String,
    },
}

impl ConfigError {
    /// Advice, if there is any.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Unreadable { .. } | Self::NotToml { .. } => return None,
            Self::NoValue { key, .. } => match super::option(key) {
                Some(row) => format!("add a value, or remove the line; {}", about(row)),
                None => "add a value, or remove the line".to_owned(),
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
                "omit --task to guess it from the data, or omit --data".to_owned()
            }
            Self::TaskMisfit { key, words, .. } => match words {
                Some(_) => format!("omit --{key} for the default"),
                None => format!("omit --{key}, or add --task lm for a language model"),
            },
            Self::VocabWithoutBpe { .. } => "add --tokenizer bpe, or omit --vocab".to_owned(),
            Self::HeadsOfWidth { .. } => "choose --width as a multiple of --heads".to_owned(),
            Self::TaskUnclear { .. } => "name the task: --task idx, csv or lm".to_owned(),
            Self::BatchBelowShards { .. } => {
                "every shard needs a sample: raise --global-batch or lower --shards".to_owned()
            }
            Self::BatchBelowParts { .. } => {
                "every micro-batch needs a sample: raise --global-batch or lower --accumulate"
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
                "omit --device to train on GPUs, or use --use-gpu 0 to train on the CPU".to_owned()
            }
            Self::GpusAndRanksDiffer { .. } => {
                "use --nproc-per-node auto for one rank per GPU".to_owned()
            }
            Self::RunDirDiffers { .. } => {
                "omit `run_dir`: a run resumes in its own folder".to_owned()
            }
            Self::AutoWithoutRunDir { .. } => {
                "name the folder of the new or resumed run: --run-dir DIR".to_owned()
            }
            Self::ResumeConflicts { .. } => {
                "omit them to keep the run's settings, or start a new run without --resume"
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
            nearest: synonym(key).map(|row| row.key).or_else(|| {
                let key = key.to_lowercase().replace('-', "_");
                env::nearest(&key, OPTIONS.iter().map(|row| row.key))
            }),
        }
    }

    pub(super) fn bad_value(row: &'static OptionRow, value: &str, origin: String) -> Self {
        Self::BadValue {
            key: row.key,
            value: value.to_owned(),
            origin,
            expected: row.kind.expected(),
            nearest: env::nearest(value.trim_matches('"'), row.kind.words().iter().copied()),
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

/// Other tools' names, which edit distance would not find.
const SYNONYMS: [(&str, &str); 20] = [
    ("batch", "global_batch"),
    ("batch_size", "global_batch"),
    ("train_batch_size", "global_batch"),
    ("per_device_train_batch_size", "global_batch"),
    ("learning_rate", "lr"),
    ("num_epochs", "epochs"),
    ("max_epochs", "epochs"),
    ("num_train_epochs", "epochs"),
    ("output_dir", "run_dir"),
    ("log_dir", "run_dir"),
    ("checkpoint_dir", "run_dir"),
    ("ckpt_dir", "run_dir"),
    ("resume_from_checkpoint", "resume"),
    ("save_steps", "save_every"),
    ("dataset", "data"),
    ("gpus", "use_gpu"),
    ("accelerator", "device"),
    ("nproc", "nproc_per_node"),
    ("num_workers", "workers"),
    ("gradient_clipping", "clip_norm"),
];

/// The setting for another tool's name.
#[must_use]
pub fn synonym(name: &str) -> Option<&'static OptionRow> {
    let name = name.to_lowercase().replace('-', "_");
    let (_, key) = SYNONYMS.iter().find(|(other, _)| *other == name)?;
    super::option(key)
}
