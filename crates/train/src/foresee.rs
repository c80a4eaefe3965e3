//! Everything that can be known of a job before it begins.

use crate::classify::Supervised;
use crate::config::{Strategy, Task, TrainConfig};
use crate::error::TrainError;
use crate::language::Text;
use crate::model::Net;
use crate::records::{HELD_OUT_LOSS, HeldOut};
use crate::report::plural;
use crate::setup::sharded_batches;
use crate::task::{Part, Sums, TrainTask};
use crate::trainer::monitored;

/// What is known of a job before its ranks start.
#[derive(Clone, Debug)]
pub struct Foreseen {
    /// A warning for each sign that the job is not what the user intended.
    pub warnings: Vec<String>,
    /// Files that the ranks read from the run directory: name and contents.
    pub files: Vec<(&'static str, String)>,
}

/// Loads the data once, so that an error in it is reported once and immediately.
///
/// *Errors*: data that cannot be used, or does not fit the batch and shards.
pub fn foresee(config: &TrainConfig) -> Result<Foreseen, TrainError> {
    match config.task {
        Task::Digits | Task::Idx | Task::Csv | Task::Images => {
            foresee_task::<Supervised<Net>>(config)
        }
        Task::Lm => foresee_task::<Text>(config),
    }
}

/// Refuses to compare epochs by a figure that there is none of.
fn check_monitor<T: TrainTask>(config: &TrainConfig, task: &T) -> Result<(), TrainError> {
    let is_asked = config.monitor != HELD_OUT_LOSS;
    if is_asked {
        monitored(
            &HeldOut::new(0.0, task.metrics(&Sums::default()))?,
            &config.monitor,
        )?;
    }
    let (key, value) = match config.patience {
        Some(patience) => ("patience", patience.to_string()),
        None if is_asked => ("monitor", config.monitor.clone()),
        None => return Ok(()),
    };
    match task.len(Part::HeldOut) {
        0 => Err(TrainError::usage(
            format!(
                "`{key}` is {value}, but {} has no held-out data",
                task.name()
            ),
            format!("hold some samples out to evaluate on, or omit --{key}"),
        )),
        _ => Ok(()),
    }
}

/// [`foresee`] for a user's own task.
///
/// *Errors*: as [`foresee`].
pub fn foresee_task<T: TrainTask>(config: &TrainConfig) -> Result<Foreseen, TrainError> {
    T::cuts().check(config)?;
    let task = T::open(config, None)?;
    let (devices, parts) = (config.devices, task.parts());
    if config.strategy == Strategy::Model && devices > parts {
        return Err(TrainError::usage(
            format!(
                "strategy model: the model has {} for {devices} devices",
                plural(parts as u64, "part")
            ),
            match parts {
                1 => "use --strategy ddp".to_owned(),
                _ => format!("use at most --devices {parts}"),
            },
        ));
    }
    check_monitor(config, &task)?;
    let samples = task.len(Part::Train);
    let batches = sharded_batches(config, samples, None)?;
    let steps = batches.steps_per_epoch() * config.epochs as u64;
    let large_batch = (config.global_batch > samples).then(|| {
        format!(
            "global batch {} is larger than the training data of {}: every step uses all of it",
            config.global_batch,
            plural(samples as u64, T::SAMPLE)
        )
    });
    let trace = config.trace.filter(|step| *step >= steps).map(|step| {
        format!(
            "`trace` is {step}, but the job has only {}, counted from 0",
            plural(steps, "step")
        )
    });
    let warnings = large_batch.into_iter().chain(task.warnings()).chain(trace);
    Ok(Foreseen {
        warnings: warnings.collect(),
        files: task.files(),
    })
}
