//! The engine for ranks that map each other's memory: `shm` between processes, `local` between threads.
//!
//! An operation meets twice. Each rank writes its header into its control page, publishes "arrived" and waits until all
//! have. All compare all headers. Then each rank folds its slice straight out of all ranks' buffers and stores the
//! result straight into them (or copies the slices it needs, where nothing is folded), publishes "done" and waits until
//! all have. Between a rank's "arrived" and the others' "done" its buffer belongs to the operation.
//!
//! What a peer says is checked where it could lead outside a mapping. Contents are not: whoever may join has proved the
//! job's token, and could send wrong numbers anyway.
#![allow(unsafe_code)]

mod meeting;

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

pub(crate) use meeting::Meeting;

use crate::call::{Call, HEADER_WORDS, Header, agree};
use crate::engine::{Engine, Runner};
use crate::error::Error;
use crate::fold::{Fold, Scratch};
use crate::memory::{CONTROL_BYTES, Home, Region, Segment};
use crate::old_plan::Partition;
use crate::status::Vigil;
use crate::tree::Step;

/// Where a rank is in its operations, as one number that only grows (and wraps): twice the sequence number when it has
/// arrived, one more when it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Arrived,
    Done,
}

impl Stage {
    fn progress(self, seq: u64) -> u32 {
        (seq as u32)
            .wrapping_mul(2)
            .wrapping_add(u32::from(self == Self::Done))
    }
}

/// One rank's engine over all ranks' segments.
#[derive(Debug)]
pub(crate) struct ShmEngine {
    rank: usize,
    segments: Vec<Arc<Segment>>,
    meeting: Meeting,
    scratch: Scratch,
}

impl ShmEngine {
    /// `segments` are all ranks', in rank order.
    pub(crate) fn new(rank: usize, segments: Vec<Arc<Segment>>) -> Self {
        let meeting = Meeting::new(rank, segments.len());
        Self {
            rank,
            segments,
            meeting,
            scratch: Scratch::default(),
        }
    }

    fn announce(&self, call: &Call, offset: usize) {
        let words = call.header.encode(offset as u64);
        let slots = &self.segments[self.rank].control().header;
        // Relaxed: published by the store of `progress` that follows.
        slots
            .iter()
            .zip(words)
            .for_each(|(slot, word)| slot.store(word, Ordering::Relaxed));
    }

    /// All ranks' headers and where their data begins; called once all have arrived.
    fn read_headers(&self, call: &Call) -> Result<Vec<usize>, Error> {
        let (mut headers, mut offsets) = (Vec::new(), Vec::new());
        for (peer, segment) in self.segments.iter().enumerate() {
            let words: [u64; HEADER_WORDS] =
                std::array::from_fn(|i| segment.control().header[i].load(Ordering::Relaxed));
            let (header, offset) = Header::decode(&words)
                .map_err(|reason| self.broken(call, peer, format!("its header holds {reason}")))?;
            headers.push(header);
            offsets.push(offset);
        }
        agree(&headers)?;
        let offsets = offsets.into_iter().enumerate().map(|(peer, offset)| {
            let size = self.segments[peer].bytes() as u64;
            let end = offset.checked_add(call.bytes(peer) as u64);
            let inside = offset >= CONTROL_BYTES as u64 && end.is_some_and(|end| end <= size);
            if call.bytes(peer) == 0 || (inside && offset.is_multiple_of(64)) {
                Ok(offset as usize)
            } else {
                Err(self.broken(
                    call,
                    peer,
                    format!("its data begins at byte {offset} of a segment of {size}"),
                ))
            }
        });
        offsets.collect()
    }

    fn broken(&self, call: &Call, peer: usize, reason: String) -> Error {
        Error::Wire {
            peer,
            during: Some(call.header.operation),
            reason,
        }
    }

    /// Folds this rank's slice and stores the result in its own buffer, and in all others when the plan gathers.
    fn fold(&mut self, call: &Call, starts: &[NonNull<u8>], slices: &Partition) {
        let (Some(op), Some(dtype)) = (call.header.reduce, call.header.dtype) else {
            return;
        };
        let slice = slices.range(self.rank);
        let first_byte = slice.start * dtype.bytes();
        let inputs: Vec<*const u8> = call
            .tree
            .program()
            .iter()
            .filter_map(|step| match step {
                Step::Load { rank, block } => {
                    // SAFETY: inside the rank's `call.bytes(rank)` bytes, which `read_headers` has checked.
                    Some(
                        unsafe { starts[*rank].add(block * call.block_bytes() + first_byte) }
                            .as_ptr()
                            .cast_const(),
                    )
                }
                Step::Merge => None,
            })
            .collect();
        let everywhere = call.plan.gather.is_some();
        let rank = self.rank;
        let targets = starts
            .iter()
            .enumerate()
            .filter(|(target, _)| everywhere || *target == rank);
        let targets: Vec<NonNull<u8>> = targets.map(|(_, start)| *start).collect();
        let fold = Fold {
            tree: &call.tree,
            dtype,
            op,
            inputs: &inputs,
            len: slice.len(),
        };
        // SAFETY: all ranks have arrived with this call and none is done, so their buffers belong to the operation, and
        // this slice of them to this rank alone: slices of a partition do not overlap. The stores go to the chunk of
        // the first block that was just read.
        unsafe {
            fold.run(&mut self.scratch, |at, bytes| {
                for target in &targets {
                    target
                        .add(first_byte + at)
                        .copy_from_nonoverlapping(NonNull::from_ref(&bytes[0]), bytes.len());
                }
            });
        }
    }

