//! Copies one range of bytes to several places, around the caches where asked.

use super::isa::{self, Isa, LINE_BYTES, Level, Work};

/// Size of the piece that is copied to one place after the other before the next piece is read.
///
/// *Units*: bytes.
const PIECE_BYTES: usize = 16 << 10;

/// Copies `bytes` bytes to every place in `to`; `streaming` goes around the caches, as in
/// [`Fold`](super::Fold::streaming).
///
/// # Safety
///
/// `from` is readable and every target writable for `bytes` bytes. A target may be `from` itself; otherwise they do not
/// overlap. Nobody else touches them.
pub(crate) unsafe fn copy(from: *const u8, to: &[*mut u8], bytes: usize, streaming: bool) {
    let level = Level::best();
    let mut first = 0;
    while first < bytes {
        // A single target needs no pieces: nothing is read twice.
        let piece = if to.len() < 2 {
            bytes
        } else {
            PIECE_BYTES.min(bytes - first)
        };
        // SAFETY: within the contract's bytes; the best level is one that the machine has.
        unsafe { at(level, from.add(first), to, first, piece, streaming) };
        first += piece;
    }
    if streaming {
        isa::fence();
    }
}

/// Copies `bytes` bytes to `first_byte` in every target, without a fence.
///
/// # Safety
///
/// As [`copy()`], and the machine has the level.
pub(super) unsafe fn at(
    level: Level,
    from: *const u8,
    to: &[*mut u8],
    first_byte: usize,
    bytes: usize,
    streaming: bool,
) {
    for target in to {
        // SAFETY: the caller's contract.
        unsafe {
            let to = target.add(first_byte);
            if to.cast_const() == from {
                continue;
            }
            if streaming {
                level.run(Stream { from, to, bytes });
            } else {
                to.copy_from_nonoverlapping(from, bytes);
            }
        }
    }
}

/// Copies `bytes` bytes, whole lines of the target around the caches.
struct Stream {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
}

impl Work for Stream {
    #[inline(always)]
    unsafe fn work<I: Isa>(self) {
        let head = self.to.align_offset(LINE_BYTES).min(self.bytes);
        // SAFETY: `at` and what is copied from there stay within `bytes`; from `head` on, lines of the target are aligned.
        unsafe {
            self.to.copy_from_nonoverlapping(self.from, head);
            let mut at = head;
            while at + LINE_BYTES <= self.bytes {
                let line = self
                    .from
                    .add(at)
                    .cast::<[u8; LINE_BYTES]>()
                    .read_unaligned();
                I::stream(self.to.add(at), line);
                at += LINE_BYTES;
            }
            self.to
                .add(at)
                .copy_from_nonoverlapping(self.from.add(at), self.bytes - at);
        }
    }
}
