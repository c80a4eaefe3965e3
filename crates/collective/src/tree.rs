//! The fixed binary tree that decides in which order leaves are added, whatever the number of ranks.

use std::ops::Range;
use std::sync::Arc;

use crate::plan::PlanError;

/// Most leaves that a tree may have; bounds every table made from one.
pub const LEAVES_MAX: usize = 1 << 16;

/// One instruction of the program that folds all ranks' blocks: a postfix walk over the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Push block number `block` of rank `rank`.
    Load {
        /// Who brings it.
        rank: usize,
        /// Its number among that rank's [blocks](Tree::blocks).
        block: usize,
    },
    /// Replace the two top entries by their combination, the lower entry on the left.
    Merge,
}

/// The fixed binary tree over a number of leaves, and which rank owns which leaves.
///
/// A node over `n > 1` leaves gives the largest power of two below `n` to its left child and the rest to its right
/// one. Every node therefore covers an aligned block `k * 2^j .. min((k + 1) * 2^j, leaves)`. The shape depends on
/// the number of leaves only. Ranks own contiguous ranges of leaves; each rank merges what lies wholly in its own
/// range and hands on the partial results (its [blocks](Self::blocks)), and the collective continues the same tree.
///
/// *Numerics*: a sum over this tree has the same bytes for any number of ranks, because additions happen in the same
/// pairs. Its rounding error grows with `log2(leaves)` where a running sum's grows with `leaves`.
///
/// # Example
///
/// ```
/// use paceline_collective::Tree;
///
/// let tree = Tree::split(8, 3).unwrap(); // ranks own 0..3, 3..6 and 6..8
/// assert_eq!(tree.blocks(0), [0..2, 2..3]);
/// assert_eq!(tree.blocks(1), [3..4, 4..6]);
/// assert_eq!(tree.blocks(2), [6..8]);
/// ```
#[derive(Debug, PartialEq, Eq)]
pub struct Tree {
    leaves: usize,
    ranks: Vec<Share>,
    program: Vec<Step>,
    depth: usize,
}

/// One rank's part of the tree.
#[derive(Debug, PartialEq, Eq)]
struct Share {
    range: Range<usize>,
    blocks: Vec<Range<usize>>,
    merges: Vec<usize>,
    depth: usize,
}

impl Tree {
    /// One leaf for each rank: the order of an ordinary all-reduce.
    ///
    /// # Panics
    ///
    /// When `world` is 0 or above [`LEAVES_MAX`]; the world size of a group never is.
    pub fn per_rank(world: usize) -> Arc<Self> {
        Self::split(world, world).expect("a world has between 1 and LEAVES_MAX ranks")
    }

    /// The tree over `leaves` leaves, dealt to `world` ranks in contiguous ranges; the first `leaves % world` ranks
    /// own one leaf more than the others.
    ///
    /// *Errors*: no ranks, fewer leaves than ranks, or more than [`LEAVES_MAX`] leaves.
    pub fn split(leaves: usize, world: usize) -> Result<Arc<Self>, PlanError> {
        if world == 0 || leaves < world || leaves > LEAVES_MAX {
            return Err(PlanError::Leaves { leaves, world });
        }
        let ranges = (0..world).map(|rank| deal(leaves, world, rank));
        Ok(Self::over(leaves, ranges))
    }

    /// The tree over `leaves` leaves whose owners have the given ranges: neighbours, none empty, together all leaves.
    pub(crate) fn over(leaves: usize, ranges: impl Iterator<Item = Range<usize>>) -> Arc<Self> {
        let ranks: Vec<Share> = ranges.map(|range| Share::new(leaves, range)).collect();
        let program = program(&(0..leaves), &ranks);
        Self::with(leaves, ranks, program)
    }

    /// The part of the tree below `node`, for a partial result: it has a program, with the loads of this tree, but no
    /// ranks. It still counts all leaves of this tree.
    pub(crate) fn below(&self, node: &Range<usize>) -> Arc<Self> {
        let program = program(node, &self.ranks);
        Self::with(self.leaves, Vec::new(), program)
    }

