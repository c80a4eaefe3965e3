//! What could not be read, and what that means for the sums.

use super::words::Words;
use super::{TRIFLE_S, numbers};
use crate::report::{Missing, Report};

/// What a device's absence means for the sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Absence {
    /// It could never be read: it is not one of those that count.
    NeverKnown,
    /// Others could be read: it counts as idle.
    OfSome,
    /// No other could be read either: that time does not count.
    OfAll,
}

/// What could not be read, the same reason of several devices as one line.
pub(super) fn missing(report: &Report, words: Words) -> Vec<String> {
    let is_known = |index: &u32| {
        let mut gpus = report.gpus.iter();
        gpus.any(|gpu| gpu.index == *index && gpu.known_s > 0.0)
    };
    let known = report.gpus.iter().filter(|gpu| gpu.known_s > 0.0).count();
    let gpus = report.gpus.iter().map(|gpu| (gpu.index, &gpu.missing));
    let ranks = report.ranks.iter().map(|rank| (rank.rank, &rank.missing));
    let gpus = fold(gpus).into_iter().map(|(all, missing)| {
        let absence = match all.iter().filter(|index| is_known(index)).count() {
            0 => Absence::NeverKnown,
            some if some < known => Absence::OfSome,
            _ => Absence::OfAll,
        };
        words.missing_gpus(&numbers(&all), &missing, absence)
    });
    let ranks = fold(ranks)
        .into_iter()
        .map(|(all, missing)| words.missing_ranks(&numbers(&all), &missing));
    gpus.chain(ranks).collect()
}

fn fold<'a>(all: impl Iterator<Item = (u32, &'a Vec<Missing>)>) -> Vec<(Vec<u32>, Missing)> {
    let mut folded: Vec<(Vec<u32>, Missing)> = Vec::new();
    for (index, missing) in all {
        for missing in missing {
            let same = folded.iter_mut().find(|(_, other)| {
                other.why == missing.why
                    && (other.since_s - missing.since_s).abs() < TRIFLE_S
                    && (other.for_s - missing.for_s).abs() < TRIFLE_S
            });
            match same {
                Some((indices, _)) => indices.push(index),
                None => folded.push((vec![index], missing.clone())),
            }
        }
    }
    folded
}
