//! `Ddp`: a replica's side of data-parallel training, step by step.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use paceline_collective::{ProcessGroup, Tree};
use paceline_rendezvous::page::Phase;
use paceline_rendezvous::stop::StopSignal;
use serde::{Deserialize, Serialize};

use crate::buffer::{self, Entry, Role};
use crate::device_threads::DeviceThreads;
use crate::door;
use crate::error::DdpError;
use crate::fingerprint::Fingerprint;
use crate::gradients;
use crate::hook::{GradientSink, Tokens, hook_model};
use crate::plan::{BucketCaps, BucketPlan, Layout, Wire};
use crate::precision::{Casts, NORMS, Precision};
use crate::reducer::{Finished, Reducer, Way};
use crate::scaler::GradScaler;
use crate::timeline::{Activity, Span, Timeline};

/// How gradients come to the other ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// NCCL where the model is on a CUDA device and the `cuda` feature is built in, else through the host.
    #[default]
    Auto,
    /// Through the host's memory, and from there by way of the process group: any device.
    Host,
    /// NCCL, on CUDA devices.
    Nccl,
}

/// In which order NCCL adds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reduction {
    /// In that of the shard tree: the same bits on any number of ranks, as everywhere else.
    #[default]
    Tree,
    /// In NCCL's own, which depends on the number of ranks and on how they are connected.
    Ring,
}

/// Settings of a [`Ddp`]; all of them must be the same on every rank.
#[derive(Clone, Debug)]
pub struct DdpOptions {
    /// Shards `V` that a step's global batch is cut into, fixed for the job's life; `None` = one per rank. The
    /// result depends on `V` and not on the number of ranks.
    pub shards: Option<usize>,
    /// Micro-batches per shard and step (gradient accumulation) unless
    /// [`ShardStep::micro_batches`] says otherwise.
    pub accumulate: usize,
    /// Job seed: dropout and other device randomness is seeded from (seed, step, shard).
    pub seed: u64,
    /// Caps of the gradient buckets.
    pub caps: BucketCaps,
    /// How gradients come to the other ranks.
    pub backend: Backend,
    /// In which order NCCL adds; without NCCL it is always the tree's.
    pub reduction: Reduction,
    /// In which numbers gradients travel between ranks.
    pub wire: Wire,
    /// Largest allowed 2-norm of the whole gradient; larger ones are scaled down to it.
    pub clip_norm: Option<f64>,
    /// The type that models compute in; weights and gradients between ranks are f32 in each.
    pub precision: Precision,
    /// What stays in f32 in another [`precision`](Self::precision): types of modules such as `LayerNorm`, or paths such as
    /// `encoder.norm`, with everything below them. [`NORMS`] unless changed; `BatchNorm` always does. What they take has
    /// to be f32 too, see [`in_f32`](crate::in_f32).
    pub keep_f32: Vec<String>,
    /// Scales losses and skips the steps in which a gradient is infinite or no number, for [`Precision::F16`].
    pub scaler: Option<GradScaler>,
    /// Number of user sums that travel with each step, see [`ShardStep::add`].
    pub sums: usize,
    /// Steps between two comparisons of a window of the weights over all ranks; 0 = never.
    ///
    /// *Cost*: 64 KiB are hashed; on a device the step also waits until the device has done what it was given.
    pub fingerprint_every: u64,
    /// Further settings to compare at the door: (name, value).
    pub settings: Vec<(String, String)>,
    /// Number of the first step, for resumed jobs.
    pub first_step: u64,
    /// SIGTERM, SIGINT and SIGUSR1 no longer end the process from [`Ddp::new`] on: they are for
    /// [`Ddp::stop_requested`], which the program then has to ask after every step.
    pub stop_on_signal: bool,
}

impl Default for DdpOptions {
    fn default() -> Self {
        Self {
            shards: None,
            accumulate: 1,
            seed: 0,
            caps: BucketCaps::default(),
            backend: Backend::default(),
            reduction: Reduction::default(),
            wire: Wire::default(),
            clip_norm: None,
            precision: Precision::F32,
            keep_f32: NORMS.map(String::from).to_vec(),
            scaler: None,
            sums: 0,
            fingerprint_every: 1,
            settings: Vec::new(),
            first_step: 0,
            stop_on_signal: false,
        }
    }
}

