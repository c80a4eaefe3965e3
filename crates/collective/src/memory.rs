//! Memory that operations work on: plain heap memory, or an arena in a segment that other ranks map.

mod arena;
mod operand;
mod region;
mod segment;
mod usage;

pub(crate) use arena::Arena;
pub(crate) use operand::Operand;
pub(crate) use region::{Home, Region};
pub(crate) use segment::{CELL_WORDS, CONTROL_BYTES, Cell, Segment, Shown, segment_bytes};
pub(crate) use usage::Gauges;
pub use usage::{ArenaReport, Share};

use std::sync::Arc;

use crate::error::Error;

/// Where a group's buffers come from.
#[derive(Debug, Clone)]
pub(crate) enum Allocator {
    /// This process's own memory: nobody else reads it.
    Heap,
    /// Memory that all ranks of the host map.
    Arena(Arc<Arena>),
}

impl Allocator {
    /// Memory of at least `bytes` bytes; zeroed.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<Region, Error> {
        match self {
            Self::Heap => Region::heap(bytes),
            Self::Arena(arena) => Arena::allocate(arena, bytes),
        }
    }

    /// The memory itself, if others map it.
    pub(crate) fn arena(&self) -> Option<&Arc<Arena>> {
        match self {
            Self::Heap => None,
            Self::Arena(arena) => Some(arena),
        }
    }

    /// Whether operations of the group this allocator belongs to can work on the region.
    pub(crate) fn owns(&self, region: &Region) -> bool {
        match (self, region.home()) {
            (Self::Heap, Home::Heap(_)) => true,
            (Self::Arena(arena), Home::Arena { arena: home, .. }) => Arc::ptr_eq(arena, home),
            (Self::Heap, Home::Arena { .. }) | (Self::Arena(_), Home::Heap(_)) => false,
        }
    }
}
