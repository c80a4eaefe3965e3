//! The names of operations.

use std::fmt;

use paceline_rendezvous::page;

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
}

impl OpKind {
    const ALL: [Self; 11] = [
        Self::AllReduce,
        Self::Broadcast,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Reduce,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::Barrier,
        Self::AllGatherBytes,
        Self::BroadcastBytes,
    ];

    /// The operation's number on the job page and in headers.
    pub(crate) fn code(self) -> u32 {
        match self {
            Self::AllReduce => page::op::ALL_REDUCE,
            Self::Broadcast => page::op::BROADCAST,
            Self::AllGather => page::op::ALL_GATHER,
            Self::ReduceScatter => page::op::REDUCE_SCATTER,
            Self::Reduce => page::op::REDUCE,
            Self::Gather => page::op::GATHER,
            Self::Scatter => page::op::SCATTER,
            Self::AllToAll => page::op::ALL_TO_ALL,
            Self::Barrier => page::op::BARRIER,
            Self::AllGatherBytes => page::op::ALL_GATHER_BYTES,
            Self::BroadcastBytes => page::op::BROADCAST_BYTES,
        }
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

/// One operation of a group, the same on all its ranks: "all-reduce #4411 (bucket 3)".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    /// What was asked for.
    pub kind: OpKind,
    /// The group's running number, from 1.
    pub seq: u64,
    /// Gradient bucket, when the caller named one.
    pub bucket: Option<u32>,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.kind, self.seq)?;
        self.bucket
            .map_or(Ok(()), |bucket| write!(f, " (bucket {bucket})"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operation_codes_round_trip() {
        for kind in OpKind::ALL {
            assert_eq!(OpKind::from_code(kind.code()), Some(kind));
        }
        assert_eq!(OpKind::from_code(99), None);
    }
}
