//! Deals out a segment's memory, whole pages only: first fit over a list of free ranges, and last fit for small ones.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::region::{Lost, Region};
use super::segment::{CONTROL_BYTES, Segment};
use super::usage::ArenaReport;
use crate::error::Error;

/// Granularity: a page, so that memory given back can leave the process, and buffers never share a line.
///
/// *Units*: bytes.
const GRAIN_BYTES: usize = 4096;
/// From this size on, memory given back leaves the process at once; smaller ranges stay for the next buffer. They come from the arena's
/// end, so that none of them cuts the memory of large buffers into pieces, which the larger ones of a next generation would not fit.
const PUNCH_BYTES_MIN: usize = 256 << 10;

/// The allocator of one rank's own segment, in all generations of its group.
#[derive(Debug)]
pub(crate) struct Arena {
    segment: Arc<Segment>,
    free: Mutex<FreeList>,
}

impl Arena {
    /// For a group of this generation.
    pub(crate) fn new(segment: Arc<Segment>, generation: u32) -> Arc<Self> {
        let mut free = FreeList::new(CONTROL_BYTES, segment.bytes() - CONTROL_BYTES);
        free.generation = generation;
        Arc::new(Self {
            segment,
            free: Mutex::new(free),
        })
    }

    pub(crate) fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Serves a later generation, whose ranks have ended all operations of the one before: memory that failed operations have
    /// [lost](Region::lose) is free again. Until [`trim`](Self::trim), memory given back stays in the process: the next buffers are
    /// about as large.
    pub(crate) fn succeed(&self, generation: u32) {
        let mut free = self.free.lock();
        free.generation = generation;
        free.keeps = true;
        for (offset, span) in std::mem::take(&mut free.lost) {
            free.put(offset, span);
        }
    }

    /// Gives what is free back to the system, after [`succeed`](Self::succeed).
    pub(crate) fn trim(&self) {
        let mut free = self.free.lock();
        if !std::mem::take(&mut free.keeps) {
            return;
        }
        for (offset, span) in &free.ranges {
            let used = free.used_below.saturating_sub(*offset).min(*span);
            if used >= PUNCH_BYTES_MIN {
                self.segment.punch(*offset, used);
            }
        }
    }

    /// How memory is lost to an operation of a group of this generation.
    pub(super) fn loss(&self, generation: u32) -> Lost {
        match self.free.lock().generation == generation {
            true => Lost::In(generation),
            // Its ranks may have gone on without the end of this operation.
            false => Lost::Forever,
        }
    }

    /// A zeroed region of the arena.
    ///
    /// Zeroing also brings the pages in on the owner's side, so that no peer takes the faults in an operation.
    pub(crate) fn allocate(arena: &Arc<Self>, bytes: usize) -> Result<Region, Error> {
        let Taken { offset, span, old } = arena.take(bytes)?;
        let start = arena.segment.at(offset);
        // Pages that were never used are zeroed by the system. One call for all of them saves a third of the time of a fault each.
        let written = match arena.bring_in(offset + old, span - old) {
            true => bytes.min(old),
            false => bytes,
        };
        // SAFETY: the free list handed out `span` bytes at `offset` inside the segment, page aligned and used by
        // nobody else; the region keeps the arena and with it the mapping alive.
        unsafe {
            start.write_bytes(0, written);
            Ok(Region::of_arena(start, bytes, arena.clone(), offset, span))
        }
    }

    /// Brings in pages that were never used, which are zero; whether the system can.
    fn bring_in(&self, offset: usize, bytes: usize) -> bool {
        if bytes >= PUNCH_BYTES_MIN && self.free.lock().keeps {
            // A step waits to be repeated, and the core of a lost rank is free. A page that is needed sooner is a fault.
            let segment = self.segment.clone();
            let thread = std::thread::Builder::new().name("pages".to_owned());
            let _ = thread.spawn(move || segment.populate(offset, bytes));
            return true;
        }
        self.segment.populate(offset, bytes)
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
        let end = offset + span;
        let old = if is_small(span) {
            free.used_above = free.used_above.min(offset);
            span
        } else {
            let below = free.used_below;
            free.used_below = below.max(end);
            match end > free.used_above {
                true => span,
                false => below.saturating_sub(offset).min(span),
            }
        };
        Ok(Taken { offset, span, old })
    }

    pub(super) fn give_back(&self, offset: usize, span: usize) {
        if span >= PUNCH_BYTES_MIN && !self.free.lock().keeps {
            self.segment.punch(offset, span);
        }
        self.free.lock().put(offset, span);
    }

    /// Takes back memory that an operation of this generation has lost, once the next generation is there.
    pub(super) fn set_aside(&self, offset: usize, span: usize, generation: u32) {
        let mut free = self.free.lock();
        match generation == free.generation {
            true => free.lost.push((offset, span)),
            false => free.put(offset, span),
        }
    }
}

fn is_small(span: usize) -> bool {
    span < PUNCH_BYTES_MIN
}

/// A range that was free.
struct Taken {
    offset: usize,
    span: usize,
    /// Bytes at its beginning that may have been dealt out before.
    old: usize,
}

