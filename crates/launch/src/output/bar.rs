//! The progress bar of `paceline train`, which rank 0 draws again and again on the last line of a terminal. Whatever else is printed takes its
//! place, and the next one is drawn below.
//!
//! A bar is [`ERASE`], its text and a carriage return.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Goes to the start of the line and erases it.
pub(crate) const ERASE: &[u8] = b"\r\x1b[2K";

/// Whether the last line of standard output is a bar.
static IS_DRAWN: AtomicBool = AtomicBool::new(false);

pub(crate) fn set_drawn(is_drawn: bool) {
    IS_DRAWN.store(is_drawn, Relaxed);
}

/// Removes the bar, if there is one, before this process itself says something.
pub(crate) fn clear() {
    if IS_DRAWN.swap(false, Relaxed) {
        let mut out = io::stdout().lock();
        // A terminal that is gone has no bar.
        let _ = out.write_all(ERASE).and_then(|()| out.flush());
    }
}

/// Where the first bar in `bytes` ends, if there is one.
pub(crate) fn end(bytes: &[u8]) -> Option<usize> {
    let starts = bytes.windows(ERASE.len()).enumerate();
    let mut starts = starts.filter(|(_, start)| *start == ERASE);
    starts.find_map(|(start, _)| {
        let text = start + ERASE.len();
        let mut rest = bytes[text..].iter();
        let len = rest.position(|byte| matches!(byte, b'\r' | b'\n'))?;
        (len > 0 && bytes[text + len] == b'\r').then_some(text + len + 1)
    })
}
