//! How many worked at once, for how long.

use super::Side;
use crate::busy::BusyTime;

/// Busy time of a number of devices or ranks, and bounds for the time in which all of them worked.
#[derive(Debug)]
pub(crate) struct Overlap {
    /// Counted by the rule of what is busy.
    pub(crate) busy_time: BusyTime,
    /// Of how many.
    pub(crate) counted: usize,
    /// Percent times nanoseconds in which all of them must have worked by their readings, were these of one moment.
    least: u128,
    /// The same in which they can have worked at most.
    most: u128,
}

impl Default for Overlap {
    fn default() -> Self {
        Self {
            busy_time: BusyTime::new(0),
            counted: 0,
            least: 0,
            most: 0,
        }
    }
}

impl Overlap {
    /// Adds an interval; one in which nothing could be read does not count.
    pub(crate) fn add(&mut self, ns: u64, side: &Side) {
        self.counted = side.counted();
        self.busy_time.grow(side.busy.len());
        if side.is_changed {
            // Those that are new did not work before, so neither did all.
            (self.least, self.most) = (0, 0);
        }
        if side.at_once().is_none() {
            return;
        }
        self.busy_time.add_stretch(ns, &side.busy);
        let counted = side.percent.iter().zip(&side.counts);
        let percents = counted.filter(|(_, counts)| **counts);
        let (mut least, mut most) = (100_u32, None);
        for (percent, _) in percents {
            let percent = percent.unwrap_or(0).min(100);
            least = least.saturating_sub(100 - percent);
            most = Some(most.unwrap_or(100).min(percent));
        }
        if let Some(most) = most {
            self.least += u128::from(least) * u128::from(ns);
            self.most += u128::from(most) * u128::from(ns);
        }
    }

    /// Takes all that was busy so far for idle.
    pub(crate) fn forget(&mut self) {
        let total_ns = self.busy_time.total_ns;
        self.busy_time = BusyTime::new(self.busy_time.busy_ns.len());
        self.busy_time.add_stretch(total_ns, &[]);
    }

    /// Time with exactly `k` busy, for each `k` up to all that count.
    pub(crate) fn at_once_ns(&self) -> &[u64] {
        let len = (self.counted + 1).min(self.busy_time.at_once_ns.len());
        &self.busy_time.at_once_ns[..len]
    }

    /// Least and largest share of the time in which all can have worked, by their readings.
    pub(crate) fn bounds(&self) -> Option<(f64, f64)> {
        let whole = 100.0 * self.busy_time.total_ns as f64;
        let is_known = self.counted > 0 && self.busy_time.total_ns > 0;
        is_known.then(|| (self.least as f64 / whole, self.most as f64 / whole))
    }
}
