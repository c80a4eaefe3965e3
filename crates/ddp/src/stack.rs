//! `Stack`: sums over this rank's shards, as far along the shard tree as the rank owns it.

use std::ops::AddAssign;

use paceline_collective::{Buffer, Element, Error, ProcessGroup, Tree};

/// Messages of this rank's shards, each added to those before it as soon as the tree allows.
pub(crate) struct Stack<T>(Vec<Vec<T>>);

impl<T> Default for Stack<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Element + AddAssign> Stack<T> {
    pub(crate) fn push(&mut self, tree: &Tree, rank: usize, shard: usize, message: Vec<T>) {
        self.0.push(message);
        for _ in 0..tree.merges_after(rank, shard) {
            let right = self.0.pop().expect("a merge has two blocks");
            let left = self.0.last_mut().expect("a merge has two blocks");
            add(left, right);
        }
    }

    /// Blocks of `len` numbers, for an all-reduce along the tree.
    pub(crate) fn buffer(self, group: &ProcessGroup, len: usize) -> Result<Buffer<T>, Error> {
        let mut buffer = group.buffer(self.0.len() * len)?;
        for (place, block) in buffer.chunks_mut(len.max(1)).zip(&self.0) {
            place.copy_from_slice(block);
        }
        Ok(buffer)
    }

    /// The sum over this rank's shards only.
    pub(crate) fn total(self) -> Option<Vec<T>> {
        self.0.into_iter().reduce(|mut left, right| {
            add(&mut left, right);
            left
        })
    }
}

fn add<T: AddAssign>(left: &mut [T], right: Vec<T>) {
    left.iter_mut()
        .zip(right)
        .for_each(|(left, right)| *left += right);
}