/// Data-parallel training of one model on one process group.
///
/// There is no wrapper type around the model: a step runs the user's own forward pass on a copy of the
/// model whose parameters pass hooks, and returns averaged gradients for any Burn optimizer.
///
/// *Numerics*: gradients are averaged with weights: `sum(w * g) / sum(w)` over all micro-batches of all shards,
/// added along one fixed binary tree over the shards, so the result does not depend on the number
/// of ranks. Running statistics (batch norm) start every shard from the same state and are averaged alike.
///
/// *Memory*: `stack_depth` times the gradient bytes in buckets: once with one shard per rank, and
/// `1 + log2(shards per rank)` times otherwise.
///
/// *Stopping*: with [`DdpOptions::stop_on_signal`], a signal to the launcher or to one rank makes
/// [`stop_requested`](Self::stop_requested) answer on all ranks after the same step. The request travels with the gradients and
/// costs no operation.
///
/// *Example*:
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::SgdConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use paceline_collective::{GroupOptions, ProcessGroup};
/// use paceline_ddp::{Ddp, DdpError, DdpOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::flex().autodiff();
/// let group = ProcessGroup::local(1, &GroupOptions::default())?.remove(0);
/// let model: Linear = LinearConfig::new(4, 2).init(&device);
/// let mut optimizer = SgdConfig::new().init();
///
/// let (mut ddp, mut model) = Ddp::new(group, model, DdpOptions::default())?;
/// for _ in 0..3 {
///     let reduced = ddp.step(&model, |shard| {
///         let input = Tensor::<2>::random([8, 4], Distribution::Default, &device);
///         let loss = shard.model()?.forward(input).powf_scalar(2.0).mean();
///         shard.backward(loss, 8.0)
///     })?;
///     model = optimizer.step(0.1, model, reduced.grads);
/// }
/// # Ok(())
/// # }
/// ```
pub struct Ddp {
    group: ProcessGroup,
    tree: Arc<Tree>,
    plan: Arc<BucketPlan>,
    reducer: Arc<Reducer>,
    sink: Arc<dyn GradientSink>,
    parameters: Vec<Entry>,
    buffers: Vec<Entry>,
    index: HashMap<ParamId, usize>,
    buffer_index: HashMap<ParamId, usize>,
    tokens: Tokens,
    device: Device,
    /// None where the compute thread does the work itself.
    device_threads: Option<DeviceThreads>,
    casts: Casts,
    scaler: Option<GradScaler>,
    fingerprint: Fingerprint,
    options: DdpOptions,
    step: u64,
    is_timed: bool,
    /// What the ranks agreed on in the last step.
    stop: Option<StopSignal>,
}

/// Sums that travel with each step, by slot.
mod extra {
    use paceline_rendezvous::stop::VOTES;

    /// The weight that the user gave.
    pub(super) const WEIGHT: usize = 0;
    /// Ranks that were asked to stop, by signal in the order of [`VOTES`].
    pub(super) const STOP: usize = 1;
    /// The user's own.
    pub(super) const USER: usize = STOP + VOTES.len();
}

/// What a step gives back.
pub struct Reduced {
    /// The averaged gradients; a parameter that no rank used has none.
    pub grads: GradientsParams,
    /// Sum of the weights of all micro-batches of all ranks.
    pub weight: f64,
    /// The user sums over all shards of all ranks, see [`ShardStep::add`].
    pub sums: Vec<f32>,
    /// 2-norm of the averaged gradient before clipping, if clipping is on and the step was not skipped.
    pub grad_norm: Option<f64>,
    /// Whether the scaler found an infinity or NaN: `grads` is empty then, on all ranks, so that an optimizer's step with it
    /// changes nothing.
    pub skipped: bool,
    /// What this step's losses were scaled by; 1 without a scaler.
    pub scale: f32,
    /// Paths of parameters that no rank used in this step.
    pub unused: Vec<String>,
    /// Timing of the step on this rank.
    pub timeline: Timeline,
}

