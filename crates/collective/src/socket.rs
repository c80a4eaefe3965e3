//! Connections between two ranks: Unix sockets on one host, TCP between hosts, with TLS where the job asks for it.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use paceline_rendezvous::tls::{Binding, Tls};
use paceline_rendezvous::wait::{poll_for, wait_for};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::RecvFlags;

/// A connection to a peer.
#[derive(Debug)]
pub(crate) enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
    /// Reads and writes never wait. After a write that returned `WouldBlock`, the next one begins with the same bytes.
    Tls(Box<Tls>),
}

impl Socket {
    pub(crate) fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_nonblocking(nonblocking),
            Self::Tcp(stream) => stream.set_nonblocking(nonblocking),
            Self::Tls(_) => Ok(()),
        }
    }

    /// Another handle by which the connection can be ended; with TLS nothing else can be done with it.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
            Self::Tls(tls) => Self::Tcp(tls.tcp().try_clone()?),
        })
    }

    /// Has small writes go out at once.
    pub(crate) fn set_nodelay(&self) -> io::Result<()> {
        match self {
            Self::Unix(_) => Ok(()),
            Self::Tcp(stream) => stream.set_nodelay(true),
            Self::Tls(tls) => tls.tcp().set_nodelay(true),
        }
    }

    /// What a proof over this connection has to cover.
    pub(crate) fn binding(&self) -> Result<Option<Binding>, String> {
        match self {
            Self::Unix(_) | Self::Tcp(_) => Ok(None),
            Self::Tls(tls) => tls.binding().map(Some).map_err(|error| error.to_string()),
        }
    }

    /// Whether something can be read that `poll` knows nothing of, because it has left the kernel.
    pub(crate) fn has_pending(&self) -> bool {
        match self {
            Self::Unix(_) | Self::Tcp(_) => false,
            Self::Tls(tls) => tls.has_pending(),
        }
    }

    /// Sends a word of a few bytes now or never: a peer that does not read is stopped or dead.
    pub(crate) fn post(&self, word: &[u8]) {
        let mut socket = self;
        match self {
            // One write, which a connection that carries only such words takes whole.
            Self::Unix(_) | Self::Tcp(_) => drop(socket.write(word)),
            Self::Tls(tls) => tls.post(word),
        }
    }

    /// Ends the connection for all holders of a clone; threads that read from it return.
    pub(crate) fn shutdown(&self) {
        // Fails when the peer was faster, which is as good.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Self::Tls(tls) => tls.tcp().shutdown(Shutdown::Both),
        };
    }

    /// Whether the process at the other end belongs to the same user; over TCP there is no way to know, and the token
    /// has to do.
    pub(crate) fn check_user(&self) -> Result<(), String> {
        let Self::Unix(stream) = self else {
            return Ok(());
        };
        let theirs = rustix::net::sockopt::socket_peercred(stream)
            .map_err(|error| error.to_string())?
            .uid;
        let ours = rustix::process::geteuid();
        if theirs == ours {
            Ok(())
        } else {
            Err(format!(
                "it runs as user {}, this rank as {}",
                theirs.as_raw(),
                ours.as_raw()
            ))
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
            Self::Tls(tls) => tls.as_fd(),
        }
    }
}

impl Read for &Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Unix(stream) => (&mut &*stream).read(buffer),
            Socket::Tcp(stream) => (&mut &*stream).read(buffer),
            Socket::Tls(tls) => (&mut &**tls).read(buffer),
        }
    }
}

impl Write for &Socket {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Unix(stream) => (&mut &*stream).write(buffer),
            Socket::Tcp(stream) => (&mut &*stream).write(buffer),
            Socket::Tls(tls) => (&mut &**tls).write(buffer),
        }
    }

    fn write_vectored(&mut self, parts: &[io::IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Socket::Unix(stream) => (&mut &*stream).write_vectored(parts),
            Socket::Tcp(stream) => (&mut &*stream).write_vectored(parts),
            Socket::Tls(tls) => (&mut &**tls).write_vectored(parts),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Why nothing more comes from a peer.
#[derive(Debug)]
pub(crate) enum End {
    Closed,
    Nonsense(String),
}

/// What a read or write that does not wait has moved; nothing when the socket is not ready.
pub(crate) fn moved(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(n) => Ok(Some(n)),
        Err(error) => match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
            _ => Err(error),
        },
    }
}

