//! From totals to a report.

mod idle;

use super::{
    AtOnce, Course, Flow, GpuReport, Missing, Note, Overlaps, REPORT_VERSION, Range, RankReport,
    Report, Series,
};
use crate::history::{self, History};
use crate::totals::{Absence, DeviceTotals, Mean, Overlap, RankTotals, Rate, Spread, Totals};

pub(super) fn report(totals: &Totals, history: &History) -> Report {
    let origin_ns = totals.first_ns.unwrap_or(0);
    let rules = &totals.rules;
    let clock = Clock { origin_ns };
    let counts = &totals.step.devices.counts;
    // People look for numbers in order, whatever order they were first seen in.
    let gpus = ordered(&totals.devices, |device| device.index);
    let ranks = ordered(&totals.ranks, |rank| rank.rank);
    let counted = gpus.iter().filter(|place| counts[**place]);
    let counted = counted.map(|place| totals.devices[*place].index);
    let gpus_at_once = at_once(&totals.device_overlap, counted.collect());
    let all = ranks.iter().map(|place| totals.ranks[*place].rank);
    let ranks_at_once = at_once(&totals.rank_overlap, all.collect());
    let mut report = Report {
        paceline_usage: REPORT_VERSION,
        total_s: clock.at(totals.last_ns),
        samples: totals.samples,
        busy_percent: rules.busy_percent,
        rank_busy_percent: rules.rank_busy_percent,
        gpus: gpus
            .iter()
            .map(|place| {
                let device = &totals.devices[*place];
                gpu(device, counts[*place], gpus_at_once.observed_s, clock)
            })
            .collect(),
        ranks: ranks
            .iter()
            .map(|place| rank(&totals.ranks[*place], ranks_at_once.observed_s, clock))
            .collect(),
        gpus_at_once: (!totals.devices.is_empty()).then_some(gpus_at_once),
        ranks_at_once: (!totals.ranks.is_empty()).then_some(ranks_at_once),
        notes: Vec::new(),
        history: course(history, clock.at(totals.last_ns), &gpus, &ranks),
    };
    report
        .notes
        .extend(idle::gpus(&report).or_else(|| idle::ranks(&report)));
    if let Some(since_ns) = totals.late.since_ns {
        report.notes.push(Note::Late {
            count: totals.late.count,
            for_s: seconds(totals.late.ns),
            since_s: clock.at(since_ns),
        });
    }
    report
}

/// Moments count from the first sample.
#[derive(Clone, Copy)]
struct Clock {
    origin_ns: u64,
}

