//! One allocation, whatever it was allocated from; gives itself back when dropped.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::arena::Arena;
use super::segment::HUGE_BYTES;
use crate::error::Error;

/// Alignment of every region, a cache line.
///
/// *Units*: bytes.
const ALIGN_BYTES: usize = 64;

/// Exclusively owned bytes, aligned to a cache line and initialised.
///
/// Memory in an arena is also mapped by other ranks. They touch it only between the two meetings of an operation that
/// this region was handed to, and an operation owns its region until it is over.
#[derive(Debug)]
pub(crate) struct Region {
    start: NonNull<u8>,
    bytes: usize,
    home: Home,
}

/// What a region goes back to.
#[derive(Debug)]
pub(crate) enum Home {
    /// This process's memory: of the allocator, or a mapping of its own.
    Heap(Option<Layout>),
    Arena {
        arena: Arc<Arena>,
        /// First byte, counted from the start of the segment.
        offset: usize,
        /// Bytes taken from the arena.
        span: usize,
        lost: Lost,
    },
}

/// Whether peers may still write here although the operation is over, because it failed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Lost {
    No,
    /// Until the group of this generation has a successor.
    In(u32),
    Forever,
}

// SAFETY: a region owns its bytes like a Vec<u8> does; the pointer is not shared.
unsafe impl Send for Region {}
// SAFETY: a shared region only hands out shared slices.
unsafe impl Sync for Region {}

impl Region {
    /// Zeroed memory of this process.
    pub(crate) fn heap(bytes: usize) -> Result<Self, Error> {
        let none = Error::Memory {
            bytes,
            used: 0,
            size: isize::MAX as usize,
        };
        if bytes > 2 * HUGE_BYTES {
            return Self::pages(bytes).ok_or(none);
        }
        let Ok(layout) = Layout::from_size_align(bytes.max(1), ALIGN_BYTES) else {
            return Err(none);
        };
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(none)?;
        Ok(Self {
            start,
            bytes,
            home: Home::Heap(Some(layout)),
        })
    }

    /// Zeroed huge pages, where the system has them. Bringing in 64 MB of them takes 8 ms, small ones 50 ms, and a process that ends
    /// gives them back sooner.
    fn pages(bytes: usize) -> Option<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing; the advice changes nothing about its contents.
        // Where it is refused, the first access brings a page in.
        let start = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            let start = rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                protection,
                MapFlags::PRIVATE,
            );
            let start = start.ok()?;
            for advice in [Advice::LinuxHugepage, Advice::LinuxPopulateWrite] {
                let _ = rustix::mm::madvise(start, bytes, advice);
            }
            start
        };
        Some(Self {
            start: NonNull::new(start.cast())?,
            bytes,
            home: Home::Heap(None),
        })
    }

    /// # Safety
    ///
    /// The `span >= bytes` bytes at `start` lie in the arena's segment at `offset`, are aligned to a cache line, and
    /// were just taken from the arena for this region alone.
    pub(super) unsafe fn of_arena(
        start: NonNull<u8>,
        bytes: usize,
        arena: Arc<Arena>,
        offset: usize,
        span: usize,
    ) -> Self {
        Self {
            start,
            bytes,
            home: Home::Arena {
                arena,
                offset,
                span,
                lost: Lost::No,
            },
        }
    }

    pub(crate) fn home(&self) -> &Home {
        &self.home
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: the region owns `bytes` initialised bytes.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    /// Does not give the memory back: the peers of a failed operation may not have noticed yet, and still use it. They have ended
    /// the operations of all ranks when a group of the next generation forms; without a generation there is no such moment.
    pub(crate) fn lose(&mut self, generation: Option<u32>) {
        if let Home::Arena { lost, arena, .. } = &mut self.home {
            *lost = generation.map_or(Lost::Forever, |generation| arena.loss(generation));
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        match &self.home {
            // SAFETY: allocated in `heap` with this layout.
            Home::Heap(Some(layout)) => unsafe { dealloc(self.start.as_ptr(), *layout) },
            Home::Heap(None) => {
                // SAFETY: mapped in `pages` with this length; nothing borrows from a region that is dropped.
                let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
            }
            Home::Arena {
                arena,
                offset,
                span,
                lost,
            } => match lost {
                Lost::No => arena.give_back(*offset, *span),
                Lost::In(generation) => arena.set_aside(*offset, *span, *generation),
                Lost::Forever => {}
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_regions_are_zero_and_their_own() {
        for bytes in [0, 100, 2 * HUGE_BYTES, 2 * HUGE_BYTES + 1, 9_000_001] {
            let mut regions = [bytes; 2].map(|bytes| Region::heap(bytes).unwrap());
            regions[0].as_mut_slice().fill(0xFF);
            let [full, empty] = &regions;
            assert!(full.as_slice().iter().all(|byte| *byte == 0xFF), "{bytes}");
            assert!(empty.as_slice().iter().all(|byte| *byte == 0), "{bytes}");
            let start = full.as_ptr().addr();
            assert!(start.is_multiple_of(ALIGN_BYTES), "{bytes}");
            assert_eq!(full.bytes(), bytes);
        }
    }

    #[test]
    fn more_memory_than_there_is_is_refused() {
        for bytes in [usize::MAX, isize::MAX as usize - ALIGN_BYTES] {
            let error = Region::heap(bytes).unwrap_err();
            assert!(matches!(error, Error::Memory { .. }), "{error}");
        }
    }
}
