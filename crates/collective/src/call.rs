//! One call of an operation: what the ranks compare before they touch each other's data.

use std::fmt;

use crate::element::{DType, ReduceOp};
use crate::error::{Error, OpKind, Operation, Ranks};
use crate::old_plan::Plan;
use crate::tree::Tree;
use std::sync::Arc;

/// Number of words of an encoded [`Header`].
pub(crate) const HEADER_WORDS: usize = 7;

/// What a rank says about its call; equal on all ranks, or the call is a [mismatch](Error::Mismatch).
///
/// ```text
/// word 0  bits 0-7 operation, 8-15 reduction or 0, 16-23 dtype or 0, 24-31 zero, 32-63 bucket + 1 or 0
/// word 1  sequence number
/// word 2  elements of the whole call
/// word 3  first element of this piece of the call
/// word 4  elements of this piece
/// word 5  bits 0-31 root of a broadcast or step of an all-reduce, 32-63 leaves of the tree
/// word 6  (shared memory) first byte of the rank's data in its segment; (tcp) 0
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) operation: Operation,
    pub(crate) reduce: Option<ReduceOp>,
    pub(crate) dtype: Option<DType>,
    /// Length of the whole call, as its caller gave it.
    pub(crate) total: usize,
    /// First element of this piece: long calls on ordinary memory travel in pieces.
    pub(crate) first: usize,
    /// Elements of this piece.
    pub(crate) piece: usize,
    /// The root of a broadcast; the training step of an all-reduce, its low 32 bits; else 0.
    pub(crate) mark: u32,
    pub(crate) leaves: u32,
}

impl Header {
    pub(crate) fn encode(&self, offset: u64) -> [u64; HEADER_WORDS] {
        let kind = u64::from(self.operation.kind.code());
        let reduce = u64::from(self.reduce.map_or(0, ReduceOp::code));
        let dtype = u64::from(self.dtype.map_or(0, DType::code));
        let bucket = u64::from(
            self.operation
                .bucket
                .map_or(0, |bucket| bucket.wrapping_add(1)),
        );
        [
            kind | reduce << 8 | dtype << 16 | bucket << 32,
            self.operation.seq,
            self.total as u64,
            self.first as u64,
            self.piece as u64,
            u64::from(self.mark) | u64::from(self.leaves) << 32,
            offset,
        ]
    }

    /// The header and the offset, or what is wrong with the words.
    pub(crate) fn decode(words: &[u64; HEADER_WORDS]) -> Result<(Self, u64), String> {
        let [first, seq, total, start, piece, mark_and_leaves, offset] = *words;
        let kind = OpKind::from_code(first as u32 & 0xFF)
            .ok_or_else(|| format!("operation {}", first & 0xFF))?;
        let code = (first >> 8) as u8;
        let reduce = (code != 0)
            .then(|| ReduceOp::from_code(code).ok_or_else(|| format!("reduction {code}")));
        let code = (first >> 16) as u8;
        let dtype =
            (code != 0).then(|| DType::from_code(code).ok_or_else(|| format!("dtype {code}")));
        if first >> 24 & 0xFF != 0 {
            return Err(format!("flags {:#x}", first >> 24 & 0xFF));
        }
        let count =
            |what: &str, value: u64| usize::try_from(value).map_err(|_| format!("{what} {value}"));
        let header = Self {
            operation: Operation {
                kind,
                seq,
                bucket: ((first >> 32) as u32).checked_sub(1),
            },
            reduce: reduce.transpose()?,
            dtype: dtype.transpose()?,
            total: count("length", total)?,
            first: count("first element", start)?,
            piece: count("piece", piece)?,
            mark: mark_and_leaves as u32,
            leaves: (mark_and_leaves >> 32) as u32,
        };
        Ok((header, offset))
    }
}

/// "all-reduce (sum) of 64 f32 over 8 leaves, bucket 3 of step 12".
impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.operation.kind)?;
        if let Some(reduce) = self.reduce {
            write!(f, " ({reduce})")?;
        }
        if let Some(dtype) = self.dtype {
            write!(f, " of {} {dtype}", self.total)?;
        }
        match self.operation.kind {
            OpKind::Broadcast | OpKind::BroadcastBytes => write!(f, " from rank {}", self.mark)?,
            OpKind::AllReduce | OpKind::ReduceScatter => write!(f, " over {} leaves", self.leaves)?,
            OpKind::AllGather | OpKind::AllGatherBytes | OpKind::Barrier => {}
        }
        if self.first != 0 || self.piece != self.total {
            write!(
                f,
                ", elements {}..{}",
                self.first,
                self.first.saturating_add(self.piece)
            )?;
        }
        match self.operation.bucket {
            Some(bucket) => write!(f, ", bucket {bucket} of step {}", self.mark),
            None => Ok(()),
        }
    }
}