impl Ddp {
    /// Compares models and settings over all ranks and returns the replica with rank 0's weights.
    ///
    /// *Blocks*: until all ranks have come, at most the group's timeout.
    ///
    /// *Errors*: [`DdpError::Door`] on every rank when any rank differs; unsupported types; no parameters; fewer
    /// shards than ranks; a precision that the device lacks, or names to keep in f32 that the model lacks.
    pub fn new<M: Module>(
        group: ProcessGroup,
        model: M,
        options: DdpOptions,
    ) -> Result<(Self, M), DdpError> {
        let backend = options.backend;
        #[cfg(feature = "cuda")]
        let (theirs, order) = (group.clone(), (options.reduction, options.wire));
        Self::on_way(group, model, options, |device, _tree| {
            if buffer::is_host(device) {
                return match backend {
                    Backend::Auto | Backend::Host => Ok(Way::Host),
                    Backend::Nccl => Err(DdpError::Backend("the model is not on a CUDA device")),
                };
            }
            #[cfg(feature = "cuda")]
            if backend == Backend::Nccl
                || backend == Backend::Auto && crate::cuda::ordinal(device).is_some()
            {
                match crate::cuda::Cuda::join(&theirs, device, _tree.clone(), order) {
                    Ok(cuda) => return Ok(Way::Device(Box::new(cuda))),
                    // Every rank is told the same.
                    Err(DdpError::Nccl(error))
                        if backend == Backend::Auto
                            && matches!(*error, paceline_nccl::NcclError::OneDevice { .. }) =>
                    {
                        if theirs.rank() == 0 {
                            tracing::warn!("{error}: gradients go through the host");
                        }
                    }
                    Err(error) => return Err(error),
                }
            }
            match backend {
                Backend::Auto | Backend::Host => Ok(Way::Staged),
                Backend::Nccl => Err(DdpError::Backend(
                    "this program is built without the `cuda` feature, which NCCL belongs to",
                )),
            }
        })
    }

    /// As [`new`](Self::new), with gradients that go the way that `way` says for the model's device.
    pub(crate) fn on_way<M: Module>(
        group: ProcessGroup,
        model: M,
        options: DdpOptions,
        way: impl FnOnce(&Device, &Arc<Tree>) -> Result<Way, DdpError>,
    ) -> Result<(Self, M), DdpError> {
        group.set_phase(Phase::Starting, options.first_step);
        let entries = buffer::inventory(&model);
        let device = buffer::device_of(&model);
        let shards = options.shards.unwrap_or(group.world());
        let mut settings = options.settings.clone();
        settings.extend([
            ("shards".into(), shards.to_string()),
            ("accumulate".into(), options.accumulate.to_string()),
            ("seed".into(), options.seed.to_string()),
            ("backend".into(), format!("{:?}", options.backend)),
            ("reduction".into(), format!("{:?}", options.reduction)),
            ("wire".into(), format!("{:?}", options.wire)),
            ("clip_norm".into(), format!("{:?}", options.clip_norm)),
            ("precision".into(), options.precision.to_string()),
            ("keep_f32".into(), options.keep_f32.join(",")),
            (
                "scaler".into(),
                options
                    .scaler
                    .as_ref()
                    .map_or("none".into(), GradScaler::describe),
            ),
            ("sums".into(), options.sums.to_string()),
            (
                "fingerprint_every".into(),
                options.fingerprint_every.to_string(),
            ),
            ("first_step".into(), options.first_step.to_string()),
            ("stop_on_signal".into(), options.stop_on_signal.to_string()),
        ]);
        let with_role = |role| entries.iter().filter(move |e| e.role == role).cloned();
        let parameters: Vec<Entry> = with_role(Role::Parameter).collect();
        let buffers: Vec<Entry> = with_role(Role::Buffer).collect();
        let lens = |entries: &[Entry]| entries.iter().map(Entry::len).collect::<Vec<_>>();
        // More sums than asked for: see `extra`.
        let plan = BucketPlan::new(
            &lens(&parameters),
            &lens(&buffers),
            options.caps,
            extra::USER + options.sums,
            match &device {
                Some(device) if !buffer::is_host(device) => Layout::Device,
                _ => Layout::Host,
            },
        );
        let manifest = door::manifest(&entries, &plan.describe(), &settings);
        door::compare(&group, &manifest).inspect_err(|error| blame(&group, error))?;
        buffer::require_summable(&entries)?;
        let device = match device {
            Some(device) if !parameters.is_empty() => device,
            _ => return Err(DdpError::NoParameters),
        };
        let world = group.world();
        let tree = Tree::split(shards, world).map_err(|_| DdpError::Shards { shards, world })?;
        let model = door::broadcast_model(&group, model)?;
        if options.stop_on_signal {
            let listens = group.stop_on_signal();
            listens.map_err(|error| DdpError::Signals(Arc::new(error)))?;
        }
        let plan = Arc::new(plan);
        let way = way(&device, &tree)?;
        let reducer = Reducer::new(group.clone(), plan.clone(), tree.clone(), way, options.wire)?;
        let reducer = Arc::new(reducer);
        let index_of = |entries: &[Entry]| -> HashMap<ParamId, usize> {
            entries.iter().enumerate().map(|(i, e)| (e.id, i)).collect()
        };
        let (index, buffer_index) = (index_of(&parameters), index_of(&buffers));
        let casts = Casts::new(
            &model,
            &device,
            options.precision,
            &options.keep_f32,
            &buffer_index,
        )?;
        let fingerprinted: Vec<&Entry> = parameters.iter().collect();
        let ddp = Self {
            fingerprint: Fingerprint::new(&fingerprinted, options.fingerprint_every),
            tokens: Tokens::new(parameters.len(), &device),
            device_threads: (!buffer::is_host(&device)).then(DeviceThreads::watch),
            sink: reducer.clone(),
            step: options.first_step,
            is_timed: false,
            stop: None,
            casts,
            scaler: options.scaler.clone(),
            group,
            tree,
            plan,
            reducer,
            parameters,
            buffers,
            index,
            buffer_index,
            device,
            options,
        };
        Ok((ddp, model))
    }

