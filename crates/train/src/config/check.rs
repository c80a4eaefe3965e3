//! Conflicts between settings that are valid on their own.

use paceline_ddp::device::DeviceKind;

use super::TrainConfig;
use super::derive::kind;
use super::error::ConfigError;
use super::settings::Settings;
use super::value::{Source, Value};

/// Settings of the task `lm` alone.
const OF_LANGUAGE_MODELS: [&str; 8] = [
    "tokenizer",
    "vocab",
    "context",
    "layers",
    "heads",
    "width",
    "dropout",
    "recompute",
];

/// Refuses conflicting settings, with the conflict to fix first. `ranks` is the job's number if it differs from this
/// machine's.
pub(super) fn check(settings: &Settings, ranks: Option<u64>) -> Result<(), ConfigError> {
    let local = settings.count("nproc_per_node").unwrap_or(1);
    let ranks = ranks.unwrap_or(local);
    let source = &settings.need("nproc_per_node").source;
    let cited = format!("{ranks} ({source})");
    check_data(settings)?;
    check_model(settings)?;
    check_devices(settings, ranks, &cited)?;
    check_shares(settings, ranks, &cited)
}

fn check_data(settings: &Settings) -> Result<(), ConfigError> {
    let task = || settings.need("task").cite();
    let name = settings.word("task").unwrap_or_default();
    match settings.path("data") {
        Some(_) if name == "digits" => Err(ConfigError::DataUnused {
            task: task(),
            data: settings.need("data").cite(),
        }),
        None if !["digits", "lm"].contains(&name) => Err(ConfigError::NoData { task: task() }),
        _ => Ok(()),
    }
}

fn check_model(settings: &Settings) -> Result<(), ConfigError> {
    let is_lm = settings.word("task") == Some("lm");
    let misfit = |key: &'static str, words| ConfigError::TaskMisfit {
        key,
        value: settings.need(key).cite(),
        task: settings.need("task").cite(),
        words,
    };
    if settings
        .word("model")
        .is_some_and(|model| model.starts_with("gpt") != is_lm)
    {
        let words = if is_lm {
            "gpt-1m, gpt-10m or gpt-124m"
        } else {
            "tiny, small or base"
        };
        return Err(misfit("model", Some(words)));
    }
    if !is_lm {
        let is_set = |key: &&'static str| settings.need(key).value != Value::Unset;
        return match OF_LANGUAGE_MODELS.into_iter().find(is_set) {
            Some(key) => Err(misfit(key, None)),
            None => Ok(()),
        };
    }
    let is_bpe = matches!(&settings.need("tokenizer").value, Value::Text(name) if name == "bpe");
    if settings.count("vocab").is_some() && !is_bpe {
        return Err(ConfigError::VocabWithoutBpe {
            vocab: settings.need("vocab").cite(),
        });
    }
    let config = TrainConfig::from_settings(settings);
    if config.recompute().is_none() {
        let setting = settings.need("recompute");
        return Err(ConfigError::BadValue {
            key: "recompute",
            value: setting.value.to_string(),
            origin: setting.source.to_string(),
            expected: "none, blocks, burn or a whole number from 1".to_owned(),
            nearest: None,
        });
    }
    let gpt = config.gpt(0);
    if !gpt.width.is_multiple_of(gpt.heads) {
        return Err(ConfigError::HeadsOfWidth {
            heads: gpt.heads,
            width: gpt.width,
        });
    }
    Ok(())
}

fn check_devices(settings: &Settings, ranks: u64, cited: &str) -> Result<(), ConfigError> {
    let cite = |key| settings.need(key).cite();
    let gpus = settings.count("use_gpu");
    if settings.word("strategy") == Some("single") && ranks != 1 {
        return Err(ConfigError::SingleWithRanks {
            strategy: cite("strategy"),
            ranks: cited.to_owned(),
        });
    }
    if gpus != Some(0) && kind(settings) == Some(DeviceKind::Cpu) {
        return Err(ConfigError::CpuWithGpus {
            device: cite("device"),
            gpus: cite("use_gpu"),
        });
    }
    if gpus != Some(0) && gpus != settings.count("nproc_per_node") {
        return Err(ConfigError::GpusAndRanksDiffer {
            gpus: cite("use_gpu"),
            ranks: cite("nproc_per_node"),
        });
    }
    Ok(())
}

fn check_shares(settings: &Settings, ranks: u64, cited: &str) -> Result<(), ConfigError> {
    let cite = |key| settings.need(key).cite();
    let count = |key| settings.count(key).unwrap_or(0);
    let (batch, shards) = (count("global_batch"), count("shards"));
    if batch < shards {
        return Err(ConfigError::BatchBelowShards {
            global_batch: cite("global_batch"),
            shards: cite("shards"),
        });
    }
    // Cannot overflow: the table bounds both factors.
    if batch < shards * count("accumulate") {
        return Err(ConfigError::BatchBelowParts {
            global_batch: cite("global_batch"),
            shards: cite("shards"),
            accumulate: cite("accumulate"),
        });
    }
    if shards < ranks {
        return Err(ConfigError::ShardsBelowRanks {
            shards: cite("shards"),
            ranks: cited.to_owned(),
        });
    }
    Ok(())
}

/// A warning for each setting without effect, because other settings rule it out or a launcher decides.
pub(super) fn unused_settings(settings: &Settings, is_rank: bool) -> Vec<String> {
    let not_csv = settings.word("task") != Some("csv");
    let single = settings.word("strategy") == Some("single");
    let launcher = "this process is one rank of a job, whose launcher decides";
    let pointless = [
        ("max_restarts", is_rank, launcher),
        ("usage", is_rank, launcher),
        ("usage_json", is_rank, launcher),
        ("usage_csv", is_rank, launcher),
        ("usage_svg", is_rank, launcher),
        ("lang", is_rank, launcher),
        ("label_column", not_csv, "the task has no columns"),
        ("transport", single, "strategy single has one rank"),
        ("wire", single, "strategy single has one rank"),
        ("zero", single, "strategy single has one rank"),
        ("bucket_cap_mb", single, "strategy single has one rank"),
        ("fingerprint_every", single, "strategy single has one rank"),
    ];
    pointless
        .into_iter()
        .filter(|(_, applies, _)| *applies)
        .filter_map(|(key, _, why)| {
            let setting = settings.need(key);
            let was_set = !matches!(setting.source, Source::Default | Source::Run(_));
            (was_set && setting.value != Value::Unset)
                .then(|| format!("`{key}` is {} and has no effect: {why}", setting.cite()))
        })
        .collect()
}
