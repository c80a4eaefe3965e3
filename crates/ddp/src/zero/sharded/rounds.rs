//! The ranks' way through the rounds of a step or an evaluation.
//!
//! ```text
//! forward round    block 0, 1, .., n-1      gather, compute
//! backward round   block n-1, .., 1, 0      gather, compute again, hand the gradients to the block's bucket
//! ```
//!
//! All ranks go through the same rounds, and in a round they gather at every position; the next position's gather runs while a
//! block computes. Before each round the ranks vote on its kind, forward if any rank wants it. A rank that has nothing to do
//! in a round, or whose model skips a block, takes part without computing. The vote also tells whether a backward round is the
//! last of the step: in that one, and in no other, buckets leave, at fixed positions. Ranks therefore never wait for each other
//! in different places.

use std::collections::VecDeque;
use std::time::Instant;

use burn::tensor::{DType, Tensor, TensorData};
use paceline_collective::{AllGather, Buffer, Done, Ticket};

use super::{Sharded, lock};
use crate::error::DdpError;
use crate::reducer::Event;
use crate::timeline::BucketTiming;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Forward,
    Backward,
}

/// The ranks' way through the rounds of a step or an evaluation.
#[derive(Default)]
pub(super) struct Walk {
    pub(super) step: u64,
    is_backward: bool,
    round: Option<Round>,
    /// Gathers under way, in the order of their positions.
    flights: VecDeque<(usize, Ticket<f32>)>,
    timings: Vec<BucketTiming>,
    pub(super) free: Vec<Buffer<f32>>,
    /// Whether the ranks have voted, and whether the last backward round of all ranks is over.
    has_met: bool,
    has_ended: bool,
    /// A block in whole, for exports.
    pub(super) kept: Option<(usize, Buffer<f32>)>,
}

#[derive(Clone, Copy)]
struct Round {
    kind: Kind,
    /// The next position.
    at: usize,
    /// Whether it is the last backward round of all ranks in this step.
    is_last: bool,
}

/// A rank's vote before a round.
mod vote {
    pub(super) const DONE: i64 = 0;
    pub(super) const FORWARD: i64 = 1;
    pub(super) const BACKWARD: i64 = 2;
    pub(super) const LAST_BACKWARD: i64 = 3;
}

impl Sharded {
    /// The gathers since the start of the step.
    pub(crate) fn take_timings(&self) -> Vec<BucketTiming> {
        std::mem::take(&mut lock(&self.walk).timings)
    }

    /// Whether other ranks may wait for this rank's part of the step.
    pub(crate) fn has_met(&self) -> bool {
        lock(&self.walk).has_met
    }

    pub(crate) fn begin_step(&self, step: u64) {
        let mut walk = lock(&self.walk);
        *walk = Walk {
            step,
            free: std::mem::take(&mut walk.free),
            ..Walk::default()
        };
    }

    /// A backward pass begins. The first gather runs beside the part of it that is behind the blocks.
    pub(crate) fn begin_backward(&self, is_last: bool) -> Result<(), DdpError> {
        let mut walk = lock(&self.walk);
        if !walk.has_met {
            return Ok(());
        }
        if walk.has_ended {
            let why = "a backward pass after this rank's last one";
            return Err(DdpError::Sharded(why));
        }
        let own = match is_last {
            true => vote::LAST_BACKWARD,
            false => vote::BACKWARD,
        };
        walk.is_backward = true;
        self.meet(&mut walk, own)?;
        self.send_ahead(&mut walk, 1)
    }

    /// The backward pass has ended on this rank.
    pub(crate) fn end_backward(&self) -> Result<(), DdpError> {
        let mut walk = lock(&self.walk);
        if walk.is_backward {
            self.end_round(&mut walk)?;
        }
        walk.is_backward = false;
        Ok(())
    }

    /// Takes part in the rounds of the other ranks until none is left. All buckets may then leave.
    ///
    /// *Blocks*: until all ranks are done.
    pub(crate) fn end_step(&self) -> Result<(), DdpError> {
        let mut walk = lock(&self.walk);
        self.meet(&mut walk, vote::DONE)?;
        walk.has_ended = false;
        self.setup.reducer.apply(Event::Open(usize::MAX));
        Ok(())
    }

    /// The same after forward passes only.
    pub(crate) fn end_evaluation(&self) -> Result<(), DdpError> {
        self.meet(&mut lock(&self.walk), vote::DONE)
    }

