//! Rings: slices go from each rank to the next one.
//!
//! *Source*: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

use super::parts::{copy, fold, input, output, slice, temp};
use super::{Counts, Kind, Partition, Round, Spec, Spot, Task};

/// One rank's rounds, and the elements of its `Temp` slots; of patterns that go round a ring.
pub(super) fn ring(spec: &Spec, me: usize) -> (Vec<Round>, Vec<usize>) {
    let counts = &spec.pattern.counts;
    match spec.pattern.kind {
        Kind::AllReduce => (all_reduce(spec, me, counts.longest()), Vec::new()),
        Kind::AllGather => (all_gather(spec, me, counts), Vec::new()),
        Kind::ReduceScatter => reduce_scatter(spec, me, counts),
        _ => unreachable!("`fit` lets only three patterns go round a ring"),
    }
}

/// `rank - steps`, around the ring; `steps` is at most `2 * world`.
fn back(rank: usize, steps: usize, world: usize) -> usize {
    (rank + 2 * world - steps) % world
}

/// Slice `c` starts at rank `c + 1` and is finished at rank `c`; then the finished slices go round once more.
fn all_reduce(spec: &Spec, me: usize, len: usize) -> Vec<Round> {
    let world = spec.world();
    let slices = Partition::even(len, world, spec.line);
    let left = back(me, 1, world);
    let blocks =
        |rank: usize, at| (0..spec.tree.blocks(rank).len()).map(move |b| input(rank, b, at));
    let own = spec.tree.blocks(me).len();
    let first = spec.tree.parts(spec.tree.blocks(left).len() + own);
    let further = spec.tree.parts(1 + own);
    let folds = (0..world - 1).map(|s| {
        let slice = slices.range(back(me, s + 2, world));
        let (tree, mut inputs): (_, Vec<Spot>) = match s {
            0 => (&first, blocks(left, slice.start).collect()),
            _ => (&further, vec![output(left, 0, slice.start)]),
        };
        inputs.extend(blocks(me, slice.start));
        let to = output(me, 0, slice.start);
        one(fold(tree, slice.len(), inputs, s == world - 2, to))
    });
    let passes = (0..world - 1).map(|s| {
        let slice = slices.range(back(me, s + 1, world));
        let (from, to) = (output(left, 0, slice.start), output(me, 0, slice.start));
        one(copy(slice.len(), from, to))
    });
    folds.chain(passes).collect()
}

fn all_gather(spec: &Spec, me: usize, counts: &Counts) -> Vec<Round> {
    let world = spec.world();
    let left = back(me, 1, world);
    let round = |s: usize| {
        let slot = back(me, s + 1, world);
        let to = output(me, slot, 0);
        if s > 0 {
            return one(copy(counts.of(slot), output(left, slot, 0), to));
        }
        let own = copy(counts.of(me), input(me, 0, 0), output(me, me, 0));
        let tasks = vec![own, copy(counts.of(slot), input(left, 0, 0), to)];
        Round { tasks }
    };
    (0..world - 1).map(round).collect()
}

/// As the first half of an all-reduce. Partial sums alternate between two slots of scratch memory: the right neighbour
/// is sent one while the next is folded into the other.
fn reduce_scatter(spec: &Spec, me: usize, counts: &Counts) -> (Vec<Round>, Vec<usize>) {
    let world = spec.world();
    let left = back(me, 1, world);
    let blocks = |rank: usize| spec.tree.blocks(rank).len();
    let first = spec.tree.parts(blocks(left) + blocks(me));
    let further = spec.tree.parts(1 + blocks(me));
    let slices =
        |rank: usize, slot| (0..blocks(rank)).map(move |block| slice(spec, rank, block, slot));
    let round = |s: usize| {
        let slot = back(me, s + 2, world);
        let (tree, mut inputs): (_, Vec<Spot>) = match s {
            0 => (&first, slices(left, slot).collect()),
            _ => (&further, vec![temp(left, (s - 1) % 2, 0)]),
        };
        let last = s == world - 2;
        let to = if last {
            output(me, 0, 0)
        } else {
            temp(me, s % 2, 0)
        };
        inputs.extend(slices(me, slot));
        one(fold(tree, counts.of(slot), inputs, last, to))
    };
    let slots = (world - 2).min(2);
    (
        (0..world - 1).map(round).collect(),
        vec![counts.longest(); slots],
    )
}

fn one(task: Task) -> Round {
    let tasks = vec![task];
    Round { tasks }
}
