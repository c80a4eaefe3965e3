//! Settings derived from others or from the machine unless set.

use std::path::Path;
use std::time::SystemTime;

use paceline_ddp::device::{self, DeviceKind};
use time::OffsetDateTime;

use super::ModelSize;
use super::check::not_live;
use super::error::ConfigError;
use super::resolve::{JobShape, PathKind, Surroundings};
use super::settings::Settings;
use super::value::{Setting, Source, Value};
use crate::data::table::is_table;

/// Most ranks that `auto` starts; a number can request more.
const AUTO_RANKS_MAX: u64 = 2;

/// Steps between two states to go back to. PaLM went back some 100 steps before a spike of the loss.
const BACK_STEPS: u64 = 100;

/// Side of images, in pixels, from which on they are cropped and classified as ImageNet's.
const LARGE_IMAGES: u64 = 64;

/// Devices of one rank, if GPUs are not asked for.
const LOCAL_DEVICES: u64 = 2;

/// Sets the task if it is not set: the data's task, or the built-in one.
pub(super) fn task(
    settings: &mut Settings,
    path_kind: fn(&Path) -> PathKind,
) -> Result<(), ConfigError> {
    if settings.get("task").is_some() {
        return Ok(());
    }
    let (task, note) = match settings.path("data") {
        None => ("digits", None),
        Some(path) => {
            let task = guess_task(path, path_kind(path)).map_err(|why| {
                let data = settings.need("data").cite();
                ConfigError::new(
                    format!("cannot tell the task from `data` {data}: {why}"),
                    "name the task: --task idx, csv, images or lm",
                )
            })?;
            (task, Some("guessed from data"))
        }
    };
    settings.set_default("task", task, note);
    Ok(())
}

/// Sets what stands for the model of a user's program, and for its task if it has data of its own, where nothing reads them: they have a
/// value in every job.
pub(super) fn of_program(settings: &mut Settings) {
    let Some(program) = &settings.program else {
        return;
    };
    let reads_data = program.reads_data;
    settings.set_default("model", "small", None);
    if !reads_data {
        settings.set_default("task", "digits", None);
        settings.set_default("random_crop", "none", None);
    }
}

/// Sets the settings whose default depends on the task.
pub(super) fn of_task(settings: &mut Settings) {
    let image_size = settings.count("image_size");
    let is_large = |size| size >= LARGE_IMAGES;
    let (model, batch) = match settings.word("task") {
        Some("lm") => ("gpt-1m", 8_u64),
        Some("images") if image_size.is_some_and(is_large) => ("resnet18", 64),
        Some("images") => ("resnet20", 64),
        _ => ("small", 64),
    };
    settings.set_default("model", model, None);
    settings.set_default("global_batch", batch, None);
    let model = settings.word("model").map(|word| word.into());
    let model = model.and_then(|word| serde_json::from_value::<ModelSize>(word).ok());
    let is_for_large = model.is_some_and(ModelSize::is_of_large_images);
    let crop = match image_size.map_or(is_for_large, is_large) {
        true => "resized",
        false => "pad",
    };
    settings.set_default("random_crop", crop, None);
}

/// Sets the weight decay if it is not set, to PyTorch's default of the optimizer.
pub(super) fn of_optimizer(settings: &mut Settings) {
    let decay = match settings.word("optimizer") {
        Some("sgd") => 0.0,
        _ => 0.01,
    };
    settings.set_default("weight_decay", Value::Number(decay), None);
}

/// The task for data of this kind, or why it is unclear.
fn guess_task(path: &Path, kind: PathKind) -> Result<&'static str, &'static str> {
    match kind {
        PathKind::ImageFolder => Ok("images"),
        PathKind::Folder => Ok("idx"),
        // Even a missing file: the error is then that it is missing.
        PathKind::File | PathKind::Missing if is_table(path) => Ok("csv"),
        PathKind::File => {
            Err("it is a file, but not called .csv, .tsv, .jsonl, .ndjson or .parquet")
        }
        PathKind::Missing => Err("there is no such file or folder"),
    }
}

/// Sets the device if it is `auto`.
pub(super) fn device(settings: &mut Settings, machine: &Surroundings) {
    if settings.word("device") != Some("auto") {
        return;
    }
    let wants_gpu = settings.count("use_gpu").is_some_and(|gpus| gpus > 0);
    let kind = device::auto(wants_gpu, &machine.survey);
    let note = match wants_gpu {
        true => "auto: the best kind of GPU found or built in",
        false => "auto: no GPU requested",
    };
    settings.choose("device", kind.name(), note);
}

/// The kind of device, once resolved.
pub(super) fn kind(settings: &Settings) -> Option<DeviceKind> {
    settings.word("device")?.parse().ok()
}

