//! `Pipeline`: one rank's stages, and how they run.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::module::ParamId;
use burn::tensor::{Device, Tensor, TensorData};
use paceline_collective::{DeviceMesh, ProcessGroup, Tree};
use paceline_ddp::{Ddp, DdpError, DdpOptions, DeviceExchange, Reduced, ShardStep};
use paceline_nn::Pass;

use super::error::PipelineError;
use super::model::{Holdings, Placed, Sequential, Whole};
use super::schedule::{Act, Action, PipelineSize, Schedule};
use super::simulate::{Trace, simulate, unit_cost, whole_cost};
use super::tied;
use super::wire::{Address, Wire};
use crate::tensor::TensorPlacement;

mod messages;
mod options;
mod passes;

pub use options::PipelineOptions;
use passes::Work;

/// A shard's data, as a pipeline asks for it: the first stage for inputs, the last one for losses.
pub trait MicroBatches<I, O> {
    /// Number of micro-batches.
    fn count(&self) -> usize;

    /// The weight of a micro-batch: its samples or tokens.
    fn weight(&self, micro_batch: usize) -> f32;

    /// The input of the first block.
    fn input(&self, micro_batch: usize) -> I;

    /// The mean loss of a micro-batch, from the last block's output.
    fn loss(&self, micro_batch: usize, output: O) -> Tensor<1>;
}

/// A model cut into stages on different ranks, which work on different micro-batches at once.
///
/// The job's ranks are a mesh of `dp` by `pp`, with `pp` varying fastest: ranks 0 to `pp - 1` are the first pipeline. Each
/// pipeline runs shards of its own, and the replicas of a stage average their gradients as [`Ddp`] does. With a third dimension
/// `tp`, which then varies fastest, the ranks along it share the tensors of a stage: each sends its activations to the rank with the
/// same parts of the next stage.
///
/// *Numerics*: the bits of one rank with the same shards and micro-batches, under every schedule: each stage adds the gradients
/// of its micro-batches in their order. The gradient of a parameter that several stages read is added up for each micro-batch,
/// the last stage's first.
///
/// *Memory*: the parameters, gradients and optimizer state of the rank's stages; activations as in [`Schedule`]. A
/// [`ZeroRedundancyOptimizer`](paceline_ddp::ZeroRedundancyOptimizer) deals the optimizer state, and at its stage 3 the weights, to
/// the replicas of the stages. Gradients leave in the last backward pass of a step.
///
/// *Cost*: each micro-batch sends one activation and one gradient between neighbours. A stage that reads another one's parameter
/// gets its value once in a step and sends its gradient for every micro-batch. A rank with several shards empties the pipeline
/// after each: use as many shards as pipelines.
///
/// *Source*: Huang et al. 2019, "GPipe"; `torch.distributed.pipelining`.
pub struct Pipeline<const D: usize> {
    mesh: DeviceMesh,
    rank: usize,
    options: PipelineOptions,
    cuts: Vec<Range<usize>>,
    holdings: Holdings,
    shapes: HashMap<ParamId, Vec<usize>>,
    /// The parameters that are not frozen.
    trained: HashSet<ParamId>,
    device: Device,
    wire: Wire,
    /// Values of parameters that other ranks hold, in this step.
    borrowed: HashMap<ParamId, TensorData>,
    work: Work<D>,
    /// The last shard's number of micro-batches, and its plan: those of most others too.
    planned: (usize, Rc<[Action]>),
    /// Whether the gradient of a stage's input leaves before those of the stage's weights are computed.
    sends_early: bool,
    /// Whether buckets leave when a shard's passes have ended: they share the device's queue with messages, and several stages of
    /// this rank, or two passes of one stage, fill them.
    holds_buckets: bool,
    record: Record,
}

/// When this rank computed.
#[derive(Default)]
struct Record {
    /// The last step's.
    intervals: Vec<(Action, Instant, Instant)>,
    busy: Busy,
    /// Stages of this rank that have computed gradients of weights apart from those of inputs.
    split: HashSet<usize>,
}

