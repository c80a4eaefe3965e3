//! Replacements of lost ranks: a rank hands its state over to them, and they go on with it.
//!
//! ```text
//!  header   JSON: what the ranks compare, position, and the lengths of what follows
//!  result   of the last commit
//!  weights  every tensor of the model, in the order of registration
//!  program  the program's own bytes
//!  XXH3     of all these
//! ```
//!
//! Each part travels in pieces, so a receiver keeps no more than has arrived and the next piece.

use burn::module::Module;
use burn::tensor::TensorData;
use paceline_collective::ProcessGroup;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::recover::settle;
use super::{Ddp, DdpOptions, DdpState};
use crate::error::DdpError;
use crate::fingerprint::odd_ranks;
use crate::pace::Intervals;
use crate::recovery::{Commits, Place, Recovery, Standing, is_lost};
use crate::verify::{self, Item};
use crate::weights;

/// Tag of the messages.
const TAG: u32 = u32::MAX;
/// Small enough for the caches, and one piece is copied out while the next is copied in.
const PIECE_BYTES: usize = 1 << 20;
const HEADER_BYTES_MAX: u64 = 256 << 20;

/// The state of another rank.
pub(super) struct Handover {
    header: Header,
    result: Vec<u8>,
    /// By tensor.
    weights: Vec<Vec<u8>>,
    program: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
struct Header {
    /// As the ranks compared it at the job's start.
    manifest: Vec<Item>,
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
    program_bytes: u64,
}

impl Ddp {
    /// Takes in the replacements of lost ranks that wait, if all ranks have agreed on that in the last step. All ranks call it after
    /// each step, once the optimizer has changed `model`, and in the same place; without [`Recovery::Live`] and without
    /// replacements it does nothing. The first call tells the launcher that this program takes replacements in.
    ///
    /// One rank hands weights, running statistics, position, scaler and the bytes of `give` over to them. A replacement gets
    /// these bytes from [`take_handover`](Self::take_handover): give all that the program needs to go on, such as the state of the
    /// optimizer and its place in the data. `give` is called on that rank only. The next step deals the shards to all ranks.
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
        give: impl FnOnce(&Self) -> Result<Vec<u8>, E>,
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
        let hashes = self.hashes_of_weights(model)?;
        if odd_ranks(&hashes).is_some() {
            self.fingerprint.suspect(self.step);
            return Ok(());
        }
        if self.group.generation() != generation {
            return Ok(());
        }
        let mut give = Some(give);
        let mut program = Vec::new();
        loop {
            let settled = self.regroup(Place::Between)?;
            let settled = settled.map_err(DdpError::from)?.settlement;
            if settled.giver == Some(self.group.rank()) && !settled.new.is_empty() {
                if let Some(give) = give.take() {
                    program = give(self)?;
                }
                for rank in settled.new {
                    match self.hand_over(model, &program, rank) {
                        // The next operation finds out.
                        Err(_) if is_lost(&self.group) => break,
                        handed => handed?,
                    }
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

    /// The bytes that another rank gave in [`admit`](Self::admit), once, in a process that has taken the place of a lost rank.
    pub fn take_handover(&mut self) -> Option<Vec<u8>> {
        self.handover.take()
    }

    fn hand_over<M: Module>(&self, model: &M, program: &[u8], rank: usize) -> Result<(), DdpError> {
        let weights = weights::export(model);
        let bytes = weights.iter().map(|(_, data)| data.as_bytes().len() as u64);
        let header = Header {
            manifest: self.manifest.clone(),
            order: self.order.clone(),
            learns: self.uses.is_some(),
            state: self.state_dict(),
            completed: self.commits.completed,
            intervals: self.pace.intervals.clone(),
            result_bytes: self.commits.result.len() as u64,
            weights_bytes: bytes.collect(),
            program_bytes: program.len() as u64,
        };
        let header = serde_json::to_vec(&header).expect("plain data encodes");
        let mut to = Wire::new(&self.group, rank);
        to.group
            .send_bytes(&(header.len() as u64).to_le_bytes(), rank, TAG)?;
        to.send(&header)?;
        to.send(&self.commits.result)?;
        for (_, data) in &weights {
            to.send(data.as_bytes())?;
        }
        to.send(program)?;
        let digest = to.hasher.digest128().to_le_bytes();
        Ok(self.group.send_bytes(&digest, rank, TAG)?)
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
        self.handover = Some(handover.program);
        self.group.declare_joined();
        Ok(())
    }
}

impl Handover {
    /// Waits until the ranks of the job admit this process, and returns their group and the state of one of them.
    ///
    /// *Blocks*: as long as the job runs.
    pub(super) fn receive(
        pending: ProcessGroup,
        options: &DdpOptions,
    ) -> Result<(ProcessGroup, Self), DdpError> {
        if options.recovery != Recovery::Live {
            return Err(DdpError::Joining {
                what: "its options do not ask for live recovery".into(),
            });
        }
        let mut group = pending;
        loop {
            group = group.next_generation()?;
            match Self::receive_in(&group) {
                Ok(handover) => return Ok((group, handover)),
                // Another rank is lost: the others come back to this one after their step.
                Err(_) if is_lost(&group) => {}
                Err(error) => {
                    group.abort(&error.to_string());
                    return Err(error);
                }
            }
        }
    }

    fn receive_in(group: &ProcessGroup) -> Result<Self, DdpError> {
        let new = Standing {
            place: Place::New,
            completed: 0,
        };
        let settled = settle(group, new, &[])?.settlement;
        let Some(giver) = settled.giver else {
            return Err(joining("no rank has the job's state".into()));
        };
        let mut from = Wire::new(group, giver);
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
        let header: Header = serde_json::from_slice(&header)
            .map_err(|error| joining(format!("rank {giver}'s header cannot be read: {error}")))?;
        let weights = header.weights_bytes.iter();
        let handover = Self {
            result: from.recv(header.result_bytes)?,
            weights: weights
                .map(|len| from.recv(*len))
                .collect::<Result<_, _>>()?,
            program: from.recv(header.program_bytes)?,
            header,
        };
        let expected = group.recv_bytes(giver, TAG)?;
        if from.hasher.digest128().to_le_bytes() != expected[..] {
            return Err(joining(format!(
                "the state from rank {giver} does not have the checksum that it sent"
            )));
        }
        Ok(handover)
    }

    /// Compares this rank's model and settings with those of the others.
    pub(super) fn verify(&self, group: &ProcessGroup, own: &[Item]) -> Result<(), DdpError> {
        let found = verify::first_difference(&self.header.manifest, own);
        let mut all = vec![None; group.world()];
        all[group.rank()] = found;
        verify::verdict(&all)
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
            Ok((path, TensorData::from_bytes_vec(bytes, shape, dtype)))
        });
        let values = values.collect::<Result<_, _>>()?;
        Ok(weights::import(model, values))
    }
}

fn joining(what: String) -> DdpError {
    DdpError::Joining { what }
}

/// One end of a handover.
struct Wire<'a> {
    group: &'a ProcessGroup,
    peer: usize,
    hasher: Xxh3,
}

impl<'a> Wire<'a> {
    fn new(group: &'a ProcessGroup, peer: usize) -> Self {
        Self {
            group,
            peer,
            hasher: Xxh3::new(),
        }
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), DdpError> {
        for piece in bytes.chunks(PIECE_BYTES) {
            self.hasher.update(piece);
            self.group.send(piece, self.peer, TAG)?;
        }
        Ok(())
    }

    fn recv(&mut self, len: u64) -> Result<Vec<u8>, DdpError> {
        let mut received = Vec::new();
        while (received.len() as u64) < len {
            let start = received.len();
            let piece = (len - start as u64).min(PIECE_BYTES as u64) as usize;
            received.resize(start + piece, 0);
            let piece = &mut received[start..];
            self.group.recv(piece, self.peer, TAG)?;
            self.hasher.update(piece);
        }
        Ok(received)
    }
}
