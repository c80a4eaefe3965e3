//! The sender's side of a message.

use std::sync::Arc;

use super::frame::{Frame, Label};
use super::outbox::Job;
use super::shelf::{Body, P2pMessage};
use super::{KEPT_BYTES_MAX, Links, PointToPoint};
use crate::error::{Error, OpKind, Operation};
use crate::memory::{Arena, Home, Region};
use crate::status::OpWait;

impl PointToPoint {
    /// Copies `bytes` and puts them on their way. *Blocks* while too much is on its way.
    pub(super) fn send(
        self: &Arc<Self>,
        bytes: &[u8],
        label: Label,
        to: usize,
    ) -> Result<(), Error> {
        let operation = self.operation(OpKind::send(to, label.tag));
        let wait = self.op_wait(operation);
        let noted = self.note(operation, &label, wait.started);
        let sent = self.settle(self.begin().and_then(|()| {
            let _entered = self.status.enter(operation);
            match self.arena(to) {
                Some(arena) => {
                    let id = self.open(to, bytes.len(), false, &wait)?;
                    let offset = self.fill(id, arena, bytes)?;
                    self.hand(to, Frame::Shared { label, id, offset }, &[], &wait)
                }
                None => {
                    self.drain_outbox(to, &wait)?;
                    self.send_inline(bytes, label, to, &wait)
                }
            }
        }));
        if sent.is_ok() {
            noted.finished();
            self.count(&label, to);
        }
        sent
    }

    /// Puts a caller's own buffer on its way without a copy where that can be; returns the message's number.
    pub(super) fn send_region(
        self: &Arc<Self>,
        region: Region,
        label: Label,
        to: usize,
    ) -> Result<(u64, Operation), Error> {
        let operation = self.operation(OpKind::send(to, label.tag));
        let wait = self.op_wait(operation);
        let noted = self.note(operation, &label, wait.started);
        let id = self.settle(self.begin().and_then(|()| {
            let _entered = self.status.enter(operation);
            let id = self.open(to, 0, true, &wait)?;
            if self.arena(to).is_none() {
                // The thread that sends it may be faster.
                noted.on_its_way();
                let job = Job {
                    id,
                    to,
                    label,
                    operation,
                    region,
                };
                return self.queue(job, &wait).map(|()| id);
            }
            let offset = offset(&region);
            self.state.lock().ledger.keep(id, region);
            self.hand(to, Frame::Shared { label, id, offset }, &[], &wait)?;
            noted.on_its_way();
            Ok(id)
        }))?;
        self.count(&label, to);
        Ok((id, operation))
    }

    /// Notes a message for the ledger, once there is room for it.
    pub(super) fn open(
        &self,
        to: usize,
        bytes: usize,
        ticket: bool,
        wait: &OpWait<'_>,
    ) -> Result<u64, Error> {
        let mut state = self.wait_until(wait, |state| match state.ledger.has_room(bytes) {
            true => Ok(()),
            false => Err(state.ledger.debtors()),
        })?;
        Ok(state.ledger.open(to, bytes, ticket))
    }

    /// Copies a message into this rank's segment and says where it lies.
    pub(super) fn fill(&self, id: u64, arena: &Arc<Arena>, bytes: &[u8]) -> Result<u64, Error> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let spare = self.state.lock().ledger.reuse(bytes.len());
        let mut region = match spare {
            Some(region) => region,
            None => Arena::allocate_unwritten(arena, bytes.len())?,
        };
        region.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        let offset = offset(&region);
        self.state.lock().ledger.keep(id, region);
        Ok(offset)
    }

    /// Hands a frame to a rank that has to be there.
    fn hand(&self, to: usize, frame: Frame, body: &[u8], wait: &OpWait<'_>) -> Result<(), Error> {
        match self.tell(to, &frame, body, wait)? {
            true => Ok(()),
            false => Err(wait.cause_of_end(to)),
        }
    }

    pub(super) fn send_inline(
        &self,
        bytes: &[u8],
        label: Label,
        to: usize,
        wait: &OpWait<'_>,
    ) -> Result<(), Error> {
        if to == self.status.rank {
            let mut body = Region::heap(bytes.len())?;
            body.as_mut_slice().copy_from_slice(bytes);
            let mut state = self.wait_until(wait, |state| {
                match state.shelf.has_room(to, bytes.len(), KEPT_BYTES_MAX) {
                    true => Ok(()),
                    false => Err(vec![to]),
                }
            })?;
            let body = Body::Here(body);
            let from = to;
            state.shelf.deliver(P2pMessage { from, label, body });
            drop(state);
            self.changed.notify_all();
            return Ok(());
        }
        self.hand(to, Frame::Inline(label), bytes, wait)
    }

    /// Hands a frame to a rank; false when that rank is gone.
    pub(super) fn tell(
        &self,
        to: usize,
        frame: &Frame,
        body: &[u8],
        wait: &OpWait<'_>,
    ) -> Result<bool, Error> {
        let rank = self.status.rank;
        let arrived = |at: &Self| {
            at.arrived(rank, *frame)
                .map_err(|reason| Error::wire(rank, Some(wait.operation), reason))
        };
        match &self.links {
            _ if to == rank => arrived(self).map(|()| true),
            Links::Lanes(lanes) => lanes.write(to, &frame.encode(), body, wait),
            Links::Calls(peers) => match peers.get().and_then(|peers| peers[to].upgrade()) {
                Some(peer) if !peer.state.lock().shelf.has_ended(to) => {
                    arrived(&peer).map(|()| true)
                }
                _ => Ok(false),
            },
            Links::Alone => Ok(false),
        }
    }
}

/// First byte of a region in its segment.
fn offset(region: &Region) -> u64 {
    match region.home() {
        Home::Arena { offset, .. } => *offset as u64,
        Home::Heap(_) => 0,
    }
}
