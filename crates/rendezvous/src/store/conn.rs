//! One client as the server sees it: its socket, received data and answers on their way.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::time::Instant;

use super::outbox::Outbox;
use super::wire::{self, HEAD_BYTES, WireError};
use crate::auth::{Nonce, Nonces};
use crate::net::Wire;
use crate::os::Interest;
use crate::tls;

/// Bytes read from one client before the next has its turn.
const READ_BYTES: usize = 64 << 10;

/// Memory that an idle client's buffer may keep.
const KEPT_BYTES: usize = 4 << 10;

/// The state of a connection.
pub(super) enum State {
    /// Has connected; its greeting is awaited.
    Connected(Nonce),
    /// Has greeted; its proof is awaited.
    Challenged(Nonces),
    /// Has proven the token; its requests are served.
    Authenticated,
    /// Waits for keys.
    Waiting {
        /// The contents of the answer.
        wants: Wants,
        /// Keys that are still missing.
        missing: BTreeSet<String>,
    },
}

/// The contents of the answer to a client that waits for keys.
pub(super) enum Wants {
    Nothing,
    Value(String),
    Values(Vec<String>),
}

/// A connection without any policy.
pub(super) struct Conn {
    pub(super) stream: Wire,
    pub(super) peer: SocketAddr,
    pub(super) state: State,
    pub(super) outbox: Outbox,
    /// When the server acts on this client if nothing happens before: see [`super::serve`].
    pub(super) deadline: Option<Instant>,
    /// Whether complete messages wait for the client's next turn.
    pub(super) has_more: bool,
    /// The interest that the poller has.
    pub(super) interest: Interest,
    /// Bytes counted against the server's budget.
    pub(super) charged: usize,
    /// Messages that came or went completely.
    pub(super) completed: u64,
    inbox: Vec<u8>,
    /// Bytes of `inbox` that are done with.
    consumed: usize,
}

impl Conn {
    pub(super) fn new(stream: Wire, peer: SocketAddr, nonce: Nonce) -> Self {
        Self {
            stream,
            peer,
            state: State::Connected(nonce),
            outbox: Outbox::default(),
            deadline: None,
            has_more: false,
            interest: Interest::Read,
            charged: 0,
            completed: 0,
            inbox: Vec::new(),
            consumed: 0,
        }
    }

    pub(super) fn is_unauthenticated(&self) -> bool {
        matches!(self.state, State::Connected(_) | State::Challenged(_))
    }

    pub(super) fn is_waiting(&self) -> bool {
        matches!(self.state, State::Waiting { .. })
    }

    /// Whether an answer is still being sent. Nothing more is read from the client until then.
    pub(super) fn is_sending(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Whether the client has something to finish: a message it began or an answer to take.
    pub(super) fn is_busy(&self) -> bool {
        self.consumed < self.inbox.len() || self.is_sending()
    }

    pub(super) fn wanted(&self) -> Interest {
        if self.is_sending() {
            Interest::Write
        } else if self.is_waiting() || self.has_more {
            Interest::Hangup
        } else {
            Interest::Read
        }
    }

    /// Memory this client makes the server hold.
    pub(super) fn held_bytes(&self) -> usize {
        let waiting = match &self.state {
            State::Waiting { wants, missing } => {
                let wanted = match wants {
                    Wants::Values(keys) => keys.iter().map(|key| key.len() + 24).sum(),
                    Wants::Nothing | Wants::Value(_) => 0,
                };
                wanted + missing.iter().map(|key| key.len() + 128).sum::<usize>()
            }
            _ => 0,
        };
        let ahead = match &self.stream {
            Wire::Plain(_) => 0,
            Wire::Tls(tls) => tls.held_bytes(),
        };
        self.inbox.capacity() + self.outbox.held_bytes() + ahead + waiting
    }

    /// Reads once. `false` at the end of the stream.
    pub(super) fn receive(&mut self, scratch: &mut Vec<u8>) -> io::Result<bool> {
        let most = match &self.stream {
            Wire::Plain(_) => READ_BYTES,
            // All that it has read ahead, or the poller would know nothing of the rest.
            Wire::Tls(_) => tls::READ_BYTES,
        };
        scratch.resize(most, 0);
        match (&self.stream).read(scratch) {
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
        if let Wire::Tls(tls) = &self.stream {
            tls.tidy();
        }
    }

    /// Writes as much as the socket takes.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        if self.is_sending() && self.outbox.flush(&self.stream)? {
            self.completed += 1;
        }
        Ok(())
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
