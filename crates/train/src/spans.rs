//! What the ranks did in a step, for a few steps of each epoch.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use paceline_rendezvous::monotonic_ns;
use serde::{Deserialize, Serialize};

/// The kind of the records.
pub(crate) const RECORD: &str = "spans";

/// Steps of an epoch whose spans are kept; the last one is among them.
const STEPS_PER_EPOCH: u64 = 4;

/// Two spans of one kind with less time between them are one.
const GAP_NS: u64 = 50_000;

/// What a rank does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// Waits for data.
    Data,
    Forward,
    Backward,
    /// Waits for other ranks, maybe within a pass.
    Wait,
    Optimizer,
    Evaluation,
    Save,
}

/// What a rank did in a step, in nanoseconds of its machine's clock.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Spans {
    /// Steps done with this one.
    step: u64,
    /// The machine, whose ranks share a clock.
    node: usize,
    /// When the rank had what all ranks have reduced.
    reduced_ns: u64,
    spans: Vec<(Kind, u64, u64)>,
}

/// A line for the spans of a step.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct SpansRecord {
    kind: &'static str,
    step: u64,
    /// For each rank its spans, with begin and end in seconds since the first rank began.
    ranks: Vec<Vec<(Kind, f64, f64)>>,
}

/// Whether the spans of this step of an epoch are kept, the first of which is 0. The same on all ranks.
pub(crate) fn is_kept(step: u64, steps: u64) -> bool {
    let quarter = |step: u64| step * STEPS_PER_EPOCH / steps.max(1);
    quarter(step + 1) > quarter(step)
}

/// Notes what this rank does in one step.
pub(crate) struct Notes {
    reduced: Instant,
    spans: Vec<(Kind, Instant, Instant)>,
}

impl Notes {
    pub(crate) fn new() -> Self {
        Self {
            reduced: Instant::now(),
            spans: Vec::new(),
        }
    }

    /// Notes that all ranks have now reduced the step.
    pub(crate) fn reduced(&mut self) {
        self.reduced = Instant::now();
    }

    pub(crate) fn add(&mut self, kind: Kind, start: Instant, end: Instant) {
        self.spans.push((kind, start, end));
    }

    /// The spans in the order in which they began, once `step` steps are done.
    pub(crate) fn done(mut self, step: u64, node: usize) -> Spans {
        self.spans.sort_by_key(|(_, start, _)| *start);
        let clock = Clock {
            now: Instant::now(),
            ns: monotonic_ns(),
        };
        Spans {
            step,
            node,
            reduced_ns: clock.ns(self.reduced),
            spans: joined(&self.spans, &clock),
        }
    }
}

/// A moment by both clocks.
struct Clock {
    now: Instant,
    ns: u64,
}

impl Clock {
    /// A moment before it.
    fn ns(&self, at: Instant) -> u64 {
        let ago = self.now.saturating_duration_since(at).as_nanos();
        (self.ns).saturating_sub(u64::try_from(ago).unwrap_or(u64::MAX))
    }
}

fn joined(spans: &[(Kind, Instant, Instant)], clock: &Clock) -> Vec<(Kind, u64, u64)> {
    let mut joined: Vec<(Kind, u64, u64)> = Vec::new();
    for (kind, start, end) in spans {
        let (start, end) = (clock.ns(*start), clock.ns(*end));
        match joined.last_mut() {
            Some(last) if last.0 == *kind && start < last.2 + GAP_NS => last.2 = last.2.max(end),
            _ => joined.push((*kind, start, end)),
        }
    }
    joined
}

/// The records of the steps that the ranks, in their order, have kept. A rank that has not kept a step has no spans in it.
///
/// Ranks of one machine share a clock. The clocks of machines are laid over each other where the first rank of each has what
/// all ranks have reduced.
pub(crate) fn records(ranks: &[Vec<Spans>]) -> Vec<SpansRecord> {
    let steps: BTreeSet<u64> = ranks.iter().flatten().map(|spans| spans.step).collect();
    steps.into_iter().map(|step| record(step, ranks)).collect()
}

