//! What devices and ranks do in Prometheus's text format, in its base units.
//!
//! *Source*: the exposition format, version 0.0.4, and Prometheus's rules for names: base units, `_total` for what only grows.

use std::fmt::{Display, Write};
use std::time::Duration;

use paceline_gpu::sample::Throttle;
use paceline_gpu::snapshot::Reading;

use super::super::live::{Device, Devices, Job, Jobs, Newest};
use super::super::top::words;

/// A driver that has not answered for this long is taken not to.
const SILENT_AFTER: Duration = Duration::from_secs(10);

/// Whether the driver has not answered for long, `elapsed` after looking began.
pub(super) fn is_silent(elapsed: Duration, newest: &Newest<Devices>) -> bool {
    let is_late = |time: Duration| time > SILENT_AFTER;
    let never = newest.latest.is_none() && is_late(elapsed);
    never || newest.looking_for.is_some_and(is_late)
}

/// The page; what is not known has no line.
pub(super) fn text(devices: Option<&Devices>, jobs: Option<&Jobs>) -> String {
    let mut out = Exposition(String::new());
    let answers = devices.is_some_and(|devices| devices.trouble.is_none());
    out.family(
        "paceline_driver_up",
        Kind::Gauge,
        "Whether the driver answers.",
    );
    out.line("paceline_driver_up", &[], u8::from(answers));
    of_devices(&mut out, devices.map_or(&[], |devices| &devices.devices));
    of_ranks(&mut out, jobs.map_or(&[], |jobs| &jobs.jobs));
    out.0
}

fn of_devices(out: &mut Exposition, devices: &[Device]) {
    type Value = fn(&Device) -> Option<f64>;
    let families: [(&str, Kind, &str, Value); 15] = [
        (
            "utilization_ratio",
            Kind::Gauge,
            "Share of the driver's last measuring period in which any kernel ran.",
            |d| scaled(&d.now.utilization_percent, 1.0, 100.0),
        ),
        (
            "memory_utilization_ratio",
            Kind::Gauge,
            "Share of that period in which memory was read or written.",
            |d| scaled(&d.now.memory_utilization_percent, 1.0, 100.0),
        ),
        (
            "memory_used_bytes",
            Kind::Gauge,
            "Device memory in use by anyone.",
            |d| d.now.memory.known().map(|memory| memory.used_bytes as f64),
        ),
        (
            "memory_total_bytes",
            Kind::Gauge,
            "Device memory in all.",
            |d| d.now.memory.known().map(|memory| memory.total_bytes as f64),
        ),
        ("power_watts", Kind::Gauge, "Power.", |d| {
            scaled(&d.now.power_mw, 1.0, 1000.0)
        }),
        (
            "power_limit_watts",
            Kind::Gauge,
            "The limit that power is held below.",
            |d| scaled(&d.now.power_limit_mw, 1.0, 1000.0),
        ),
        (
            "energy_joules_total",
            Kind::Counter,
            "Energy since the driver was loaded.",
            |d| d.now.energy_mj.known().map(|mj| *mj as f64 / 1000.0),
        ),
        (
            "temperature_celsius",
            Kind::Gauge,
            "Temperature of the chip.",
            |d| scaled(&d.now.temperature_c, 1.0, 1.0),
        ),
        (
            "clock_hertz",
            Kind::Gauge,
            "Clock of the multiprocessors.",
            |d| scaled(&d.now.sm_clock_mhz, 1e6, 1.0),
        ),
        (
            "memory_clock_hertz",
            Kind::Gauge,
            "Clock of the memory.",
            |d| scaled(&d.now.memory_clock_mhz, 1e6, 1.0),
        ),
        (
            "pcie_transmit_bytes_per_second",
            Kind::Gauge,
            "Sent over PCIe by the device.",
            |d| d.now.pcie_tx_bytes_s.known().map(|rate| *rate as f64),
        ),
        (
            "pcie_receive_bytes_per_second",
            Kind::Gauge,
            "Received over PCIe by the device.",
            |d| d.now.pcie_rx_bytes_s.known().map(|rate| *rate as f64),
        ),
        (
            "nvlink_transmit_bytes_per_second",
            Kind::Gauge,
            "Sent over all NVLinks.",
            |d| d.now.nvlink_tx_bytes_s.known().map(|rate| *rate as f64),
        ),
        (
            "nvlink_receive_bytes_per_second",
            Kind::Gauge,
            "Received over all NVLinks.",
            |d| d.now.nvlink_rx_bytes_s.known().map(|rate| *rate as f64),
        ),
        (
            "lost",
            Kind::Gauge,
            "Whether the device does not answer any more: it fell off the bus.",
            |d| Some(f64::from(u8::from(d.is_lost()))),
        ),
    ];
    for (name, kind, help, value) in families {
        let name = format!("paceline_gpu_{name}");
        let mut values = devices
            .iter()
            .filter_map(|d| Some((d, value(d)?)))
            .peekable();
        if values.peek().is_some() {
            out.family(&name, kind, help);
        }
        for (device, value) in values {
            out.line(&name, &of_device(device), value);
        }
    }
    let name = "paceline_gpu_throttled";
    let mut known = devices
        .iter()
        .filter_map(|d| Some((d, d.now.throttles.known()?)))
        .peekable();
    if known.peek().is_some() {
        out.family(
            name,
            Kind::Gauge,
            "Whether clocks are held down for this reason.",
        );
    }
    for (device, throttles) in known {
        for (throttle, reason) in Throttle::NAMED {
            let mut labels = of_device(device);
            labels.push(("reason", reason.to_owned()));
            out.line(name, &labels, u8::from(throttles.contains(&throttle)));
        }
    }
}

