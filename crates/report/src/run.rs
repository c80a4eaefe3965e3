//! What a run has written, as far as it is shown.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::Path;

use paceline_usage::busy::BusyTime;
use serde::Deserialize;

use crate::curve::Curve;
use crate::error::ReportError;

/// Longest line that is read: one of the end of a job of many thousand ranks fits.
const LINE_BYTES_MAX: u64 = 16 << 20;

/// Longest name of a signal.
const SIGNAL_MAX: usize = 32;

/// Most bytes of a file of settings.
const SETTINGS_BYTES_MAX: u64 = 1 << 20;

/// Most incidents kept; the others are counted.
const INCIDENTS_MAX: usize = 200;

/// One run.
#[derive(Default)]
pub struct Run {
    pub(crate) name: String,
    /// Key, value and source of each setting that has a value.
    pub(crate) settings: Vec<[String; 3]>,
    pub(crate) loss: Curve,
    /// The last epoch's mean.
    pub(crate) train_loss: Option<f64>,
    pub(crate) held_out_loss: Curve,
    pub(crate) accuracy: Curve,
    pub(crate) rate: Curve,
    /// Share of a step, in percent, in which rank 0 waited for others.
    pub(crate) waited: Curve,
    pub(crate) learning_rate: Curve,
    pub(crate) gradient_norm: Curve,
    /// Whether predictions are tokens.
    pub(crate) has_tokens: bool,
    pub(crate) steps: u64,
    pub(crate) epochs: u64,
    /// Time in steps, in seconds.
    pub(crate) seconds: f64,
    pub(crate) incidents: Vec<Incident>,
    pub(crate) incidents_left_out: u64,
    /// Lines that are no records.
    pub(crate) unread: u64,
    pub(crate) end: Option<End>,
}

/// Something that does not belong to an undisturbed run.
pub(crate) enum Incident {
    /// A step was skipped because its numbers were not finite.
    Skipped { step: u64 },
    /// All ranks went back to the state of an earlier step.
    WentBack { step: u64, to: u64 },
    /// The job went on with other ranks.
    Ranks { step: u64, before: u64, now: u64 },
    /// A signal asked the job to stop after this step.
    Stopped { step: u64, signal: String },
    /// A rank was slower than the others.
    Slow(Straggler),
}

/// The end of a job.
#[derive(Deserialize)]
pub(crate) struct End {
    pub(crate) weights_sha256: String,
    pub(crate) usage: BusyTime,
    pub(crate) ranks: Vec<RankEnd>,
    #[serde(default)]
    stragglers: Vec<Straggler>,
    pub(crate) best: Option<BestEpoch>,
    #[serde(default)]
    pub(crate) classes: Vec<Class>,
}

/// The epoch with the best figure.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct BestEpoch {
    pub(crate) epoch: u64,
    pub(crate) monitor: String,
    pub(crate) value: f64,
}

/// How well a class was predicted at the end, as shares.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Class {
    pub(crate) name: String,
    pub(crate) samples: u64,
    pub(crate) precision: Option<f64>,
    pub(crate) recall: Option<f64>,
    pub(crate) f1: Option<f64>,
}

/// What a rank has done with its time.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct RankEnd {
    pub(crate) waited_for_ranks_ns: u64,
    pub(crate) waited_for_data_ns: u64,
    /// Largest resident memory, in bytes.
    pub(crate) peak_bytes: Option<u64>,
    /// Bytes sent to other ranks.
    pub(crate) sent_bytes: u64,
}

/// A slow rank, with mean times for a shard in seconds.
#[derive(Clone, Copy, Deserialize)]
pub(crate) struct Straggler {
    pub(crate) rank: usize,
    pub(crate) seconds: f64,
    pub(crate) others_seconds: f64,
}

/// What the page needs of a line.
#[derive(Deserialize)]
struct Line {
    kind: String,
    #[serde(default)]
    step: u64,
    #[serde(default)]
    epoch: u64,
    loss: Option<f64>,
    lr: Option<f64>,
    samples: Option<f64>,
    tokens: Option<f64>,
    grad_norm: Option<f64>,
    skipped: Option<bool>,
    back_to: Option<u64>,
    seconds: Option<f64>,
    waited_seconds: Option<f64>,
    train_loss: Option<f64>,
    held_out_loss: Option<f64>,
    accuracy: Option<f64>,
    signal: Option<String>,
    before: Option<u64>,
    now: Option<u64>,
}

