//! Samples as CSV: a row for each device and rank, with units in the names of the columns.
//!
//! A cell without a value is empty, and the column `missing` says why where the reason is known: `power_mw=not_supported`,
//! or `*=lost` for a whole row.

use std::io::{self, Read, Write};
use std::time::Duration;

use csv::{Reader, ReaderBuilder, StringRecord, Trim};
use paceline_gpu::sample::{DeviceSample, ProcessMemory, Throttle};
use paceline_gpu::snapshot::{DEVICES_MAX, Gap, Memory, Reading};
use serde::{Deserialize, Serialize, Serializer};

use crate::recording::RecordingError;
use crate::sample::{RankSample, Sample};
use crate::totals::RANKS_MAX;

/// Columns that no file can do without.
const NEEDED: [&str; 3] = ["at_s", "kind", "index"];

/// A list that is known to be empty.
const NONE: &str = "-";

/// One row. A file may have fewer columns, and in any order.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Row {
    #[serde(serialize_with = "to_the_microsecond")]
    at_s: f64,
    kind: String,
    index: Option<u32>,
    utilization_percent: Option<u32>,
    memory_utilization_percent: Option<u32>,
    memory_used_bytes: Option<u64>,
    memory_total_bytes: Option<u64>,
    power_mw: Option<u32>,
    power_limit_mw: Option<u32>,
    energy_mj: Option<u64>,
    temperature_c: Option<u32>,
    sm_clock_mhz: Option<u32>,
    memory_clock_mhz: Option<u32>,
    pcie_tx_bytes_s: Option<u64>,
    pcie_rx_bytes_s: Option<u64>,
    nvlink_tx_bytes_s: Option<u64>,
    nvlink_rx_bytes_s: Option<u64>,
    throttles: Option<String>,
    processes: Option<String>,
    pid: Option<u32>,
    cpu_s: Option<f64>,
    resident_bytes: Option<u64>,
    missing: String,
}

fn to_the_microsecond<S: Serializer>(seconds: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{seconds:.6}"))
}

/// Writes samples as they come.
#[derive(Debug)]
pub(crate) struct CsvWriter<W: Write>(csv::Writer<W>);

impl<W: Write> CsvWriter<W> {
    pub(crate) fn new(out: W) -> Self {
        Self(csv::Writer::from_writer(out))
    }

    /// Writes a sample.
    ///
    /// *Errors*: the writer's.
    pub(crate) fn write(&mut self, sample: &Sample) -> io::Result<()> {
        let devices = sample.devices.iter().map(Row::of_device);
        let mut rows: Vec<Row> = devices
            .chain(sample.ranks.iter().map(Row::of_rank))
            .collect();
        if rows.is_empty() {
            rows.push(Row {
                kind: "none".to_owned(),
                index: Some(0),
                ..Row::default()
            });
        }
        for mut row in rows {
            row.at_s = sample.at.as_secs_f64();
            self.0.serialize(row)?;
        }
        Ok(())
    }

    /// Hands on what has been written.
    ///
    /// *Errors*: the writer's.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// The readings of a row, and why some are missing.
#[derive(Default)]
struct Gaps {
    readings: usize,
    missing: Vec<(&'static str, String)>,
}

impl Gaps {
    fn value<T: Clone>(&mut self, column: &'static str, reading: &Reading<T>) -> Option<T> {
        match reading {
            Reading::Missing { missing } if *missing != Gap::NotRead => {
                self.missing.push((column, reason(missing)));
            }
            _ => self.readings += 1,
        }
        reading.known().cloned()
    }

    fn list<T: Clone>(
        &mut self,
        column: &'static str,
        reading: &Reading<Vec<T>>,
        one: impl Fn(&T) -> String,
    ) -> Option<String> {
        let all = self.value(column, reading)?;
        let words: Vec<String> = all.iter().map(one).collect();
        Some(match words.is_empty() {
            true => NONE.to_owned(),
            false => words.join(" "),
        })
    }

