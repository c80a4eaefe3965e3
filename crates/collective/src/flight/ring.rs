//! The recorder of one group: a ring of its last operations, written on the way and read when something went wrong.
//!
//! One lock guards the ring. Only a dump competes for it with the executing thread, so recording neither waits nor allocates.

use std::sync::{Mutex, OnceLock};
use std::time::Instant;

use super::lock;
use super::p2p::P2pLog;
use super::record::{Failure, Forming, GroupDump, Record, State};
use crate::element::{DType, ReduceOp};
use crate::error::Operation;
use crate::plan::Algorithm;

/// What is recorded of an operation when it is handed over; the caller has all of it at hand.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) operation: Operation,
    pub(crate) reduce: Option<ReduceOp>,
    pub(crate) dtype: Option<DType>,
    /// Elements of the whole call.
    pub(crate) elements: usize,
    /// Bytes of the longest slot.
    pub(crate) bytes: usize,
    /// Training step, of operations that carry one.
    pub(crate) step: Option<u64>,
    pub(crate) partner: Partner,
    /// Leaves of the tree of a reduction, else 0.
    pub(crate) leaves: u32,
    pub(crate) algorithm: Algorithm,
}

/// Which rank of the group an operation is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Partner {
    /// None in particular.
    All,
    /// The one whose data it is.
    Root(u32),
    /// The other side of an operation between two; none for a receive from any rank.
    Peer { rank: Option<u32>, tag: u32 },
}

/// A group as its recorder knows it.
#[derive(Debug, Clone)]
pub(crate) struct Membership {
    /// The same on all ranks of the group, and different from this rank's other groups'.
    pub(crate) name: String,
    /// Global ranks, in the order of the ranks in the group.
    pub(crate) ranks: Vec<usize>,
    pub(crate) transport: &'static str,
}

/// The last operations of one group on one rank.
///
/// One ring serves one sequence of numbers: sends and receives, which are numbered apart, have a [`P2pLog`] of their
/// own. [`submitted`](Self::submitted) is called in the order of the numbers, and before the operation can start; the
/// other methods by the executing thread, one operation at a time.
#[derive(Debug)]
pub(crate) struct Recorder {
    pub(crate) membership: Membership,
    origin: Instant,
    ring: Mutex<Ring>,
    pub(crate) p2p: P2pLog,
    /// For a group that did not come about, how far it came.
    pub(super) forming: OnceLock<Forming>,
    pub(super) failure: OnceLock<Failure>,
}

#[derive(Debug)]
struct Ring {
    /// An operation is in the slot of its number.
    slots: Vec<Option<Kept>>,
    /// Number of the last operation submitted.
    last: u64,
    /// Number of the last operation that is over; a slot up to it may be written again.
    over: u64,
}

/// One operation and how far it has come. Times are ns since the rank's recorder began.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kept {
    pub(super) entry: Entry,
    pub(super) state: State,
    pub(super) submitted_ns: u64,
    pub(super) started_ns: Option<u64>,
    pub(super) arrived_ns: Option<u64>,
    pub(super) ended_ns: Option<u64>,
}

impl Recorder {
    /// Keeps the last `records` operations, rounded up to a power of two; none at all for 0.
    pub(super) fn new(membership: Membership, records: usize, origin: Instant) -> Self {
        let slots = match records {
            0 => 0,
            records => records.next_power_of_two(),
        };
        Self {
            membership,
            origin,
            ring: Mutex::new(Ring {
                slots: vec![None; slots],
                last: 0,
                over: 0,
            }),
            p2p: P2pLog::new(records, origin),
            forming: OnceLock::new(),
            failure: OnceLock::new(),
        }
    }

    /// An operation waits for those before it. Not recorded while its place in the ring belongs to one that is not over.
    pub(crate) fn submitted(&self, entry: &Entry, at: Instant) {
        let mut ring = lock(&self.ring);
        ring.last = entry.operation.seq;
        if ring.last <= ring.over + ring.slots.len() as u64 {
            ring.put(Kept::new(entry, self.ns(at), None));
        }
    }

