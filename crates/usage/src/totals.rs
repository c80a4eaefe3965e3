//! Adds up what devices and ranks did, sample by sample, in memory that does not grow with time.

mod device;
mod measure;
mod overlap;
mod rank;

use std::time::Duration;

pub(crate) use self::device::DeviceTotals;
pub(crate) use self::measure::{Absence, Mean, Peak, Rate, Spread};
pub(crate) use self::overlap::Overlap;
pub(crate) use self::rank::RankTotals;

use paceline_gpu::snapshot::DEVICES_MAX;

use crate::sample::Sample;

/// Most ranks of one machine that are looked at.
pub(crate) const RANKS_MAX: usize = 4096;

/// What counts as busy, and which devices count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// A device is busy in an interval when its utilisation, in percent, is at least this.
    ///
    /// The driver's number is the share of its last measuring period (a sixth of a second to a second, by product) in which any
    /// kernel ran, however few of the device's processors it used. A device that trains reads tens of percent, one that
    /// waits reads 0, and a desktop's drawing 1 to 4: the default is 5. What does not hang on this choice are
    /// the bounds that the report gives beside it, from the readings as they are.
    pub busy_percent: u32,
    /// A rank is busy in an interval when it and all that it started used at least this much processor time, in percent
    /// of one core. The system counts in hundredths of a second, so an interval of a tenth has ten steps: the default is 50.
    /// A rank that spins while it waits counts as busy.
    pub rank_busy_percent: u32,
    /// An interval longer than this was not observed: nothing is known about what lies between its ends but the counters.
    pub late_after: Duration,
    /// A device that has computed nothing for this long is said to be held but idle, or unused, while it still is: loading data
    /// and saving take shorter breaks in most jobs.
    pub idle_after: Duration,
    /// The driver's numbers of the devices that are to work at once. If not given: those that a process of the job's ranks was
    /// seen on, and where none ever is (other processes, or a container that hides them), those that were ever busy.
    pub devices: Option<Vec<u32>>,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            busy_percent: 5,
            rank_busy_percent: 50,
            late_after: Duration::from_secs(3),
            idle_after: Duration::from_secs(10),
            devices: None,
        }
    }
}

/// What all samples so far add up to.
///
/// A sample speaks for the interval that ends with it: the driver's utilisation looks back, and processor time is a
/// difference.
///
/// *Cost*: memory is the same after a week as after a second: it depends on the number of devices and ranks only.
#[derive(Debug)]
pub(crate) struct Totals {
    pub(crate) rules: Rules,
    pub(crate) samples: u64,
    pub(crate) first_ns: Option<u64>,
    pub(crate) last_ns: u64,
    pub(crate) late: Late,
    pub(crate) devices: Vec<DeviceTotals>,
    pub(crate) device_overlap: Overlap,
    pub(crate) ranks: Vec<RankTotals>,
    pub(crate) rank_overlap: Overlap,
    is_job_seen: bool,
    pub(crate) step: Step,
}

/// Intervals that were too long to say anything about.
#[derive(Debug, Default)]
pub(crate) struct Late {
    /// How many.
    pub(crate) count: u64,
    /// All their time.
    pub(crate) ns: u64,
    /// When the first began.
    pub(crate) since_ns: Option<u64>,
}

/// What the last sample added.
#[derive(Debug, Default)]
pub(crate) struct Step {
    pub(crate) from_ns: u64,
    pub(crate) to_ns: u64,
    pub(crate) devices: Side,
    pub(crate) ranks: Side,
}

/// Devices, or ranks, in one interval.
#[derive(Debug, Default)]
pub(crate) struct Side {
    /// Utilisation of each, where it is known.
    pub(crate) percent: Vec<Option<u32>>,
    /// Whether each was busy, and counts.
    pub(crate) busy: Vec<bool>,
    /// Whether each is one of those that are to work at once.
    pub(crate) counts: Vec<bool>,
    /// Whether `counts` is not what it was: those that are new were idle before.
    pub(crate) is_changed: bool,
}

impl Totals {
    /// Nothing yet.
    pub(crate) fn new(rules: Rules) -> Self {
        Self {
            rules,
            samples: 0,
            first_ns: None,
            last_ns: 0,
            late: Late::default(),
            devices: Vec::new(),
            device_overlap: Overlap::default(),
            ranks: Vec::new(),
            rank_overlap: Overlap::default(),
            is_job_seen: false,
            step: Step::default(),
        }
    }

    /// Adds a sample; returns whether it is later than the one before, else only its levels count.
    pub(crate) fn add(&mut self, sample: &Sample) -> bool {
        let at_ns = nanos(sample.at);
        let is_first = self.first_ns.is_none();
        let from_ns = if is_first { at_ns } else { self.last_ns };
        let span_ns = at_ns.saturating_sub(from_ns);
        let is_late = span_ns > nanos(self.rules.late_after);
        self.samples += 1;
        self.first_ns.get_or_insert(at_ns);
        self.last_ns = from_ns.max(at_ns);
        if is_late {
            self.late.add(from_ns, span_ns);
        }
        let span = Span {
            from_ns,
            at_ns: self.last_ns,
            ns: if is_late { 0 } else { span_ns },
            elapsed_ns: span_ns,
        };
        self.add_devices(sample, span);
        self.add_ranks(sample, span);
        self.device_overlap.add(span.ns, &self.step.devices);
        self.rank_overlap.add(span.ns, &self.step.ranks);
        self.step.from_ns = from_ns;
        self.step.to_ns = self.last_ns;
        !is_first && span.ns > 0
    }

