//! Conflicts between settings that are valid on their own.

use paceline_ddp::device::DeviceKind;
use paceline_ddp::{Backend, CommHook, Precision};

use super::derive::{kind, parts_fit, replica_ranks};
use super::error::ConfigError;
use super::settings::Settings;
use super::table::{NONE, Need, OptionRow};
use super::value::{Setting, Source, Value};
use super::{ClassWeights, ModelSize, NonFinite, Optimizer, Task, TrainConfig, Zero};
use crate::data::Features;
use crate::data::table::separator_named;
use crate::model::patch_side;
use crate::report::plural;

/// Refuses conflicting settings, with the conflict to fix first. `ranks` is the job's number if it differs from this
/// machine's.
pub(super) fn check(settings: &Settings, ranks: Option<u64>) -> Result<(), ConfigError> {
    let local = settings.count("nproc_per_node").unwrap_or(1);
    let ranks = ranks.unwrap_or(local);
    let source = &settings.need("nproc_per_node").source;
    let cited = format!("{ranks} ({source})");
    check_data(settings)?;
    check_store(settings)?;
    check_tracking(settings)?;
    check_model(settings)?;
    check_images(settings)?;
    check_learning(settings)?;
    check_table(settings)?;
    check_devices(settings, ranks, &cited)?;
    check_parts(settings, ranks, &cited)?;
    check_stages(settings, ranks, &cited)?;
    check_replicas(settings, ranks, &cited)?;
    check_hook(settings)?;
    check_recovery(settings)?;
    check_stragglers(settings, ranks)?;
    check_record(settings)?;
    check_snapshots(settings)?;
    check_shares(settings, ranks, &cited)
}

fn check_data(settings: &Settings) -> Result<(), ConfigError> {
    let task = settings.need("task").cite();
    let name = settings.word("task").unwrap_or_default();
    match settings.path("data") {
        Some(_) if name == "digits" => {
            let data = settings.need("data").cite();
            Err(ConfigError::new(
                format!("task {task} uses built-in data, but `data` is {data}"),
                "omit --task to guess it from the data, or omit --data",
            ))
        }
        None if !["digits", "lm"].contains(&name) => Err(ConfigError::new(
            format!("task {task} needs `data`"),
            "name the IDX folder, the table or the image folder with --data",
        )),
        _ => Ok(()),
    }
}

/// A folder of this machine is what other tools mean by this name.
fn check_store(settings: &Settings) -> Result<(), ConfigError> {
    match settings.word("checkpoint_dir") {
        Some(url) if !url.contains("://") => Err(ConfigError::new(
            format!(
                "`checkpoint_dir` is {}, which is not a URL",
                settings.need("checkpoint_dir").cite()
            ),
            "write s3://BUCKET/PATH, gs://BUCKET/PATH or file:///FOLDER; for a folder of this machine use --run-dir",
        )),
        _ => Ok(()),
    }
}

/// MLflow's own client takes a folder, a database, and a password in the URL too.
fn check_tracking(settings: &Settings) -> Result<(), ConfigError> {
    let Some(url) = settings.word("mlflow") else {
        return Ok(());
    };
    let rest = url.strip_prefix("http://").or(url.strip_prefix("https://"));
    let host = rest.and_then(|rest| rest.split('/').next());
    match host.filter(|host| !host.is_empty()) {
        Some(host) if host.contains('@') => Err(ConfigError::new(
            format!(
                "`mlflow` has a password in its URL ({})",
                settings.need("mlflow").source
            ),
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead: the run keeps its URL in a file",
        )),
        Some(_) => Ok(()),
        None => Err(ConfigError::new(
            format!(
                "`mlflow` is {}, which is not the URL of a server",
                settings.need("mlflow").cite()
            ),
            "write http://HOST:PORT; for a folder or a database start `mlflow server --backend-store-uri` with it",
        )),
    }
}

