//! What an operation is about: whose elements go where, without a word on how.

use std::sync::Arc;

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

/// Equal counts are [`Same`](Counts::Same), however they were given: they are the same call.
impl<C: AsRef<[usize]> + Into<Arc<[usize]>>> From<C> for Counts {
    fn from(counts: C) -> Self {
        match counts.as_ref() {
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
pub(crate) enum Pattern {
    AllReduce { len: usize },
    Reduce { len: usize, root: usize },
    Broadcast { len: usize, root: usize },
    AllGather { counts: Counts },
    ReduceScatter { counts: Counts },
    Gather { counts: Counts, root: usize },
    Scatter { counts: Counts, root: usize },
    AllToAll { counts: Counts },
    Barrier,
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
    /// All of them, in the order of their declaration.
    pub(crate) const ALL: [Self; 9] = [
        Self::AllReduce,
        Self::Reduce,
        Self::Broadcast,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::Barrier,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::Reduce => "reduce",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAll => "all-to-all",
            Self::Barrier => "barrier",
        }
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
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::AllReduce { .. } => Kind::AllReduce,
            Self::Reduce { .. } => Kind::Reduce,
            Self::Broadcast { .. } => Kind::Broadcast,
            Self::AllGather { .. } => Kind::AllGather,
            Self::ReduceScatter { .. } => Kind::ReduceScatter,
            Self::Gather { .. } => Kind::Gather,
            Self::Scatter { .. } => Kind::Scatter,
            Self::AllToAll { .. } => Kind::AllToAll,
            Self::Barrier => Kind::Barrier,
        }
    }

    /// The same for elements `first..first + len` of every slot.
    pub(crate) fn piece(&self, first: usize, len: usize) -> Self {
        let cut = |total: usize| total.saturating_sub(first).min(len);
        match self {
            Self::AllReduce { len: total } => Self::AllReduce { len: cut(*total) },
            Self::Reduce { len: total, root } => Self::Reduce {
                len: cut(*total),
                root: *root,
            },
            Self::Broadcast { len: total, root } => Self::Broadcast {
                len: cut(*total),
                root: *root,
            },
            Self::AllGather { counts } => Self::AllGather {
                counts: counts.piece(first, len),
            },
            Self::ReduceScatter { counts } => Self::ReduceScatter {
                counts: counts.piece(first, len),
            },
            Self::Gather { counts, root } => Self::Gather {
                counts: counts.piece(first, len),
                root: *root,
            },
            Self::Scatter { counts, root } => Self::Scatter {
                counts: counts.piece(first, len),
                root: *root,
            },
            Self::AllToAll { counts } => Self::AllToAll {
                counts: counts.piece(first, len),
            },
            Self::Barrier => Self::Barrier,
        }
    }

    /// Elements of the longest slot: what is cut into pieces.
    pub(crate) fn longest(&self) -> usize {
        match self {
            Self::AllReduce { len } | Self::Reduce { len, .. } | Self::Broadcast { len, .. } => {
                *len
            }
            Self::AllGather { counts }
            | Self::ReduceScatter { counts }
            | Self::Gather { counts, .. }
            | Self::Scatter { counts, .. }
            | Self::AllToAll { counts } => counts.longest(),
            Self::Barrier => 0,
        }
    }

    /// Whether `Out` is the memory of `In`.
    pub(crate) fn in_place(&self) -> bool {
        matches!(
            self,
            Self::AllReduce { .. } | Self::Reduce { .. } | Self::Broadcast { .. }
        )
    }
}
