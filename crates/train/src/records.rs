//! The lines of `metrics.jsonl`.

use paceline_usage::environment::Environment;
use serde::{Serialize, Serializer};

use crate::error::TrainError;
use crate::report::Header;
use crate::task::{Metric, StepFigures};

/// A line for the start of a job.
#[derive(Serialize)]
pub(crate) struct StartRecord<'a> {
    #[serde(flatten)]
    pub(crate) header: &'a Header,
    /// Steps done before.
    pub(crate) step: u64,
    /// Rank 0's.
    pub(crate) environment: Environment,
}

/// A line for a step.
#[derive(Serialize)]
pub(crate) struct StepRecord {
    pub(crate) kind: &'static str,
    pub(crate) step: u64,
    pub(crate) epoch: u64,
    pub(crate) loss: f64,
    pub(crate) lr: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) samples: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tokens: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) grad_norm: Option<f64>,
    /// The loss scale, if losses are scaled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) scale: Option<f32>,
    /// Whether the step was skipped because its loss or a gradient was not finite, if such steps are skipped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<bool>,
    /// The step to whose state all ranks went back, so that the steps since then changed nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) back_to: Option<u64>,
    pub(crate) seconds: f64,
    pub(crate) waited_seconds: f64,
    /// The task's own.
    #[serde(flatten)]
    pub(crate) figures: Figures,
}

/// Keys of a step's line; the others are the task's own figures.
pub(crate) const STEP_KEYS: [&str; 13] = [
    "kind",
    "step",
    "epoch",
    "loss",
    "lr",
    "samples",
    "tokens",
    "grad_norm",
    "scale",
    "skipped",
    "back_to",
    "seconds",
    "waited_seconds",
];

/// A task's own figures of a step, by name.
#[derive(Debug, Default)]
pub(crate) struct Figures(StepFigures);

impl Figures {
    /// *Errors*: a name that another figure of the step has.
    pub(crate) fn new(figures: StepFigures) -> Result<Self, TrainError> {
        distinct(figures.iter().map(|(name, _)| *name), &STEP_KEYS)?;
        Ok(Self(figures))
    }
}

impl Serialize for Figures {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().copied())
    }
}

/// *Errors*: a name that is there twice, or `taken`.
fn distinct(
    names: impl Iterator<Item = &'static str> + Clone,
    taken: &[&str],
) -> Result<(), TrainError> {
    let is_taken = |(at, name): &(usize, &str)| {
        let mut earlier = names.clone().take(*at);
        taken.contains(name) || earlier.any(|other| other == *name)
    };
    match names.clone().enumerate().find(is_taken) {
        None => Ok(()),
        Some((_, name)) => Err(TrainError::usage(
            format!("two figures of metrics.jsonl are called {name}"),
            "give the metric another name",
        )),
    }
}

#[cfg(test)]
impl StepRecord {
    pub(crate) fn of(step: u64, loss: f64) -> Self {
        Self {
            kind: "step",
            step,
            epoch: 1,
            loss,
            lr: 0.5,
            samples: Some(64.0),
            tokens: None,
            grad_norm: None,
            scale: None,
            skipped: None,
            back_to: None,
            seconds: 0.25,
            waited_seconds: 0.125,
            figures: Figures::default(),
        }
    }
}

/// A line for an evaluation within an epoch.
#[derive(Serialize)]
pub(crate) struct EvaluationRecord {
    pub(crate) kind: &'static str,
    pub(crate) step: u64,
    #[serde(flatten)]
    pub(crate) held_out: HeldOut,
}

/// Figures of the held-out data.
#[derive(Clone, Debug)]
pub(crate) struct HeldOut {
    pub(crate) loss: f64,
    pub(crate) metrics: Vec<Metric>,
}

/// A figure of the held-out data, as a job is judged by it.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub(crate) value: f64,
    pub(crate) higher_is_better: bool,
    /// For people.
    pub(crate) text: String,
}

/// The key of the mean loss of the held-out data.
pub(crate) const HELD_OUT_LOSS: &str = "held_out_loss";

/// Fields of the lines of an evaluation and of an epoch; the others are metrics of the held-out data.
pub(crate) const NO_METRICS: [&str; 8] = [
    "kind",
    "step",
    "epoch",
    "train_loss",
    HELD_OUT_LOSS,
    "samples_per_second",
    "tokens_per_second",
    "skipped_steps",
];