    /// Combines that many partial results of this tree, as if each were a leaf of its own: a program without ranks. It
    /// still counts all leaves of this tree.
    pub(crate) fn parts(&self, count: usize) -> Arc<Self> {
        let shares: Vec<Share> = (0..count)
            .map(|part| Share::new(count, part..part + 1))
            .collect();
        Self::with(self.leaves, Vec::new(), program(&(0..count), &shares))
    }

    fn with(leaves: usize, ranks: Vec<Share>, program: Vec<Step>) -> Arc<Self> {
        let depth = deepest(&program);
        Arc::new(Self {
            leaves,
            ranks,
            program,
            depth,
        })
    }

    /// Whether the ranks' blocks combine as single leaves of as many ranks would.
    pub(crate) fn is_plain(&self) -> bool {
        self.leaves == self.world() || self.program == self.parts(self.world()).program
    }

    /// Number of leaves.
    pub fn leaves(&self) -> usize {
        self.leaves
    }

    /// Number of ranks that share the leaves.
    pub fn world(&self) -> usize {
        self.ranks.len()
    }

    /// The leaves that `rank` owns.
    ///
    /// # Panics
    ///
    /// When `rank` is not below [`world`](Self::world), as in all methods that take a rank.
    pub fn range(&self, rank: usize) -> Range<usize> {
        self.ranks[rank].range.clone()
    }

    /// The largest nodes that lie wholly in the rank's range, left to right: what it hands to the collective.
    pub fn blocks(&self, rank: usize) -> &[Range<usize>] {
        &self.ranks[rank].blocks
    }

    /// How often the two top entries of the rank's stack merge after `leaf` was pushed.
    ///
    /// A rank pushes its leaves from left to right; after the last one the stack equals its [blocks](Self::blocks).
    ///
    /// # Panics
    ///
    /// When `leaf` is not in the rank's range.
    pub fn merges_after(&self, rank: usize, leaf: usize) -> usize {
        let share = &self.ranks[rank];
        assert!(
            share.range.contains(&leaf),
            "leaf {leaf} is not in {:?}, the range of rank {rank}",
            share.range
        );
        share.merges[leaf - share.range.start]
    }

    /// Highest number of entries on the rank's stack, counting the leaf just pushed.
    pub fn stack_depth(&self, rank: usize) -> usize {
        self.ranks[rank].depth
    }

    /// The postfix program that folds all ranks' blocks, for callers that add them outside of the collective.
    pub fn program(&self) -> &[Step] {
        &self.program
    }

    /// Highest number of entries on the stack while the program runs.
    pub(crate) fn program_depth(&self) -> usize {
        self.depth
    }
}

impl Share {
    fn new(leaves: usize, range: Range<usize>) -> Self {
        let mut blocks = Vec::new();
        cover(&(0..leaves), &range, &mut blocks);
        let mut merges = Vec::with_capacity(range.len());
        for block in &blocks {
            count_merges(block, &mut merges);
        }
        let (mut entries, mut depth) = (0_usize, 0_usize);
        for merge in &merges {
            entries += 1;
            depth = depth.max(entries);
            entries -= merge;
        }
        Self {
            range,
            blocks,
            merges,
            depth,
        }
    }
}

/// The contiguous range of `total` things that part `index` of `parts` gets; the first ones get one more.
pub(crate) fn deal(total: usize, parts: usize, index: usize) -> Range<usize> {
    let (each, more) = (total / parts, total % parts);
    let start = index * each + index.min(more);
    start..start + each + usize::from(index < more)
}

/// Both children of a node of more than one leaf.
fn children(node: &Range<usize>) -> (Range<usize>, Range<usize>) {
    let left = node.len().next_power_of_two() / 2;
    (node.start..node.start + left, node.start + left..node.end)
}

fn cover(node: &Range<usize>, range: &Range<usize>, blocks: &mut Vec<Range<usize>>) {
    if node.start >= range.end || node.end <= range.start {
        return;
    }
    if range.start <= node.start && node.end <= range.end {
        blocks.push(node.clone());
        return;
    }
    let (left, right) = children(node);
    cover(&left, range, blocks);
    cover(&right, range, blocks);
}

