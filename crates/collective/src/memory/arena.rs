//! Deals out a segment's memory: first fit over a list of free ranges, whole pages only.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::region::Region;
use super::segment::{CONTROL_BYTES, Segment};
use super::usage::ArenaReport;
use crate::error::Error;

/// Granularity: a page, so that memory given back can leave the process, and buffers never share a line.
///
/// *Units*: bytes.
const GRAIN_BYTES: usize = 4096;
/// From this size on, memory given back leaves the process at once; smaller ranges stay for the next buffer.
const PUNCH_BYTES_MIN: usize = 256 << 10;

/// The allocator of one rank's own segment.
#[derive(Debug)]
pub(crate) struct Arena {
    segment: Arc<Segment>,
    free: Mutex<FreeList>,
}

impl Arena {
    pub(crate) fn new(segment: Arc<Segment>) -> Arc<Self> {
        let free = FreeList::new(CONTROL_BYTES, segment.bytes() - CONTROL_BYTES);
        Arc::new(Self {
            segment,
            free: Mutex::new(free),
        })
    }

    /// A zeroed region of the arena.
    ///
    /// Zeroing also brings the pages in on the owner's side, so that no peer takes the faults in an operation.
    pub(crate) fn allocate(arena: &Arc<Self>, bytes: usize) -> Result<Region, Error> {
        let Taken {
            offset,
            span,
            is_new,
        } = arena.take(bytes)?;
        let start = arena.segment.at(offset);
        // Pages that were never used are zeroed by the system. One call for all of them saves a third of the time of a fault each.
        let is_zero = is_new && arena.segment.populate(offset, span);
        // SAFETY: the free list handed out `span` bytes at `offset` inside the segment, page aligned and used by
        // nobody else; the region keeps the arena and with it the mapping alive.
        unsafe {
            if !is_zero {
                start.write_bytes(0, bytes);
            }
            Ok(Region::of_arena(start, bytes, arena.clone(), offset, span))
        }
    }

    /// A region of at least `bytes` bytes, in whole pages, with whatever was there before.
    pub(crate) fn allocate_unwritten(arena: &Arc<Self>, bytes: usize) -> Result<Region, Error> {
        let Taken { offset, span, .. } = arena.take(bytes)?;
        let start = arena.segment.at(offset);
        // SAFETY: as in `allocate`; the pages of a segment are initialised, with zeros or an earlier region's bytes.
        Ok(unsafe { Region::of_arena(start, span, arena.clone(), offset, span) })
    }

    /// How much of it is dealt out. *Cost*: the system's list of mappings is read.
    pub(crate) fn report(&self) -> ArenaReport {
        let free = self.free.lock();
        ArenaReport {
            used: free.used,
            peak: free.peak,
            size: self.segment.bytes() - CONTROL_BYTES,
            huge: self.segment.huge_bytes(),
        }
    }

    /// A free range of at least `bytes` bytes.
    fn take(&self, bytes: usize) -> Result<Taken, Error> {
        let full = |used| Error::Memory {
            bytes,
            used,
            size: self.segment.bytes() - CONTROL_BYTES,
        };
        let span = bytes
            .max(1)
            .checked_next_multiple_of(GRAIN_BYTES)
            .ok_or_else(|| full(0))?;
        let mut free = self.free.lock();
        let offset = free.take(span).ok_or_else(|| full(free.used))?;
        let is_new = offset >= free.used_below;
        free.used_below = free.used_below.max(offset + span);
        Ok(Taken {
            offset,
            span,
            is_new,
        })
    }

    pub(super) fn give_back(&self, offset: usize, span: usize) {
        if span >= PUNCH_BYTES_MIN {
            self.segment.punch(offset, span);
        }
        self.free.lock().put(offset, span);
    }
}

/// A range that was free.
struct Taken {
    offset: usize,
    span: usize,
    /// No part of it has been dealt out before.
    is_new: bool,
}

/// Free ranges by their first byte; neighbours are always joined.
#[derive(Debug)]
struct FreeList {
    ranges: BTreeMap<usize, usize>,
    used: usize,
    /// The most that `used` has been.
    peak: usize,
    /// Where the memory that was never dealt out begins.
    used_below: usize,
}

