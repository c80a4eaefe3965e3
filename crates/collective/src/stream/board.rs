//! What one rank has to do in a round, with addresses: made from its plan, worked off while pieces arrive.
#![allow(unsafe_code)]

use super::cut::{Cut, LAG, LANES_MAX, RING, piece_bytes};
use super::{Memory, Peer, RoundStep};
use crate::error::Error;
use crate::memory::Region;
use crate::plan::{Spot, Task};

/// Address of the first byte of something that a round reads or writes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Base(*mut u8);

// SAFETY: an address alone; it is followed only inside `Streams::round`, whose caller vouches for it.
unsafe impl Send for Base {}

/// Something that is cut into pieces, and where these lie.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operand {
    base: Base,
    /// Pieces lie in [`RING`] places that are used in turn, instead of one after another.
    ring: bool,
}

impl Operand {
    /// Where a piece begins.
    pub(super) fn piece(&self, cut: &Cut, number: usize) -> *mut u8 {
        let place = if self.ring { number % RING } else { number };
        self.base.0.wrapping_add(place * cut.piece_bytes)
    }
}

/// What one peer sends this rank, or is sent, in pieces.
#[derive(Debug, Clone)]
pub(super) struct Item {
    pub(super) cut: Cut,
    pub(super) operand: Operand,
    /// The own task that reads it or makes it; none for what has neither to be waited for.
    pub(super) task: Option<usize>,
    /// Pieces whose portion of each lane has gone.
    pub(super) done: [usize; LANES_MAX],
}

impl AsRef<Cut> for Item {
    fn as_ref(&self) -> &Cut {
        &self.cut
    }
}

impl Item {
    /// Pieces that have gone on all lanes.
    fn done(&self, lanes: usize) -> usize {
        self.done[..lanes].iter().copied().min().unwrap_or(0)
    }
}

/// Where a task's result waits to be sent, when that is not its final place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ring {
    /// It is in its final place, or there is none.
    None,
    /// A copy that is passed on from the ring that it was received into.
    Input,
    /// A fold's result in a ring of its own.
    Result,
}

/// One task of the round.
#[derive(Debug, Clone)]
struct Work {
    cut: Cut,
    /// Elements of a whole piece.
    piece: usize,
    len: usize,
    done: usize,
    /// Copies what is here already: its pieces can be sent before it is done with them.
    at_once: bool,
    ring: Ring,
    /// Ends of its entries in the tables of the board; they begin where those of the task before end.
    inputs: usize,
    outputs: usize,
    sources: usize,
    sinks: usize,
}

/// All tasks of the round. Its tables are kept, so that a call allocates nothing once they have grown.
#[derive(Debug, Default)]
pub(super) struct Board {
    works: Vec<Work>,
    inputs: Vec<Operand>,
    /// Outputs on this host.
    outputs: Vec<Operand>,
    /// Peer and number of the items that are inputs.
    sources: Vec<(usize, usize)>,
    /// Peer and number of the items that are outputs.
    sinks: Vec<(usize, usize)>,
    undone: usize,
    scratch: Option<Region>,
    input_addresses: Vec<*const u8>,
    output_addresses: Vec<*mut u8>,
}

// SAFETY: the addresses are followed only inside `Streams::round`, whose caller vouches for them.
unsafe impl Send for Board {}

/// Bytes of scratch memory handed out so far: first counted, then taken.
struct Scratch {
    base: *mut u8,
    used: usize,
}

impl Scratch {
    fn ring(&mut self, cut: &Cut) -> Operand {
        let base = Base(self.base.wrapping_add(self.used));
        let places = cut.pieces().min(RING);
        self.used += places * cut.piece_bytes.min(cut.bytes.next_multiple_of(64));
        Operand { base, ring: true }
    }
}

impl Board {
    pub(super) fn clear(&mut self) {
        self.works.clear();
        self.inputs.clear();
        self.outputs.clear();
        self.sources.clear();
        self.sinks.clear();
        self.undone = 0;
    }

    /// Takes in the round's tasks and shares: fills the board and the peers' lists, which have been cleared.
    ///
    /// *Errors*: there is no memory for scratch.
    pub(super) fn lay_out(
        &mut self,
        rank: usize,
        peers: &mut [Option<Peer>],
        step: &RoundStep<'_>,
    ) -> Result<(), Error> {
        let wanted = scratch_bytes(rank, peers, step);
        if self.scratch.as_ref().map_or(0, Region::bytes) < wanted {
            self.scratch = Some(Region::heap(wanted)?);
        }
        let base = self
            .scratch
            .as_mut()
            .map_or(std::ptr::null_mut(), |region| {
                region.as_mut_slice().as_mut_ptr()
            });
        let mut scratch = Scratch { base, used: 0 };
        let world = peers.len();
        let straight = |address: *mut u8| Operand {
            base: Base(address),
            ring: false,
        };
        let cut = |len: usize, lag: usize| step.cut(len, lag, world);
        for share in &step.plan.lends[step.index] {
            let Some(peer) = peers[share.peer].as_mut() else {
                continue;
            };
            peer.outgoing.push(Item {
                cut: cut(share.len, 0),
                operand: straight(step.memory.lent(share.place).cast_mut()),
                task: None,
                done: [0; LANES_MAX],
            });
        }
        for (number, task) in step.tasks().iter().enumerate() {
            self.add(rank, peers, step, &mut scratch, number, task);
        }
        for share in &step.plan.gets[step.index] {
            let Some(peer) = peers[share.peer].as_mut() else {
                continue;
            };
            peer.incoming.push(Item {
                cut: cut(share.len, LAG),
                operand: straight(step.memory.own(share.place)),
                task: None,
                done: [0; LANES_MAX],
            });
        }
        debug_assert_eq!(scratch.used, wanted);
        self.undone = self.works.len();
        Ok(())
    }

