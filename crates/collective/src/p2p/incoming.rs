//! The receiver's side of a message.

use std::sync::Arc;
use std::time::Instant;

use super::copy::{self, bytes_of_mut};
use super::frame::{Frame, Label};
use super::shelf::{Body, P2pMessage, cost};
use super::{Links, PointToPoint, ledger, recorded};
use crate::element::Element;
use crate::error::{Error, OpKind, Operation, Route};
use crate::memory::CONTROL_BYTES;
use crate::status::OpWait;

impl PointToPoint {
    /// Posts a receive and returns its number.
    pub(super) fn post(self: &Arc<Self>, from: Option<usize>, tag: u32) -> Result<u64, Error> {
        self.settle(self.begin())?;
        Ok(self.state.lock().shelf.post(from, tag))
    }

    /// Posts a receive that somebody waits in later, and notes it in the flight record.
    pub(super) fn post_for_later(
        self: &Arc<Self>,
        operation: Operation,
        label: &Label,
        from: Option<usize>,
    ) -> Result<u64, Error> {
        let claim = self.post(from, label.tag)?;
        if let Some(recorder) = self.status.recorder() {
            let message = recorded(operation, label);
            recorder.p2p.posted(&message, Instant::now());
        }
        Ok(claim)
    }

    /// Waits for the message of a posted receive. The deadline begins now.
    pub(super) fn wait_for(&self, claim: u64, wait: &OpWait<'_>) -> Result<P2pMessage, Error> {
        let _entered = self.status.enter(wait.operation);
        let from = match wait.operation.kind {
            OpKind::Recv(Route { peer, .. }) => peer.map(|peer| peer as usize),
            _ => None,
        };
        let mut state = self.wait_until(wait, |state| match state.shelf.is_matched(claim) {
            true => Ok(()),
            false => Err(self.sources(from)),
        })?;
        let message = state
            .shelf
            .take(claim)
            .expect("it was there under this lock");
        let paused = std::mem::take(&mut state.paused);
        drop(state);
        self.resume(paused);
        Ok(message)
    }

    /// Gives a posted receive up; a message that has come for it is thrown away.
    pub(super) fn withdraw(&self, claim: u64, operation: Operation) {
        let mut state = self.state.lock();
        let message = state.shelf.withdraw(claim);
        let paused = message.is_some() && std::mem::take(&mut state.paused);
        drop(state);
        self.resume(paused);
        if let Some(message) = message {
            // A failure is the group's, and there is nobody to tell.
            let _ = self.settle(self.acknowledge(&message, &self.op_wait(operation)));
        }
    }

    /// Something has been taken: there may be room.
    pub(super) fn resume(&self, paused: bool) {
        self.changed.notify_all();
        if let (true, Links::Lanes(lanes)) = (paused, &self.links) {
            lanes.wake();
        }
    }

    /// Waits for the message of a posted receive and copies it into `data`; the rank that sent it.
    pub(super) fn receive<T: Element>(
        self: &Arc<Self>,
        claim: u64,
        operation: Operation,
        wanted: &Label,
        data: &mut [T],
    ) -> Result<usize, Error> {
        let wait = self.op_wait(operation);
        let noted = self.note(operation, wanted, wait.started);
        self.settle(self.wait_for(claim, &wait).and_then(|message| {
            self.check(&message, wanted, operation)?;
            self.take_out(&message, bytes_of_mut(data), &wait)?;
            noted.received(message.from, message.label.len, message.label.bytes());
            Ok(message.from)
        }))
    }

