//! Waiting, for those who have nothing else to do: TLS with a deadline.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use super::Tls;

/// A TLS connection whose reads and writes wait, and all end at one moment.
pub(crate) struct Within<'a> {
    pub(crate) tls: &'a Tls,
    pub(crate) deadline: Instant,
}

impl Within<'_> {
    fn until<T>(
        &self,
        flags: PollFlags,
        mut act: impl FnMut(&Tls) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            match act(self.tls) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
            if !wait_for(self.tls.as_fd(), flags, self.deadline)? {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }
}

impl Read for Within<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.until(PollFlags::IN, |mut tls| tls.read(buffer))
    }
}

impl Write for Within<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.until(PollFlags::OUT, |mut tls| tls.write(buffer))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits until the descriptor is ready or has failed, at most until `deadline`; whether it is.
pub(crate) fn wait_for(
    fd: BorrowedFd<'_>,
    flags: PollFlags,
    deadline: Instant,
) -> io::Result<bool> {
    loop {
        let left = deadline
            .saturating_duration_since(Instant::now())
            .min(Duration::from_secs(3600));
        let limit = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(0),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        match poll(&mut [PollFd::new(&fd, flags)], Some(&limit)) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}
