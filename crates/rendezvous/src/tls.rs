//! TLS 1.3 over a TCP connection between two processes of one job, for sockets that are read and written when ready.
//!
//! There are no certificates. A process makes a key when it first needs one and shows it bare (RFC 7250), and either end
//! takes any key: who is at the other end is proved by the job's token *inside* the connection ([`crate::auth`]), and that
//! proof covers a [`Binding`], which both ends of one TLS connection derive alike and two different connections never do.
//! A proxy that ends TLS in the middle therefore fails at both ends.
//!
//! There are no tickets, no resumption and no early data. An end is an end of the TCP connection: whether a peer left in
//! peace is said by the protocol above, so `close_notify` would add nothing.

mod keys;
mod within;

use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::event::PollFlags;
use rustls::{ClientConnection, Connection, ServerConnection};

use self::keys::Keys;
pub(crate) use self::within::Within;
use crate::auth::{AuthError, NOTICE_BYTES, Side, WANTS_TLS, notice};
use crate::wait::wait_for;

/// A value that only the two ends of one TLS connection know: the exporter value of RFC 9266.
pub type Binding = [u8; 32];

const BINDING_LABEL: &[u8] = b"EXPORTER-Channel-Binding";
/// Bytes encrypted ahead of what the socket takes.
const BATCH_BYTES: usize = 64 << 10;
/// Encrypted bytes read ahead: at first, and at most where a peer sends much.
const INCOMING_BYTES: [usize; 2] = [4 << 10, 64 << 10];
/// A read into so much leaves nothing behind: what was read ahead, and a record that was incomplete before.
pub(crate) const READ_BYTES: usize = INCOMING_BYTES[1] + (20 << 10);
/// Records of handshake, alert and data begin with a number from here to there.
const RECORD_TYPES: std::ops::RangeInclusive<u8> = 20..=23;

/// A connection that is encrypted. Reads and writes never wait: they say `WouldBlock`.
///
/// Threads may share it. A write that says `WouldBlock` may have taken bytes: the writer comes again with bytes that begin
/// alike, and no other writer comes in between. Before a reader sleeps until the socket is ready, it asks
/// [`Tls::has_pending`].
///
/// *Errors*: of reading and writing: `InvalidData` where bytes are not what the peer encrypted; `ConnectionReset` where the
/// peer says so of this side's. *Cost*: 64 KiB each way at most.
pub struct Tls {
    stream: TcpStream,
    state: Mutex<State>,
}

impl Tls {
    /// Makes an encrypted connection of a fresh one, the dialer of which is TLS's client.
    ///
    /// *Blocks*: until `deadline` at most. *Errors*: [`AuthError::PlainPeer`] where the other end speaks no TLS but this
    /// project's language; else as for a peer that does not answer, or answers nonsense.
    pub fn handshake(stream: TcpStream, side: Side, deadline: Instant) -> Result<Self, AuthError> {
        const STEP: &str = "agree on keys with it";
        let failed = |error: io::Error| AuthError::from_io(STEP, &error);
        let tls = Self::begin(stream, side).map_err(failed)?;
        loop {
            let shaken = tls.lock().shake(&tls.stream);
            match shaken {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done.map(|()| tls).map_err(failed),
            }
            let mut flags = PollFlags::IN;
            flags.set(PollFlags::OUT, tls.lock().conn.wants_write());
            if !wait_for(tls.as_fd(), flags, deadline).map_err(failed)? {
                return Err(AuthError::TimedOut { step: STEP });
            }
        }
    }

    /// The same without waiting: the first reads and writes do what is left of the handshake.
    pub(crate) fn begin(stream: TcpStream, side: Side) -> io::Result<Self> {
        Self::begin_with(Keys::of_process()?, stream, side)
    }

