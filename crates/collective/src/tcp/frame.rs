//! The head in front of every payload between two ranks.
//!
//! ```text
//! byte 0   magic "PTC1"
//! byte 4   phase, 1 or 2
//! byte 5   zero
//! byte 8   header, seven u64 little endian
//! byte 64  payload length, u64; must be what the receiver computes from the call, or nothing of it is read
//! ```

use crate::call::{HEADER_WORDS, Header};

pub(super) const FRAME_BYTES: usize = 72;
const MAGIC: [u8; 4] = *b"PTC1";

/// Which half of an operation a frame belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    First,
    Second,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) header: Header,
    pub(super) phase: Phase,
    /// *Units*: bytes.
    pub(super) payload: u64,
}

impl Frame {
    pub(super) fn encode(&self) -> [u8; FRAME_BYTES] {
        let mut bytes = [0; FRAME_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = if self.phase == Phase::First { 1 } else { 2 };
        let words = self.header.encode(0).into_iter().chain([self.payload]);
        for (field, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
            field.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8; FRAME_BYTES]) -> Result<Self, String> {
        if bytes[..4] != MAGIC || bytes[5..8] != [0; 3] {
            return Err(format!("a frame begins with {:02x?}", &bytes[..8]));
        }
        let phase = match bytes[4] {
            1 => Phase::First,
            2 => Phase::Second,
            other => return Err(format!("a frame of phase {other}")),
        };
        let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|k| bytes[8 + 8 * i + k]));
        let words: [u64; HEADER_WORDS] = std::array::from_fn(word);
        let (header, offset) = Header::decode(&words)?;
        if offset != 0 {
            return Err(format!("a frame with offset {offset}"));
        }
        Ok(Self {
            header,
            phase,
            payload: word(HEADER_WORDS),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::element::{DType, ReduceOp};
    use crate::error::{OpKind, Operation};

    fn frame() -> Frame {
        let header = Header {
            operation: Operation {
                kind: OpKind::AllReduce,
                seq: 3,
                bucket: Some(1),
            },
            reduce: Some(ReduceOp::Max),
            dtype: Some(DType::F64),
            total: 10,
            first: 0,
            piece: 10,
            mark: 0,
            leaves: 4,
        };
        Frame {
            header,
            phase: Phase::Second,
            payload: 40,
        }
    }

    #[test]
    fn frames_survive() {
        assert_eq!(Frame::decode(&frame().encode()).unwrap(), frame());
    }

    proptest! {
        #[test]
        fn a_flipped_bit_is_another_frame_or_an_error(at in 0..FRAME_BYTES, bit in 0..8) {
            let mut bytes = frame().encode();
            bytes[at] ^= 1_u8 << bit;
            if let Ok(other) = Frame::decode(&bytes) {
                prop_assert_ne!(other, frame());
            }
        }

        #[test]
        fn any_bytes_are_a_frame_or_an_error(mut bytes in prop::collection::vec(any::<u8>(), FRAME_BYTES)) {
            bytes[..8].copy_from_slice(&[b'P', b'T', b'C', b'1', 1, 0, 0, 0]);
            let bytes: [u8; FRAME_BYTES] = bytes.try_into().unwrap();
            if let Ok(frame) = Frame::decode(&bytes) {
                prop_assert_eq!(Frame::decode(&frame.encode()).unwrap(), frame);
            }
        }
    }
}
