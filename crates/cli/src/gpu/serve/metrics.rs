//! What devices and ranks do in Prometheus's text format, in its base units.
//!
//! *Source*: the exposition format, version 0.0.4, and Prometheus's rules for names: base units, `_total` for what only grows.

use std::fmt::Write;
use std::time::Duration;

use paceline_gpu::sample::Throttle;
use paceline_gpu::snapshot::Reading;
use paceline_rendezvous::page::RunningRank;
use paceline_words::Lang;

use super::super::live::{Device, Devices, Job, Jobs, Newest, RankUse};
use crate::activity::phase;

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
    let help = "Whether the driver answers.";
    let no_labels = |_: &()| Vec::new();
    out.family("paceline_driver_up", help, &[()], no_labels, |()| {
        flag(answers)
    });
    of_devices(&mut out, devices.map_or(&[], |devices| &devices.devices));
    of_ranks(&mut out, jobs.map_or(&[], |jobs| &jobs.jobs));
    out.0
}

/// A family of values of one thing: name, help, and the value where it is known.
type Family<T> = (&'static str, &'static str, fn(&T) -> Option<f64>);

/// Families, each as name, help and value.
macro_rules! families {
    ($($name:literal, $help:literal, $item:ident => $value:expr;)*) => {
        &[$(($name, $help, |$item| $value)),*]
    };
}

const OF_DEVICES: &[Family<Device>] = families! {
    "utilization_ratio", "Share of the driver's last measuring period in which any kernel ran.",
        d => d.now.utilization_percent.known().map(|percent| f64::from(*percent) / 100.0);
    "memory_utilization_ratio", "Share of that period in which memory was read or written.",
        d => d.now.memory_utilization_percent.known().map(|percent| f64::from(*percent) / 100.0);
    "sm_active_ratio", "Share of the multiprocessors' time in which they ran anything, of a second or more; DCGM_FI_PROF_SM_ACTIVE in DCGM.",
        d => ratio(&d.now.sm_active_percent);
    "sm_occupancy_ratio", "Threads resident on the multiprocessors, of the most that they hold; DCGM_FI_PROF_SM_OCCUPANCY in DCGM.",
        d => ratio(&d.now.sm_occupancy_percent);
    "tensor_active_ratio", "Share of the time in which tensor cores worked; DCGM_FI_PROF_PIPE_TENSOR_ACTIVE in DCGM.",
        d => ratio(&d.now.tensor_active_percent);
    "dram_active_ratio", "Bandwidth of device memory in use, of the most that there is; DCGM_FI_PROF_DRAM_ACTIVE in DCGM.",
        d => ratio(&d.now.dram_active_percent);
    "held_idle", "Whether its memory is held although it has computed nothing for 10 s.", d => flag(d.idleness?.held_idle);
    "unused", "Whether nobody holds it and it has computed nothing for 10 s, while another device works.", d => flag(d.idleness?.unused);
    "memory_used_bytes", "Device memory in use by anyone.", d => d.now.memory.known().map(|memory| memory.used_bytes as f64);
    "memory_total_bytes", "Device memory in all.", d => d.now.memory.known().map(|memory| memory.total_bytes as f64);
    "power_watts", "Power.", d => d.now.power_mw.known().map(|mw| f64::from(*mw) / 1e3);
    "power_limit_watts", "The limit that power is held below.", d => d.now.power_limit_mw.known().map(|mw| f64::from(*mw) / 1e3);
    "energy_joules_total", "Energy since the driver was loaded.", d => d.now.energy_mj.known().map(|mj| *mj as f64 / 1e3);
    "temperature_celsius", "Temperature of the chip.", d => d.now.temperature_c.known().map(|celsius| f64::from(*celsius));
    "clock_hertz", "Clock of the multiprocessors.", d => d.now.sm_clock_mhz.known().map(|mhz| f64::from(*mhz) * 1e6);
    "memory_clock_hertz", "Clock of the memory.", d => d.now.memory_clock_mhz.known().map(|mhz| f64::from(*mhz) * 1e6);
    "pcie_transmit_bytes_per_second", "Sent over PCIe by the device.", d => d.now.pcie_tx_bytes_s.known().map(|rate| *rate as f64);
    "pcie_receive_bytes_per_second", "Received over PCIe by the device.", d => d.now.pcie_rx_bytes_s.known().map(|rate| *rate as f64);
    "nvlink_transmit_bytes_per_second", "Sent over all NVLinks.", d => d.now.nvlink_tx_bytes_s.known().map(|rate| *rate as f64);
    "nvlink_receive_bytes_per_second", "Received over all NVLinks.", d => d.now.nvlink_rx_bytes_s.known().map(|rate| *rate as f64);
    "lost", "Whether the device does not answer any more: it fell off the bus.", d => flag(d.now.is_lost());
};