/// A reading in other units. Division by a power of ten gives the digits that one expects, multiplication by its inverse does not.
fn scaled(reading: &Reading<u32>, times: f64, per: f64) -> Option<f64> {
    reading.known().map(|value| f64::from(*value) * times / per)
}

fn of_device(device: &Device) -> Vec<(&'static str, String)> {
    let text = |reading: &Reading<String>| reading.known().cloned().unwrap_or_default();
    vec![
        ("gpu", device.now.index.to_string()),
        ("uuid", text(&device.uuid)),
        ("name", text(&device.name)),
    ]
}

fn of_ranks(out: &mut Exposition, jobs: &[Job]) {
    type Value = fn(&Job, usize) -> Option<f64>;
    let families: [(&str, Kind, &str, Value); 6] = [
        (
            "up",
            Kind::Gauge,
            "Whether the rank has a process.",
            |job, local_rank| {
                Some(f64::from(u8::from(
                    job.running.ranks[local_rank].pid.is_some(),
                )))
            },
        ),
        (
            "step",
            Kind::Gauge,
            "The training step that the rank is in.",
            |job, local_rank| {
                let (activity, _) = job.running.ranks[local_rank].activity?;
                Some(activity.step as f64)
            },
        ),
        (
            "phase_seconds",
            Kind::Gauge,
            "For how long the rank has been doing what it does.",
            |job, local_rank| {
                let (_, since) = job.running.ranks[local_rank].activity?;
                Some(since.as_secs_f64())
            },
        ),
        (
            "restarts",
            Kind::Gauge,
            "How often the rank's job was started again.",
            |job, _| Some(f64::from(job.running.restarts)),
        ),
        (
            "cpu_seconds_total",
            Kind::Counter,
            "Processor time of the rank and all that it started.",
            |job, local_rank| {
                job.uses
                    .get(local_rank)?
                    .cpu
                    .known()
                    .map(Duration::as_secs_f64)
            },
        ),
        (
            "resident_bytes",
            Kind::Gauge,
            "Resident memory of the rank and all that it started.",
            |job, local_rank| {
                job.uses
                    .get(local_rank)?
                    .resident_bytes
                    .known()
                    .map(|bytes| *bytes as f64)
            },
        ),
    ];
    let ranks = || {
        jobs.iter()
            .flat_map(|job| (0..job.running.ranks.len()).map(move |r| (job, r)))
    };
    for (name, kind, help, value) in families {
        let name = format!("paceline_rank_{name}");
        let mut values = ranks()
            .filter_map(|(j, r)| Some((j, r, value(j, r)?)))
            .peekable();
        if values.peek().is_some() {
            out.family(&name, kind, help);
        }
        for (job, local_rank, value) in values {
            out.line(&name, &of_rank(job, local_rank), value);
        }
    }
    let name = "paceline_rank_phase";
    let phase = |job: &Job, rank: usize| job.running.ranks[rank].activity.map(|(a, _)| a.phase);
    let mut known = ranks()
        .filter_map(|(j, r)| Some((j, r, phase(j, r)?)))
        .peekable();
    if known.peek().is_some() {
        out.family(
            name,
            Kind::Gauge,
            "1 for the part of a step that the rank is in.",
        );
    }
    for (job, local_rank, phase) in known {
        let mut labels = of_rank(job, local_rank);
        labels.push(("phase", words::phase(phase).to_owned()));
        out.line(name, &labels, 1);
    }
}

/// Ranks are told apart by the number on this machine: what they call themselves comes from the page, and is not believed.
fn of_rank(job: &Job, local_rank: usize) -> Vec<(&'static str, String)> {
    let rank = job.running.ranks[local_rank].rank;
    vec![
        ("job", job.label.clone()),
        (
            "rank",
            rank.map(|rank| rank.to_string()).unwrap_or_default(),
        ),
        ("local_rank", local_rank.to_string()),
    ]
}

#[derive(Clone, Copy)]
enum Kind {
    Gauge,
    Counter,
}

struct Exposition(String);

impl Exposition {
    /// Begins a family; all of its lines follow.
    fn family(&mut self, name: &str, kind: Kind, help: &str) {
        let kind = match kind {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
        };
        // Writing to a string does not fail, here and below.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn line(&mut self, name: &str, labels: &[(&str, String)], value: impl Display) {
        self.0.push_str(name);
        for (index, (label, text)) in labels.iter().enumerate() {
            let open = if index == 0 { '{' } else { ',' };
            let _ = write!(self.0, "{open}{label}=\"{}\"", escaped(text));
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }
}

fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '"' => out.push_str("\\\""),
            '\n' => out.push_str("\\n"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests;
