//! How a rank's slots lie in memory, and how elements are dealt to ranks.

use std::ops::Range;

use super::{Counts, Kind, Pattern, Space, Spec};
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
        let Pattern { kind, counts, root } = &spec.pattern;
        let even = |slots, each| Self::Even { slots, each };
        let blocks = || spec.tree.blocks(rank).len();
        let all = |times: usize| match counts {
            Counts::Same(each) => even(world * times, *each),
            Counts::Each(counts) => Self::bounds((0..times).flat_map(|_| counts.iter().copied())),
        };
        match (kind, space) {
            (_, Space::Temp) | (Kind::Barrier, _) => even(0, 0),
            (Kind::AllReduce | Kind::Reduce, Space::In) => even(blocks(), counts.longest()),
            (Kind::AllReduce | Kind::Reduce, Space::Out)
            | (Kind::Broadcast, _)
            | (Kind::AllGather | Kind::Gather, Space::In)
            | (Kind::ReduceScatter | Kind::Scatter, Space::Out) => even(1, counts.of(rank)),
            (Kind::AllGather, Space::Out) => all(1),
            (Kind::ReduceScatter, Space::In) => all(blocks()),
            (Kind::Gather, Space::Out) | (Kind::Scatter, Space::In) => {
                all(usize::from(rank == *root))
            }
            (Kind::AllToAll, _) => match (counts, space) {
                (Counts::Same(_), _) => all(1),
                (Counts::Each(counts), Space::In) => {
                    Self::bounds(counts[rank * world..][..world].iter().copied())
                }
                (Counts::Each(counts), _) => {
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