impl Record {
    fn add(&mut self, action: Action, start: Instant) {
        let end = Instant::now();
        self.intervals.push((action, start, end));
        self.busy.computed += end - start;
        if action.act == Act::BackwardWeight {
            self.busy.weights += end - start;
            self.split.insert(action.stage);
        }
    }
}

/// What a rank did with the time of its steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Busy {
    /// It computed.
    pub computed: Duration,
    /// It computed gradients of weights apart from those of inputs; a part of `computed`.
    pub weights: Duration,
    /// All of it.
    pub total: Duration,
}

impl<const D: usize> Pipeline<D> {
    /// Cuts `model`, and makes the replicas of this rank's stages. The returned model has placeholders for the parameters that
    /// other ranks hold. All ranks call it with models of the same weights: seed the device alike on all of them.
    ///
    /// *Blocks*: until all ranks have come, at most the group's timeout.
    ///
    /// *Errors*: sizes that do not fit together, before any rank waits for another; those of [`Ddp::new`].
    pub fn new<M: Sequential<D>>(
        group: &ProcessGroup,
        model: M,
        options: PipelineOptions,
        ddp_options: DdpOptions,
    ) -> Result<(Self, Ddp, M), PipelineError> {
        let (world, ranks) = (group.world(), options.ranks);
        if ranks == 0 || !world.is_multiple_of(ranks) {
            return Err(PipelineError::World { world, ranks });
        }
        let mesh = DeviceMesh::new(group, &[("dp", world / ranks), ("pp", ranks)])?;
        Self::on(mesh, model, options, ddp_options)
    }

    /// As [`new`](Self::new), on a mesh of the dimensions `dp` and `pp`, and of `tp` if ranks share the model's
    /// [parts](Sequential::tensor_parallel): the parts' group is then the mesh's.
    pub fn on<M: Sequential<D>>(
        mesh: DeviceMesh,
        model: M,
        options: PipelineOptions,
        ddp_options: DdpOptions,
    ) -> Result<(Self, Ddp, M), PipelineError> {
        let size = options.size(ddp_options.accumulate);
        let cuts = fit(&mesh, &model, &options, size)?;
        let parts = model.tensor_parallel().cloned();
        let group = mesh.parent().clone();
        agree(&group, &format!("{options:?} {cuts:?}"))?;
        let device = model.devices().into_iter().next();
        let device = device.ok_or(DdpError::NoParameters)?;
        let rank = mesh.coordinate("pp")?;
        let holdings = Holdings::new(&model, &cuts);
        let slices = (parts.as_ref()).map(|parts| TensorPlacement::new(&group, parts, &model));
        let slices = slices.transpose()?;
        let Whole {
            model,
            shapes,
            trained,
        } = holdings.place(model, |stage| size.rank_of(stage) == rank);
        let rank_of = |id| holdings.holder(id).map(|stage| size.rank_of(stage));
        let trains = |rank| (trained.iter()).any(|id| rank_of(*id).is_none_or(|own| own == rank));
        if let Some(rank) = (0..size.ranks).find(|rank| !trains(*rank)) {
            return Err(PipelineError::Frozen { rank });
        }
        let (mut ddp, model) = Ddp::new(mesh.group("dp")?.clone(), model, ddp_options)?;
        let owners = shapes.iter().filter_map(|(id, shape)| {
            let owner = size.rank_of(holdings.holder(*id)?);
            Some((*id, (owner, shape.clone())))
        });
        let owners: HashMap<_, _> = owners.collect();
        let pipe = mesh.group("pp")?.clone();
        let replica = match mesh.get("tp").filter(|tp| tp.world() > 1) {
            None => pipe.clone(),
            Some(_) => mesh.flatten(&["pp", "tp"])?,
        };
        ddp.join_parts(&replica, &model, |id| slices.as_ref()?.pieces(id))?;
        parts.map_or(Ok(()), |parts| parts.connect(&ddp))?;
        ddp.set_placement(Arc::new(Placed {
            world: group,
            pipe: pipe.clone(),
            owners,
            stages: holdings.holders().clone(),
            slices,
        }));
        let has_parts = size.chunks > 1 || options.schedule.puts_off_weights();
        let sends_early = options.schedule.puts_off_weights() || !ddp.reduces_on_device();
        let exchange = match pipe.world() {
            1 => None,
            ranks => ddp.device_exchange(&pipe, &Tree::per_rank(ranks))?,
        };
        let mut pipeline = Self {
            // A send waits only where every rank's work goes the same way: more are never on their way in other schedules.
            wire: Wire::new(pipe, device.clone(), 4 * (size.stages() + 1)),
            mesh,
            rank,
            options,
            cuts,
            holdings,
            shapes,
            trained: trained.into_iter().collect(),
            device,
            borrowed: HashMap::new(),
            work: Work::default(),
            planned: (0, Rc::new([])),
            sends_early,
            holds_buckets: has_parts && ddp.reduces_on_device(),
            record: Record::default(),
        };
        if let Some(exchange) = exchange {
            pipeline.connect(exchange);
        }
        Ok((pipeline, ddp, model))
    }