/// Reads what is there; nothing when there is nothing now.
pub(crate) fn read_now(mut socket: &Socket, into: &mut [u8]) -> Result<Option<usize>, End> {
    match moved(socket.read(into)) {
        Ok(Some(0)) => Err(End::Closed),
        Ok(moved) => Ok(moved),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            Err(End::Nonsense(error.to_string()))
        }
        Err(_) => Err(End::Closed),
    }
}

/// Whether the other end has closed the connection, and all that it has sent has been read.
pub(crate) fn has_ended(socket: &Socket) -> bool {
    let mut byte = [0_u8; 1];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let peeked = rustix::net::recv(socket, &mut byte, flags);
    match peeked {
        Ok((_, len)) => len == 0,
        Err(error) => error != Errno::AGAIN && error != Errno::INTR,
    }
}

/// The sockets that there are, with their places.
pub(crate) fn present(sockets: &[Option<Socket>]) -> impl Iterator<Item = (usize, &Socket)> {
    let sockets = sockets.iter().enumerate();
    sockets.filter_map(|(peer, socket)| Some((peer, socket.as_ref()?)))
}

/// A socket whose blocking reads and writes all end at one moment.
#[derive(Debug)]
pub(crate) struct Within<'a> {
    pub(crate) socket: &'a Socket,
    pub(crate) deadline: Instant,
}

impl<'a> Within<'a> {
    pub(crate) fn new(socket: &'a Socket, deadline: Instant) -> Self {
        Self { socket, deadline }
    }

    pub(crate) fn ready(&self, flags: PollFlags) -> io::Result<()> {
        match wait_for(self.socket.as_fd(), flags, self.deadline)? {
            true => Ok(()),
            false => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the peer took too long",
            )),
        }
    }
}

impl Read for Within<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut socket = self.socket;
        loop {
            if !socket.has_pending() {
                self.ready(PollFlags::IN)?;
            }
            match socket.read(buffer) {
                // Bytes have come, and no whole record.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
        }
    }
}

impl Write for Within<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let mut socket = self.socket;
        loop {
            self.ready(PollFlags::OUT)?;
            match socket.write(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return written,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits until one of `watched` is ready or `others` are, at most for `limit`; which of them are, the others first. An
/// interruption counts as nothing ready.
///
/// *Errors*: only a lack of memory.
pub(crate) fn poll_sockets(
    others: &[BorrowedFd<'_>],
    watched: &[(usize, &Socket)],
    limit: Duration,
) -> io::Result<(Vec<bool>, Vec<bool>)> {
    let pending: Vec<bool> = watched
        .iter()
        .map(|(_, socket)| socket.has_pending())
        .collect();
    let limit = match pending.contains(&true) {
        true => Duration::ZERO,
        false => limit,
    };
    let others = others
        .iter()
        .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN));
    let count = others.len();
    let sockets = watched
        .iter()
        .map(|(_, socket)| PollFd::new(*socket, PollFlags::IN));
    let mut fds: Vec<PollFd<'_>> = others.chain(sockets).collect();
    poll_for(&mut fds, limit)?;
    let ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
    let (others, sockets) = fds.split_at(count);
    let sockets = sockets.iter().zip(pending);
    Ok((
        others.iter().map(ready).collect(),
        sockets.map(|(fd, pending)| pending || ready(fd)).collect(),
    ))
}

/// Where peers dial.
#[derive(Debug)]
pub(crate) enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    /// Makes room for `connections` that have not been accepted yet: all peers may dial at the same moment.
    pub(crate) fn prepare(&self, connections: usize) -> io::Result<()> {
        rustix::net::listen(self.as_fd(), i32::try_from(connections).unwrap_or(i32::MAX))?;
        match self {
            Self::Unix(listener) => listener.set_nonblocking(true),
            Self::Tcp(listener) => listener.set_nonblocking(true),
        }
    }

    /// The next connection, if one is there.
    pub(crate) fn accept(&self) -> io::Result<Socket> {
        let socket = match self {
            Self::Unix(listener) => Socket::Unix(listener.accept()?.0),
            Self::Tcp(listener) => Socket::Tcp(listener.accept()?.0),
        };
        socket.set_nonblocking(false)?;
        Ok(socket)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}