    /// The shards that this rank computes.
    pub fn shards(&self) -> Range<usize> {
        self.tree.range(self.group.rank())
    }

    /// Number of shards of the job.
    pub fn shard_count(&self) -> usize {
        self.tree.leaves()
    }

    /// The tree along which shards are added.
    pub fn tree(&self) -> &Arc<Tree> {
        &self.tree
    }

    /// The process group.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// The autodiff device that the replica is on.
    #[cfg(feature = "burn-train")]
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Number of the next step.
    pub fn next_step(&self) -> u64 {
        self.step
    }

    /// Whether any rank was asked to stop before the last step: the same answer on all ranks, after the same step.
    ///
    /// Ask when the optimizer has made its step, save where the answer is some, and end with 0 or with
    /// [`StopSignal::exit_code`]. The launcher is told that this rank stops, and ends with that code when all ranks have
    /// ended. Without [`DdpOptions::stop_on_signal`] the answer is always none.
    pub fn stop_requested(&self) -> Option<StopSignal> {
        let signal = self.stop?;
        self.group.set_stopped(signal, self.step);
        Some(signal)
    }

    /// Waits until the device has done all that earlier steps asked of it, and says how that ended.
    ///
    /// Only where gradients stay on their device ([`step`](Self::step) does not wait for them then): ask before weights
    /// are saved or shown. *Blocks* until then, at most the group's timeout and a little.
    pub fn synchronize(&self) -> Result<(), DdpError> {
        let done = self.reducer.synchronize();
        let done = done.and_then(|()| self.check_device());
        done.inspect_err(|error| abandon(&self.group, error))
    }

    /// Whether [`Reduced::timeline`] of the steps from now on says when the device computed, and not only when it was told
    /// to: each pass then waits for its end. Without effect where the compute thread does the work itself.
    pub fn time_device(&mut self, is_timed: bool) {
        self.is_timed = is_timed && !buffer::is_host(&self.device);
    }

    /// `model` for evaluation: [`Module::valid`], in the precision of the training.
    pub fn valid<M: Module>(&self, model: &M) -> M {
        self.casts.apply(model.valid())
    }

    /// The scaler, as of the next step: save its [`state_dict`](GradScaler::state_dict) with the weights.
    pub fn scaler(&self) -> Option<&GradScaler> {
        self.scaler.as_ref()
    }

