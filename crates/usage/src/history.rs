//! The course of a run in a fixed number of buckets: when all are full, each two become one.

use super::totals::{Side, Step};

/// Buckets of a history.
pub(crate) const BUCKETS: usize = 1024;

/// Utilisation over time, of devices and of ranks.
///
/// *Cost*: memory is that of [`BUCKETS`] buckets for each device and rank, however long the run.
#[derive(Debug)]
pub(crate) struct History {
    width_us: u64,
    pub(crate) devices: Course,
    pub(crate) ranks: Course,
}

/// Devices, or ranks, over time.
#[derive(Debug, Default)]
pub(crate) struct Course {
    pub(crate) series: Vec<Vec<Bucket>>,
    pub(crate) at_once: Vec<Together>,
}

/// One device or rank in one stretch of time.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Bucket {
    known_us: u64,
    percent_us: u64,
    most: u32,
}

/// All of them in one stretch of time.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Together {
    seen_us: u64,
    busy_us: u64,
    all_us: u64,
}

impl History {
    /// An empty history whose buckets first are as wide as a sample.
    pub(crate) fn new(period: std::time::Duration) -> Self {
        let width_us = u64::try_from(period.as_micros()).unwrap_or(u64::MAX);
        Self {
            width_us: width_us.clamp(1, u64::MAX / BUCKETS as u64),
            devices: Course::default(),
            ranks: Course::default(),
        }
    }

    /// Adds what a sample has added to the totals.
    pub(crate) fn add(&mut self, step: &Step, origin_ns: u64) {
        let from_us = step.from_ns.saturating_sub(origin_ns) / 1000;
        let to_us = step.to_ns.saturating_sub(origin_ns) / 1000;
        while to_us > self.width_us.saturating_mul(BUCKETS as u64) {
            self.devices.halve();
            self.ranks.halve();
            self.width_us = self.width_us.saturating_mul(2);
        }
        for (course, side) in [
            (&mut self.devices, &step.devices),
            (&mut self.ranks, &step.ranks),
        ] {
            course.begin(side);
            let mut at_us = from_us;
            while at_us < to_us {
                let place = at_us / self.width_us;
                let end_us = (place + 1).saturating_mul(self.width_us).min(to_us);
                // In range: `to_us` is not past the last bucket's end.
                course.add(place as usize, end_us - at_us, side);
                at_us = end_us;
            }
        }
    }

    /// Width of a bucket, in seconds.
    pub(crate) fn width_s(&self) -> f64 {
        self.width_us as f64 / 1e6
    }
}

impl Course {
    fn begin(&mut self, side: &Side) {
        self.at_once.resize(BUCKETS, Together::default());
        if side.percent.len() > self.series.len() {
            let empty = || vec![Bucket::default(); BUCKETS];
            self.series.resize_with(side.percent.len(), empty);
        }
        if side.is_changed {
            // Those that are new did not work before, so neither did all.
            for bucket in &mut self.at_once {
                bucket.all_us = 0;
            }
        }
    }

    fn add(&mut self, place: usize, us: u64, side: &Side) {
        for (series, percent) in self.series.iter_mut().zip(&side.percent) {
            if let (Some(bucket), Some(percent)) = (series.get_mut(place), percent) {
                bucket.known_us = bucket.known_us.saturating_add(us);
                let amount = us.saturating_mul(u64::from(*percent));
                bucket.percent_us = bucket.percent_us.saturating_add(amount);
                bucket.most = bucket.most.max(*percent);
            }
        }
        if let (Some(bucket), Some(at_once)) = (self.at_once.get_mut(place), side.at_once()) {
            bucket.seen_us += us;
            bucket.busy_us += us * at_once as u64;
            bucket.all_us += if at_once > 0 && at_once == side.counted() {
                us
            } else {
                0
            };
        }
    }

    fn halve(&mut self) {
        for series in &mut self.series {
            merge(series, Bucket::joined);
        }
        merge(&mut self.at_once, Together::joined);
    }
}

