//! Moments for people and machines: UTC, as RFC 3339 writes it.

use std::time::{Duration, SystemTime};

const SECONDS_PER_DAY: u64 = 86_400;

/// `2026-11-21T18:03:02.123Z`; a time before 1970 is 1970's first moment.
pub(crate) fn utc(at: SystemTime) -> String {
    let since = since_epoch(at);
    let (year, month, day) = date(since.as_secs() / SECONDS_PER_DAY);
    let second = since.as_secs() % SECONDS_PER_DAY;
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:03}Z",
        second / 3600,
        second / 60 % 60,
        second % 60,
        since.subsec_millis()
    )
}

pub(crate) fn since_epoch(at: SystemTime) -> Duration {
    at.duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
}

/// Year, month and day of the Gregorian calendar, from the days since 1970.
fn date(days: u64) -> (u64, u64, u64) {
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    // 400 years are the same number of days whichever they are, so at most 400 steps follow.
    const DAYS_PER_400_YEARS: u64 = 146_097;
    let mut year = 1970 + 400 * (days / DAYS_PER_400_YEARS);
    let mut day = days % DAYS_PER_400_YEARS;
    loop {
        let length = if is_leap(year) { 366 } else { 365 };
        if day < length {
            break;
        }
        day -= length;
        year += 1;
    }
    let february = if is_leap(year) { 29 } else { 28 };
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if day < length {
            break;
        }
        day -= length;
        month += 1;
    }
    (year, month, day + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_written_as_rfc_3339_does() {
        // Expected values from `date -u --date=@N`.
        let check = |ms: u64, expect: &str| {
            let at = SystemTime::UNIX_EPOCH + Duration::from_millis(ms);
            assert_eq!(utc(at), expect);
        };
        check(0, "1970-01-01T00:00:00.000Z");
        check(951_782_399_999, "2000-02-28T23:59:59.999Z");
        check(951_782_400_000, "2000-02-29T00:00:00.000Z");
        check(1_709_251_200_000, "2024-03-01T00:00:00.000Z");
        check(1_798_761_599_001, "2026-12-31T23:59:59.001Z");
        check(4_107_542_400_000, "2100-03-01T00:00:00.000Z");
        check(32_503_680_000_000, "3000-01-01T00:00:00.000Z");
    }

    #[test]
    fn a_moment_before_1970_is_no_accident() {
        assert_eq!(
            utc(SystemTime::UNIX_EPOCH - Duration::from_secs(5)),
            "1970-01-01T00:00:00.000Z"
        );
    }
}
