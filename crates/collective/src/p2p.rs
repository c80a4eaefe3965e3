//! Messages from one rank to one other: `send` and `recv` with tags, beside the collective operations.
//!
//! Where ranks map each other's memory, a message is copied into the sender's segment and a frame says where
//! it lies; the receiver copies it out and says that it has. Elsewhere the data follows its frame on a connection that
//! carries nothing else, and the receiver's thread `rank3/p2p` keeps it in memory until it is received. In a group
//! over several hosts each pair of ranks does what it can.
//!
//! Bounds: a sender in shared memory has at most 64 MiB on its way, a receiver elsewhere keeps at most 256 MiB of each
//! peer and reads no further then; in both, one message alone may be as long as a message can be, 1 GiB.

mod calls;
mod copy;
mod frame;
mod incoming;
mod lanes;
mod ledger;
mod outbox;
mod outgoing;
mod shelf;
mod ticket;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use self::frame::Label;
use self::lanes::{Lanes, Ready};
use self::ledger::Ledger;
use self::outbox::Outbox;
use self::shelf::Shelf;
use crate::element::DType;
use crate::error::{Error, OpKind, Operation};
use crate::flight::{self, Mailbox, Noted, Unclaimed};
use crate::memory::{Allocator, Arena, Segment, Share};
use crate::socket::Socket;
use crate::status::{OpWait, Status, Waiters};

pub use self::frame::MESSAGE_BYTES_MAX;
pub use self::ticket::{PostedRecv, Received, RecvTicket, SendTicket};

/// Longest sleep between two looks at the launcher's page and the deadline; everything else wakes.
const SLICE: Duration = Duration::from_millis(50);
/// Most that is kept of one peer's messages where they come over a connection.
///
/// *Units*: bytes, at least 4096 for each message.
const KEPT_BYTES_MAX: usize = 256 << 20;

/// Most sources and tags of messages that nobody asked for which a flight record names.
const UNCLAIMED_MAX: usize = 64;

/// One rank's side of all its sends and receives.
#[derive(Debug)]
pub(crate) struct PointToPoint {
    status: Arc<Status>,
    timeout: Duration,
    allocator: Allocator,
    /// By rank, the segments of those whose memory this rank maps, its own among them; empty where there are none.
    segments: Vec<Option<Arc<Segment>>>,
    links: Links,
    state: Mutex<State>,
    /// A message has come or been taken, a rank has ended, or the group has failed.
    changed: Condvar,
    /// Number of the last send or receive.
    seq: AtomicU64,
}

#[derive(Debug)]
struct State {
    shelf: Shelf,
    ledger: Ledger,
    outbox: Outbox,
    /// The thread has stopped reading from somebody until there is room.
    paused: bool,
}

/// How frames reach the peers.
#[derive(Debug)]
enum Links {
    /// There are none.
    Alone,
    /// By calling them: threads as ranks. Weak, because theirs point back.
    Calls(OnceLock<Vec<Weak<PointToPoint>>>),
    Lanes(Lanes),
}

/// Wakes those who wait for a message when the group fails.
#[derive(Debug)]
struct Wake(Weak<PointToPoint>);

impl Waiters for Wake {
    fn wake(&self) {
        if let Some(p2p) = self.0.upgrade() {
            drop(p2p.state.lock());
            p2p.changed.notify_all();
        }
    }
}

impl Mailbox for PointToPoint {
    fn unclaimed(&self) -> Vec<Unclaimed> {
        self.state.lock().shelf.unclaimed(UNCLAIMED_MAX)
    }
}

impl PointToPoint {
    /// A rank without peers, which may still send to itself.
    pub(crate) fn alone(status: &Arc<Status>, timeout: Duration) -> Arc<Self> {
        Self::new(status, timeout, Allocator::Heap, Vec::new(), Links::Alone)
    }