    /// Number of trained values.
    pub fn parameter_count(&self) -> usize {
        self.parameters.iter().map(Entry::len).sum()
    }

    /// Number of gradient buckets.
    pub fn bucket_count(&self) -> usize {
        self.plan.tail()
    }

    /// Runs one step: `run` is called once for each of this rank's shards, in order, and runs their forward and
    /// backward passes; gradients leave for the other ranks while the last backward pass still runs.
    ///
    /// *Blocks*: until the gradients of all ranks have arrived, at most the group's timeout per bucket.
    ///
    /// *Errors*: what `run` returned, or what the collectives returned. After an error in `run` before anything was
    /// sent, this rank's step is undone and the next call starts afresh; the others must have failed in the same step, or
    /// the difference in step numbers is reported to all. After something was sent the group is aborted,
    /// because its other members count on the rest.
    pub fn step<M, E>(
        &mut self,
        model: &M,
        mut run: impl FnMut(&mut ShardStep<'_, M>) -> Result<(), E>,
    ) -> Result<Reduced, E>
    where
        M: Module,
        E: From<DdpError> + std::fmt::Display,
    {
        // A failed group never works again: its first cause is the answer to every later step.
        self.group.health().map_err(DdpError::from)?;
        let step = self.step;
        self.step += 1;
        self.fingerprint.choose(&self.group, model, step);
        if self.reducer.is_on_host() {
            self.send_fingerprint()?;
        }
        self.reducer.begin_step(step);
        let start = self.read_buffers(model)?;
        let mut timeline = Timeline::default();
        // Looked at once: all shards of a step go by the same knowledge.
        let wish = self
            .group
            .stop_wish()
            .filter(|_| self.options.stop_on_signal);
        self.stop = None;
        for (turn, shard) in self.shards().enumerate() {
            if turn > 0 {
                self.write_buffers(model, &start);
            }
            let wish = wish.filter(|_| turn == 0);
            if let Err(error) = self.run_shard(model, shard, wish, &mut timeline, &mut run) {
                self.undo(model, &start, &error);
                return Err(error);
            }
            self.reducer.end_shard(self.read_buffers(model)?);
        }
        self.group.set_phase(Phase::Communication, step);
        let collected = self.collect(model, &start, timeline);
        let (reduced, stop) = collected.inspect_err(|error| abandon(&self.group, error))?;
        // By now a device has computed the weights that this step began with. Reading them still waits for all that
        // this thread has given to the device. Not earlier: until its last bucket has come, another thread submits
        // operations to the group.
        self.send_fingerprint()?;
        let checked = self.fingerprint.check();
        checked.inspect_err(|error| blame(&self.group, error))?;
        self.group.set_phase(Phase::Optimizer, step);
        self.stop = stop;
        // A step without a sample says nothing about the scale.
        if let Some(scaler) = self.scaler.as_mut().filter(|_| reduced.weight > 0.0) {
            scaler.update(reduced.skipped);
        }
        Ok(reduced)
    }

    fn run_shard<M, E>(
        &self,
        model: &M,
        shard: usize,
        wish: Option<StopSignal>,
        timeline: &mut Timeline,
        run: &mut impl FnMut(&mut ShardStep<'_, M>) -> Result<(), E>,
    ) -> Result<(), E>
    where
        M: Module,
        E: From<DdpError>,
    {
        let step = self.step - 1;
        // What comes before the forward pass is the making of its input.
        self.group.set_phase(Phase::DataLoader, step);
        self.device.seed(mix(self.options.seed, step, shard as u64));
        self.reducer.begin_shard(shard, self.options.accumulate);
        if let Some(signal) = wish {
            self.reducer.add_extra(extra::STOP + signal.vote(), 1.0);
        }
        let mut turn = ShardStep {
            ddp: self,
            model,
            shard,
            step,
            timeline,
            forward_start: None,
        };
        self.casts.explain(step, || run(&mut turn))??;
        let (done, announced) = self.reducer.micro_batches();
        if done != announced {
            return Err(E::from(DdpError::MicroBatches {
                step,
                shard,
                announced,
                done,
            }));
        }
        Ok(())
    }

    fn send_fingerprint(&mut self) -> Result<(), DdpError> {
        let sent = self.fingerprint.send(&self.group);
        sent.inspect_err(|error| abandon(&self.group, error))
    }

    /// Leaves no trace of a step that failed on this rank.
    fn undo<M: Module>(&self, model: &M, start: &[Vec<f32>], error: &impl std::fmt::Display) {
        self.write_buffers(model, start);
        if self.group.world() > 1 && self.reducer.launched() > 0 {
            self.group.abort(&format!(
                "step {} failed after gradients were sent: {error}",
                self.step - 1
            ));
        }
    }

    fn collect<M: Module>(
        &self,
        model: &M,
        start: &[Vec<f32>],
        mut timeline: Timeline,
    ) -> Result<(Reduced, Option<StopSignal>), DdpError> {
        let Finished {
            mut means,
            statistics,
            extras,
            timings,
        } = self.reducer.finish()?;
        self.check_device()?;
        timeline.buckets = timings;
        // A step in which no shard had a sample changes nothing.
        self.write_buffers(model, statistics.as_deref().unwrap_or(start));
        let unused = self.parameters.iter().enumerate();
        let unused = unused
            .filter(|(index, _)| means.lacks(*index))
            .map(|(_, entry)| entry.path.clone())
            .collect();
        // Before clipping, whose limit is one of the true norm.
        let scaler = self.scaler.as_ref();
        let unscale = |scaler: &GradScaler| scaler.unscale_means(&mut means);
        let skipped = scaler.map(unscale).transpose()?.unwrap_or(false);
        let limit = self.options.clip_norm.filter(|_| !skipped);
        let clip = |limit| gradients::clip(&mut means, limit, &self.group);
        let grad_norm = limit.map(clip).transpose()?;
        let grads = gradients::register(model, &self.index, means, &self.plan, &self.device);
        let votes = std::array::from_fn(|vote| extras[extra::STOP + vote] > 0.0);
        let reduced = Reduced {
            grads,
            weight: f64::from(extras[extra::WEIGHT]),
            sums: extras[extra::USER..].to_vec(),
            grad_norm,
            skipped,
            scale: scaler.map_or(1.0, GradScaler::get_scale),
            unused,
            timeline,
        };
        Ok((reduced, StopSignal::elected(votes)))
    }

    fn check_device(&self) -> Result<(), DdpError> {
        self.device_threads
            .as_ref()
            .map_or(Ok(()), DeviceThreads::check)
    }

    /// Waits for what the device was told to compute, where passes are timed.
    fn await_device(&self) -> Result<(), DdpError> {
        if !self.is_timed {
            return Ok(());
        }
        let done = self.device.sync();
        done.map_err(|error| DdpError::Device(format!("it failed: {error:?}")))
            .inspect_err(|error| abandon(&self.group, error))
    }

    fn read_buffers<M: Module>(&self, model: &M) -> Result<Vec<Vec<f32>>, DdpError> {
        let mut values = vec![Vec::new(); self.buffers.len()];
        if !self.buffers.is_empty() {
            let read = buffer::read_buffers(model, &self.buffer_index, |at, data| {
                values[at] = data.to_vec()
            });
            read.inspect_err(|error| abandon(&self.group, error))?;
        }
        Ok(values)
    }

    fn write_buffers<M: Module>(&self, model: &M, values: &[Vec<f32>]) {
        if self.buffers.is_empty() {
            return;
        }
        let ids = self.buffers.iter().map(|entry| entry.id);
        buffer::write_buffers(model, ids.zip(values.iter().cloned()).collect());
    }
}

/// One shard's turn within a step.
pub struct ShardStep<'a, M> {
    ddp: &'a Ddp,
    model: &'a M,
    shard: usize,
    step: u64,
    timeline: &'a mut Timeline,
    forward_start: Option<Instant>,
}

impl<M: Module> ShardStep<'_, M> {
    /// The shard to compute, `0..shards`.
    pub fn shard(&self) -> usize {
        self.shard
    }