fn record(step: u64, ranks: &[Vec<Spans>]) -> SpansRecord {
    let of_rank = |rank: &'_ Vec<Spans>| rank.iter().find(|spans| spans.step == step).cloned();
    let ranks: Vec<Option<Spans>> = ranks.iter().map(of_rank).collect();
    let mut reduced_ns = BTreeMap::new();
    for spans in ranks.iter().flatten() {
        let first: &mut u64 = reduced_ns.entry(spans.node).or_insert(spans.reduced_ns);
        *first = spans.reduced_ns.min(*first);
    }
    let since_reduced = |spans: &Spans| -> Vec<(Kind, [i64; 2])> {
        let zero = reduced_ns[&spans.node];
        let since = |ns: u64| ns.wrapping_sub(zero).cast_signed();
        let spans = spans.spans.iter();
        spans
            .map(|(kind, start, end)| (*kind, [*start, *end].map(since)))
            .collect()
    };
    let rows: Vec<Vec<(Kind, [i64; 2])>> = (ranks.iter())
        .map(|rank| rank.as_ref().map_or(Vec::new(), since_reduced))
        .collect();
    let starts = rows.iter().flatten().map(|(_, [start, _])| *start);
    let first = starts.min().unwrap_or(0);
    // Whole microseconds are short to write.
    let seconds = |ns: i64| (ns.saturating_sub(first) / 1_000) as f64 / 1e6;
    let in_seconds = |(kind, [start, end]): (Kind, [i64; 2])| (kind, seconds(start), seconds(end));
    let rows = rows.into_iter();
    SpansRecord {
        kind: RECORD,
        step,
        ranks: rows
            .map(|row| row.into_iter().map(in_seconds).collect())
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_few_steps_of_an_epoch_are_kept_and_always_the_last_one() {
        let kept =
            |steps: u64| -> Vec<u64> { (0..steps).filter(|step| is_kept(*step, steps)).collect() };
        assert_eq!(kept(1), [0]);
        assert_eq!(kept(3), [0, 1, 2]);
        assert_eq!(kept(23), [5, 11, 17, 22]);
        assert_eq!(kept(1_000_000).len(), 4);
        assert_eq!(kept(1_000_000).last(), Some(&999_999));
    }

    #[test]
    fn spans_without_a_gap_are_one() {
        let start = Instant::now();
        let at = |micros| start + Duration::from_micros(micros);
        let spans = [
            (Kind::Forward, at(0), at(3_000)),
            (Kind::Wait, at(3_000), at(4_000)),
            (Kind::Wait, at(4_010), at(5_000)),
            (Kind::Wait, at(6_000), at(7_000)),
        ];
        let clock = Clock {
            now: at(10_000),
            ns: 10_000_000,
        };
        assert_eq!(
            joined(&spans, &clock),
            [
                (Kind::Forward, 0, 3_000_000),
                (Kind::Wait, 3_000_000, 5_000_000),
                (Kind::Wait, 6_000_000, 7_000_000),
            ]
        );
    }

    fn spans(step: u64, node: usize, reduced_ns: u64, begin: u64) -> Spans {
        Spans {
            step,
            node,
            reduced_ns,
            spans: vec![(Kind::Forward, begin, reduced_ns)],
        }
    }

    #[test]
    fn clocks_of_machines_meet_where_the_ranks_do() {
        // The second machine's clock is far behind, and its second rank learns 2 ms later that the step is reduced.
        let ranks = [
            vec![spans(1, 0, 909_000_000, 900_000_000)],
            vec![spans(1, 1, 12_000_000, 4_000_000)],
            vec![spans(1, 1, 14_000_000, 5_000_000)],
        ];
        let forward = |start, end| vec![(Kind::Forward, start, end)];
        let record = SpansRecord {
            kind: "spans",
            step: 1,
            ranks: vec![
                forward(0.0, 0.009),
                forward(0.001, 0.009),
                forward(0.002, 0.011),
            ],
        };
        assert_eq!(records(&ranks), [record]);
    }

    #[test]
    fn a_rank_that_has_not_kept_a_step_has_an_empty_row() {
        let ranks = [
            vec![spans(1, 0, 2_000, 1_000), spans(2, 0, 4_000, 3_000)],
            vec![spans(2, 0, 4_000, 3_000)],
            Vec::new(),
        ];
        let records = records(&ranks);
        let rows = |at: usize| -> Vec<usize> { records[at].ranks.iter().map(Vec::len).collect() };
        assert_eq!((records[0].step, rows(0)), (1, vec![1, 0, 0]));
        assert_eq!((records[1].step, rows(1)), (2, vec![1, 1, 0]));
        let text = serde_json::to_string(&records[0]).expect("plain data encodes");
        assert_eq!(
            text,
            r#"{"kind":"spans","step":1,"ranks":[[["forward",0.0,1e-6]],[],[]]}"#
        );
    }
}