fn of_devices(out: &mut Exposition, devices: &[Device]) {
    for (name, help, value) in OF_DEVICES {
        let name = format!("paceline_gpu_{name}");
        out.family(&name, help, devices, of_device, value);
    }
    let reasons = |device| Throttle::NAMED.map(|reason| (device, reason));
    let each: Vec<(&Device, (Throttle, &str))> = devices.iter().flat_map(reasons).collect();
    out.family(
        "paceline_gpu_throttled",
        "Whether clocks are held down for this reason.",
        &each,
        |(device, (_, reason))| {
            let mut labels = of_device(device);
            labels.push(("reason", (*reason).to_owned()));
            labels
        },
        |(device, (throttle, _))| flag(device.now.throttles.known()?.contains(throttle)),
    );
}

fn ratio(percent: &Reading<f64>) -> Option<f64> {
    percent.known().map(|percent| percent / 100.0)
}

fn flag(is_so: bool) -> Option<f64> {
    Some(f64::from(u8::from(is_so)))
}

fn of_device(device: &Device) -> Vec<(&'static str, String)> {
    let text = |reading: &Reading<String>| reading.known().cloned().unwrap_or_default();
    vec![
        ("gpu", device.now.index.to_string()),
        ("uuid", text(&device.uuid)),
        ("name", text(&device.name)),
    ]
}

/// A rank of a job, by its number on this machine: what ranks call themselves comes from the page, and is not believed.
#[derive(Clone, Copy)]
struct Local<'a> {
    job: &'a Job,
    rank: usize,
}

impl Local<'_> {
    fn running(&self) -> &RunningRank {
        &self.job.running.ranks[self.rank]
    }

    fn used(&self) -> Option<&RankUse> {
        self.job.uses.get(self.rank)
    }

    fn labels(&self) -> Vec<(&'static str, String)> {
        let rank = self.running().rank.map(|rank| rank.to_string());
        vec![
            ("job", self.job.label.clone()),
            ("rank", rank.unwrap_or_default()),
            ("local_rank", self.rank.to_string()),
        ]
    }
}

fn of_ranks(out: &mut Exposition, jobs: &[Job]) {
    let each = jobs.iter().flat_map(|job| {
        let ranks = 0..job.running.ranks.len();
        ranks.map(move |rank| Local { job, rank })
    });
    let ranks: Vec<Local<'_>> = each.collect();
    let families: &[Family<Local<'_>>] = families! {
        "up", "Whether the rank has a process.", r => flag(r.running().pid.is_some());
        "step", "The training step that the rank is in.", r => Some(r.running().activity?.0.step as f64);
        "phase_seconds", "For how long the rank has been doing what it does.", r => Some(r.running().activity?.1.as_secs_f64());
        "restarts", "How often the rank's job was started again.", r => Some(f64::from(r.job.running.restarts));
        "cpu_seconds_total", "Processor time of the rank and all that it started.", r => r.used()?.cpu.known().map(Duration::as_secs_f64);
        "resident_bytes", "Resident memory of the rank and all that it started.",
            r => r.used()?.resident_bytes.known().map(|bytes| *bytes as f64);
    };
    for (name, help, value) in families {
        let name = format!("paceline_rank_{name}");
        out.family(&name, help, &ranks, Local::labels, value);
    }
    out.family(
        "paceline_rank_phase",
        "1 for the part of a step that the rank is in.",
        &ranks,
        |rank| {
            let mut labels = rank.labels();
            let phase = rank
                .running()
                .activity
                .map(|(activity, _)| phase(activity.phase, Lang::En));
            labels.push(("phase", phase.unwrap_or_default().to_owned()));
            labels
        },
        |rank| rank.running().activity.map(|_| 1.0),
    );
}

struct Exposition(String);

impl Exposition {
    /// Writes a family, unless none of its values is known. By Prometheus's rules a name that ends in `_total` is a counter's.
    fn family<T>(
        &mut self,
        name: &str,
        help: &str,
        items: &[T],
        labels: impl Fn(&T) -> Vec<(&'static str, String)>,
        value: impl Fn(&T) -> Option<f64>,
    ) {
        let known = items.iter().filter_map(|item| Some((item, value(item)?)));
        let mut known = known.peekable();
        if known.peek().is_none() {
            return;
        }
        let kind = match name.ends_with("_total") {
            true => "counter",
            false => "gauge",
        };
        // Writing to a string does not fail, here and below.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (item, value) in known {
            let labels = labels(item).into_iter();
            let labels: Vec<String> = labels
                .map(|(label, text)| format!("{label}=\"{}\"", escaped(&text)))
                .collect();
            let _ = match labels.is_empty() {
                true => writeln!(self.0, "{name} {value}"),
                false => writeln!(self.0, "{name}{{{}}} {value}", labels.join(",")),
            };
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests;
