//! What one device did.

use std::collections::{BTreeMap, BTreeSet};

use paceline_gpu::sample::{DeviceSample, Throttle};
use paceline_gpu::snapshot::{Memory, Reading};

use super::{Absence, Mean, Peak, Rate, Rules, Span, Spread};
use crate::idle::Moment;

/// Most power that is believed, in milliwatts: a counter that rises faster was set anew.
const POWER_MW_MAX: u64 = 20_000_000;

/// What one device did.
#[derive(Debug, Default)]
pub(crate) struct DeviceTotals {
    /// The driver's number.
    pub(crate) index: u32,
    /// Ranks of which a process was ever seen on it.
    pub(crate) ranks: BTreeSet<u32>,
    /// Time in which its utilisation was known.
    pub(crate) known_ns: u64,
    /// Utilisation over all the time it was known.
    pub(crate) percent: Mean,
    /// The same while the device was busy.
    pub(crate) busy: Mean,
    /// Performance counters, in hundredths of a percent: multiprocessors active, their occupancy, tensor cores, memory bandwidth.
    pub(crate) counters: [Mean; 4],
    /// Most memory in use, by anyone.
    pub(crate) memory: Peak<u64>,
    /// Memory when most was in use, or at the first sample.
    pub(crate) memory_total_bytes: u64,
    /// Energy.
    pub(crate) energy: Energy,
    /// Power, in milliwatts.
    pub(crate) power: Mean,
    /// Highest power.
    pub(crate) power_peak: Peak<u32>,
    /// The last limit of it.
    pub(crate) power_limit_mw: Option<u32>,
    /// Highest temperature.
    pub(crate) temperature: Peak<u32>,
    /// Clocks while busy.
    pub(crate) sm_clock: Spread,
    pub(crate) memory_clock: Spread,
    /// Traffic: PCIe sent and received, NVLink sent and received.
    pub(crate) traffic: [Rate; 4],
    /// Time for each reason to hold the clocks down.
    pub(crate) throttled_ns: BTreeMap<Throttle, u64>,
    /// Time in which memory was held while the device was idle.
    pub(crate) held_idle_ns: u64,
    /// The same for processes of the job's ranks.
    pub(crate) job_idle_ns: u64,
    /// Time in which utilisation could not be read.
    pub(crate) absence: Absence,
}

impl DeviceTotals {
    pub(crate) fn new(index: u32) -> Self {
        Self {
            index,
            ..Self::default()
        }
    }

    /// Whether a process of the job's ranks was ever seen on it.
    pub(crate) fn is_of_job(&self) -> bool {
        !self.ranks.is_empty()
    }

    /// Adds an interval; utilisation in percent, where it is known.
    pub(crate) fn add(
        &mut self,
        now: &DeviceSample,
        span: Span,
        rules: &Rules,
        rank_of: impl Fn(u32) -> Option<u32>,
    ) -> Option<u32> {
        let percent = match &now.utilization_percent {
            Reading::Known(percent) => Some((*percent).min(100)),
            Reading::Missing { missing } => {
                self.absence.add(missing, span);
                None
            }
        };
        let is_busy = percent.is_some_and(|percent| percent >= rules.busy_percent);
        if let Some(percent) = percent {
            self.known_ns = self.known_ns.saturating_add(span.ns);
            self.percent.add(u64::from(percent), span.ns);
        }
        if let (Some(percent), true) = (percent, is_busy) {
            self.busy.add(u64::from(percent), span.ns);
            self.add_clocks(now, span);
        }
        self.add_levels(now, span);
        let processes = now.processes.known().into_iter().flatten();
        let mut ranks = processes
            .filter_map(|process| rank_of(process.pid))
            .peekable();
        let is_of_job = ranks.peek().is_some();
        self.ranks.extend(ranks);
        if Moment::of(now, rules) == Some(Moment::HeldIdle) {
            self.held_idle_ns += span.ns;
            self.job_idle_ns += if is_of_job { span.ns } else { 0 };
        }
        percent
    }

    fn add_clocks(&mut self, now: &DeviceSample, span: Span) {
        let clocks = [
            (&mut self.sm_clock, &now.sm_clock_mhz),
            (&mut self.memory_clock, &now.memory_clock_mhz),
        ];
        for (spread, clock) in clocks {
            if let Some(mhz) = clock.known().filter(|_| span.ns > 0) {
                spread.add(*mhz, span.ns);
            }
        }
    }