    fn add(
        &mut self,
        rank: usize,
        peers: &mut [Option<Peer>],
        step: &RoundStep<'_>,
        scratch: &mut Scratch,
        number: usize,
        task: &Task,
    ) {
        let cut = step.cut(task.len, 0, peers.len());
        let straight = |address: *mut u8| Operand {
            base: Base(address),
            ring: false,
        };
        let first_output = self.outputs.len();
        for spot in &task.outputs {
            if peers[spot.rank].is_none() {
                self.outputs.push(straight(output(step.memory, *spot)));
            }
        }
        let direct = received_in_place(rank, task).map(|spot| step.memory.own(spot.place));
        let mut at_once = task.fold.is_none();
        for spot in &task.inputs {
            let Some(peer) = peers[spot.rank].as_mut() else {
                self.inputs.push(straight(input(step.memory, *spot)));
                continue;
            };
            at_once = false;
            let operand = direct.map_or_else(|| scratch.ring(&cut), straight);
            self.sources.push((spot.rank, peer.incoming.len()));
            self.inputs.push(operand);
            peer.incoming.push(Item {
                cut,
                operand,
                task: Some(number),
                done: [0; LANES_MAX],
            });
        }
        // What goes to stream peers: a copy's only input, else the result where it lies on this host, else a ring.
        let result = match (task.fold.is_some(), self.outputs.get(first_output)) {
            (true, Some(output)) => *output,
            (true, None) => scratch.ring(&cut),
            (false, _) => self.inputs[self.inputs.len() - 1],
        };
        let ring = match (result.ring, task.fold.is_some()) {
            (false, _) => Ring::None,
            (true, false) => Ring::Input,
            (true, true) => Ring::Result,
        };
        if ring == Ring::Result {
            self.outputs.push(result);
        }
        for spot in &task.outputs {
            let Some(peer) = peers[spot.rank].as_mut() else {
                continue;
            };
            self.sinks.push((spot.rank, peer.outgoing.len()));
            peer.outgoing.push(Item {
                cut: Cut { lag: LAG, ..cut },
                operand: result,
                task: Some(number),
                done: [0; LANES_MAX],
            });
        }
        self.works.push(Work {
            cut,
            piece: cut.piece_bytes / step.element_bytes,
            len: task.len,
            done: 0,
            at_once,
            ring,
            inputs: self.inputs.len(),
            outputs: self.outputs.len(),
            sources: self.sources.len(),
            sinks: self.sinks.len(),
        });
    }

    pub(super) fn scratch_bytes(&self) -> usize {
        self.scratch.as_ref().map_or(0, Region::bytes)
    }

    pub(super) fn is_done(&self) -> bool {
        self.undone == 0
    }

    /// Whether a piece of what is to be sent is there.
    pub(super) fn can_send(&self, item: &Item, piece: usize) -> bool {
        item.task
            .map(|task| &self.works[task])
            .is_none_or(|work| work.at_once || piece < work.done)
    }

    /// Whether there is room for a piece that a peer sends.
    pub(super) fn has_room(&self, peers: &[Option<Peer>], item: &Item, piece: usize) -> bool {
        let Some(task) = item.task.filter(|_| item.operand.ring) else {
            return true;
        };
        let work = &self.works[task];
        let free = match work.ring {
            Ring::Input => self.sent(peers, task).min(work.done),
            Ring::None | Ring::Result => work.done,
        };
        piece < free + RING
    }

    /// Does what can be done with the pieces that are here; whether that was anything.
    ///
    /// # Safety
    ///
    /// As [`Streams::round`](super::Streams::round).
    pub(super) unsafe fn work(
        &mut self,
        peers: &[Option<Peer>],
        tasks: &[Task],
        fold: &mut super::FoldPiece<'_>,
    ) -> bool {
        let mut worked = false;
        for (number, task) in tasks.iter().enumerate() {
            while self.works[number].done < self.works[number].cut.pieces()
                && self.is_ready(peers, number)
            {
                // SAFETY: the caller's contract; the piece's inputs are here and nobody needs its place any more.
                unsafe { self.do_piece(number, task, fold) };
                worked = true;
                let work = &mut self.works[number];
                work.done += 1;
                if work.done == work.cut.pieces() {
                    self.undone -= 1;
                }
            }
        }
        worked
    }

