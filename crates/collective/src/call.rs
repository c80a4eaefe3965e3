//! One call of an operation: what the ranks compare before they touch each other's data.

use std::fmt;

use crate::element::{DType, ReduceOp};
use crate::error::{Error, MIXED, OpKind, Operation, Ranks};
use crate::plan::{Algorithm, Spec};

/// Number of words of an encoded [`Header`].
pub(crate) const HEADER_WORDS: usize = 6;

/// What a rank says about its call; equal on all ranks, or the call is a [mismatch](Error::Mismatch).
///
/// ```text
/// word 0  bits 0-7 operation, 8-15 reduction or 0, 16-23 dtype or 0, 24-31 algorithm, 32-63 bucket + 1 or 0
/// word 1  sequence number
/// word 2  elements of the longest slot
/// word 3  elements of one piece: long calls on ordinary memory go through shared memory in pieces. Where only this word
///         differs, because some ranks brought a buffer of the group's, all begin again with the smallest
/// word 4  digest of the counts where they differ between ranks, else 0
/// word 5  bits 0-31 root or training step, 32-63 leaves of the tree
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Header {
    pub(crate) operation: Operation,
    pub(crate) reduce: Option<ReduceOp>,
    pub(crate) dtype: Option<DType>,
    pub(crate) algorithm: Algorithm,
    /// Elements of the longest slot of the whole call.
    pub(crate) total: usize,
    /// Elements of one piece of it.
    pub(crate) piece: usize,
    pub(crate) counts: u64,
    /// The root of a rooted operation; the low 32 bits of the training step of one on a bucket; else 0.
    pub(crate) mark: u32,
    pub(crate) leaves: u32,
}

impl Header {
    pub(crate) fn encode(&self) -> [u64; HEADER_WORDS] {
        let kind = u64::from(self.operation.kind.code());
        let reduce = u64::from(self.reduce.map_or(0, ReduceOp::code));
        let dtype = u64::from(self.dtype.map_or(0, DType::code));
        let algorithm = u64::from(self.algorithm.code());
        let bucket = self.operation.bucket;
        let bucket = u64::from(bucket.map_or(0, |bucket| bucket.wrapping_add(1)));
        [
            kind | reduce << 8 | dtype << 16 | algorithm << 24 | bucket << 32,
            self.operation.seq,
            self.total as u64,
            self.piece as u64,
            self.counts,
            u64::from(self.mark) | u64::from(self.leaves) << 32,
        ]
    }

    /// The header, or what is wrong with the words.
    pub(crate) fn decode(words: &[u64; HEADER_WORDS]) -> Result<Self, String> {
        let [first, seq, total, piece, counts, mark_and_leaves] = *words;
        let kind = OpKind::from_code(first as u32 & 0xFF)
            .ok_or_else(|| format!("operation {}", first & 0xFF))?;
        let code = (first >> 8) as u8;
        let reduce = (code != 0)
            .then(|| ReduceOp::from_code(code).ok_or_else(|| format!("reduction {code}")));
        let code = (first >> 16) as u8;
        let dtype =
            (code != 0).then(|| DType::from_code(code).ok_or_else(|| format!("dtype {code}")));
        let code = (first >> 24) as u8;
        let algorithm = Algorithm::from_code(code).ok_or_else(|| format!("algorithm {code}"))?;
        let count =
            |what: &str, value: u64| usize::try_from(value).map_err(|_| format!("{what} {value}"));
        Ok(Self {
            operation: Operation {
                kind,
                seq,
                bucket: ((first >> 32) as u32).checked_sub(1),
            },
            reduce: reduce.transpose()?,
            dtype: dtype.transpose()?,
            algorithm,
            total: count("length", total)?,
            piece: count("piece", piece)?,
            counts,
            mark: mark_and_leaves as u32,
            leaves: (mark_and_leaves >> 32) as u32,
        })
    }
}

/// "all-reduce (sum) of 64 f32 over 8 leaves, bucket 3 of step 12".
impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.operation.kind;
        write!(f, "{kind}")?;
        if let Some(reduce) = self.reduce {
            write!(f, " ({reduce})")?;
        }
        if let Some(dtype) = self.dtype {
            write!(f, " of {} {dtype}", self.total)?;
        }
        if self.counts != 0 {
            write!(f, " at most (counts {:08x})", self.counts as u32)?;
        }
        match kind {
            OpKind::Broadcast | OpKind::BroadcastBytes | OpKind::Scatter => {
                write!(f, " from rank {}", self.mark)?;
            }
            OpKind::Reduce | OpKind::Gather => write!(f, " to rank {}", self.mark)?,
            _ => {}
        }
        if self.reduce.is_some() {
            write!(f, " over {} leaves", self.leaves)?;
        }
        // The usual ways are not worth a word; one that somebody asked for may be what differs.
        if !matches!(self.algorithm, Algorithm::Direct | Algorithm::OneShot) {
            write!(f, " by {}", self.algorithm.name())?;
        }
        if self.piece != self.total {
            write!(f, ", in pieces of {}", self.piece)?;
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
    pub(crate) spec: Spec,
}

