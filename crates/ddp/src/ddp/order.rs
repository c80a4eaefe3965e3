//! The order in which gradients become ready, learnt from the first step.
//!
//! Buckets leave strictly in order, so a parameter that is used early in the forward pass must not share a bucket with one that
//! is used late. Before the first step the order of registration stands for that of use. In the first forward pass of shard 0
//! each parameter notes its first use, and all ranks then take rank 0's order for hooks and buckets. Parameters without a use
//! come last, because their buckets are complete only when the backward pass ends.
//!
//! *Source*: PyTorch's reducer, which rebuilds its buckets after the first step.

use std::sync::Arc;

use super::{Ddp, sharding};
use crate::buffer::Entry;
use crate::error::DdpError;

impl Ddp {
    /// Ends the first step: rebuilds the buckets if the order differs. Sums are added element by element, so no bits change.
    ///
    /// *Blocks*: until all ranks have come.
    pub(super) fn learn_order(&mut self) -> Result<(), DdpError> {
        let Some(uses) = self.uses.take() else {
            return Ok(());
        };
        // The state of a sharded optimizer is dealt by the buckets, and would have to travel. The parts of a model end a step together,
        // and what the replicas of one part do after that could leave it a step behind the others if a rank is lost then.
        if self.shares.is_some() || self.parts.is_some() {
            return Ok(());
        }
        let own = uses.in_order().into_iter();
        let own: Vec<u8> = own.flat_map(|index| (index as u32).to_le_bytes()).collect();
        // Every rank sends something, so that the operation may end a commit.
        let own = [&[0], &own[..]].concat();
        let told = self.with_recovery(|ddp| {
            let is_first = ddp.group.rank() == 0;
            let own = if is_first { &own[..] } else { &own[..1] };
            let mut all = ddp.group.all_gather_bytes(own)?;
            Ok::<_, DdpError>(all.swap_remove(0))
        })?;
        let (told, _) = told.get(1..).unwrap_or_default().as_chunks::<4>();
        if told.is_empty() && self.is_live() {
            // The rank that had shard 0 was lost: the next step shows its uses again.
            self.uses = Some(uses);
        }
        let told = told.iter().map(|bytes| u32::from_le_bytes(*bytes) as usize);
        self.set_order(told)
    }

    /// Fills the buckets in the order of these uses. They take memory with their first gradients: those of this step still lie in that
    /// of the buckets until now.
    pub(super) fn set_order(&mut self, uses: impl Iterator<Item = usize>) -> Result<(), DdpError> {
        let Some(order) = completed(uses, self.parameters.len()) else {
            return Ok(());
        };
        let lens: Vec<usize> = self.parameters.iter().map(Entry::len).collect();
        let layout = sharding::layout(&self.device);
        let plan = self.plan.in_order(&order, &lens, self.options.caps, layout);
        if plan == *self.plan {
            return Ok(());
        }
        let plan = Arc::new(plan);
        self.change_buckets(self.setup(plan.clone()))?;
        self.plan = plan;
        self.tokens.reorder(&order);
        self.order = order;
        Ok(())
    }
}

/// The parameters without a use, then those of `uses`; `None` if no parameter was used, or one that does not exist.
fn completed(uses: impl Iterator<Item = usize>, count: usize) -> Option<Vec<usize>> {
    let mut is_used = vec![false; count];
    let mut used = Vec::with_capacity(count);
    for index in uses {
        if std::mem::replace(is_used.get_mut(index)?, true) {
            return None;
        }
        used.push(index);
    }
    let unused = (0..count).filter(|index| !is_used[*index]);
    (!used.is_empty()).then(|| unused.chain(used.iter().copied()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_parameters_come_before_the_first_used_one() {
        let order = |uses: &[usize]| completed(uses.iter().copied(), 5);
        assert_eq!(order(&[3, 0, 2]), Some(vec![1, 4, 3, 0, 2]));
        assert_eq!(order(&[0, 1, 2, 3, 4]), Some(vec![0, 1, 2, 3, 4]));
        assert_eq!(order(&[]), None);
        assert_eq!(order(&[5]), None);
        assert_eq!(order(&[1, 1]), None);
    }
}
