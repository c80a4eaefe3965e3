//! The rounds of a plan over streams of bytes: TCP or MPI between hosts, and wherever no memory is shared.
//!
//! In a round a rank receives what its tasks read from stream peers, folds, and sends results; at the same time it sends
//! the peers what their tasks read. Everything is cut into pieces ([`cut`]), so receiving, folding and sending overlap
//! and scratch memory holds the pieces in flight, not the message. Sends go straight from the user's memory. A piece is
//! split over all connections of a pair. All sockets advance together, so full ones never make ranks wait in a circle.
//!
//! Every exchange with a peer begins with a [`frame`] head on the first connection. In a call's first round all heads are
//! collected and compared; of a peer whose head differs no payload is used. Ranks of one host compare their calls before
//! they send anything; where these differ they say so in their heads, so that all ranks learn of all calls.
#![allow(unsafe_code)]

mod board;
mod cut;
mod drive;
mod frame;
mod lane;
#[cfg(test)]
mod tests;
mod wire;

use std::io;
use std::time::Instant;

use paceline_rendezvous::env::own_cores;

use self::board::{Board, Item};
pub(crate) use self::cut::LANES_MAX;
use self::drive::Drive;
use self::frame::{DIFFERENT, FRAME_BYTES, Frame, MEETING};
use self::lane::{INBOX_BYTES, Lane};
pub(crate) use self::wire::Wire;
use crate::call::{Header, agree};
use crate::error::Error;
use crate::pace::Pace;
use crate::plan::{Place, Plan, Spot, Task};
use crate::runner::Runner;
use crate::status::OpWait;

/// Largest world in which all ranks compare their calls with all others; above it each compares with those it deals with.
const COMPARED_WORLD_MAX: usize = 32;

/// Folds (never copies) `len` elements of a task's inputs, from element `first` of the task on, into all outputs: `(task,
/// inputs, first, len, outputs)`. Addresses are of the first of these elements. Outputs may equal inputs.
pub(crate) type FoldPiece<'a> = dyn FnMut(&Task, &[*const u8], usize, usize, &[*mut u8]) + 'a;

/// Where the places of a plan are.
pub(crate) trait Memory {
    /// A place in this rank's own memory.
    fn own(&self, place: Place) -> *mut u8;
    /// The same for what peers read: in a copy when the plan [lends copies](Plan::lends_copies).
    fn lent(&self, place: Place) -> *const u8;
    /// What a task reads on a rank that is no stream peer: in the copy that this rank lends, if it does. On the rank
    /// itself its own memory.
    fn mapped_input(&self, spot: Spot) -> Option<*const u8>;
    /// Where a task stores on a rank that is no stream peer, itself included.
    fn mapped_output(&self, spot: Spot) -> Option<*mut u8>;
}

/// One round of a call.
pub(crate) struct RoundStep<'a> {
    pub(crate) header: &'a Header,
    pub(crate) plan: &'a Plan,
    /// Number of the round in the plan. Round 0 compares calls.
    pub(crate) index: usize,
    pub(crate) element_bytes: usize,
    pub(crate) memory: &'a dyn Memory,
    pub(crate) runner: Runner,
}

/// One rank's connections to the peers that it shares no memory with.
#[derive(Debug)]
pub(crate) struct Streams {
    rank: usize,
    /// Ranks that share this one's host: they have compared their calls before the streams begin.
    mates: Vec<usize>,
    /// By rank.
    peers: Vec<Option<Peer>>,
    board: Board,
    inbox_bytes: usize,
    /// Peers of the exchange that is going on.
    active: Vec<usize>,
    /// Whether every rank has a core, so that spinning does not keep a peer from running.
    cores_for_all: bool,
    /// Whether wires have to be asked for what has come, because nothing wakes who sleeps.
    asks: bool,
    pace: Pace,
}

/// One peer: its connections, and what is exchanged with it at the moment.
#[derive(Debug)]
struct Peer {
    lanes: Vec<Lane>,
    outgoing: Vec<Item>,
    incoming: Vec<Item>,
    head: [u8; FRAME_BYTES],
    /// Bytes of the head that have not been sent.
    head_left: usize,
    /// Its head is still to come.
    awaited: bool,
    /// Payload that its head must announce.
    expected: u64,
    /// The peer's call, once its head is in.
    header: Option<Header>,
    /// It has found on its own host that calls differ.
    differs: bool,
    /// When bytes have moved between the two last, in this exchange.
    heard: Option<Instant>,
}