    fn text(self) -> String {
        match self.missing.as_slice() {
            [(_, first), rest @ ..]
                if self.readings == 0 && rest.iter().all(|(_, other)| other == first) =>
            {
                format!("*={first}")
            }
            all => {
                let each = all.iter().map(|(column, why)| format!("{column}={why}"));
                each.collect::<Vec<_>>().join(";")
            }
        }
    }
}

impl Row {
    fn of_device(device: &DeviceSample) -> Self {
        let mut gaps = Gaps::default();
        let utilization_percent = gaps.value("utilization_percent", &device.utilization_percent);
        let memory_utilization_percent = gaps.value(
            "memory_utilization_percent",
            &device.memory_utilization_percent,
        );
        let memory = gaps.value("memory_used_bytes", &device.memory);
        Self {
            kind: "gpu".to_owned(),
            index: Some(device.index),
            utilization_percent,
            memory_utilization_percent,
            memory_used_bytes: memory.as_ref().map(|memory| memory.used_bytes),
            memory_total_bytes: memory.map(|memory| memory.total_bytes),
            power_mw: gaps.value("power_mw", &device.power_mw),
            power_limit_mw: gaps.value("power_limit_mw", &device.power_limit_mw),
            energy_mj: gaps.value("energy_mj", &device.energy_mj),
            temperature_c: gaps.value("temperature_c", &device.temperature_c),
            sm_clock_mhz: gaps.value("sm_clock_mhz", &device.sm_clock_mhz),
            memory_clock_mhz: gaps.value("memory_clock_mhz", &device.memory_clock_mhz),
            pcie_tx_bytes_s: gaps.value("pcie_tx_bytes_s", &device.pcie_tx_bytes_s),
            pcie_rx_bytes_s: gaps.value("pcie_rx_bytes_s", &device.pcie_rx_bytes_s),
            nvlink_tx_bytes_s: gaps.value("nvlink_tx_bytes_s", &device.nvlink_tx_bytes_s),
            nvlink_rx_bytes_s: gaps.value("nvlink_rx_bytes_s", &device.nvlink_rx_bytes_s),
            throttles: gaps.list("throttles", &device.throttles, |throttle| {
                let named = Throttle::NAMED.iter().find(|(other, _)| other == throttle);
                named.map_or_else(String::new, |(_, name)| (*name).to_owned())
            }),
            processes: gaps.list("processes", &device.processes, |process| {
                match process.used_bytes.known() {
                    Some(bytes) => format!("{}:{bytes}", process.pid),
                    None => process.pid.to_string(),
                }
            }),
            missing: gaps.text(),
            ..Self::default()
        }
    }

    fn of_rank(rank: &RankSample) -> Self {
        let mut gaps = Gaps::default();
        Self {
            kind: "rank".to_owned(),
            index: Some(rank.rank),
            pid: rank.pid,
            cpu_s: gaps.value("cpu_s", &rank.cpu).map(|cpu| cpu.as_secs_f64()),
            resident_bytes: gaps.value("resident_bytes", &rank.resident_bytes),
            missing: gaps.text(),
            ..Self::default()
        }
    }
}

fn reason(gap: &Gap) -> String {
    match gap {
        Gap::NotRead => "not_read".into(),
        Gap::NotSupported => "not_supported".into(),
        Gap::NoPermission => "no_permission".into(),
        Gap::NoFunction => "no_function".into(),
        Gap::Lost => "lost".into(),
        Gap::Other(text) => text.replace([';', '='], " "),
    }
}

fn gap(reason: &str) -> Gap {
    match reason {
        "not_read" => Gap::NotRead,
        "not_supported" => Gap::NotSupported,
        "no_permission" => Gap::NoPermission,
        "no_function" => Gap::NoFunction,
        "lost" => Gap::Lost,
        text => Gap::other(text),
    }
}

/// Samples of a file, in its order: the rows of one moment are one sample.
pub(crate) struct CsvSamples<R> {
    reader: Reader<R>,
    header: StringRecord,
    record: StringRecord,
    /// The first row of the next moment.
    next: Option<(Duration, Content)>,
}

/// What a row is about.
enum Content {
    Nothing,
    Gpu(Box<DeviceSample>),
    Rank(RankSample),
}

impl<R: Read> CsvSamples<R> {
    /// *Errors*: it cannot be read, or lacks a column that no row can do without.
    pub(crate) fn new(input: R) -> Result<Self, RecordingError> {
        let mut reader = ReaderBuilder::new()
            .trim(Trim::All)
            .flexible(true)
            .from_reader(input);
        let header = reader.headers().map_err(refused)?.clone();
        for column in NEEDED {
            if !header.iter().any(|name| name == column) {
                let why = format!("there is no column `{column}`");
                return Err(RecordingError::Line { line: 1, why });
            }
        }
        Ok(Self {
            reader,
            header,
            record: StringRecord::new(),
            next: None,
        })
    }

