//! The recorder of one group's sends and receives on one rank.
//!
//! They have numbers of their own, several threads have one each at the same time, and one that waits may be older than a
//! whole ring of others. A slot belongs to its operation from the claim until it is over: a later one takes the next slot,
//! so an operation that waits is never pushed out. Messages that no receive has asked for are not recorded when they
//! come: a dump asks the [`Mailbox`].

use std::fmt;
use std::sync::atomic::{Ordering, fence};
use std::sync::{OnceLock, Weak};
use std::time::Instant;

use super::record::{Record, State, Unclaimed};
use super::ring::{
    BYTES, CODES, ELEMENTS, ENDED, Entry, HAS_PEER, PARTNER, Partner, SEQ, STAMP, STARTED,
    SUBMITTED, Slot, has_state, ns, slots, with_state,
};
use crate::element::DType;
use crate::error::{OpKind, Operation, Route};
use crate::plan::Algorithm;

/// Slots that are tried for one operation. All of them taken by operations that are not over means that as many threads
/// wait: then the newest is not recorded.
const TRIES_MAX: usize = 64;

/// Holds messages that no receive has asked for.
pub(crate) trait Mailbox: fmt::Debug + Send + Sync {
    fn unclaimed(&self) -> Vec<Unclaimed>;
}

/// The last sends and receives of one group on one rank. Any number of threads record at the same time.
#[derive(Debug)]
pub(crate) struct P2pLog {
    records: usize,
    origin: Instant,
    /// Made for the first of them: most groups have none.
    slots: OnceLock<Box<[Slot]>>,
    mailbox: OnceLock<Weak<dyn Mailbox>>,
}

/// What is recorded of a send or receive, as far as it is known.
#[derive(Debug, Clone, Copy)]
pub(crate) struct P2pCall {
    pub(crate) operation: Operation,
    pub(crate) dtype: Option<DType>,
    pub(crate) elements: usize,
    pub(crate) bytes: usize,
}

/// An operation that a thread is in. Dropped before it is [`finished`](Self::finished), it has failed.
#[derive(Debug)]
#[must_use = "dropped at once, it has failed"]
pub(crate) struct Noted<'a>(Option<(&'a P2pLog, &'a Slot)>);

impl P2pLog {
    /// *Cost*: 96 bytes for each of `records`, once there is a send or receive.
    pub(super) fn new(records: usize, origin: Instant) -> Self {
        Self {
            records,
            origin,
            slots: OnceLock::new(),
            mailbox: OnceLock::new(),
        }
    }

    /// Sets the holder of messages that no receive has asked for; once.
    pub(crate) fn set_mailbox(&self, mailbox: Weak<dyn Mailbox>) {
        self.mailbox.set(mailbox).expect("a group has one mailbox");
    }

    /// A receive is posted that nobody waits in yet.
    pub(crate) fn posted(&self, call: &P2pCall, at: Instant) {
        let (entry, at) = (entry(call), ns(self.origin, at));
        let fill = |slot: &Slot| slot.claim(|| slot.fill(&entry, State::Submitted, at, 0));
        let _ = self.tries(entry.operation.seq).any(fill);
    }

    /// This rank is in an operation from now on, whether or not it was [`posted`](Self::posted).
    #[inline]
    pub(crate) fn started(&self, call: &P2pCall, at: Instant) -> Noted<'_> {
        let (entry, at) = (entry(call), ns(self.origin, at));
        let seq = entry.operation.seq;
        let word = |slot: &Slot, i: usize| slot.0[i].load(Ordering::Relaxed);
        for slot in self.tries(seq) {
            // Its own slot, if it was posted: nobody else numbers an operation like it.
            let submitted = match word(slot, SEQ) == seq {
                true if has_state(word(slot, CODES), State::Finished) => return Noted(None),
                true => word(slot, SUBMITTED),
                false => at,
            };
            if slot.claim(|| slot.fill(&entry, State::Started, submitted, at)) {
                return Noted(Some((self, slot)));
            }
        }
        Noted(None)
    }

    /// The slots in which an operation of this number may be, in order.
    #[inline]
    fn tries(&self, seq: u64) -> impl Iterator<Item = &Slot> {
        let slots = self.slots.get_or_init(|| slots(self.records));
        let mask = slots.len().wrapping_sub(1);
        let tries = TRIES_MAX.min(slots.len());
        (0..tries).map(move |i| &slots[(seq as usize + i) & mask])
    }

    /// What is in the ring, the newest `records_max` of it.
    pub(super) fn dump(&self, records_max: usize) -> Vec<Record> {
        let slots = self.slots.get().map_or(&[][..], |slots| slots);
        let mut records: Vec<Record> = slots.iter().filter_map(Slot::read).collect();
        // One that was posted, lost its slot and took another one is there twice: what it came to counts.
        records.sort_unstable_by_key(|record| (record.seq, std::cmp::Reverse(record.state)));
        records.dedup_by_key(|record| record.seq);
        // What is waited for is kept before what is over.
        let mut excess = records.len().saturating_sub(records_max);
        records.retain(|record| {
            let goes = excess > 0 && !record.is_open();
            excess -= usize::from(goes);
            !goes
        });
        records
    }

    pub(super) fn unclaimed(&self) -> Vec<Unclaimed> {
        let mailbox = self.mailbox.get().and_then(Weak::upgrade);
        mailbox.map_or_else(Vec::new, |mailbox| mailbox.unclaimed())
    }
}