fn check_model(settings: &Settings) -> Result<(), ConfigError> {
    let cite = |key| settings.need(key).cite();
    let is_lm = settings.word("task") == Some("lm");
    if let Some(program) = &settings.program {
        return match is_lm {
            true => Err(ConfigError::new(
                format!(
                    "`task` is {}, but the model of {} is of labelled samples",
                    cite("task"),
                    program.name
                ),
                "choose --task digits, idx, csv or images",
            )),
            false => Ok(()),
        };
    }
    let misfit = |key, has: &str, hint| {
        let (value, task) = (cite(key), cite("task"));
        Err(ConfigError::new(
            format!("`{key}` is {value}, but task {task} has {has}"),
            hint,
        ))
    };
    let has_images = settings.word("task") != Some("csv");
    let models = match (is_lm, has_images) {
        (true, _) => "gpt-1m, gpt-10m or gpt-124m",
        (false, false) => "tiny, small or base",
        (false, true) => "tiny, small, base, resnet20, resnet18, resnet50 or vit-tiny",
    };
    let config = TrainConfig::from_settings(settings);
    if (settings.word("model")).is_some_and(|model| {
        model.starts_with("gpt") != is_lm || config.model.is_of_images() && !has_images
    }) {
        return misfit("model", models, "omit --model for the default".to_owned());
    }
    if !is_lm {
        let unfit = |need| {
            let mut all = settings.iter();
            all.find(|(row, setting)| row.needs == Some(need) && setting.value != Value::Unset)
        };
        if let Some((row, _)) = unfit(Need::LanguageModel) {
            let hint = format!("omit {}, or add --task lm for a language model", row.flag());
            return misfit(row.key, "no such setting", hint);
        }
        return match unfit(Need::Blocks) {
            Some((row, _)) if config.model != ModelSize::VitTiny => Err(ConfigError::new(
                format!(
                    "`{}` is {}, but model {} is no list of blocks",
                    row.key,
                    cite(row.key),
                    cite("model")
                ),
                format!(
                    "omit {}, or choose --model vit-tiny for images or --task lm",
                    row.flag()
                ),
            )),
            _ => Ok(()),
        };
    }
    if settings.count("vocab").is_some() && settings.word("tokenizer") != Some("bpe") {
        return Err(ConfigError::new(
            format!("`vocab` is {}, but `tokenizer` is not bpe", cite("vocab")),
            "add --tokenizer bpe, or omit --vocab",
        ));
    }
    let gpt = config.gpt(0);
    if !gpt.width.is_multiple_of(gpt.heads) {
        let (heads, width) = (gpt.heads, gpt.width);
        return Err(ConfigError::new(
            format!("{heads} attention heads do not divide a width of {width}"),
            "choose --width as a multiple of --heads",
        ));
    }
    Ok(())
}

/// Refuses a mean or a standard deviation that is not three numbers to compute with, and images that the model cannot be of.
fn check_images(settings: &Settings) -> Result<(), ConfigError> {
    let is_wrong = |key: &&'static str| {
        let given = settings.word(key).map(channels);
        given.is_some_and(|given| {
            given
                .is_none_or(|given| *key == "std" && given.iter().any(|given| *given as f32 == 0.0))
        })
    };
    match ["mean", "std"].into_iter().find(is_wrong) {
        Some(key) => Err(ConfigError::new(
            format!("`{key}` is {}", settings.need(key).cite()),
            "write three numbers from 0 to 1, such as 0.5,0.5,0.5; no std is 0",
        )),
        None => check_size(settings),
    }
}

fn check_size(settings: &Settings) -> Result<(), ConfigError> {
    let config = TrainConfig::from_settings(settings);
    let side = config.preparation().side;
    let images = Features::Image {
        height: side,
        width: side,
        channels: 3,
    };
    match config.model.fits(images) {
        Err(why) if config.task == Task::Images => {
            let size = settings.need("image_size").cite();
            let next = side.next_multiple_of(patch_side([side; 2]));
            Err(ConfigError::new(
                format!("`image_size` is {size}, but {why}"),
                format!("choose --image-size {next}, or another --model"),
            ))
        }
        _ => Ok(()),
    }
}

