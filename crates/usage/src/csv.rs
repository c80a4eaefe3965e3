//! Samples as CSV: a row for each device and rank, with units in the names of the columns.
//!
//! A cell without a value is empty, and the column `missing` says why where the reason is known: `power_mw=not_supported`,
//! or `*=lost` for a whole row.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::str::FromStr;
use std::time::Duration;

use csv::{Reader, ReaderBuilder, StringRecord, Trim};
use paceline_gpu::sample::{DeviceSample, ProcessMemory};
use paceline_gpu::snapshot::{DEVICES_MAX, Gap, Memory, Reading};
use serde_json::{Value, json};

use crate::recording::RecordingError;
use crate::sample::{RankSample, Sample};
use crate::totals::RANKS_MAX;

/// The columns as they are written. A file that is read may have fewer, in any order.
const COLUMNS: [&str; 27] = [
    "at_s",
    "kind",
    "index",
    "utilization_percent",
    "memory_utilization_percent",
    "sm_active_percent",
    "sm_occupancy_percent",
    "tensor_active_percent",
    "dram_active_percent",
    "memory_used_bytes",
    "memory_total_bytes",
    "power_mw",
    "power_limit_mw",
    "energy_mj",
    "temperature_c",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "pcie_tx_bytes_s",
    "pcie_rx_bytes_s",
    "nvlink_tx_bytes_s",
    "nvlink_rx_bytes_s",
    "throttles",
    "processes",
    "pid",
    "cpu_s",
    "resident_bytes",
    "missing",
];

/// Columns of the performance counters. Most devices have none of them, for one reason, which then stands once.
const COUNTERS: [&str; 4] = [
    "sm_active_percent",
    "sm_occupancy_percent",
    "tensor_active_percent",
    "dram_active_percent",
];
/// What they are called together.
const ALL_COUNTERS: &str = "counters";

/// Columns that every file needs.
const NEEDED: [&str; 3] = ["at_s", "kind", "index"];

/// An empty list, as opposed to an unknown one.
const NONE: &str = "-";

/// Writes samples as they come.
#[derive(Debug)]
pub(crate) struct CsvWriter<W: Write>(csv::Writer<W>);

impl<W: Write> CsvWriter<W> {
    /// Writes the header.
    pub(crate) fn new(out: W) -> io::Result<Self> {
        let mut writer = csv::Writer::from_writer(out);
        writer.write_record(COLUMNS)?;
        Ok(Self(writer))
    }

    /// Writes a sample.
    ///
    /// *Errors*: the writer's.
    pub(crate) fn write(&mut self, sample: &Sample) -> io::Result<()> {
        let devices = sample.devices.iter().map(device_row);
        let mut rows: Vec<Value> = devices.chain(sample.ranks.iter().map(rank_row)).collect();
        if rows.is_empty() {
            rows.push(json!({ "kind": "none", "index": 0 }));
        }
        for row in rows {
            self.0.write_record(cells(sample.at, &row))?;
        }
        Ok(())
    }

