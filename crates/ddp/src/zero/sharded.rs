//! Stage 3: the parameters of blocks are dealt to the ranks. A block gets whole ones when it runs, and drops them.
//!
//! ```text
//! position   0    1   ..  n-1 |  n   n+1  ..  2n-1
//! block      0    1   ..  n-1 | n-1  n-2  ..   0
//!            forward          | backward: gather, compute again, hand the gradients to the block's bucket
//! ```
//!
//! All ranks walk through the same positions of a pass, and gather at each of them; the next one's gather runs while a block
//! computes. A rank that has no pass left, or whose model skips a block, takes part without computing. Before each pass the
//! ranks vote whether it is the last of the step: in that one, and in no other, buckets leave, at fixed positions. Ranks
//! therefore never wait for each other in different places.
//!
//! Gathers have a process group of their own, because they cross the buckets that the backward pass sends.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
use paceline_collective::{AllGather, Buffer, ProcessGroup, Ticket};
use paceline_nn::{BoxError, Supply};

use super::Shares;
use crate::buffer::{Entry, floats, narrowed};
use crate::error::DdpError;
use crate::placement::Placement;
use crate::plan::BucketPlan;
use crate::reducer::{Event, Reducer};

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

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    #[default]
    Training,
    Evaluation,
}

/// The ranks' walk through one pass.
#[derive(Default)]
struct Walk {
    step: u64,
    /// The kind of the next or running pass.
    kind: Kind,
    /// Whether the next or running pass is this rank's last of the step.
    is_last: bool,
    /// The running pass.
    pass: Option<Running>,
    /// Gathers under way, in the order of their positions.
    flights: VecDeque<(usize, Ticket<f32>)>,
    free: Vec<Buffer<f32>>,
    /// Whether a pass ran in this step, and whether it was the last of all ranks.
    has_run: bool,
    has_ended: bool,
    /// A block in whole, for exports.
    kept: Option<(usize, Buffer<f32>)>,
}

#[derive(Clone, Copy)]
struct Running {
    kind: Kind,
    /// The next position.
    at: usize,
    /// Positions of the pass.
    len: usize,
    is_backward: bool,
    /// Whether it is the last pass of all ranks in this step.
    is_final: bool,
}

/// A rank's vote before a pass.
mod vote {
    /// It has no pass left.
    pub(super) const DONE: i64 = 0;
    pub(super) const MORE: i64 = 1;
    pub(super) const LAST: i64 = 2;
    pub(super) const EVALUATION: i64 = 3;
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

    /// Whether other ranks may wait for this rank's part of the step.
    pub(crate) fn has_run(&self) -> bool {
        lock(&self.walk).has_run
    }

    pub(crate) fn begin_step(&self, step: u64) {
        let mut walk = lock(&self.walk);
        *walk = Walk {
            step,
            free: std::mem::take(&mut walk.free),
            ..Walk::default()
        };
    }

    /// Announces this rank's next pass of the step.
    pub(crate) fn expect(&self, is_last: bool) {
        lock(&self.walk).is_last = is_last;
    }

    /// The backward pass begins.
    pub(crate) fn begin_backward(&self) -> Result<(), DdpError> {
        let mut walk = lock(&self.walk);
        if walk.pass.is_some() {
            self.walk_to(&mut walk, self.blocks.len())?;
        }
        if let Some(pass) = &mut walk.pass {
            pass.is_backward = true;
        }
        Ok(())
    }

    /// The pass has ended on this rank.
    pub(crate) fn end_pass(&self) -> Result<(), DdpError> {
        let mut walk = lock(&self.walk);
        let Some(pass) = walk.pass else { return Ok(()) };
        self.walk_to(&mut walk, pass.len)?;
        walk.pass = None;
        if pass.is_final {
            self.open(self.blocks.len());
        }
        walk.has_ended = pass.is_final;
        Ok(())
    }

    /// Takes part in the passes of the other ranks until none is left.
    ///
    /// *Blocks*: until all ranks are done.
    pub(crate) fn end_passes(&self) -> Result<(), DdpError> {
        loop {
            {
                let mut walk = lock(&self.walk);
                if walk.has_ended || !self.begin(&mut walk, vote::DONE)? {
                    break;
                }
                if let Some(pass) = &mut walk.pass {
                    pass.is_backward = pass.kind == Kind::Training;
                }
            }
            self.end_pass()?;
        }
        Ok(())
    }

