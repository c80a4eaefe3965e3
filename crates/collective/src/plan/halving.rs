//! Recursive halving and doubling: `log2 W` rounds in which pairs of ranks exchange what they have.
//!
//! The nearest ranks fold first, so that partial sums are those of the fixed tree: after `k` rounds a rank holds sums over
//! an aligned block of `2^k` ranks, and the lower block is the left operand of the next one.
//!
//! *Source*: Rabenseifner, "Optimization of collective reduction operations", 2004, with the distances in reverse; the
//! all-gather for any number of ranks: Bruck et al., "Efficient algorithms for all-to-all communications in multiport
//! message-passing systems", 1997.

use std::ops::Range;

use super::parts::{copy, distances, fold, input, output, temp};
use super::{Counts, Partition, Pattern, Round, Spec};

/// One rank's rounds, and the elements of its `Temp` slots; of patterns that halve or double.
pub(super) fn halving_doubling(spec: &Spec, me: usize) -> (Vec<Round>, Vec<usize>) {
    match &spec.pattern {
        Pattern::AllReduce { len } => (all_reduce(spec, me, *len), Vec::new()),
        Pattern::AllGather { counts } => (all_gather(spec, me, counts), Vec::new()),
        Pattern::ReduceScatter { counts } => reduce_scatter(spec, me, counts),
        _ => unreachable!("`fit` lets only three patterns halve or double"),
    }
}

/// What a rank still holds once it has halved at all distances below `end`.
fn kept(spec: &Spec, rank: usize, len: usize, end: usize) -> Range<usize> {
    distances(end).fold(0..len, |range, distance| {
        let halves = Partition::even(range.len(), 2, spec.line);
        let half = halves.range(usize::from(rank & distance != 0));
        range.start + half.start..range.start + half.end
    })
}

fn all_reduce(spec: &Spec, me: usize, len: usize) -> Vec<Round> {
    let world = spec.world();
    let pair = spec.tree.parts(2);
    let halve = |distance: usize| {
        let half = kept(spec, me, len, 2 * distance);
        let lower = me & !distance;
        let inputs = [lower, lower | distance].map(|rank| output(rank, 0, half.start));
        let last = 2 * distance == world;
        let to = output(me, 0, half.start);
        let tasks = vec![fold(&pair, half.len(), inputs.into(), last, to)];
        Round { tasks }
    };
    let double = |distance: usize| {
        let partner = me ^ distance;
        let half = kept(spec, partner, len, 2 * distance);
        let (from, to) = (output(partner, 0, half.start), output(me, 0, half.start));
        let tasks = vec![copy(half.len(), from, to)];
        Round { tasks }
    };
    let halves = distances(world).map(halve);
    halves.chain(distances(world).rev().map(double)).collect()
}

/// Round `k` takes what the rank `2^k` further on has got so far: the slots of the next `2^k` ranks.
fn all_gather(spec: &Spec, me: usize, counts: &Counts) -> Vec<Round> {
    let world = spec.world();
    let round = |distance: usize| {
        let partner = (me + distance) % world;
        let mut tasks = Vec::new();
        if distance == 1 {
            tasks.push(copy(counts.of(me), input(me, 0, 0), output(me, me, 0)));
        }
        for i in distance..(2 * distance).min(world) {
            let slot = (me + i) % world;
            let from = match distance {
                1 => input(partner, 0, 0),
                _ => output(partner, slot, 0),
            };
            tasks.push(copy(counts.of(slot), from, output(me, slot, 0)));
        }
        Round { tasks }
    };
    distances(world).map(round).collect()
}

/// A rank keeps the slots whose number agrees with its own in the bits of all distances so far, and at last its own one.
fn reduce_scatter(spec: &Spec, me: usize, counts: &Counts) -> (Vec<Round>, Vec<usize>) {
    let world = spec.world();
    let pair = spec.tree.parts(2);
    let round = |distance: usize| {
        let lower = me & !distance;
        let last = 2 * distance == world;
        let task = |slot: usize| {
            let inputs = [lower, lower | distance].map(|rank| match distance {
                1 => input(rank, slot, 0),
                _ => temp(rank, slot, 0),
            });
            let to = if last {
                output(me, 0, 0)
            } else {
                temp(me, slot, 0)
            };
            fold(&pair, counts.of(slot), inputs.into(), last, to)
        };
        let slots = (0..world).filter(|slot| (slot ^ me) & (2 * distance - 1) == 0);
        let tasks = slots.map(task).collect();
        Round { tasks }
    };
    let scratch = |slot: usize| {
        if world > 2 && (slot ^ me) & 1 == 0 {
            counts.of(slot)
        } else {
            0
        }
    };
    let temp = (0..world).map(scratch).collect();
    (distances(world).map(round).collect(), temp)
}
