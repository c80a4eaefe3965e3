//! How soon a death is known.

use std::time::Duration;

use super::case::{Case, Fault, Moment};
use super::rank::played;

/// Kills that are measured unless `PACELINE_FAULTS` is set; then 50.
const KILLS: usize = 5;
/// Attempts to find the machine quiet: other tests run beside this one.
const ATTEMPTS: usize = 10;

#[test]
fn a_kill_is_known_within_a_tenth_of_a_second() {
    if played() {
        return;
    }
    let kills = if std::env::var_os("PACELINE_FAULTS").is_some() {
        50
    } else {
        KILLS
    };
    for transport in ["shm", "tcp"] {
        // The longest depends on what else the machine does.
        let is_soon = |_| median(transport, kills) < Duration::from_millis(100);
        assert!((0..ATTEMPTS).any(is_soon), "{transport}");
    }
}

fn median(transport: &'static str, kills: usize) -> Duration {
    let mut times = Vec::new();
    for _ in 0..kills {
        let case = Case::new(transport, Fault::Kill, Moment::Waiting, "all-reduce", 1000);
        times.extend(
            case.play("times::a_kill_is_known_within_a_tenth_of_a_second")
                .unwrap(),
        );
    }
    times.sort();
    let (median, max) = (times[times.len() / 2], times[times.len() - 1]);
    println!(
        "a kill is known over {transport} after {median:.1?} (median), {max:.1?} (longest of {})",
        times.len()
    );
    median
}
