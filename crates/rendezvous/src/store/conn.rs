//! One client as the server sees it: its socket, what has arrived from it and what is on the way to it.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use super::table::Answer;
use super::wire::{self, HEAD_BYTES, WireError};
use crate::auth::{Door, GreetedDoor};
use crate::os::Interest;

/// How much is read from one client before the next has its turn.
const READ_BYTES: usize = 64 << 10;

/// What an idle client's buffer may keep.
const KEPT_BYTES: usize = 4 << 10;

/// How far a client has come.
pub(super) enum State {
    /// Has connected; its greeting is awaited.
    Stranger(Door),
    /// Has greeted; its proof is awaited.
    Greeted(GreetedDoor),
    /// Has proven the token; its requests are served.
    Member,
    /// Waits for keys.
    Parked {
        /// Whether the answer is the value of the one key.
        get: Option<String>,
        /// Keys that are still missing.
        missing: BTreeSet<String>,
    },
}

/// A connection without any policy.
pub(super) struct Conn {
    pub(super) stream: TcpStream,
    pub(super) peer: SocketAddr,
    pub(super) state: State,
    /// What the server will do about this client when nothing happens before: see [`super::serve`].
    pub(super) deadline: Option<Instant>,
    /// What the poller was told last.
    pub(super) interest: Interest,
    /// Bytes counted against the server's budget.
    pub(super) charged: usize,
    /// Messages that came or went completely.
    pub(super) completed: u64,
    inbox: Vec<u8>,
    /// Bytes of `inbox` that are done with.
    consumed: usize,
    outbox: Vec<u8>,
    /// A value on its way, shared with the table, behind `outbox`.
    tail: Option<Arc<[u8]>>,
    sent: usize,
}

impl Conn {
    pub(super) fn new(stream: TcpStream, peer: SocketAddr, door: Door) -> Self {
        Self {
            stream,
            peer,
            state: State::Stranger(door),
            deadline: None,
            interest: Interest::Read,
            charged: 0,
            completed: 0,
            inbox: Vec::new(),
            consumed: 0,
            outbox: Vec::new(),
            tail: None,
            sent: 0,
        }
    }

    pub(super) fn is_stranger(&self) -> bool {
        matches!(self.state, State::Stranger(_) | State::Greeted(_))
    }

    /// Whether an answer is still on its way. Nothing more is read from the client before it is out.
    pub(super) fn is_sending(&self) -> bool {
        self.sent < self.outbox.len() + self.tail.as_ref().map_or(0, |tail| tail.len())
    }

    /// Whether the beginning of a message is there and its end is not.
    pub(super) fn is_receiving(&self) -> bool {
        self.consumed < self.inbox.len()
    }

    pub(super) fn wanted(&self) -> Interest {
        match self.state {
            _ if self.is_sending() => Interest::Write,
            State::Parked { .. } => Interest::Hangup,
            _ => Interest::Read,
        }
    }

    /// Memory this client makes the server hold.
    pub(super) fn held_bytes(&self) -> usize {
        let parked = match &self.state {
            State::Parked { missing, .. } => missing.iter().map(|key| key.len() + 128).sum(),
            _ => 0,
        };
        self.inbox.capacity() + parked
    }

    /// Reads once. `false` at the end of the stream.
    pub(super) fn receive(&mut self, scratch: &mut Vec<u8>) -> io::Result<bool> {
        scratch.resize(READ_BYTES, 0);
        match self.stream.read(scratch) {
            Ok(0) => Ok(false),
            Ok(bytes) => {
                self.inbox.extend_from_slice(&scratch[..bytes]);
                Ok(true)
            }
            Err(error) if is_transient(&error) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Takes a message of fixed size, once it is there.
    pub(super) fn take_fixed<const N: usize>(&mut self) -> Option<[u8; N]> {
        let message = self.inbox[self.consumed..].first_chunk().copied()?;
        self.consumed += N;
        self.completed += 1;
        Some(message)
    }

    /// The body of the next frame, once it is there. An oversized one is an error as soon as its head is.
    pub(super) fn next_body(&mut self) -> Result<Option<std::ops::Range<usize>>, WireError> {
        let Some(head) = self.inbox[self.consumed..].first_chunk::<HEAD_BYTES>() else {
            return Ok(None);
        };
        let start = self.consumed + HEAD_BYTES;
        let end = start + wire::body_bytes(*head)?;
        if self.inbox.len() < end {
            return Ok(None);
        }
        self.consumed = end;
        self.completed += 1;
        Ok(Some(start..end))
    }

    /// The bytes of a range from [`Conn::next_body`].
    pub(super) fn body(&self, range: std::ops::Range<usize>) -> &[u8] {
        &self.inbox[range]
    }

    /// Forgets what is done with, and gives back the memory of a large message.
    pub(super) fn tidy(&mut self) {
        self.inbox.drain(..self.consumed);
        self.consumed = 0;
        if self.inbox.is_empty() && self.inbox.capacity() > KEPT_BYTES {
            self.inbox = Vec::new();
        }
    }

    pub(super) fn queue(&mut self, bytes: Vec<u8>) {
        (self.outbox, self.tail, self.sent) = (bytes, None, 0);
    }

    pub(super) fn answer(&mut self, answer: Answer) {
        (self.outbox, self.tail) = answer.frame();
        self.sent = 0;
    }

    /// Writes as much as the socket takes.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        if !self.is_sending() {
            return Ok(());
        }
        while self.is_sending() {
            let rest = match self.outbox.get(self.sent..) {
                Some(rest) if !rest.is_empty() => rest,
                _ => &self.tail.as_deref().unwrap_or_default()[self.sent - self.outbox.len()..],
            };
            match self.stream.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => self.sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        (self.outbox, self.tail, self.sent) = (Vec::new(), None, 0);
        self.completed += 1;
        Ok(())
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
