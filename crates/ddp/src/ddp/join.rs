//! Replacements of lost ranks: a rank hands its state over to them, and they go on with it.
//!
//! ```text
//!  header   JSON: what the ranks compare, position, and the lengths of what follows
//!  result   of the last commit
//!  weights  every tensor of the model, in the order of registration
//!  program  the program's own pieces, each after its length, and [`END`]
//!  XXH3     of all these
//! ```
//!
//! Fresh memory costs more time than a copy, and the other ranks wait. So the giver reads and sends one tensor after another, in memory
//! that it has used before, and the receiver reads them to where they stay. All travel in short messages, so it keeps no more than
//! has arrived and the next one.

use std::sync::mpsc::{Sender, channel};
use std::thread::Builder;

use burn::module::Module;
use burn::tensor::{Bytes, TensorData};
use paceline_collective::{Place, ProcessGroup, Standing};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::recover::settle;
use super::{Ddp, DdpOptions, DdpState};
use crate::buffer::{self, Entry};
use crate::error::DdpError;
use crate::fingerprint::odd_ranks;
use crate::numerics::SameBits;
use crate::pace::Intervals;
use crate::recovery::{Commits, Recovery};
use crate::verify::Manifest;
use crate::weights;

/// Tag of the messages.
const TAG: u32 = u32::MAX;
/// Small enough for the caches, and one piece is copied out while the next is copied in.
const PIECE_BYTES: usize = 1 << 20;
const HEADER_BYTES_MAX: u64 = 256 << 20;
/// For what a program gives besides.
const ROOM_BYTES: u64 = 1 << 20;
const WORD_BYTES: u64 = size_of::<u128>() as u64;
/// Most bytes that are brought in before the others wait. Larger states take memory as they arrive, so that the replacements of several
/// large ranks do not fill a host with memory that they need for a moment.
const ROOM_BYTES_MAX: u64 = 1 << 30;
/// In place of a piece's length.
const END: u64 = u64::MAX;

/// Hands bytes over to new ranks, see [`Ddp::admit`].
///
/// *Errors*: one of the ranks is lost.
pub type Give<'a> = dyn FnMut(&[u8]) -> Result<(), DdpError> + 'a;

/// The state of a program, from [`Ddp::take_handover`].
#[derive(Debug)]
pub struct Given {
    /// What another rank gave, in its order.
    pub pieces: Vec<Bytes>,
    /// Memory for what the program makes of them, with about as much in place as they are likely to have. To bring memory in takes
    /// several times as long as to fill it, and the other ranks wait.
    pub room: Vec<u128>,
}

/// The state of another rank. It has come once [`receive_while`](Self::receive_while) returns.
pub(super) struct Handover {
    giver: usize,
    hasher: Xxh3,
    header: Header,
    result: Vec<u8>,
    /// By tensor.
    weights: Vec<Bytes>,
    program: Option<Given>,
    room: Room,
}

/// Memory that is in place before the others wait.
#[derive(Default)]
pub(super) struct Room {
    /// By tensor.
    weights: Vec<Vec<u128>>,
    /// For what a rank gives, and for what the program makes of it.
    program: [Vec<u128>; 2],
}

