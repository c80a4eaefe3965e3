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
        let mut all = self.room(kind, &counts)?;
        self.all_gather_v_as(kind, bytes, &mut all, &counts)?;
        Ok(split(&all, &counts))
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

    /// On the root all ranks' byte strings, in rank order; nothing elsewhere.
    ///
    /// *Cost*: an all-gather of the lengths and a gather; for control data. *Errors*: a string of more than 64 MiB.
    pub fn gather_bytes(&self, bytes: &[u8], root: usize) -> Result<Option<Vec<Vec<u8>>>, Error> {
        let kind = OpKind::Gather;
        self.check_root(kind, root)?;
        self.check_string(kind, bytes.len())?;
        let counts = self.all_counts(kind, &[bytes.len()])?;
        if self.rank() != root {
            return self.gather_v(bytes, None, root).map(|()| None);
        }
        let mut all = self.room(kind, &counts)?;
        self.gather_v(bytes, Some((&mut all, &counts)), root)?;
        Ok(Some(split(&all, &counts)))
    }

    /// This rank's part of the root's byte strings, one for each rank. They are given on the root and nowhere else.
    ///
    /// *Cost*: two broadcasts of the lengths and a scatter; for control data. *Errors*: a string of more than 64 MiB, or not
    /// one for each rank.
    pub fn scatter_bytes(
        &self,
        strings: Option<&[Vec<u8>]>,
        root: usize,
    ) -> Result<Vec<u8>, Error> {
        let kind = OpKind::Scatter;
        self.check_root(kind, root)?;
        self.check_given(kind, "list of strings", strings.is_some(), root)?;
        let strings = strings.unwrap_or_default();
        if self.rank() == root && strings.len() != self.world() {
            let reason = format!(
                "{} strings, expected one for each of the {} ranks",
                strings.len(),
                self.world()
            );
            return Err(self.refuse(kind, reason));
        }
        let mut lengths: Vec<i64> = strings.iter().map(|string| string.len() as i64).collect();
        lengths.resize(self.world(), 0);
        self.broadcast_as(kind, &mut lengths, root)?;
        let counts = lengths
            .iter()
            .map(|length| self.check_string(kind, *length as usize))
            .collect::<Result<Vec<_>, _>>()?;
        let mut output = vec![0; counts[self.rank()]];
        let all = strings.concat();
        let input = (self.rank() == root).then_some((&all[..], &counts[..]));
        self.scatter_v(input, &mut output, root)?;
        Ok(output)
    }

    /// What every rank has for this one, in rank order. `strings[r]` goes to rank `r`.
    ///
    /// *Cost*: two all-gathers of the lengths and an all-to-all; for control data. *Errors*: not one string for each rank,
    /// or one of more than 64 MiB.
    pub fn all_to_all_bytes(&self, strings: &[Vec<u8>]) -> Result<Vec<Vec<u8>>, Error> {
        let (kind, world) = (OpKind::AllToAll, self.world());
        if strings.len() != world {
            let reason = format!(
                "{} strings, expected one for each of the {world} ranks",
                strings.len()
            );
            return Err(self.refuse(kind, reason));
        }
        let lengths: Vec<usize> = strings.iter().map(Vec::len).collect();
        let counts = self.all_counts(kind, &lengths)?;
        let incoming: Vec<usize> = (0..world)
            .map(|from| counts[from * world + self.rank()])
            .collect();
        let mut output = self.room(kind, &incoming)?;
        self.all_to_all_v(&strings.concat(), &lengths, &mut output, &incoming)?;
        Ok(split(&output, &incoming))
    }

    /// Zeroed memory for strings of these lengths, each of which is bounded.
    fn room(&self, kind: OpKind, counts: &[usize]) -> Result<Vec<u8>, Error> {
        for count in counts {
            self.check_string(kind, *count)?;
        }
        Ok(vec![0; counts.iter().sum()])
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

fn split(all: &[u8], counts: &[usize]) -> Vec<Vec<u8>> {
    let mut rest = all;
    let part = |count: &usize| {
        let (part, others) = rest.split_at(*count);
        rest = others;
        part.to_vec()
    };
    counts.iter().map(part).collect()
}