    fn sample(&mut self) -> Result<Option<Sample>, RecordingError> {
        let first = match self.next.take() {
            Some(row) => Some(row),
            None => self.row()?,
        };
        let Some((at, first)) = first else {
            return Ok(None);
        };
        let mut sample = Sample {
            at,
            ..Sample::default()
        };
        let mut content = first;
        loop {
            match content {
                Content::Nothing => {}
                Content::Gpu(device) => sample.devices.push(*device),
                Content::Rank(rank) => sample.ranks.push(rank),
            }
            if sample.devices.len() > DEVICES_MAX || sample.ranks.len() > RANKS_MAX {
                return Err(self.wrong("too many devices or ranks at one moment".to_owned()));
            }
            match self.row()? {
                Some((now, next)) if now == at => content = next,
                other => {
                    self.next = other;
                    return Ok(Some(sample));
                }
            }
        }
    }

    fn row(&mut self) -> Result<Option<(Duration, Content)>, RecordingError> {
        if !self.reader.read_record(&mut self.record).map_err(refused)? {
            return Ok(None);
        }
        let row = self.record.deserialize(Some(&self.header));
        let row: Row = row.map_err(|error| match error.kind() {
            csv::ErrorKind::Deserialize { err, .. } => {
                let place = err.field().and_then(|field| usize::try_from(field).ok());
                let column = place.and_then(|place| self.header.get(place));
                self.misfit(column.unwrap_or_default())
            }
            _ => self.wrong(error.to_string()),
        })?;
        let at = self.time("at_s", row.at_s)?;
        let content = match row.kind.as_str() {
            "none" => Content::Nothing,
            "gpu" => Content::Gpu(Box::new(self.device(&row)?)),
            "rank" => Content::Rank(self.rank(&row)?),
            other => return Err(self.wrong(format!("`{other}` is no kind of line"))),
        };
        Ok(Some((at, content)))
    }

    fn device(&self, row: &Row) -> Result<DeviceSample, RecordingError> {
        let gaps = gaps(&row.missing);
        let memory = row.memory_used_bytes.map(|used_bytes| Memory {
            used_bytes,
            total_bytes: row.memory_total_bytes.unwrap_or(0),
        });
        Ok(DeviceSample {
            index: row.index.ok_or_else(|| self.misfit("index"))?,
            utilization_percent: reading(&gaps, "utilization_percent", row.utilization_percent),
            memory_utilization_percent: reading(
                &gaps,
                "memory_utilization_percent",
                row.memory_utilization_percent,
            ),
            memory: reading(&gaps, "memory_used_bytes", memory),
            power_mw: reading(&gaps, "power_mw", row.power_mw),
            power_limit_mw: reading(&gaps, "power_limit_mw", row.power_limit_mw),
            energy_mj: reading(&gaps, "energy_mj", row.energy_mj),
            temperature_c: reading(&gaps, "temperature_c", row.temperature_c),
            sm_clock_mhz: reading(&gaps, "sm_clock_mhz", row.sm_clock_mhz),
            memory_clock_mhz: reading(&gaps, "memory_clock_mhz", row.memory_clock_mhz),
            pcie_tx_bytes_s: reading(&gaps, "pcie_tx_bytes_s", row.pcie_tx_bytes_s),
            pcie_rx_bytes_s: reading(&gaps, "pcie_rx_bytes_s", row.pcie_rx_bytes_s),
            nvlink_tx_bytes_s: reading(&gaps, "nvlink_tx_bytes_s", row.nvlink_tx_bytes_s),
            nvlink_rx_bytes_s: reading(&gaps, "nvlink_rx_bytes_s", row.nvlink_rx_bytes_s),
            throttles: reading(
                &gaps,
                "throttles",
                self.list("throttles", &row.throttles, throttle)?,
            ),
            processes: reading(
                &gaps,
                "processes",
                self.list("processes", &row.processes, process)?,
            ),
        })
    }