impl Run {
    /// Reads a run directory, even while the job runs. Lines that cannot be read are counted.
    ///
    /// *Cost*: a pass over `metrics.jsonl`; memory does not grow with it.
    ///
    /// *Errors*: no metrics; the system's.
    pub(crate) fn read(folder: &Path) -> Result<Self, ReportError> {
        let path = folder.join("metrics.jsonl");
        let file = File::open(&path).map_err(|source| match source.kind() {
            ErrorKind::NotFound => ReportError::NoRun {
                folder: folder.to_owned(),
            },
            _ => ReportError::file(&path)(source),
        })?;
        let full = fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
        let mut run = Self {
            name: full
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            settings: settings(&folder.join("config.toml"))?,
            ..Self::default()
        };
        let mut lines = BufReader::new(file);
        let mut line = Vec::new();
        loop {
            line.clear();
            let read = lines
                .by_ref()
                .take(LINE_BYTES_MAX)
                .read_until(b'\n', &mut line);
            if read.map_err(ReportError::file(&path))? == 0 {
                return Ok(run);
            }
            run.add(&line);
        }
    }

    fn add(&mut self, line: &[u8]) {
        let Ok(record) = serde_json::from_slice::<Line>(line) else {
            // A job that still trains may have written half of its last line.
            self.unread += u64::from(line.ends_with(b"\n") && !line.trim_ascii().is_empty());
            return;
        };
        self.steps = self.steps.max(record.step);
        match record.kind.as_str() {
            "step" => self.step(&record),
            "end" => self.end(line),
            "ranks" => self.note(Incident::Ranks {
                step: record.step,
                before: record.before.unwrap_or_default(),
                now: record.now.unwrap_or_default(),
            }),
            "stopped" => self.note(Incident::Stopped {
                step: record.step,
                signal: record
                    .signal
                    .iter()
                    .flat_map(|name| name.chars())
                    .take(SIGNAL_MAX)
                    .collect(),
            }),
            // An epoch and an evaluation within one.
            _ => {
                self.epochs = self.epochs.max(record.epoch);
                self.train_loss = record.train_loss.or(self.train_loss);
                for (curve, value) in [
                    (&mut self.held_out_loss, record.held_out_loss),
                    (
                        &mut self.accuracy,
                        record.accuracy.map(|share| share * 100.0),
                    ),
                ] {
                    value
                        .into_iter()
                        .for_each(|value| curve.push(record.step, value));
                }
            }
        }
    }

    fn step(&mut self, record: &Line) {
        let step = record.step;
        let seconds = record.seconds.filter(|seconds| *seconds > 0.0);
        self.seconds += seconds.unwrap_or(0.0);
        self.has_tokens |= record.tokens.is_some();
        let per_second = |count: Option<f64>| Some(count? / seconds?);
        let waited = || Some(record.waited_seconds? / seconds? * 100.0);
        for (curve, value) in [
            (&mut self.loss, record.loss),
            (&mut self.rate, per_second(record.tokens.or(record.samples))),
            (&mut self.waited, waited()),
            (&mut self.learning_rate, record.lr),
            (&mut self.gradient_norm, record.grad_norm),
        ] {
            value.into_iter().for_each(|value| curve.push(step, value));
        }
        if let Some(to) = record.back_to {
            self.note(Incident::WentBack { step, to });
        } else if record.skipped == Some(true) {
            self.note(Incident::Skipped { step });
        }
    }

    fn end(&mut self, line: &[u8]) {
        let end = serde_json::from_slice::<End>(line).ok();
        let Some(end) = end.filter(|end| end.usage.busy_ns.len() == end.ranks.len()) else {
            self.unread += 1;
            return;
        };
        for straggler in &end.stragglers {
            self.note(Incident::Slow(*straggler));
        }
        self.end = Some(end);
    }

    fn note(&mut self, incident: Incident) {
        match self.incidents.len() < INCIDENTS_MAX {
            true => self.incidents.push(incident),
            false => self.incidents_left_out += 1,
        }
    }
}

/// The settings in a file that `Resolved::to_toml` wrote: `key = value # source`.
///
/// *Errors*: the system's; there may be no such file.
fn settings(path: &Path) -> Result<Vec<[String; 3]>, ReportError> {
    let mut text = String::new();
    let read =
        File::open(path).and_then(|file| file.take(SETTINGS_BYTES_MAX).read_to_string(&mut text));
    match read {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(ReportError::file(path)(error));
        }
        _ => {}
    }
    let setting = |line: &str| {
        let (setting, source) = line.rsplit_once(" # ")?;
        let (key, value) = setting.split_once(" = ")?;
        (!key.starts_with('#')).then(|| [key, value, source].map(str::to_owned))
    };
    Ok(text.lines().filter_map(setting).collect())
}