    /// Threads as ranks, in rank order; `allocators` are each rank's own memory.
    pub(crate) fn local(
        statuses: &[Arc<Status>],
        timeout: Duration,
        allocators: &[Allocator],
        segments: &[Arc<Segment>],
    ) -> Vec<Arc<Self>> {
        let all: Vec<_> = statuses
            .iter()
            .zip(allocators)
            .map(|(status, allocator)| {
                let links = Links::Calls(OnceLock::new());
                Self::new(
                    status,
                    timeout,
                    allocator.clone(),
                    segments.iter().cloned().map(Some).collect(),
                    links,
                )
            })
            .collect();
        for p2p in &all {
            if let Links::Calls(peers) = &p2p.links {
                peers.get_or_init(|| all.iter().map(Arc::downgrade).collect());
            }
        }
        all
    }

    /// Ranks with a connection for each pair; none to oneself. `segments` are, by rank, those that are mapped, if any.
    pub(crate) fn connected(
        status: &Arc<Status>,
        timeout: Duration,
        allocator: Allocator,
        segments: Vec<Option<Arc<Segment>>>,
        sockets: Vec<Option<Socket>>,
    ) -> Result<Arc<Self>, Error> {
        let lanes = Lanes::new(sockets)
            .map_err(|error| Error::system(status.rank, "prepare its connections", error))?;
        let links = Links::Lanes(lanes);
        Ok(Self::new(status, timeout, allocator, segments, links))
    }

    fn new(
        status: &Arc<Status>,
        timeout: Duration,
        allocator: Allocator,
        segments: Vec<Option<Arc<Segment>>>,
        links: Links,
    ) -> Arc<Self> {
        let state = State {
            shelf: Shelf::new(status.world()),
            ledger: Ledger::default(),
            outbox: Outbox::default(),
            paused: false,
        };
        let p2p = Arc::new(Self {
            status: status.clone(),
            timeout,
            allocator,
            segments,
            links,
            state: Mutex::new(state),
            changed: Condvar::new(),
            seq: AtomicU64::new(0),
        });
        status.add_waiters(Box::new(Wake(Arc::downgrade(&p2p))));
        p2p
    }

    /// Messages that this rank has sent and that are not taken yet, with memory kept for more, and messages to it that it has
    /// not received.
    pub(crate) fn usage(&self) -> (Share, Share) {
        let limit = |mapped: bool| match mapped {
            true => ledger::SENT_BYTES_MAX,
            false => KEPT_BYTES_MAX,
        };
        let mapped = |rank: usize| self.segment(rank).is_some();
        // A rank may send to itself.
        let ranks = 0..self.status.world();
        let limits: usize = ranks.map(|rank| limit(mapped(rank))).sum();
        let state = self.state.lock();
        let sent = Share {
            now: state.ledger.bytes(),
            limit: ledger::SENT_BYTES_MAX + ledger::SPARE_BYTES_MAX,
        };
        let received = Share {
            now: state.shelf.bytes(),
            limit: limits,
        };
        (sent, received)
    }

    /// The arenas that this rank maps, its own among them.
    pub(crate) fn mapped(&self) -> impl Iterator<Item = &Arc<Segment>> {
        self.segments.iter().flatten()
    }

    /// The segment of a rank whose memory this rank maps.
    fn segment(&self, rank: usize) -> Option<&Arc<Segment>> {
        self.segments.get(rank)?.as_ref()
    }

    /// This rank's own memory, if messages to `to` go through it.
    fn arena(&self, to: usize) -> Option<&Arc<Arena>> {
        match &self.allocator {
            Allocator::Arena(arena) => self.segment(to).map(|_| arena),
            Allocator::Heap => None,
        }
    }

    /// Waits like [`wait_until`](Self::wait_until) for at most `limit`; whether waiting on would return at once.
    fn is_settled_within(&self, limit: Duration, ready: impl Fn(&State) -> bool) -> bool {
        let started = Instant::now();
        loop {
            let mut state = self.state.lock();
            if self.status.health().is_err() || ready(&state) {
                return true;
            }
            let left = limit.saturating_sub(started.elapsed());
            if left.is_zero() {
                return false;
            }
            self.changed.wait_for(&mut state, left.min(SLICE));
        }
    }

    /// Nothing more comes from a rank.
    fn ended(&self, peer: usize) {
        let mut state = self.state.lock();
        state.shelf.end(peer);
        state.ledger.release(peer);
        drop(state);
        self.changed.notify_all();
    }

