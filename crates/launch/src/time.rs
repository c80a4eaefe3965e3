//! Moments for people and machines: UTC, as RFC 3339 writes it.

use std::time::{Duration, SystemTime};

use time::OffsetDateTime;

/// `2026-11-21T18:03:02.123Z`; a time before 1970 is 1970's first moment.
pub(crate) fn utc(at: SystemTime) -> String {
    let at = OffsetDateTime::from(at.max(SystemTime::UNIX_EPOCH));
    let (year, month, day) = (at.year(), u8::from(at.month()), at.day());
    let (hour, minute, second) = at.to_hms();
    let millis = at.millisecond();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

/// The moment that lies so long before now.
pub(crate) fn utc_before_now(ago: Duration) -> String {
    utc(SystemTime::now()
        .checked_sub(ago)
        .unwrap_or(SystemTime::UNIX_EPOCH))
}

pub(crate) fn since_epoch(at: SystemTime) -> Duration {
    at.duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
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
