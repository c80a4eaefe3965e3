//! What an operation does, as data: who folds which elements, and who hands which elements to all.

use std::ops::Range;

use crate::tree::deal;

/// Boundaries of the slices of an even partition fall on multiples of this, so that no two ranks store to one line.
///
/// *Units*: bytes.
const LINE_BYTES: usize = 64;

/// Gives each rank a range of the elements `0..len`: contiguous, ascending in rank order, possibly empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Partition {
    /// `world + 1` ascending bounds, from 0 to the length.
    bounds: Vec<usize>,
}

impl Partition {
    /// Slices that differ by at most one cache line.
    pub(crate) fn even(len: usize, world: usize, element_bytes: usize) -> Self {
        let line = LINE_BYTES / element_bytes;
        let lines = len.div_ceil(line);
        let mut bounds = vec![0];
        bounds.extend((0..world).map(|rank| (deal(lines, world, rank).end * line).min(len)));
        Self { bounds }
    }

    /// `each` elements for every rank.
    pub(crate) fn equal(each: usize, world: usize) -> Self {
        Self {
            bounds: (0..=world).map(|rank| rank * each).collect(),
        }
    }

    /// All elements for one rank.
    pub(crate) fn whole(len: usize, world: usize, owner: usize) -> Self {
        Self {
            bounds: (0..=world)
                .map(|rank| if rank > owner { len } else { 0 })
                .collect(),
        }
    }

    /// The rank's elements.
    pub(crate) fn range(&self, rank: usize) -> Range<usize> {
        self.bounds[rank]..self.bounds[rank + 1]
    }

    pub(crate) fn world(&self) -> usize {
        self.bounds.len() - 1
    }
}

/// What an operation does with the elements `0..len` of every rank's buffer.
///
/// First each rank folds its slice of `reduce` over all ranks' blocks, in tree order. Then each rank's slice of
/// `gather` is copied to all ranks. Engines execute plans; they do not know operations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) reduce: Option<Partition>,
    pub(crate) gather: Option<Partition>,
}

impl Plan {
    /// Fold even slices, then hand them out: `2 (W-1)/W` of the buffer out of and into every rank, in two steps.
    pub(crate) fn all_reduce(len: usize, world: usize, element_bytes: usize) -> Self {
        let even = Partition::even(len, world, element_bytes);
        Self {
            reduce: Some(even.clone()),
            gather: Some(even),
        }
    }

    /// Fold equal slices; rank `r`'s result stays at `r * each`.
    pub(crate) fn reduce_scatter(each: usize, world: usize) -> Self {
        Self {
            reduce: Some(Partition::equal(each, world)),
            gather: None,
        }
    }

    /// Hand out equal slices.
    pub(crate) fn all_gather(each: usize, world: usize) -> Self {
        Self {
            reduce: None,
            gather: Some(Partition::equal(each, world)),
        }
    }

    /// Hand out everything the root has.
    pub(crate) fn broadcast(len: usize, world: usize, root: usize) -> Self {
        Self {
            reduce: None,
            gather: Some(Partition::whole(len, world, root)),
        }
    }

