//! How a rank's slots lie in memory, and how elements are dealt to ranks.

use std::ops::Range;

use super::{Counts, Pattern, Space, Spec};
use crate::tree::deal;

/// Gives each rank a range of the elements `0..len`: contiguous, ascending in rank order, possibly empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Partition {
    len: usize,
    parts: usize,
    line: usize,
}

impl Partition {
    /// Slices that differ by at most one cache line of `line` elements and never share one.
    pub(crate) fn even(len: usize, parts: usize, line: usize) -> Self {
        Self { len, parts, line }
    }

    /// The elements of part `index`.
    pub(crate) fn range(&self, index: usize) -> Range<usize> {
        let lines = deal(self.len.div_ceil(self.line), self.parts, index);
        (lines.start * self.line).min(self.len)..(lines.end * self.line).min(self.len)
    }
}

/// First element of each slot of one space: slots one after another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Slots of one length.
    Even { slots: usize, each: usize },
    /// One bound more than there are slots.
    Uneven { bounds: Vec<usize> },
}

impl Layout {
    /// The slots that a rank has in `In` or `Out`.
    pub(crate) fn of(spec: &Spec, rank: usize, space: Space) -> Self {
        let world = spec.world();
        let none = Self::Even { slots: 0, each: 0 };
        let one = |each: usize| Self::Even { slots: 1, each };
        let blocks = || spec.tree.blocks(rank).len();
        let repeated = |counts: &Counts, times: usize| match counts {
            Counts::Same(each) => Self::Even {
                slots: world * times,
                each: *each,
            },
            Counts::Each(counts) => Self::bounds((0..times).flat_map(|_| counts.iter().copied())),
        };
        let all = |counts: &Counts| repeated(counts, 1);
        match (&spec.pattern, space) {
            (_, Space::Temp) | (Pattern::Barrier, _) => none,
            (Pattern::AllReduce { len } | Pattern::Reduce { len, .. }, Space::In) => Self::Even {
                slots: blocks(),
                each: *len,
            },
            (Pattern::AllReduce { len } | Pattern::Reduce { len, .. }, Space::Out) => one(*len),
            (Pattern::Broadcast { len, .. }, _) => one(*len),
            (Pattern::AllGather { counts } | Pattern::Gather { counts, .. }, Space::In) => {
                one(counts.of(rank))
            }
            (Pattern::ReduceScatter { counts } | Pattern::Scatter { counts, .. }, Space::Out) => {
                one(counts.of(rank))
            }
            (Pattern::AllGather { counts }, Space::Out) => all(counts),
            (Pattern::ReduceScatter { counts }, Space::In) => repeated(counts, blocks()),
            (Pattern::Gather { counts, root }, Space::Out)
            | (Pattern::Scatter { counts, root }, Space::In) => {
                if rank == *root {
                    all(counts)
                } else {
                    none
                }
            }
            (Pattern::AllToAll { counts }, Space::In) => match counts {
                Counts::Same(_) => all(counts),
                Counts::Each(counts) => {
                    Self::bounds(counts[rank * world..][..world].iter().copied())
                }
            },
            (Pattern::AllToAll { counts }, Space::Out) => match counts {
                Counts::Same(_) => all(counts),
                Counts::Each(counts) => {
                    Self::bounds((0..world).map(|from| counts[from * world + rank]))
                }
            },
        }
    }

    fn bounds(counts: impl Iterator<Item = usize>) -> Self {
        let mut bounds = vec![0];
        bounds.extend(counts.scan(0_usize, |end, count| {
            *end += count;
            Some(*end)
        }));
        Self::Uneven { bounds }
    }

    /// First element of a slot.
    pub(crate) fn start(&self, slot: usize) -> usize {
        match self {
            Self::Even { each, .. } => slot * each,
            Self::Uneven { bounds } => bounds[slot],
        }
    }

    /// Elements of all slots.
    pub(crate) fn total(&self) -> usize {
        match self {
            Self::Even { slots, each } => slots * each,
            Self::Uneven { bounds } => bounds.last().copied().unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_slices_cover_everything_and_never_share_a_line() {
        for parts in 1..=64 {
            for len in [0, 1, 3, 7, 15, 16, 17, 64, 1009] {
                for line in [1, 8, 16, 32] {
                    let partition = Partition::even(len, parts, line);
                    let mut next = 0;
                    for part in 0..parts {
                        let range = partition.range(part);
                        assert_eq!(range.start, next);
                        assert!(range.is_empty() || range.start.is_multiple_of(line));
                        next = range.end;
                    }
                    assert_eq!(next, len);
                }
            }
        }
    }

    #[test]
    fn uneven_slots_follow_one_another() {
        let layout = Layout::bounds([2, 0, 5].into_iter());
        let starts = [0, 1, 2].map(|slot| layout.start(slot));
        assert_eq!((starts, layout.total()), ([0, 2, 2], 7));
    }
}