impl Clock {
    fn at(self, ns: u64) -> f64 {
        seconds(ns.saturating_sub(self.origin_ns))
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn share(part_s: f64, whole_s: f64) -> f64 {
    if whole_s > 0.0 { part_s / whole_s } else { 0.0 }
}

/// Whether anything was known at any time.
fn known(mean: &Mean) -> Option<()> {
    (mean.ns > 0).then_some(())
}

fn at_once(overlap: &Overlap, mut counted: Vec<u32>) -> AtOnce {
    counted.sort_unstable();
    let observed_s = seconds(overlap.busy_time.total_ns);
    let at_once_s: Vec<f64> = overlap.at_once_ns().iter().map(|ns| seconds(*ns)).collect();
    let all_busy_s = match counted.len() {
        0 => 0.0,
        all => at_once_s.get(all).copied().unwrap_or(0.0),
    };
    let bounds = overlap.bounds();
    AtOnce {
        counted,
        observed_s,
        at_once_s,
        all_busy_s,
        all_busy_share: share(all_busy_s, observed_s),
        least_share: bounds.map(|(least, _)| least),
        most_share: bounds.map(|(_, most)| most),
    }
}

fn gpu(device: &DeviceTotals, is_counted: bool, observed_s: f64, clock: Clock) -> GpuReport {
    let watts = |mw: f64| mw / 1000.0;
    let energy = device.energy.joules();
    let throttled = device.throttled_ns.iter();
    let throttled = throttled.map(|(why, ns)| (*why, seconds(*ns)));
    let [pcie_tx, pcie_rx, nvlink_tx, nvlink_rx] = device.traffic.each_ref().map(flow);
    let percent = |mean: &Mean| mean.mean().map(|hundredths| hundredths / 100.0);
    let [sm_active, sm_occupancy, tensor_active, dram_active] =
        device.counters.each_ref().map(percent);
    let (memory, temperature) = (device.memory.top, device.temperature.top);
    GpuReport {
        index: device.index,
        is_counted,
        ranks: device.ranks.iter().copied().collect(),
        known_s: seconds(device.known_ns),
        busy_s: seconds(device.busy.ns),
        busy_share: known(&device.percent).map(|()| share(seconds(device.busy.ns), observed_s)),
        utilization_percent: device.percent.mean(),
        utilization_busy_percent: device.busy.mean(),
        sm_active_percent: sm_active,
        sm_occupancy_percent: sm_occupancy,
        tensor_active_percent: tensor_active,
        dram_active_percent: dram_active,
        memory_peak_bytes: memory.map(|(bytes, _)| bytes),
        memory_peak_at_s: memory.map(|(_, at_ns)| clock.at(at_ns)),
        memory_total_bytes: memory.map(|_| device.memory_total_bytes),
        energy_j: energy.map(|(joules, _)| joules),
        energy_estimated_j: energy.map_or(0.0, |(_, estimated)| estimated),
        power_w: device.power.mean().map(watts),
        power_peak_w: device.power_peak.top.map(|(mw, _)| watts(f64::from(mw))),
        power_limit_w: device.power_limit_mw.map(|mw| watts(f64::from(mw))),
        temperature_peak_c: temperature.map(|(celsius, _)| celsius),
        temperature_peak_at_s: temperature.map(|(_, at_ns)| clock.at(at_ns)),
        sm_clock_mhz: range(&device.sm_clock),
        memory_clock_mhz: range(&device.memory_clock),
        pcie_tx,
        pcie_rx,
        nvlink_tx,
        nvlink_rx,
        throttled_s: throttled.collect(),
        held_idle_s: seconds(device.held_idle_ns),
        job_idle_s: seconds(device.job_idle_ns),
        missing: missing(&device.absence, clock),
    }
}

fn rank(rank: &RankTotals, observed_s: f64, clock: Clock) -> RankReport {
    let resident = rank.resident.top;
    RankReport {
        rank: rank.rank,
        busy_s: seconds(rank.busy.ns),
        busy_share: known(&rank.percent).map(|()| share(seconds(rank.busy.ns), observed_s)),
        utilization_percent: rank.percent.mean(),
        utilization_busy_percent: rank.busy.mean(),
        cpu_s: seconds(rank.cpu_ns),
        resident_peak_bytes: resident.map(|(bytes, _)| bytes),
        resident_peak_at_s: resident.map(|(_, at_ns)| clock.at(at_ns)),
        restarts: rank.restarts,
        missing: missing(&rank.absence, clock),
    }
}

fn flow(rate: &Rate) -> Option<Flow> {
    let bytes = rate.sum()?;
    let peak_bytes_s = rate.peak.top.map_or(0, |(rate, _)| rate);
    Some(Flow {
        bytes,
        peak_bytes_s,
    })
}

fn range(spread: &Spread) -> Option<Range> {
    let (least, most) = spread.range?;
    let mean = spread.mean.mean()?;
    Some(Range { least, mean, most })
}

fn missing(absence: &Absence, clock: Clock) -> Vec<Missing> {
    let stretches = absence.stretches.iter().filter(|stretch| stretch.ns > 0);
    let told = stretches.map(|stretch| Missing {
        why: stretch.why.clone(),
        since_s: clock.at(stretch.since_ns),
        until_s: clock.at(stretch.until_ns),
        for_s: seconds(stretch.ns),
    });
    told.collect()
}

/// The places of `all` in the order of their numbers.
fn ordered<T>(all: &[T], number: impl Fn(&T) -> u32) -> Vec<usize> {
    let mut places: Vec<usize> = (0..all.len()).collect();
    places.sort_by_key(|place| number(&all[*place]));
    places
}

fn course(history: &History, total_s: f64, gpus: &[usize], ranks: &[usize]) -> Course {
    let width_s = history.width_s();
    let used = ((total_s / width_s).ceil() as usize).min(history::BUCKETS);
    let series = |all: &[Vec<history::Bucket>], places: &[usize]| {
        let one = |buckets: &Vec<history::Bucket>| {
            let used = &buckets[..used.min(buckets.len())];
            Series {
                mean: used.iter().map(|b| b.mean().map(rounded)).collect(),
                most: used.iter().map(history::Bucket::most).collect(),
            }
        };
        // A device that was never observed has no series.
        let series = |place: &usize| all.get(*place).map(one).unwrap_or_default();
        places.iter().map(series).collect()
    };
    let overlaps = |all: &[history::Together]| {
        let used = &all[..used.min(all.len())];
        Overlaps {
            mean: used.iter().map(|b| b.mean().map(rounded)).collect(),
            all_share: used.iter().map(|b| b.all_share().map(rounded)).collect(),
        }
    };
    Course {
        width_s,
        gpus: series(&history.devices.series, gpus),
        gpus_at_once: overlaps(&history.devices.at_once),
        ranks: series(&history.ranks.series, ranks),
        ranks_at_once: overlaps(&history.ranks.at_once),
    }
}

/// Three places are enough for a picture.
fn rounded(value: f64) -> f32 {
    ((value * 1000.0).round() / 1000.0) as f32
}