    fn add_levels(&mut self, now: &DeviceSample, span: Span) {
        if let Some(Memory {
            used_bytes,
            total_bytes,
        }) = now.memory.known()
        {
            self.memory.add(*used_bytes, span.at_ns);
            self.memory_total_bytes = *total_bytes;
        }
        if let Some(power) = now.power_mw.known() {
            self.power.add(u64::from(*power), span.ns);
            self.power_peak.add(*power, span.at_ns);
        }
        self.power_limit_mw = now.power_limit_mw.known().copied().or(self.power_limit_mw);
        self.energy.add(now, span);
        if let Some(celsius) = now.temperature_c.known() {
            self.temperature.add(*celsius, span.at_ns);
        }
        let rates = [
            &now.pcie_tx_bytes_s,
            &now.pcie_rx_bytes_s,
            &now.nvlink_tx_bytes_s,
            &now.nvlink_rx_bytes_s,
        ];
        for (sum, rate) in self.traffic.iter_mut().zip(rates) {
            if let Some(rate) = rate.known() {
                sum.add(*rate, span.at_ns, span.ns);
            }
        }
        let shares = [
            &now.sm_active_percent,
            &now.sm_occupancy_percent,
            &now.tensor_active_percent,
            &now.dram_active_percent,
        ];
        for (mean, share) in self.counters.iter_mut().zip(shares) {
            if let Some(percent) = share.known() {
                // A recording may hold any number.
                mean.add((percent.clamp(0.0, 100.0) * 100.0).round() as u64, span.ns);
            }
        }
        let throttles = now.throttles.known().map_or(&[][..], Vec::as_slice);
        for (place, throttle) in throttles.iter().enumerate() {
            if !throttles[..place].contains(throttle) {
                let ns = self.throttled_ns.entry(*throttle).or_default();
                *ns = ns.saturating_add(span.ns);
            }
        }
    }
}

/// Energy: the counter's differences, and power times time where it does not count.
#[derive(Debug, Default)]
pub(crate) struct Energy {
    counted_mj: u64,
    /// Milliwatts times nanoseconds.
    estimated: u128,
    /// The same since the counter was last read: what it says when it is back takes their place.
    pending: u128,
    /// Its last value and when that was read.
    counter: Option<(u64, u64)>,
    power_mw: Option<u32>,
    is_known: bool,
}

impl Energy {
    fn add(&mut self, now: &DeviceSample, span: Span) {
        let power_mw = now.power_mw.known().copied();
        let mean_mw = match (self.power_mw, power_mw) {
            (Some(a), Some(b)) => Some(u128::from(a).midpoint(u128::from(b))),
            (a, b) => b.or(a).map(u128::from),
        };
        self.power_mw = power_mw;
        self.is_known |= power_mw.is_some() || now.energy_mj.known().is_some();
        let mean_mw = mean_mw.map_or(0, |mw| mw.min(u128::from(POWER_MW_MAX)));
        self.pending += mean_mw * u128::from(span.ns);
        let Some(counter_mj) = now.energy_mj.known().copied() else {
            return;
        };
        let counter = (counter_mj, span.at_ns);
        let Some((before_mj, before_ns)) = self.counter.replace(counter) else {
            self.settle();
            return;
        };
        let since_ns = span
            .at_ns
            .saturating_sub(before_ns)
            .saturating_add(1_000_000_000);
        let most_mj = u128::from(POWER_MW_MAX) * u128::from(since_ns) / 1_000_000_000;
        match counter_mj.checked_sub(before_mj) {
            Some(rise_mj) if u128::from(rise_mj) <= most_mj => {
                self.counted_mj = self.counted_mj.saturating_add(rise_mj);
                self.pending = 0;
            }
            // It ran over, or a driver that was loaded anew begins at nothing.
            _ => self.settle(),
        }
    }

    fn settle(&mut self) {
        self.estimated += std::mem::take(&mut self.pending);
    }

    /// Energy in joules and how much of it is power times time; nothing where neither was ever read.
    pub(crate) fn joules(&self) -> Option<(f64, f64)> {
        let estimated = (self.estimated + self.pending) as f64 / 1e12;
        let joules = self.counted_mj as f64 / 1e3 + estimated;
        self.is_known.then_some((joules, estimated))
    }
}