/// Refuses a separator that can be none.
fn check_table(settings: &Settings) -> Result<(), ConfigError> {
    match settings.word("separator") {
        Some(text) if separator_named(text).is_none() => Err(ConfigError::new(
            format!(
                "`separator` is {}, which separates no cells",
                settings.need("separator").cite()
            ),
            "write comma, semicolon, tab, pipe, space, or one character in quotes, such as ';'",
        )),
        _ => Ok(()),
    }
}

/// The figures of the three channels of an image.
pub(super) fn channels(text: &str) -> Option<[f64; 3]> {
    let numbers = text.split(',').map(|number| number.trim().parse().ok());
    let numbers: Vec<f64> = numbers.collect::<Option<_>>()?;
    let all: [f64; 3] = numbers.try_into().ok()?;
    let is_fraction = |number: &f64| (0.0..=1.0).contains(number);
    all.iter().all(is_fraction).then_some(all)
}

/// Refuses a learning rate that would rise to its end, and an optimizer that needs whole matrices where they are cut.
fn check_learning(settings: &Settings) -> Result<(), ConfigError> {
    let config = TrainConfig::from_settings(settings);
    let cite = |key| settings.need(key).cite();
    if config.min_lr.is_some_and(|least| least > config.lr) {
        return Err(ConfigError::new(
            format!("`min_lr` {} is above `lr` {}", cite("min_lr"), cite("lr")),
            "lower --min-lr, or raise --lr",
        ));
    }
    if config.class_weights != ClassWeights::None {
        let mixup = [("mixup", config.mixup > 0.0)];
        exclude(settings, "class_weights", mixup, |_| {
            "both change the loss of a class: omit one of them".into()
        })?;
    }
    check_average(settings, &config)?;
    match config.optimizer {
        Optimizer::Muon => exclude(settings, "optimizer", [("tp", config.tp.is_some())], |_| {
            "muon needs whole matrices: use --optimizer adamw, sgd or lion, or omit --tp".into()
        }),
        _ => Ok(()),
    }
}

/// Evaluations need whole averages of all ranks' weights.
fn check_average(settings: &Settings, config: &TrainConfig) -> Result<(), ConfigError> {
    let others = [
        ("zero", config.zero == Zero::Parameters),
        ("tp", config.tp.is_some()),
        ("pp", config.pp.is_some_and(|stages| stages > 1)),
        (
            "comm_hook",
            matches!(config.comm_hook, CommHook::LocalSgd(_)),
        ),
    ];
    match config.ema {
        None => Ok(()),
        Some(_) => exclude(settings, "ema", others, |key| {
            format!("omit --ema or --{}", key.replace('_', "-"))
        }),
    }
}

fn check_devices(settings: &Settings, ranks: u64, cited: &str) -> Result<(), ConfigError> {
    let cite = |key| settings.need(key).cite();
    let gpus = settings.count("use_gpu");
    if settings.word("strategy") != Some("ddp") && ranks != 1 {
        let strategy = cite("strategy");
        return Err(ConfigError::new(
            format!("strategy {strategy} uses one rank, but the job has {cited}"),
            match uses_devices(settings) {
                true => "choose the devices of that rank with --devices, and omit --nproc-per-node",
                false => "use --strategy ddp for several ranks, or --nproc-per-node auto",
            },
        ));
    }
    if gpus != Some(0) && kind(settings) == Some(DeviceKind::Cpu) {
        let (device, gpus) = (cite("device"), cite("use_gpu"));
        return Err(ConfigError::new(
            format!("device {device} has no GPUs, but `use_gpu` is {gpus}"),
            "omit --device to train on GPUs, or use --use-gpu 0 to train on the CPU",
        ));
    }
    if uses_devices(settings) && gpus != Some(0) && gpus != settings.count("devices") {
        let (gpus, devices) = (cite("use_gpu"), cite("devices"));
        return Err(ConfigError::new(
            format!("`use_gpu` {gpus} and `devices` {devices} differ"),
            "omit --devices to use all of these GPUs",
        ));
    }
    if !uses_devices(settings) && gpus != Some(0) && gpus != settings.count("nproc_per_node") {
        let (gpus, ranks) = (cite("use_gpu"), cite("nproc_per_node"));
        return Err(ConfigError::new(
            format!("`use_gpu` {gpus} and `nproc_per_node` {ranks} differ: every rank has one GPU"),
            "use --nproc-per-node auto for one rank per GPU",
        ));
    }
    Ok(())
}

