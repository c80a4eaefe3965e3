//! What callers see of messages between two ranks.

use super::copy::bytes_of;
use super::frame::Label;
use super::{MESSAGE_BYTES_MAX, PostedRecv, RecvTicket, SendTicket};
use crate::buffer::Buffer;
use crate::element::Element;
use crate::error::{Error, OpKind};
use crate::group::ProcessGroup;

impl ProcessGroup {
    /// Sends `data` to one rank, which takes it with [`recv`](Self::recv) and the same tag.
    ///
    /// Messages of one pair of ranks with one tag arrive in their order; those with different tags may be received in
    /// any order. Sends and receives take no part in the order of the collective operations and may run at the same
    /// time, from several threads. A rank may send to itself.
    ///
    /// *Blocks*: until the data is copied: into shared memory, where at most 64 MiB may be on their way before the
    /// receivers have taken them, or onto the connection, whose other end keeps 256 MiB.
    ///
    /// *Cost*: two copies and one frame of 40 bytes; in shared memory a second frame back.
    ///
    /// *Errors*: a rank that is none, or more than 1 GiB.
    pub fn send<T: Element>(&self, data: &[T], to: usize, tag: u32) -> Result<(), Error> {
        let label = self.label::<T>(data.len(), to, tag)?;
        self.member().p2p.send(bytes_of(data), label, to)
    }

    /// Sends a byte string to one rank, which takes it with [`recv_bytes`](Self::recv_bytes). Otherwise as
    /// [`send`](Self::send).
    pub fn send_bytes(&self, data: &[u8], to: usize, tag: u32) -> Result<(), Error> {
        let label = Label::plain(tag, data.len());
        self.check_send(&label, to)?;
        self.member().p2p.send(data, label, to)
    }

    /// Sends a buffer while the caller computes, without a copy where memory is shared. Otherwise as
    /// [`send`](Self::send).
    ///
    /// *Blocks*: only while 16384 messages are on their way, or 1024 on their way out.
    pub fn send_async<T: Element>(
        &self,
        buffer: Buffer<T>,
        to: usize,
        tag: u32,
    ) -> Result<SendTicket<T>, Error> {
        let len = buffer.len();
        let label = self.label::<T>(len, to, tag)?;
        self.check_own(OpKind::send(to, tag), &buffer)?;
        let p2p = &self.member().p2p;
        let (id, operation) = p2p.send_region(buffer.into_region(), label, to)?;
        Ok(SendTicket {
            group: self.clone(),
            id,
            to,
            tag,
            operation,
            len,
            element: std::marker::PhantomData,
        })
    }

    /// Fills `data` with the oldest message that rank `from` has sent with this tag.
    ///
    /// *Blocks*: until it has come, at most for the group's timeout; the death of a rank ends the wait at once.
    ///
    /// *Errors*: a message of another length or type is a [`Mismatch`](Error::Mismatch), which fails the group.
    pub fn recv<T: Element>(&self, data: &mut [T], from: usize, tag: u32) -> Result<(), Error> {
        self.recv_as(data, Some(from), tag).map(drop)
    }

    /// Fills `data` with the oldest message that any rank has sent with this tag, and says which rank that was.
    /// Otherwise as [`recv`](Self::recv).
    pub fn recv_any<T: Element>(&self, data: &mut [T], tag: u32) -> Result<usize, Error> {
        self.recv_as(data, None, tag)
    }

    /// The oldest byte string that rank `from` has sent with this tag, of whatever length. Otherwise as
    /// [`recv`](Self::recv).
    pub fn recv_bytes(&self, from: usize, tag: u32) -> Result<Vec<u8>, Error> {
        let (_, bytes) = self.recv_bytes_as(Some(from), tag)?;
        Ok(bytes)
    }

    /// The oldest byte string that any rank has sent with this tag, and that rank.
    pub fn recv_bytes_any(&self, tag: u32) -> Result<(usize, Vec<u8>), Error> {
        self.recv_bytes_as(None, tag)
    }

    /// Posts a receive, which takes its turn among those for the same messages now.
    ///
    /// *Blocks*: no. *Errors*: a rank that is none; the others come with the ticket.
    pub fn recv_async<T: Element>(
        &self,
        buffer: Buffer<T>,
        from: usize,
        tag: u32,
    ) -> Result<RecvTicket<T>, Error> {
        let posted = self.post_recv(buffer.len(), Some(from), tag)?;
        Ok(RecvTicket { posted, buffer })
    }

    /// As [`recv_async`](Self::recv_async) for a message of `len` elements, from one rank or from any, into memory that the caller brings
    /// when it waits.
    pub fn post_recv<T: Element>(
        &self,
        len: usize,
        from: Option<usize>,
        tag: u32,
    ) -> Result<PostedRecv<T>, Error> {
        let kind = OpKind::recv(from, tag);
        self.check_root(kind, from.unwrap_or(0))?;
        let p2p = &self.member().p2p;
        let (operation, label) = (p2p.operation(kind), Label::of::<T>(tag, len));
        Ok(PostedRecv {
            claim: p2p.post_for_later(operation, &label, from)?,
            group: self.clone(),
            operation,
            label,
            element: std::marker::PhantomData,
        })
    }

    fn recv_as<T: Element>(
        &self,
        data: &mut [T],
        from: Option<usize>,
        tag: u32,
    ) -> Result<usize, Error> {
        let kind = OpKind::recv(from, tag);
        self.check_root(kind, from.unwrap_or(0))?;
        let p2p = &self.member().p2p;
        let (claim, operation) = (p2p.post(from, tag)?, p2p.operation(kind));
        let label = Label::of::<T>(tag, data.len());
        p2p.receive(claim, operation, &label, data)
    }

    fn recv_bytes_as(&self, from: Option<usize>, tag: u32) -> Result<(usize, Vec<u8>), Error> {
        let kind = OpKind::recv(from, tag);
        self.check_root(kind, from.unwrap_or(0))?;
        let p2p = &self.member().p2p;
        let (claim, operation) = (p2p.post(from, tag)?, p2p.operation(kind));
        p2p.receive_bytes(claim, operation)
    }

    fn label<T: Element>(&self, len: usize, to: usize, tag: u32) -> Result<Label, Error> {
        let label = Label::of::<T>(tag, len);
        self.check_send(&label, to)?;
        Ok(label)
    }

    fn check_send(&self, label: &Label, to: usize) -> Result<(), Error> {
        let kind = OpKind::send(to, label.tag);
        self.check_root(kind, to)?;
        self.require(kind, label.bytes() <= MESSAGE_BYTES_MAX, || {
            let contents = label.contents();
            format!("{contents}, at most {MESSAGE_BYTES_MAX} bytes are allowed")
        })
    }
}
