//! Receipts for messages on their way.

use std::time::Duration;

use super::PointToPoint;
use super::frame::Label;
use crate::buffer::Buffer;
use crate::element::Element;
use crate::error::{Error, Operation};
use crate::group::ProcessGroup;

/// A buffer that is being sent. It is sent whether or not anybody waits; dropping the ticket drops the buffer.
///
/// Keeps the group alive.
#[derive(Debug)]
pub struct SendTicket<T: Element> {
    pub(super) group: ProcessGroup,
    pub(super) id: u64,
    pub(super) to: usize,
    pub(super) tag: u32,
    pub(super) operation: Operation,
    pub(super) len: usize,
    pub(super) element: std::marker::PhantomData<T>,
}

impl<T: Element> SendTicket<T> {
    /// Waits until the buffer is free again, and gives it back: until the receiver has taken the data where memory is
    /// shared, until it has gone out elsewhere.
    ///
    /// *Blocks*: at most for the group's timeout. *Errors*: the group's first failure.
    pub fn wait(self) -> Result<Buffer<T>, Error> {
        let p2p = self.p2p();
        let wait = p2p.op_wait(self.operation);
        let label = Label::of::<T>(self.tag, self.len);
        let noted = p2p.note(self.operation, &label, wait.started);
        let _entered = p2p.status.enter(self.operation);
        let region = p2p
            .wait_until(&wait, |state| match state.ledger.is_done(self.id) {
                true => Ok(()),
                false => Err(vec![self.to]),
            })
            .map(|mut state| state.ledger.collect(self.id))
            // Without its memory: the receiver is gone.
            .and_then(|region| region.ok_or_else(|| wait.cause_of_end(self.to)));
        let region = p2p.settle(region)?;
        noted.finished();
        Ok(Buffer::new(region, self.len))
    }

    /// Waits, but at most `limit`; gives the ticket back when the buffer is still on its way.
    pub fn wait_timeout(self, limit: Duration) -> Result<Result<Buffer<T>, Error>, Self> {
        match self.is_done_within(limit) {
            true => Ok(self.wait()),
            false => Err(self),
        }
    }

    /// Whether waiting would return at once.
    pub fn is_done(&self) -> bool {
        self.is_done_within(Duration::ZERO)
    }

    fn is_done_within(&self, limit: Duration) -> bool {
        let done = |state: &super::State| state.ledger.is_done(self.id);
        self.p2p().is_settled_within(limit, done)
    }

    fn p2p(&self) -> &PointToPoint {
        &self.group.member().p2p
    }
}

impl<T: Element> Drop for SendTicket<T> {
    fn drop(&mut self) {
        let p2p = self.p2p();
        p2p.state.lock().ledger.disown(self.id);
    }
}

/// A message that has been received.
#[derive(Debug)]
pub struct Received<T: Element> {
    /// The caller's buffer, with the data.
    pub buffer: Buffer<T>,
    /// The rank that sent it.
    pub from: usize,
}

/// A receive that has been posted, whose data goes into memory that its caller brings. Dropping it gives the receive up; a message that
/// had come for it is lost.
///
/// Keeps the group alive.
#[derive(Debug)]
pub struct PostedRecv<T: Element> {
    pub(super) group: ProcessGroup,
    pub(super) claim: u64,
    pub(super) operation: Operation,
    pub(super) label: Label,
    pub(super) element: std::marker::PhantomData<T>,
}

impl<T: Element> PostedRecv<T> {
    /// Waits for the message, copies it into `data`, and says which rank sent it.
    ///
    /// *Shape*: as long as the receive was posted for. *Blocks*: at most for the group's timeout, counted from here: a receive may be
    /// posted long before. *Errors*: as [`recv`](ProcessGroup::recv).
    pub fn wait(self, data: &mut [T]) -> Result<usize, Error> {
        let label = Label::of::<T>(self.label.tag, data.len());
        let p2p = &self.group.member().p2p;
        p2p.receive(self.claim, self.operation, &label, data)
    }

    fn is_done_within(&self, limit: Duration) -> bool {
        let matched = |state: &super::State| state.shelf.is_matched(self.claim);
        let p2p = &self.group.member().p2p;
        p2p.is_settled_within(limit, matched)
    }
}

impl<T: Element> Drop for PostedRecv<T> {
    fn drop(&mut self) {
        let p2p = &self.group.member().p2p;
        p2p.withdraw(self.claim, self.operation);
    }
}

/// A receive that has been posted with its buffer. Dropping the ticket gives the receive up; a message that had come for it is lost.
///
/// Keeps the group alive.
#[derive(Debug)]
pub struct RecvTicket<T: Element> {
    pub(super) posted: PostedRecv<T>,
    pub(super) buffer: Buffer<T>,
}

impl<T: Element> RecvTicket<T> {
    /// Waits for the message and copies it into the buffer.
    ///
    /// *Blocks*: at most for the group's timeout, counted from here: a receive may be posted long before.
    /// *Errors*: as [`recv`](ProcessGroup::recv).
    pub fn wait(self) -> Result<Received<T>, Error> {
        let mut buffer = self.buffer;
        let from = self.posted.wait(&mut buffer)?;
        Ok(Received { buffer, from })
    }

    /// Waits, but at most `limit`; gives the ticket back when nothing has come.
    pub fn wait_timeout(self, limit: Duration) -> Result<Result<Received<T>, Error>, Self> {
        match self.posted.is_done_within(limit) {
            true => Ok(self.wait()),
            false => Err(self),
        }
    }

    /// Whether waiting would return at once.
    pub fn is_done(&self) -> bool {
        self.posted.is_done_within(Duration::ZERO)
    }
}
