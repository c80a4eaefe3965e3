//! What carries a lane's bytes: a connection, or a line over MPI. Nothing here waits.

use std::io::{self, IoSlice, Write};
use std::os::fd::{AsFd, BorrowedFd};

use crate::mpi::Line;
use crate::socket::{End, Socket, moved, read_now};

#[derive(Debug)]
pub(crate) enum Wire {
    Socket(Socket),
    Mpi(Box<Line>),
}

impl From<Socket> for Wire {
    fn from(socket: Socket) -> Self {
        Self::Socket(socket)
    }
}

impl From<Line> for Wire {
    fn from(line: Line) -> Self {
        Self::Mpi(Box::new(line))
    }
}

impl Wire {
    pub(super) fn prepare(&self) -> io::Result<()> {
        match self {
            Self::Socket(socket) => {
                socket.set_nonblocking(true)?;
                socket.set_nodelay()
            }
            Self::Mpi(_) => Ok(()),
        }
    }

    /// Reads what is there; nothing when there is nothing now.
    pub(super) fn read(&mut self, into: &mut [u8]) -> Result<Option<usize>, End> {
        match self {
            Self::Socket(socket) => read_now(socket, into),
            Self::Mpi(line) => line.read(into).map_err(ended),
        }
    }

    /// Takes as many of the bytes as there is room for; how many.
    pub(super) fn write(&mut self, parts: &[IoSlice<'_>]) -> Result<usize, End> {
        match self {
            Self::Socket(socket) => {
                let mut socket = &*socket;
                let written = moved(socket.write_vectored(parts)).map_err(|_| End::Closed)?;
                Ok(written.unwrap_or(0))
            }
            Self::Mpi(line) => line.write(parts).map_err(ended),
        }
    }

    /// Whether all that was taken goes its way without this rank: the kernel sends by itself, MPI only when it is called.
    pub(super) fn flush(&mut self) -> Result<bool, End> {
        match self {
            Self::Socket(_) => Ok(true),
            Self::Mpi(line) => line.flush().map_err(ended),
        }
    }

    /// Whether the last [`flush`](Self::flush) left something.
    pub(super) fn holds_unsent(&self) -> bool {
        match self {
            Self::Socket(_) => false,
            Self::Mpi(line) => line.holds_unsent(),
        }
    }

    /// What `poll` can wait for, if it can.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Socket(socket) => Some(socket.as_fd()),
            Self::Mpi(_) => None,
        }
    }

    /// Whether something can be read that `poll` knows nothing of.
    pub(super) fn has_pending(&self) -> bool {
        match self {
            Self::Socket(socket) => socket.has_pending(),
            Self::Mpi(_) => false,
        }
    }

    /// Memory for what is on its way.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Socket(_) => 0,
            Self::Mpi(line) => line.bytes(),
        }
    }
}

/// MPI does not say whether the peer or the way to it is gone; why is learned on the connection for messages, as with sockets.
fn ended(reason: String) -> End {
    paceline_rendezvous::notice!(WARN, "MPI moves no more data to or from a rank: {reason}");
    End::Closed
}
