//! Blocking TLS with a deadline.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::event::PollFlags;

use super::Tls;
use crate::wait::wait_for;

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
