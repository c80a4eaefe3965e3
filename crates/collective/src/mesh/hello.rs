//! What both sides of a new connection say first, after the proof of the token.
//!
//! ```text
//! byte 0    magic "PACEMESH"      byte 16   rank of the sender, u32 little endian
//! byte 8    group, u64            byte 20   world, u32
//!                                 byte 24   lane, u32: which of the pair's connections this is
//! ```

use std::io::Read;

const MAGIC: [u8; 8] = *b"PACEMESH";
const HELLO_BYTES: usize = 28;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) group: u64,
    pub(super) rank: u32,
    pub(super) world: u32,
    pub(super) lane: u32,
}

impl Hello {
    pub(super) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&self.group.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.rank.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.world.to_le_bytes());
        bytes[24..].copy_from_slice(&self.lane.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, String> {
        if bytes[..8] != MAGIC {
            return Err(format!("its hello begins with {:02x?}", &bytes[..8]));
        }
        let number = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let group = u64::from(number(8)) | u64::from(number(12)) << 32;
        Ok(Self {
            group,
            rank: number(16),
            world: number(20),
            lane: number(24),
        })
    }

    pub(super) fn read(stream: &mut impl Read) -> Result<Self, String> {
        let mut bytes = [0; HELLO_BYTES];
        stream
            .read_exact(&mut bytes)
            .map_err(|error| error.to_string())?;
        Self::decode(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Files are named after what they are: `good-*` is a hello of these very bytes, `bad-*` none.
    #[test]
    fn the_saved_corpus_is_judged_as_its_names_say() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/corpus/hello");
        let mut seen = [0, 0];
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let good = name.starts_with("good-");
            assert!(good || name.starts_with("bad-"), "{name}");
            match Hello::read(&mut &bytes[..]) {
                Ok(hello) => assert!(good && hello.encode()[..] == bytes, "{name}: {hello:?}"),
                Err(reason) => assert!(!good && !reason.is_empty(), "{name}: {reason}"),
            }
            seen[usize::from(good)] += 1;
        }
        assert!(seen[0] >= 6 && seen[1] >= 4, "{seen:?}");
    }

    proptest! {
        #[test]
        fn a_flipped_bit_is_another_hello_or_an_error(at in 0..HELLO_BYTES, bit in 0..8) {
            let hello = Hello { group: 7, rank: 1, world: 4, lane: 2 };
            let mut bytes = hello.encode();
            bytes[at] ^= 1_u8 << bit;
            if let Ok(other) = Hello::decode(&bytes) {
                prop_assert_ne!(other, hello);
            }
        }

        #[test]
        fn any_bytes_are_a_hello_or_an_error(bytes in prop::array::uniform28(any::<u8>()), keep_magic in any::<bool>()) {
            let mut bytes = bytes;
            if keep_magic {
                bytes[..8].copy_from_slice(&MAGIC);
            }
            if let Ok(hello) = Hello::decode(&bytes) {
                prop_assert_eq!(hello.encode(), bytes);
            }
        }
    }
}