    fn begin_with(keys: &Keys, stream: TcpStream, side: Side) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let conn = match side {
            Side::Dialer => {
                ClientConnection::new(keys.client.clone(), keys::name()).map(Into::into)
            }
            Side::Listener => ServerConnection::new(keys.server.clone()).map(Into::into),
        };
        let mut conn: Connection = conn.map_err(io::Error::other)?;
        conn.set_buffer_limit(Some(BATCH_BYTES));
        Ok(Self {
            stream,
            state: Mutex::new(State {
                conn,
                side,
                heard: false,
                ended: false,
                broken: None,
                incoming: Vec::new(),
                start: 0,
                end: 0,
                owed: 0,
            }),
        })
    }

    /// The value that ties a proof to this connection.
    ///
    /// *Errors*: the handshake is not over.
    pub fn binding(&self) -> Result<Binding, AuthError> {
        let state = self.lock();
        let exported = state
            .conn
            .export_keying_material([0; 32], BINDING_LABEL, None);
        exported.map_err(|error| AuthError::Tls {
            step: "tie its proof to the connection",
            reason: error.to_string(),
        })
    }

    /// Whether a read would find something that has left the socket already.
    pub fn has_pending(&self) -> bool {
        let mut state = self.lock();
        state.start < state.end
            || state
                .conn
                .process_new_packets()
                .map_or(true, |state| state.plaintext_bytes_to_read() > 0)
    }

    /// Sends a few bytes that will not be offered again: all of them, or none if the peer has not read for long.
    pub fn post(&self, word: &[u8]) {
        let mut state = self.lock();
        if state.owed > 0 || !matches!(state.flush(&self.stream), Ok(true)) {
            return;
        }
        // They fit an empty buffer. What the socket does not take goes with the next bytes in either direction.
        if state.conn.writer().write_all(word).is_ok() {
            let _ = state.flush(&self.stream);
        }
    }

    /// The connection underneath, for its addresses, options and end.
    pub fn tcp(&self) -> &TcpStream {
        &self.stream
    }

    /// Memory of the bytes that have been read ahead.
    pub(crate) fn held_bytes(&self) -> usize {
        self.lock().incoming.capacity()
    }

    /// Gives memory back that only a large message needed.
    pub(crate) fn tidy(&self) {
        let mut state = self.lock();
        if state.start == state.end && state.incoming.len() > INCOMING_BYTES[0] {
            (state.start, state.end) = (0, 0);
            state.incoming = Vec::new();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Read for &Tls {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.lock().read(&self.stream, buffer)
    }
}

impl Write for &Tls {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.lock().write(&self.stream, &[IoSlice::new(buffer)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.lock().write(&self.stream, parts)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Tls {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tls").field(&self.stream).finish()
    }
}

/// What is wrong with received data; inside an [`io::Error`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    #[error("{}", AuthError::PlainPeer)]
    PlainPeer,
    #[error("{}", AuthError::Foreign { got: *got })]
    Foreign { got: [u8; 4] },
    #[error(
        "its bytes fail TLS's check ({0}): they were changed on the way, or come from another sender"
    )]
    Refused(rustls::Error),
}

impl From<Fault> for io::Error {
    fn from(fault: Fault) -> Self {
        Self::new(io::ErrorKind::InvalidData, fault)
    }
}

/// The state behind the lock.
struct State {
    conn: Connection,
    side: Side,
    /// Whether the peer's first bytes have been seen to be TLS.
    heard: bool,
    ended: bool,
    /// Received bytes that could not be decrypted; all before them have been.
    broken: Option<rustls::Error>,
    /// Read from the socket and not yet decrypted: bytes `start..end`.
    incoming: Vec<u8>,
    start: usize,
    end: usize,
    /// Bytes that are encrypted and that their writer will offer again, because it was told `WouldBlock`.
    owed: usize,
}

impl State {
    fn read(&mut self, stream: &TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
        self.shake(stream)?;
        let mut got = 0;
        loop {
            got += self.take(&mut buffer[got..])?;
            if got == buffer.len() {
                return Ok(got);
            }
            if self.start == self.end || self.broken.is_some() {
                match (got, &self.broken) {
                    (0, Some(error)) => return Err(refusal(error)),
                    (0, None) if self.ended => return Ok(0),
                    (0, None) => self.fill(stream)?,
                    _ => return Ok(got),
                }
            }
            match self.decrypt(stream) {
                // Data that arrived whole before is not lost; the next read reports the error.
                Err(_) if got > 0 => return Ok(got),
                decrypted => decrypted?,
            }
        }
    }

