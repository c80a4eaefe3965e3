//! What a run left behind, as the comparison reads it: its usage report, and the metrics of `paceline train`.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::time::Duration;

use paceline_usage::Report;
use paceline_usage::busy::{BusyTime, share};
use paceline_usage::report::Note;
use serde::{Deserialize, Serialize};

use super::figures::median;
use crate::exit::Failure;

/// The figures of one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Run {
    /// The round that it belongs to, from 1.
    pub(super) round: usize,
    /// How long it took, from its start to its end.
    pub(super) seconds: f64,
    /// The share of the time in which all were busy at once.
    pub(super) all_busy_share: Option<f64>,
    pub(super) busy: Busy,
    /// Devices that did no work although there were ranks for them.
    pub(super) idle_gpus: Vec<u32>,
    /// Peak resident memory of each rank.
    pub(super) peak_bytes: Vec<Option<u64>>,
    /// Peak memory of each device that counts.
    pub(super) gpu_peak_bytes: Vec<Option<u64>>,
    /// The median of the epochs. This and the rest is known of `paceline train`.
    pub(super) samples_per_second: Option<f64>,
    /// For each rank, the share of the training in which it waited for data.
    pub(super) waited_for_data: Vec<f64>,
    /// For each rank, the share of the training in which it waited for other ranks.
    pub(super) waited_for_ranks: Vec<f64>,
    /// The hash of the trained weights.
    pub(super) weights_sha256: Option<String>,
}

/// What is meant by busy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Busy {
    /// A rank used half a core or more.
    #[default]
    Ranks,
    /// The driver said so of a device.
    Gpus,
    /// `paceline train` waited neither for data nor for other ranks.
    Computing,
}

impl Run {
    /// Reads what a run that ended well has left.
    ///
    /// *Errors*: there is no usage report.
    pub(super) fn read(round: usize, usage: &Path, run_dir: &Path) -> Result<Self, Failure> {
        let report = fs::read(usage).and_then(|bytes| Ok(serde_json::from_slice(&bytes)?));
        let report = report.map_err(|error| {
            Failure::environment(format!(
                "cannot read the usage report {}: {error}",
                usage.display()
            ))
        })?;
        let mut run = Self::new(round, &report);
        if let Ok(metrics) = File::open(run_dir.join("metrics.jsonl")) {
            run.add_training(BufReader::new(metrics));
        }
        Ok(run)
    }

    fn new(round: usize, report: &Report) -> Self {
        let counted = || report.gpus.iter().filter(|gpu| gpu.is_counted);
        let idle = report.notes.iter().filter_map(|note| match note {
            Note::IdleGpus { gpus, .. } => Some(gpus.as_slice()),
            _ => None,
        });
        Self {
            round,
            seconds: report.total_s,
            all_busy_share: report.at_once().map(|all| all.all_busy_share),
            busy: match counted().next() {
                Some(_) => Busy::Gpus,
                None => Busy::Ranks,
            },
            idle_gpus: idle.flatten().copied().collect(),
            peak_bytes: (report.ranks.iter())
                .map(|rank| rank.resident_peak_bytes)
                .collect(),
            gpu_peak_bytes: counted().map(|gpu| gpu.memory_peak_bytes).collect(),
            ..Self::default()
        }
    }

    /// Adds the record of a training that ended well, which is more exact than what is seen from outside.
    fn add_training(&mut self, metrics: impl BufRead) {
        let mut speeds = Vec::new();
        for line in metrics.lines().map_while(Result::ok) {
            match serde_json::from_str(&line) {
                Ok(Line::Epoch { samples_per_second }) => speeds.push(samples_per_second),
                Ok(Line::End {
                    weights_sha256,
                    usage,
                    ranks,
                }) => {
                    let shares = |waited_ns: fn(&Waits) -> u64| {
                        let waited = ranks.iter().map(waited_ns).map(Duration::from_nanos);
                        waited.map(|waited| share(waited, usage.total())).collect()
                    };
                    self.samples_per_second = median(speeds.into_iter());
                    self.all_busy_share = Some(usage.all_busy_share());
                    self.busy = Busy::Computing;
                    self.waited_for_data = shares(|rank| rank.waited_for_data_ns);
                    self.waited_for_ranks = shares(|rank| rank.waited_for_ranks_ns);
                    self.weights_sha256 = Some(weights_sha256);
                    return;
                }
                Ok(Line::Other) | Err(_) => {}
            }
        }
    }
}