    /// Votes, and begins the round that this rank wants. Takes part in others before it.
    fn meet(&self, walk: &mut Walk, own: i64) -> Result<(), DdpError> {
        self.end_round(walk)?;
        while !walk.has_ended {
            let gathers = &self.setup.gathers;
            let mut votes = gathers.buffer::<i64>(gathers.world())?;
            votes[gathers.rank()] = own;
            let call = AllGather {
                step: walk.step,
                ..AllGather::default()
            };
            walk.has_met = true;
            let votes = gathers.all_gather_async(votes, call).wait()?.buffer;
            let any = |wanted: &[i64]| votes.iter().any(|vote| wanted.contains(vote));
            let kind = match any(&[vote::FORWARD]) {
                true => Kind::Forward,
                false if any(&[vote::BACKWARD, vote::LAST_BACKWARD]) => Kind::Backward,
                false => break,
            };
            walk.round = Some(Round {
                kind,
                at: 0,
                is_last: !any(&[vote::FORWARD, vote::BACKWARD]),
            });
            if (own == vote::FORWARD) == (kind == Kind::Forward) && own != vote::DONE {
                break;
            }
            self.end_round(walk)?;
        }
        Ok(())
    }

    /// Goes through the rest of the round.
    fn end_round(&self, walk: &mut Walk) -> Result<(), DdpError> {
        let Some(round) = walk.round else {
            return Ok(());
        };
        self.walk_to(walk, self.blocks.len())?;
        walk.round = None;
        if round.is_last {
            self.open(self.blocks.len());
            walk.has_ended = true;
        }
        Ok(())
    }

    /// Takes part in the gathers before `position` without using their values.
    fn walk_to(&self, walk: &mut Walk, position: usize) -> Result<(), DdpError> {
        while walk.round.is_some_and(|round| round.at < position) {
            let values = self.arrive(walk)?;
            walk.free.push(values);
        }
        Ok(())
    }

    /// Waits for the gather of the next position, while the one after it is under way.
    fn arrive(&self, walk: &mut Walk) -> Result<Buffer<f32>, DdpError> {
        let round = walk.round.as_mut().expect("a round has begun");
        if round.is_last {
            // The blocks of earlier positions are complete.
            self.open(round.at);
        }
        round.at += 1;
        let (kind, ahead) = (round.kind, round.at + 1);
        self.send_ahead(walk, ahead)?;
        let (position, ticket) = walk.flights.pop_front().expect("it was sent");
        let start = Instant::now();
        let Done { buffer, timing } = ticket.wait()?;
        let bucket = self.blocks[self.unit_at(kind, position)].bucket;
        walk.timings.push(BucketTiming {
            bucket,
            bytes: self.setup.plan.buckets[bucket].stride * size_of::<f32>(),
            operation: "all_gather",
            ready: timing.submitted,
            submitted: timing.submitted,
            started: timing.started,
            peers_ready: timing.peers_ready,
            finished: timing.finished,
            waited: (start, Instant::now()),
            device: None,
        });
        Ok(buffer)
    }

    /// Sends the gathers of the round's positions before `end`.
    fn send_ahead(&self, walk: &mut Walk, end: usize) -> Result<(), DdpError> {
        let Some(round) = walk.round else {
            return Ok(());
        };
        let first = round.at.saturating_sub(1);
        let next = walk.flights.back().map_or(first, |(last, _)| last + 1);
        for position in next..end.min(self.blocks.len()) {
            let unit = self.unit_at(round.kind, position);
            let ticket = self.send(walk, &self.blocks[unit])?;
            walk.flights.push_back((position, ticket));
        }
        Ok(())
    }

    /// The block at a position of a round, and the position of a block.
    fn unit_at(&self, kind: Kind, position: usize) -> usize {
        match kind {
            Kind::Forward => position,
            Kind::Backward => self.blocks.len() - 1 - position,
        }
    }

    /// Lets the buckets before `bucket` leave.
    fn open(&self, bucket: usize) {
        if bucket > 0 {
            self.setup.reducer.apply(Event::Open(bucket));
        }
    }

    pub(super) fn gather_block(&self, block: usize) -> Result<Vec<Tensor<1>>, DdpError> {
        let unit = self.unit_of(block).expect("only its blocks are gathered");
        let mut walk = lock(&self.walk);
        let kind = match walk.is_backward {
            true => Kind::Backward,
            false => Kind::Forward,
        };
        let position = self.unit_at(kind, unit);
        let is_ahead = walk.round.is_some_and(|round| round.at <= position);
        match kind {
            Kind::Forward if !is_ahead => self.meet(&mut walk, vote::FORWARD)?,
            Kind::Backward if !is_ahead => return Err(DdpError::BlockOrder { block }),
            _ => {}
        }
        self.walk_to(&mut walk, position)?;
        let values = self.arrive(&mut walk)?;
        let parameters = self.blocks[unit].parameters.iter();
        let tensors = parameters.map(|index| {
            let values = self.values_of(&values, *index);
            let len = values.len();
            let data = TensorData::new(values, [len]);
            Tensor::from_data(data, (&self.setup.device, DType::F32))
        });
        let tensors = tensors.collect();
        walk.free.push(values);
        Ok(tensors)
    }
}
