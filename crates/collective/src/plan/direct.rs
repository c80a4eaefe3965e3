//! Direct exchange: every rank deals with every other one at once.
//!
//! Slices of a reduction are dealt evenly; their owner takes them from all ranks, folds them in tree order and gives the
//! result to all who want it. *Source*: reduce-scatter and all-gather by direct exchange, Chan et al., "Collective
//! communication: theory, practice, and experience", 2007.

use super::parts::{copy, input, loads, output, slice};
use super::{Counts, Partition, Pattern, Round, Spec, Spot, Task};

/// Folds elements `at..at + len` of all ranks' blocks.
fn fold(spec: &Spec, at: usize, len: usize, outputs: Vec<Spot>) -> Task {
    Task {
        len,
        inputs: loads(&spec.tree, |rank, block| input(rank, block, at)),
        fold: Some(spec.tree.clone()),
        last: true,
        outputs,
    }
}

/// One rank's only round.
pub(super) fn direct(spec: &Spec, me: usize) -> Vec<Round> {
    let world = spec.world();
    let all = 0..world;
    let tasks = match &spec.pattern {
        Pattern::Barrier => return Vec::new(),
        Pattern::AllReduce { len } => {
            let slice = Partition::even(*len, world, spec.line).range(me);
            let outputs = all.map(|rank| output(rank, 0, slice.start)).collect();
            vec![fold(spec, slice.start, slice.len(), outputs)]
        }
        Pattern::Reduce { len, root } => {
            let slice = Partition::even(*len, world, spec.line).range(me);
            let outputs = vec![output(*root, 0, slice.start)];
            vec![fold(spec, slice.start, slice.len(), outputs)]
        }
        Pattern::ReduceScatter { counts } => {
            vec![Task {
                len: counts.of(me),
                inputs: loads(&spec.tree, |rank, block| slice(spec, rank, block, me)),
                fold: Some(spec.tree.clone()),
                last: true,
                outputs: vec![output(me, 0, 0)],
            }]
        }
        Pattern::Broadcast { root, .. } if me == *root => Vec::new(),
        Pattern::Broadcast { len, root } => {
            vec![copy(*len, input(*root, 0, 0), output(me, 0, 0))]
        }
        Pattern::AllGather { counts } => all
            .map(|from| copy(counts.of(from), input(from, 0, 0), output(me, from, 0)))
            .collect(),
        Pattern::Gather { root, .. } if me != *root => Vec::new(),
        Pattern::Gather { counts, .. } => all
            .map(|from| copy(counts.of(from), input(from, 0, 0), output(me, from, 0)))
            .collect(),
        Pattern::Scatter { counts, root } => {
            vec![copy(counts.of(me), input(*root, me, 0), output(me, 0, 0))]
        }
        Pattern::AllToAll { counts } => all
            .map(|from| {
                let len = match counts {
                    Counts::Same(each) => *each,
                    Counts::Each(counts) => counts[from * world + me],
                };
                copy(len, input(from, me, 0), output(me, from, 0))
            })
            .collect(),
    };
    vec![Round { tasks }]
}

/// As [`direct`], but every rank folds all elements of an all-reduce by itself: one message instead of two, and more bytes.
pub(super) fn one_shot(spec: &Spec, me: usize) -> Vec<Round> {
    let tasks = match spec.pattern {
        Pattern::AllReduce { len } => vec![fold(spec, 0, len, vec![output(me, 0, 0)])],
        Pattern::Reduce { root, .. } if root != me => Vec::new(),
        Pattern::Reduce { len, .. } => vec![fold(spec, 0, len, vec![output(me, 0, 0)])],
        _ => return direct(spec, me),
    };
    vec![Round { tasks }]
}