/// A line of `metrics.jsonl`.
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Line {
    Epoch {
        #[serde(alias = "tokens_per_second")]
        samples_per_second: f64,
    },
    End {
        weights_sha256: String,
        usage: BusyTime,
        ranks: Vec<Waits>,
    },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct Waits {
    waited_for_ranks_ns: u64,
    waited_for_data_ns: u64,
}

#[cfg(test)]
mod tests {
    use paceline_usage::report::{AtOnce, GpuReport, IdleCause};

    use super::*;

    #[test]
    fn the_record_of_a_training_is_read_from_its_metrics() {
        let metrics = r#"{"kind":"step","step":1,"loss":2.0}
            {"kind":"epoch","samples_per_second":100.0}
            {"kind":"epoch","samples_per_second":300.0}
            {"kind":"epoch","samples_per_second":200.0}
            {"kind":"end","step":9,"weights_sha256":"ab","usage":{"total_ns":10,"busy_ns":[6,8],"at_once_ns":[1,4,5]},
            "ranks":[{"waited_for_ranks_ns":3,"waited_for_data_ns":1,"peak_bytes":7},{"waited_for_ranks_ns":2,"waited_for_data_ns":0,"peak_bytes":7}]}"#;
        let metrics = metrics.replace(",\n            \"ranks\"", ",\"ranks\"");
        let expect = Run {
            all_busy_share: Some(0.5),
            busy: Busy::Computing,
            samples_per_second: Some(200.0),
            waited_for_data: vec![0.1, 0.0],
            waited_for_ranks: vec![0.3, 0.2],
            weights_sha256: Some("ab".to_owned()),
            ..Run::default()
        };
        let read = |metrics: &str| {
            let mut run = Run::default();
            run.add_training(metrics.as_bytes());
            run
        };
        assert_eq!(read(&metrics), expect);
        assert_eq!(read(&metrics[..metrics.len() - 5]), Run::default());
    }

    #[test]
    fn devices_come_before_ranks_and_idle_ones_are_named() {
        let gpu = |index| GpuReport {
            index,
            is_counted: true,
            memory_peak_bytes: Some(u64::from(index)),
            ..GpuReport::default()
        };
        let all = |share| AtOnce {
            counted: vec![0, 1],
            all_busy_share: share,
            ..AtOnce::default()
        };
        let idle = Note::IdleGpus {
            gpus: vec![1],
            busy: vec![0],
            ranks: 2,
            cause: IdleCause::Unknown,
        };
        let report = Report {
            total_s: 3.0,
            gpus: vec![gpu(0), gpu(1)],
            gpus_at_once: Some(all(0.2)),
            ranks_at_once: Some(all(0.9)),
            notes: vec![idle],
            ..Report::default()
        };
        let run = Run::new(1, &report);
        assert_eq!((run.all_busy_share, run.busy), (Some(0.2), Busy::Gpus));
        assert_eq!(run.idle_gpus, [1]);
        assert_eq!(run.gpu_peak_bytes, [Some(0), Some(1)]);
        let short = Report {
            total_s: 0.1,
            ..report
        };
        assert_eq!(Run::new(1, &short).all_busy_share, None);
    }

    #[test]
    fn a_report_about_nothing_has_a_time_only() {
        let report = Report {
            total_s: 3.0,
            ..Report::default()
        };
        let expect = Run {
            round: 2,
            seconds: 3.0,
            ..Run::default()
        };
        assert_eq!(Run::new(2, &report), expect);
    }
}