/// The setting because of which lost ranks cannot be recovered live: that needs the whole state on every rank.
pub(super) fn not_live(settings: &Settings) -> Option<&'static str> {
    let others = [
        ("zero", settings.word("zero") != Some("0")),
        ("tp", settings.count("tp").is_some()),
        ("pp", settings.count("pp").is_some_and(|stages| stages > 1)),
        ("comm_hook", settings.word("comm_hook") != Some(NONE)),
        ("strategy", settings.word("strategy") != Some("ddp")),
    ];
    let other = others.into_iter().find(|(_, is_set)| *is_set);
    other.map(|(key, _)| key)
}

fn check_recovery(settings: &Settings) -> Result<(), ConfigError> {
    let is_live = settings.word("recovery") == Some("live");
    let Some(key) = not_live(settings).filter(|_| is_live) else {
        return Ok(());
    };
    exclude(settings, "recovery", [(key, true)], |_| {
        "use --recovery restart with --max-restarts: the ranks then start again from the newest checkpoint".into()
    })
}

/// A rank that leaves is a lost rank.
fn check_stragglers(settings: &Settings, ranks: u64) -> Result<(), ConfigError> {
    let is_set = settings.count("exclude_stragglers").is_some();
    let is_live = settings.word("recovery") == Some("live");
    match is_set && !is_live && ranks > 1 {
        false => Ok(()),
        true => exclude(settings, "exclude_stragglers", [("recovery", true)], |_| {
            "use --recovery live, or omit --exclude-stragglers: slow ranks are named in any case"
                .into()
        }),
    }
}

/// Ranks go back to their own copies, which must be those of all ranks.
fn check_snapshots(settings: &Settings) -> Result<(), ConfigError> {
    let config = TrainConfig::from_settings(settings);
    let others = [
        ("zero", config.zero_stage().is_some()),
        ("tp", config.tp.is_some()),
        ("pp", config.pp.is_some_and(|stages| stages > 1)),
        ("comm_hook", config.comm_hook != CommHook::None),
    ];
    let goes_back = config.non_finite == NonFinite::Back;
    match (config.snapshot_every, goes_back) {
        (0, false) => Ok(()),
        (0, true) => {
            let (policy, every) = (
                settings.need("non_finite").cite(),
                settings.need("snapshot_every").cite(),
            );
            Err(ConfigError::new(
                format!(
                    "`non_finite` is {policy}, but `snapshot_every` is {every}: there is no state to go back to"
                ),
                "omit --snapshot-every for 100, or set the number of steps that may be given up at once",
            ))
        }
        (_, true) => exclude(settings, "non_finite", others, |_| {
            "use --non-finite skip: the step then changes nothing, and no state is needed to go back to".into()
        }),
        (_, false) => exclude(settings, "snapshot_every", others, |_| {
            "omit --snapshot-every: the job ends if weights differ, and resumes from a checkpoint"
                .into()
        }),
    }
}

/// What `comm_hook` does not go with.
fn check_hook(settings: &Settings) -> Result<(), ConfigError> {
    let config = TrainConfig::from_settings(settings);
    let hook = config.comm_hook;
    let needs_scaler = config.precision == Precision::F16;
    let zero = (hook.refuses_sharded_optimizer()).filter(|_| config.zero_stage().is_some());
    let scaler = hook.refuses_scaler().filter(|_| needs_scaler);
    let parts = hook.refuses_parts().filter(|_| config.tp.is_some());
    let others = [
        ("zero", zero.is_some()),
        ("tp", parts.is_some()),
        ("precision", scaler.is_some()),
    ];
    let why = zero.or(parts).or(scaler).unwrap_or_default();
    exclude(settings, "comm_hook", others, |key| {
        let instead = match key {
            "tp" => "choose another --comm-hook",
            _ => "choose --comm-hook bf16, fp16 or none",
        };
        format!("{why}: {instead}, or omit --{key}")
    })
}