    /// Only the meeting of all ranks that every operation begins with.
    pub(crate) fn barrier() -> Self {
        Self {
            reduce: None,
            gather: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{Step, Tree};

    const LENGTHS: [usize; 9] = [0, 1, 3, 7, 15, 16, 17, 64, 1009];

    /// Executes a plan on whole numbers: buffers[rank][block][element]; the result is each rank's first block.
    fn simulate(plan: &Plan, tree: &Tree, buffers: &[Vec<Vec<i64>>]) -> Vec<Vec<i64>> {
        let world = buffers.len();
        let mut results: Vec<Vec<i64>> = buffers.iter().map(|blocks| blocks[0].clone()).collect();
        if let Some(slices) = &plan.reduce {
            for (owner, result) in results.iter_mut().enumerate() {
                for element in slices.range(owner) {
                    let mut stack = Vec::new();
                    for step in tree.program() {
                        match *step {
                            Step::Load { rank, block } => stack.push(buffers[rank][block][element]),
                            Step::Merge => {
                                let right = stack.pop().unwrap();
                                *stack.last_mut().unwrap() += right;
                            }
                        }
                    }
                    result[element] = stack[0];
                }
            }
        }
        if let Some(slices) = &plan.gather {
            for owner in 0..world {
                for element in slices.range(owner) {
                    let value = results[owner][element];
                    results
                        .iter_mut()
                        .for_each(|result| result[element] = value);
                }
            }
        }
        results
    }

    fn inputs(tree: &Tree, len: usize) -> Vec<Vec<Vec<i64>>> {
        let value = |rank: usize, block: usize, element: usize| {
            (rank * 31 + block * 7 + element * 1000 + 1) as i64
        };
        (0..tree.world())
            .map(|rank| {
                let blocks = 0..tree.blocks(rank).len();
                blocks
                    .map(|block| {
                        (0..len)
                            .map(|element| value(rank, block, element))
                            .collect()
                    })
                    .collect()
            })
            .collect()
    }

    #[test]
    fn all_reduce_gives_every_rank_every_sum() {
        for world in 1..=64 {
            for leaves in [world, world + 1, 64] {
                for len in LENGTHS {
                    let tree = Tree::split(leaves, world).unwrap();
                    let buffers = inputs(&tree, len);
                    let sums: Vec<i64> = (0..len)
                        .map(|i| buffers.iter().flatten().map(|block| block[i]).sum())
                        .collect();
                    for result in simulate(&Plan::all_reduce(len, world, 4), &tree, &buffers) {
                        assert_eq!(
                            result, sums,
                            "{len} elements, {world} ranks, {leaves} leaves"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn reduce_scatter_gives_each_rank_its_slice() {
        for world in 1..=64 {
            for each in [0, 1, 7, 16] {
                let tree = Tree::per_rank(world);
                let buffers = inputs(&tree, each * world);
                let results = simulate(&Plan::reduce_scatter(each, world), &tree, &buffers);
                for (rank, result) in results.iter().enumerate() {
                    for i in rank * each..(rank + 1) * each {
                        assert_eq!(
                            result[i],
                            buffers.iter().map(|blocks| blocks[0][i]).sum::<i64>()
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn all_gather_and_broadcast_copy_the_owners_elements() {
        for world in 1..=64 {
            let tree = Tree::per_rank(world);
            for each in [0, 1, 7] {
                let buffers = inputs(&tree, each * world);
                for result in simulate(&Plan::all_gather(each, world), &tree, &buffers) {
                    for (i, value) in result.iter().enumerate() {
                        assert_eq!(*value, buffers[i / each][0][i]);
                    }
                }
            }
            for root in [0, world / 2, world - 1] {
                let buffers = inputs(&tree, 9);
                for result in simulate(&Plan::broadcast(9, world, root), &tree, &buffers) {
                    assert_eq!(result, buffers[root][0]);
                }
            }
        }
    }

    #[test]
    fn a_barrier_touches_nothing() {
        let tree = Tree::per_rank(3);
        let buffers = inputs(&tree, 4);
        let results = simulate(&Plan::barrier(), &tree, &buffers);
        assert_eq!(
            results,
            buffers
                .into_iter()
                .map(|mut blocks| blocks.remove(0))
                .collect::<Vec<_>>()
        );
    }

    #[test]
    fn even_slices_cover_everything_and_never_share_a_line() {
        for world in 1..=64 {
            for len in LENGTHS {
                for bytes in [4, 8] {
                    let partition = Partition::even(len, world, bytes);
                    let mut next = 0;
                    for rank in 0..world {
                        let range = partition.range(rank);
                        assert_eq!(range.start, next);
                        assert!(
                            range.is_empty() || (range.start * bytes).is_multiple_of(LINE_BYTES)
                        );
                        next = range.end;
                    }
                    assert_eq!((next, partition.world()), (len, world));
                }
            }
        }
    }
}
