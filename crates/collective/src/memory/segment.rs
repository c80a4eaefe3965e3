//! A rank's shared memory: one control page that peers watch, and the arena behind it.
//!
//! ```text
//! byte 0      magic, version          (checked by peers before anything else)
//! byte 128    cell 0                  what peers watch during this rank's operations of even number
//!     +0      progress, digest, 48 bytes of data      one cache line: all that a small operation needs
//!     +64     header, where the data lies
//!     +128    1024 bytes of data                      lent by copy: the next operation uses the other cell
//! byte 1280   cell 1                  the same for those of odd number
//! byte 2432   bell, sleepers          what ranks sleep on; only the first rank's is used
//! byte 2496   core                    where this rank waited last
//! byte 4096   arena                   the rank's buffers
//! ```
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

use super::usage::huge_bytes;
use crate::call::HEADER_WORDS;
use crate::plan::INLINE_BYTES_MAX;

/// Bytes before the arena.
pub(crate) const CONTROL_BYTES: usize = 4096;

const MAGIC: u64 = u64::from_le_bytes(*b"PACESEG1");

/// Size of a huge page, on the machines that have one of this size.
///
/// *Units*: bytes.
pub(super) const HUGE_BYTES: usize = 2 << 20;

/// The control page at the start of a segment. Atomics only: several processes look at it.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Control {
    magic: AtomicU64,
    gap: [u64; 15],
    pub(crate) cells: [Cell; 2],
    /// Rung when the last rank has come to a meeting.
    pub(crate) bell: AtomicU32,
    /// Ranks that sleep, or are about to.
    pub(crate) sleepers: AtomicU32,
    apart: [u64; 7],
    /// The core that this rank waited on last, plus one.
    pub(crate) core: AtomicU32,
}

/// Data that fits the line that peers look at anyway.
///
/// *Units*: bytes.
pub(crate) const LINE_DATA_BYTES: usize = 48;
/// Words of a cell's second line: a header, and where the data of `In` and `Out` lies.
pub(crate) const CELL_WORDS: usize = HEADER_WORDS + 2;

/// What a rank tells its peers about one operation. There are two, used in turn, so that a rank can begin an operation
/// while a peer still reads what this one said about the last.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Cell {
    /// How far the rank is; see [`meeting`](crate::team::meeting).
    pub(crate) progress: AtomicU32,
    pad: u32,
    /// Of the header: equal calls have equal digests.
    pub(crate) digest: AtomicU64,
    line: UnsafeCell<[u8; LINE_DATA_BYTES]>,
    pub(crate) words: [AtomicU64; CELL_WORDS],
    inline: UnsafeCell<[u8; INLINE_BYTES_MAX]>,
}

impl Cell {
    /// Where `bytes` bytes of lent data lie, at most [`INLINE_BYTES_MAX`]. Written by the owner before it publishes its
    /// progress, read by peers after they have seen it.
    pub(crate) fn data(&self, bytes: usize) -> NonNull<u8> {
        assert!(bytes <= INLINE_BYTES_MAX);
        let start = if bytes <= LINE_DATA_BYTES {
            self.line.get().cast::<u8>()
        } else {
            self.inline.get().cast::<u8>()
        };
        NonNull::new(start).expect("a part of a mapping is not at address 0")
    }
}

const _: () = assert!(std::mem::offset_of!(Control, cells) == 128);
const _: () = assert!(size_of::<Cell>() == 1152);
const _: () = assert!(std::mem::offset_of!(Control, bell) == 2432);
const _: () = assert!(std::mem::offset_of!(Control, core) == 2496);
const _: () = assert!(size_of::<Control>() <= CONTROL_BYTES);

/// What a rank has its host's others map: its control page, new in each generation of the group, and its arena, which stays.
#[derive(Clone, Debug)]
pub(crate) struct Shown {
    pub(crate) control: Arc<Segment>,
    pub(crate) arena: Arc<Segment>,
}

impl Shown {
    /// One segment that has both.
    pub(crate) fn whole(segment: Arc<Segment>) -> Self {
        Self {
            control: segment.clone(),
            arena: segment,
        }
    }

    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let arena = (!Arc::ptr_eq(&self.control, &self.arena)).then(|| self.arena.fd());
        std::iter::once(self.control.fd()).chain(arena)
    }
}

