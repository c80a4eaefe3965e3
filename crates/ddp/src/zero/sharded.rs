//! Stage 3: the parameters of blocks are dealt to the ranks. A block gets whole ones when it runs, and drops them.
//!
//! In ordinary memory gathers have a process group of their own, because they cross the buckets that the backward pass sends. On
//! a device they are calls of the same communicator as the buckets, because all ranks submit both in one order, see [`rounds`];
//! with parameters in f64 they share the process group of the buckets and the tail, for the same reason.

mod rounds;

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};
use paceline_collective::{AllGather, Buffer, Done, ProcessGroup, Ticket};
use paceline_nn::{BoxError, Supply};

use super::Shares;
use crate::buffer::{Entry, Value, floats};
use crate::error::DdpError;
use crate::placement::Placement;
use crate::plan::BucketPlan;
use crate::reducer::{Gathered, Reducer};
use crate::timeline::BucketTiming;
use rounds::Walk;

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
    /// The type of sums.
    pub(crate) dtype: DType,
    /// The placement of a model that has placeholders already.
    pub(crate) outer: Option<Arc<dyn Placement>>,
}

/// The parameters of blocks, of which this rank keeps its slices.
pub(crate) struct Sharded {
    setup: Setup,
    /// The blocks in forward order: the reverse of the buckets'.
    blocks: Vec<Unit>,
    /// In forward order; one if there is no pipeline.
    stages: Vec<Stage>,
    /// By id, index of the parameter.
    index: HashMap<ParamId, usize>,
    /// Where the reducer has its buckets.
    slices: Mutex<HashMap<usize, Value>>,
    walk: Mutex<Walk>,
}

/// A block with its bucket's parameters in registration order.
struct Unit {
    block: usize,
    bucket: usize,
    parameters: Vec<usize>,
}

