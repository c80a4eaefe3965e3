//! The names of operations.

use std::fmt;

use paceline_rendezvous::page;

use crate::plan::Kind;

/// Which operation a call asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// All ranks get the reduction of all ranks' data.
    AllReduce,
    /// All ranks get the root's data.
    Broadcast,
    /// All ranks get all ranks' data, in rank order.
    AllGather,
    /// Each rank gets its slice of the reduction of all ranks' data.
    ReduceScatter,
    /// The root gets the reduction of all ranks' data.
    Reduce,
    /// The root gets all ranks' data, in rank order.
    Gather,
    /// Each rank gets its part of the root's data.
    Scatter,
    /// Each rank gets its part of every rank's data.
    AllToAll,
    /// All ranks meet.
    Barrier,
    /// [`AllGather`](Self::AllGather) of byte strings of any length.
    AllGatherBytes,
    /// [`Broadcast`](Self::Broadcast) of a byte string of any length.
    BroadcastBytes,
    /// One rank's data goes to another one.
    Send(Route),
    /// One rank takes what another one sent.
    Recv(Route),
}

/// The other end of a [`send`](crate::ProcessGroup::send) or [`recv`](crate::ProcessGroup::recv).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Route {
    /// The other rank; none for a receive from any.
    pub peer: Option<u32>,
    /// What the message is for.
    pub tag: u32,
}

/// Lists the operations with their numbers on the job page and in headers: those of a pattern, then the others of all ranks.
macro_rules! operations {
    ($($kind:ident = $code:ident),*; $($other:ident = $other_code:ident),*) => {
        impl Kind {
            /// All of them, in the order of their declaration.
            pub(crate) const ALL: [Self; 9] = [$(Self::$kind),*];
        }

        impl OpKind {
            /// Sends and receives are not among them and never stand in a header.
            const ALL: [Self; 11] = [$(Self::$kind,)* $(Self::$other),*];

            pub(crate) fn code(self) -> u32 {
                match self {
                    $(Self::$kind => page::op::$code,)*
                    $(Self::$other => page::op::$other_code,)*
                    Self::Send(_) => page::op::SEND,
                    Self::Recv(_) => page::op::RECV,
                }
            }
        }
    };
}

operations! {
    AllReduce = ALL_REDUCE, Reduce = REDUCE, Broadcast = BROADCAST, AllGather = ALL_GATHER,
    ReduceScatter = REDUCE_SCATTER, Gather = GATHER, Scatter = SCATTER, AllToAll = ALL_TO_ALL, Barrier = BARRIER;
    AllGatherBytes = ALL_GATHER_BYTES, BroadcastBytes = BROADCAST_BYTES
}

impl OpKind {
    /// What a pattern of this kind is for, unless its caller says otherwise.
    pub(crate) fn of(kind: Kind) -> Self {
        Self::ALL[kind as usize]
    }

    /// A send to a rank; a rank's number is far below the range of `u32`.
    pub(crate) fn send(to: usize, tag: u32) -> Self {
        let peer = Some(to as u32);
        Self::Send(Route { peer, tag })
    }

    /// A receive from a rank, or from any.
    pub(crate) fn recv(from: Option<usize>, tag: u32) -> Self {
        let peer = from.map(|from| from as u32);
        Self::Recv(Route { peer, tag })
    }

    pub(crate) fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(page::op_name(self.code()))
    }
}

/// One operation of a group, the same on all its ranks: "all-reduce #4411 (bucket 3)"; or one rank's send or receive:
/// "recv #12 from rank 2, tag 7".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    /// What was asked for.
    pub kind: OpKind,
    /// The group's running number, from 1; for a send or a receive this rank's own number of those.
    pub seq: u64,
    /// Gradient bucket, when the caller named one.
    pub bucket: Option<u32>,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.kind, self.seq)?;
        match self.kind {
            OpKind::Send(Route { peer, tag }) => write!(f, " to {}, tag {tag}", Someone(peer))?,
            OpKind::Recv(Route { peer, tag }) => write!(f, " from {}, tag {tag}", Someone(peer))?,
            _ => {}
        }
        self.bucket
            .map_or(Ok(()), |bucket| write!(f, " (bucket {bucket})"))
    }
}

/// "rank 2" or "any rank".
struct Someone(Option<u32>);

impl fmt::Display for Someone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(rank) => write!(f, "rank {rank}"),
            None => f.write_str("any rank"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receive_names_its_other_end() {
        let recv = |from| Operation {
            kind: OpKind::recv(from, 7),
            seq: 12,
            bucket: None,
        };
        assert_eq!(recv(Some(2)).to_string(), "recv #12 from rank 2, tag 7");
        assert_eq!(recv(None).to_string(), "recv #12 from any rank, tag 7");
        assert_eq!(OpKind::from_code(recv(None).kind.code()), None);
    }

    #[test]
    fn operation_codes_round_trip() {
        for kind in OpKind::ALL {
            assert_eq!(OpKind::from_code(kind.code()), Some(kind));
        }
        assert_eq!(OpKind::from_code(99), None);
    }
}
