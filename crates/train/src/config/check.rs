//! Settings that are each valid and do not go together.

use paceline_ddp::device::DeviceKind;

use super::derive::kind;
use super::error::ConfigError;
use super::settings::Settings;
use super::value::{Source, Value};

/// Refuses resolved settings that do not go together; of several reasons, the one to correct first.
pub(super) fn check(settings: &Settings) -> Result<(), ConfigError> {
    check_data(settings)?;
    check_devices(settings)?;
    check_shares(settings)
}

fn check_data(settings: &Settings) -> Result<(), ConfigError> {
    let task = || settings.need("task").cite();
    let built_in = settings.word("task") == Some("digits");
    match settings.path("data") {
        Some(_) if built_in => Err(ConfigError::DataUnused {
            task: task(),
            data: settings.need("data").cite(),
        }),
        None if !built_in => Err(ConfigError::NoData { task: task() }),
        _ => Ok(()),
    }
}

fn check_devices(settings: &Settings) -> Result<(), ConfigError> {
    let cite = |key| settings.need(key).cite();
    let ranks = settings.count("nproc_per_node");
    let gpus = settings.count("use_gpu");
    if settings.word("strategy") == Some("single") && ranks != Some(1) {
        return Err(ConfigError::SingleWithRanks {
            strategy: cite("strategy"),
            ranks: cite("nproc_per_node"),
        });
    }
    if gpus != Some(0) && kind(settings) == Some(DeviceKind::Cpu) {
        return Err(ConfigError::CpuWithGpus {
            device: cite("device"),
            gpus: cite("use_gpu"),
        });
    }
    if gpus != Some(0) && gpus != ranks {
        return Err(ConfigError::GpusAndRanksDiffer {
            gpus: cite("use_gpu"),
            ranks: cite("nproc_per_node"),
        });
    }
    Ok(())
}

fn check_shares(settings: &Settings) -> Result<(), ConfigError> {
    let cite = |key| settings.need(key).cite();
    let count = |key| settings.count(key).unwrap_or(0);
    let (batch, shards) = (count("global_batch"), count("shards"));
    if batch < shards {
        return Err(ConfigError::BatchBelowShards {
            global_batch: cite("global_batch"),
            shards: cite("shards"),
        });
    }
    // No overflow: the table bounds both factors.
    if batch < shards * count("accumulate") {
        return Err(ConfigError::BatchBelowParts {
            global_batch: cite("global_batch"),
            shards: cite("shards"),
            accumulate: cite("accumulate"),
        });
    }
    if shards < count("nproc_per_node") {
        return Err(ConfigError::ShardsBelowRanks {
            shards: cite("shards"),
            ranks: cite("nproc_per_node"),
        });
    }
    Ok(())
}

/// A warning for each setting that was set and that the others make pointless.
pub(super) fn unused_settings(settings: &Settings) -> Vec<String> {
    let not_csv = settings.word("task") != Some("csv");
    let single = settings.word("strategy") == Some("single");
    let pointless = [
        ("label_column", not_csv, "the task has no columns"),
        ("transport", single, "strategy single has one rank"),
        ("wire", single, "strategy single has one rank"),
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
