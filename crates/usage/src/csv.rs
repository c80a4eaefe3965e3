//! Samples as CSV: a line for each device and rank, with units in the names of the columns.
//!
//! A cell without a value is empty, and the column `missing` says why where anybody knows: `power_mw=not_supported`, or
//! `*=lost` for all of a line.

mod read;

use std::fmt::Write as _;
use std::io::{self, Write};
use std::time::Duration;

use paceline_gpu::sample::{DeviceSample, Throttle};
use paceline_gpu::snapshot::{Gap, Reading};

use crate::sample::{RankSample, Sample};

pub(crate) use self::read::{Header, Row, What};

/// The columns that are written; one that is read may have fewer, and in any order.
pub(crate) const COLUMNS: [&str; 23] = [
    "at_s",
    "kind",
    "index",
    "utilization_percent",
    "memory_utilization_percent",
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

/// A list that is known to be empty.
const NONE: &str = "-";

/// Writes samples as they come.
#[derive(Debug)]
pub(crate) struct CsvWriter<W> {
    out: W,
    line: String,
    missing: Vec<(&'static str, Gap)>,
    readings: usize,
}

impl<W: Write> CsvWriter<W> {
    /// *Errors*: the header cannot be written.
    pub(crate) fn new(mut out: W) -> io::Result<Self> {
        writeln!(out, "{}", COLUMNS.join(","))?;
        Ok(Self {
            out,
            line: String::new(),
            missing: Vec::new(),
            readings: 0,
        })
    }

    /// Writes a sample.
    ///
    /// *Errors*: the writer's.
    pub(crate) fn write(&mut self, sample: &Sample) -> io::Result<()> {
        if sample.devices.is_empty() && sample.ranks.is_empty() {
            self.begin(sample.at, "none", 0);
            self.empty(COLUMNS.len() - 4);
            self.end()?;
        }
        for device in &sample.devices {
            self.begin(sample.at, "gpu", device.index);
            self.device(device);
            self.end()?;
        }
        for rank in &sample.ranks {
            self.begin(sample.at, "rank", rank.rank);
            self.rank(rank);
            self.end()?;
        }
        Ok(())
    }

    /// Hands on what has been written.
    ///
    /// *Errors*: the writer's.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    fn begin(&mut self, at: Duration, kind: &str, index: u32) {
        self.line.clear();
        self.missing.clear();
        self.readings = 0;
        let (seconds, micros) = (at.as_secs(), at.subsec_micros());
        let _ = write!(self.line, "{seconds}.{micros:06},{kind},{index}");
    }

    fn device(&mut self, device: &DeviceSample) {
        self.cell("utilization_percent", &device.utilization_percent);
        let name = "memory_utilization_percent";
        self.cell(name, &device.memory_utilization_percent);
        match &device.memory {
            Reading::Known(memory) => {
                self.readings += 1;
                let _ = write!(self.line, ",{},{}", memory.used_bytes, memory.total_bytes);
            }
            Reading::Missing { missing } => {
                self.gap("memory_used_bytes", missing);
                self.line.push(',');
            }
        }
        self.cell("power_mw", &device.power_mw);
        self.cell("power_limit_mw", &device.power_limit_mw);
        self.cell("energy_mj", &device.energy_mj);
        self.cell("temperature_c", &device.temperature_c);
        self.cell("sm_clock_mhz", &device.sm_clock_mhz);
        self.cell("memory_clock_mhz", &device.memory_clock_mhz);
        self.cell("pcie_tx_bytes_s", &device.pcie_tx_bytes_s);
        self.cell("pcie_rx_bytes_s", &device.pcie_rx_bytes_s);
        self.cell("nvlink_tx_bytes_s", &device.nvlink_tx_bytes_s);
        self.cell("nvlink_rx_bytes_s", &device.nvlink_rx_bytes_s);
        self.list("throttles", &device.throttles, |line, throttle| {
            let named = Throttle::NAMED.iter().find(|(other, _)| other == throttle);
            line.push_str(named.map_or("", |(_, name)| name));
        });
        self.list("processes", &device.processes, |line, process| {
            let _ = write!(line, "{}", process.pid);
            if let Some(bytes) = process.used_bytes.known() {
                let _ = write!(line, ":{bytes}");
            }
        });
        self.empty(3);
    }

    fn rank(&mut self, rank: &RankSample) {
        self.empty(COLUMNS.len() - 7);
        self.line.push(',');
        if let Some(pid) = rank.pid {
            let _ = write!(self.line, "{pid}");
        }
        let cpu = rank.cpu.clone().map(|cpu| cpu.as_secs_f64());
        self.cell("cpu_s", &cpu);
        self.cell("resident_bytes", &rank.resident_bytes);
    }

    fn cell(&mut self, name: &'static str, reading: &Reading<impl std::fmt::Display>) {
        match reading {
            Reading::Known(value) => {
                self.readings += 1;
                let _ = write!(self.line, ",{value}");
            }
            Reading::Missing { missing } => self.gap(name, missing),
        }
    }

    fn list<T>(
        &mut self,
        name: &'static str,
        reading: &Reading<Vec<T>>,
        one: impl Fn(&mut String, &T),
    ) {
        let Reading::Known(all) = reading else {
            return self.gap(name, reading.gap().unwrap_or(&Gap::NotRead));
        };
        self.readings += 1;
        self.line.push(',');
        if all.is_empty() {
            self.line.push_str(NONE);
        }
        for (place, item) in all.iter().enumerate() {
            if place > 0 {
                self.line.push(' ');
            }
            one(&mut self.line, item);
        }
    }

    fn gap(&mut self, name: &'static str, gap: &Gap) {
        self.line.push(',');
        match gap {
            Gap::NotRead => self.readings += 1,
            gap => self.missing.push((name, gap.clone())),
        }
    }

    fn empty(&mut self, cells: usize) {
        self.line.extend(std::iter::repeat_n(',', cells));
    }

    fn end(&mut self) -> io::Result<()> {
        self.line.push(',');
        if let [(_, first), rest @ ..] = self.missing.as_slice() {
            let is_all = self.readings == 0 && rest.iter().all(|(_, gap)| gap == first);
            let mut told = String::new();
            if is_all {
                let _ = write!(told, "*={}", reason(first));
            } else {
                for (place, (name, gap)) in self.missing.iter().enumerate() {
                    let comma = if place > 0 { ";" } else { "" };
                    let _ = write!(told, "{comma}{name}={}", reason(gap));
                }
            }
            quote(&mut self.line, &told);
        }
        self.line.push('\n');
        self.out.write_all(self.line.as_bytes())
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

fn quote(line: &mut String, cell: &str) {
    if cell.contains([',', '"']) {
        let _ = write!(line, "\"{}\"", cell.replace('"', "\"\""));
    } else {
        line.push_str(cell);
    }
}

#[cfg(test)]
mod tests;
