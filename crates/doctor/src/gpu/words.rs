//! Devices, pairs, times and names as findings write them.

use paceline_gpu::snapshot::{Device, Snapshot};
use paceline_gpu::words::runs;

use crate::finding::{count, plain};

/// Names and places that one line lists; a machine with more has the rest in its JSON.
const LISTED_MAX: usize = 8;

/// "GPU 0", "GPUs 0 and 2", "GPUs 0 to 7".
pub(super) fn gpus(indices: &[u32]) -> String {
    let runs = runs(indices);
    let noun = match runs.as_slice() {
        [(first, last)] if first == last => "GPU",
        _ => "GPUs",
    };
    let words = runs
        .into_iter()
        .flat_map(|(first, last)| match last - first {
            0 => vec![first.to_string()],
            1 => vec![first.to_string(), last.to_string()],
            _ => vec![format!("{first} to {last}")],
        });
    format!("{noun} {}", joined(words.collect()))
}

/// "GPU 0 runs", "GPUs 0 and 1 run".
pub(super) fn gpus_that(indices: &[u32], one: &str, several: &str) -> String {
    let verb = if indices.len() == 1 { one } else { several };
    format!("{} {verb}", gpus(indices))
}

/// "a", "a and b", "a, b and c", "a, b, ... and 7 more".
pub(super) fn joined(mut words: Vec<String>) -> String {
    let more = words.len().saturating_sub(LISTED_MAX);
    words.truncate(LISTED_MAX);
    if more > 0 {
        return format!("{} and {more} more", words.join(", "));
    }
    match words.pop() {
        None => String::new(),
        Some(last) if words.is_empty() => last,
        Some(last) => format!("{} and {last}", words.join(", ")),
    }
}

/// "a; b; c" for words that have commas of their own; at most some of them.
pub(super) fn listed(mut words: Vec<String>) -> String {
    let more = words.len().saturating_sub(LISTED_MAX);
    words.truncate(LISTED_MAX);
    if more > 0 {
        words.push(format!("and {more} more"));
    }
    words.join("; ")
}

/// Pairs of devices, of which the machine has so many: "GPUs 0 and 1", "all 28 pairs of GPUs", "2 of 28 pairs: 0-1 and 2-3".
pub(super) fn pairs(pairs: &[(u32, u32)], all: usize) -> String {
    match pairs {
        [(a, b)] if all == 1 => gpus(&[*a, *b]),
        _ if pairs.len() == all => format!("all {all} pairs of GPUs"),
        _ => {
            let named = pairs.iter().map(|(a, b)| format!("{a}-{b}"));
            format!(
                "{} of {} of GPUs: {}",
                pairs.len(),
                count(all, "pair"),
                joined(named.collect())
            )
        }
    }
}

/// The model, or that it is not known.
pub(super) fn model(device: &Device) -> String {
    match device.name.known() {
        Some(name) => plain(name.trim()),
        None => "unknown model".to_owned(),
    }
}

/// "2 x NAME" for each model, in the order of the devices.
pub(super) fn models(snapshot: &Snapshot) -> Vec<String> {
    grouped(
        snapshot
            .devices
            .iter()
            .map(|device| (model(device), device.index)),
    )
    .into_iter()
    .map(|(name, of)| format!("{} x {name}", of.len()))
    .collect()
}

/// Devices by what they have in common, in the order in which it first occurs.
pub(super) fn grouped<K: PartialEq>(all: impl IntoIterator<Item = (K, u32)>) -> Vec<(K, Vec<u32>)> {
    let mut groups: Vec<(K, Vec<u32>)> = Vec::new();
    for (key, index) in all {
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, of)) => of.push(index),
            None => groups.push((key, vec![index])),
        }
    }
    groups
}

/// A time for people: "40 s", "5 min", "3 h", "12 days".
pub(super) fn age(seconds: u64) -> String {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    match seconds {
        0..MINUTE => format!("{seconds} s"),
        MINUTE..HOUR => format!("{} min", seconds / MINUTE),
        HOUR..DAY => format!("{} h", seconds / HOUR),
        _ => count(usize::try_from(seconds / DAY).unwrap_or(usize::MAX), "day"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_in_a_row_are_said_by_first_and_last() {
        let check = |indices: &[u32], expect: &str| assert_eq!(gpus(indices), expect);
        check(&[0], "GPU 0");
        check(&[1, 0], "GPUs 0 and 1");
        check(&[0, 1, 2, 2, 3], "GPUs 0 to 3");
        check(&[0, 2, 3, 5, 6, 7], "GPUs 0, 2, 3 and 5 to 7");
        check(&[u32::MAX, 0], "GPUs 0 and 4294967295");
        let even: Vec<u32> = (0..40).step_by(2).collect();
        check(&even, "GPUs 0, 2, 4, 6, 8, 10, 12, 14 and 12 more");
    }

    #[test]
    fn pairs_are_counted_against_those_of_the_machine() {
        assert_eq!(pairs(&[(0, 1)], 1), "GPUs 0 and 1");
        assert_eq!(pairs(&[(0, 1)], 6), "1 of 6 pairs of GPUs: 0-1");
        assert_eq!(pairs(&[(0, 1), (0, 2), (1, 2)], 3), "all 3 pairs of GPUs");
    }

    #[test]
    fn times_have_one_unit() {
        for (seconds, expect) in [
            (59, "59 s"),
            (60, "1 min"),
            (7_199, "1 h"),
            (86_400, "1 day"),
            (1_000_000, "11 days"),
        ] {
            assert_eq!(age(seconds), expect);
        }
    }
}
