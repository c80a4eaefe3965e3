//! What the ranks did in a step, for a few steps: each notes it by itself, and one of them makes the record of all.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// The kind of the records.
pub const RECORD: &str = "spans";

/// Buckets of a step that are kept, the first ones.
pub const BUCKETS_MAX: usize = 256;

/// Steps of an epoch whose spans are kept; the last one is among them.
const STEPS_PER_EPOCH: u64 = 4;

/// Two spans of one kind with less time between them are one.
const GAP_NS: u64 = 50_000;

/// What a rank does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Waits for data.
    Data,
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
    /// Waits for other ranks, maybe within a pass.
    Wait,
    /// The optimizer's step.
    Optimizer,
    /// On held-out data.
    Evaluation,
    /// Hands a checkpoint over.
    Save,
}

/// An operation of all ranks that carried gradients or weights, on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Bytes of this rank's memory that it read or wrote.
    pub bytes: u64,
    /// This rank had joined it.
    pub started: Instant,
    /// The last rank had.
    pub peers_ready: Instant,
    /// It was complete here.
    pub finished: Instant,
}

/// What a rank did in a step, in nanoseconds of its machine's clock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spans {
    /// Steps done with this one.
    step: u64,
    /// The machine, whose ranks share a clock.
    node: usize,
    /// When the rank had what all ranks have reduced.
    reduced_ns: u64,
    spans: Vec<(Kind, u64, u64)>,
    /// Of each bucket its bytes, and when it started, the peers were ready, and it was finished.
    #[serde(default)]
    buckets: Vec<(u64, [u64; 3])>,
}

/// A line for the spans of a step.
#[derive(Debug, PartialEq, Serialize)]
pub struct SpansRecord {
    kind: &'static str,
    /// Steps done with this one.
    pub step: u64,
    /// For each rank its spans, with begin and end in seconds since the first rank began.
    ranks: Vec<Vec<(Kind, f64, f64)>>,
    /// For each rank its buckets: bytes, and the seconds of the start, of the last rank's coming and of the end.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    buckets: Vec<Vec<(u64, f64, f64, f64)>>,
}

/// Whether the spans of this step of an epoch are kept, the first of which is 0. The same on all ranks.
pub fn is_kept(step: u64, steps: u64) -> bool {
    let quarter = |step: u64| step * STEPS_PER_EPOCH / steps.max(1);
    quarter(step + 1) > quarter(step)
}

/// Notes what this rank does in one step.
#[derive(Debug)]
pub struct Notes {
    reduced: Instant,
    spans: Vec<(Kind, Instant, Instant)>,
    buckets: Vec<Bucket>,
}

impl Default for Notes {
    fn default() -> Self {
        Self::new()
    }
}

impl Notes {
    /// Nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self {
            reduced: Instant::now(),
            spans: Vec::new(),
            buckets: Vec::new(),
        }
    }

    /// Notes when all ranks had reduced the step.
    pub fn reduced(&mut self, at: Instant) {
        self.reduced = at;
    }

    /// Notes what this rank did.
    pub fn add(&mut self, kind: Kind, start: Instant, end: Instant) {
        self.spans.push((kind, start, end));
    }

    /// Notes an operation.
    pub fn add_bucket(&mut self, bucket: Bucket) {
        if self.buckets.len() < BUCKETS_MAX {
            self.buckets.push(bucket);
        }
    }

    /// The spans in the order in which they began, once `step` steps are done. `now_ns` is the time by the machine's clock.
    #[must_use]
    pub fn done(mut self, step: u64, node: usize, now_ns: u64) -> Spans {
        self.spans.sort_by_key(|(_, start, _)| *start);
        let clock = Clock {
            now: Instant::now(),
            ns: now_ns,
        };
        let times = |bucket: &Bucket| {
            [bucket.started, bucket.peers_ready, bucket.finished].map(|at| clock.ns(at))
        };
        let buckets = self.buckets.iter();
        let buckets = buckets
            .map(|bucket| (bucket.bytes, times(bucket)))
            .collect();
        Spans {
            step,
            node,
            reduced_ns: clock.ns(self.reduced),
            spans: joined(&self.spans, &clock),
            buckets,
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
pub fn records(ranks: &[Vec<Spans>]) -> Vec<SpansRecord> {
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
    let since = |node: usize, ns: u64| ns.wrapping_sub(reduced_ns[&node]).cast_signed();
    let since_reduced = |spans: &Spans| -> Vec<(Kind, [i64; 2])> {
        let of = spans.spans.iter();
        of.map(|(kind, start, end)| (*kind, [*start, *end].map(|ns| since(spans.node, ns))))
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
    let buckets_of = |rank: &Option<Spans>| -> Vec<(u64, f64, f64, f64)> {
        let of = rank.iter().flat_map(|spans| {
            let node = spans.node;
            (spans.buckets.iter()).map(move |bucket| (node, bucket))
        });
        of.map(|(node, (bytes, times))| {
            let [start, ready, end] = times.map(|ns| seconds(since(node, ns)));
            (*bytes, start, ready, end)
        })
        .collect()
    };
    let mut buckets: Vec<_> = ranks.iter().map(buckets_of).collect();
    if buckets.iter().all(Vec::is_empty) {
        buckets.clear();
    }
    let rows = rows.into_iter();
    SpansRecord {
        kind: RECORD,
        step,
        ranks: rows
            .map(|row| row.into_iter().map(in_seconds).collect())
            .collect(),
        buckets,
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
            buckets: Vec::new(),
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
            buckets: Vec::new(),
        };
        assert_eq!(records(&ranks), [record]);
    }

    #[test]
    fn buckets_are_on_the_axis_of_the_spans() {
        let mut slow = spans(1, 0, 909_000_000, 900_000_000);
        slow.buckets = vec![(64, [905_000_000, 905_000_000, 909_000_000])];
        let mut late = spans(1, 1, 12_000_000, 4_000_000);
        late.buckets = vec![(64, [5_000_000, 11_000_000, 12_000_000])];
        let records = records(&[vec![slow], Vec::new(), vec![late]]);
        assert_eq!(
            records[0].buckets,
            [
                vec![(64, 0.005, 0.005, 0.009)],
                vec![],
                vec![(64, 0.002, 0.008, 0.009)]
            ]
        );
    }

    #[test]
    fn a_rank_has_a_bounded_number_of_buckets() {
        let mut notes = Notes::new();
        let now = Instant::now();
        for bytes in 0..1_000 {
            let (started, peers_ready, finished) = (now, now, now);
            notes.add_bucket(Bucket {
                bytes,
                started,
                peers_ready,
                finished,
            });
        }
        assert_eq!(notes.done(1, 0, 7).buckets.len(), BUCKETS_MAX);
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
