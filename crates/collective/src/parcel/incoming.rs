//! The receiver's side of a message.

use std::sync::Arc;
use std::time::Instant;

use super::copy::{self, bytes_of_mut};
use super::frame::{Frame, Label};
use super::shelf::{Body, Parcel, cost};
use super::{Links, Parcels, ledger, recorded};
use crate::element::Element;
use crate::error::{Error, OpKind, Operation, Route};
use crate::memory::CONTROL_BYTES;
use crate::status::Vigil;

impl Parcels {
    /// Posts a receive and returns its number.
    pub(super) fn post(self: &Arc<Self>, from: Option<usize>, tag: u32) -> Result<u64, Error> {
        self.settle(self.begin())?;
        Ok(self.state().shelf.post(from, tag))
    }

    /// Posts a receive that somebody waits in later, and notes it in the flight record.
    pub(super) fn post_for_later(
        self: &Arc<Self>,
        operation: Operation,
        label: &Label,
        from: usize,
    ) -> Result<u64, Error> {
        let claim = self.post(Some(from), label.tag)?;
        if let Some(recorder) = self.status.recorder() {
            let parcel = recorded(operation, label);
            recorder.parcels.posted(&parcel, Instant::now());
        }
        Ok(claim)
    }

    /// Waits for the message of a posted receive. The deadline begins now.
    pub(super) fn wait_for(&self, claim: u64, vigil: &Vigil<'_>) -> Result<Parcel, Error> {
        let _entered = self.status.enter(vigil.operation);
        let from = match vigil.operation.kind {
            OpKind::Recv(Route { peer, .. }) => peer.map(|peer| peer as usize),
            _ => None,
        };
        let mut state = self.wait_until(vigil, |state| match state.shelf.is_matched(claim) {
            true => Ok(()),
            false => Err(self.sources(from)),
        })?;
        let parcel = state
            .shelf
            .take(claim)
            .expect("it was there under this lock");
        let paused = std::mem::take(&mut state.paused);
        drop(state);
        self.resume(paused);
        Ok(parcel)
    }

    /// Gives a posted receive up; a message that has come for it is thrown away.
    pub(super) fn withdraw(&self, claim: u64, operation: Operation) {
        let mut state = self.state();
        let parcel = state.shelf.withdraw(claim);
        let paused = parcel.is_some() && std::mem::take(&mut state.paused);
        drop(state);
        self.resume(paused);
        if let Some(parcel) = parcel {
            // A failure is the group's, and there is nobody to tell.
            let _ = self.settle(self.acknowledge(&parcel, &self.vigil(operation)));
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
        let vigil = self.vigil(operation);
        let noted = self.note(operation, wanted, vigil.started);
        self.settle(self.wait_for(claim, &vigil).and_then(|parcel| {
            self.check(&parcel, wanted, operation)?;
            self.take_out(&parcel, bytes_of_mut(data), &vigil)?;
            noted.received(parcel.from, parcel.label.len, parcel.label.bytes());
            Ok(parcel.from)
        }))
    }

    pub(super) fn receive_bytes(
        &self,
        claim: u64,
        operation: Operation,
    ) -> Result<(usize, Vec<u8>), Error> {
        let vigil = self.vigil(operation);
        // Its tag is in the operation's name, its length the sender's alone.
        let unknown = Label {
            tag: 0,
            dtype: None,
            len: 0,
        };
        let noted = self.note(operation, &unknown, vigil.started);
        self.settle(self.wait_for(claim, &vigil).and_then(|parcel| {
            let wanted = Label {
                dtype: None,
                ..parcel.label
            };
            self.check(&parcel, &wanted, operation)?;
            // At most what a message may have; the frame was checked.
            let mut bytes = vec![0; parcel.label.bytes()];
            self.take_out(&parcel, &mut bytes, &vigil)?;
            noted.received(parcel.from, parcel.label.len, parcel.label.bytes());
            Ok((parcel.from, bytes))
        }))
    }

    /// Whether a message is what the receive says.
    fn check(&self, parcel: &Parcel, wanted: &Label, operation: Operation) -> Result<(), Error> {
        let (sent, rank, tag) = (&parcel.label, self.status.rank, wanted.tag);
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
                parcel.from,
                sent.contents(),
                parcel.from
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
        parcel: &Parcel,
        into: &mut [u8],
        vigil: &Vigil<'_>,
    ) -> Result<(), Error> {
        match &parcel.body {
            Body::Here(region) => into.copy_from_slice(region.as_slice()),
            Body::There {
                segment, offset, ..
            } if !into.is_empty() => {
                copy::read(segment, *offset, into);
            }
            Body::There { .. } => {}
        }
        self.acknowledge(parcel, vigil)
    }

    /// Tells the sender that its message has been taken. A sender that is gone does not need to know.
    pub(super) fn acknowledge(&self, parcel: &Parcel, vigil: &Vigil<'_>) -> Result<(), Error> {
        match parcel.body {
            Body::There { id, .. } => self
                .tell(parcel.from, &Frame::Taken { id }, &[], vigil)
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
                let mut state = self.state();
                if state.shelf.count(from) > ledger::SENT_BYTES_MAX / cost(0) {
                    return Err("more messages than may be on their way".into());
                }
                state.shelf.deliver(Parcel { from, label, body });
            }
            Frame::Taken { id } => {
                if !self.state().ledger.taken(id, from) {
                    return Err(format!("it took message {id}, which it was not sent"));
                }
            }
            Frame::Inline(_) => return Err("a message without its data".into()),
        }
        self.changed.notify_all();
        Ok(())
    }
}
