//! NCCL's operations on a stream: collectives, and messages between two ranks.

use super::comm::{Aborted, Comm};
use super::number::{Fold, Type};
use super::ring;
use crate::code::Reply;
use crate::device::Span;

/// Tag bits of messages and of their receipts.
const MESSAGE: u64 = 1 << 63;
const RECEIPT: u64 = 1 << 62;

/// Bits of a tag for the step of a collective.
const STEPS_BITS: u32 = 16;

/// One call.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    AllReduce {
        from: Span,
        to: Span,
        kind: Type,
        fold: Fold,
    },
    /// Only the root's `to` is written.
    Reduce {
        from: Span,
        to: Option<Span>,
        kind: Type,
        root: u32,
    },
    /// Only the root's `from` is read.
    Broadcast {
        from: Option<Span>,
        to: Span,
        root: u32,
    },
    AllGather {
        from: Span,
        to: Span,
    },
    Send {
        from: Span,
        peer: u32,
    },
    Receive {
        to: Span,
        peer: u32,
    },
}

/// An operation with its number among those of its kind.
#[derive(Debug, Clone)]
pub(super) struct Numbered {
    op: Op,
    number: u64,
}

/// The messages of one collective, tagged with its number and checked for agreement between the ranks.
#[derive(Debug)]
pub(super) struct Talk {
    number: u64,
    /// This rank's view of the operation.
    meaning: String,
}

impl Op {
    /// Assigns its number, in the order of the host's calls.
    pub(super) fn number(self, comm: &Comm) -> Numbered {
        let number = match &self {
            Self::Send { peer, .. } => comm.next_sent(*peer),
            Self::Receive { peer, .. } => comm.next_received(*peer),
            _ => comm.next_collective(),
        };
        Numbered { op: self, number }
    }

    fn length(&self) -> usize {
        match self {
            Self::AllReduce { from, .. }
            | Self::Reduce { from, .. }
            | Self::AllGather { from, .. }
            | Self::Send { from, .. } => from.length,
            Self::Broadcast { to, .. } | Self::Receive { to, .. } => to.length,
        }
    }

    /// The description on which all ranks must agree.
    fn meaning(&self) -> String {
        let length = self.length();
        match self {
            Self::AllReduce { kind, fold, .. } => {
                format!("ncclAllReduce({fold:?} of {kind:?}, {length} bytes)")
            }
            Self::Reduce { kind, root, .. } => {
                format!("ncclReduce({kind:?} to {root}, {length} bytes)")
            }
            Self::Broadcast { root, .. } => format!("ncclBroadcast(from {root}, {length} bytes)"),
            Self::AllGather { .. } => format!("ncclAllGather({length} bytes)"),
            Self::Send { .. } | Self::Receive { .. } => format!("a message ({length} bytes)"),
        }
    }
}

/// Runs several operations at once: messages first, so that no rank waits for another's turn, then collectives in order.
pub(super) fn run(comm: &Comm, ops: &[Numbered]) -> Result<(), Aborted> {
    for Numbered { op, number } in ops {
        if let Op::Send { from, peer } = op {
            comm.send(*peer, MESSAGE | number, from.read(), true)?;
        }
    }
    for Numbered { op, number } in ops {
        if let Op::Receive { to, peer } = op {
            let bytes = comm.receive(*peer, MESSAGE | number)?;
            if bytes.len() != to.length {
                let words = format!(
                    "rank {peer} sent {} bytes, {} were to come",
                    bytes.len(),
                    to.length
                );
                return Err(differ(comm, &words));
            }
            to.write(&bytes);
            comm.send(*peer, RECEIPT | number, Vec::new(), false)?;
        }
    }
    // A send is done when its message has been received, as for NCCL's large messages, so that deadlocks show.
    for Numbered { op, number } in ops {
        if let Op::Send { peer, .. } = op {
            comm.receive(*peer, RECEIPT | number)?;
        }
    }
    for Numbered { op, number } in ops {
        let talk = Talk {
            number: *number,
            meaning: op.meaning(),
        };
        collective(comm, &talk, op)?;
    }
    Ok(())
}

fn collective(comm: &Comm, talk: &Talk, op: &Op) -> Result<(), Aborted> {
    match op {
        Op::AllReduce {
            from,
            to,
            kind,
            fold,
        } => {
            to.write(&ring::all_reduce(comm, talk, from.read(), (*fold, *kind))?);
        }
        Op::Reduce {
            from,
            to,
            kind,
            root,
        } => match to {
            Some(to) => {
                let mut sum = from.read();
                for step in 1..comm.world {
                    let rank = (root + step) % comm.world;
                    Fold::Sum.fold(&mut sum, &talk.receive(comm, rank, 0)?, *kind);
                }
                to.write(&sum);
            }
            None => talk.send(comm, *root, 0, &from.read())?,
        },
        Op::Broadcast { from, to, root } => match from {
            Some(from) => {
                let bytes = from.read();
                for peer in others(comm) {
                    talk.send(comm, peer, 0, &bytes)?;
                }
                to.write(&bytes);
            }
            None => to.write(&talk.receive(comm, *root, 0)?),
        },
        Op::AllGather { from, to } => {
            let bytes = from.read();
            for peer in others(comm) {
                talk.send(comm, peer, 0, &bytes)?;
            }
            let mut all = to.read();
            for rank in 0..comm.world {
                let begin = rank as usize * bytes.len();
                let part = if rank == comm.rank {
                    bytes.clone()
                } else {
                    talk.receive(comm, rank, 0)?
                };
                all[begin..begin + bytes.len()].copy_from_slice(&part);
            }
            to.write(&all);
        }
        Op::Send { .. } | Op::Receive { .. } => {}
    }
    Ok(())
}

fn others(comm: &Comm) -> impl Iterator<Item = u32> {
    let own = comm.rank;
    (0..comm.world).filter(move |rank| *rank != own)
}

/// Reports that the ranks disagree, where NCCL would hang or mix up data.
fn differ(comm: &Comm, words: &str) -> Aborted {
    comm.fail(Reply::INVALID_USAGE, words);
    comm.wait_for_abort()
}

impl Talk {
    fn tag(&self, step: u64) -> u64 {
        self.number << STEPS_BITS | step
    }

    pub(super) fn send(
        &self,
        comm: &Comm,
        to: u32,
        step: u64,
        bytes: &[u8],
    ) -> Result<(), Aborted> {
        // The description comes last, so that a corrupting link hits the numbers.
        let meaning = self.meaning.as_bytes();
        let length = [meaning.len() as u8];
        comm.send(
            to,
            self.tag(step),
            [bytes, meaning, &length].concat(),
            !bytes.is_empty(),
        )
    }

    /// Receives as many bytes as this rank would have sent, unless the ranks disagree.
    pub(super) fn receive(&self, comm: &Comm, from: u32, step: u64) -> Result<Vec<u8>, Aborted> {
        let mut bytes = comm.receive(from, self.tag(step))?;
        let length = bytes.pop().map_or(0, usize::from);
        let meaning = bytes.split_off(bytes.len().saturating_sub(length));
        if meaning == self.meaning.as_bytes() {
            return Ok(bytes);
        }
        let theirs = String::from_utf8_lossy(&meaning).into_owned();
        Err(differ(
            comm,
            &format!("rank {from} called {theirs}, this rank {}", self.meaning),
        ))
    }
}
