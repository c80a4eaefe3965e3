//! One connection of a client: a frame out, a frame back, by a deadline, with as few system calls as that takes.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use crate::net::{Wire, left};
use crate::os;
use crate::spin::Spin;
use crate::store::wire::{self, HEAD_BYTES, Request};
use crate::wait::wait_for;

/// The socket's own timeouts. They are set once and again only for a deadline's last second: setting them for every
/// request would double the system calls of a `get`. A long wait wakes once a second for it.
const SLICE: Duration = Duration::from_secs(1);
/// Most bytes of an answer's first read, and of each further one: no more is allocated than has come.
const READ_BYTES: [usize; 2] = [4 << 10, 256 << 10];
/// Memory kept between requests.
const KEPT_BYTES: usize = 64 << 10;

/// A socket and its buffers.
pub(super) struct Channel {
    pub(super) stream: Wire,
    /// Timeout the socket has for reads and for writes.
    read_slice: Duration,
    write_slice: Duration,
    spin: Spin,
    outbox: Vec<u8>,
    inbox: Vec<u8>,
}

impl Channel {
    pub(super) fn new(stream: Wire) -> io::Result<Self> {
        stream.tcp().set_read_timeout(Some(SLICE))?;
        stream.tcp().set_write_timeout(Some(SLICE))?;
        Ok(Self {
            stream,
            read_slice: SLICE,
            write_slice: SLICE,
            spin: Spin::default(),
            outbox: Vec::new(),
            inbox: Vec::new(),
        })
    }

    /// Sends a request and receives its answer, whose [`body`](Self::body) can be read then.
    ///
    /// *Errors*: `TimedOut` at the deadline. After any error the connection is unusable.
    pub(super) fn exchange(&mut self, request: &Request<'_>, deadline: Instant) -> io::Result<()> {
        self.outbox.clear();
        request.encode_into(&mut self.outbox);
        self.send(deadline)?;
        self.inbox.clear();
        let mut have = self.read_first(deadline)?;
        while have < HEAD_BYTES {
            have += self.read_some(READ_BYTES[0], deadline)?;
        }
        let mut head = [0; HEAD_BYTES];
        head.copy_from_slice(&self.inbox[..HEAD_BYTES]);
        let body_bytes = wire::body_bytes(head)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        let frame_bytes = HEAD_BYTES + body_bytes;
        while have < frame_bytes {
            have += self.read_some((frame_bytes - have).min(READ_BYTES[1]), deadline)?;
        }
        if have > frame_bytes {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "it sent more than the answer",
            ));
        }
        Ok(())
    }

    /// The last answer's body.
    pub(super) fn body(&self) -> &[u8] {
        &self.inbox[HEAD_BYTES..]
    }

    /// Gives back the memory of large messages.
    pub(super) fn tidy(&mut self) {
        for buffer in [&mut self.outbox, &mut self.inbox] {
            if buffer.capacity() > KEPT_BYTES {
                *buffer = Vec::new();
            }
        }
    }

    fn send(&mut self, deadline: Instant) -> io::Result<()> {
        let mut sent = 0;
        while sent < self.outbox.len() {
            match (&self.stream).write(&self.outbox[sent..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => sent += bytes,
                Err(error) if is_slice_over(&error) => {}
                Err(error) => return Err(error),
            }
            if sent < self.outbox.len() {
                let slice = left(deadline)?.min(SLICE);
                self.before_wait(PollFlags::OUT, slice)?;
            }
        }
        Ok(())
    }

    /// Reads an answer's beginning, which may be a moment or a long wait away.
    fn read_first(&mut self, deadline: Instant) -> io::Result<usize> {
        self.inbox.resize(READ_BYTES[0], 0);
        let (stream, inbox) = (&self.stream, &mut self.inbox);
        let found = self
            .spin
            .look(|| match receive_now(stream, &mut inbox[..]) {
                Err(error) if is_slice_over(&error) => None,
                outcome => Some(outcome),
            });
        match found {
            Some(Ok(0)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Some(Ok(bytes)) => {
                self.inbox.truncate(bytes);
                Ok(bytes)
            }
            Some(Err(error)) => Err(error),
            None => {
                self.inbox.clear();
                self.read_some(READ_BYTES[0], deadline)
            }
        }
    }

    /// Reads at most `most` bytes behind what the inbox holds.
    fn read_some(&mut self, most: usize, deadline: Instant) -> io::Result<usize> {
        let start = self.inbox.len();
        self.inbox.resize(start + most, 0);
        if let Wire::Plain(_) = &self.stream {
            self.before_wait(PollFlags::IN, left(deadline)?.min(SLICE))?;
        }
        loop {
            match (&self.stream).read(&mut self.inbox[start..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => {
                    self.inbox.truncate(start + bytes);
                    return Ok(bytes);
                }
                Err(error) if is_slice_over(&error) => {
                    self.before_wait(PollFlags::IN, left(deadline)?.min(SLICE))?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Has the next read or write wait for `slice` at most; over TLS, which never waits, waits here.
    fn before_wait(&mut self, flags: PollFlags, slice: Duration) -> io::Result<()> {
        match &self.stream {
            Wire::Tls(tls) => {
                wait_for(tls.as_fd(), flags, Instant::now() + slice)?;
            }
            Wire::Plain(stream) if flags == PollFlags::IN && slice != self.read_slice => {
                stream.set_read_timeout(Some(slice))?;
                self.read_slice = slice;
            }
            Wire::Plain(stream) if flags == PollFlags::OUT && slice != self.write_slice => {
                stream.set_write_timeout(Some(slice))?;
                self.write_slice = slice;
            }
            Wire::Plain(_) => {}
        }
        Ok(())
    }
}

/// Reads what has arrived, without waiting.
fn receive_now(mut stream: &Wire, buffer: &mut [u8]) -> io::Result<usize> {
    match stream {
        Wire::Plain(stream) => os::receive_now(stream, buffer),
        Wire::Tls(_) => stream.read(buffer),
    }
}

/// A socket's timeout reads as `WouldBlock` on Linux.
fn is_slice_over(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
    )
}
