//! Figures as people read them.

use std::time::Duration;

/// `0 h 32 min 12.3 s`, without the parts that are zero.
#[must_use]
pub fn clock(time: Duration) -> String {
    let tenths = (time.as_secs_f64() * 10.0).round() as u64;
    let (hours, minutes) = (tenths / 36_000, tenths / 600 % 60);
    let rest = (tenths % 600) as f64 / 10.0;
    match (hours, minutes) {
        (0, 0) => format!("{rest:.1} s"),
        (0, _) => format!("{minutes} min {rest:.1} s"),
        _ => format!("{hours} h {minutes} min {rest:.1} s"),
    }
}

/// `1,234,567`
#[must_use]
pub fn thousands(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_times_read_well() {
        for (value, expect) in [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (1_234_567, "1,234,567"),
        ] {
            assert_eq!(thousands(value), expect);
        }
        for (millis, expect) in [
            (0, "0.0 s"),
            (12_340, "12.3 s"),
            (59_990, "1 min 0.0 s"),
            (1_932_000, "32 min 12.0 s"),
            (3_600_000, "1 h 0 min 0.0 s"),
        ] {
            assert_eq!(clock(Duration::from_millis(millis)), expect);
        }
    }
}