    /// Sends what is still queued and takes no more.
    pub(crate) fn finish(&self) {
        self.state.lock().outbox.close();
        self.changed.notify_all();
        let thread = self.state.lock().outbox.thread();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    /// Ends all connections and joins the thread; the peers notice.
    pub(crate) fn close(&self) {
        match &self.links {
            Links::Alone => {}
            Links::Lanes(lanes) => {
                lanes.stop();
                // Before the connections end: the watch thread takes that for the end of the peers, whose messages would
                // be freed, and read as zeros, while they still copy them.
                self.state.lock().ledger.lose();
                lanes.shutdown();
            }
            Links::Calls(peers) => {
                let rank = self.status.rank;
                // Seen by those who are about to call this rank, which stays reachable for a moment.
                self.ended(rank);
                for (_, peer) in peers
                    .get()
                    .into_iter()
                    .flatten()
                    .enumerate()
                    .filter(|(peer, _)| *peer != rank)
                {
                    if let Some(peer) = peer.upgrade() {
                        peer.ended(rank);
                    }
                }
            }
        }
        self.state.lock().ledger.lose();
    }

    /// What every send and receive begins with: the group works, and the thread runs.
    fn begin(self: &Arc<Self>) -> Result<(), Error> {
        self.status.health()?;
        self.start()
    }

    /// Starts the thread that reads what peers send, unless it runs.
    pub(crate) fn start(self: &Arc<Self>) -> Result<(), Error> {
        match &self.links {
            Links::Lanes(lanes) => lanes.start(self),
            Links::Alone | Links::Calls(_) => Ok(()),
        }
    }

    pub(crate) fn lanes(&self) -> Option<&Lanes> {
        match &self.links {
            Links::Lanes(lanes) => Some(lanes),
            Links::Alone | Links::Calls(_) => None,
        }
    }

    /// A peer has sent something, or is gone, while the thread does not run. False when there is no use in
    /// looking again.
    ///
    /// The receiver need not have called anything yet: the sender must not wait for that.
    pub(crate) fn nudge(self: &Arc<Self>, peer: usize) -> bool {
        match self.lanes().and_then(|lanes| lanes.look(peer)) {
            Some(Ready::Data) => self.settle(self.start()).is_ok(),
            Some(Ready::End) => {
                self.ended(peer);
                false
            }
            None => false,
        }
    }

    /// Waits until `ready` says so, and returns with the lock held; else it says which ranks are waited for.
    fn wait_until(
        &self,
        wait: &OpWait<'_>,
        ready: impl Fn(&State) -> Result<(), Vec<usize>>,
    ) -> Result<MutexGuard<'_, State>, Error> {
        loop {
            let mut state = self.state.lock();
            // Under the lock: a failure after this look wakes the wait below.
            self.status.health()?;
            let Err(missing) = ready(&state) else {
                return Ok(state);
            };
            let rank = self.status.rank;
            let ended = |peer: &usize| *peer != rank && state.shelf.has_ended(*peer);
            if !missing.is_empty() && missing.iter().all(ended) {
                drop(state);
                return Err(wait.cause_of_end(missing[0]));
            }
            let left = wait.timeout.saturating_sub(wait.started.elapsed());
            if left.is_zero() {
                drop(state);
                wait.check_alone(&missing)?;
                continue;
            }
            self.changed.wait_for(&mut state, left.min(SLICE));
        }
    }

    fn operation(&self, kind: OpKind) -> Operation {
        Operation {
            kind,
            seq: self.seq.fetch_add(1, Ordering::Relaxed) + 1,
            bucket: None,
        }
    }

    /// Notes in the flight record that this rank is in a send or receive.
    fn note(&self, operation: Operation, label: &Label, at: Instant) -> Noted<'_> {
        let log = self.status.recorder().map(|recorder| &recorder.p2p);
        log.map_or_else(Noted::nowhere, |log| {
            log.started(&recorded(operation, label), at)
        })
    }

    /// Counts a message that was sent.
    fn count(&self, label: &Label, to: usize) {
        if let Some(flight) = self.status.flight().filter(|_| to != self.status.rank) {
            let bytes = label.len * label.dtype.map_or(1, DType::bytes);
            flight.sent().fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    /// The deadline begins now.
    fn op_wait(&self, operation: Operation) -> OpWait<'_> {
        OpWait::new(&self.status, operation, Instant::now(), self.timeout)
    }

    /// A failure here is the group's.
    fn settle<R>(&self, result: Result<R, Error>) -> Result<R, Error> {
        result.map_err(|error| self.fail(error))
    }

    fn fail(&self, error: Error) -> Error {
        let first = self.status.fail(error);
        self.status.announce();
        first
    }
}