    fn rank(&self, row: &Row) -> Result<RankSample, RecordingError> {
        let gaps = gaps(&row.missing);
        let cpu = row.cpu_s.map(|seconds| self.time("cpu_s", seconds));
        Ok(RankSample {
            rank: row.index.ok_or_else(|| self.misfit("index"))?,
            pid: row.pid,
            cpu: reading(&gaps, "cpu_s", cpu.transpose()?),
            resident_bytes: reading(&gaps, "resident_bytes", row.resident_bytes),
        })
    }

    fn list<T>(
        &self,
        column: &str,
        cell: &Option<String>,
        one: fn(&str) -> Option<T>,
    ) -> Result<Option<Vec<T>>, RecordingError> {
        match cell.as_deref() {
            None => Ok(None),
            Some(NONE) => Ok(Some(Vec::new())),
            Some(words) => {
                let all: Option<Vec<T>> = words.split_whitespace().map(one).collect();
                all.map(Some).ok_or_else(|| self.misfit(column))
            }
        }
    }

    fn time(&self, column: &str, seconds: f64) -> Result<Duration, RecordingError> {
        Duration::try_from_secs_f64(seconds)
            .map_err(|_| self.wrong(format!("`{}` is no time", self.cell(column))))
    }

    fn cell(&self, column: &str) -> &str {
        let place = self.header.iter().position(|name| name == column);
        place
            .and_then(|place| self.record.get(place))
            .unwrap_or_default()
    }

    fn misfit(&self, column: &str) -> RecordingError {
        self.wrong(format!("`{}` cannot be `{column}`", self.cell(column)))
    }

    fn wrong(&self, why: String) -> RecordingError {
        let line = self.record.position().map_or(0, csv::Position::line);
        RecordingError::Line { line, why }
    }
}

impl<R: Read> Iterator for CsvSamples<R> {
    type Item = Result<Sample, RecordingError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.sample().transpose()
    }
}

fn refused(error: csv::Error) -> RecordingError {
    match error.position().map(csv::Position::line) {
        Some(line) if !error.is_io_error() => RecordingError::Line {
            line,
            why: error.to_string(),
        },
        _ => RecordingError::Read(error.into()),
    }
}

fn reading<T>(gaps: &[(&str, Gap)], column: &str, value: Option<T>) -> Reading<T> {
    let missing = || {
        let named = |(name, _): &&(&str, Gap)| *name == column || *name == "*";
        let found = gaps.iter().find(named);
        found.map_or(Gap::NotRead, |(_, gap)| gap.clone())
    };
    value.ok_or_else(missing).into()
}

fn gaps(cell: &str) -> Vec<(&str, Gap)> {
    let pairs = cell.split(';').filter_map(|pair| pair.split_once('='));
    pairs
        .map(|(name, why)| (name.trim(), gap(why.trim())))
        .collect()
}

fn throttle(word: &str) -> Option<Throttle> {
    let named = Throttle::NAMED.iter().find(|(_, name)| *name == word);
    named.map(|(throttle, _)| *throttle)
}

fn process(word: &str) -> Option<ProcessMemory> {
    let (pid, used_bytes) = match word.split_once(':') {
        Some((pid, bytes)) => (pid, Reading::Known(bytes.parse().ok()?)),
        None => (word, Reading::default()),
    };
    Some(ProcessMemory {
        pid: pid.parse().ok()?,
        used_bytes,
    })
}

#[cfg(test)]
mod tests;
