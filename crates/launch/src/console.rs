//! The launcher's own standard output and error, shared by the ranks' reader threads.

use std::io::{self, Write};
use std::sync::Mutex;

/// Which of a rank's two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Out,
    Err,
}

impl Stream {
    pub(crate) const BOTH: [Self; 2] = [Self::Out, Self::Err];
}

/// Writes pieces one after another: one lock for both streams, because they often lead to the same terminal.
#[derive(Debug, Default)]
pub(crate) struct Screen {
    broken: Mutex<[bool; 2]>,
}

impl Screen {
    /// Writes one piece as a whole. A stream whose reader is gone (`| head`) is written to no more; the job goes on.
    pub(crate) fn write(&self, stream: Stream, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let mut broken = self
            .broken
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if broken[stream as usize] {
            return;
        }
        let written = match stream {
            Stream::Out => write_and_flush(io::stdout().lock(), bytes),
            Stream::Err => write_and_flush(io::stderr().lock(), bytes),
        };
        broken[stream as usize] = written.is_err();
    }
}

fn write_and_flush(mut to: impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes)?;
    to.flush()
}