    fn add_devices(&mut self, sample: &Sample, span: Span) {
        let side = &mut self.step.devices;
        side.begin(self.devices.len());
        let rank_of = |pid: u32| {
            let mut ranks = sample.ranks.iter().take(RANKS_MAX);
            ranks
                .find(|rank| rank.pid == Some(pid))
                .map(|rank| rank.rank)
        };
        for (place, now) in sample.devices.iter().take(DEVICES_MAX).enumerate() {
            let is_it = |device: &DeviceTotals| device.index == now.index;
            let Some(at) = find(&self.devices, place, DEVICES_MAX, is_it) else {
                continue;
            };
            if at == self.devices.len() {
                self.devices.push(DeviceTotals::new(now.index));
                side.grow(at + 1);
            }
            let device = &mut self.devices[at];
            side.percent[at] = device.add(now, span, &self.rules, rank_of);
        }
        self.choose();
    }

    /// Which devices are to work at once.
    fn choose(&mut self) {
        let side = &mut self.step.devices;
        let busy_percent = self.rules.busy_percent;
        let is_job_seen = self.devices.iter().any(DeviceTotals::is_of_job);
        if is_job_seen && !self.is_job_seen && self.rules.devices.is_none() {
            // Until now no process of the job was on any device: devices that were busy worked for other jobs.
            self.device_overlap.forget();
            side.counts.fill(false);
            side.is_changed = true;
        }
        self.is_job_seen = is_job_seen;
        for (place, device) in self.devices.iter().enumerate() {
            let is_busy = side.percent[place].is_some_and(|percent| percent >= busy_percent);
            let counts = match &self.rules.devices {
                Some(named) => named.contains(&device.index) && device.known_ns > 0,
                None if is_job_seen => device.is_of_job() && device.known_ns > 0,
                None => side.counts[place] || is_busy,
            };
            side.is_changed |= counts != side.counts[place];
            side.counts[place] = counts;
            side.busy[place] = is_busy && counts;
        }
    }

    fn add_ranks(&mut self, sample: &Sample, span: Span) {
        let side = &mut self.step.ranks;
        side.begin(self.ranks.len());
        for (place, now) in sample.ranks.iter().take(RANKS_MAX).enumerate() {
            let is_it = |rank: &RankTotals| rank.rank == now.rank;
            let Some(at) = find(&self.ranks, place, RANKS_MAX, is_it) else {
                continue;
            };
            if at == self.ranks.len() {
                self.ranks.push(RankTotals::new(now.rank));
                side.grow(at + 1);
            }
            side.is_changed |= !side.counts[at];
            side.counts[at] = true;
            let percent = self.ranks[at].add(now, span, self.rules.rank_busy_percent);
            let is_busy = percent.is_some_and(|percent| percent >= self.rules.rank_busy_percent);
            side.percent[at] = percent;
            side.busy[at] = is_busy;
        }
    }
}

/// Where one is among all, most likely at `place`, or is to be put behind them; nothing where there are too many.
fn find<T>(all: &[T], place: usize, most: usize, is_it: impl Fn(&T) -> bool) -> Option<usize> {
    let likely = all.get(place).filter(|one| is_it(one)).map(|_| place);
    let known = likely.or_else(|| all.iter().position(&is_it));
    known.or((all.len() < most).then_some(all.len()))
}

/// One interval, and how much of it was observed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    pub(crate) from_ns: u64,
    pub(crate) at_ns: u64,
    /// Its length; 0 where the sample came too late to speak for it.
    pub(crate) ns: u64,
    /// Its length, in any case.
    pub(crate) elapsed_ns: u64,
}

impl Late {
    fn add(&mut self, from_ns: u64, ns: u64) {
        self.count += 1;
        self.ns = self.ns.saturating_add(ns);
        self.since_ns.get_or_insert(from_ns);
    }
}

impl Side {
    fn begin(&mut self, len: usize) {
        self.grow(len);
        self.percent.fill(None);
        self.busy.fill(false);
        self.is_changed = false;
    }

    fn grow(&mut self, len: usize) {
        self.percent.resize(len, None);
        self.busy.resize(len, false);
        self.counts.resize(len, false);
    }

    /// How many count.
    pub(crate) fn counted(&self) -> usize {
        self.counts.iter().filter(|counts| **counts).count()
    }

    /// How many were busy at once; nothing where none could be read.
    pub(crate) fn at_once(&self) -> Option<usize> {
        let is_seen = self.percent.iter().any(Option::is_some);
        is_seen.then(|| self.busy.iter().filter(|busy| **busy).count())
    }
}

pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
