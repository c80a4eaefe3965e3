//! Direct exchange: every rank deals with every other one at once.
//!
//! Slices of a reduction are dealt evenly; their owner takes them from all ranks, folds them in tree order and gives the
//! result to all who want it. *Source*: reduce-scatter and all-gather by direct exchange, Chan et al., "Collective
//! communication: theory, practice, and experience", 2007.

use super::parts::{Whose, copy, input, loads, output, slice};
use super::{Counts, Kind, Partition, Pattern, Round, Spec, Spot, Task};

/// Folds elements `at..at + len` of all ranks' blocks.
fn fold(spec: &Spec, whose: Whose, at: usize, len: usize, outputs: Vec<Spot>) -> Task {
    Task {
        len,
        inputs: loads(&spec.tree, whose, |rank, block| input(rank, block, at)),
        fold: Some(spec.tree.clone()),
        last: true,
        outputs,
    }
}

/// One rank's only round.
pub(super) fn direct(spec: &Spec, me: usize, whose: Whose) -> Vec<Round> {
    let world = spec.world();
    let all = whose.among(0..world);
    let Pattern { kind, counts, root } = &spec.pattern;
    let len = counts.longest();
    let reduced = |outputs: &dyn Fn(usize) -> Vec<Spot>| {
        let slice = Partition::even(len, world, spec.line).range(me);
        let outputs = outputs(slice.start);
        vec![fold(spec, whose, slice.start, slice.len(), outputs)]
    };
    let tasks = match kind {
        Kind::Barrier => return Vec::new(),
        Kind::AllReduce => reduced(&|at| all.clone().map(|rank| output(rank, 0, at)).collect()),
        Kind::Reduce => reduced(&|at| vec![output(*root, 0, at)]),
        Kind::ReduceScatter => {
            vec![Task {
                len: counts.of(me),
                inputs: loads(&spec.tree, whose, |rank, block| {
                    slice(spec, rank, block, me)
                }),
                fold: Some(spec.tree.clone()),
                last: true,
                outputs: vec![output(me, 0, 0)],
            }]
        }
        Kind::Broadcast if me == *root => Vec::new(),
        Kind::Gather if me != *root => Vec::new(),
        Kind::Broadcast => vec![copy(len, input(*root, 0, 0), output(me, 0, 0))],
        Kind::AllGather | Kind::Gather => all
            .map(|from| copy(counts.of(from), input(from, 0, 0), output(me, from, 0)))
            .collect(),
        Kind::Scatter => vec![copy(counts.of(me), input(*root, me, 0), output(me, 0, 0))],
        Kind::AllToAll => all
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
pub(super) fn one_shot(spec: &Spec, me: usize, whose: Whose) -> Vec<Round> {
    let Pattern { kind, counts, root } = &spec.pattern;
    let whole = || fold(spec, whose, 0, counts.longest(), vec![output(me, 0, 0)]);
    let tasks = match kind {
        Kind::Reduce if *root != me => Vec::new(),
        Kind::AllReduce | Kind::Reduce => vec![whole()],
        _ => return direct(spec, me, whose),
    };
    vec![Round { tasks }]
}