    /// Passes buffered rows on.
    ///
    /// *Errors*: the writer's.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// A device as JSON, with the names of the columns.
fn device_row(device: &DeviceSample) -> Value {
    let mut row = json!(device);
    row["kind"] = "gpu".into();
    row["memory_used_bytes"] = json!(device.memory.clone().map(|memory| memory.used_bytes));
    row["memory_total_bytes"] = json!(device.memory.known().map(|memory| memory.total_bytes));
    row
}

/// A rank as JSON, with the names of the columns.
fn rank_row(rank: &RankSample) -> Value {
    json!({
        "kind": "rank",
        "index": rank.rank,
        "pid": rank.pid,
        "cpu_s": rank.cpu.clone().map(|cpu| cpu.as_secs_f64()),
        "resident_bytes": rank.resident_bytes,
    })
}

fn cells(at: Duration, row: &Value) -> Vec<String> {
    let mut cells = vec![format!("{:.6}", at.as_secs_f64())];
    let mut gaps: Vec<(&str, String)> = Vec::new();
    let mut has_readings = false;
    for column in &COLUMNS[1..COLUMNS.len() - 1] {
        let value = &row[column];
        let gap = value.get("missing");
        match gap.filter(|why| **why != "not_read") {
            Some(why) => gaps.push((column, reason(why))),
            None => has_readings |= !value.is_null() && !["kind", "index", "pid"].contains(column),
        }
        cells.push(match gap {
            Some(_) => String::new(),
            None => cell(value),
        });
    }
    let is_same = gaps.windows(2).all(|pair| pair[0].1 == pair[1].1);
    cells.push(match gaps.first() {
        Some((_, why)) if is_same && !has_readings => format!("*={why}"),
        _ => {
            let gaps = counters_as_one(gaps);
            let gaps = gaps.iter().map(|(column, why)| format!("{column}={why}"));
            gaps.collect::<Vec<_>>().join(";")
        }
    });
    cells
}

/// The same gaps, with that of all performance counters in one if it is one.
fn counters_as_one(mut gaps: Vec<(&str, String)>) -> Vec<(&str, String)> {
    let is_counter = |gap: &&(&str, String)| COUNTERS.contains(&gap.0);
    let reasons: Vec<&String> = gaps.iter().filter(is_counter).map(|gap| &gap.1).collect();
    let is_one = reasons.windows(2).all(|pair| pair[0] == pair[1]);
    if is_one && reasons.len() == COUNTERS.len() {
        gaps.retain(|(column, _)| *column == COUNTERS[0] || !COUNTERS.contains(column));
        for gap in gaps.iter_mut().filter(|gap| gap.0 == COUNTERS[0]) {
            gap.0 = ALL_COUNTERS;
        }
    }
    gaps
}

fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(word) => word.clone(),
        Value::Array(all) if all.is_empty() => NONE.to_owned(),
        Value::Array(all) => all.iter().map(cell).collect::<Vec<_>>().join(" "),
        Value::Object(process) => match (&process["pid"], &process["used_bytes"]) {
            (pid, Value::Number(bytes)) => format!("{pid}:{bytes}"),
            (pid, _) => pid.to_string(),
        },
        number => number.to_string(),
    }
}

/// The reason for a gap, without the separators of the column.
fn reason(gap: &Value) -> String {
    let words = gap.as_str().or_else(|| gap["other"].as_str());
    words.unwrap_or_default().replace([';', '='], " ")
}

fn gap(reason: &str) -> Gap {
    serde_json::from_value(reason.into()).unwrap_or_else(|_| Gap::other(reason))
}

/// The samples of a file, in its order: the rows of one moment are one sample.
pub(crate) struct CsvSamples<R> {
    reader: Reader<R>,
    columns: HashMap<String, usize>,
    record: StringRecord,
    /// The first row of the next moment.
    next: Option<Sample>,
}

impl<R: Read> CsvSamples<R> {
    /// *Errors*: it cannot be read, or lacks a column that every file needs.
    pub(crate) fn new(input: R) -> Result<Self, RecordingError> {
        let mut reader = ReaderBuilder::new()
            .trim(Trim::All)
            .flexible(true)
            .from_reader(input);
        let header = reader.headers().map_err(refused)?.iter();
        let columns: HashMap<String, usize> = header.map(str::to_owned).zip(0..).collect();
        if let Some(column) = NEEDED.iter().find(|column| !columns.contains_key(**column)) {
            let why = format!("there is no column `{column}`");
            return Err(RecordingError::Line { line: 1, why });
        }
        Ok(Self {
            reader,
            columns,
            record: StringRecord::new(),
            next: None,
        })
    }

    fn sample(&mut self) -> Result<Option<Sample>, RecordingError> {
        let first = match self.next.take() {
            Some(row) => Some(row),
            None => self.row()?,
        };
        let Some(mut sample) = first else {
            return Ok(None);
        };
        loop {
            if sample.devices.len() > DEVICES_MAX || sample.ranks.len() > RANKS_MAX {
                return Err(self.wrong("too many devices or ranks at one moment".to_owned()));
            }
            match self.row()? {
                Some(row) if row.at == sample.at => {
                    sample.devices.extend(row.devices);
                    sample.ranks.extend(row.ranks);
                }
                other => {
                    self.next = other;
                    return Ok(Some(sample));
                }
            }
        }
    }

