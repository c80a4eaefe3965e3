//! How fast a rank goes: steps per second and share of a core, from what is seen of it now and then.

use std::collections::VecDeque;
use std::time::Duration;

/// Over how long a pace is taken, where steps are shorter than that.
const WINDOW: Duration = Duration::from_secs(10);
/// Most changes that are kept.
const CHANGES_MAX: usize = 64;
/// From when on a step that has not ended says something about the pace.
const LATE_AFTER: Duration = Duration::from_secs(2);

/// What has been seen of one rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Pace {
    /// When the step was seen to have changed, and to what.
    changes: VecDeque<(Duration, u64)>,
    last: Option<(Duration, u64)>,
    cpu: Option<(Duration, Duration)>,
    cpu_percent: Option<f64>,
}

impl Pace {
    /// The step was this at that time.
    pub(super) fn step(&mut self, at: Duration, step: u64) {
        match self.last {
            Some((_, before)) if step == before => return,
            Some((_, before)) if step > before => {
                // When the step began that the first look saw is not known. With several steps since, that matters little.
                if self.changes.is_empty()
                    && step - before >= 4
                    && let Some(first) = self.last
                {
                    self.changes.push_back(first);
                }
                self.changes.push_back((at, step));
            }
            // The first look, or another program in the same place.
            _ => self.changes.clear(),
        }
        self.last = Some((at, step));
        let is_old = |change: Option<&(Duration, u64)>| {
            change.is_some_and(|(when, _)| at.saturating_sub(*when) > WINDOW)
        };
        while self.changes.len() > CHANGES_MAX
            || (self.changes.len() > 2 && is_old(self.changes.get(1)))
        {
            self.changes.pop_front();
        }
    }

    /// Steps in a second, seen at that time; nothing before two changes were seen.
    pub(super) fn steps_per_second(&self, at: Duration) -> Option<f64> {
        let (first, last) = (self.changes.front()?, self.changes.back()?);
        let between = last.0.saturating_sub(first.0).as_secs_f64();
        if between <= 0.0 {
            return None;
        }
        let pace = (last.1 - first.1) as f64 / between;
        // A step that takes longer than they did, so far: it is no faster than one in that time. While looks are farther
        // apart than steps, the last change may be a look ago without anything being late.
        let since = at.saturating_sub(last.0);
        if since <= LATE_AFTER {
            return Some(pace);
        }
        Some(pace.min(1.0 / since.as_secs_f64()))
    }

    /// The processor time was this at that time.
    pub(super) fn cpu(&mut self, at: Duration, cpu: Option<Duration>) {
        let Some(cpu) = cpu else {
            (self.cpu, self.cpu_percent) = (None, None);
            return;
        };
        if let Some((before_at, before)) = self.cpu {
            let elapsed = at.saturating_sub(before_at).as_secs_f64();
            if elapsed <= 0.0 {
                return;
            }
            // Less than before: processes of the rank have ended without being waited for.
            self.cpu_percent = cpu
                .checked_sub(before)
                .map(|used| 100.0 * used.as_secs_f64() / elapsed);
        }
        self.cpu = Some((at, cpu));
    }

    /// Share of one core since the look before, in percent.
    pub(super) fn cpu_percent(&self) -> Option<f64> {
        self.cpu_percent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secs(s: f64) -> Duration {
        Duration::from_secs_f64(s)
    }

    fn pace(looks: &[(f64, u64)], at: f64) -> Option<f64> {
        let mut pace = Pace::default();
        for (at, step) in looks {
            pace.step(secs(*at), *step);
        }
        pace.steps_per_second(secs(at))
            .map(|pace| (pace * 1000.0).round() / 1000.0)
    }

    #[test]
    fn many_steps_between_looks_are_counted_from_the_first_look() {
        assert_eq!(pace(&[(0.0, 100)], 0.0), None);
        assert_eq!(pace(&[(0.0, 100), (1.0, 150)], 1.0), Some(50.0));
        assert_eq!(pace(&[(0.0, 100), (1.0, 150), (2.0, 160)], 2.0), Some(30.0));
    }

    #[test]
    fn long_steps_are_counted_between_changes() {
        let looks: Vec<(f64, u64)> = (0..100)
            .map(|s| (f64::from(s), (s as u64 + 11) / 20))
            .collect();
        // The step changes every 20 s: at 9, 29, 49, 69 and 89 s.
        assert_eq!(pace(&looks[..29], 28.0), None);
        assert_eq!(pace(&looks[..30], 29.0), Some(0.05));
        assert_eq!(pace(&looks, 99.0), Some(0.05));
    }

    #[test]
    fn a_rank_that_stands_still_gets_slower_and_slower() {
        let looks = [(0.0, 0), (1.0, 10), (2.0, 20)];
        assert_eq!(pace(&looks, 3.0), Some(10.0));
        assert_eq!(pace(&looks, 12.0), Some(0.1));
        assert_eq!(pace(&looks, 102.0), Some(0.01));
    }

    #[test]
    fn only_the_last_seconds_count() {
        let slow = (0..20).map(|s| (f64::from(s), s as u64 * 10));
        let fast = (20..40).map(|s| (f64::from(s), 190 + (s as u64 - 19) * 100));
        let looks: Vec<(f64, u64)> = slow.chain(fast).collect();
        assert_eq!(pace(&looks, 39.0), Some(100.0));
    }

    #[test]
    fn steps_that_go_back_begin_anew() {
        assert_eq!(pace(&[(0.0, 100), (1.0, 200), (2.0, 0)], 2.0), None);
        let again = [(0.0, 100), (1.0, 200), (2.0, 0), (3.0, 20)];
        assert_eq!(pace(&again, 3.0), Some(20.0));
    }

    #[test]
    fn processor_time_is_a_share_of_the_time_between_looks() {
        let mut pace = Pace::default();
        let mut check = |at: f64, cpu: Option<f64>, expect: Option<f64>| {
            pace.cpu(secs(at), cpu.map(secs));
            assert_eq!(pace.cpu_percent(), expect, "{at}");
        };
        check(0.0, Some(5.0), None);
        check(2.0, Some(8.0), Some(150.0));
        check(2.0, Some(9.0), Some(150.0));
        check(3.0, Some(1.0), None);
        check(4.0, Some(1.5), Some(50.0));
        check(5.0, None, None);
        check(6.0, Some(2.0), None);
    }
}