/// One rank, which replays a step, must get the bits of the job.
fn check_record(settings: &Settings) -> Result<(), ConfigError> {
    let config = TrainConfig::from_settings(settings);
    let others = [
        ("tp", config.tp.is_some()),
        ("pp", config.pp.is_some_and(|stages| stages > 1)),
        ("comm_hook", !config.comm_hook.keeps_bits()),
        ("backend", config.backend == Backend::Nccl),
    ];
    match config.record {
        None => Ok(()),
        Some(_) => exclude(settings, "record", others, |key| {
            format!("omit --record or --{}", key.replace('_', "-"))
        }),
    }
}

/// Refuses the first of `others` that is set, because it does not go with `key`.
fn exclude<const N: usize>(
    settings: &Settings,
    key: &'static str,
    others: [(&'static str, bool); N],
    hint: impl FnOnce(&str) -> String,
) -> Result<(), ConfigError> {
    let other = others.into_iter().find(|(_, is_set)| *is_set);
    let Some((other, _)) = other else {
        return Ok(());
    };
    let cite = |key| settings.need(key).cite();
    let what = format!(
        "`{key}` is {}, which does not go with {other} {}",
        cite(key),
        cite(other)
    );
    Err(ConfigError::new(what, hint(other)))
}

/// What `tp` does not go with.
fn check_parts(settings: &Settings, ranks: u64, cited: &str) -> Result<(), ConfigError> {
    let Some(parts) = settings.count("tp") else {
        return Ok(());
    };
    let tp = settings.need("tp").cite();
    let refuse = |what: String, hint: String| Err(ConfigError::new(what, hint));
    if uses_devices(settings) {
        let strategy = settings.need("strategy").cite();
        let what = format!("`tp` is {tp}, which does not go with strategy {strategy}");
        return refuse(what, "omit --tp or --strategy".into());
    }
    let gpt = TrainConfig::from_settings(settings).gpt(0);
    let divisors = |number: u64| {
        let divisors = (1..=number).filter(|divisor| number.is_multiple_of(*divisor));
        let divisors: Vec<String> = divisors.map(|divisor| divisor.to_string()).collect();
        divisors.join(", ")
    };
    // A program knows the shapes of its model itself.
    let is_built_in = settings.program.is_none();
    let is_cut = is_built_in && settings.word("sequence_parallel") == Some("on");
    let sizes = [
        (is_built_in, "heads", "attention heads", gpt.heads),
        (is_cut, "context", "tokens of a sequence", gpt.context),
    ];
    for (_, key, what, size) in sizes.into_iter().filter(|(matters, ..)| *matters) {
        let size = size as u64;
        if !size.is_multiple_of(parts) {
            return refuse(
                format!("`tp` is {tp}, but {parts} parts do not divide {size} {what}"),
                match key {
                    "heads" => format!("choose --tp from {}, or --heads", divisors(size)),
                    _ => format!("choose --{key} as a multiple of {parts}, or another --tp"),
                },
            );
        }
    }
    let stages = settings.count("pp").unwrap_or(1);
    // Ranks that do not make whole pipelines are refused with them.
    if !ranks.is_multiple_of(stages) || parts_fit(parts, ranks / stages) {
        return Ok(());
    }
    match stages {
        1 => refuse(
            format!("`tp` is {tp}, but the job has {cited} ranks: neither divides the other"),
            format!("start {}, or a multiple of {parts} ranks", divisors(parts)),
        ),
        _ => {
            let (each, whole) = (ranks / stages, stages * parts);
            let pp = settings.need("pp").cite();
            refuse(
                format!(
                    "`tp` is {tp}, but {cited} ranks are {each} for each stage of `pp` {pp}: neither divides the other"
                ),
                format!(
                    "start {whole} ranks or a multiple of them, or {stages} with all parts of a stage on one"
                ),
            )
        }
    }
}

/// What `pp` does not go with, and sizes that do not make a pipeline.
fn check_stages(settings: &Settings, ranks: u64, cited: &str) -> Result<(), ConfigError> {
    let cite = |key| settings.need(key).cite();
    let refuse = |what: String, hint: &str| Err(ConfigError::new(what, hint));
    let is_wrong = |text: &str| text != BY_COST && cuts(text).is_none();
    if settings.word("pp_cuts").is_some_and(is_wrong) {
        let what = format!(
            "`pp_cuts` is {}: expected cost or numbers of blocks",
            cite("pp_cuts")
        );
        return refuse(
            what,
            "name the first block of each stage but the first, such as 2,4",
        );
    }
    let config = TrainConfig::from_settings(settings);
    let Some(pipeline) = config.pipeline() else {
        return Ok(());
    };
    let pp = cite("pp");
    if settings.word("strategy") != Some("ddp") {
        let what = format!(
            "`pp` is {pp}, which does not go with strategy {}",
            cite("strategy")
        );
        return refuse(what, "omit --pp or --strategy");
    }
    if !ranks.is_multiple_of(pipeline.ranks as u64) {
        return refuse(
            format!("`pp` is {pp}, but the job has {cited} ranks: not a whole number of pipelines"),
            &format!(
                "start a multiple of {} ranks, or choose another --pp",
                pipeline.ranks
            ),
        );
    }
    let fits = pipeline.check(config.accumulate);
    let fits = fits.and_then(|()| match settings.program {
        // It knows its blocks itself.
        Some(_) => Ok(()),
        // The embedding and the head are blocks too.
        None => pipeline.stages(config.gpt(0).layers + 2).map(drop),
    });
    fits.map_err(|error| {
        let hint = error.hint().unwrap_or(
            "choose --pp-cuts for this number of stages, or --pp-cuts none for even ones".into(),
        );
        ConfigError::new(error.to_string(), hint)
    })
}

/// Replicas that do not share the ranks evenly, or whose ranks do not share the parts evenly.
fn check_replicas(settings: &Settings, ranks: u64, cited: &str) -> Result<(), ConfigError> {
    let count = |key| settings.count(key).unwrap_or(1);
    let (replicas, stages, parts) = (count("dp"), count("pp"), count("tp"));
    // The table bounds all three, so products cannot overflow.
    let pipelines = replicas * stages;
    if ranks.is_multiple_of(pipelines) && parts.is_multiple_of(ranks / pipelines) {
        return Ok(());
    }
    let asked = ["dp", "pp", "tp"].into_iter();
    let asked = asked.filter(|key| *key == "dp" || count(key) > 1);
    let asked: Vec<String> = asked
        .map(|key| format!("`{key}` {}", settings.need(key).cite()))
        .collect();
    let needs = if asked.len() == 1 { "needs" } else { "need" };
    let ranks = plural(pipelines * parts, "rank");
    Err(ConfigError::new(
        format!(
            "{} {needs} {ranks}, but the job has {cited}",
            asked.join(" and ")
        ),
        format!("start {ranks}, or omit --dp"),
    ))
}

/// The value of `pp_cuts` for stages of equal time.
pub(super) const BY_COST: &str = "cost";

/// The numbers in `pp_cuts`.
pub(super) fn cuts(text: &str) -> Option<Vec<usize>> {
    text.split(',').map(|cut| cut.trim().parse().ok()).collect()
}

fn check_shares(settings: &Settings, ranks: u64, cited: &str) -> Result<(), ConfigError> {
    let count = |key| settings.count(key).unwrap_or(0);
    let of_replica = replica_ranks(settings, ranks);
    let replicas = match of_replica {
        1 => format!("ranks {cited}"),
        _ => format!("the {} replicas of ranks {cited}", ranks / of_replica),
    };
    let [batch, shards, accumulate] = ["global_batch", "shards", "accumulate"];
    let cite = |key| settings.need(key).cite();
    let (message, hint) = if count(batch) < count(shards) {
        let (batch, shards) = (cite(batch), cite(shards));
        (
            format!("global batch {batch} is smaller than shards {shards}"),
            "every shard needs a sample: raise --global-batch or lower --shards",
        )
    // Cannot overflow: the table bounds both factors.
    } else if count(batch) < count(shards) * count(accumulate) {
        let (batch, shards, accumulate) = (cite(batch), cite(shards), cite(accumulate));
        (
            format!(
                "global batch {batch} is smaller than shards {shards} times accumulate {accumulate}"
            ),
            "every micro-batch needs a sample: raise --global-batch or lower --accumulate",
        )
    } else if count(shards) < ranks / of_replica {
        (
            format!("shards {} are fewer than {replicas}", cite(shards)),
            "every rank needs a shard: lower --nproc-per-node, or raise --shards in a new run",
        )
    } else if settings.word("strategy") == Some("dp") && count(shards) < count("devices") {
        (
            format!(
                "shards {} are fewer than devices {}",
                cite(shards),
                cite("devices")
            ),
            "every replica needs a shard: lower --devices, or raise --shards in a new run",
        )
    } else {
        return Ok(());
    };
    Err(ConfigError::new(message, hint))
}

/// Whether the strategy uses several devices of one rank.
pub(super) fn uses_devices(settings: &Settings) -> bool {
    matches!(settings.word("strategy"), Some("dp" | "model"))
}

/// A warning for each setting without effect, because other settings rule it out or a launcher decides.
pub(super) fn unused_settings(settings: &Settings, is_rank: bool) -> Vec<String> {
    let is = |key, word| settings.word(key) == Some(word);
    let lack = |need| match need {
        Need::Launcher if is_rank => {
            Some("this process is one rank of a job, whose launcher decides")
        }
        Need::Restarts if !is_rank && settings.count("max_restarts") == Some(0) => {
            Some("no rank is started again without --max-restarts")
        }
        Need::Classes if is("task", "lm") => Some("a language model has no such loss"),
        Need::Columns if !is("task", "csv") => Some("the task has no columns"),
        Need::Rows if !is("task", "csv") && !is("task", "lm") => Some("the task has no columns"),
        Need::Each if is("task", "digits") || is("task", "idx") => {
            Some("the task has neither lines nor image files")
        }
        Need::Classes if is("objective", "regression") => Some("numbers have no classes"),
        Need::Split if is("task", "idx") => Some("an IDX folder has held-out files"),
        Need::Split if is("task", "lm") => Some("a text has a split of its own"),
        Need::Split if settings.path("test_data").is_some() => {
            Some("the samples of --test-data are held out")
        }
        Need::Images if !is("task", "images") => Some("the task has no image files"),
        Need::Group if is("strategy", "single") => Some("strategy single has one rank"),
        Need::Group if uses_devices(settings) => Some("strategies dp and model have one rank"),
        Need::Parts if settings.count("tp").is_none() => Some("it acts on the parts of --tp"),
        Need::Stages if settings.count("pp").unwrap_or(1) == 1 => {
            Some("it acts on the stages of --pp")
        }
        Need::SeveralDevices if !uses_devices(settings) => {
            Some("only the strategies dp and model have several devices in a rank")
        }
        // For a language model's settings, the check above has an error.
        _ => None,
    };
    let warning = |(row, setting): (&OptionRow, &Setting)| {
        let why = match row.needs? {
            Need::Word(key, words) if !words.contains(&settings.word(key)?) => {
                let (flag, words) = (key.replace('_', "-"), words.join(" or "));
                format!("it acts with --{flag} {words}")
            }
            need => lack(need)?.to_owned(),
        };
        let was_set = !matches!(setting.source, Source::Default | Source::Run(_));
        (was_set && setting.value != Value::Unset).then(|| {
            let (key, cited) = (row.key, setting.cite());
            format!("`{key}` is {cited} and has no effect: {why}")
        })
    };
    settings.iter().filter_map(warning).collect()
}