    /// Number of the step.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Announces how many micro-batches this shard has in this step (0 is allowed), before the first
    /// one, where it is not [`DdpOptions::accumulate`].
    pub fn micro_batches(&mut self, count: usize) {
        self.ddp.reducer.announce(count);
    }

    /// The model to run forward: parameters pass the hooks, and are cast to [`DdpOptions::precision`]. Take a new one for
    /// every micro-batch, since Burn consumes the tape in the backward pass.
    ///
    /// *Errors*: the model lacks parameters that it had in [`Ddp::new`].
    pub fn model(&mut self) -> Result<M, DdpError> {
        self.ddp.group.set_phase(Phase::Forward, self.step);
        self.forward_start = Some(Instant::now());
        let ddp = self.ddp;
        let (hooked, count) = hook_model(self.model.clone(), &ddp.index, &ddp.tokens, &ddp.sink);
        if count != ddp.parameters.len() {
            return Err(DdpError::ModelChanged {
                step: self.step,
                what: format!("{count} of {} parameters found", ddp.parameters.len()),
            });
        }
        Ok(ddp.casts.apply(hooked))
    }

    /// `loss` as the scaler wants it, for [`backward_with`](Self::backward_with); itself where there is none.
    pub fn scale(&self, loss: Tensor<1>) -> Tensor<1> {
        match &self.ddp.scaler {
            Some(scaler) => scaler.scale(loss),
            None => loss,
        }
    }