impl Streams {
    /// Takes over wires by lane and peer. A peer has as many as there are lanes, or none.
    ///
    /// *Errors*: the system's, and [`io::ErrorKind::InvalidInput`] for missing wires or a number of lanes that is not
    /// from 1 to [`LANES_MAX`].
    pub(crate) fn new<W: Into<Wire>>(rank: usize, wires: Vec<Vec<Option<W>>>) -> io::Result<Self> {
        let world = wires.first().map_or(0, Vec::len);
        let lanes = wires.len();
        let mut peers: Vec<Vec<Lane>> = (0..world).map(|_| Vec::new()).collect();
        for lane in wires {
            for (wire, peer) in lane.into_iter().zip(&mut peers) {
                let Some(wire) = wire.map(Into::into) else {
                    continue;
                };
                wire.prepare()?;
                peer.push(Lane::new(wire));
            }
        }
        let is_whole = |peer: &Vec<Lane>| peer.is_empty() || peer.len() == lanes;
        if !(1..=LANES_MAX).contains(&lanes) || !peers.iter().all(is_whole) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("a peer needs 1 to {LANES_MAX} connections, as many as all others"),
            ));
        }
        let cores = own_cores();
        let peer = |lanes: Vec<Lane>| (!lanes.is_empty()).then(|| Peer::new(lanes));
        let peers: Vec<_> = peers.into_iter().map(peer).collect();
        let lane = |peer: &Peer| peer.lanes[0].wire.fd().is_none();
        let asks = peers.iter().flatten().any(lane);
        let is_mate = |other: &usize| *other != rank && peers[*other].is_none();
        Ok(Self {
            rank,
            mates: (0..world).filter(is_mate).collect(),
            inbox_bytes: peers.iter().flatten().map(Peer::inbox_bytes).sum(),
            peers,
            board: Board::default(),
            active: Vec::new(),
            cores_for_all: cores >= world,
            asks,
            pace: Pace::default(),
        })
    }

    /// With this many cores for all ranks; else those that this process may use are taken for all that there are.
    pub(crate) fn on(self, cores: usize) -> Self {
        let cores_for_all = cores >= self.peers.len();
        Self {
            cores_for_all,
            ..self
        }
    }

    /// Memory for what has been read ahead, and for pieces in flight.
    pub(crate) fn bytes(&self) -> usize {
        let lanes = || self.peers.iter().flatten().flat_map(|peer| &peer.lanes);
        // Connections hold nothing, and there may be thousands.
        let messages = match self.asks {
            true => lanes().map(|lane| lane.wire.bytes()).sum(),
            false => 0,
        };
        self.inbox_bytes + messages + self.board.scratch_bytes()
    }

    /// Compares calls with all stream peers and does nothing else: nobody returns before all have come.
    pub(crate) fn meet(
        &mut self,
        header: &Header,
        runner: Runner,
        wait: &OpWait<'_>,
    ) -> Result<Instant, Error> {
        self.heads(header, MEETING, None, runner, wait)
    }

    /// In the place of a call's first round where the calls of this host, `calls`, differ: exchanges calls with all
    /// stream peers and makes an error of them all, the same on all ranks.
    pub(crate) fn differ(
        &mut self,
        header: &Header,
        calls: &[(usize, Header)],
        runner: Runner,
        wait: &OpWait<'_>,
    ) -> Result<(), Error> {
        if self.peers.len() > COMPARED_WORLD_MAX {
            // Not all of them listen to this rank now; they are told why the group ends.
            return agree(calls);
        }
        self.heads(header, DIFFERENT, Some(calls), runner, wait)
            .map(drop)
    }

    /// Exchanges heads with all stream peers and nothing else.
    fn heads(
        &mut self,
        header: &Header,
        round: u32,
        calls: Option<&[(usize, Header)]>,
        runner: Runner,
        wait: &OpWait<'_>,
    ) -> Result<Instant, Error> {
        self.board.clear();
        self.active.clear();
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            if let Some(peer) = peer {
                peer.clear();
                peer.begin(header, round, true);
                self.active.push(rank);
            }
        }
        let mut nothing = |_: &Task, _: &[*const u8], _: usize, _: usize, _: &[*mut u8]| {};
        // SAFETY: there are no tasks, no items, and so no addresses.
        unsafe { self.drive(&[], header, (round, calls), runner, &mut nothing, wait) }
    }

    /// Does one round; returns when the last peer's head had come (of a round other than the first: of those that send).
    ///
    /// # Safety
    ///
    /// Until this returns, every address that `step.memory` gives for a place of the plan's round holds as many elements
    /// of `step.element_bytes` bytes as the plan says, aligned for them, and nobody but the tasks of the round touches it:
    /// this rank's through this call, and on the memory of ranks that are no stream peers those ranks' own.
    pub(crate) unsafe fn round(
        &mut self,
        step: &RoundStep<'_>,
        fold: &mut FoldPiece<'_>,
        wait: &OpWait<'_>,
    ) -> Result<Instant, Error> {
        self.board.clear();
        self.active.clear();
        self.peers.iter_mut().flatten().for_each(Peer::clear);
        self.board.lay_out(self.rank, &mut self.peers, step)?;
        let compares = step.index == 0;
        let all = compares && self.peers.len() <= COMPARED_WORLD_MAX;
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            if all || !peer.outgoing.is_empty() || !peer.incoming.is_empty() {
                peer.begin(step.header, step.index as u32, compares);
                self.active.push(rank);
            }
        }
        let round = (step.index as u32, None);
        // SAFETY: the caller's contract.
        unsafe { self.drive(step.tasks(), step.header, round, step.runner, fold, wait) }
    }

    /// # Safety
    ///
    /// As [`round`](Self::round), for what the board and the peers' lists were made of.
    unsafe fn drive(
        &mut self,
        tasks: &[Task],
        header: &Header,
        (round, calls): (u32, Option<&[(usize, Header)]>),
        runner: Runner,
        fold: &mut FoldPiece<'_>,
        wait: &OpWait<'_>,
    ) -> Result<Instant, Error> {
        let drive = Drive {
            rank: self.rank,
            mates: &self.mates,
            calls,
            peers: &mut self.peers,
            active: &self.active,
            board: &mut self.board,
            tasks,
            header,
            round,
            runner: self.cores_for_all.then_some(runner),
            asks: self.asks,
            pace: &mut self.pace,
            wait,
        };
        // SAFETY: the caller's contract.
        unsafe { drive.run(fold) }
    }
}

