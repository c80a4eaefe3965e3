//! What a job's tracker has to tell at the end, as plain data.

mod build;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use paceline_gpu::sample::Throttle;
use paceline_gpu::snapshot::{DriverError, Gap};

use super::history::History;
use super::totals::Totals;
use super::{Lang, svg, text};

/// Version of the fields below.
pub const REPORT_VERSION: u32 = 1;

/// What devices and ranks did in the course of a job. Times are in seconds since sampling began; shares are
/// `0.0..=1.0`; what could not be read is `None`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// [`REPORT_VERSION`].
    pub paceline_usage: u32,
    /// How long sampling went on.
    pub total_s: f64,
    /// Samples taken.
    pub samples: u64,
    /// Utilisation from which a device counts as busy, in percent.
    pub busy_percent: u32,
    /// Processor time from which a rank counts as busy, in percent of one core.
    pub rank_busy_percent: u32,
    /// Devices together; `None` without devices.
    pub gpus_at_once: Option<AtOnce>,
    /// Each device.
    pub gpus: Vec<GpuReport>,
    /// Ranks together; `None` without ranks.
    pub ranks_at_once: Option<AtOnce>,
    /// Each rank.
    pub ranks: Vec<RankReport>,
    /// What is missing, and what went wrong.
    pub notes: Vec<Note>,
    /// The course of it.
    pub history: Course,
}

/// How long how many worked at once.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AtOnce {
    /// Those that were to work at once: numbers of devices, or ranks.
    pub counted: Vec<u32>,
    /// Time in which at least one could be read; shares are of it.
    pub observed_s: f64,
    /// `at_once_s[k]`: time in which exactly `k` worked.
    pub at_once_s: Vec<f64>,
    /// Time in which all worked.
    pub all_busy_s: f64,
    /// Its share.
    pub all_busy_share: f64,
    /// The least that this share can be by the readings themselves, whatever counts as busy.
    pub least_share: Option<f64>,
    /// The most that it can be.
    pub most_share: Option<f64>,
}

/// What one device did.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuReport {
    /// The driver's number.
    pub index: u32,
    /// Whether it is one of those that were to work at once.
    pub is_counted: bool,
    /// Ranks of which a process was seen on it, as far as process numbers can be seen.
    pub ranks: Vec<u32>,
    /// Time in which its utilisation was known.
    pub known_s: f64,
    /// Time in which it was busy.
    pub busy_s: f64,
    /// Share of the observed time in which it was busy.
    pub busy_share: Option<f64>,
    /// Mean utilisation, in percent.
    pub utilization_percent: Option<f64>,
    /// The same while busy.
    pub utilization_busy_percent: Option<f64>,
    /// Mean share of the multiprocessors' time in which they ran anything, in percent, by the device's performance counters.
    pub sm_active_percent: Option<f64>,
    /// Mean share of the threads that they can hold.
    pub sm_occupancy_percent: Option<f64>,
    /// Mean share of the time in which their tensor cores worked.
    pub tensor_active_percent: Option<f64>,
    /// Mean share of the bandwidth of device memory.
    pub dram_active_percent: Option<f64>,
    /// Most memory in use, by anyone.
    pub memory_peak_bytes: Option<u64>,
    /// When that was.
    pub memory_peak_at_s: Option<f64>,
    /// Its memory.
    pub memory_total_bytes: Option<u64>,
    /// Energy, in joules.
    pub energy_j: Option<f64>,
    /// How much of that is power times time, because the counter was missing or was set anew.
    pub energy_estimated_j: f64,
    /// Mean power, in watts.
    pub power_w: Option<f64>,
    /// Highest power.
    pub power_peak_w: Option<f64>,
    /// The limit of it.
    pub power_limit_w: Option<f64>,
    /// Highest temperature, in degrees Celsius.
    pub temperature_peak_c: Option<u32>,
    /// When that was.
    pub temperature_peak_at_s: Option<f64>,
    /// Clock of the multiprocessors while busy, in MHz.
    pub sm_clock_mhz: Option<Range>,
    /// Clock of the memory while busy, in MHz.
    pub memory_clock_mhz: Option<Range>,
    /// Sent over PCIe.
    pub pcie_tx: Option<Flow>,
    /// Received over PCIe.
    pub pcie_rx: Option<Flow>,
    /// Sent over all NVLinks.
    pub nvlink_tx: Option<Flow>,
    /// Received over all NVLinks.
    pub nvlink_rx: Option<Flow>,
    /// How long clocks were held down, for each reason.
    pub throttled_s: BTreeMap<Throttle, f64>,
    /// Time in which its memory was held while it was idle.
    pub held_idle_s: f64,
    /// Time in which a process of the job's ranks did.
    pub job_idle_s: f64,
    /// Time in which its utilisation could not be read.
    pub missing: Vec<Missing>,
}

/// What one rank did.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RankReport {
    /// The global rank.
    pub rank: u32,
    /// Time in which it was busy.
    pub busy_s: f64,
    /// Share of the observed time in which it was busy.
    pub busy_share: Option<f64>,
    /// Mean utilisation, in percent of one core.
    pub utilization_percent: Option<f64>,
    /// The same while busy.
    pub utilization_busy_percent: Option<f64>,
    /// Processor time.
    pub cpu_s: f64,
    /// Most resident memory.
    pub resident_peak_bytes: Option<u64>,
    /// When that was.
    pub resident_peak_at_s: Option<f64>,
    /// How often another process became this rank.
    pub restarts: u64,
    /// Time in which its processor time could not be read.
    pub missing: Vec<Missing>,
}