/// Free ranges by their first byte; neighbours are always joined.
#[derive(Debug)]
struct FreeList {
    ranges: BTreeMap<usize, usize>,
    used: usize,
    /// The most that `used` has been.
    peak: usize,
    /// Where the memory begins that large ranges never had.
    used_below: usize,
    /// Where that of small ranges begins.
    used_above: usize,
    /// Ranges that peers may still write to.
    lost: Vec<(usize, usize)>,
    /// The newest one of the groups that it serves.
    generation: u32,
    /// Large ranges stay in the process too.
    keeps: bool,
}

impl FreeList {
    fn new(offset: usize, span: usize) -> Self {
        Self {
            ranges: BTreeMap::from([(offset, span)]),
            used: 0,
            peak: 0,
            used_below: 0,
            used_above: offset + span,
            lost: Vec::new(),
            generation: 0,
            keeps: false,
        }
    }

    fn take(&mut self, span: usize) -> Option<usize> {
        let fits = |(_, found): &(&usize, &usize)| **found >= span;
        let found = match is_small(span) {
            true => self.ranges.iter().rev().find(fits),
            false => self.ranges.iter().find(fits),
        };
        let (begin, found) = found.map(|(o, s)| (*o, *s))?;
        self.ranges.remove(&begin);
        let rest = found - span;
        let (offset, left) = match is_small(span) {
            true => (begin + rest, begin),
            false => (begin, begin + span),
        };
        if rest > 0 {
            self.ranges.insert(left, rest);
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
        Arena::new(Arc::new(Segment::create(bytes).unwrap()), 0)
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
    fn lost_memory_is_used_again_in_the_next_generation_only() {
        let arena = arena(3 * GRAIN_BYTES);
        let all = || Arena::allocate(&arena, 3 * GRAIN_BYTES);
        let lose = |by| {
            let mut region = Arena::allocate(&arena, GRAIN_BYTES).unwrap();
            region.lose(by);
            region
        };
        let held = lose(Some(0));
        drop(lose(Some(0)));
        assert!(all().is_err());
        arena.succeed(1);
        // One of the ranges is still in the hands of a ticket.
        assert!(all().is_err());
        drop(held);
        drop(all().unwrap());
    }

    #[test]
    fn memory_lost_to_an_earlier_group_or_a_message_is_never_used_again() {
        for by in [None, Some(0)] {
            let arena = arena(2 * GRAIN_BYTES);
            arena.succeed(1);
            let mut region = Arena::allocate(&arena, GRAIN_BYTES).unwrap();
            region.lose(by);
            drop(region);
            arena.succeed(2);
            assert!(Arena::allocate(&arena, 2 * GRAIN_BYTES).is_err());
        }
    }

    #[test]
    fn the_next_generation_finds_the_pages_in_place() {
        let arena = arena(4 << 20);
        let bytes = 1 << 20;
        let resident = |arena: &Arena| {
            let stat = rustix::fs::fstat(arena.segment.fd()).unwrap();
            stat.st_blocks as usize * 512 / bytes
        };
        let first = Arena::allocate(&arena, bytes).unwrap();
        arena.succeed(1);
        drop(first);
        assert_eq!(resident(&arena), 1);
        // More than before: the rest is new.
        let mut second = Arena::allocate(&arena, 2 * bytes).unwrap();
        assert!(second.as_slice().iter().all(|byte| *byte == 0));
        second.as_mut_slice().fill(0xFF);
        drop(second);
        let third = Arena::allocate(&arena, bytes).unwrap();
        assert!(third.as_slice().iter().all(|byte| *byte == 0));
        assert_eq!(resident(&arena), 2);
        arena.trim();
        assert_eq!(resident(&arena), 1);
        drop(third);
        assert_eq!(resident(&arena), 0);
    }

    #[test]
    fn small_ranges_stay_out_of_the_way_of_large_ones() {
        let arena = arena(4 << 20);
        let first = Arena::allocate(&arena, 1 << 20).unwrap();
        let mut small = Arena::allocate(&arena, 100).unwrap();
        small.as_mut_slice().fill(0xFF);
        drop(first);
        // In the place of the first one, and beyond.
        let all = arena.segment.bytes() - CONTROL_BYTES - GRAIN_BYTES;
        drop(Arena::allocate(&arena, all).unwrap());
        assert!(Arena::allocate(&arena, all + GRAIN_BYTES).is_err());
        drop(small);
        let whole = Arena::allocate(&arena, all + GRAIN_BYTES).unwrap();
        assert!(whole.as_slice().iter().all(|byte| *byte == 0));
    }

    proptest! {
        #[test]
        fn ranges_never_overlap_and_all_come_back(spans in prop::collection::vec((1_usize..9, any::<bool>()), 1..60)) {
            // Up to three are small.
            const UNIT: usize = PUNCH_BYTES_MIN / 4;
            let mut list = FreeList::new(0, 64 * UNIT);
            let mut held: Vec<(usize, usize)> = Vec::new();
            for (span, give_back) in spans {
                if give_back && !held.is_empty() {
                    let (offset, span) = held.swap_remove(span % held.len());
                    list.put(offset, span);
                } else if let Some(offset) = list.take(span * UNIT) {
                    let span = span * UNIT;
                    prop_assert!(offset + span <= 64 * UNIT);
                    prop_assert!(held.iter().all(|(o, s)| offset + span <= *o || o + s <= offset));
                    held.push((offset, span));
                }
            }
            for (offset, span) in held {
                list.put(offset, span);
            }
            prop_assert_eq!((list.used, list.ranges), (0, BTreeMap::from([(0, 64 * UNIT)])));
        }
    }
}
