//! A sum whose additions happen in the order of a tree: who sends what to whom, and which additions follow.

use crate::call::TreeSum;

/// Why a sum cannot work on this rank.
pub(crate) fn wrong(sum: &TreeSum, (rank, world): (usize, usize), bytes: usize) -> Option<String> {
    if sum.tree.world() != world {
        let other = sum.tree.world();
        return Some(format!("the tree is for {other} ranks, not {world}"));
    }
    if sum.stride < sum.len {
        return Some(format!(
            "blocks of {} numbers cannot be {} apart",
            sum.len, sum.stride
        ));
    }
    let blocks = sum.tree.blocks(rank).len();
    let needed = sum
        .stride
        .checked_mul(blocks - 1)
        .and_then(|before| before.checked_add(sum.len))
        .and_then(|singles| singles.checked_mul(size_of::<f32>()));
    match needed {
        Some(needed) if needed <= bytes => None,
        _ => Some(format!(
            "{bytes} bytes have no room for {blocks} blocks of {} numbers, {} apart",
            sum.len, sum.stride
        )),
    }
}
