//! Round moments for an axis of time.

/// A moment with its label.
#[derive(Debug, PartialEq)]
pub(crate) struct Mark {
    pub(crate) at_s: f64,
    pub(crate) label: String,
}

/// Steps that people count time in, in seconds.
const STEPS_S: [f64; 27] = [
    0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
    10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 14_400.0, 43_200.0, 86_400.0,
];

/// Most marks of an axis.
const MARKS_MAX: f64 = 10.0;

/// Marks from 0 to `total_s`, at most eleven.
pub(crate) fn marks(total_s: f64) -> Vec<Mark> {
    let fits = |step: &&f64| total_s / **step <= MARKS_MAX;
    let days = || 86_400.0 * (total_s / MARKS_MAX / 86_400.0).ceil();
    let step_s = STEPS_S.iter().find(fits).copied().unwrap_or_else(days);
    let count = (total_s / step_s).floor() as usize;
    (0..=count.min(MARKS_MAX as usize))
        .map(|place| Mark {
            at_s: place as f64 * step_s,
            label: label(place as f64 * step_s, step_s),
        })
        .collect()
}

fn label(at_s: f64, step_s: f64) -> String {
    let whole = at_s.round() as u64;
    let (days, hours, minutes) = (whole / 86_400, whole / 3600 % 24, whole / 60 % 60);
    if step_s < 0.001 {
        format!("{:.1} ms", at_s * 1000.0)
    } else if step_s < 0.1 {
        format!("{:.0} ms", at_s * 1000.0)
    } else if step_s < 1.0 {
        format!("{at_s:.1} s")
    } else if step_s >= 43_200.0 {
        format!("{days}d {hours:02}:00")
    } else {
        format!("{}:{minutes:02}:{:02}", whole / 3600, whole % 60)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_at_round_moments() {
        let check = |total_s: f64, expect: &str| {
            let labels: Vec<String> = marks(total_s).into_iter().map(|m| m.label).collect();
            assert_eq!(labels.join(" "), expect);
        };
        check(0.000_35, "0.0 ms 0.1 ms 0.2 ms 0.3 ms");
        check(0.0125, "0 ms 2 ms 4 ms 6 ms 8 ms 10 ms 12 ms");
        check(
            0.45,
            "0 ms 50 ms 100 ms 150 ms 200 ms 250 ms 300 ms 350 ms 400 ms 450 ms",
        );
        check(0.75, "0.0 s 0.1 s 0.2 s 0.3 s 0.4 s 0.5 s 0.6 s 0.7 s");
        check(4.2, "0.0 s 0.5 s 1.0 s 1.5 s 2.0 s 2.5 s 3.0 s 3.5 s 4.0 s");
        check(
            12.0,
            "0:00:00 0:00:02 0:00:04 0:00:06 0:00:08 0:00:10 0:00:12",
        );
        check(
            1932.2,
            "0:00:00 0:05:00 0:10:00 0:15:00 0:20:00 0:25:00 0:30:00",
        );
        check(
            604_800.0,
            "0d 00:00 1d 00:00 2d 00:00 3d 00:00 4d 00:00 5d 00:00 6d 00:00 7d 00:00",
        );
        assert!(marks(1e12).len() <= 11);
    }
}