    /// Copies every other owner's slice into this rank's buffer. Reading instead of writing shares out a broadcast's work.
    fn gather(&self, call: &Call, starts: &[NonNull<u8>], slices: &Partition) {
        let size = call.element_bytes();
        for owner in (0..self.segments.len()).filter(|owner| *owner != self.rank) {
            let slice = slices.range(owner);
            // SAFETY: both ranges lie in buffers that `read_headers` has checked; the owner's slice is written by
            // nobody, this rank's copy of it by this rank alone; different ranks' buffers do not overlap.
            unsafe {
                let from = starts[owner].add(slice.start * size);
                starts[self.rank]
                    .add(slice.start * size)
                    .copy_from_nonoverlapping(from, slice.len() * size);
            }
        }
    }
}

impl Engine for ShmEngine {
    fn execute(
        &mut self,
        call: &Call,
        region: &mut Region,
        vigil: &Vigil<'_>,
        runner: Runner,
    ) -> Result<Instant, Error> {
        let seq = call.header.operation.seq;
        let offset = match region.home() {
            Home::Arena { offset, .. } => *offset,
            // Only calls without data come with other memory.
            Home::Heap(_) => 0,
        };
        self.announce(call, offset);
        self.meeting
            .meet(&self.segments, Stage::Arrived.progress(seq), vigil, runner)?;
        let ready = Instant::now();
        let offsets = self.read_headers(call)?;
        if call.block_bytes() > 0 {
            let starts: Vec<NonNull<u8>> = self
                .segments
                .iter()
                .zip(offsets)
                .map(|(segment, offset)| segment.at(offset))
                .collect();
            match (&call.plan.reduce, &call.plan.gather) {
                (Some(slices), _) => self.fold(call, &starts, slices),
                (None, Some(slices)) => self.gather(call, &starts, slices),
                (None, None) => {}
            }
        }
        self.meeting
            .meet(&self.segments, Stage::Done.progress(seq), vigil, runner)?;
        Ok(ready)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use paceline_rendezvous::page::JobPage;

    use super::*;
    use crate::element::{DType, ReduceOp};
    use crate::error::{OpKind, Operation};
    use crate::memory::Arena;
    use crate::old_plan::Plan;
    use crate::status::{PeerInfo, Status};
    use crate::tree::Tree;

    /// What rank 0 of 2 makes of a peer that has come with these words in its header.
    fn against(words: impl Fn(&Call) -> [u64; HEADER_WORDS]) -> Error {
        let header = Header {
            operation: Operation {
                kind: OpKind::AllReduce,
                seq: 1,
                bucket: None,
            },
            reduce: Some(ReduceOp::Sum),
            dtype: Some(DType::F32),
            total: 1000,
            first: 0,
            piece: 1000,
            mark: 0,
            leaves: 2,
        };
        let call = Call {
            header,
            plan: Plan::all_reduce(1000, 2, 4),
            tree: Tree::per_rank(2),
        };
        let segments: Vec<_> = (0..2)
            .map(|_| Arc::new(Segment::create(1 << 16).unwrap()))
            .collect();
        let mut region = Arena::allocate(&Arena::new(segments[0].clone()), 4000).unwrap();
        let theirs = segments[1].control();
        theirs
            .header
            .iter()
            .zip(words(&call))
            .for_each(|(slot, word)| slot.store(word, Ordering::Relaxed));
        theirs
            .progress
            .store(Stage::Arrived.progress(1), Ordering::SeqCst);
        let page = JobPage::private(2).unwrap();
        let peer = PeerInfo {
            host: "b".into(),
            pid: 7,
            slot: None,
        };
        let status = Status::new(0, vec![peer.clone(), peer], page.clone(), page.slot(0));
        let timeout = Duration::from_millis(400);
        let vigil = Vigil {
            status: &status,
            operation: header.operation,
            started: Instant::now(),
            timeout,
        };
        ShmEngine::new(0, segments)
            .execute(&call, &mut region, &vigil, Runner::CommThread)
            .unwrap_err()
    }

    #[test]
    fn data_outside_a_peers_segment_is_not_touched() {
        let size = (1 << 16) + CONTROL_BYTES as u64;
        for offset in [
            0,
            64,
            size - 64,
            size,
            u64::MAX - 63,
            CONTROL_BYTES as u64 + 1,
        ] {
            let error = against(|call| call.header.encode(offset));
            assert!(matches!(error, Error::Wire { peer: 1, .. }), "{error}");
            assert!(
                error
                    .to_string()
                    .contains(&format!("begins at byte {offset} of a segment of {size}")),
                "{error}"
            );
        }
    }

    #[test]
    fn a_header_of_nonsense_is_the_peers_fault() {
        let error = against(|_| [u64::MAX; HEADER_WORDS]);
        assert!(matches!(error, Error::Wire { peer: 1, .. }), "{error}");
    }

    #[test]
    fn a_peer_that_never_finishes_is_named() {
        let error = against(|call| call.header.encode(CONTROL_BYTES as u64));
        assert!(error.is_deadline() && error.culprit() == Some(1), "{error}");
    }

    #[test]
    fn progress_only_grows_and_wraps() {
        assert_eq!(Stage::Arrived.progress(1), 2);
        assert_eq!(Stage::Done.progress(1), 3);
        let wrapped = Stage::Arrived.progress(1 << 31);
        assert_eq!(wrapped, 0);
        assert!(meeting::reached(
            wrapped,
            Stage::Done.progress((1 << 31) - 1)
        ));
    }
}
