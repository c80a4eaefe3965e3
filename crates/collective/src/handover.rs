//! Gives descriptors to a peer on the same host, over a Unix socket.
#![allow(unsafe_code)]

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use paceline_rendezvous::page::JobPage;
use rustix::event::PollFlags;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::error::Error;
use crate::message::Message;
use crate::socket::{Socket, Within};

/// Travels with the descriptors: ancillary data needs a byte to ride on, and a magic shows a peer out of step.
const MAGIC: [u8; 8] = *b"PACEFDS1";
/// A segment, with it either an earlier generation's arena or the job page, and one end of a connection.
pub(crate) const FDS_MAX: usize = 3;

/// Sends descriptors; the peer gets duplicates.
pub(crate) fn send(socket: &Socket, fds: &[BorrowedFd<'_>], deadline: Instant) -> io::Result<()> {
    assert!(fds.len() <= FDS_MAX);
    Within::new(socket, deadline).ready(PollFlags::OUT)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("the descriptors do not fit the message"));
    }
    match sendmsg(
        socket.as_fd(),
        &[IoSlice::new(&MAGIC)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )? {
        n if n == MAGIC.len() => Ok(()),
        n => Err(io::Error::new(
            io::ErrorKind::WriteZero,
            format!("only {n} of {} bytes were sent", MAGIC.len()),
        )),
    }
}

/// Receives what [`send`] sent. Everything that arrives and is not wanted is closed.
///
/// *Errors*: one that holds an [`Error`] when the peer gave up instead and said why.
pub(crate) fn receive(socket: &Socket, deadline: Instant) -> io::Result<Vec<OwnedFd>> {
    Within::new(socket, deadline).ready(PollFlags::IN)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut magic = [0; MAGIC.len()];
    let parts = &mut [IoSliceMut::new(&mut magic)];
    let message = recvmsg(
        socket.as_fd(),
        parts,
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut fds = Vec::new();
    for item in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = item {
            fds.extend(received);
        }
    }
    if let Some(said) = instead(socket, &magic[..message.bytes], deadline) {
        return Err(io::Error::other(said));
    }
    if message.bytes != MAGIC.len()
        || magic != MAGIC
        || message.flags.contains(ReturnFlags::CTRUNC)
        || fds.is_empty()
    {
        let text = format!(
            "expected descriptors, got {} bytes and {} descriptors",
            message.bytes,
            fds.len()
        );
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok(fds)
}

/// Why a peer gave up, if that is what `first` is the beginning of.
fn instead(socket: &Socket, first: &[u8], deadline: Instant) -> Option<Error> {
    let mut stream = Within::new(socket, deadline);
    let mut arrived = first.to_vec();
    let mut bytes = [0; 256];
    loop {
        match Message::take(&mut arrived).ok()? {
            Some(Message::Abort(abort)) => return Some(abort.into_error()),
            Some(_) => return None,
            None if first.is_empty() => return None,
            None => {}
        }
        let n = stream.read(&mut bytes).ok().filter(|n| *n > 0)?;
        arrived.extend(&bytes[..n]);
    }
}

/// The descriptor of a page that was made to be handed on.
pub(crate) fn page_fd(page: &JobPage) -> Option<BorrowedFd<'_>> {
    // SAFETY: the page owns the descriptor and is borrowed for as long as the result.
    page.raw_fd()
        .map(|fd| unsafe { BorrowedFd::borrow_raw(fd) })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    fn pair() -> (Socket, Socket) {
        let (a, b) = UnixStream::pair().unwrap();
        (Socket::Unix(a), Socket::Unix(b))
    }

    #[test]
    fn descriptors_arrive() {
        let (a, b) = pair();
        let deadline = Instant::now() + Duration::from_secs(5);
        let file = std::fs::File::open("/proc/self/stat").unwrap();
        send(&a, &[file.as_fd(), file.as_fd()], deadline).unwrap();
        let fds = receive(&b, deadline).unwrap();
        assert_eq!(fds.len(), 2);
        assert_eq!(
            rustix::fs::fstat(&fds[0]).unwrap().st_ino,
            rustix::fs::fstat(&file).unwrap().st_ino
        );
    }

    #[test]
    fn bytes_without_descriptors_are_refused() {
        let (a, b) = pair();
        (&mut &a).write_all(&MAGIC).unwrap();
        let error = receive(&b, Instant::now() + Duration::from_secs(5)).unwrap_err();
        assert!(error.to_string().contains("0 descriptors"), "{error}");
    }

    #[test]
    fn a_silent_peer_is_given_up() {
        let (_a, b) = pair();
        let error = receive(&b, Instant::now() + Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