impl Noted<'_> {
    /// Nothing is recorded.
    pub(crate) fn nowhere() -> Self {
        Self(None)
    }

    /// The operation is complete on this rank.
    #[inline]
    pub(crate) fn finished(mut self) {
        self.reach(State::Finished, |_| {});
    }

    /// The receive is complete; what it got, and from whom.
    #[inline]
    pub(crate) fn received(mut self, from: usize, elements: usize, bytes: usize) {
        self.reach(State::Finished, |slot| {
            let codes = slot.0[CODES].load(Ordering::Relaxed);
            let partner = slot.0[PARTNER].load(Ordering::Relaxed) >> 32 << 32;
            let word = |i: usize, value| slot.0[i].store(value, Ordering::Relaxed);
            word(CODES, codes | HAS_PEER);
            word(PARTNER, partner | from as u64);
            word(ELEMENTS, elements as u64);
            word(BYTES, bytes as u64);
        });
    }

    /// The message is on its way, and this rank does not wait for it to be taken, or not yet.
    #[inline]
    pub(crate) fn on_its_way(mut self) {
        if let Some((_, slot)) = self.0.take() {
            let codes = slot.0[CODES].load(Ordering::Relaxed);
            slot.write(|| {
                slot.0[CODES].store(with_state(codes, State::Submitted), Ordering::Relaxed);
                slot.0[STARTED].store(0, Ordering::Relaxed);
            });
        }
    }

    #[inline]
    fn reach(&mut self, state: State, also: impl FnOnce(&Slot)) {
        // The slot is this operation's own until the state below says that it is over.
        if let Some((log, slot)) = self.0.take() {
            let at = ns(log.origin, Instant::now());
            slot.write(|| {
                also(slot);
                let codes = slot.0[CODES].load(Ordering::Relaxed);
                slot.0[ENDED].store(at, Ordering::Relaxed);
                slot.0[CODES].store(with_state(codes, state), Ordering::Relaxed);
            });
        }
    }
}

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        self.reach(State::Failed, |_| {});
    }
}

impl Slot {
    /// Takes a slot that no operation is in and fills it; false when it is taken.
    #[inline]
    fn claim(&self, fill: impl FnOnce()) -> bool {
        let stamp = &self.0[STAMP];
        let version = stamp.load(Ordering::Acquire);
        let codes = self.0[CODES].load(Ordering::Relaxed);
        if !version.is_multiple_of(2) || has_state(codes, State::Started) {
            return false;
        }
        // The first to come writes it; the state that was read is of this very version.
        let claimed =
            stamp.compare_exchange(version, version + 1, Ordering::Acquire, Ordering::Relaxed);
        if claimed.is_err() {
            return false;
        }
        // As in `write`: a reader that sees any of the stores sees the odd stamp.
        fence(Ordering::Release);
        fill();
        stamp.store(version + 2, Ordering::Release);
        true
    }
}

