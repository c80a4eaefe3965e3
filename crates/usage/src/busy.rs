//! Did the devices really work at the same time? From when each one waited, how long all were busy at once.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A stretch of time, in nanoseconds since an origin that all ranks share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    /// When it began.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: u64,
}

/// Busy time of a number of devices, added up over windows of observation.
///
/// *Source*: the question is that of a published two-GPU run: 32 min 12 s of training during which both
/// GPUs were busy at once for 14 min 55 s, 46.32 %.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BusyTime {
    /// Time observed.
    pub total_ns: u64,
    /// Busy time of each device.
    pub busy_ns: Vec<u64>,
    /// `at_once_ns[k]`: time in which exactly `k` devices were busy.
    pub at_once_ns: Vec<u64>,
}

impl BusyTime {
    /// Nothing observed yet, of `devices` devices.
    pub fn new(devices: usize) -> Self {
        Self {
            total_ns: 0,
            busy_ns: vec![0; devices],
            at_once_ns: vec![0; devices + 1],
        }
    }

    /// Adds a window in which device `d` was idle during `idle[d]` and busy otherwise. Idle stretches may
    /// overlap, come in any order, and reach over the window's edges.
    ///
    /// *Cost*: n log n for n stretches.
    pub fn add(&mut self, window: Interval, idle: &[Vec<Interval>]) {
        let devices = self.busy_ns.len();
        let mut changes: Vec<(u64, i32)> = Vec::new();
        for (device, stretches) in idle.iter().enumerate().take(devices) {
            let mut idle_ns = 0;
            for stretch in merged(window, stretches) {
                idle_ns += stretch.end_ns - stretch.start_ns;
                changes.push((stretch.start_ns, -1));
                changes.push((stretch.end_ns, 1));
            }
            self.busy_ns[device] += window.end_ns.saturating_sub(window.start_ns) - idle_ns;
        }
        changes.sort_unstable();
        let mut busy = devices as i32;
        let mut since = window.start_ns;
        for (at, change) in changes {
            self.at_once_ns[busy as usize] += at - since;
            since = at;
            busy += change;
        }
        self.at_once_ns[busy as usize] += window.end_ns.saturating_sub(since);
        self.total_ns += window.end_ns.saturating_sub(window.start_ns);
    }

    /// Adds a stretch of time during which each device was busy, or not, from its beginning to its end; devices past the
    /// end of `busy` were idle.
    pub fn add_stretch(&mut self, stretch_ns: u64, busy: &[bool]) {
        let mut at_once = 0;
        for (busy_ns, is_busy) in self.busy_ns.iter_mut().zip(busy) {
            if *is_busy {
                *busy_ns = busy_ns.saturating_add(stretch_ns);
                at_once += 1;
            }
        }
        self.at_once_ns[at_once] = self.at_once_ns[at_once].saturating_add(stretch_ns);
        self.total_ns = self.total_ns.saturating_add(stretch_ns);
    }

    /// Makes room for `devices` devices; those that are new were idle so far.
    pub fn grow(&mut self, devices: usize) {
        if devices > self.busy_ns.len() {
            self.busy_ns.resize(devices, 0);
            self.at_once_ns.resize(devices + 1, 0);
        }
    }

    /// Time observed.
    pub fn total(&self) -> Duration {
        Duration::from_nanos(self.total_ns)
    }

    /// Time in which all devices were busy at once.
    pub fn all_busy(&self) -> Duration {
        Duration::from_nanos(*self.at_once_ns.last().unwrap_or(&0))
    }

    /// Share of the time in which all devices were busy at once, `0.0..=1.0`.
    pub fn all_busy_share(&self) -> f64 {
        share(self.all_busy(), self.total())
    }

    /// Busy time of one device.
    pub fn busy(&self, device: usize) -> Duration {
        Duration::from_nanos(self.busy_ns[device])
    }
}

/// `part / whole`, 0 where there is no whole.
pub fn share(part: Duration, whole: Duration) -> f64 {
    if whole.is_zero() {
        return 0.0;
    }
    part.as_secs_f64() / whole.as_secs_f64()
}