    /// This rank joins an operation. Records all of it, whether or not it was [`submitted`](Self::submitted) before.
    pub(crate) fn started(&self, entry: &Entry, submitted: Instant, at: Instant) {
        let mut ring = lock(&self.ring);
        ring.last = ring.last.max(entry.operation.seq);
        ring.put(Kept::new(entry, self.ns(submitted), Some(self.ns(at))));
    }

    /// All ranks have joined the operation.
    pub(crate) fn arrived(&self, seq: u64, at: Instant) {
        let at = Some(self.ns(at));
        lock(&self.ring).reach(seq, State::Arrived, |kept| kept.arrived_ns = at);
    }

    /// The operation is complete on this rank.
    pub(crate) fn finished(&self, seq: u64, at: Instant) {
        self.ended(seq, State::Finished, at);
    }

    /// The operation failed, after this rank had joined it. One that was never [`started`](Self::started) stays as it was.
    pub(crate) fn failed(&self, seq: u64, at: Instant) {
        self.ended(seq, State::Failed, at);
    }

    fn ended(&self, seq: u64, state: State, at: Instant) {
        let at = Some(self.ns(at));
        let mut ring = lock(&self.ring);
        ring.over = seq;
        ring.reach(seq, state, |kept| kept.ended_ns = at);
    }

    /// What is in the ring, the newest `records_max` of it.
    pub(super) fn dump(&self, records_max: usize) -> GroupDump {
        let (slots, submitted) = {
            let ring = lock(&self.ring);
            (ring.slots.clone(), ring.last)
        };
        let mut records: Vec<Record> = slots.iter().flatten().map(Kept::record).collect();
        records.sort_unstable_by_key(|record| record.seq);
        records.drain(..records.len().saturating_sub(records_max));
        GroupDump {
            name: self.membership.name.clone(),
            ranks: self.membership.ranks.clone(),
            transport: self.membership.transport.into(),
            submitted,
            forming: self.forming.get().cloned(),
            failure: self.failure.get().cloned(),
            records,
            p2p: self.p2p.dump(records_max),
            unclaimed: self.p2p.unclaimed(),
        }
    }

    pub(super) fn ns(&self, at: Instant) -> u64 {
        ns(self.origin, at)
    }
}

impl Ring {
    fn slot(&mut self, seq: u64) -> Option<&mut Option<Kept>> {
        // The length is a power of two or 0, and then the mask is out of range.
        let mask = self.slots.len().wrapping_sub(1);
        self.slots.get_mut(seq as usize & mask)
    }

    fn put(&mut self, kept: Kept) {
        if let Some(slot) = self.slot(kept.entry.operation.seq) {
            *slot = Some(kept);
        }
    }

    fn reach(&mut self, seq: u64, state: State, note: impl FnOnce(&mut Kept)) {
        let kept = self.slot(seq).and_then(Option::as_mut);
        let is_it = |kept: &&mut Kept| kept.entry.operation.seq == seq;
        if let Some(kept) = kept.filter(is_it)
            && kept.state > State::Submitted
        {
            kept.state = state;
            note(kept);
        }
    }
}

/// Time since the recorder began.
pub(super) fn ns(origin: Instant, at: Instant) -> u64 {
    let since = at.saturating_duration_since(origin);
    since.as_secs() * 1_000_000_000 + u64::from(since.subsec_nanos())
}

impl Kept {
    /// An operation that this rank has joined if it has `started`, and else waits.
    pub(super) fn new(entry: &Entry, submitted_ns: u64, started_ns: Option<u64>) -> Self {
        Self {
            entry: *entry,
            state: started_ns.map_or(State::Submitted, |_| State::Started),
            submitted_ns,
            started_ns,
            arrived_ns: None,
            ended_ns: None,
        }
    }