fn entry(call: &P2pCall) -> Entry {
    let route = match call.operation.kind {
        OpKind::Send(route) | OpKind::Recv(route) => route,
        _ => Route { peer: None, tag: 0 },
    };
    Entry {
        operation: call.operation,
        reduce: None,
        dtype: call.dtype,
        elements: call.elements,
        bytes: call.bytes,
        step: None,
        partner: Partner::Peer {
            rank: route.peer,
            tag: route.tag,
        },
        leaves: 0,
        algorithm: Algorithm::Direct,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn call(kind: OpKind, seq: u64) -> P2pCall {
        P2pCall {
            operation: Operation {
                kind,
                seq,
                bucket: None,
            },
            dtype: Some(DType::F32),
            elements: 4,
            bytes: 16,
        }
    }

    fn log(records: usize) -> P2pLog {
        P2pLog::new(records, Instant::now())
    }

    fn states(log: &P2pLog) -> Vec<(u64, State)> {
        let records = log.dump(usize::MAX);
        records.iter().map(|r| (r.seq, r.state)).collect()
    }

    #[test]
    fn a_message_is_kept_with_its_other_end_its_tag_and_its_times() {
        let log = log(8);
        let at = |ns| log.origin + Duration::from_nanos(ns);
        log.started(&call(OpKind::send(3, 7), 1), at(20)).finished();
        log.posted(&call(OpKind::recv(None, 8), 2), at(30));
        log.started(&call(OpKind::recv(None, 8), 2), at(40))
            .received(5, 9, 36);
        let records = log.dump(usize::MAX);
        let words: Vec<_> = records
            .iter()
            .map(|r| (&*r.op, r.peer, r.tag, r.elements, r.bytes, r.state))
            .collect();
        let expect = [
            ("send", Some(3), Some(7), 4, 16, State::Finished),
            ("recv", Some(5), Some(8), 9, 36, State::Finished),
        ];
        assert_eq!(words, expect);
        assert_eq!(
            (records[1].submitted_ns, records[1].started_ns),
            (30, Some(40))
        );
        assert!(records.iter().all(|record| record.ended_ns.is_some()));
    }

    #[test]
    fn what_is_waited_for_is_never_pushed_out() {
        let (log, now) = (log(4), Instant::now());
        let waiting = log.started(&call(OpKind::recv(Some(0), 7), 1), now);
        for seq in 2..=21 {
            log.started(&call(OpKind::send(0, 9), seq), now).finished();
        }
        let kept = states(&log);
        assert_eq!(kept[0], (1, State::Started));
        assert_eq!(kept.last(), Some(&(21, State::Finished)));
        assert_eq!(log.dump(2)[0].seq, 1, "also where few are wanted");
        drop(waiting);
        assert_eq!(states(&log)[0], (1, State::Failed));
    }

    #[test]
    fn a_send_on_its_way_is_not_waited_in_until_somebody_waits_for_it() {
        let (log, now) = (log(4), Instant::now());
        let send = call(OpKind::send(1, 7), 1);
        log.started(&send, now).on_its_way();
        assert_eq!(states(&log), [(1, State::Submitted)]);
        let waits = log.started(&send, now);
        assert_eq!(states(&log), [(1, State::Started)]);
        waits.finished();
        // Done by the thread that sends before its owner waits for it.
        log.started(&send, now).finished();
        assert_eq!(states(&log), [(1, State::Finished)]);
    }

    #[test]
    fn without_room_nothing_is_kept() {
        let (log, now) = (log(0), Instant::now());
        log.started(&call(OpKind::send(1, 7), 1), now).finished();
        assert_eq!(states(&log), []);
    }

    #[test]
    fn threads_at_the_same_time_do_not_disturb_each_other() {
        let log = log(64);
        let rounds = 5_000;
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let log = &log;
                scope.spawn(move || {
                    for round in 0..rounds {
                        let seq = 1 + thread + 4 * round;
                        // All of the words follow from the number, so that a mixture shows.
                        let kind = OpKind::send(seq as usize, seq as u32);
                        log.started(&call(kind, seq), Instant::now()).finished();
                    }
                });
            }
        });
        let records = log.dump(usize::MAX);
        assert!(!records.is_empty());
        for record in records {
            let seq = Some(record.seq);
            assert_eq!((record.peer, record.tag), (seq, seq), "{record:?}");
        }
    }

    /// The bound is far above what it takes; see the ring's.
    #[test]
    fn recording_a_message_costs_no_more_than_its_stores_and_a_look_at_the_clock() {
        let (log, now) = (log(1024), Instant::now());
        let mut seq = 0;
        let mut batch = || {
            let started = Instant::now();
            for _ in 0..1000 {
                seq += 1;
                let call = call(OpKind::send(1, 7), seq);
                log.started(std::hint::black_box(&call), now).finished();
            }
            started.elapsed() / 1000
        };
        let best = (0..200).map(|_| batch()).min();
        let best = best.expect("there are batches");
        println!("{best:?} for each message");
        assert!(best < Duration::from_nanos(400), "{best:?}");
    }
}
