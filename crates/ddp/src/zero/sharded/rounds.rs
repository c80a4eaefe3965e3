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
//! in different places, and votes, gathers and buckets have one order on all ranks.
//!
//! In a pipeline a round goes through the blocks of one of the rank's stages. A rank that waits for a message of its own pipeline
//! cannot vote, and its neighbours might wait for the vote's other voters. All replicas of a stage therefore run the plan of the
//! one with the most micro-batches, on which they agree when a shard begins, and pass over what they lack in its place.

use std::collections::VecDeque;

use burn::tensor::{Shape, Tensor};
use paceline_collective::{AllGather, Buffer};

use super::{Flight, Sharded, Stage, Whole, lock};
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
    flights: VecDeque<(usize, Flight)>,
    timings: Vec<BucketTiming>,
    pub(super) free: Vec<Buffer<f32>>,
    /// Whether the ranks have voted, and whether the last backward round of all ranks is over.
    has_met: bool,
    has_ended: bool,
    /// A block in whole, for exports.
    pub(super) kept: Option<(usize, Whole)>,
}

impl Walk {
    /// Keeps a block's memory for later ones.
    pub(super) fn put_back(&mut self, block: Option<Whole>) {
        if let Some(Whole::OnHost(values)) = block {
            self.free.push(values);
        }
    }
}

#[derive(Clone, Copy)]
struct Round {
    kind: Kind,
    /// Index of the stage.
    stage: usize,
    /// The next position.
    at: usize,
    /// Whether it is the last backward round of all ranks in this step.
    is_last: bool,
}

/// A rank's vote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Vote {
    /// For no further round.
    Done,
    /// For a forward round of a stage.
    Forward(usize),
    /// For a backward round of a stage.
    Backward(usize),
    /// For one after which this rank wants no other.
    LastBackward(usize),
    /// For no round yet: a shard with so many micro-batches begins.
    Shard(usize),
}

impl Vote {
    fn encode(self) -> i64 {
        let (kind, number) = match self {
            Self::Done => (0, 0),
            Self::Forward(stage) => (1, stage),
            Self::Backward(stage) => (2, stage),
            Self::LastBackward(stage) => (3, stage),
            Self::Shard(count) => (4, count),
        };
        ((number as i64) << 3) | kind
    }

    fn decode(code: i64) -> Self {
        let number = (code >> 3) as usize;
        match code & 7 {
            1 => Self::Forward(number),
            2 => Self::Backward(number),
            3 => Self::LastBackward(number),
            4 => Self::Shard(number),
            _ => Self::Done,
        }
    }

    /// The round that the rank wants.
    fn round(self) -> Option<(Kind, usize)> {
        match self {
            Self::Done | Self::Shard(_) => None,
            Self::Forward(stage) => Some((Kind::Forward, stage)),
            Self::Backward(stage) | Self::LastBackward(stage) => Some((Kind::Backward, stage)),
        }
    }
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

    /// A shard of a pipeline begins. Returns the largest number of micro-batches that a rank has in it.
    pub(crate) fn begin_shard(&self, micro_batches: usize) -> Result<usize, DdpError> {
        let mut walk = lock(&self.walk);
        self.end_round(&mut walk)?;
        let votes = self.vote(&mut walk, Vote::Shard(micro_batches))?;
        let counts = votes.into_iter().filter_map(|vote| match vote {
            Vote::Shard(count) => Some(count),
            _ => None,
        });
        Ok(counts.max().unwrap_or(micro_batches))
    }