/// Sets the ranks of this machine to those that a launcher started, with a warning if the setting differs.
pub(super) fn place(settings: &mut Settings, job: JobShape) -> Option<String> {
    let asked = settings.need("nproc_per_node");
    let value = Value::Count(job.local_world as u64);
    let was_set = matches!(asked.value, Value::Count(_)) && !matches!(asked.source, Source::Run(_));
    let warning = (was_set && asked.value != value).then(|| {
        format!(
            "`nproc_per_node` is {} and has no effect: the launcher has started {value} on this machine",
            asked.cite()
        )
    });
    settings.set("nproc_per_node", Setting::new(value, Source::Launcher));
    warning
}

/// Sets ranks, shards and the run directory if they are not set. `ranks` is the job's number if it differs from this
/// machine's.
pub(super) fn numbers_and_names(
    settings: &mut Settings,
    machine: &Surroundings,
    ranks: Option<u64>,
) {
    // A resumed run has as many replicas as its ranks make now.
    if matches!(settings.need("dp").source, Source::Run(_)) {
        settings.choose("dp", "auto", "the ranks of now");
    }
    if settings.word("nproc_per_node") == Some("auto") {
        let (ranks, note) = auto_ranks(settings, machine);
        settings.choose("nproc_per_node", ranks, note);
    }
    let gpus = settings.count("use_gpu").filter(|gpus| *gpus > 0);
    let devices = gpus.unwrap_or(LOCAL_DEVICES);
    settings.set_default("devices", devices, None);
    if settings.word("strategy") == Some("dp") {
        let devices = settings.need("devices").value.clone();
        settings.set_default("shards", devices, Some("one per replica"));
    }
    let ranks = ranks.or(settings.count("nproc_per_node")).unwrap_or(1);
    let (shards, note) = match replica_ranks(settings, ranks) {
        1 => (ranks, "one per rank"),
        of_replica => ((ranks / of_replica).max(1), "one per replica"),
    };
    settings.set_default("shards", shards, Some(note));
    if settings.word("dp") == Some("auto") {
        let replicas = (ranks / replica_ranks(settings, ranks)).max(1);
        settings.choose("dp", replicas, "auto: as many as the ranks make");
    }
    let (name, note) = match &settings.program {
        Some(program) => (&*program.name, "program and start, UTC"),
        None => {
            let task = settings.word("task").unwrap_or_default();
            (task, "task and start, UTC")
        }
    };
    let path = Path::new("runs").join(format!("{name}-{}", stamp(machine.now)));
    settings.set_default("run_dir", Value::Path(path), Some(note));
}

/// Sets what happens when a rank is lost, if it is `auto` or if the resumed run's way is no longer possible.
pub(super) fn recovery(settings: &mut Settings, job: Option<JobShape>, ranks: Option<u64>) {
    let is_of_run = matches!(settings.need("recovery").source, Source::Run(_));
    let is_open = match settings.word("recovery") {
        Some("auto") => true,
        Some("live") => is_of_run,
        _ => false,
    };
    if !is_open {
        return;
    }
    let ranks = ranks.or(settings.count("nproc_per_node")).unwrap_or(1);
    let (how, why) = match not_live(settings) {
        Some(key) => {
            let (flag, value) = (key.replace('_', "-"), &settings.need(key).value);
            ("restart", format!("not live with --{flag} {value}"))
        }
        None if ranks == 1 => ("restart", "one rank".to_owned()),
        None if job.is_some_and(|job| !job.recovers_live) => {
            ("restart", "as the launcher".to_owned())
        }
        None if is_of_run => return,
        None if kind(settings) != Some(DeviceKind::Cpu) => {
            let device = &settings.need("device").value;
            ("restart", format!("live costs time with --device {device}"))
        }
        None => ("live", "replicas on the CPU".to_owned()),
    };
    settings.choose("recovery", how, &format!("auto: {why}"));
}

/// Sets how often the state is kept in memory if the job is to go back to it and the setting is left open.
pub(super) fn snapshots(settings: &mut Settings) {
    let is_open = settings.need("snapshot_every").source == Source::Default;
    if is_open && settings.word("non_finite") == Some("back") {
        settings.choose("snapshot_every", BACK_STEPS, "as `non_finite` is back");
    }
}

/// The ranks of a replica: all that share the stages of `pp` and the parts of `tp`.
pub(super) fn replica_ranks(settings: &Settings, ranks: u64) -> u64 {
    let stages = settings.count("pp").unwrap_or(1);
    if let Some(replicas) = settings.count("dp") {
        return (ranks / replicas).max(1);
    }
    let of_stage = (ranks / stages).max(1);
    stages * settings.count("tp").map_or(1, |parts| parts.min(of_stage))
}