/// Appends one count for each leaf below `node`: how many nodes are complete once that leaf is in.
fn count_merges(node: &Range<usize>, merges: &mut Vec<usize>) {
    if node.len() == 1 {
        merges.push(0);
        return;
    }
    let (left, right) = children(node);
    count_merges(&left, merges);
    count_merges(&right, merges);
    *merges
        .last_mut()
        .expect("the right child pushed at least one leaf") += 1;
}

fn program(node: &Range<usize>, ranks: &[Share]) -> Vec<Step> {
    let mut program = Vec::new();
    walk(node, ranks, &mut 0, &mut program);
    program
}

/// Appends the program of `node`. `owner` is the lowest rank that may own its first leaf: leaves are visited in order.
fn walk(node: &Range<usize>, ranks: &[Share], owner: &mut usize, program: &mut Vec<Step>) {
    while ranks[*owner].range.end <= node.start {
        *owner += 1;
    }
    let share = &ranks[*owner];
    if node.end <= share.range.end {
        let block = share
            .blocks
            .partition_point(|block| block.start < node.start);
        program.push(Step::Load {
            rank: *owner,
            block,
        });
        return;
    }
    let (left, right) = children(node);
    walk(&left, ranks, owner, program);
    walk(&right, ranks, owner, program);
    program.push(Step::Merge);
}

