//! Rates from counters that only grow.

use std::time::Duration;

use crate::nvml::raw::Number;

/// Longest time over which a 32-bit counter of bytes is believed: at 34 GB/s it begins again within it.
const WINDOW_MAX: Duration = Duration::from_millis(125);

/// A counter that does not begin again within a job.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counter {
    last: Option<(Duration, u64)>,
}

impl Counter {
    /// What was counted in a second since the last time, or nothing where there was none or the counter was reset.
    pub(super) fn rate(&mut self, at: Duration, value: u64) -> Option<u64> {
        let (since, from) = self.last.replace((at, value))?;
        per_second(value.checked_sub(from)?, at.checked_sub(since)?)
    }
}

/// Two readings of the device's counters of bytes, soon after one another: they are expensive to read, and some begin again
/// after 4 GiB.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Window {
    open: Option<(Duration, [Number; 2])>,
}

/// What became of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// This was its first reading.
    Opened,
    /// This was its second: bytes in a second, for each counter.
    Closed([u64; 2]),
    /// This came so late after the first that the number of times the counter wrapped is unknown.
    TooLate,
}

impl Window {
    /// Another reading.
    ///
    /// *Numerics*: with 32-bit counters right up to 34 GB/s; what goes beyond is lost.
    pub(super) fn add(&mut self, at: Duration, values: [Number; 2]) -> Turn {
        let Some((since, from)) = self.open.take() else {
            self.open = Some((at, values));
            return Turn::Opened;
        };
        let elapsed = at.saturating_sub(since);
        let is_narrow = values.iter().any(|value| value.is_32_bit);
        if is_narrow && elapsed > WINDOW_MAX {
            return Turn::TooLate;
        }
        let rate = |now: Number, then: Number| {
            let counted = if now.is_32_bit {
                // Cut on purpose: both are below 2^32 where the driver says 32 bits.
                Some(u64::from(
                    (now.value as u32).wrapping_sub(then.value as u32),
                ))
            } else {
                now.value.checked_sub(then.value)
            };
            per_second(counted?, elapsed)
        };
        match (rate(values[0], from[0]), rate(values[1], from[1])) {
            (Some(first), Some(second)) => Turn::Closed([first, second]),
            _ => {
                self.open = Some((at, values));
                Turn::Opened
            }
        }
    }
}

fn per_second(count: u64, elapsed: Duration) -> Option<u64> {
    let nanos = elapsed.as_nanos();
    if nanos == 0 {
        return None;
    }
    u64::try_from(u128::from(count) * 1_000_000_000 / nanos).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_rate_needs_two_readings_and_time_between_them() {
        let mut counter = Counter::default();
        assert_eq!(counter.rate(100 * MS, 1000), None, "the first");
        assert_eq!(counter.rate(200 * MS, 1500), Some(5000));
        assert_eq!(counter.rate(200 * MS, 1600), None, "no time");
        assert_eq!(counter.rate(150 * MS, 1700), None, "time went back");
        assert_eq!(counter.rate(250 * MS, 10), None, "the counter was reset");
        assert_eq!(counter.rate(350 * MS, 20), Some(100));
        assert_eq!(
            counter.rate(351 * MS, u64::MAX),
            None,
            "more than a number holds"
        );
    }

    fn numbers(values: [u64; 2], is_32_bit: bool) -> [Number; 2] {
        values.map(|value| Number { value, is_32_bit })
    }

    #[test]
    fn a_narrow_counter_may_begin_again_within_a_window() {
        let mut window = Window::default();
        let first = numbers([100, u64::from(u32::MAX) - 99], true);
        assert_eq!(window.add(Duration::ZERO, first), Turn::Opened);
        let second = numbers([600, 400], true);
        assert_eq!(window.add(100 * MS, second), Turn::Closed([5000, 5000]));
        assert_eq!(
            window.add(1000 * MS, second),
            Turn::Opened,
            "another window"
        );
    }

    #[test]
    fn a_narrow_counter_is_not_believed_over_long_windows() {
        let mut window = Window::default();
        window.add(Duration::ZERO, numbers([0, 0], true));
        assert_eq!(window.add(126 * MS, numbers([1, 1], true)), Turn::TooLate);
    }

    #[test]
    fn a_wide_counter_is() {
        let mut window = Window::default();
        window.add(Duration::ZERO, numbers([0, 0], false));
        let values = numbers([3000, 6000], false);
        assert_eq!(window.add(3000 * MS, values), Turn::Closed([1000, 2000]));
    }

    #[test]
    fn a_reset_or_no_time_opens_the_window_again() {
        let mut window = Window::default();
        window.add(5 * MS, numbers([10, 10], false));
        assert_eq!(window.add(5 * MS, numbers([20, 20], false)), Turn::Opened);
        assert_eq!(window.add(9 * MS, numbers([0, 0], false)), Turn::Opened);
        assert_eq!(
            window.add(10 * MS, numbers([1, 2], false)),
            Turn::Closed([1000, 2000])
        );
    }
}
