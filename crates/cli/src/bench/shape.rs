//! What one rank brings to an operation of a given size, where it gets the result, and where every part of it comes from.

use std::ops::Range;

use super::op::Op;

/// A rank's place in a measurement.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) root: usize,
}

impl Place {
    /// The rank that this one sends to in a ring.
    pub(super) fn next(self) -> usize {
        (self.rank + 1) % self.world
    }

    /// The rank that this one receives from in a ring.
    pub(super) fn previous(self) -> usize {
        (self.rank + self.world - 1) % self.world
    }
}

/// One rank's memory in an operation: one buffer of `len` elements that holds input and output, as the asynchronous
/// calls have it (for messages, one for either). Where the two ranges overlap, the operation works in place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) len: usize,
    pub(super) input: Range<usize>,
    pub(super) output: Range<usize>,
    /// Elements in nccl-tests' sense: of the longest of a rank's input and output.
    pub(super) total: usize,
}

/// A stretch of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) len: usize,
    pub(super) origin: Origin,
    /// The stretch begins with what `origin` has at this index.
    pub(super) at: usize,
}

/// What a stretch of the output is a copy of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// The reduction of all ranks' inputs.
    Reduced,
    /// The input of one rank.
    Rank(usize),
}

impl Shape {
    /// For a size in bytes, rounded down to whole elements or, in operations on slices, to whole slices; an element for
    /// each at least.
    pub(super) fn new(op: Op, place: Place, bytes: usize, element_bytes: usize) -> Self {
        let Place { rank, world, root } = place;
        if op == Op::Barrier {
            return Self {
                len: 0,
                input: 0..0,
                output: 0..0,
                total: 0,
            };
        }
        let slots = if op.is_sliced() { world } else { 1 };
        let each = (bytes / element_bytes / slots).max(1);
        let total = each * slots;
        let slot = |index: usize| index * each..(index + 1) * each;
        let is_root = rank == root;
        let (len, input, output) = match op {
            Op::AllReduce | Op::Broadcast => (total, 0..total, 0..total),
            Op::Reduce => (total, 0..total, if is_root { 0..total } else { 0..0 }),
            Op::AllGather => (total, slot(rank), 0..total),
            Op::ReduceScatter => (total, 0..total, slot(rank)),
            Op::Gather if is_root => (total, slot(root), 0..total),
            Op::Gather => (each, 0..each, 0..0),
            Op::Scatter if is_root => (total, 0..total, slot(root)),
            Op::Scatter => (each, 0..0, 0..each),
            Op::AllToAll | Op::SendRecv => (2 * total, 0..total, total..2 * total),
            Op::Barrier => (0, 0..0, 0..0),
        };
        Self {
            len,
            input,
            output,
            total,
        }
    }

    /// Where the output comes from, stretch after stretch.
    pub(super) fn runs(&self, op: Op, place: Place) -> Vec<Run> {
        let Place { rank, world, root } = place;
        let len = self.output.len();
        let run = |len, origin, at| Run { len, origin, at };
        let each = len / world;
        match op {
            _ if len == 0 => Vec::new(),
            Op::AllReduce | Op::Reduce => vec![run(len, Origin::Reduced, 0)],
            Op::ReduceScatter => vec![run(len, Origin::Reduced, rank * len)],
            Op::Broadcast => vec![run(len, Origin::Rank(root), 0)],
            Op::Scatter => vec![run(len, Origin::Rank(root), rank * len)],
            Op::AllGather | Op::Gather => (0..world)
                .map(|from| run(each, Origin::Rank(from), 0))
                .collect(),
            Op::AllToAll => (0..world)
                .map(|from| run(each, Origin::Rank(from), rank * each))
                .collect(),
            Op::SendRecv => vec![run(len, Origin::Rank(place.previous()), 0)],
            Op::Barrier => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = Place {
        rank: 1,
        world: 2,
        root: 0,
    };

    #[test]
    fn the_size_is_that_of_the_longest_buffer_of_a_rank() {
        let check = |op, bytes, len, input, output| {
            let shape = Shape::new(op, PLACE, bytes, 4);
            assert_eq!(
                (shape.len, shape.input, shape.output),
                (len, input, output),
                "{op:?} of {bytes}"
            );
        };
        check(Op::AllReduce, 32, 8, 0..8, 0..8);
        check(Op::AllGather, 32, 8, 4..8, 0..8);
        check(Op::ReduceScatter, 32, 8, 0..8, 4..8);
        check(Op::Gather, 32, 4, 0..4, 0..0);
        check(Op::Scatter, 32, 4, 0..0, 0..4);
        check(Op::AllToAll, 32, 16, 0..8, 8..16);
        check(Op::SendRecv, 32, 16, 0..8, 8..16);
        check(Op::Reduce, 32, 8, 0..8, 0..0);
        check(Op::Barrier, 0, 0, 0..0, 0..0);
        // Rounded down to whole slices, but never to nothing.
        check(Op::AllGather, 43, 10, 5..10, 0..10);
        check(Op::AllGather, 1, 2, 1..2, 0..2);
        check(Op::Broadcast, 1, 1, 0..1, 0..1);
    }

    #[test]
    fn a_ring_is_closed() {
        let place = |rank| Place { rank, ..PLACE };
        assert_eq!([0, 1].map(|rank| place(rank).next()), [1, 0]);
        assert_eq!([0, 1].map(|rank| place(rank).previous()), [1, 0]);
        let three = Place {
            rank: 2,
            world: 3,
            root: 0,
        };
        assert_eq!((three.next(), three.previous()), (0, 1));
    }

    #[test]
    fn the_stretches_cover_the_output() {
        for &op in Op::ALL {
            for rank in 0..3 {
                let place = Place {
                    rank,
                    world: 3,
                    root: 2,
                };
                let shape = Shape::new(op, place, 600, 4);
                let covered: usize = shape.runs(op, place).iter().map(|run| run.len).sum();
                assert_eq!(covered, shape.output.len(), "{op:?} on rank {rank}");
            }
        }
    }

    #[test]
    fn a_slice_comes_from_its_place_in_the_whole() {
        let runs = |op| Shape::new(op, PLACE, 32, 4).runs(op, PLACE);
        let run = |len, origin, at| Run { len, origin, at };
        assert_eq!(runs(Op::ReduceScatter), [run(4, Origin::Reduced, 4)]);
        assert_eq!(runs(Op::Scatter), [run(4, Origin::Rank(0), 4)]);
        assert_eq!(
            runs(Op::AllToAll),
            [run(4, Origin::Rank(0), 4), run(4, Origin::Rank(1), 4)]
        );
        assert_eq!(
            runs(Op::AllGather),
            [run(4, Origin::Rank(0), 0), run(4, Origin::Rank(1), 0)]
        );
    }
}
