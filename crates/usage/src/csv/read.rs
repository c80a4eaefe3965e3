//! Lines of CSV, read again. Nothing in them is believed.

use std::time::Duration;

use paceline_gpu::sample::{DeviceSample, ProcessMemory, Throttle};
use paceline_gpu::snapshot::{Gap, Memory, Reading};

use super::{COLUMNS, NONE, gap};
use crate::recording::Wrong;
use crate::sample::RankSample;

/// Where each of [`COLUMNS`] is in a file, from its first line.
#[derive(Debug)]
pub(crate) struct Header([Option<usize>; COLUMNS.len()]);

/// One line: when, and a device or a rank or neither.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) at: Duration,
    pub(crate) what: What,
}

#[derive(Debug)]
pub(crate) enum What {
    Nothing,
    Gpu(Box<DeviceSample>),
    Rank(RankSample),
}

impl Header {
    /// *Errors*: a column that no line can do without is not there.
    pub(crate) fn parse(line: &str) -> Result<Self, Wrong> {
        let names = cells(line);
        let place = |column: &str| names.iter().position(|name| name.trim() == column);
        let header = Self(COLUMNS.map(place));
        for (column, place) in COLUMNS.iter().zip(&header.0).take(3) {
            if place.is_none() {
                return Err(Wrong::new(format!("there is no column `{column}`")));
            }
        }
        Ok(header)
    }

    /// One line of values.
    ///
    /// *Errors*: a cell is none of what its column holds.
    pub(crate) fn row(&self, line: &str) -> Result<Row, Wrong> {
        let cells = cells(line);
        let cell = |column: &'static str| {
            let place = COLUMNS.iter().position(|name| *name == column);
            let place = place.and_then(|place| self.0[place]);
            let cell = place.and_then(|place| cells.get(place));
            cell.map_or("", |cell| cell.trim())
        };
        let row = Cells {
            missing: gaps(cell("missing")),
            cell,
        };
        let at = time(row.needed("at_s")?, (row.cell)("at_s"))?;
        let what = match (row.cell)("kind") {
            "none" => What::Nothing,
            "gpu" => What::Gpu(Box::new(row.device()?)),
            "rank" => What::Rank(row.rank()?),
            other => return Err(Wrong::new(format!("`{other}` is no kind of line"))),
        };
        Ok(Row { at, what })
    }
}

/// The cells of a line by the names of their columns.
struct Cells<'a, F> {
    cell: F,
    missing: Vec<(&'a str, Gap)>,
}

impl<'a, F: Fn(&'static str) -> &'a str> Cells<'a, F> {
    fn needed<T: std::str::FromStr>(&self, column: &'static str) -> Result<T, Wrong> {
        let cell = (self.cell)(column);
        let wrong = |_| Wrong::new(format!("`{cell}` cannot be `{column}`"));
        cell.parse().map_err(wrong)
    }

    fn number<T: std::str::FromStr>(&self, column: &'static str) -> Result<Reading<T>, Wrong> {
        match (self.cell)(column) {
            "" => Ok(Reading::missing(self.gap(column))),
            _ => self.needed(column).map(Reading::Known),
        }
    }

    fn list<T>(
        &self,
        column: &'static str,
        one: impl Fn(&str) -> Option<T>,
    ) -> Result<Reading<Vec<T>>, Wrong> {
        let cell = (self.cell)(column);
        match cell {
            "" => return Ok(Reading::missing(self.gap(column))),
            NONE => return Ok(Vec::new().into()),
            _ => {}
        }
        let all: Option<Vec<T>> = cell.split_whitespace().map(one).collect();
        let wrong = || Wrong::new(format!("`{cell}` cannot be `{column}`"));
        Ok(all.ok_or_else(wrong)?.into())
    }

    fn gap(&self, column: &str) -> Gap {
        let named = |(name, _): &&(&str, Gap)| *name == column || *name == "*";
        let found = self.missing.iter().find(named);
        found.map_or(Gap::NotRead, |(_, gap)| gap.clone())
    }

    fn device(&self) -> Result<DeviceSample, Wrong> {
        let used = self.number("memory_used_bytes")?;
        let total: Reading<u64> = self.number("memory_total_bytes")?;
        Ok(DeviceSample {
            index: self.needed("index")?,
            utilization_percent: self.number("utilization_percent")?,
            memory_utilization_percent: self.number("memory_utilization_percent")?,
            memory: used.map(|used_bytes| Memory {
                used_bytes,
                total_bytes: total.known().copied().unwrap_or(0),
            }),
            power_mw: self.number("power_mw")?,
            power_limit_mw: self.number("power_limit_mw")?,
            energy_mj: self.number("energy_mj")?,
            temperature_c: self.number("temperature_c")?,
            sm_clock_mhz: self.number("sm_clock_mhz")?,
            memory_clock_mhz: self.number("memory_clock_mhz")?,
            pcie_tx_bytes_s: self.number("pcie_tx_bytes_s")?,
            pcie_rx_bytes_s: self.number("pcie_rx_bytes_s")?,
            nvlink_tx_bytes_s: self.number("nvlink_tx_bytes_s")?,
            nvlink_rx_bytes_s: self.number("nvlink_rx_bytes_s")?,
            throttles: self.list("throttles", |word| {
                let named = Throttle::NAMED.iter().find(|(_, name)| *name == word);
                named.map(|(throttle, _)| *throttle)
            })?,
            processes: self.list("processes", process)?,
        })
    }

    fn rank(&self) -> Result<RankSample, Wrong> {
        let cpu: Reading<f64> = self.number("cpu_s")?;
        let cpu = match cpu {
            Reading::Known(seconds) => time(seconds, (self.cell)("cpu_s"))?.into(),
            Reading::Missing { missing } => Reading::missing(missing),
        };
        Ok(RankSample {
            rank: self.needed("index")?,
            pid: self.number("pid")?.known().copied(),
            cpu,
            resident_bytes: self.number("resident_bytes")?,
        })
    }
}

fn time(seconds: f64, cell: &str) -> Result<Duration, Wrong> {
    let wrong = |_| Wrong::new(format!("`{cell}` is no time"));
    Duration::try_from_secs_f64(seconds).map_err(wrong)
}

fn process(word: &str) -> Option<ProcessMemory> {
    let (pid, bytes) = match word.split_once(':') {
        Some((pid, bytes)) => (pid, Reading::Known(bytes.parse().ok()?)),
        None => (word, Reading::default()),
    };
    Some(ProcessMemory {
        pid: pid.parse().ok()?,
        used_bytes: bytes,
    })
}

fn gaps(cell: &str) -> Vec<(&str, Gap)> {
    let pairs = cell.split(';').filter_map(|pair| pair.split_once('='));
    pairs
        .map(|(name, why)| (name.trim(), gap(why.trim())))
        .collect()
}

/// The cells of a line; those in quotes may have commas, and doubled quotes.
pub(super) fn cells(line: &str) -> Vec<String> {
    let mut cells = vec![String::new()];
    let mut is_quoted = false;
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        let Some(cell) = cells.last_mut() else {
            break;
        };
        match c {
            '"' if is_quoted && chars.peek() == Some(&'"') => {
                chars.next();
                cell.push('"');
            }
            '"' => is_quoted = !is_quoted,
            ',' if !is_quoted => cells.push(String::new()),
            c => cell.push(c),
        }
    }
    cells
}