    fn is_ready(&self, peers: &[Option<Peer>], number: usize) -> bool {
        let work = &self.works[number];
        let start = number
            .checked_sub(1)
            .map_or(0, |before| self.works[before].sources);
        let arrived = self.sources[start..work.sources]
            .iter()
            .all(|(peer, item)| {
                let peer = peers[*peer].as_ref().expect("sources are stream peers");
                peer.incoming[*item].done(peer.lanes.len()) > work.done
            });
        arrived && (work.ring != Ring::Result || work.done < self.sent(peers, number) + RING)
    }

    /// Pieces of a task's result that all its stream peers have been sent.
    fn sent(&self, peers: &[Option<Peer>], number: usize) -> usize {
        let start = number
            .checked_sub(1)
            .map_or(0, |before| self.works[before].sinks);
        let sinks = self.sinks[start..self.works[number].sinks].iter();
        let sent = sinks.map(|(peer, item)| {
            let peer = peers[*peer].as_ref().expect("sinks are stream peers");
            peer.outgoing[*item].done(peer.lanes.len())
        });
        sent.min().unwrap_or(usize::MAX - RING)
    }

    fn outputs_of(&self, number: usize) -> &[Operand] {
        let start = number
            .checked_sub(1)
            .map_or(0, |before| self.works[before].outputs);
        &self.outputs[start..self.works[number].outputs]
    }

    /// # Safety
    ///
    /// As [`work`](Self::work); the inputs of the task's next piece are here and the places of its outputs are free.
    unsafe fn do_piece(&mut self, number: usize, task: &Task, fold: &mut super::FoldPiece<'_>) {
        let work = &self.works[number];
        let start = number
            .checked_sub(1)
            .map_or(0, |before| self.works[before].inputs);
        let inputs = &self.inputs[start..work.inputs];
        let (cut, piece) = (&work.cut, work.done);
        let first = piece * work.piece;
        let len = work.piece.min(work.len - first);
        if task.fold.is_none() {
            let from = inputs[0].piece(cut, piece).cast_const();
            for output in self.outputs_of(number) {
                let to = output.piece(cut, piece);
                if !std::ptr::eq(from, to) {
                    // SAFETY: both hold the piece's bytes by the caller's contract; a plan's copies move between
                    // places that are the same or have nothing in common.
                    unsafe { to.copy_from_nonoverlapping(from, cut.piece(piece).len()) };
                }
            }
            return;
        }
        self.input_addresses.clear();
        let addresses = inputs
            .iter()
            .map(|input| input.piece(cut, piece).cast_const());
        self.input_addresses.extend(addresses);
        let mut outputs = std::mem::take(&mut self.output_addresses);
        outputs.clear();
        outputs.extend(
            self.outputs_of(number)
                .iter()
                .map(|output| output.piece(cut, piece)),
        );
        fold(task, &self.input_addresses, first, len, &outputs);
        self.output_addresses = outputs;
    }
}

/// The own place that a copy is received into, so that no scratch memory is needed.
fn received_in_place(rank: usize, task: &Task) -> Option<Spot> {
    let own = task.outputs.iter().find(|spot| spot.rank == rank);
    own.filter(|_| task.fold.is_none()).copied()
}

/// Bytes of all rings of the round: of the inputs that are received, and of the results that lie nowhere else.
fn scratch_bytes(rank: usize, peers: &[Option<Peer>], step: &RoundStep<'_>) -> usize {
    let mut scratch = Scratch {
        base: std::ptr::null_mut(),
        used: 0,
    };
    for task in step.tasks() {
        let cut = step.cut(task.len, 0, peers.len());
        let is_here = |spot: &Spot| peers[spot.rank].is_none();
        if received_in_place(rank, task).is_none() {
            for _ in task.inputs.iter().filter(|spot| !is_here(spot)) {
                scratch.ring(&cut);
            }
        }
        if task.fold.is_some() && !task.outputs.iter().any(is_here) {
            scratch.ring(&cut);
        }
    }
    scratch.used
}

impl RoundStep<'_> {
    pub(super) fn tasks(&self) -> &[Task] {
        &self.plan.rounds[self.index].tasks
    }

    fn cut(&self, len: usize, lag: usize, world: usize) -> Cut {
        let bytes = len * self.element_bytes;
        Cut {
            bytes,
            piece_bytes: piece_bytes(bytes, world),
            lag,
        }
    }
}

fn input(memory: &dyn Memory, spot: Spot) -> *mut u8 {
    let address = memory.mapped_input(spot);
    address.expect(MAPPED).cast_mut()
}

fn output(memory: &dyn Memory, spot: Spot) -> *mut u8 {
    memory.mapped_output(spot).expect(MAPPED)
}

const MAPPED: &str = "a rank that is no stream peer can be mapped";
