//! Stage 3: the parameters of blocks are dealt to the ranks. A block gets whole ones when it runs, and drops them.
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
//!
//! Gathers have a process group of their own, because they cross the buckets that the backward pass sends.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
use paceline_collective::{AllGather, Buffer, Done, ProcessGroup, Ticket};
use paceline_nn::{BoxError, Supply};

use super::Shares;
use crate::buffer::{Entry, floats, narrowed};
use crate::error::DdpError;
use crate::placement::Placement;
use crate::plan::BucketPlan;
use crate::reducer::{Event, Reducer};
use crate::timeline::BucketTiming;

/// The ingredients of [`Sharded`].
pub(crate) struct Setup {
    /// The group of the replicas.
    pub(crate) group: ProcessGroup,
    /// The same ranks, for gathers only.
    pub(crate) gathers: ProcessGroup,
    /// With one bucket for each block, in the order of the backward pass, before all others.
    pub(crate) plan: Arc<BucketPlan>,
    pub(crate) shares: Arc<Shares>,
    pub(crate) reducer: Arc<dyn Reducer>,
    pub(crate) parameters: Vec<Entry>,
    pub(crate) device: Device,
    /// The placement of a model that has placeholders already.
    pub(crate) outer: Option<Arc<dyn Placement>>,
}

/// The parameters of blocks, of which this rank keeps its slices.
pub(crate) struct Sharded {
    setup: Setup,
    /// The blocks in forward order: the reverse of the buckets'.
    blocks: Vec<Unit>,
    /// By id, index of the parameter.
    index: HashMap<ParamId, usize>,
    slices: Mutex<HashMap<usize, Vec<f32>>>,
    walk: Mutex<Walk>,
}

/// A block with its bucket's parameters in registration order.
struct Unit {
    block: usize,
    bucket: usize,
    parameters: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Forward,
    Backward,
}

/// The ranks' way through the rounds of a step or an evaluation.
#[derive(Default)]
struct Walk {
    step: u64,
    is_backward: bool,
    round: Option<Round>,
    /// Gathers under way, in the order of their positions.
    flights: VecDeque<(usize, Ticket<f32>)>,
    timings: Vec<BucketTiming>,
    free: Vec<Buffer<f32>>,
    /// Whether the ranks have voted, and whether the last backward round of all ranks is over.
    has_met: bool,
    has_ended: bool,
    /// A block in whole, for exports.
    kept: Option<(usize, Buffer<f32>)>,
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
    /// Takes this rank's slices out of `model`, which gets placeholders.
    pub(crate) fn new<M: Module>(setup: Setup, model: M) -> (Arc<Self>, M) {
        let mut blocks = Vec::new();
        for (bucket, layout) in setup.plan.buckets[..setup.plan.tail()].iter().enumerate() {
            let segments = layout.segments.iter().rev();
            let parameters: Vec<usize> = segments.map(|segment| segment.index).collect();
            if let Some(block) = setup.parameters[parameters[0]].block {
                blocks.push(Unit {
                    block,
                    bucket,
                    parameters,
                });
            }
        }
        blocks.reverse();
        let parameters = setup.parameters.iter().enumerate();
        let dealt = parameters.filter(|(_, entry)| entry.block.is_some());
        let index = dealt.map(|(index, entry)| (entry.id, index)).collect();
        let sharded = Self {
            setup,
            blocks,
            index,
            slices: Mutex::default(),
            walk: Mutex::default(),
        };
        let model = model.map(&mut TakeOut(&sharded));
        (Arc::new(sharded), model)
    }

    /// Whether the model has a placeholder for this parameter.
    pub(crate) fn contains(&self, id: ParamId) -> bool {
        self.index.contains_key(&id)
    }

    pub(crate) fn gathers(&self) -> &ProcessGroup {
        &self.setup.gathers
    }

    /// Number of buckets whose parameters are never gathered in whole after a step.
    pub(crate) fn buckets(&self) -> usize {
        self.blocks.len()
    }

    /// Takes this rank's slices, by index of the parameter, for an optimizer's step.
    pub(crate) fn take_slices(&self) -> HashMap<usize, Vec<f32>> {
        std::mem::take(&mut *lock(&self.slices))
    }

    pub(crate) fn put_slice(&self, index: usize, values: Vec<f32>) {
        lock(&self.slices).insert(index, values);
    }

    /// The failure of the gathers' group, if it has one.
    pub(crate) fn health(&self) -> Result<(), DdpError> {
        Ok(self.setup.gathers.health()?)
    }

    /// Fails both groups, because this rank does not take part in the gathers any more.
    pub(crate) fn give_up(&self, culprit: Option<usize>, why: &str) {
        if self.setup.group.world() == 1 {
            return;
        }
        for group in [&self.setup.gathers, &self.setup.group] {
            match culprit {
                Some(_) => group.abort_over(culprit, why),
                None => group.abort(why),
            }
        }
    }

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
            ready: timing.submitted,
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