impl Peer {
    fn new(lanes: Vec<Lane>) -> Self {
        Self {
            lanes,
            outgoing: Vec::new(),
            incoming: Vec::new(),
            head: [0; FRAME_BYTES],
            head_left: 0,
            awaited: false,
            expected: 0,
            header: None,
            differs: false,
            heard: None,
        }
    }

    /// So many bytes have moved.
    fn hear(&mut self, bytes: usize) {
        if bytes > 0 {
            self.heard = Some(Instant::now());
        }
    }

    fn inbox_bytes(&self) -> usize {
        self.lanes.len() * INBOX_BYTES
    }

    fn clear(&mut self) {
        self.outgoing.clear();
        self.incoming.clear();
    }

    /// Prepares an exchange of its items. Heads go both ways when calls are compared, else in front of payload.
    fn begin(&mut self, header: &Header, round: u32, compares: bool) {
        let bytes = |items: &[Item]| items.iter().map(|item| item.cut.bytes as u64).sum::<u64>();
        let frame = Frame {
            header: *header,
            round,
            payload: bytes(&self.outgoing),
        };
        let sends = compares || !self.outgoing.is_empty();
        self.head = frame.encode();
        self.head_left = if sends { FRAME_BYTES } else { 0 };
        self.awaited = compares || !self.incoming.is_empty();
        self.expected = bytes(&self.incoming);
        self.header = None;
        self.differs = false;
        self.heard = None;
        self.lanes.iter_mut().for_each(Lane::begin);
    }
}
