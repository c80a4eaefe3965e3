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

    proptest! {
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
