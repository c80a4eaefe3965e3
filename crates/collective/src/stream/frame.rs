//! The head in front of what one rank sends another one in a round.
//!
//! ```text
//! byte 0   magic "PLS1"
//! byte 4   round, u32 little endian; all ones for a meeting, one less where the calls of the sender's host differ
//! byte 8   header, six u64 little endian
//! byte 56  payload length, u64; must be what the receiver computes from its plan, or nothing of it is read
//! ```

use crate::call::{HEADER_WORDS, Header};

pub(super) const FRAME_BYTES: usize = 64;
/// Stands for a round in frames that have no payload because nothing is to be done but to compare calls.
pub(super) const MEETING: u32 = u32::MAX;
/// Stands for a round in frames of a rank that knows already that the calls differ: no payload follows.
pub(super) const DIFFERENT: u32 = u32::MAX - 1;
const MAGIC: [u8; 4] = *b"PLS1";

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Frame {
    pub(super) header: Header,
    pub(super) round: u32,
    /// *Units*: bytes, over all lanes.
    pub(super) payload: u64,
}

impl Frame {
    pub(super) fn encode(&self) -> [u8; FRAME_BYTES] {
        let mut bytes = [0; FRAME_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&self.round.to_le_bytes());
        let words = self.header.encode().into_iter().chain([self.payload]);
        for (field, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
            field.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8; FRAME_BYTES]) -> Result<Self, String> {
        if bytes[..4] != MAGIC {
            return Err(format!("a frame begins with {:02x?}", &bytes[..8]));
        }
        let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|k| bytes[8 + 8 * i + k]));
        let words: [u64; HEADER_WORDS] = std::array::from_fn(word);
        Ok(Self {
            header: Header::decode(&words)?,
            round: u32::from_le_bytes(std::array::from_fn(|k| bytes[4 + k])),
            payload: word(HEADER_WORDS),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::element::{DType, ReduceOp};
    use crate::error::{OpKind, Operation};
    use crate::plan::Algorithm;

    fn frame() -> Frame {
        let header = Header {
            operation: Operation {
                kind: OpKind::AllReduce,
                seq: 3,
                bucket: Some(1),
            },
            reduce: Some(ReduceOp::Max),
            dtype: Some(DType::F64),
            algorithm: Algorithm::Ring,
            total: 10,
            piece: 10,
            counts: 0,
            mark: 0,
            leaves: 4,
        };
        Frame {
            header,
            round: 2,
            payload: 40,
        }
    }

    /// Whatever the bytes are, they are refused in words or mean a frame that is encoded as these very bytes.
    fn check(bytes: &[u8; FRAME_BYTES]) {
        match Frame::decode(bytes) {
            Ok(frame) => assert_eq!(&frame.encode(), bytes),
            Err(reason) => assert!(!reason.is_empty()),
        }
    }

    #[test]
    fn frames_survive() {
        assert_eq!(Frame::decode(&frame().encode()).unwrap(), frame());
    }

    /// Files are named after what they are: `good-*` must decode, `bad-*` must not.
    #[test]
    fn the_saved_corpus_decodes_or_is_refused_as_it_says() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/frame");
        let mut seen = [0, 0];
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let bytes: [u8; FRAME_BYTES] = std::fs::read(&path).unwrap().try_into().unwrap();
            check(&bytes);
            let good = name.starts_with("good-");
            assert!(good || name.starts_with("bad-"), "{name}");
            assert_eq!(Frame::decode(&bytes).is_ok(), good, "{name}");
            seen[usize::from(good)] += 1;
        }
        assert!(seen[0] >= 6 && seen[1] >= 4, "{seen:?}");
    }

    proptest! {
        #[test]
        fn a_flipped_bit_is_another_frame_or_an_error(at in 0..FRAME_BYTES, bit in 0..8) {
            let mut bytes = frame().encode();
            bytes[at] ^= 1_u8 << bit;
            check(&bytes);
            if let Ok(other) = Frame::decode(&bytes) {
                prop_assert_ne!(other, frame());
            }
        }

        #[test]
        fn any_bytes_behind_the_magic_are_a_frame_or_an_error(mut bytes in prop::collection::vec(any::<u8>(), FRAME_BYTES)) {
            bytes[..4].copy_from_slice(&MAGIC);
            check(&bytes.try_into().unwrap());
        }

        #[test]
        fn any_counts_behind_known_codes_survive(words in prop::array::uniform5(any::<u64>()), round in any::<u32>()) {
            let mut bytes = frame().encode();
            bytes[4..8].copy_from_slice(&round.to_le_bytes());
            for (at, word) in [16, 24, 32, 40, 56].into_iter().zip(words) {
                bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
            }
            prop_assert!(Frame::decode(&bytes).is_ok());
            check(&bytes);
        }
    }
}