/// A stage of a pipeline on this rank.
struct Stage {
    /// Its number among the pipeline's.
    number: usize,
    /// Its blocks.
    units: Range<usize>,
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
        let outer = setup.outer.as_deref();
        let number = |unit: &Unit| {
            let id = setup.parameters[unit.parameters[0]].id;
            outer.map_or(0, |outer| outer.stage(id))
        };
        let mut stages: Vec<Stage> = Vec::new();
        for (at, number) in blocks.iter().map(number).enumerate() {
            match stages.last_mut() {
                Some(stage) if stage.number == number => stage.units.end = at + 1,
                _ => stages.push(Stage {
                    number,
                    units: at..at + 1,
                }),
            }
        }
        let parameters = setup.parameters.iter().enumerate();
        let dealt = parameters.filter(|(_, entry)| entry.block.is_some());
        let index = dealt.map(|(index, entry)| (entry.id, index)).collect();
        let sharded = Self {
            setup,
            blocks,
            stages,
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
    pub(crate) fn take_slices(&self) -> HashMap<usize, Value> {
        std::mem::take(&mut *lock(&self.slices))
    }

    pub(crate) fn put_slice(&self, index: usize, values: Value) {
        lock(&self.slices).insert(index, values);
    }

    /// The failure of the gathers' group, if it has one.
    pub(crate) fn health(&self) -> Result<(), DdpError> {
        Ok(self.setup.gathers.health()?)
    }

    /// Fails both groups, because this rank does not take part in the gathers any more.
    pub(crate) fn give_up(&self, why: &str) {
        if self.setup.group.world() == 1 {
            return;
        }
        for group in [&self.setup.gathers, &self.setup.group] {
            group.abort(why);
        }
    }

    /// Sends this rank's slices of a block.
    fn send(&self, walk: &mut Walk, unit: &Unit) -> Result<Flight, DdpError> {
        let Setup {
            gathers,
            plan,
            shares,
            reducer,
            ..
        } = &self.setup;
        if !reducer.is_on_host() {
            reducer.send_weights(unit.bucket, &lock(&self.slices))?;
            return Ok(Flight::OnDevice);
        }
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
            if let Some(Value::Host(own)) = slices.get(&segment.index) {
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
        Ok(Flight::OnHost(gathers.all_gather_async(values, call)))
    }

    /// Waits for a block's gather.
    fn land(&self, flight: Flight, unit: &Unit) -> Result<(Whole, BucketTiming), DdpError> {
        let Setup { plan, reducer, .. } = &self.setup;
        match flight {
            Flight::OnHost(ticket) => {
                let start = Instant::now();
                let Done { buffer, timing } = ticket.wait()?;
                let bytes = plan.buckets[unit.bucket].stride * size_of::<f32>();
                let named = (unit.bucket, bytes, "all_gather");
                let timing = BucketTiming::on_host(named, None, timing, start);
                Ok((Whole::OnHost(buffer), timing))
            }
            Flight::OnDevice => {
                let Gathered { values, timing } = reducer.receive_weights(unit.bucket)?;
                Ok((Whole::OnDevice(values.into_iter().collect()), timing))
            }
        }
    }

    fn unit_of(&self, block: usize) -> Option<usize> {
        self.blocks
            .binary_search_by_key(&block, |unit| unit.block)
            .ok()
    }

    /// Index of a stage by its number; `None` if it has no blocks of its own.
    fn stage_of(&self, number: usize) -> Option<usize> {
        self.stages.iter().position(|stage| stage.number == number)
    }

    /// A parameter of a block.
    fn value_of(&self, whole: &Whole, index: usize) -> Value {
        match whole {
            Whole::OnHost(values) => {
                let (bucket, position) = self.setup.plan.places[index];
                let segment = &self.setup.plan.buckets[bucket].segments[position];
                let place = segment.offset..segment.offset + segment.len;
                Value::Host(values[place].to_vec())
            }
            Whole::OnDevice(values) => values[&index].clone(),
        }
    }
}

/// A gather under way.
enum Flight {
    OnHost(Ticket<f32>),
    /// The reducer has it.
    OnDevice,
}

/// A block's parameters in whole.
enum Whole {
    /// The bucket's memory.
    OnHost(Buffer<f32>),
    /// By index.
    OnDevice(HashMap<usize, Value>),
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
                let gradient = gradient.cast(self.setup.dtype);
                self.setup.reducer.gradient(*index, gradient);
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

    fn stage(&self, id: ParamId) -> usize {
        let outer = self.setup.outer.as_ref();
        outer.map_or(0, |outer| outer.stage(id))
    }

    fn whole(&self, id: ParamId, own: TensorData) -> Result<TensorData, DdpError> {
        let own = match self.index.get(&id) {
            None => own,
            Some(index) => {
                let (bucket, _) = self.setup.plan.places[*index];
                let unit = self.blocks.len() - 1 - bucket;
                let mut walk = lock(&self.walk);
                let block = match walk.kept.take() {
                    Some((kept, block)) if kept == unit => block,
                    kept => {
                        walk.put_back(kept.map(|(_, block)| block));
                        let flight = self.send(&mut walk, &self.blocks[unit])?;
                        self.land(flight, &self.blocks[unit])?.0
                    }
                };
                let whole = self.value_of(&block, *index);
                walk.kept = Some((unit, block));
                let entry = &self.setup.parameters[*index];
                whole.data(entry.shape.clone().into(), entry.dtype)
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
        self.keep(*index, &whole);
        None
    }
}

impl Sharded {
    /// Keeps this rank's slice of a parameter; `false` if it belongs to no block and stays whole.
    pub(crate) fn keep_part(&self, id: ParamId, whole: &TensorData) -> bool {
        let index = self.index.get(&id);
        index.map(|index| self.keep(*index, whole)).is_some()
    }

    /// A copy of this rank's part of a parameter, if it has one.
    pub(crate) fn own_part(&self, id: ParamId) -> Option<(Range<usize>, TensorData)> {
        let index = *self.index.get(&id)?;
        let Setup {
            shares,
            plan,
            group,
            parameters,
            ..
        } = &self.setup;
        let own = lock(&self.slices).get(&index)?.clone();
        let range = shares.owned(plan, index, group.rank());
        let shape = Shape::from([own.len()]);
        Some((range, own.data(shape, parameters[index].dtype)))
    }

    /// Keeps this rank's slice of a parameter.
    fn keep(&self, index: usize, whole: &TensorData) {
        let Setup {
            shares,
            plan,
            group,
            reducer,
            device,
            dtype,
            ..
        } = &self.setup;
        let own = shares.owned(plan, index, group.rank());
        if own.is_empty() {
            return;
        }
        let own = match reducer.is_on_host() {
            true => Value::Host(floats(whole)[own].to_vec()),
            false => Value::on_device(whole, own, device, *dtype),
        };
        self.put_slice(index, own);
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
        if tensor.shape().num_elements() == 0 {
            // It has no value yet.
            return Param::from_mapped_value(id, tensor, mapper);
        }
        self.0.keep(*index, &tensor.inner().into_data());
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