    /// Ends the passes of a step: all buckets may leave.
    pub(crate) fn end_step(&self) -> Result<(), DdpError> {
        self.end_passes()?;
        self.setup.reducer.apply(Event::Open(usize::MAX));
        Ok(())
    }

    /// Until [`end_evaluation`](Self::end_evaluation), passes are forward passes only, and any number of them.
    pub(crate) fn begin_evaluation(&self) {
        let mut walk = lock(&self.walk);
        walk.kind = Kind::Evaluation;
        walk.has_ended = false;
    }

    pub(crate) fn end_evaluation(&self) -> Result<(), DdpError> {
        self.end_pass()?;
        self.end_passes()?;
        lock(&self.walk).kind = Kind::Training;
        Ok(())
    }

    /// Votes, and begins the next pass if any rank has one.
    fn begin(&self, walk: &mut Walk, own: i64) -> Result<bool, DdpError> {
        let gathers = &self.setup.gathers;
        let mut votes = gathers.buffer::<i64>(gathers.world())?;
        votes[gathers.rank()] = own;
        let call = AllGather {
            step: walk.step,
            ..AllGather::default()
        };
        walk.has_run = true;
        let votes = gathers.all_gather_async(votes, call).wait()?.buffer;
        let (mut training, mut evaluation, mut is_final) = (false, false, true);
        for vote in votes.iter() {
            evaluation |= *vote == vote::EVALUATION;
            training |= matches!(*vote, vote::MORE | vote::LAST);
            is_final &= matches!(*vote, vote::DONE | vote::LAST);
        }
        let kind = match (training, evaluation) {
            (false, false) => return Ok(false),
            (true, false) => Kind::Training,
            (false, true) => Kind::Evaluation,
            (true, true) => {
                let why = "some ranks run an evaluation and others a training step";
                return Err(DdpError::Sharded(why));
            }
        };
        walk.pass = Some(Running {
            kind,
            at: 0,
            len: match kind {
                Kind::Training => 2 * self.blocks.len(),
                Kind::Evaluation => self.blocks.len(),
            },
            is_backward: false,
            is_final: kind == Kind::Training && is_final,
        });
        Ok(true)
    }

    /// The block at a position of a pass.
    fn unit_at(&self, position: usize) -> &Unit {
        let mirrored = (2 * self.blocks.len() - 1).saturating_sub(position);
        &self.blocks[position.min(mirrored)]
    }

    /// Takes part in the gathers before `position` without using their values.
    fn walk_to(&self, walk: &mut Walk, position: usize) -> Result<(), DdpError> {
        while walk.pass.is_some_and(|pass| pass.at < position) {
            let values = self.arrive(walk)?;
            walk.free.push(values);
        }
        Ok(())
    }

    /// Waits for the gather of the next position, while the one after it is under way.
    fn arrive(&self, walk: &mut Walk) -> Result<Buffer<f32>, DdpError> {
        let pass = walk.pass.as_mut().expect("a pass is running");
        let at = pass.at;
        pass.at += 1;
        let Running { len, is_final, .. } = *pass;
        if is_final {
            // Whatever is behind this position is complete.
            self.open(at.saturating_sub(self.blocks.len()));
        }
        let next = walk.flights.back().map_or(at, |(last, _)| last + 1);
        for position in next..(at + 2).min(len) {
            let ticket = self.send(walk, self.unit_at(position))?;
            walk.flights.push_back((position, ticket));
        }
        let (_, ticket) = walk.flights.pop_front().expect("it was just sent");
        Ok(ticket.wait()?.buffer)
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
        if walk.kind == Kind::Evaluation && walk.pass.is_some_and(|pass| unit < pass.at) {
            drop(walk);
            self.end_pass()?;
            walk = lock(&self.walk);
        }
        if walk.pass.is_none() {
            let own = match walk.kind {
                Kind::Evaluation => vote::EVALUATION,
                Kind::Training if walk.is_last => vote::LAST,
                Kind::Training => vote::MORE,
            };
            self.begin(&mut walk, own)?;
        }
        let pass = walk.pass.expect("it has begun");
        let position = match pass.is_backward {
            true => 2 * self.blocks.len() - 1 - unit,
            false => unit,
        };
        if position < pass.at {
            return Err(DdpError::BlockOrder { block });
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
