//! Who comes last, and by how much.

use std::collections::BTreeMap;
use std::time::Duration;

use paceline_words::say;
use serde::Serialize;

use super::view::{View, seconds};
use super::{Cause, Diagnosis};

/// How late a rank came to the operations that all ranks of the group recorded.
///
/// The lag behind the first rank. It is taken from how long each rank waited for the last one, which is the same moment for
/// all of them, so that the hosts' clocks need not agree.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Lag {
    /// Operations that were compared.
    pub operations: usize,
    /// In how many of them it was the last one.
    pub last: usize,
    /// Half of its lags are shorter.
    ///
    /// *Units*: ns.
    pub p50_ns: u64,
    /// 99 of 100 of its lags are shorter.
    ///
    /// *Units*: ns.
    pub p99_ns: u64,
}

/// Fewer operations tell nothing.
const OPERATIONS_MIN: usize = 20;
/// A lag below this disturbs nobody.
const LAG_NS_MIN: u64 = 1_000_000;

/// The lag of every rank that shares operations with others.
pub(super) fn of(view: &View<'_>) -> BTreeMap<usize, Lag> {
    let mut lags: BTreeMap<usize, (Vec<u64>, usize)> = BTreeMap::new();
    let complete = |group: &&super::view::Group<'_>| {
        group.members.len() > 1 && group.members.iter().all(|member| member.group.is_some())
    };
    for group in view.groups.iter().filter(complete) {
        for first in group.members[0].records() {
            let wait = |member: &super::view::Member<'_>| {
                let record = member.record(first.seq)?;
                let wait = record.arrived_ns?.saturating_sub(record.started_ns?);
                Some((wait, member.rank))
            };
            let waits: Option<Vec<(u64, usize)>> = group.members.iter().map(wait).collect();
            let Some(waits) = waits else { continue };
            let longest = waits.iter().map(|(wait, _)| *wait).max().unwrap_or(0);
            let last = waits.iter().min().map(|(_, rank)| *rank);
            for (wait, rank) in waits {
                let (known, count) = lags.entry(rank).or_default();
                known.push(longest - wait);
                *count += usize::from(last == Some(rank));
            }
        }
    }
    let summary = |(rank, (mut lags, last)): (usize, (Vec<u64>, usize))| {
        lags.sort_unstable();
        let at = |share: usize| lags[(lags.len() * share / 100).min(lags.len() - 1)];
        let lag = Lag {
            operations: lags.len(),
            last,
            p50_ns: at(50),
            p99_ns: at(99),
        };
        (rank, lag)
    };
    lags.into_iter().map(summary).collect()
}

/// The rank that keeps the others waiting again and again, if there is one.
pub(super) fn slow(view: &View<'_>, lags: &BTreeMap<usize, Lag>) -> Option<Diagnosis> {
    let (rank, lag) = lags.iter().max_by_key(|(_, lag)| lag.last)?;
    // Of two equal ranks each is last in half of the operations.
    let often = match view.world {
        2 => lag.last * 4 >= lag.operations * 3,
        _ => lag.last * 2 >= lag.operations,
    };
    if lag.operations < OPERATIONS_MIN || !often || lag.p50_ns < LAG_NS_MIN {
        return None;
    }
    let (who, last, operations) = (view.who(&[*rank]), lag.last, lag.operations);
    let [p50, p99] =
        [lag.p50_ns, lag.p99_ns].map(|ns| seconds(Duration::from_nanos(ns), view.lang));
    let sentence = say!(
        view.lang,
        "{who} comes last in {last} of {operations} operations, behind the first by {p50} (p50) and {p99} (p99)",
        "{who}: 연산 {operations}개 중 {last}개에 마지막으로 들어옴; 첫 랭크보다 {p50}(p50), {p99}(p99) 늦음"
    );
    Some(Diagnosis {
        is_fault: false,
        culprits: vec![*rank],
        since_unix_ns: u64::MAX,
        ..Diagnosis::fault(Cause::Slow, sentence)
    })
}
