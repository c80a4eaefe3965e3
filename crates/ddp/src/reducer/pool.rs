//! Memory that buckets take turns in.

use std::sync::{Arc, Mutex};

use paceline_collective::ProcessGroup;

use super::lock;
use super::sent::Memory;
use crate::comm_hook::CommHook;
use crate::error::DdpError;

/// The free memory of one bucket, or of several.
///
/// It never becomes larger than as many buckets of one size as hold memory at once, those that [`Lent`] holds included.
#[derive(Clone, Default)]
pub(super) struct Pool(Arc<Mutex<Vec<Memory>>>);

impl Pool {
    /// The smallest free memory of at least `len` numbers, or new memory.
    pub(super) fn take(
        &self,
        group: &ProcessGroup,
        len: usize,
        hook: CommHook,
    ) -> Result<Memory, DdpError> {
        let mut free = lock(&self.0);
        let fitting = free.iter().map(Memory::len).enumerate();
        let fitting = fitting.filter(|(_, free)| *free >= len);
        if let Some((at, _)) = fitting.min_by_key(|(_, free)| *free) {
            return Ok(free.swap_remove(at));
        }
        // All are smaller, and the new memory serves their buckets too.
        free.clear();
        Ok(Memory::new(group, len, hook)?)
    }

    pub(super) fn put(&self, memory: Memory) {
        lock(&self.0).push(memory);
    }
}

/// A bucket's memory that comes back to its pool when this is dropped.
pub(in crate::reducer) struct Lent {
    memory: Option<Memory>,
    pool: Pool,
}

impl Lent {
    pub(super) fn new(memory: Memory, pool: Pool) -> Self {
        Self {
            memory: Some(memory),
            pool,
        }
    }

    /// All blocks.
    pub(super) fn blocks(&self) -> &[f32] {
        self.memory.as_ref().map_or(&[], |memory| &memory.blocks)
    }

    pub(super) fn blocks_mut(&mut self) -> &mut [f32] {
        let memory = self.memory.as_mut();
        memory.map_or(&mut [], |memory| &mut memory.blocks)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.put(memory);
        }
    }
}