/// A call as an engine executes it.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) header: Header,
    pub(crate) plan: Plan,
    pub(crate) tree: Arc<Tree>,
}

impl Call {
    /// Size of one element, 1 for calls without data.
    pub(crate) fn element_bytes(&self) -> usize {
        self.header.dtype.map_or(1, DType::bytes)
    }

    /// Bytes of one block of the plan.
    pub(crate) fn block_bytes(&self) -> usize {
        self.elements() * self.element_bytes()
    }

    /// Elements that the plan is about: those of this piece, on all ranks.
    pub(crate) fn elements(&self) -> usize {
        let partition = self.plan.reduce.as_ref().or(self.plan.gather.as_ref());
        partition.map_or(0, |partition| partition.range(partition.world() - 1).end)
    }

    /// How many blocks the rank's memory holds.
    pub(crate) fn blocks(&self, rank: usize) -> usize {
        if self.plan.reduce.is_some() {
            self.tree.blocks(rank).len()
        } else {
            1
        }
    }

    /// Bytes of the rank's memory that the plan reads or writes.
    pub(crate) fn bytes(&self, rank: usize) -> usize {
        self.blocks(rank) * self.block_bytes()
    }
}

/// Compares all ranks' headers, in rank order. Every rank that sees the same headers makes the same error of them.
///
/// The largest group of equal calls counts as right, the one of the lowest rank when there are two; with exactly one
/// rank outside it that rank is the culprit.
pub(crate) fn agree(headers: &[Header]) -> Result<(), Error> {
    if headers.windows(2).all(|pair| pair[0] == pair[1]) {
        return Ok(());
    }
    let mut groups: Vec<(Header, Vec<usize>)> = Vec::new();
    for (rank, header) in headers.iter().enumerate() {
        match groups.iter_mut().find(|(known, _)| known == header) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((*header, vec![rank])),
        }
    }
    groups.sort_by_key(|(_, ranks)| (usize::MAX - ranks.len(), ranks[0]));
    let odd: Vec<usize> = groups[1..]
        .iter()
        .flat_map(|(_, ranks)| ranks.iter().copied())
        .collect();
    let culprit = (odd.len() == 1 && groups[0].1.len() > 1).then(|| odd[0]);
    let calls: Vec<String> = groups
        .iter()
        .map(|(header, ranks)| format!("{} called {header}", Ranks(ranks)))
        .collect();
    Err(Error::Mismatch {
        seq: headers[0].operation.seq,
        calls: calls.join("; "),
        culprit,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(total: usize) -> Header {
        Header {
            operation: Operation {
                kind: OpKind::AllReduce,
                seq: 12,
                bucket: None,
            },
            reduce: Some(ReduceOp::Sum),
            dtype: Some(DType::F32),
            total,
            first: 0,
            piece: total,
            mark: 0,
            leaves: 4,
        }
    }

    #[test]
    fn the_odd_rank_out_is_named() {
        let error = agree(&[header(64), header(64), header(65), header(64)]).unwrap_err();
        assert_eq!(error.culprit(), Some(2));
        assert_eq!(
            error.to_string(),
            "operation #12 differs between ranks: ranks 0, 1, 3 called all-reduce (sum) of 64 f32 over 4 leaves; \
             rank 2 called all-reduce (sum) of 65 f32 over 4 leaves"
        );
    }

    #[test]
    fn of_two_ranks_nobody_is_to_blame() {
        assert_eq!(agree(&[header(1), header(2)]).unwrap_err().culprit(), None);
    }

    #[test]
    fn equal_calls_agree() {
        assert!(agree(&[header(7), header(7), header(7)]).is_ok());
    }

    proptest! {
        #[test]
        fn any_words_decode_or_are_refused(words in prop::array::uniform7(any::<u64>())) {
            if let Ok((header, offset)) = Header::decode(&words) {
                let (again, same) = Header::decode(&header.encode(offset)).unwrap();
                prop_assert_eq!((again, same), (header, offset));
                prop_assert!(!header.to_string().is_empty());
            }
        }

        #[test]
        fn headers_survive_encoding(total in 0..usize::MAX, first in any::<u32>(), mark in any::<u32>(), bucket in 0..u32::MAX) {
            let mut header = header(total);
            header.first = first as usize;
            header.mark = mark;
            header.operation.bucket = Some(bucket);
            prop_assert_eq!(Header::decode(&header.encode(77)).unwrap(), (header, 77));
        }
    }
}
