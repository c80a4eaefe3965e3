//! The recorder of one group's sends and receives on one rank.
//!
//! They have numbers of their own, several threads have one each at the same time, and one that waits may be older than all that
//! is kept of others: it is never pushed out. Messages that no receive has asked for are not recorded when they come: a dump
//! asks the [`Mailbox`].

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, OnceLock, Weak};
use std::time::Instant;

use super::lock;
use super::record::{Record, State, Unclaimed};
use super::ring::{Entry, Kept, Partner, ns};
use crate::element::DType;
use crate::error::{OpKind, Operation, Route};
use crate::plan::Algorithm;

/// Holds messages that no receive has asked for.
pub(crate) trait Mailbox: fmt::Debug + Send + Sync {
    fn unclaimed(&self) -> Vec<Unclaimed>;
}

/// The last sends and receives of one group on one rank. Any number of threads record at the same time.
#[derive(Debug)]
pub(crate) struct P2pLog {
    records: usize,
    origin: Instant,
    /// By number.
    kept: Mutex<BTreeMap<u64, Kept>>,
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

/// The number of an operation that a thread is in. Dropped before it is [`finished`](Self::finished), it has failed.
#[derive(Debug)]
#[must_use = "dropped at once, it has failed"]
pub(crate) struct Noted<'a>(Option<(&'a P2pLog, u64)>);

impl P2pLog {
    pub(super) fn new(records: usize, origin: Instant) -> Self {
        Self {
            records,
            origin,
            kept: Mutex::default(),
            mailbox: OnceLock::new(),
        }
    }

    /// Sets the holder of messages that no receive has asked for; once.
    pub(crate) fn set_mailbox(&self, mailbox: Weak<dyn Mailbox>) {
        self.mailbox.set(mailbox).expect("a group has one mailbox");
    }

    /// A receive is posted that nobody waits in yet.
    pub(crate) fn posted(&self, call: &P2pCall, at: Instant) {
        let kept = Kept::new(&entry(call), ns(self.origin, at), None);
        self.put(&mut lock(&self.kept), kept);
    }

    /// This rank is in an operation from now on, whether or not it was [`posted`](Self::posted).
    pub(crate) fn started(&self, call: &P2pCall, at: Instant) -> Noted<'_> {
        let (seq, at) = (call.operation.seq, ns(self.origin, at));
        let mut all = lock(&self.kept);
        let submitted = match all.get(&seq) {
            Some(before) if before.state == State::Finished => return Noted(None),
            Some(before) => before.submitted_ns,
            None => at,
        };
        let kept = Kept::new(&entry(call), submitted, Some(at));
        Noted(self.put(&mut all, kept).then_some((self, seq)))
    }

    /// Keeps an operation in place of the oldest that no thread is in; false if threads are in all of them.
    fn put(&self, all: &mut BTreeMap<u64, Kept>, kept: Kept) -> bool {
        let seq = kept.entry.operation.seq;
        all.insert(seq, kept);
        if all.len() > self.records {
            let mut others = all.iter();
            let idle = others.find(|(other, kept)| **other != seq && kept.state != State::Started);
            let goes = idle.map_or(seq, |(idle, _)| *idle);
            all.remove(&goes);
        }
        all.contains_key(&seq)
    }

    /// What is kept, the newest `records_max` of it.
    pub(super) fn dump(&self, records_max: usize) -> Vec<Record> {
        let mut records: Vec<Record> = lock(&self.kept).values().map(Kept::record).collect();
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
    pub(crate) fn finished(mut self) {
        self.end(State::Finished, |_| {});
    }

    /// The receive is complete; what it got, and from whom.
    pub(crate) fn received(mut self, from: usize, elements: usize, bytes: usize) {
        self.end(State::Finished, |entry| {
            if let Partner::Peer { rank, .. } = &mut entry.partner {
                *rank = Some(from as u32);
            }
            (entry.elements, entry.bytes) = (elements, bytes);
        });
    }

    /// The message is on its way, and this rank does not wait for it to be taken, or not yet.
    pub(crate) fn on_its_way(mut self) {
        self.note(|kept| (kept.state, kept.started_ns) = (State::Submitted, None));
    }

    fn end(&mut self, state: State, also: impl FnOnce(&mut Entry)) {
        let now = Instant::now();
        let at = self.0.map(|(log, _)| ns(log.origin, now));
        self.note(|kept| {
            also(&mut kept.entry);
            (kept.state, kept.ended_ns) = (state, at);
        });
    }

    fn note(&mut self, change: impl FnOnce(&mut Kept)) {
        if let Some((log, seq)) = self.0.take()
            && let Some(kept) = lock(&log.kept).get_mut(&seq)
        {
            change(kept);
        }
    }
}

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        if self.0.is_some() {
            self.end(State::Failed, |_| {});
        }
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