    /// From now on activations and their gradients travel over `exchange`, whose ranks are those of the mesh's `pp` group, all of
    /// which call it between steps. [`new`](Self::new) calls it where gradients stay on their device.
    ///
    /// *Numerics*: the same bits.
    pub fn connect(&mut self, exchange: Arc<dyn DeviceExchange>) {
        self.wire.on_device = Some(exchange);
    }

    /// The ranks as a mesh of `dp` by `pp`, and by `tp` if there are parts.
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// The blocks of each stage.
    pub fn cuts(&self) -> &[Range<usize>] {
        &self.cuts
    }

    /// A step that would take `micro_batches` through the pipeline if all stages took the same time. Stages that have computed no
    /// gradients of weights apart from those of inputs so far, because they have no [`linear`](paceline_nn::linear) layers that can, send
    /// theirs after the whole backward pass.
    ///
    /// *Blocks*: until all ranks of the pipeline have come.
    pub fn ideal(&self, micro_batches: usize) -> Result<Trace, PipelineError> {
        let size = self.options.size(micro_batches);
        let plan = size.plan(self.options.schedule)?;
        let own: Vec<u8> = (0..size.stages())
            .map(|stage| self.record.split.contains(&stage).into())
            .collect();
        let all = self.mesh.group("pp")?.all_gather_bytes(&own)?;
        let is_split = |stage: usize| all[size.rank_of(stage)].get(stage) == Some(&1);
        let cost = |action: &Action| match is_split(action.stage) {
            true => unit_cost(action),
            false => whole_cost(action),
        };
        simulate(&plan, cost, 0.0)
    }

    /// What this rank computed in the last step, and when. A [`BackwardWeight`](Act::BackwardWeight) for which the backward pass left
    /// nothing is not in it.
    pub fn intervals(&self) -> &[(Action, Instant, Instant)] {
        &self.record.intervals
    }

    /// The time of all steps so far.
    pub fn busy(&self) -> Busy {
        self.record.busy
    }