impl Bucket {
    /// Mean utilisation in percent, where it is known.
    pub(crate) fn mean(&self) -> Option<f64> {
        (self.known_us > 0).then(|| self.percent_us as f64 / self.known_us as f64)
    }

    /// Largest utilisation in percent, where any is known.
    pub(crate) fn most(&self) -> Option<u32> {
        (self.known_us > 0).then_some(self.most)
    }

    fn joined(a: Self, b: Self) -> Self {
        Self {
            known_us: a.known_us.saturating_add(b.known_us),
            percent_us: a.percent_us.saturating_add(b.percent_us),
            most: a.most.max(b.most),
        }
    }
}

impl Together {
    /// Mean number busy at once, where it is known.
    pub(crate) fn mean(&self) -> Option<f64> {
        (self.seen_us > 0).then(|| self.busy_us as f64 / self.seen_us as f64)
    }

    /// Share of the time in which all were busy at once, where it is known.
    pub(crate) fn all_share(&self) -> Option<f64> {
        (self.seen_us > 0).then(|| self.all_us as f64 / self.seen_us as f64)
    }

    fn joined(a: Self, b: Self) -> Self {
        Self {
            seen_us: a.seen_us + b.seen_us,
            busy_us: a.busy_us + b.busy_us,
            all_us: a.all_us + b.all_us,
        }
    }
}

/// Each two neighbours become one, in the first half; the second half is empty then.
fn merge<T: Copy + Default>(buckets: &mut [T], joined: impl Fn(T, T) -> T) {
    let half = buckets.len() / 2;
    for place in 0..half {
        buckets[place] = joined(buckets[2 * place], buckets[2 * place + 1]);
    }
    buckets[half..].fill(T::default());
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn step(from_s: u64, to_s: u64, percent: Option<u32>) -> Step {
        let side = |percent: Vec<Option<u32>>| Side {
            busy: percent.iter().map(|p| p.is_some_and(|p| p > 0)).collect(),
            counts: vec![true; percent.len()],
            percent,
            is_changed: false,
        };
        Step {
            from_ns: from_s * 1_000_000_000,
            to_ns: to_s * 1_000_000_000,
            devices: side(vec![percent]),
            ranks: Side::default(),
        }
    }

    #[test]
    fn an_interval_is_shared_out_to_the_buckets_that_it_touches() {
        let mut history = History::new(Duration::from_secs(2));
        history.add(&step(1, 5, Some(50)), 0);
        history.add(&step(5, 6, Some(80)), 0);
        let means: Vec<_> = history.devices.series[0][..4]
            .iter()
            .map(|bucket| (bucket.mean(), bucket.most()))
            .collect();
        let expect = [
            (Some(50.0), Some(50)),
            (Some(50.0), Some(50)),
            (Some(65.0), Some(80)),
            (None, None),
        ];
        assert_eq!(means, expect);
    }

    #[test]
    fn a_full_history_keeps_sums_at_half_the_resolution() {
        let mut history = History::new(Duration::from_secs(1));
        for second in 0..BUCKETS as u64 + 1 {
            let percent = if second % 2 == 0 { 100 } else { 0 };
            history.add(&step(second, second + 1, Some(percent)), 0);
        }
        assert_eq!(history.width_s(), 2.0);
        let series = &history.devices.series[0];
        assert!(series[..BUCKETS / 2].iter().all(|b| b.mean() == Some(50.0)));
        assert_eq!(series[BUCKETS / 2].mean(), Some(100.0));
        assert_eq!(history.devices.at_once[0].all_share(), Some(0.5));
    }

    #[test]
    fn a_gap_of_years_ends_at_once() {
        let mut history = History::new(Duration::from_millis(100));
        history.add(&step(0, 1, Some(10)), 0);
        history.add(
            &step(u64::MAX / 1_000_000_001, u64::MAX / 1_000_000_000, None),
            0,
        );
        assert_eq!(history.devices.series[0][0].mean(), Some(10.0));
        assert_eq!(history.devices.series[0].len(), BUCKETS);
    }
}