/// A mapped segment, one's own or a peer's.
#[derive(Debug)]
pub(crate) struct Segment {
    fd: OwnedFd,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is valid on every thread of the process until it is dropped; the control page consists of atomics
// and all other access goes through raw pointers under the rules of `shm`.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// A new segment with an arena of `arena_bytes`, sealed against any change of size.
    ///
    /// *Cost*: address space only. The file is sparse: a page exists from its first use until it is punched out.
    pub(crate) fn create(arena_bytes: usize) -> io::Result<Self> {
        let bytes = CONTROL_BYTES + arena_bytes;
        let fd =
            rustix::fs::memfd_create("paceline", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, bytes as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let segment = Self::map(fd, bytes)?;
        segment
            .control()
            .magic
            .store(MAGIC, std::sync::atomic::Ordering::Release);
        Ok(segment)
    }

    /// Maps a segment that a peer sent. Nothing about the descriptor is believed: without the seals a peer could make
    /// the file shorter and have this rank killed by SIGBUS.
    pub(crate) fn open(fd: OwnedFd) -> io::Result<Self> {
        let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
        let seals = rustix::fs::fcntl_get_seals(&fd)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(invalid(
                "the segment is not sealed against shrinking".into(),
            ));
        }
        let bytes = rustix::fs::fstat(&fd)?.st_size;
        let bytes = usize::try_from(bytes)
            .ok()
            .filter(|bytes| (CONTROL_BYTES..=ARENA_BYTES_MAX + CONTROL_BYTES).contains(bytes));
        let bytes = bytes.ok_or_else(|| invalid("the segment has an impossible size".into()))?;
        let segment = Self::map(fd, bytes)?;
        match segment
            .control()
            .magic
            .load(std::sync::atomic::Ordering::Acquire)
        {
            MAGIC => Ok(segment),
            other => Err(invalid(format!(
                "the segment begins with {other:#x}, expected {MAGIC:#x}"
            ))),
        }
    }

