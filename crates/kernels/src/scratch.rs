//! Memory that calls of a kernel use one after another.

#![expect(unsafe_code, reason = "cache lines are values side by side")]

use std::cell::RefCell;
use std::slice;

/// Values of a cache line. Registers that are loaded from two lines take twice as long.
const LINE: usize = 16;
/// Lines that a thread keeps between calls, 16 MiB: the rest is freed, so that one large call does not cost memory for ever.
const KEPT: usize = (4 << 20) / LINE;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LINE]);

thread_local! {
    static KEPT_BY_THREAD: RefCell<Vec<Vec<Line>>> = const { RefCell::new(Vec::new()) };
}

/// A buffer of `len` values, which are anything. It starts where a cache line does.
pub(crate) struct Scratch {
    lines: Vec<Line>,
    len: usize,
}

impl Scratch {
    pub(crate) fn new(len: usize) -> Self {
        let mut lines = KEPT_BY_THREAD.with_borrow_mut(Vec::pop).unwrap_or_default();
        if lines.len() * LINE < len {
            // The system's zeros cost nothing, unlike a copy of what is there.
            lines = vec![Line([0.0; LINE]); len.div_ceil(LINE)];
        }
        Self { lines, len }
    }

    /// Rows of 16 or 32 values, each of which starts where a cache line does.
    pub(crate) fn rows<const WIDTH: usize>(&self) -> &[[f32; WIDTH]] {
        self.as_chunks().0
    }

    /// [`rows`](Self::rows), to be written.
    pub(crate) fn rows_mut<const WIDTH: usize>(&mut self) -> &mut [[f32; WIDTH]] {
        self.as_chunks_mut().0
    }
}

impl std::ops::Deref for Scratch {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: there are lines for so many values.
        unsafe { slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl std::ops::DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        KEPT_BY_THREAD.with_borrow_mut(|kept| {
            let has: usize = kept.iter().map(Vec::len).sum();
            if has + lines.len() <= KEPT {
                kept.push(lines);
            }
        });
    }
}
