//! The words of the protocol on a real machine: atomics and a futex that several processes share.

use std::time::Duration;

use rustix::thread::futex;

pub(crate) use std::sync::atomic::{AtomicU32, Ordering};

/// Longest sleep between two looks at the latch, the launcher's page and the deadline: a rank may be killed before it
/// rings.
pub(crate) const SLICE: Duration = Duration::from_millis(5);

/// Sleeps while the word is `seen`, at most [`SLICE`]; may wake early. Not private to the process: that is the point.
pub(crate) fn wait(word: &AtomicU32, seen: u32) {
    let limit = rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: i64::from(SLICE.subsec_nanos()),
    };
    // Woken, timed out, interrupted or too late: the caller looks again in every case.
    let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&limit));
}

pub(crate) fn wake_all(word: &AtomicU32) {
    // A failure to wake is not an error: sleepers look again after a slice.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}