    fn map(fd: OwnedFd, bytes: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                protection,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &fd,
                0,
            )?
        };
        // A core dump of one rank must not contain the buffers of all ranks. Refusal costs nothing but disk.
        // SAFETY: the advice changes nothing about the memory's contents.
        let _ = unsafe { rustix::mm::madvise(start, bytes, Advice::LinuxDontDump) };
        if bytes > 2 * HUGE_BYTES {
            // Where the system leaves the choice to programs, large buffers are worth huge pages: fewer misses of the
            // translation cache on both sides, and fewer faults. The first is left out: small buffers lie there.
            // SAFETY: within the mapping; the advice changes nothing about the memory's contents. Refusal costs time only.
            let _ = unsafe {
                let behind = start.cast::<u8>().add(HUGE_BYTES).cast();
                rustix::mm::madvise(behind, bytes - HUGE_BYTES, Advice::LinuxHugepage)
            };
        }
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| io::Error::other("mmap returned null"))?;
        Ok(Self { fd, start, bytes })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Whether this is the file of `fd`.
    pub(crate) fn is(&self, fd: BorrowedFd<'_>) -> bool {
        let identity = |fd| {
            let stat = rustix::fs::fstat(fd).ok()?;
            Some((stat.st_dev, stat.st_ino))
        };
        identity(fd).is_some_and(|other| identity(self.fd()) == Some(other))
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn control(&self) -> &Control {
        // SAFETY: the mapping has at least CONTROL_BYTES bytes, is page aligned, and lives as long as `self`; zero
        // bytes and whatever a peer stores are valid atomics.
        unsafe { self.start.cast::<Control>().as_ref() }
    }

    /// The address of a byte of the segment.
    pub(crate) fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset <= self.bytes);
        // SAFETY: inside the mapping, or one past its end.
        unsafe { self.start.add(offset) }
    }

    /// What the system has mapped of it with huge pages; nothing where it does not say.
    pub(crate) fn huge_bytes(&self) -> usize {
        let start = self.start.as_ptr() as usize;
        let smaps = std::fs::read_to_string("/proc/self/smaps");
        smaps.map_or(0, |smaps| huge_bytes(&smaps, &(start..start + self.bytes)))
    }

    /// Brings in the pages of a range for writing, in one call; whether the system has done it.
    pub(crate) fn populate(&self, offset: usize, bytes: usize) -> bool {
        assert!(offset + bytes <= self.bytes);
        // SAFETY: within the mapping; the call changes nothing about the memory's contents.
        let populated = unsafe {
            let start = self.at(offset).as_ptr().cast();
            rustix::mm::madvise(start, bytes, Advice::LinuxPopulateWrite)
        };
        populated.is_ok()
    }

    /// Returns the pages of a range to the system; they read as zero afterwards.
    pub(crate) fn punch(&self, offset: usize, bytes: usize) {
        assert!(offset + bytes <= self.bytes);
        // SAFETY: a range of this mapping that its owner no longer uses. Should the system refuse, the pages stay.
        let _ = unsafe {
            rustix::mm::madvise(self.at(offset).as_ptr().cast(), bytes, Advice::LinuxRemove)
        };
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length; nothing borrows from a segment that is dropped.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// Largest arena a peer may offer.
const ARENA_BYTES_MAX: usize = 1 << 40;
/// Largest arena by default: 64 GiB for each of 1024 ranks still fits the address space of a process.
const ARENA_BYTES_DEFAULT_MAX: usize = 64 << 30;
const ARENA_BYTES_MIN: usize = 64 << 20;

/// Size of an arena, a multiple of the page size: as asked for, else the machine's memory, at most 64 GiB.
///
/// It is address space, not memory; more than the machine's memory could never be filled. A limit on file sizes
/// (`ulimit -f`) holds for memory files too, and exceeding it would kill the process.
pub(crate) fn segment_bytes(asked: Option<usize>) -> usize {
    let memory = rustix::system::sysinfo();
    let total = (memory.totalram as usize).saturating_mul(memory.mem_unit.max(1) as usize);
    let wanted = asked.unwrap_or_else(|| total.clamp(ARENA_BYTES_MIN, ARENA_BYTES_DEFAULT_MAX));
    let limit = getrlimit(Resource::Fsize)
        .current
        .map_or(usize::MAX, |bytes| bytes as usize);
    let limit = limit.saturating_sub(CONTROL_BYTES).min(ARENA_BYTES_MAX);
    (wanted.min(limit) / CONTROL_BYTES).max(1) * CONTROL_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_seen_by_the_receiver_of_its_descriptor() {
        let mine = Segment::create(1 << 20).unwrap();
        let theirs = Segment::open(mine.fd().try_clone_to_owned().unwrap()).unwrap();
        mine.control()
            .bell
            .store(7, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(
            theirs
                .control()
                .bell
                .load(std::sync::atomic::Ordering::Relaxed),
            7
        );
        assert_eq!(theirs.bytes(), CONTROL_BYTES + (1 << 20));
    }

    #[test]
    fn a_file_that_could_shrink_is_refused() {
        let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .unwrap();
        rustix::fs::ftruncate(&fd, 1 << 20).unwrap();
        assert!(
            Segment::open(fd)
                .unwrap_err()
                .to_string()
                .contains("not sealed")
        );
    }

    #[test]
    fn something_else_than_a_segment_is_refused() {
        let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .unwrap();
        rustix::fs::ftruncate(&fd, 1 << 20).unwrap();
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        assert!(
            Segment::open(fd)
                .unwrap_err()
                .to_string()
                .contains("begins with 0x0")
        );
        assert!(Segment::open(std::fs::File::open("/dev/null").unwrap().into()).is_err());
    }

    #[test]
    fn an_arena_has_whole_pages() {
        assert_eq!(segment_bytes(Some(1)), CONTROL_BYTES);
        assert_eq!(
            segment_bytes(Some(3 * CONTROL_BYTES + 5)),
            3 * CONTROL_BYTES
        );
        assert!(segment_bytes(None) >= ARENA_BYTES_MIN.min(1 << 20));
    }
}