    pub(super) fn receive_bytes(
        &self,
        claim: u64,
        operation: Operation,
    ) -> Result<(usize, Vec<u8>), Error> {
        let wait = self.op_wait(operation);
        // Its tag is in the operation's name, its length the sender's alone.
        let unknown = Label::plain(0, 0);
        let noted = self.note(operation, &unknown, wait.started);
        self.settle(self.wait_for(claim, &wait).and_then(|message| {
            let wanted = Label {
                dtype: None,
                ..message.label
            };
            self.check(&message, &wanted, operation)?;
            // At most what a message may have; the frame was checked.
            let mut bytes = vec![0; message.label.bytes()];
            self.take_out(&message, &mut bytes, &wait)?;
            noted.received(message.from, message.label.len, message.label.bytes());
            Ok((message.from, bytes))
        }))
    }

    /// Whether a message is what the receive says.
    fn check(
        &self,
        message: &P2pMessage,
        wanted: &Label,
        operation: Operation,
    ) -> Result<(), Error> {
        let (sent, rank, tag) = (&message.label, self.status.rank, wanted.tag);
        if (sent.dtype, sent.len) == (wanted.dtype, wanted.len) {
            return Ok(());
        }
        // A byte string's length is the sender's alone.
        let wanted = match wanted.dtype {
            Some(_) => wanted.contents(),
            None => "bytes".into(),
        };
        Err(Error::Mismatch {
            seq: operation.seq,
            calls: format!(
                "rank {} called send of {} to rank {rank}, tag {tag}; rank {rank} called recv of {wanted} from rank {}",
                message.from,
                sent.contents(),
                message.from
            ),
            culprit: None,
        })
    }

    /// Who may send what a receive waits for.
    pub(super) fn sources(&self, from: Option<usize>) -> Vec<usize> {
        let rank = self.status.rank;
        match from {
            Some(from) => vec![from],
            None if self.status.world() == 1 => vec![rank],
            None => (0..self.status.world())
                .filter(|peer| *peer != rank)
                .collect(),
        }
    }

    /// Copies a message out, and tells its sender.
    pub(super) fn take_out(
        &self,
        message: &P2pMessage,
        into: &mut [u8],
        wait: &OpWait<'_>,
    ) -> Result<(), Error> {
        match &message.body {
            Body::Here(region) => into.copy_from_slice(region.as_slice()),
            Body::There {
                segment, offset, ..
            } if !into.is_empty() => {
                copy::read(segment, *offset, into);
            }
            Body::There { .. } => {}
        }
        self.acknowledge(message, wait)
    }

    /// Tells the sender that its message has been taken. A sender that is gone does not need to know.
    pub(super) fn acknowledge(&self, message: &P2pMessage, wait: &OpWait<'_>) -> Result<(), Error> {
        match message.body {
            Body::There { id, .. } => self
                .tell(message.from, &Frame::Taken { id }, &[], wait)
                .map(drop),
            Body::Here(_) => Ok(()),
        }
    }

    /// A frame without a body has come.
    pub(super) fn arrived(&self, from: usize, frame: Frame) -> Result<(), String> {
        match frame {
            Frame::Shared { label, id, offset } => {
                let Some(segment) = self.segment(from) else {
                    return Err("a message in shared memory, of which there is none".into());
                };
                let size = segment.bytes() as u64;
                let end = offset.checked_add(label.bytes() as u64);
                let inside = offset >= CONTROL_BYTES as u64 && end.is_some_and(|end| end <= size);
                if label.bytes() > 0 && !inside {
                    return Err(format!(
                        "a message of {} at byte {offset} of a segment of {size}",
                        label.contents()
                    ));
                }
                let body = Body::There {
                    segment: segment.clone(),
                    id,
                    offset: offset as usize,
                };
                let mut state = self.state.lock();
                if state.shelf.count(from) > ledger::SENT_BYTES_MAX / cost(0) {
                    return Err("more messages than may be on their way".into());
                }
                state.shelf.deliver(P2pMessage { from, label, body });
            }
            Frame::Taken { id } => {
                if !self.state.lock().ledger.taken(id, from) {
                    return Err(format!("it took message {id}, which it was not sent"));
                }
            }
            Frame::Inline(_) => return Err("a message without its data".into()),
        }
        self.changed.notify_all();
        Ok(())
    }
}