    pub(super) fn record(&self) -> Record {
        let Entry {
            operation, partner, ..
        } = self.entry;
        let (root, peer, tag) = match partner {
            Partner::All => (None, None, None),
            Partner::Root(root) => (Some(root), None, None),
            Partner::Peer { rank, tag } => (None, rank, Some(tag)),
        };
        Record {
            seq: operation.seq,
            op: operation.kind.to_string(),
            reduce: self.entry.reduce.map(|op| op.to_string()),
            dtype: self.entry.dtype.map(|dtype| dtype.to_string()),
            elements: self.entry.elements as u64,
            bytes: self.entry.bytes as u64,
            bucket: operation.bucket.map(u64::from),
            step: self.entry.step,
            root: root.map(u64::from),
            peer: peer.map(u64::from),
            tag: tag.map(u64::from),
            leaves: Some(u64::from(self.entry.leaves)).filter(|leaves| *leaves != 0),
            algorithm: self.entry.algorithm.name().into(),
            state: self.state,
            submitted_ns: self.submitted_ns,
            started_ns: self.started_ns,
            arrived_ns: self.arrived_ns,
            ended_ns: self.ended_ns,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::slice;
    use std::time::Duration;

    use super::*;
    use crate::error::OpKind;

    fn recorder(records: usize) -> Recorder {
        let membership = Membership {
            name: "world".into(),
            ranks: vec![0, 1],
            transport: "shm",
        };
        Recorder::new(membership, records, Instant::now())
    }

    fn entry(seq: u64) -> Entry {
        Entry {
            operation: Operation {
                kind: OpKind::AllReduce,
                seq,
                bucket: Some(3),
            },
            reduce: Some(ReduceOp::Sum),
            dtype: Some(DType::F32),
            elements: 64,
            bytes: 256,
            step: Some(812),
            partner: Partner::All,
            leaves: 8,
            algorithm: Algorithm::Direct,
        }
    }

    fn states(recorder: &Recorder) -> Vec<(u64, State)> {
        let records = recorder.dump(usize::MAX).records;
        records.iter().map(|r| (r.seq, r.state)).collect()
    }

    #[test]
    fn an_operation_is_kept_with_all_its_times() {
        let recorder = recorder(4);
        let at = |ns| recorder.origin + Duration::from_nanos(ns);
        recorder.submitted(&entry(1), at(10));
        recorder.started(&entry(1), at(10), at(20));
        recorder.arrived(1, at(30));
        recorder.finished(1, at(40));
        let broadcast = Entry {
            operation: Operation {
                kind: OpKind::Broadcast,
                seq: 2,
                bucket: None,
            },
            reduce: None,
            step: None,
            partner: Partner::Root(1),
            leaves: 0,
            ..entry(2)
        };
        recorder.started(&broadcast, at(50), at(60));
        let expect = Record {
            seq: 1,
            op: "all-reduce".into(),
            reduce: Some("sum".into()),
            dtype: Some("f32".into()),
            elements: 64,
            bytes: 256,
            bucket: Some(3),
            step: Some(812),
            root: None,
            peer: None,
            tag: None,
            leaves: Some(8),
            algorithm: "direct".into(),
            state: State::Finished,
            submitted_ns: 10,
            started_ns: Some(20),
            arrived_ns: Some(30),
            ended_ns: Some(40),
        };
        let other = Record {
            seq: 2,
            op: "broadcast".into(),
            reduce: None,
            bucket: None,
            step: None,
            root: Some(1),
            leaves: None,
            state: State::Started,
            submitted_ns: 50,
            started_ns: Some(60),
            arrived_ns: None,
            ended_ns: None,
            ..expect.clone()
        };
        assert_eq!(recorder.dump(usize::MAX).records, [expect, other.clone()]);
        assert_eq!(
            recorder.dump(1).records,
            slice::from_ref(&other),
            "the newest are kept"
        );
        let between_two = Entry {
            partner: Partner::Peer {
                rank: Some(1),
                tag: 77,
            },
            ..broadcast
        };
        recorder.started(&between_two, at(50), at(60));
        let expect = Record {
            root: None,
            peer: Some(1),
            tag: Some(77),
            ..other
        };
        assert_eq!(recorder.dump(1).records, [expect]);
    }

    #[test]
    fn the_ring_keeps_the_last_operations() {
        let recorder = recorder(3);
        let now = Instant::now();
        for seq in 1..=9 {
            recorder.started(&entry(seq), now, now);
            recorder.finished(seq, now);
        }
        let kept = [6, 7, 8, 9].map(|seq| (seq, State::Finished));
        assert_eq!(states(&recorder), kept);
        assert_eq!(recorder.dump(usize::MAX).submitted, 9);
    }

    #[test]
    fn a_queue_longer_than_the_ring_does_not_push_out_what_is_running() {
        let recorder = recorder(2);
        let now = Instant::now();
        (1..=5).for_each(|seq| recorder.submitted(&entry(seq), now));
        recorder.started(&entry(1), now, now);
        recorder.submitted(&entry(6), now);
        let waiting = [(1, State::Started), (2, State::Submitted)];
        assert_eq!(states(&recorder), waiting);
        recorder.finished(1, now);
        recorder.started(&entry(2), now, now);
        recorder.failed(2, now);
        recorder.started(&entry(3), now, now);
        assert_eq!(states(&recorder), [(2, State::Failed), (3, State::Started)]);
        assert_eq!(recorder.dump(usize::MAX).submitted, 6);
    }

    #[test]
    fn an_operation_that_never_began_does_not_fail() {
        let recorder = recorder(8);
        recorder.submitted(&entry(1), Instant::now());
        recorder.failed(1, Instant::now());
        assert_eq!(states(&recorder), [(1, State::Submitted)]);
    }

    #[test]
    fn without_room_nothing_is_kept() {
        let recorder = recorder(0);
        recorder.submitted(&entry(1), Instant::now());
        recorder.started(&entry(1), Instant::now(), Instant::now());
        recorder.finished(1, Instant::now());
        assert_eq!(states(&recorder), []);
        assert_eq!(recorder.dump(usize::MAX).submitted, 1);
    }

    #[test]
    fn a_reader_never_sees_half_of_an_update() {
        let recorder = recorder(1);
        let rounds = 20_000;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for seq in 1..=rounds {
                    // All of the words follow from the number, so that a mixture shows.
                    let at = recorder.origin + Duration::from_nanos(seq);
                    let elements = seq as usize;
                    recorder.started(
                        &Entry {
                            elements,
                            ..entry(seq)
                        },
                        at,
                        at,
                    );
                    recorder.finished(seq, at);
                }
            });
            loop {
                let Some(seen) = recorder.dump(1).records.pop() else {
                    continue;
                };
                let Record { seq, elements, .. } = seen;
                assert_eq!((elements, seen.submitted_ns), (seq, seq));
                let ended = (seen.state == State::Finished).then_some(seq);
                assert_eq!(seen.ended_ns, ended);
                if seq == rounds {
                    break;
                }
            }
        });
    }

    /// The bound is far above the 15 ns of an idle machine, and far below what a lock that is fought for, an allocation
    /// or a system call costs. The best of many batches, because a busy machine disturbs most of them.
    #[test]
    fn recording_an_operation_costs_no_more_than_its_stores() {
        let (recorder, now) = (recorder(1024), Instant::now());
        let mut seq = 0;
        let batch = |seq: &mut u64| {
            let started = Instant::now();
            for _ in 0..1000 {
                *seq += 1;
                recorder.started(std::hint::black_box(&entry(*seq)), now, now);
                recorder.arrived(*seq, now);
                recorder.finished(*seq, now);
            }
            started.elapsed() / 1000
        };
        let best = (0..200).map(|_| batch(&mut seq)).min();
        let best = best.expect("there are batches");
        println!("{best:?} for each operation");
        assert!(best < Duration::from_nanos(200), "{best:?}");
    }
}