impl FreeList {
    fn new(offset: usize, span: usize) -> Self {
        Self {
            ranges: BTreeMap::from([(offset, span)]),
            used: 0,
            peak: 0,
            used_below: 0,
        }
    }

    fn take(&mut self, span: usize) -> Option<usize> {
        let (offset, found) = self
            .ranges
            .iter()
            .find(|(_, found)| **found >= span)
            .map(|(o, s)| (*o, *s))?;
        self.ranges.remove(&offset);
        if found > span {
            self.ranges.insert(offset + span, found - span);
        }
        self.used += span;
        self.peak = self.peak.max(self.used);
        Some(offset)
    }

    fn put(&mut self, mut offset: usize, mut span: usize) {
        self.used -= span;
        if let Some((before, size)) = self
            .ranges
            .range(..offset)
            .next_back()
            .map(|(o, s)| (*o, *s))
            && before + size == offset
        {
            self.ranges.remove(&before);
            offset = before;
            span += size;
        }
        if let Some(after) = self.ranges.remove(&(offset + span)) {
            span += after;
        }
        self.ranges.insert(offset, span);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn arena(bytes: usize) -> Arc<Arena> {
        Arena::new(Arc::new(Segment::create(bytes).unwrap()))
    }

    #[test]
    fn memory_given_back_is_zero_again() {
        let arena = arena(1 << 20);
        for bytes in [100, 4096, PUNCH_BYTES_MIN + 1] {
            let mut region = Arena::allocate(&arena, bytes).unwrap();
            assert!(region.as_slice().iter().all(|byte| *byte == 0));
            region.as_mut_slice().fill(0xFF);
            drop(region);
            assert!(
                Arena::allocate(&arena, bytes)
                    .unwrap()
                    .as_mut_slice()
                    .iter()
                    .all(|byte| *byte == 0)
            );
        }
    }

    #[test]
    fn a_full_arena_says_so() {
        let arena = arena(4 * GRAIN_BYTES);
        let held = Arena::allocate(&arena, 3 * GRAIN_BYTES).unwrap();
        let error = Arena::allocate(&arena, 2 * GRAIN_BYTES).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Memory {
                    bytes: 8192,
                    used: 12288,
                    size: 16384
                }
            ),
            "{error}"
        );
        drop(held);
        assert!(Arena::allocate(&arena, 4 * GRAIN_BYTES).is_ok());
    }

    #[test]
    fn usage_counts_whole_pages_and_remembers_the_most() {
        let arena = arena(8 * GRAIN_BYTES);
        let first = Arena::allocate(&arena, GRAIN_BYTES + 1).unwrap();
        let second = Arena::allocate(&arena, 1).unwrap();
        drop(first);
        let usage = arena.report();
        assert_eq!((usage.used, usage.peak), (GRAIN_BYTES, 3 * GRAIN_BYTES));
        assert_eq!(usage.size, 8 * GRAIN_BYTES);
        drop(second);
        assert_eq!(arena.report().used, 0);
    }

    #[test]
    fn lost_memory_is_never_used_again() {
        let arena = arena(2 * GRAIN_BYTES);
        let mut region = Arena::allocate(&arena, GRAIN_BYTES).unwrap();
        region.lose();
        drop(region);
        assert!(Arena::allocate(&arena, 2 * GRAIN_BYTES).is_err());
    }

    proptest! {
        #[test]
        fn ranges_never_overlap_and_all_come_back(spans in prop::collection::vec((1_usize..9, any::<bool>()), 1..60)) {
            let mut list = FreeList::new(0, 64);
            let mut held: Vec<(usize, usize)> = Vec::new();
            for (span, give_back) in spans {
                if give_back && !held.is_empty() {
                    let (offset, span) = held.swap_remove(span % held.len());
                    list.put(offset, span);
                } else if let Some(offset) = list.take(span) {
                    prop_assert!(offset + span <= 64);
                    prop_assert!(held.iter().all(|(o, s)| offset + span <= *o || o + s <= offset));
                    held.push((offset, span));
                }
            }
            for (offset, span) in held {
                list.put(offset, span);
            }
            prop_assert_eq!((list.used, list.ranges), (0, BTreeMap::from([(0, 64)])));
        }
    }
}