    /// One row, as a sample of one device or rank.
    fn row(&mut self) -> Result<Option<Sample>, RecordingError> {
        if !self.reader.read_record(&mut self.record).map_err(refused)? {
            return Ok(None);
        }
        let mut sample = Sample {
            at: self.time("at_s", self.needed("at_s")?)?,
            ..Sample::default()
        };
        match self.cell("kind") {
            "none" => {}
            "gpu" => sample.devices.push(self.device()?),
            "rank" => sample.ranks.push(self.rank()?),
            other => return Err(self.wrong(format!("`{other}` is no kind of line"))),
        }
        Ok(Some(sample))
    }

    fn device(&self) -> Result<DeviceSample, RecordingError> {
        let total_bytes = self.value("memory_total_bytes")?.unwrap_or(0);
        let memory = self.value("memory_used_bytes")?.map(|used_bytes| Memory {
            used_bytes,
            total_bytes,
        });
        let throttle = |word: &str| serde_json::from_value(word.into()).ok();
        macro_rules! device {
            ($($column:ident),*; $($others:tt)*) => {
                DeviceSample { $($column: self.number(stringify!($column))?,)* $($others)* }
            };
        }
        Ok(device!(
            utilization_percent, memory_utilization_percent, sm_active_percent, sm_occupancy_percent, tensor_active_percent,
            dram_active_percent, power_mw, power_limit_mw, energy_mj, temperature_c, sm_clock_mhz, memory_clock_mhz,
            pcie_tx_bytes_s, pcie_rx_bytes_s, nvlink_tx_bytes_s, nvlink_rx_bytes_s;
            index: self.needed("index")?,
            memory: self.reading("memory_used_bytes", memory),
            throttles: self.list("throttles", throttle)?,
            processes: self.list("processes", process)?,
        ))
    }

    fn rank(&self) -> Result<RankSample, RecordingError> {
        let cpu: Option<f64> = self.value("cpu_s")?;
        let cpu = cpu.map(|seconds| self.time("cpu_s", seconds)).transpose()?;
        Ok(RankSample {
            rank: self.needed("index")?,
            pid: self.value("pid")?,
            cpu: self.reading("cpu_s", cpu),
            resident_bytes: self.number("resident_bytes")?,
        })
    }

    /// The value of a cell that is not empty.
    fn value<T: FromStr>(&self, column: &str) -> Result<Option<T>, RecordingError> {
        match self.cell(column) {
            "" => Ok(None),
            cell => cell.parse().map(Some).map_err(|_| self.misfit(column)),
        }
    }

    fn needed<T: FromStr>(&self, column: &str) -> Result<T, RecordingError> {
        self.value(column)?.ok_or_else(|| self.misfit(column))
    }

    fn number<T: FromStr>(&self, column: &str) -> Result<Reading<T>, RecordingError> {
        Ok(self.reading(column, self.value(column)?))
    }

    fn list<T>(
        &self,
        column: &str,
        one: impl Fn(&str) -> Option<T>,
    ) -> Result<Reading<Vec<T>>, RecordingError> {
        let all = match self.cell(column) {
            "" => None,
            NONE => Some(Vec::new()),
            words => {
                let all: Option<Vec<T>> = words.split_whitespace().map(one).collect();
                Some(all.ok_or_else(|| self.misfit(column))?)
            }
        };
        Ok(self.reading(column, all))
    }

    /// The value, or the reason for its absence that the row gives.
    fn reading<T>(&self, column: &str, value: Option<T>) -> Reading<T> {
        let missing = || {
            let pairs = self.cell("missing").split(';');
            let mut pairs = pairs.filter_map(|pair| pair.split_once('='));
            let is_counter = COUNTERS.contains(&column);
            let named = pairs.find(|(name, _)| {
                let name = name.trim();
                [column, "*"].contains(&name) || is_counter && name == ALL_COUNTERS
            });
            named.map_or(Gap::NotRead, |(_, why)| gap(why.trim()))
        };
        value.ok_or_else(missing).into()
    }

    fn time(&self, column: &str, seconds: f64) -> Result<Duration, RecordingError> {
        Duration::try_from_secs_f64(seconds)
            .map_err(|_| self.wrong(format!("`{}` is no time", self.cell(column))))
    }

    fn cell(&self, column: &str) -> &str {
        let place = self.columns.get(column);
        let cell = place.and_then(|place| self.record.get(*place));
        cell.unwrap_or_default()
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
