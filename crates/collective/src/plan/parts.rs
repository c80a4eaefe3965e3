//! What all algorithms make their tasks of.

use std::ops::Range;
use std::sync::Arc;

use super::{Hosts, Place, Space, Spec, Spot, Task};
use crate::tree::{Step, Tree};

/// Whose places a task is made with. A rank looks at the tasks of all others for what they do with its own memory; made whole
/// they would take it a time that grows with the square of the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose {
    All,
    Rank(usize),
}

impl Whose {
    /// The same with hosts in the place of ranks.
    pub(super) fn host_of(self, hosts: &Hosts) -> Self {
        match self {
            Self::All => self,
            Self::Rank(rank) => Self::Rank(hosts.host(rank)),
        }
    }

    /// Of these ranks, those that count.
    pub(super) fn among(self, ranks: Range<usize>) -> Range<usize> {
        match self {
            Self::All => ranks,
            Self::Rank(rank) if ranks.contains(&rank) => rank..rank + 1,
            Self::Rank(_) => 0..0,
        }
    }
}

fn spot(rank: usize, space: Space, slot: usize, at: usize) -> Spot {
    let place = Place { space, slot, at };
    Spot { rank, place }
}

/// Element `at` of what a rank brings in `slot`.
pub(super) fn input(rank: usize, slot: usize, at: usize) -> Spot {
    spot(rank, Space::In, slot, at)
}

/// Where a reduce-scatter finds, in a block of a rank, the slice that rank `owner` gets.
pub(super) fn slice(spec: &Spec, rank: usize, block: usize, owner: usize) -> Spot {
    input(rank, block * spec.world() + owner, 0)
}

/// Element `at` of what a rank gets in `slot`.
pub(super) fn output(rank: usize, slot: usize, at: usize) -> Spot {
    spot(rank, Space::Out, slot, at)
}

/// Element `at` of a rank's scratch memory.
pub(super) fn temp(rank: usize, slot: usize, at: usize) -> Spot {
    spot(rank, Space::Temp, slot, at)
}

/// Copies elements from one place to another.
pub(super) fn copy(len: usize, from: Spot, to: Spot) -> Task {
    Task {
        len,
        inputs: vec![from],
        fold: None,
        last: false,
        outputs: vec![to],
    }
}

/// Folds `inputs` into one place; `last` where nothing is added to it any more.
pub(super) fn fold(tree: &Arc<Tree>, len: usize, inputs: Vec<Spot>, last: bool, to: Spot) -> Task {
    Task {
        len,
        inputs,
        fold: Some(tree.clone()),
        last,
        outputs: vec![to],
    }
}

/// Where a tree's program loads from, in its order, given where each rank's block lies.
pub(super) fn loads(tree: &Tree, whose: Whose, block: impl Fn(usize, usize) -> Spot) -> Vec<Spot> {
    // A program visits leaves from left to right.
    if let Whose::Rank(rank) = whose {
        let blocks = 0..tree.blocks(rank).len();
        return blocks.map(|index| block(rank, index)).collect();
    }
    let load = |step: &Step| match *step {
        Step::Load { rank, block: index } => Some(block(rank, index)),
        Step::Merge => None,
    };
    tree.program().iter().filter_map(load).collect()
}

/// Distances 1, 2, 4, ... below `world`.
pub(super) fn distances(world: usize) -> impl DoubleEndedIterator<Item = usize> {
    (0..world.next_power_of_two().ilog2()).map(|k| 1 << k)
}