/// Fields of other records.
const OTHERS: [&str; 5] = ["skipped", "back_to", "before", "now", "signal"];

impl HeldOut {
    /// *Errors*: a metric with the name of another figure of the record.
    pub(crate) fn new(loss: f64, metrics: Vec<Metric>) -> Result<Self, TrainError> {
        let taken = [&NO_METRICS[..], &OTHERS].concat();
        distinct(metrics.iter().map(|metric| metric.name), &taken)?;
        Ok(Self { loss, metrics })
    }

    /// The figure with this key, if there is one.
    pub(crate) fn figure(&self, key: &str) -> Option<Figure> {
        if key == HELD_OUT_LOSS {
            return Some(Figure {
                value: self.loss,
                higher_is_better: false,
                text: self.loss_text(),
            });
        }
        let metric = self.metrics.iter().find(|metric| metric.name == key)?;
        Some(Figure {
            value: metric.value,
            higher_is_better: metric.higher_is_better,
            text: metric.text.clone(),
        })
    }

    fn loss_text(&self) -> String {
        format!("held-out loss {:.4}", self.loss)
    }

    /// Part of a line.
    pub(crate) fn render(&self) -> String {
        let loss = self.loss_text();
        let metrics = self.metrics.iter().map(|metric| &*metric.text);
        let parts: Vec<&str> = [&*loss].into_iter().chain(metrics).collect();
        parts.join("   ")
    }
}

impl Serialize for HeldOut {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let metrics = self.metrics.iter();
        let metrics = metrics.map(|metric| (metric.name, metric.value));
        serializer.collect_map([(HELD_OUT_LOSS, self.loss)].into_iter().chain(metrics))
    }
}

/// A line for an epoch.
#[derive(Serialize)]
pub(crate) struct EpochRecord {
    pub(crate) kind: &'static str,
    pub(crate) step: u64,
    pub(crate) epoch: usize,
    pub(crate) train_loss: f64,
    #[serde(flatten)]
    pub(crate) held_out: Option<HeldOut>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) samples_per_second: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tokens_per_second: Option<f64>,
    /// Steps skipped in the epoch, if any may be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped_steps: Option<u64>,
}

/// A line for a job that goes on with other ranks.
#[derive(Serialize)]
pub(crate) struct RanksRecord {
    pub(crate) kind: &'static str,
    /// Steps done.
    pub(crate) step: u64,
    /// Ranks until then.
    pub(crate) before: usize,
    /// Ranks from then on.
    pub(crate) now: usize,
    /// Which ranks were lost and how, in the launcher's words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) why: Option<String>,
}

/// A line for a job that a signal has stopped.
#[derive(Serialize)]
pub(crate) struct StoppedRecord {
    pub(crate) kind: &'static str,
    pub(crate) step: u64,
    pub(crate) signal: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_have_names_of_their_own() {
        let named = |names: &[&'static str]| {
            let metrics = names.iter().map(|name| Metric::number(name, 1.0));
            HeldOut::new(1.0, metrics.collect())
        };
        assert!(named(&["mae", "accuracy"]).is_ok());
        for names in [["mae", "mae"], ["mae", "step"]] {
            let error = named(&names).expect_err("refused").to_string();
            assert!(error.contains(names[1]), "{error}");
        }
    }

    #[test]
    fn a_step_has_the_figures_of_its_task_under_names_of_their_own() {
        let named = |names: &[&'static str]| {
            let figures = names.iter().map(|name| (*name, 2.0));
            Figures::new(figures.collect())
        };
        let record = StepRecord {
            figures: named(&["spread", "lag"]).expect("two names"),
            ..StepRecord::of(7, 1.0)
        };
        let line = serde_json::to_value(record).expect("numbers");
        let line = line.as_object().expect("an object");
        assert_eq!((&line["spread"], &line["step"]), (&2.0.into(), &7.into()));
        let own = line.keys().filter(|key| !STEP_KEYS.contains(&key.as_str()));
        assert_eq!(own.count(), 2, "STEP_KEYS lacks a key of {line:?}");
        for names in [&["spread", "spread"][..], &["loss"]] {
            let error = named(names).expect_err("refused").to_string();
            assert!(error.contains(names[0]), "{error}");
        }
    }
}