fn deepest(program: &[Step]) -> usize {
    let (mut entries, mut depth) = (0, 0);
    for step in program {
        match step {
            Step::Load { .. } => entries += 1,
            Step::Merge => entries -= 1,
        }
        depth = depth.max(entries);
    }
    depth
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tree as a string, straight from the definition.
    fn expected(node: Range<usize>) -> String {
        if node.len() == 1 {
            return node.start.to_string();
        }
        let mut left = 1;
        while left * 2 < node.len() {
            left *= 2;
        }
        let middle = node.start + left;
        format!(
            "({}+{})",
            expected(node.start..middle),
            expected(middle..node.end)
        )
    }

    /// Runs both halves, each rank's stack and then the program, on strings instead of numbers.
    fn folded(tree: &Tree) -> String {
        let mut blocks = Vec::new();
        for rank in 0..tree.world() {
            let mut stack: Vec<String> = Vec::new();
            let mut highest = 0;
            for leaf in tree.range(rank) {
                stack.push(leaf.to_string());
                highest = highest.max(stack.len());
                for _ in 0..tree.merges_after(rank, leaf) {
                    merge(&mut stack);
                }
            }
            assert_eq!(stack.len(), tree.blocks(rank).len());
            assert_eq!(highest, tree.stack_depth(rank));
            blocks.push(stack);
        }
        let mut stack = Vec::new();
        for step in tree.program() {
            match *step {
                Step::Load { rank, block } => stack.push(blocks[rank][block].clone()),
                Step::Merge => merge(&mut stack),
            }
            assert!(stack.len() <= tree.program_depth());
        }
        assert_eq!(stack.len(), 1);
        stack.remove(0)
    }

    fn merge(stack: &mut Vec<String>) {
        let right = stack.pop().unwrap();
        let left = stack.pop().unwrap();
        stack.push(format!("({left}+{right})"));
    }

    #[test]
    fn every_world_folds_the_same_tree() {
        for leaves in 1..=40 {
            for world in 1..=leaves {
                let tree = Tree::split(leaves, world).unwrap();
                assert_eq!(
                    folded(&tree),
                    expected(0..leaves),
                    "{leaves} leaves on {world} ranks"
                );
            }
        }
    }

    #[test]
    fn blocks_cover_each_range_and_are_aligned() {
        for leaves in 1..=70 {
            for world in 1..=leaves {
                let tree = Tree::split(leaves, world).unwrap();
                let mut next = 0;
                for rank in 0..world {
                    assert_eq!(tree.range(rank).start, next);
                    for block in tree.blocks(rank) {
                        assert_eq!(block.start, next);
                        assert!(is_node(block, leaves), "{block:?} of {leaves}");
                        next = block.end;
                    }
                    assert_eq!(tree.range(rank).end, next);
                }
                assert_eq!(next, leaves);
            }
        }
    }

    /// `k * 2^j .. min((k + 1) * 2^j, leaves)` for some j and k.
    fn is_node(block: &Range<usize>, leaves: usize) -> bool {
        (0..=7).any(|j| {
            let k = block.start >> j;
            block.start == k << j && block.end == ((k + 1) << j).min(leaves)
        })
    }

    #[test]
    fn a_binary_counter_needs_a_logarithmic_stack() {
        let tree = Tree::split(1024, 1).unwrap();
        assert_eq!(tree.stack_depth(0), 11);
        assert_eq!(tree.blocks(0).len(), 1);
    }

    #[test]
    fn the_first_ranks_own_the_remainder() {
        let tree = Tree::split(10, 4).unwrap();
        let ranges: Vec<_> = (0..4).map(|rank| tree.range(rank)).collect();
        assert_eq!(ranges, [0..3, 3..6, 6..8, 8..10]);
    }

    #[test]
    fn owners_of_any_ranges_fold_the_same_tree() {
        for leaves in 3..=24 {
            for first in 1..leaves - 1 {
                for second in first + 1..leaves {
                    let ranges = [0..first, first..second, second..leaves];
                    let tree = Tree::over(leaves, ranges.into_iter());
                    assert_eq!(folded(&tree), expected(0..leaves), "{first}, {second}");
                }
            }
        }
    }

    /// Hosts own the ranges of their ranks: each folds its nodes, then the tree over hosts folds what they hand on.
    #[test]
    fn partial_results_of_hosts_continue_the_same_tree() {
        for (leaves, world) in [(5, 5), (8, 8), (11, 6), (24, 7), (13, 13)] {
            let tree = Tree::split(leaves, world).unwrap();
            let named = |rank: usize, block: usize| expected(tree.blocks(rank)[block].clone());
            for middle in 1..world {
                let cut = tree.range(middle).start;
                let hosts = Tree::over(leaves, [0..cut, cut..leaves].into_iter());
                let handed =
                    |host: usize, block: usize| run(&tree.below(&hosts.blocks(host)[block]), named);
                assert_eq!(run(&hosts, handed), expected(0..leaves), "cut at {middle}");
            }
        }
    }

    /// Runs a tree's program on the names of its inputs.
    fn run(tree: &Tree, name: impl Fn(usize, usize) -> String) -> String {
        let mut stack = Vec::new();
        for step in tree.program() {
            match *step {
                Step::Load { rank, block } => stack.push(name(rank, block)),
                Step::Merge => merge(&mut stack),
            }
        }
        assert_eq!(stack.len(), 1);
        stack.remove(0)
    }

    #[test]
    fn parts_count_the_leaves_of_their_tree() {
        let parts = Tree::split(9, 4).unwrap().parts(3);
        assert_eq!(parts.leaves(), 9);
        let names = run(&parts, |rank, block| format!("{rank}.{block}"));
        assert_eq!(names, "((0.0+1.0)+2.0)");
    }

    #[test]
    fn a_tree_is_plain_when_its_ranks_could_be_leaves() {
        for (leaves, world, plain) in [
            (4, 4, true),
            (8, 4, true),
            (7, 4, true),
            (5, 4, false),
            (12, 4, false),
            (6, 3, true),
            (9, 1, true),
        ] {
            let tree = Tree::split(leaves, world).unwrap();
            assert_eq!(tree.is_plain(), plain, "{leaves} leaves on {world} ranks");
        }
    }

    #[test]
    fn impossible_trees_are_refused() {
        for (leaves, world) in [(0, 0), (3, 0), (2, 3), (LEAVES_MAX + 1, 1)] {
            assert_eq!(
                Tree::split(leaves, world).unwrap_err(),
                PlanError::Leaves { leaves, world }
            );
        }
    }
}