/// The least number of ranks that a run's resolved settings can be of, with those of several machines: `nproc_per_node` is one's.
pub(super) fn ranks_of_run(settings: &Settings) -> Option<u64> {
    let count = |key| settings.count(key).unwrap_or(1);
    let (pipelines, parts) = (count("dp") * count("pp"), count("tp"));
    let shares = (1..=parts).filter(|share| parts.is_multiple_of(*share));
    let mut ranks = shares.map(|share| pipelines * share);
    ranks.find(|ranks| *ranks >= count("nproc_per_node"))
}

/// Whether so many parts can be on so many ranks: each rank has several, or several replicas have one for each rank.
pub(super) fn parts_fit(parts: u64, ranks: u64) -> bool {
    parts.is_multiple_of(ranks) || ranks.is_multiple_of(parts)
}

/// The number of ranks for `auto`, and the reason.
///
/// Gives every rank a shard and every shard a sample.
fn auto_ranks(settings: &Settings, machine: &Surroundings) -> (u64, &'static str) {
    let gpus = settings.count("use_gpu").unwrap_or(0);
    match settings.word("strategy") {
        Some("single") => return (1, "auto: strategy single"),
        Some("dp" | "model") => return (1, "auto: the strategy has one rank"),
        _ => {}
    }
    if gpus > 0 {
        return (gpus, "auto: one per GPU");
    }
    let stages = settings.count("pp").unwrap_or(1);
    let parts = settings.count("tp");
    if let Some(replicas) = settings.count("dp") {
        // Cannot overflow: the table bounds all three.
        let ranks = replicas * stages * parts.unwrap_or(1);
        return (ranks, "auto: the ranks of `dp`, `pp` and `tp`");
    }
    let (wanted, note) = match kind(settings).filter(|kind| kind.is_gpu()) {
        Some(kind) => match (machine.survey)(kind) {
            Ok(found) => (found.count as u64, "auto: one per GPU"),
            // The device check reports what is missing.
            Err(_) => (1, "auto: one per GPU, and none was found"),
        },
        None => (
            (machine.cores as u64).clamp(1, AUTO_RANKS_MAX),
            "auto: one per core, at most two",
        ),
    };
    if let Some(parts) = parts {
        // One rank always fits.
        let mut fitting = (1..=wanted / stages).rev();
        let fitting = fitting.find(|ranks| parts_fit(parts, *ranks));
        let note = match stages {
            1 => note,
            _ => "auto: as many for each stage as share its parts",
        };
        return (stages * fitting.unwrap_or(1), note);
    }
    if stages > 1 {
        return (stages, "auto: one per stage");
    }
    let shards = settings
        .count("shards")
        .or_else(|| batch_parts(settings))
        .unwrap_or(wanted);
    if shards < wanted {
        (shards.max(1), "auto: limited by the batch")
    } else {
        (wanted, note)
    }
}

/// Shards that the global batch can be cut into.
fn batch_parts(settings: &Settings) -> Option<u64> {
    Some(settings.count("global_batch")? / settings.count("accumulate")?)
}

/// A time in UTC as a name that sorts by time: `20261121-093005`.
fn stamp(now: SystemTime) -> String {
    let now = OffsetDateTime::from(now);
    format!(
        "{:04}{:02}{:02}-{:02}{:02}{:02}",
        now.year(),
        u8::from(now.month()),
        now.day(),
        now.hour(),
        now.minute(),
        now.second()
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_task_is_guessed_from_what_lies_at_the_path() {
        let check = |path: &str, kind, expect: Result<&str, &str>| {
            assert_eq!(guess_task(Path::new(path), kind), expect, "{path} {kind:?}");
        };
        check("mnist", PathKind::Folder, Ok("idx"));
        check("odd.csv", PathKind::Folder, Ok("idx"));
        check("flowers", PathKind::ImageFolder, Ok("images"));
        check("wine.csv", PathKind::File, Ok("csv"));
        check("WINE.CSV", PathKind::File, Ok("csv"));
        check("wine.tsv", PathKind::File, Ok("csv"));
        check("wine.jsonl.gz", PathKind::File, Ok("csv"));
        check("wine.ndjson", PathKind::Missing, Ok("csv"));
        check("wine.parquet", PathKind::File, Ok("csv"));
        check("wine.csv", PathKind::Missing, Ok("csv"));
        check(
            "wine.txt",
            PathKind::File,
            Err("it is a file, but not called .csv, .tsv, .jsonl, .ndjson or .parquet"),
        );
        check(
            "wine",
            PathKind::Missing,
            Err("there is no such file or folder"),
        );
    }

    #[test]
    fn a_stamp_sorts_by_time() {
        let at = |seconds| stamp(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "19700101-000000");
        assert_eq!(at(951_782_399), "20000228-235959");
        assert_eq!(at(1_795_253_405), "20261121-093005");
    }
}
