//! Devices, pairs, times and names as findings write them.

use paceline_gpu::snapshot::{Device, Snapshot};
use paceline_gpu::words::runs;
use paceline_words::{Lang, counted, say, span};

use crate::finding::plain;

/// Names and places that one line lists; a machine with more has the rest in its JSON.
const LISTED_MAX: usize = 8;

/// "GPU 0", "GPUs 0 and 2", "GPUs 0 to 7"; "GPU 0~7".
pub(super) fn gpus(indices: &[u32], lang: Lang) -> String {
    let runs = runs(indices);
    let noun = match (lang, runs.as_slice()) {
        (Lang::En, [(first, last)]) if first == last => "GPU",
        (Lang::En, _) => "GPUs",
        (Lang::Ko, _) => "GPU",
    };
    let words = runs
        .into_iter()
        .flat_map(|(first, last)| match last - first {
            0 => vec![first.to_string()],
            1 => vec![first.to_string(), last.to_string()],
            _ => vec![span(first, last, lang)],
        });
    format!("{noun} {}", joined(words.collect(), lang))
}

/// "GPU 0 runs", "GPUs 0 and 1 run"; in Korean without a verb.
pub(super) fn gpus_that(indices: &[u32], one: &str, several: &str, lang: Lang) -> String {
    let gpus = gpus(indices, lang);
    match (lang, indices) {
        (Lang::En, [_]) => format!("{gpus} {one}"),
        (Lang::En, _) => format!("{gpus} {several}"),
        (Lang::Ko, _) => gpus,
    }
}

/// "a", "a and b", "a, b and c", "a, b, ... and 7 more"; "a, b 외 7개".
pub(super) fn joined(words: Vec<String>, lang: Lang) -> String {
    paceline_words::joined(words, LISTED_MAX, lang)
}

/// "a; b; c" for words that have commas of their own; at most some of them.
pub(super) fn listed(mut words: Vec<String>, lang: Lang) -> String {
    let more = words.len().saturating_sub(LISTED_MAX);
    words.truncate(LISTED_MAX);
    if more > 0 {
        words.push(say!(lang, "and {more} more", "외 {more}개"));
    }
    words.join("; ")
}

/// Pairs of devices, of which the machine has so many: "GPUs 0 and 1", "all 28 pairs of GPUs", "2 of 28 pairs: 0-1 and 2-3".
pub(super) fn pairs(pairs: &[(u32, u32)], all: usize, lang: Lang) -> String {
    match pairs {
        [(a, b)] if all == 1 => gpus(&[*a, *b], lang),
        _ if pairs.len() == all => {
            say!(lang, "all {all} pairs of GPUs", "GPU {all}쌍 모두")
        }
        _ => {
            let some = pairs.len();
            let named = pairs.iter().map(|(a, b)| format!("{a}-{b}")).collect();
            let named = joined(named, lang);
            let counted = counted(all, "pair");
            say!(
                lang,
                "{some} of {counted} of GPUs: {named}",
                "GPU {all}쌍 중 {some}쌍({named})"
            )
        }
    }
}

/// The model, or that it is not known.
pub(super) fn model(device: &Device, lang: Lang) -> String {
    match device.name.known() {
        Some(name) => plain(name.trim()),
        None => say!(lang, "unknown model", "모델을 알 수 없음"),
    }
}

/// "2 x NAME" for each model, in the order of the devices.
pub(crate) fn models(snapshot: &Snapshot, lang: Lang) -> String {
    let devices = snapshot.devices.iter();
    let models = grouped(devices.map(|device| (model(device, lang), device.index)));
    let models = models.into_iter();
    let words = models.map(|(name, of)| format!("{} x {name}", of.len()));
    joined(words.collect(), lang)
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

/// A time for people: "40 s", "5 min", "3 h", "12 days"; "3시간".
pub(super) fn age(seconds: u64, lang: Lang) -> String {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    let (minutes, hours, days) = (seconds / MINUTE, seconds / HOUR, seconds / DAY);
    match seconds {
        0..MINUTE => say!(lang, "{seconds} s", "{seconds}초"),
        MINUTE..HOUR => say!(lang, "{minutes} min", "{minutes}분"),
        HOUR..DAY => say!(lang, "{hours} h", "{hours}시간"),
        _ => {
            let counted = counted(usize::try_from(days).unwrap_or(usize::MAX), "day");
            say!(lang, "{counted}", "{days}일")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_in_a_row_are_said_by_first_and_last() {
        let check = |indices: &[u32], expect: &str| assert_eq!(gpus(indices, Lang::En), expect);
        check(&[0], "GPU 0");
        check(&[1, 0], "GPUs 0 and 1");
        check(&[0, 1, 2, 2, 3], "GPUs 0 to 3");
        check(&[0, 2, 3, 5, 6, 7], "GPUs 0, 2, 3 and 5 to 7");
        check(&[u32::MAX, 0], "GPUs 0 and 4294967295");
        let even: Vec<u32> = (0..40).step_by(2).collect();
        check(&even, "GPUs 0, 2, 4, 6, 8, 10, 12, 14 and 12 more");
        let korean = |indices: &[u32]| gpus(indices, Lang::Ko);
        assert_eq!(korean(&[0]), "GPU 0");
        assert_eq!(korean(&[0, 2, 3, 5, 6, 7]), "GPU 0, 2, 3, 5~7");
        assert_eq!(korean(&even), "GPU 0, 2, 4, 6, 8, 10, 12, 14 외 12개");
    }

    #[test]
    fn pairs_are_counted_against_those_of_the_machine() {
        let check = |some: &[(u32, u32)], all, en: &str, ko: &str| {
            assert_eq!(pairs(some, all, Lang::En), en);
            assert_eq!(pairs(some, all, Lang::Ko), ko);
        };
        check(&[(0, 1)], 1, "GPUs 0 and 1", "GPU 0, 1");
        check(
            &[(0, 1)],
            6,
            "1 of 6 pairs of GPUs: 0-1",
            "GPU 6쌍 중 1쌍(0-1)",
        );
        let all = [(0, 1), (0, 2), (1, 2)];
        check(&all, 3, "all 3 pairs of GPUs", "GPU 3쌍 모두");
    }

    #[test]
    fn times_have_one_unit() {
        for (seconds, expect) in [
            (59, "59 s"),
            (60, "1 min"),
            (7_199, "1 h"),
            (86_400, "1 day"),
            (172_800, "2 days"),
            (1_000_000, "11 days"),
        ] {
            assert_eq!(age(seconds, Lang::En), expect);
        }
    }
}