impl Call {
    /// Size of one element, 1 for calls without data.
    pub(crate) fn element_bytes(&self) -> usize {
        self.header.dtype.map_or(1, DType::bytes)
    }
}

/// Elements of the pieces in which calls can be done together that differ in nothing else.
pub(crate) fn common_piece(headers: &[(usize, Header)]) -> Option<usize> {
    let whole = |header: &Header| Header {
        piece: 0,
        ..*header
    };
    let (_, first) = headers.first()?;
    let same = |(_, header): &(usize, Header)| whole(header) == whole(first);
    let smallest = headers.iter().map(|(_, header)| header.piece).min();
    smallest.filter(|_| headers.iter().all(same))
}

/// Compares headers: ranks' numbers, ascending, and what they called. Every rank that sees the same headers makes the same
/// error of them.
///
/// The largest group of equal calls counts as right, the one of the lowest rank when there are two; with exactly one
/// rank outside it that rank is the culprit.
pub(crate) fn agree(headers: &[(usize, Header)]) -> Result<(), Error> {
    if headers.windows(2).all(|pair| pair[0].1 == pair[1].1) {
        return Ok(());
    }
    let mut groups: Vec<(Header, Vec<usize>)> = Vec::new();
    for (rank, header) in headers {
        match groups.iter_mut().find(|(known, _)| known == header) {
            Some((_, ranks)) => ranks.push(*rank),
            None => groups.push((*header, vec![*rank])),
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
    let mut calls = calls.join("; ");
    if common_piece(headers).is_some() {
        calls.push_str(MIXED);
    }
    Err(Error::Mismatch {
        seq: headers[0].1.operation.seq,
        calls,
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
            algorithm: Algorithm::Direct,
            total,
            piece: total,
            counts: 0,
            mark: 0,
            leaves: 4,
        }
    }

    #[test]
    fn the_odd_rank_out_is_named() {
        let calls = [(0, 64), (1, 64), (4, 65), (7, 64)].map(|(rank, len)| (rank, header(len)));
        let error = agree(&calls).unwrap_err();
        assert_eq!(error.culprit(), Some(4));
        assert_eq!(
            error.to_string(),
            "operation #12 differs between ranks: ranks 0, 1, 7 called all-reduce (sum) of 64 f32 over 4 leaves; \
             rank 4 called all-reduce (sum) of 65 f32 over 4 leaves"
        );
    }

    #[test]
    fn of_two_ranks_nobody_is_to_blame() {
        assert_eq!(
            agree(&[(0, header(1)), (1, header(2))])
                .unwrap_err()
                .culprit(),
            None
        );
    }

    #[test]
    fn calls_that_differ_only_in_their_pieces_can_be_done_in_the_smallest() {
        let cut = |piece| Header {
            piece,
            ..header(100)
        };
        let calls = [(0, cut(100)), (1, cut(32)), (2, cut(100))];
        assert_eq!(common_piece(&calls), Some(32));
        assert_eq!(common_piece(&[(0, cut(32)), (1, header(99))]), None);
        assert_eq!(common_piece(&[]), None);
    }

    #[test]
    fn equal_calls_agree() {
        assert!(agree(&[(0, header(7)), (1, header(7)), (2, header(7))]).is_ok());
    }

    proptest! {
        #[test]
        fn any_words_decode_or_are_refused(words in prop::array::uniform6(any::<u64>())) {
            if let Ok(header) = Header::decode(&words) {
                prop_assert_eq!(Header::decode(&header.encode()).unwrap(), header);
                prop_assert!(!header.to_string().is_empty());
            }
        }

        #[test]
        fn headers_survive_encoding(total in 0..usize::MAX, counts in any::<u64>(), mark in any::<u32>(), bucket in 0..u32::MAX) {
            let mut header = header(total);
            header.counts = counts;
            header.mark = mark;
            header.operation.bucket = Some(bucket);
            prop_assert_eq!(Header::decode(&header.encode()).unwrap(), header);
        }
    }
}