    /// A backward pass through a stage begins. The first gather runs beside the part of it that is behind the blocks.
    pub(crate) fn begin_backward(&self, stage: usize, is_last: bool) -> Result<(), DdpError> {
        let mut walk = lock(&self.walk);
        if !walk.has_met {
            return Ok(());
        }
        if walk.has_ended {
            let why = "a backward pass after this rank's last one";
            return Err(DdpError::Sharded(why));
        }
        walk.is_backward = true;
        let Some(stage) = self.stage_of(stage) else {
            return Ok(());
        };
        let own = match is_last {
            true => Vote::LastBackward(stage),
            false => Vote::Backward(stage),
        };
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

    /// Takes part in the gathers of a forward pass through a stage that other ranks run.
    pub(crate) fn skip_forward(&self, stage: usize) -> Result<(), DdpError> {
        let Some(stage) = self.stage_of(stage) else {
            return Ok(());
        };
        let mut walk = lock(&self.walk);
        self.meet(&mut walk, Vote::Forward(stage))?;
        self.end_round(&mut walk)
    }

    /// The same for a backward pass.
    pub(crate) fn skip_backward(&self, stage: usize, is_last: bool) -> Result<(), DdpError> {
        self.begin_backward(stage, is_last)?;
        self.end_backward()
    }

    /// Takes part in the rounds of the other ranks until none is left. All buckets may then leave.
    ///
    /// *Blocks*: until all ranks are done.
    pub(crate) fn end_step(&self) -> Result<(), DdpError> {
        let mut walk = lock(&self.walk);
        self.meet(&mut walk, Vote::Done)?;
        walk.has_ended = false;
        self.setup.reducer.apply(Event::Open(usize::MAX));
        Ok(())
    }

    /// The same after forward passes only.
    pub(crate) fn end_evaluation(&self) -> Result<(), DdpError> {
        self.meet(&mut lock(&self.walk), Vote::Done)
    }

    /// All ranks' votes.
    fn vote(&self, walk: &mut Walk, own: Vote) -> Result<Vec<Vote>, DdpError> {
        let gathers = &self.setup.gathers;
        let mut votes = gathers.buffer::<i64>(gathers.world())?;
        votes[gathers.rank()] = own.encode();
        let call = AllGather {
            step: walk.step,
            ..AllGather::default()
        };
        walk.has_met = true;
        let votes = gathers.all_gather_async(votes, call).wait()?.buffer;
        Ok(votes.iter().copied().map(Vote::decode).collect())
    }

    /// Votes, and begins the round that this rank wants. Takes part in others before it.
    fn meet(&self, walk: &mut Walk, own: Vote) -> Result<(), DdpError> {
        self.end_round(walk)?;
        while !walk.has_ended {
            let votes = self.vote(walk, own)?;
            let wanted = |kind| {
                let mut rounds = votes.iter().filter_map(|vote| vote.round());
                rounds.find(|(wanted, _)| *wanted == kind)
            };
            let Some((kind, stage)) = wanted(Kind::Forward).or_else(|| wanted(Kind::Backward))
            else {
                // A shard begins on other ranks.
                if votes.iter().any(|vote| *vote != Vote::Done) {
                    continue;
                }
                break;
            };
            let goes_on = |vote: &Vote| matches!(vote, Vote::Forward(_) | Vote::Backward(_));
            walk.round = Some(Round {
                kind,
                stage,
                at: 0,
                is_last: !votes.iter().any(goes_on),
            });
            // Before the round's first gather, on all ranks.
            self.open_before(walk);
            if own.round() == Some((kind, stage)) {
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
        self.walk_to(walk, self.stages[round.stage].units.len())?;
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
            self.arrive(walk, |_| ())?;
        }
        Ok(())
    }

    /// Waits for the gather of the next position, gives its values to `take`, and sends the gather after it in the same memory.
    fn arrive<R>(&self, walk: &mut Walk, take: impl FnOnce(&Whole) -> R) -> Result<R, DdpError> {
        let round = walk.round.expect("a round has begun");
        let at = round.at;
        self.open_before(walk);
        self.send_ahead(walk, at + 1)?;
        let (position, flight) = walk.flights.pop_front().expect("it was sent");
        let unit = &self.blocks[self.unit_at(round, position)];
        let (block, timing) = self.land(flight, unit)?;
        walk.timings.push(timing);
        let taken = take(&block);
        walk.put_back(Some(block));
        walk.round = Some(Round {
            at: at + 1,
            ..round
        });
        self.send_ahead(walk, at + 2)?;
        Ok(taken)
    }

    /// Sends the gathers of the round's positions before `end`.
    fn send_ahead(&self, walk: &mut Walk, end: usize) -> Result<(), DdpError> {
        let Some(round) = walk.round else {
            return Ok(());
        };
        let next = walk.flights.back().map_or(round.at, |(last, _)| last + 1);
        for position in next..end.min(self.stages[round.stage].units.len()) {
            let unit = self.unit_at(round, position);
            let flight = self.send(walk, &self.blocks[unit])?;
            walk.flights.push_back((position, flight));
        }
        Ok(())
    }

    /// The block at a position of a round.
    fn unit_at(&self, round: Round, position: usize) -> usize {
        let units = &self.stages[round.stage].units;
        match round.kind {
            Kind::Forward => units.start + position,
            Kind::Backward => units.end - 1 - position,
        }
    }

    /// In the last round, lets the buckets before the next position leave: the blocks of earlier positions are complete, and so
    /// are those of later stages.
    fn open_before(&self, walk: &Walk) {
        if let Some(round) = walk.round.filter(|round| round.is_last) {
            self.open(self.blocks.len() - self.stages[round.stage].units.end + round.at);
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
        let holds = |stage: &Stage| stage.units.contains(&unit);
        let stage = self.stages.iter().position(holds);
        let stage = stage.expect("every block is in a stage");
        let units = &self.stages[stage].units;
        let position = match kind {
            Kind::Forward => unit - units.start,
            Kind::Backward => units.end - 1 - unit,
        };
        let is_ahead = walk.round.is_some_and(|round| {
            (round.kind, round.stage) == (kind, stage) && round.at <= position
        });
        match kind {
            Kind::Forward if !is_ahead => self.meet(&mut walk, Vote::Forward(stage))?,
            Kind::Backward if !is_ahead => return Err(DdpError::BlockOrder { block }),
            _ => {}
        }
        self.walk_to(&mut walk, position)?;
        self.arrive(&mut walk, |block| {
            let parameters = self.blocks[unit].parameters.iter();
            let tensors = parameters.map(|index| {
                let value = self.value_of(block, *index);
                let shape = Shape::from([value.len()]);
                value.tensor(&self.setup.device, shape, self.setup.dtype)
            });
            tensors.collect()
        })
    }
}