/// Smallest, mean and largest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Range {
    /// Smallest.
    pub least: u32,
    /// Mean over time.
    pub mean: f64,
    /// Largest.
    pub most: u32,
}

/// What has flowed, by rates that the driver measures over a fraction of the time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Flow {
    /// How much.
    pub bytes: u64,
    /// Highest rate.
    pub peak_bytes_s: u64,
}

/// Time in which there was nothing to read, for one reason.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Missing {
    /// Why.
    pub why: Gap,
    /// When it began.
    pub since_s: f64,
    /// The end of the last stretch.
    pub until_s: f64,
    /// How long it was in all.
    pub for_s: f64,
}

/// Something that a reader of the report should know.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Note {
    /// Devices did no work although there were ranks for them.
    IdleGpus {
        /// Which.
        gpus: Vec<u32>,
        /// Those that worked.
        busy: Vec<u32>,
        /// How many ranks ran here.
        ranks: usize,
        /// What is known of the cause.
        cause: IdleCause,
    },
    /// Ranks used next to no processor time while others worked, on a job without devices.
    IdleRanks {
        /// Which.
        ranks: Vec<u32>,
        /// How many ranks ran here.
        of: usize,
    },
    /// Samples that came so late that the time before them was not observed.
    Late {
        /// How many.
        count: u64,
        /// All their time.
        for_s: f64,
        /// When the first began.
        since_s: f64,
    },
    /// The driver or the system had not answered the last request when the report was made.
    Hung {
        /// When it was asked.
        since_s: f64,
    },
    /// No device of NVIDIA's could be asked.
    NoDriver {
        /// Why.
        trouble: DriverError,
    },
    /// The tracker's thread ended early, by an error of its own.
    Ended {
        /// The last sample.
        at_s: f64,
    },
    /// No thread could be started: nothing was sampled.
    NotStarted {
        /// The system's words.
        why: String,
    },
    /// A file that could not be written, or read.
    File {
        /// Which.
        path: String,
        /// The system's words.
        why: String,
    },
}

/// Why devices did no work.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IdleCause {
    /// Several ranks were on one device instead.
    Shared {
        /// Which device.
        gpu: u32,
        /// Which ranks.
        ranks: Vec<u32>,
    },
    /// Ranks had opened the idle devices and computed nothing there.
    Opened {
        /// Which ranks.
        ranks: Vec<u32>,
    },
    /// No process of a rank was seen on any of them.
    Unknown,
}

/// Utilisation over time, in stretches of one width.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Course {
    /// Width of a stretch.
    pub width_s: f64,
    /// Each device, in the order of [`Report::gpus`].
    pub gpus: Vec<Series>,
    /// How many of the devices that count worked at once on average, and the share of time in which all did.
    pub gpus_at_once: Overlaps,
    /// Each rank, in the order of [`Report::ranks`].
    pub ranks: Vec<Series>,
    /// The same for ranks.
    pub ranks_at_once: Overlaps,
}

/// Utilisation of a device or rank, in percent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Series {
    /// Mean of each stretch.
    pub mean: Vec<Option<f32>>,
    /// Highest reading of each stretch.
    pub most: Vec<Option<u32>>,
}

/// How many worked at once.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Overlaps {
    /// Mean number in each stretch.
    pub mean: Vec<Option<f32>>,
    /// Share of each stretch in which all worked.
    pub all_share: Vec<Option<f32>>,
}

impl Report {
    /// What totals and history have come to.
    pub(crate) fn new(totals: &Totals, history: &History) -> Self {
        build::report(totals, history)
    }

    /// The report as people read it, with a line end.
    pub fn text(&self, lang: Lang) -> String {
        text::render(self, lang)
    }

    /// A picture of utilisation over time.
    pub fn svg(&self, lang: Lang) -> String {
        svg::render(self, lang)
    }

    /// The report as JSON on one line, with a line end.
    pub fn json(&self) -> String {
        // Plain data: encoding does not fail; numbers that are not finite become `null`.
        let mut text = serde_json::to_string(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// How long all of those worked at once that the report is about first of all: devices where any worked, else ranks.
    /// `None` if there were none, or if the job was too short to sample.
    pub fn at_once(&self) -> Option<&AtOnce> {
        let all = match self.subject() {
            Subject::Ranks(_) => self.ranks_at_once.as_ref(),
            _ => self.gpus_at_once.as_ref(),
        };
        all.filter(|all| !all.counted.is_empty() && !text::is_too_short(self))
    }

    /// The ones that the report is about first of all: devices where any worked, else ranks, else devices again.
    pub(crate) fn subject(&self) -> Subject {
        let counted = |all: &Option<AtOnce>| all.as_ref().map_or(0, |all| all.counted.len());
        match (counted(&self.gpus_at_once), counted(&self.ranks_at_once)) {
            (0, 0) if self.gpus.is_empty() => Subject::Nothing,
            (0, 0) => Subject::Gpus(0),
            (0, ranks) => Subject::Ranks(ranks),
            (gpus, _) => Subject::Gpus(gpus),
        }
    }
}

/// What a report is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subject {
    Gpus(usize),
    Ranks(usize),
    Nothing,
}