fn recorded(operation: Operation, label: &Label) -> flight::P2pCall {
    flight::P2pCall {
        operation,
        dtype: label.dtype,
        elements: label.len,
        bytes: label.bytes(),
    }
}

#[cfg(test)]
mod tests {
    use paceline_rendezvous::page::JobPage;

    use super::frame::Frame;
    use super::*;
    use crate::memory::CONTROL_BYTES;
    use crate::status::PeerInfo;

    /// Two ranks as threads, with a segment of 64 KiB each.
    fn pair() -> Vec<Arc<PointToPoint>> {
        let page = JobPage::private(2).unwrap();
        let peer = |slot| PeerInfo {
            host: "b".into(),
            pid: 7,
            slot: Some(slot),
            started: slot,
        };
        let status = |rank| {
            let peers = vec![peer(0), peer(1)];
            Arc::new(Status::new(rank, peers, page.clone(), page.slot(rank)))
        };
        let segments: Vec<_> = (0..2)
            .map(|_| Arc::new(Segment::create(1 << 16).unwrap()))
            .collect();
        let allocators = segments
            .iter()
            .map(|segment| Allocator::Arena(Arena::new(segment.clone(), 0)));
        let allocators: Vec<_> = allocators.collect();
        let statuses = [status(0), status(1)];
        PointToPoint::local(&statuses, Duration::from_secs(5), &allocators, &segments)
    }

    fn label(len: usize) -> Label {
        Label {
            tag: 1,
            dtype: None,
            len,
        }
    }

    #[test]
    fn data_outside_the_senders_segment_is_not_touched() {
        let p2p = pair();
        let size = (1 << 16) + CONTROL_BYTES as u64;
        for (offset, len) in [
            (0, 1),
            (CONTROL_BYTES as u64 - 1, 1),
            (size, 1),
            (size - 8, 9),
            (u64::MAX, 2),
            (CONTROL_BYTES as u64, 1 << 17),
        ] {
            let frame = Frame::Shared {
                label: label(len),
                id: 1,
                offset,
            };
            let reason = p2p[0].arrived(1, frame).unwrap_err();
            assert!(
                reason.contains(&format!("at byte {offset} of a segment of {size}")),
                "{reason}"
            );
        }
        let whole = Frame::Shared {
            label: label(1 << 16),
            id: 1,
            offset: CONTROL_BYTES as u64,
        };
        assert!(p2p[0].arrived(1, whole).is_ok());
    }

    #[test]
    fn a_peer_takes_only_what_it_was_sent_and_sends_only_so_much() {
        let p2p = pair();
        let reason = p2p[0].arrived(1, Frame::Taken { id: 3 }).unwrap_err();
        assert!(reason.contains("took message 3"), "{reason}");
        let empty = Frame::Shared {
            label: label(0),
            id: 1,
            offset: 0,
        };
        let refused = (0..20_000).find_map(|_| p2p[0].arrived(1, empty).err());
        assert!(refused.unwrap().contains("more messages"));
    }

    #[test]
    fn memory_is_free_again_once_a_message_has_been_taken() {
        let p2p = pair();
        // Sixteen pages, and every message takes one: the first ones must be free for the last ones.
        for i in 0..40_u8 {
            p2p[0].send(&[i; 3], label(3), 1).unwrap();
            let claim = p2p[1].post(Some(0), 1).unwrap();
            let operation = p2p[1].operation(OpKind::recv(Some(0), 1));
            let wait = p2p[1].op_wait(operation);
            let message = p2p[1].wait_for(claim, &wait).unwrap();
            let mut bytes = [0; 3];
            p2p[1].take_out(&message, &mut bytes, &wait).unwrap();
            assert_eq!(bytes, [i; 3]);
        }
    }
}
