//! The words of the protocol on a real machine: atomics and a futex that several processes share.

use std::time::Duration;

use rustix::thread::futex;

pub(crate) use std::sync::atomic::{AtomicU32, Ordering};

/// Sleeps while the word is `seen`, at most for `limit`; may wake early. Not private to the process: that is the point.
pub(crate) fn wait(word: &AtomicU32, seen: u32, limit: Duration) {
    let limit = rustix::time::Timespec::try_from(limit).ok();
    // Woken, timed out, interrupted or too late: the caller looks again in every case.
    let _ = futex::wait(word, futex::Flags::empty(), seen, limit.as_ref());
}

pub(crate) fn wake_all(word: &AtomicU32) {
    // A failure to wake is not an error: sleepers look again after a slice.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}
