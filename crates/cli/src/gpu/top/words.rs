//! Numbers and states as short words.

use std::time::Duration;

use paceline_gpu::sample::Throttle;
use paceline_gpu::snapshot::Memory;

/// Bytes in what drivers call a megabyte.
const MB: u64 = 1 << 20;

/// `2340/97887MB (2.39%)`.
pub(super) fn memory(memory: &Memory) -> String {
    let (used, total) = (memory.used_bytes, memory.total_bytes);
    format!(
        "{}/{}MB ({:.2}%)",
        used / MB,
        total / MB,
        100.0 * share(used, total)
    )
}

/// `part / whole`, 0 where there is no whole.
pub(super) fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}

/// Resident memory: `812M`, `1.5G`.
pub(super) fn bytes(bytes: u64) -> String {
    let mb = bytes as f64 / MB as f64;
    match mb {
        _ if mb < 999.5 => format!("{mb:.0}M"),
        _ if mb < 99.95 * 1024.0 => format!("{:.1}G", mb / 1024.0),
        _ => format!("{:.0}G", mb / 1024.0),
    }
}

/// A rate: `0`, `870K`, `3.4M`, `25G` bytes a second, in powers of ten.
pub(super) fn rate(bytes_s: u64) -> String {
    let mut value = bytes_s as f64;
    for unit in ["", "K", "M", "G"] {
        if value < 9.95 && !unit.is_empty() {
            return format!("{value:.1}{unit}");
        }
        if value < 999.5 {
            return format!("{value:.0}{unit}");
        }
        value /= 1000.0;
    }
    format!("{value:.0}T")
}

/// Steps in a second, with three digits that count.
pub(super) fn pace(steps_s: f64) -> String {
    match steps_s {
        s if s >= 99.95 => format!("{s:.0}"),
        s if s >= 9.995 => format!("{s:.1}"),
        s if s >= 0.01 => format!("{s:.2}"),
        s if s > 0.0 => format!("{s:.0e}"),
        _ => "0".to_owned(),
    }
}

/// How long something takes: `0.4s`, `12s`, `3m05s`, `2h07m`, `3d04h`.
pub(super) fn time(time: Duration) -> String {
    let s = time.as_secs();
    match s {
        0..10 => format!("{:.1}s", time.as_secs_f64().min(9.9)),
        10..60 => format!("{s}s"),
        60..3600 => format!("{}m{:02}s", s / 60, s % 60),
        3600..86_400 => format!("{}h{:02}m", s / 3600, s % 3600 / 60),
        _ => format!("{}d{:02}h", s / 86_400, s % 86_400 / 3600),
    }
}

/// `0:12:34`, as the tracker's report has it.
pub(super) fn clock(time: Duration) -> String {
    let s = time.as_secs();
    format!("{}:{:02}:{:02}", s / 3600, s % 3600 / 60, s % 60)
}

/// Why clocks are held down: a few letters, the end of a sentence, and whether it costs much and was not asked for.
pub(super) fn throttle(throttle: Throttle) -> (&'static str, &'static str, bool) {
    match throttle {
        Throttle::PowerCap => ("pwr", "held at its power limit", false),
        Throttle::Thermal => ("hot", "slowed down because it is hot", true),
        Throttle::HardwareThermal => (
            "HOT",
            "slowed down by half or more because it is too hot",
            true,
        ),
        Throttle::PowerBrake => (
            "BRAKE",
            "slowed down because the power supply asks for less",
            true,
        ),
        Throttle::Hardware => ("HW", "slowed down by half or more by its hardware", true),
        Throttle::SyncBoost => ("sync", "held at the clock of another device", false),
        Throttle::ClocksSetting => ("set", "held at clocks that a user has set", false),
        Throttle::DisplayClock => ("disp", "held at the clock of its display", false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_said_as_in_the_report() {
        let of = |used, total| {
            memory(&Memory {
                used_bytes: used * MB,
                total_bytes: total * MB,
            })
        };
        assert_eq!(of(2340, 97_887), "2340/97887MB (2.39%)");
        assert_eq!(of(0, 0), "0/0MB (0.00%)");
    }

    #[test]
    fn numbers_stay_short() {
        let check = |text: String, expect: &str| assert_eq!(text, expect);
        check(bytes(0), "0M");
        check(bytes(812 * MB), "812M");
        check(bytes(1000 * MB), "1.0G");
        check(bytes(1536 * MB), "1.5G");
        check(bytes(200 << 30), "200G");
        check(rate(0), "0");
        check(rate(999), "999");
        check(rate(870_000), "870K");
        check(rate(3_400_000), "3.4M");
        check(rate(25_000_000_000), "25G");
        check(rate(900_000_000_000), "900G");
        check(rate(u64::MAX), "18446744T");
        check(pace(1234.5), "1234");
        check(pace(12.34), "12.3");
        check(pace(3.456), "3.46");
        check(pace(0.05), "0.05");
        check(pace(0.000_2), "2e-4");
        check(pace(0.0), "0");
        check(time(Duration::from_millis(430)), "0.4s");
        check(time(Duration::from_millis(9990)), "9.9s");
        check(time(Duration::from_secs(59)), "59s");
        check(time(Duration::from_secs(185)), "3m05s");
        check(time(Duration::from_secs(7620)), "2h07m");
        check(time(Duration::from_secs(273_600)), "3d04h");
        check(time(Duration::MAX), "213503982334601d07h");
        check(clock(Duration::from_secs(754)), "0:12:34");
    }
}
