//! Waiting for descriptors: until they are ready, or until a moment.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

/// Waits until the descriptor is ready or has failed, at most until `deadline`; whether it is.
///
/// *Errors*: only a lack of memory.
pub fn wait_for(fd: BorrowedFd<'_>, flags: PollFlags, deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let ready = poll_for(&mut [PollFd::new(&fd, flags)], left)?;
        if ready > 0 || left.is_zero() {
            return Ok(ready > 0);
        }
    }
}

/// `poll` with a duration, of an hour at most; how many are ready. An interruption counts as nothing ready.
///
/// *Errors*: only a lack of memory.
pub fn poll_for(fds: &mut [PollFd<'_>], limit: Duration) -> io::Result<usize> {
    let limit = limit.min(Duration::from_secs(3600));
    match poll(fds, Timespec::try_from(limit).ok().as_ref()) {
        Err(rustix::io::Errno::INTR) => Ok(0),
        ready => Ok(ready?),
    }
}