impl Room {
    /// For these weights, and for two moments of each, as Adam has; none for weights that are too large.
    pub(super) fn new(entries: &[Entry]) -> Self {
        let bytes = entries.iter().map(|e| (e.len() * e.dtype.size()) as u64);
        let all: u64 = bytes.clone().sum();
        if 5 * all > ROOM_BYTES_MAX {
            return Self::default();
        }
        // Zeros would be brought in later.
        Self {
            weights: bytes.map(|bytes| vec![1; words(bytes)]).collect(),
            program: std::array::from_fn(|_| vec![1; words(2 * all + ROOM_BYTES)]),
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Header {
    /// As the ranks compared it at the job's start.
    manifest: Manifest,
    /// The parameters in the order of their uses, if that is not the order of registration.
    order: Vec<usize>,
    /// Whether the next step shows that order.
    learns: bool,
    state: DdpState,
    completed: u64,
    intervals: Intervals,
    result_bytes: u64,
    /// By tensor.
    weights_bytes: Vec<u64>,
}

impl Ddp {
    /// Takes in the replacements of lost ranks that wait, if all ranks have agreed on that in the last step. All ranks call it after
    /// each step, once the optimizer has changed `model`, and in the same place; without [`Recovery::Live`] and without
    /// replacements it does nothing. The first call tells the launcher that this program takes replacements in.
    ///
    /// One rank hands weights, running statistics, position, scaler and the pieces of `give` over to them. A replacement gets
    /// these pieces from [`take_handover`](Self::take_handover): give all that the program needs to go on, such as the state of the
    /// optimizer and its place in the data. `give` is called on that rank only, and again if a rank is lost meanwhile; it returns the
    /// errors of [`Give`]. The next step deals the shards to all ranks.
    ///
    /// A replacement runs the program from its start, and returns from [`new`](Self::new) when the others have come to this
    /// call. Operations between ranks that the others ran before their first step must not run there: ask
    /// [`has_joined`](Self::has_joined).
    ///
    /// On several nodes of which too few are left, it waits for others. The next step then agrees to admit them.
    ///
    /// If the weights of the ranks differ, the next step fails with [`DdpError::Diverged`], and the replacements wait.
    ///
    /// *Cost*: without replacements, none. *Blocks*: until the new group has formed, and on the rank that hands over until the
    /// state has been received; while too few nodes are left, for as long as the launchers wait.
    ///
    /// *Errors*: those of `give`; the launcher ends the job. Losing a rank meanwhile is no error.
    pub fn admit<M: Module, E: From<DdpError>>(
        &mut self,
        model: &M,
        mut give: impl FnMut(&Self, &mut Give<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        if !self.is_live() {
            return Ok(());
        }
        self.group.declare_admission();
        if !std::mem::take(&mut self.is_invited) {
            if self.group.wait_while_held() {
                self.restart_pace();
            }
            return Ok(());
        }
        // A new rank has no state to go back to, so the others go back first if their weights differ.
        let generation = self.group.generation();
        if let Some(own) = self.comparable_hash(model)? {
            // If a rank is lost, the invitation is over, and the others do not come here once they have its last result.
            let Some(hashes) = self.agree_once(|ddp| ddp.gather_hashes(own))? else {
                return Ok(());
            };
            if odd_ranks(hashes.as_chunks::<8>().0).is_some() {
                self.fingerprint.suspect(self.step);
                return Ok(());
            }
        }
        if self.group.generation() != generation {
            return Ok(());
        }
        loop {
            let settled = self.regroup(Place::Between)?;
            let settled = settled.map_err(DdpError::from)?.settlement;
            if settled.giver == Some(self.group.rank()) && !settled.new.is_empty() {
                match self.hand_over(model, &settled.new, &mut give) {
                    // The next operation finds out.
                    Err(_) if self.group.is_lost() => {}
                    handed => handed?,
                }
            }
            // New ranks take part in this only with the state.
            if self.adopt()? {
                return Ok(());
            }
        }
    }

    /// Whether this process has taken the place of a lost rank. Its state came from the others.
    pub fn has_joined(&self) -> bool {
        self.group.env().replacement > 0
    }

    /// What another rank gave in [`admit`](Self::admit), once, in a process that has taken the place of a lost rank.
    pub fn take_handover(&mut self) -> Option<Given> {
        self.handover.take()
    }

    fn hand_over<M: Module, E: From<DdpError>>(
        &self,
        model: &M,
        new: &[usize],
        give: impl FnOnce(&Self, &mut Give<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let handles = buffer::handles(model);
        let header = Header {
            manifest: self.manifest.clone(),
            order: self.order.clone(),
            learns: self.uses.is_some(),
            state: self.state_dict(),
            completed: self.commits.completed,
            intervals: self.pace.intervals.clone(),
            result_bytes: self.commits.result.len() as u64,
            weights_bytes: handles.iter().map(|h| h.bytes() as u64).collect(),
        };
        let header = serde_json::to_vec(&header).expect("plain data encodes");
        let mut to = Wire::new(&self.group, new);
        to.send_unhashed(&(header.len() as u64).to_le_bytes())?;
        to.send(&header)?;
        to.send(&self.commits.result)?;
        for handle in handles {
            to.send(handle.read().as_bytes())?;
        }
        give(self, &mut |piece| {
            to.send(&(piece.len() as u64).to_le_bytes())?;
            to.send(piece)
        })?;
        to.send(&END.to_le_bytes())?;
        let digest = to.hasher.digest128().to_le_bytes();
        Ok(to.send_unhashed(&digest)?)
    }

    /// Goes on with another rank's state. The model has its weights.
    pub(super) fn take_over(&mut self, handover: Handover) -> Result<(), DdpError> {
        let Header {
            order,
            learns,
            state,
            completed,
            intervals,
            ..
        } = handover.header;
        if let (Some(scaler), Some(saved)) = (&mut self.scaler, state.scaler) {
            scaler.load_state_dict(saved)?;
        }
        self.step = state.step;
        self.options.seed = state.seed;
        self.commits = Commits {
            completed,
            result: handover.result,
        };
        self.pace.intervals = intervals;
        self.restart_pace();
        self.uses = learns.then(Default::default);
        self.set_order(order.into_iter())?;
        self.reducer.reserve()?;
        self.handover = handover.program;
        self.group.declare_joined();
        Ok(())
    }
}

impl Handover {
    /// Waits until the ranks of the job admit this process, and returns their group and what one of them says of its state. The
    /// weights may come to `room`.
    ///
    /// *Blocks*: as long as the job runs.
    pub(super) fn meet(
        pending: ProcessGroup,
        options: &DdpOptions,
        room: Option<Room>,
    ) -> Result<(ProcessGroup, Self), DdpError> {
        if options.recovery != Recovery::Live {
            return Err(DdpError::Joining {
                what: "its options do not ask for live recovery".into(),
            });
        }
        let room = room.unwrap_or_default();
        let mut group = pending;
        loop {
            group = group.next_generation()?;
            match Self::meet_in(&group) {
                Ok(handover) => return Ok((group, Self { room, ..handover })),
                // Another rank is lost: the others come back to this one after their step.
                Err(_) if group.is_lost() => {}
                Err(error) => {
                    group.abort(&error.to_string());
                    return Err(error);
                }
            }
        }
    }

    fn meet_in(group: &ProcessGroup) -> Result<Self, DdpError> {
        let new = Standing {
            place: Place::New,
            completed: 0,
        };
        let settled = settle(group, new, &[])?.settlement;
        let Some(giver) = settled.giver else {
            return Err(joining("no rank has the job's state".into()));
        };
        let mut from = Wire::new(group, std::slice::from_ref(&giver));
        let len = group.recv_bytes(giver, TAG)?;
        let len = len
            .as_slice()
            .try_into()
            .map_or(u64::MAX, u64::from_le_bytes);
        if len > HEADER_BYTES_MAX {
            return Err(joining(format!(
                "rank {giver} announces a header of {len} bytes, expected at most {HEADER_BYTES_MAX}"
            )));
        }
        let header = from.recv(len)?;
        let header = serde_json::from_slice(&header)
            .map_err(|error| joining(format!("rank {giver}'s header cannot be read: {error}")))?;
        Ok(Self {
            giver,
            hasher: from.hasher,
            header,
            result: Vec::new(),
            weights: Vec::new(),
            program: None,
            room: Room::default(),
        })
    }

    /// Receives the state while `prepare` runs.
    pub(super) fn receive_while<T>(
        &mut self,
        group: &ProcessGroup,
        prepare: impl FnOnce() -> Result<T, DdpError>,
    ) -> Result<T, DdpError> {
        std::thread::scope(|scope| {
            let thread = Builder::new().name(format!("rank{}/handover", group.rank()));
            let (begins, has_begun) = channel();
            let receiving = thread.spawn_scoped(scope, || self.receive(group, begins));
            let receiving = receiving.map_err(|error| joining(format!("no thread: {error}")))?;
            // A thread begins with memory of its own, which it gets only between the pages that `prepare` brings in.
            let _ = has_begun.recv();
            let prepared = prepare();
            let received = receiving.join();
            received.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            prepared
        })
    }

    fn receive(&mut self, group: &ProcessGroup, begins: Sender<()>) -> Result<(), DdpError> {
        let giver = self.giver;
        let mut from = Wire::new(group, std::slice::from_ref(&giver));
        from.hasher = std::mem::take(&mut self.hasher);
        self.result = from.recv(self.header.result_bytes)?.to_vec();
        drop(begins);
        let Room { weights, program } = std::mem::take(&mut self.room);
        let mut room = weights.into_iter();
        for len in &self.header.weights_bytes {
            let own = room.next().filter(|own| own.len() == words(*len));
            let tensor = from.recv_to(own.unwrap_or_default(), *len)?;
            self.weights.push(tensor);
        }
        let [program, room] = program;
        let pieces = from.recv_pieces(program)?;
        self.program = Some(Given { pieces, room });
        let expected = group.recv_bytes(giver, TAG)?;
        if from.hasher.digest128().to_le_bytes() != expected[..] {
            return Err(joining(format!(
                "the state from rank {giver} does not have the checksum that it sent"
            )));
        }
        Ok(())
    }

    /// Compares this rank's model and settings with those of the others.
    pub(super) fn verify(
        &self,
        group: &ProcessGroup,
        own: &Manifest,
        same_bits: SameBits,
    ) -> Result<(), DdpError> {
        let manifest = &self.header.manifest;
        manifest.admit(self.giver, group, own, same_bits)
    }

    /// `model` with the other rank's weights, after [`verify`](Self::verify).
    pub(super) fn load<M: Module>(&mut self, model: M) -> Result<M, DdpError> {
        let tensors = weights::tensors(&model);
        let given = std::mem::take(&mut self.weights);
        if given.len() != tensors.len() {
            let (got, expected) = (given.len(), tensors.len());
            return Err(joining(format!(
                "it got {got} tensors of weights, expected {expected}"
            )));
        }
        let values = tensors.into_iter().zip(given);
        let values = values.map(|((path, shape, dtype), bytes)| {
            let (expected, got) = (shape.iter().product::<usize>() * dtype.size(), bytes.len());
            if expected != got {
                return Err(joining(format!(
                    "it got {got} bytes of {path}, expected {expected}"
                )));
            }
            Ok((path, TensorData::from_bytes(bytes, shape, dtype)))
        });
        let values = values.collect::<Result<_, _>>()?;
        Ok(weights::import(model, values))
    }
}

fn joining(what: String) -> DdpError {
    DdpError::Joining { what }
}

fn words(bytes: u64) -> usize {
    bytes.div_ceil(WORD_BYTES) as usize
}

/// One end of a handover.
struct Wire<'a> {
    group: &'a ProcessGroup,
    /// The new ranks, or the one that gives.
    peers: &'a [usize],
    hasher: Xxh3,
}

impl<'a> Wire<'a> {
    fn new(group: &'a ProcessGroup, peers: &'a [usize]) -> Self {
        Self {
            group,
            peers,
            hasher: Xxh3::new(),
        }
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), DdpError> {
        for piece in bytes.chunks(PIECE_BYTES) {
            self.hasher.update(piece);
            for peer in self.peers {
                self.group.send(piece, *peer, TAG)?;
            }
        }
        Ok(())
    }

    fn send_unhashed(&self, bytes: &[u8]) -> Result<(), DdpError> {
        let mut peers = self.peers.iter();
        Ok(peers.try_for_each(|peer| self.group.send_bytes(bytes, *peer, TAG))?)
    }

    fn recv(&mut self, len: u64) -> Result<Bytes, DdpError> {
        self.recv_to(Vec::new(), len)
    }

    /// As bytes of which Burn makes a tensor of any type without a copy. `room` is empty or has the size.
    fn recv_to(&mut self, mut room: Vec<u128>, len: u64) -> Result<Bytes, DdpError> {
        self.fill(&mut room, 0, len)?;
        if len.is_multiple_of(WORD_BYTES) {
            return Ok(Bytes::from_elems(room));
        }
        let received: &[u8] = bytemuck::cast_slice(&room);
        Ok(Bytes::from_bytes_vec(received[..len as usize].to_vec()))
    }

    /// Receives bytes to `room` from `start` on, a whole word. It grows as they arrive.
    fn fill(&mut self, room: &mut Vec<u128>, start: u64, len: u64) -> Result<(), DdpError> {
        let (mut start, end) = (start, start.saturating_add(len));
        while start < end {
            let next = end.min(start + PIECE_BYTES as u64);
            room.resize(room.len().max(words(next)), 0);
            let received: &mut [u8] = bytemuck::cast_slice_mut(room);
            let piece = &mut received[start as usize..next as usize];
            self.group.recv(piece, self.peers[0], TAG)?;
            self.hasher.update(piece);
            start = next;
        }
        Ok(())
    }

    fn recv_pieces(&mut self, mut room: Vec<u128>) -> Result<Vec<Bytes>, DdpError> {
        let mut pieces = Vec::new();
        let mut start = 0;
        loop {
            let mut len = [0; 8];
            self.group.recv(&mut len, self.peers[0], TAG)?;
            self.hasher.update(&len);
            let len = match u64::from_le_bytes(len) {
                END => break,
                len => len,
            };
            self.fill(&mut room, start, len)?;
            pieces.push((start as usize, (start + len) as usize));
            start = (start + len).next_multiple_of(WORD_BYTES);
        }
        let all = Bytes::from_elems(room).shared();
        let pieces = pieces.into_iter();
        let view = |(start, end)| all.view(start, end).expect("shared bytes");
        Ok(pieces.map(view).collect())
    }
}