    /// Sends this rank's slices of a block.
    fn send(&self, walk: &mut Walk, unit: &Unit) -> Result<Ticket<f32>, DdpError> {
        let Setup {
            gathers,
            plan,
            shares,
            ..
        } = &self.setup;
        let layout = &plan.buckets[unit.bucket];
        let fitting = walk.free.iter().position(|b| b.len() >= layout.stride);
        let mut values = match fitting {
            Some(at) => walk.free.swap_remove(at),
            None => {
                walk.free.clear();
                gathers.buffer(layout.stride)?
            }
        };
        let slices = lock(&self.slices);
        for segment in &layout.segments {
            if let Some(own) = slices.get(&segment.index) {
                let range = shares.owned(plan, segment.index, gathers.rank());
                let at = segment.offset + range.start;
                values[at..at + own.len()].copy_from_slice(own);
            }
        }
        let call = AllGather {
            counts: Some(shares.counts(unit.bucket).clone()),
            bucket: Some(unit.bucket as u32),
            step: walk.step,
        };
        Ok(gathers.all_gather_async(values, call))
    }

    fn unit_of(&self, block: usize) -> Option<usize> {
        self.blocks
            .binary_search_by_key(&block, |unit| unit.block)
            .ok()
    }

    /// The values of a block's parameters, of the bucket's memory.
    fn values_of(&self, values: &[f32], index: usize) -> Vec<f32> {
        let (bucket, position) = self.setup.plan.places[index];
        let segment = &self.setup.plan.buckets[bucket].segments[position];
        values[segment.offset..segment.offset + segment.len].to_vec()
    }

    fn gather_block(&self, block: usize) -> Result<Vec<Tensor<1>>, DdpError> {
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

impl fmt::Debug for Sharded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sharded").finish_non_exhaustive()
    }
}

impl Supply for Sharded {
    fn parameters(&self, block: usize) -> Vec<(ParamId, Shape)> {
        let unit = self.unit_of(block).map(|unit| &self.blocks[unit]);
        let parameters = unit.into_iter().flat_map(|unit| &unit.parameters);
        let entries = parameters.map(|index| &self.setup.parameters[*index]);
        entries
            .map(|entry| (entry.id, Shape::from(entry.shape.clone())))
            .collect()
    }

    fn gather(&self, block: usize) -> Result<Vec<Tensor<1>>, BoxError> {
        Ok(self.gather_block(block)?)
    }

    fn scatter(&self, block: usize, gradients: Vec<Option<Tensor<1>>>) -> Result<(), BoxError> {
        let unit = self.unit_of(block).expect("only its blocks are scattered");
        let parameters = self.blocks[unit].parameters.iter();
        for (index, gradient) in parameters.zip(gradients) {
            if let Some(gradient) = gradient {
                self.setup
                    .reducer
                    .gradient(*index, gradient.cast(DType::F32));
            }
        }
        Ok(())
    }
}

impl Placement for Sharded {
    fn group(&self) -> &ProcessGroup {
        let outer = self.setup.outer.as_ref();
        outer.map_or(&self.setup.group, |outer| outer.group())
    }

    fn shape(&self, id: ParamId) -> Vec<usize> {
        self.whole_shape(id, vec![0])
    }

    fn whole_shape(&self, id: ParamId, own: Vec<usize>) -> Vec<usize> {
        let own = match self.index.get(&id) {
            Some(index) => self.setup.parameters[*index].shape.clone(),
            None => own,
        };
        match &self.setup.outer {
            Some(outer) => outer.whole_shape(id, own),
            None => own,
        }
    }

    fn slice(&self, id: ParamId) -> Option<(usize, Range<usize>)> {
        self.setup.outer.as_ref()?.slice(id)
    }

    fn whole(&self, id: ParamId, own: TensorData) -> Result<TensorData, DdpError> {
        let own = match self.index.get(&id) {
            None => own,
            Some(index) => {
                let (bucket, _) = self.setup.plan.places[*index];
                let unit = self.blocks.len() - 1 - bucket;
                let mut walk = lock(&self.walk);
                let values = match walk.kept.take() {
                    Some((kept, values)) if kept == unit => values,
                    kept => {
                        walk.free.extend(kept.map(|(_, values)| values));
                        let ticket = self.send(&mut walk, &self.blocks[unit])?;
                        ticket.wait()?.buffer
                    }
                };
                let whole = self.values_of(&values, *index);
                walk.kept = Some((unit, values));
                let entry = &self.setup.parameters[*index];
                narrowed(whole, entry.shape.clone().into(), entry.dtype)
            }
        };
        match &self.setup.outer {
            Some(outer) => outer.whole(id, own),
            None => Ok(own),
        }
    }

    fn replace(&self, id: ParamId, whole: TensorData) -> Option<TensorData> {
        let whole = match &self.setup.outer {
            Some(outer) => outer.replace(id, whole)?,
            None => whole,
        };
        let Some(index) = self.index.get(&id) else {
            return Some(whole);
        };
        self.keep(*index, &floats(&whole));
        None
    }
}

impl Sharded {
    /// Keeps this rank's slice of a parameter.
    fn keep(&self, index: usize, whole: &[f32]) {
        let Setup {
            shares,
            plan,
            group,
            ..
        } = &self.setup;
        let own = shares.owned(plan, index, group.rank());
        if !own.is_empty() {
            self.put_slice(index, whole[own].to_vec());
        }
    }
}

/// Puts placeholders in the place of parameters.
struct TakeOut<'a>(&'a Sharded);

impl ModuleMapper for TakeOut<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(index) = self.0.index.get(&param.id) else {
            return param;
        };
        let (id, tensor, mapper) = param.consume();
        let (device, dtype) = (tensor.device(), tensor.dtype());
        self.0.keep(*index, &floats(&tensor.inner().into_data()));
        let placeholder = Tensor::<D>::zeros([0; D], (&device, dtype));
        Param::from_mapped_value(id, placeholder.require_grad(), mapper)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // After a panic the step has failed, and the group with it.
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}