    /// Runs the backward pass of a micro-batch whose loss is a mean over `weight` units (samples, tokens).
    ///
    /// *Errors*: more calls than micro-batches announced; with another precision than f32 a loss that is not f32.
    pub fn backward(&mut self, loss: Tensor<1>, weight: f32) -> Result<(), DdpError> {
        self.ddp.casts.check_loss(self.step, &loss)?;
        let loss = self.scale(loss);
        self.backward_with(weight, || drop(loss.backward()))
    }

    /// As [`backward`](Self::backward), for code that runs the backward pass itself; with a scaler on
    /// [`scale(loss)`](Self::scale).
    pub fn backward_with(&mut self, weight: f32, pass: impl FnOnce()) -> Result<(), DdpError> {
        let reducer = &self.ddp.reducer;
        let (done, announced) = reducer.micro_batches();
        if done >= announced {
            return Err(DdpError::MicroBatches {
                step: self.step,
                shard: self.shard,
                announced,
                done: done + 1,
            });
        }
        self.ddp.group.set_phase(Phase::Backward, self.step);
        self.ddp.await_device()?;
        reducer.begin_micro(weight);
        let start = Instant::now();
        pass();
        self.ddp.await_device()?;
        let end = Instant::now();
        reducer.end_micro();
        let span = |activity, start, end| Span {
            activity,
            shard: self.shard,
            start,
            end,
        };
        if let Some(forward) = self.forward_start.take() {
            self.timeline
                .spans
                .push(span(Activity::Forward, forward, start));
        }
        self.timeline
            .spans
            .push(span(Activity::Backward, start, end));
        Ok(())
    }

    /// Adds `value` to user sum `slot` (`0..DdpOptions::sums`); the totals over all ranks come back with the step.
    pub fn add(&mut self, slot: usize, value: f32) {
        self.ddp.reducer.add_extra(extra::USER + slot, value);
    }
}

/// Tells this host's launcher which rank is to blame for an error that every rank has in the same moment; otherwise it
/// would report the one that happens to end first.
fn blame(group: &ProcessGroup, error: &DdpError) {
    let others = error.culprit().filter(|culprit| *culprit != group.rank());
    if let Some(culprit) = others {
        group.page().slot(group.local_rank()).set_victim_of(culprit);
    }
}

/// Ends the group where this rank's device failed: the others wait for what it can no longer bring.
fn abandon(group: &ProcessGroup, error: &DdpError) {
    if matches!(error, DdpError::Device(_)) && group.world() > 1 {
        group.abort(&error.to_string());
    }
}

/// A seed for device randomness that differs for every (seed, step, shard): SplitMix64's finalizer over a
/// simple combination.
fn mix(seed: u64, step: u64, shard: u64) -> u64 {
    let mut z = seed
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(step.wrapping_mul(0xd1b5_4a32_d192_ed03))
        .wrapping_add(shard.wrapping_mul(0x8cb9_2ba7_2f3d_8dd7));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
