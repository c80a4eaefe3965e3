//! The messages between ranks and their hub: frames of a fixed head and bytes.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

/// Maximum payload of a frame: more than any buffer of a test.
const BYTES_MAX: u32 = 1 << 30;

/// Numbers of a head: kind, to, from, tag, length.
const HEAD_WORDS: usize = 5;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum About {
    /// To the hub: a rank joins.
    Hello = 1,
    /// From the hub: all members, once all have joined.
    Roster = 2,
    /// From the hub: why this rank cannot join.
    Refused = 3,
    /// From rank to rank.
    Data = 4,
    /// From the hub: this rank died.
    Gone = 5,
    /// To the hub: this rank leaves.
    Bye = 6,
}

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) about: About,
    pub(super) to: u32,
    pub(super) from: u32,
    pub(super) tag: u64,
    pub(super) bytes: Vec<u8>,
}

/// A rank, as it introduces itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Member {
    /// The nonce of its communicator's id.
    pub(super) nonce: u64,
    pub(super) world: u32,
    /// Ranks with the same name are on one machine.
    pub(super) host: String,
    /// Its device's.
    pub(super) uuid: [u8; 16],
    /// Its device's number in the machine.
    pub(super) place: usize,
}

impl Frame {
    /// A frame without bytes to or from the hub.
    pub(super) fn empty(about: About, from: u32) -> Self {
        Self {
            about,
            to: 0,
            from,
            tag: 0,
            bytes: Vec::new(),
        }
    }

    pub(super) fn send(&self, mut to: impl Write) -> io::Result<()> {
        let length = u32::try_from(self.bytes.len())
            .ok()
            .filter(|length| *length <= BYTES_MAX);
        let length = length.ok_or(io::ErrorKind::InvalidInput)?;
        let head = [
            self.about as u64,
            self.to.into(),
            self.from.into(),
            self.tag,
            length.into(),
        ];
        to.write_all(head.map(u64::to_le_bytes).as_flattened())?;
        to.write_all(&self.bytes)
    }

    pub(super) fn receive(mut from: impl Read) -> io::Result<Self> {
        let mut head = [[0; 8]; HEAD_WORDS];
        from.read_exact(head.as_flattened_mut())?;
        let [about, to, sender, tag, length] = head.map(u64::from_le_bytes);
        let short = |number: u64| u32::try_from(number).map_err(|_| io::ErrorKind::InvalidData);
        let length = short(length)?;
        let about = About::of(about).filter(|_| length <= BYTES_MAX);
        let about = about.ok_or(io::ErrorKind::InvalidData)?;
        let mut bytes = vec![0; length as usize];
        from.read_exact(&mut bytes)?;
        Ok(Self {
            about,
            to: short(to)?,
            from: short(sender)?,
            tag,
            bytes,
        })
    }
}

impl About {
    fn of(number: u64) -> Option<Self> {
        let all = [
            Self::Hello,
            Self::Roster,
            Self::Refused,
            Self::Data,
            Self::Gone,
            Self::Bye,
        ];
        all.into_iter().find(|about| *about as u64 == number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_arrives_as_it_was_sent() {
        let frame = Frame {
            about: About::Data,
            to: 3,
            from: 1,
            tag: 1 << 63 | 5,
            bytes: b"bytes".to_vec(),
        };
        let mut wire = Vec::new();
        frame.send(&mut wire).expect("sent");
        assert_eq!(Frame::receive(&wire[..]).expect("a frame"), frame);
        wire[0] = 9;
        assert!(Frame::receive(&wire[..]).is_err(), "of no kind");
    }

    #[test]
    fn a_length_without_bounds_is_refused_before_memory_is_taken() {
        let mut wire = Vec::new();
        Frame::empty(About::Data, 0).send(&mut wire).expect("sent");
        wire[32..36].copy_from_slice(&u32::MAX.to_le_bytes());
        let error = Frame::receive(&wire[..]).expect_err("too long");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