    fn write(&mut self, stream: &TcpStream, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.shake(stream)?;
        if !self.flush(stream)? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if self.owed == 0 {
            self.owed = self.conn.writer().write_vectored(parts)?;
            if !self.flush(stream)? {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
        Ok(std::mem::take(&mut self.owed))
    }

    /// Does what it can of the handshake; `WouldBlock` as long as the peer has to say something.
    fn shake(&mut self, stream: &TcpStream) -> io::Result<()> {
        while self.conn.is_handshaking() {
            self.flush(stream)?;
            if self.start == self.end || !self.heard {
                self.fill(stream)?;
                if self.ended {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            self.decrypt(stream)?;
        }
        Ok(())
    }

    /// Writes what is encrypted; whether all of it is out.
    fn flush(&mut self, mut stream: &TcpStream) -> io::Result<bool> {
        while self.conn.wants_write() {
            match self.conn.write_tls(&mut stream) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Decrypted bytes that wait.
    fn take(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        match self.conn.reader().read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            taken => taken,
        }
    }

    /// One read from the socket.
    fn fill(&mut self, mut stream: &TcpStream) -> io::Result<()> {
        if self.start == self.end {
            // A read that filled all there was is followed by one that may take more.
            let [first, most] = INCOMING_BYTES;
            let size = match self.incoming.len() {
                0 => first,
                len if self.end == len => (4 * len).min(most),
                len => len,
            };
            (self.start, self.end) = (0, 0);
            if self.incoming.len() < size {
                self.incoming.resize(size, 0);
            }
        }
        let n = loop {
            match stream.read(&mut self.incoming[self.end..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        self.ended |= n == 0;
        self.end += n;
        Ok(())
    }

    /// Decrypts what has been read, at most a record's worth.
    fn decrypt(&mut self, stream: &TcpStream) -> io::Result<()> {
        if !self.heard && !self.is_tls(stream)? {
            return Ok(());
        }
        let mut bytes = &self.incoming[self.start..self.end];
        if !bytes.is_empty() {
            self.start += self.conn.read_tls(&mut bytes)?;
        }
        let outcome = self.conn.process_new_packets();
        // An answer to the handshake or to a new key, or why the peer is not listened to any more. That a peer has gone which
        // cannot be written to must not hide what it has said before: the next write finds out.
        let _ = self.flush(stream);
        match outcome {
            Ok(state) => {
                self.ended |= state.peer_has_closed();
                Ok(())
            }
            Err(error) => {
                let refused = refusal(&error);
                self.broken = Some(error);
                Err(refused)
            }
        }
    }

    /// Looks at the peer's first bytes; `false` while there are too few.
    fn is_tls(&mut self, mut stream: &TcpStream) -> io::Result<bool> {
        let Some(got) = self.incoming[self.start..self.end].first_chunk::<4>() else {
            return Ok(false);
        };
        if RECORD_TYPES.contains(&got[0]) {
            self.heard = true;
            return Ok(true);
        }
        if !got.starts_with(b"PLA") {
            return Err(Fault::Foreign { got: *got }.into());
        }
        if self.side == Side::Listener {
            // Fits the buffers of a connection that nothing was sent on.
            let told: [u8; NOTICE_BYTES] = notice(WANTS_TLS);
            let _ = stream.write(&told);
        }
        Err(Fault::PlainPeer.into())
    }
}

fn refusal(error: &rustls::Error) -> io::Error {
    match error {
        rustls::Error::AlertReceived(alert) => io::Error::new(
            io::ErrorKind::ConnectionReset,
            format!("the peer ended TLS: {alert:?}"),
        ),
        error => Fault::Refused(error.clone()).into(),
    }
}

#[cfg(test)]
mod tests;
