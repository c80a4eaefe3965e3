//! The head of every message between two ranks of one group, on a connection of its own.
//!
//! ```text
//! byte 0   magic "PPC1"
//! byte 4   kind: 1 the data follows, 2 the data lies in the sender's segment, 3 the data of a message has been taken
//! byte 5   dtype, 0 for plain bytes
//! byte 6   zero
//! byte 8   tag, u32 little endian
//! byte 12  zero
//! byte 16  elements, u64; at most 1 GiB of data
//! byte 24  kind 2 and 3: the sender's number of the message, u64
//! byte 32  kind 2: first byte of the data in the sender's segment, u64
//! ```

use crate::element::{DType, Element};

pub(super) const FRAME_BYTES: usize = 40;
const MAGIC: [u8; 4] = *b"PPC1";
/// Longest message.
///
/// *Units*: bytes.
pub const MESSAGE_BYTES_MAX: usize = 1 << 30;

/// What a message is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Label {
    pub(super) tag: u32,
    /// None for plain bytes.
    pub(super) dtype: Option<DType>,
    pub(super) len: usize,
}

impl Label {
    pub(super) fn of<T: Element>(tag: u32, len: usize) -> Self {
        let dtype = Some(T::DTYPE);
        Self { tag, dtype, len }
    }

    pub(super) fn plain(tag: u32, len: usize) -> Self {
        let dtype = None;
        Self { tag, dtype, len }
    }

    /// *Units*: bytes; at most [`MESSAGE_BYTES_MAX`] in a label that was decoded.
    pub(super) fn bytes(&self) -> usize {
        self.len.saturating_mul(self.dtype.map_or(1, DType::bytes))
    }

    /// "64 f32" or "64 bytes".
    pub(super) fn contents(&self) -> String {
        match self.dtype {
            Some(dtype) => format!("{} {dtype}", self.len),
            None => format!("{} bytes", self.len),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Frame {
    /// The data follows.
    Inline(Label),
    /// The data lies in the sender's segment until it is [taken](Frame::Taken).
    Shared { label: Label, id: u64, offset: u64 },
    /// The receiver no longer needs the data of the message.
    Taken { id: u64 },
}

impl Frame {
    pub(super) fn encode(&self) -> [u8; FRAME_BYTES] {
        let (kind, label, id, offset) = match *self {
            Self::Inline(label) => (1, label, 0, 0),
            Self::Shared { label, id, offset } => (2, label, id, offset),
            Self::Taken { id } => (3, Label::plain(0, 0), id, 0),
        };
        let mut bytes = [0; FRAME_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = kind;
        bytes[5] = label.dtype.map_or(0, DType::code);
        bytes[8..12].copy_from_slice(&label.tag.to_le_bytes());
        for (field, word) in bytes[16..]
            .chunks_exact_mut(8)
            .zip([label.len as u64, id, offset])
        {
            field.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8; FRAME_BYTES]) -> Result<Self, String> {
        if bytes[..4] != MAGIC || bytes[6..8] != [0; 2] || bytes[12..16] != [0; 4] {
            return Err(format!("a message begins with {:02x?}", &bytes[..16]));
        }
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let (len, id, offset) = (word(16), word(24), word(32));
        let dtype = match bytes[5] {
            0 => None,
            code => {
                Some(DType::from_code(code).ok_or_else(|| format!("a message of dtype {code}"))?)
            }
        };
        let label = Label {
            tag: u32::from_le_bytes(std::array::from_fn(|i| bytes[8 + i])),
            dtype,
            len: usize::try_from(len).unwrap_or(usize::MAX),
        };
        if label.bytes() > MESSAGE_BYTES_MAX {
            return Err(format!(
                "a message of {len} elements, at most {MESSAGE_BYTES_MAX} bytes are allowed"
            ));
        }
        let frame = match bytes[4] {
            1 => Self::Inline(label),
            2 => Self::Shared { label, id, offset },
            3 => Self::Taken { id },
            other => return Err(format!("a message of kind {other}")),
        };
        // What a kind does not use is zero, so that every frame has one form.
        match frame.encode() == *bytes {
            true => Ok(frame),
            false => Err(format!(
                "a message of kind {} with more than it needs",
                bytes[4]
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn label(tag: u32, dtype: u8, len: usize) -> Label {
        Label {
            tag,
            dtype: DType::from_code(dtype),
            len,
        }
    }

    #[test]
    fn frames_survive() {
        let label = label(7, 2, 100);
        for frame in [
            Frame::Inline(label),
            Frame::Shared {
                label,
                id: 9,
                offset: 4096,
            },
            Frame::Taken { id: 9 },
        ] {
            assert_eq!(Frame::decode(&frame.encode()).unwrap(), frame);
        }
    }

    /// Each file of the corpus is one frame: `ok-*` decode to a frame with the same bytes, the others are refused.
    #[test]
    fn the_saved_frames_are_judged_as_their_names_say() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/corpus/p2p");
        let mut seen = [0, 0];
        for file in std::fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            let bytes: [u8; FRAME_BYTES] = std::fs::read(&path).unwrap().try_into().unwrap();
            let is_ok = path
                .file_name()
                .unwrap()
                .to_string_lossy()
                .starts_with("ok-");
            seen[usize::from(is_ok)] += 1;
            match Frame::decode(&bytes) {
                Ok(frame) => assert!(is_ok && frame.encode() == bytes, "{path:?}: {frame:?}"),
                Err(reason) => assert!(!is_ok, "{path:?}: {reason}"),
            }
        }
        assert!(seen[0] >= 6 && seen[1] >= 3, "{seen:?}");
    }

    proptest! {
        #[test]
        fn every_frame_survives(tag in any::<u32>(), dtype in 0_u8..4, len in 0..MESSAGE_BYTES_MAX / 8, id in any::<u64>(), offset in any::<u64>()) {
            let frame = Frame::Shared { label: label(tag, dtype, len), id, offset };
            prop_assert_eq!(Frame::decode(&frame.encode()).unwrap(), frame);
        }

        #[test]
        fn any_bytes_are_a_frame_or_an_error(mut bytes in prop::collection::vec(any::<u8>(), FRAME_BYTES), kind in 0_u8..5, short in any::<bool>()) {
            bytes[..5].copy_from_slice(&[b'P', b'P', b'C', b'1', kind]);
            if short {
                bytes[6..8].fill(0);
                bytes[12..16].fill(0);
                bytes[20..24].fill(0);
            }
            let bytes: [u8; FRAME_BYTES] = bytes.try_into().unwrap();
            if let Ok(frame) = Frame::decode(&bytes) {
                prop_assert_eq!(frame.encode(), bytes);
            }
        }

        #[test]
        fn a_flipped_bit_is_another_frame_or_an_error(at in 0..FRAME_BYTES, bit in 0..8) {
            let frame = Frame::Shared { label: label(3, 1, 10), id: 5, offset: 8192 };
            let mut bytes = frame.encode();
            bytes[at] ^= 1_u8 << bit;
            if let Ok(other) = Frame::decode(&bytes) {
                prop_assert_ne!(other, frame);
            }
        }
    }
}
