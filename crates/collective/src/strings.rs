//! Control data: byte strings of any length, each rank its own.

use crate::error::{Error, OpKind};
use crate::group::ProcessGroup;

/// Longest byte string of one rank.
///
/// *Units*: bytes.
const STRING_BYTES_MAX: usize = 64 << 20;

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
