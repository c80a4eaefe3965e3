//! Control data: byte strings of any length, each rank its own.

use crate::error::{Error, OpKind};
use crate::group::ProcessGroup;

/// Longest byte string of one rank.
///
/// *Units*: bytes.
const STRING_BYTES_MAX: usize = 64 << 20;
/// Bytes of the root's data that it copies at once.
const PIECE_BYTES: usize = 16 << 20;

impl ProcessGroup {
    /// All ranks' byte strings, in rank order; each may have its own length.
    ///
    /// *Cost*: two all-gathers; for control data. *Errors*: a string of more than 64 MiB.
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let kind = OpKind::AllGatherBytes;
        self.check_string(kind, bytes.len())?;
        let counts = self.all_counts(kind, &[bytes.len()])?;
        for count in &counts {
            self.check_string(kind, *count)?;
        }
        let mut all = vec![0; counts.iter().sum()];
        self.all_gather_v_as(kind, bytes, &mut all, &counts)?;
        let mut rest = &all[..];
        let part = |count: &usize| rest.split_off(..*count).expect("they add up").to_vec();
        Ok(counts.iter().map(part).collect())
    }

    /// The root's byte string. `bytes` is given on the root and nowhere else.
    ///
    /// *Cost*: two broadcasts; for control data. *Errors*: a string of more than 64 MiB, or one on the wrong rank.
    pub fn broadcast_bytes(&self, bytes: Option<&[u8]>, root: usize) -> Result<Vec<u8>, Error> {
        let kind = OpKind::BroadcastBytes;
        self.check_root(kind, root)?;
        self.check_given(kind, "string", bytes.is_some(), root)?;
        let bytes = bytes.unwrap_or_default();
        self.check_string(kind, bytes.len())?;
        let mut length = [bytes.len() as i64];
        self.broadcast_as(kind, &mut length, root)?;
        let mut all = bytes.to_vec();
        all.resize(self.check_string(kind, length[0] as usize)?, 0);
        self.broadcast_as(kind, &mut all, root)?;
        Ok(all)
    }

    /// The root's `len` bytes, which may be more than [`broadcast_bytes`](Self::broadcast_bytes) takes; `None` on the root, which
    /// has them. `own` is given on the root and nowhere else, and all ranks know the length.
    ///
    /// *Memory*: on the root 16 MiB.
    ///
    /// *Errors*: bytes on the wrong rank, or of another length.
    pub fn broadcast_long(
        &self,
        own: Option<&[u8]>,
        len: usize,
        root: usize,
    ) -> Result<Option<Vec<u8>>, Error> {
        let kind = OpKind::BroadcastBytes;
        self.check_root(kind, root)?;
        self.check_given(kind, "data", own.is_some(), root)?;
        let Some(own) = own else {
            let mut received = vec![0; len];
            for piece in received.chunks_mut(PIECE_BYTES) {
                self.broadcast_as(kind, piece, root)?;
            }
            return Ok(Some(received));
        };
        if own.len() != len {
            let reason = format!("expected {len} bytes, got {}", own.len());
            return Err(self.refuse(kind, reason));
        }
        if self.world() > 1 {
            for piece in own.chunks(PIECE_BYTES) {
                self.broadcast_as(kind, &mut piece.to_vec(), root)?;
            }
        }
        Ok(None)
    }

    fn check_string(&self, kind: OpKind, length: usize) -> Result<usize, Error> {
        if length > STRING_BYTES_MAX {
            return Err(self.refuse(
                kind,
                format!("{length} bytes, at most {STRING_BYTES_MAX} are allowed"),
            ));
        }
        Ok(length)
    }
}
