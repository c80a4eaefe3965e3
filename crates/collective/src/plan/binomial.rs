//! Binomial trees: pairs of ranks, then pairs of pairs.
//!
//! The nearest ranks fold first, so each partial sum is a node of the fixed tree, for any number of ranks.
//!
//! *Source*: Chan et al., "Collective communication: theory, practice, and experience", 2007.

use super::parts::{copy, distances, fold, input, output};
use super::{Kind, Pattern, Round, Spec};

/// One rank's rounds, of patterns that follow a binomial tree.
pub(super) fn tree(spec: &Spec, me: usize) -> Vec<Round> {
    let Pattern { kind, counts, root } = &spec.pattern;
    let (len, root) = (counts.longest(), *root);
    match kind {
        Kind::AllReduce => {
            let mut rounds = reduce(spec, me, len, root);
            rounds.extend(broadcast(spec, me, len, root));
            rounds
        }
        Kind::Reduce => reduce(spec, me, len, root),
        Kind::Broadcast => broadcast(spec, me, len, root),
        _ => unreachable!("`fit` lets only three patterns follow a tree"),
    }
}

/// A node's sum is kept by its lowest rank, or by the root where that is below it: then no step is needed to hand the
/// result to the root.
fn reduce(spec: &Spec, me: usize, len: usize, root: usize) -> Vec<Round> {
    let world = spec.world();
    let pair = spec.tree.parts(2);
    let keeper = |first: usize, size: usize| {
        if (first..first + size).contains(&root) {
            root
        } else {
            first
        }
    };
    let round = |distance: usize| {
        let left = me & !(2 * distance - 1);
        let right = left + distance;
        if right >= world || keeper(left, 2 * distance) != me {
            return Round::default();
        }
        let inputs = [left, right].map(|first| output(keeper(first, distance), 0, 0));
        let last = 2 * distance >= world;
        let tasks = vec![fold(&pair, len, inputs.into(), last, output(me, 0, 0))];
        Round { tasks }
    };
    distances(world).map(round).collect()
}

/// The farthest ranks first, counted from the root: then the fewest copies leave the root's host.
fn broadcast(spec: &Spec, me: usize, len: usize, root: usize) -> Vec<Round> {
    let world = spec.world();
    let place = (me + world - root) % world;
    let round = |distance: usize| {
        if place % (2 * distance) != distance {
            return Round::default();
        }
        let from = (me + world - distance) % world;
        let tasks = vec![copy(len, input(from, 0, 0), output(me, 0, 0))];
        Round { tasks }
    };
    distances(world).rev().map(round).collect()
}