    /// Runs one step like [`Ddp::step`]. `run` calls [`shard`](Self::shard) once.
    ///
    /// *Errors*: those of `Ddp::step` and of [`shard`](Self::shard). All other ranks then fail too.
    pub fn step<M, E>(
        &mut self,
        ddp: &mut Ddp,
        model: &M,
        mut run: impl FnMut(&mut Self, &mut ShardStep<'_, M>) -> Result<(), E>,
    ) -> Result<Reduced, E>
    where
        M: Sequential<D>,
        E: From<DdpError> + From<PipelineError> + Display,
    {
        let start = Instant::now();
        self.begin();
        self.record.intervals.clear();
        let reduced = ddp.step(model, |shard| run(self, shard));
        let reduced = reduced.and_then(|reduced| {
            self.wire.flush()?;
            Ok(reduced)
        });
        self.record.busy.total += start.elapsed();
        reduced.inspect_err(|error| self.abort(error))
    }

    /// Runs the forward and backward passes of one shard. Returns the micro-batches' losses on the last stage's rank, and
    /// nothing elsewhere.
    ///
    /// *Blocks*: while it waits for other stages, at most the group's timeout for each message.
    ///
    /// *Errors*: a lost rank; a stage's input that differs from the first one in more than the number of rows.
    pub fn shard<M: Sequential<D>>(
        &mut self,
        shard: &mut ShardStep<'_, M>,
        batches: &impl MicroBatches<M::Input, M::Output>,
    ) -> Result<Vec<f32>, PipelineError> {
        let count = batches.count();
        shard.micro_batches(count);
        let plan = self.plan(shard.planned_micro_batches(count)?)?;
        let is_backward =
            |action: &Action| matches!(action.act, Act::Backward | Act::BackwardInput);
        let last = plan.iter().rposition(is_backward);
        if count > 0 {
            // Before the first input: its stage waits for that anyway.
            self.share_weights(|| Ok(shard.model()?))?;
        }
        for (at, &action) in plan.iter().enumerate() {
            let ends_shard = Some(at) == last;
            if action.micro_batch >= count {
                match action.act {
                    Act::Forward => shard.skip_forward(action.stage)?,
                    Act::Backward | Act::BackwardInput => {
                        shard.skip_backward(action.stage, ends_shard)?;
                    }
                    _ => {}
                }
            } else if action.act.is_compute() {
                let awaited = action.awaited();
                if let Some(receive) = awaited.filter(|it| self.work.asked.contains_key(it)) {
                    let start = Instant::now();
                    self.receive(receive)?;
                    shard.waited_since(start);
                }
                let start = Instant::now();
                if self.compute(shard, batches, action, ends_shard)? {
                    self.record.add(action, start);
                }
            } else {
                let start = Instant::now();
                self.pass_on(action)?;
                shard.waited_since(start);
            }
            if has_failed() {
                return Err(PipelineError::Block);
            }
        }
        let mut losses = std::mem::take(&mut self.work.losses);
        losses.sort_by_key(|(micro_batch, _)| *micro_batch);
        Ok(losses
            .into_iter()
            .map(|(_, loss)| loss.into_scalar())
            .collect())
    }

    /// Runs `model` forward as [`Ddp::evaluate`] does, on `count` inputs. The last stage's rank gets the outputs.
    ///
    /// *Errors*: like [`step`](Self::step).
    pub fn evaluate<M: Sequential<D>>(
        &mut self,
        ddp: &Ddp,
        model: &M,
        count: usize,
        input: impl Fn(usize) -> M::Input,
        mut each: impl FnMut(usize, M::Output),
    ) -> Result<(), PipelineError> {
        self.begin();
        let run = |model: &M| {
            self.share_weights(|| Ok(model.clone()))?;
            let mut model = model.clone();
            for (id, value) in &self.borrowed {
                model = tied::borrow(model, (*id, false), value, &self.device.clone().inner()).0;
            }
            let last = self.cuts.len() - 1;
            for at in 0..count {
                let micro_batch = at % Address::NUMBERS_MAX;
                for stage in self.options.size(1).stages_of(self.rank) {
                    let action = |act| Action {
                        act,
                        stage,
                        micro_batch,
                    };
                    let mut blocks = self.cuts[stage].clone();
                    let mut x = if stage == 0 {
                        blocks.start += 1;
                        model.first(input(at))
                    } else {
                        self.pass_on(action(Act::ReceiveInput))?;
                        self.receive(action(Act::ReceiveInput))?;
                        let x = self.work.inputs.remove(&(stage, micro_batch));
                        x.expect("it was received").inner()
                    };
                    blocks.end -= usize::from(stage == last);
                    for block in blocks {
                        x = model.middle(block, x);
                    }
                    if stage == last {
                        each(at, model.last(x));
                    } else {
                        self.send_output(stage, micro_batch, x)?;
                    }
                    if has_failed() {
                        return Err(PipelineError::Block);
                    }
                }
            }
            self.wire.flush()
        };
        let run = ddp.evaluate(model, run);
        let run = run.map_err(PipelineError::Ddp).flatten();
        run.inspect_err(|error| self.abort(error))
    }

    fn begin(&mut self) {
        self.borrowed.clear();
        self.work = Work::default();
    }

    fn abort(&self, error: &impl Display) {
        for dim in ["pp", "tp", "dp"] {
            if let Some(group) = self.mesh.get(dim).filter(|group| group.world() > 1) {
                group.abort(&error.to_string());
            }
        }
    }

    fn plan(&mut self, micro_batches: usize) -> Result<Rc<[Action]>, PipelineError> {
        if self.planned.0 != micro_batches {
            self.planned = (micro_batches, self.make_plan(micro_batches)?.into());
        }
        Ok(self.planned.1.clone())
    }

    /// This rank's plan. A shard may have fewer micro-batches than others at the end of the data; the plan is then one of more
    /// with the surplus left out.
    fn make_plan(&self, micro_batches: usize) -> Result<Vec<Action>, PipelineError> {
        if micro_batches == 0 {
            return Ok(Vec::new());
        }
        let schedule = self.options.schedule;
        let padded = match schedule {
            Schedule::Interleaved => micro_batches.next_multiple_of(self.options.ranks),
            _ => micro_batches,
        };
        let size = self.options.size(padded);
        let mut plan = size.plan(schedule)?.swap_remove(self.rank);
        plan.retain(|action| action.micro_batch < micro_batches);
        if !self.sends_early {
            plan.retain(|action| action.act != Act::BackwardWeight);
            for action in &mut plan {
                if action.act == Act::BackwardInput {
                    action.act = Act::Backward;
                }
            }
        }
        Ok(plan)
    }

    fn rank_of(&self, stage: usize) -> usize {
        stage % self.options.ranks
    }
}

/// Whether a block of this thread's pass has failed.
fn has_failed() -> bool {
    Pass::current().is_some_and(|pass| pass.failure().has_failed())
}

/// The blocks of each stage.
///
/// *Errors*: sizes that do not fit together.
fn fit<const D: usize>(
    mesh: &DeviceMesh,
    model: &impl Sequential<D>,
    options: &PipelineOptions,
    size: PipelineSize,
) -> Result<Vec<Range<usize>>, PipelineError> {
    size.check(options.schedule)?;
    let (stages, micro_batches) = (size.stages(), size.micro_batches);
    if stages > Address::STAGES_MAX || micro_batches > Address::NUMBERS_MAX {
        return Err(PipelineError::TooMany {
            stages,
            micro_batches,
        });
    }
    let cuts = options.stages(model.block_count())?;
    let (ranks, mesh_pp) = (size.ranks, mesh.size("pp")?);
    if ranks != mesh_pp {
        let mesh = mesh_pp;
        return Err(PipelineError::Mesh { ranks, mesh });
    }
    let tp = model.tensor_parallel().map_or(1, |tp| tp.group().world());
    let mesh_tp = mesh.get("tp").map_or(1, ProcessGroup::world);
    if tp != mesh_tp {
        return Err(PipelineError::Parts { tp, mesh: mesh_tp });
    }
    Ok(cuts)
}

/// All ranks have the same layout.
fn agree(group: &ProcessGroup, own: &str) -> Result<(), PipelineError> {
    let all = group.all_gather_bytes(own.as_bytes())?;
    let Some(rank) = all.iter().position(|other| *other != all[0]) else {
        return Ok(());
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Err(PipelineError::Ddp(DdpError::Mismatch {
        what: "the pipeline".into(),
        rank0: text(&all[0]),
        differing: vec![(rank, text(&all[rank]))],
    }))
}
