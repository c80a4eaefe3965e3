//! What an operation is about: whose elements go where, without a word on how.

use std::sync::Arc;

use paceline_rendezvous::page::op_name;

use crate::error::OpKind;

/// How many elements each rank brings or gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Counts {
    /// The same number for every rank (for every pair, in an all-to-all).
    Same(usize),
    /// One number for each rank; in an all-to-all one for each pair, all of one sender's one after another.
    Each(Arc<[usize]>),
}

impl Counts {
    /// Elements of slot `index`.
    pub(crate) fn of(&self, index: usize) -> usize {
        match self {
            Self::Same(each) => *each,
            Self::Each(counts) => counts[index],
        }
    }

    /// The counts of elements `first..first + len` of every slot.
    pub(crate) fn piece(&self, first: usize, len: usize) -> Self {
        let cut = |count: usize| count.saturating_sub(first).min(len);
        match self {
            Self::Same(each) => Self::Same(cut(*each)),
            Self::Each(counts) => Self::Each(counts.iter().map(|count| cut(*count)).collect()),
        }
    }

    pub(crate) fn longest(&self) -> usize {
        match self {
            Self::Same(each) => *each,
            Self::Each(counts) => counts.iter().copied().max().unwrap_or(0),
        }
    }
}

impl From<usize> for Counts {
    fn from(each: usize) -> Self {
        Self::Same(each)
    }
}

/// Equal counts are [`Same`](Counts::Same), however they were given: they are the same call.
impl From<&[usize]> for Counts {
    fn from(counts: &[usize]) -> Self {
        match counts {
            [first, rest @ ..] if rest.iter().all(|count| count == first) => Self::Same(*first),
            _ => Self::Each(counts.into()),
        }
    }
}

/// An operation's movement of elements.
///
/// | pattern | `In` slots | `Out` slots |
/// |---|---|---|
/// | all-reduce, reduce | one for each of the rank's blocks | 1, in place |
/// | broadcast | 1 | 1, in place |
/// | all-gather | 1 | one for each rank |
/// | reduce-scatter | in each of the rank's blocks one for each rank | 1, which may replace the rank's own of its first block |
/// | gather | 1 | on the root one for each rank |
/// | scatter | on the root one for each rank | 1 |
/// | all-to-all | one for each receiver | one for each sender |
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pattern {
    pub(crate) kind: Kind,
    /// Elements of the slots; of one length where a rank brings and gets the same.
    pub(crate) counts: Counts,
    /// 0 in a pattern without a root.
    pub(crate) root: usize,
}

/// A pattern without its numbers: what settings and tables speak of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    Gather,
    Scatter,
    AllToAll,
    Barrier,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        op_name(OpKind::of(self).code())
    }

    /// By name, with or without hyphens: settings say `allreduce`.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        let bare = |name: &str| name.replace('-', "");
        Self::ALL
            .into_iter()
            .find(|kind| bare(kind.name()) == bare(name))
    }

    /// Whether elements are combined.
    pub(crate) fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::Reduce | Self::ReduceScatter)
    }
}

impl Pattern {
    #[cfg(test)]
    pub(crate) fn new(kind: Kind, counts: impl Into<Counts>) -> Self {
        Self::rooted(kind, counts, 0)
    }

    pub(crate) fn rooted(kind: Kind, counts: impl Into<Counts>, root: usize) -> Self {
        let counts = counts.into();
        Self { kind, counts, root }
    }

    /// The same for elements `first..first + len` of every slot.
    pub(crate) fn piece(&self, first: usize, len: usize) -> Self {
        Self::rooted(self.kind, self.counts.piece(first, len), self.root)
    }

    /// Elements of the longest slot: what is cut into pieces.
    pub(crate) fn longest(&self) -> usize {
        self.counts.longest()
    }

    /// Whether `Out` is the memory of `In`.
    pub(crate) fn in_place(&self) -> bool {
        matches!(self.kind, Kind::AllReduce | Kind::Reduce | Kind::Broadcast)
    }
}