/// `stretches` cut to `window`, sorted, overlapping ones joined.
fn merged(window: Interval, stretches: &[Interval]) -> Vec<Interval> {
    let mut cut: Vec<Interval> = stretches
        .iter()
        .map(|s| Interval {
            start_ns: s.start_ns.clamp(window.start_ns, window.end_ns),
            end_ns: s.end_ns.clamp(window.start_ns, window.end_ns),
        })
        .filter(|s| s.start_ns < s.end_ns)
        .collect();
    cut.sort_unstable_by_key(|s| s.start_ns);
    let mut joined: Vec<Interval> = Vec::with_capacity(cut.len());
    for stretch in cut {
        match joined.last_mut() {
            Some(last) if stretch.start_ns <= last.end_ns => {
                last.end_ns = last.end_ns.max(stretch.end_ns);
            }
            _ => joined.push(stretch),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(start_ns: u64, end_ns: u64) -> Interval {
        Interval { start_ns, end_ns }
    }

    fn usage(window: (u64, u64), idle: &[&[(u64, u64)]]) -> BusyTime {
        let mut usage = BusyTime::new(idle.len());
        let idle: Vec<Vec<Interval>> = idle
            .iter()
            .map(|s| s.iter().map(|(a, b)| at(*a, *b)).collect())
            .collect();
        usage.add(at(window.0, window.1), &idle);
        usage
    }

    #[test]
    fn devices_that_never_wait_are_busy_at_once_all_the_time() {
        let usage = usage((0, 100), &[&[], &[]]);
        assert_eq!(usage.at_once_ns, [0, 0, 100]);
        assert_eq!(usage.busy_ns, [100, 100]);
        assert_eq!(usage.all_busy_share(), 1.0);
    }

    #[test]
    fn devices_that_take_turns_are_never_busy_at_once() {
        let usage = usage((0, 100), &[&[(0, 50)], &[(50, 100)]]);
        assert_eq!(usage.at_once_ns, [0, 100, 0]);
        assert_eq!(usage.busy_ns, [50, 50]);
        assert_eq!(usage.all_busy_share(), 0.0);
    }

    #[test]
    fn overlapping_unsorted_and_overhanging_waits_count_once() {
        let usage = usage((10, 110), &[&[(50, 70), (0, 20), (60, 80)], &[(100, 500)]]);
        assert_eq!(usage.busy_ns, [60, 90]);
        assert_eq!(usage.at_once_ns, [0, 50, 50]);
    }

    #[test]
    fn windows_add_up() {
        let mut both = usage((0, 10), &[&[(0, 5)]]);
        both.add(at(10, 30), &[vec![at(20, 30)]]);
        assert_eq!((both.total_ns, both.busy_ns[0]), (30, 15));
    }

    #[test]
    fn stretches_of_one_state_count_like_windows() {
        let mut usage = BusyTime::new(0);
        usage.add_stretch(7, &[]);
        usage.grow(2);
        usage.add_stretch(10, &[true, true]);
        usage.add_stretch(5, &[false, true]);
        usage.add_stretch(3, &[true]);
        assert_eq!(usage.at_once_ns, [7, 8, 10]);
        assert_eq!((usage.busy_ns, usage.total_ns), (vec![13, 15], 25));
    }

    #[test]
    fn an_empty_window_observes_nothing() {
        assert_eq!(usage((5, 5), &[&[(0, 9)]]).all_busy_share(), 0.0);
    }

    #[test]
    fn the_parts_always_add_up_to_the_whole() {
        // A few thousand stretches from a fixed generator, against a count per nanosecond.
        let mut state = 7u64;
        let mut next = |bound: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % bound
        };
        for _ in 0..200 {
            let window = at(next(50), 50 + next(150));
            let idle: Vec<Vec<Interval>> = (0..3)
                .map(|_| {
                    (0..next(6))
                        .map(|_| {
                            let start = next(200);
                            at(start, start + next(40))
                        })
                        .collect()
                })
                .collect();
            let mut usage = BusyTime::new(3);
            usage.add(window, &idle);
            let mut expected = vec![0; 4];
            for t in window.start_ns..window.end_ns {
                let waiting = |s: &Vec<Interval>| s.iter().any(|i| i.start_ns <= t && t < i.end_ns);
                expected[idle.iter().filter(|s| !waiting(s)).count()] += 1;
            }
            assert_eq!(usage.at_once_ns, expected);
        }
    }
}
