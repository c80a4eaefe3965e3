//! `Ddp`: one rank's replica, from the comparison with the others to its accessors.

mod average;
mod hook_state;
mod join;
mod options;
mod order;
mod pacing;
mod parts;
mod recover;
mod replicas;
mod sharding;
mod state;
mod step;
mod step_on;

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, ParamId};
use burn::tensor::{DType, Device};
use paceline_collective::{ProcessGroup, ReduceOp, Tree};
use paceline_rendezvous::page::{self, Phase};
use paceline_rendezvous::stop::StopSignal;

use crate::buffer::{self, Entry, Role};
use crate::comm_hook::CommHook;
use crate::deferred::Deferred;
use crate::device_threads::DeviceThreads;
use crate::error::DdpError;
use crate::fingerprint::Fingerprint;
use crate::hook::{GradientSink, Tokens, Uses};
use crate::pace::Pace;
use crate::placement::{self, Placement};
use crate::plan::{BucketPlan, Layout};
use crate::precision::Casts;
use crate::record::{Recorder, ShardDigests};
use crate::recovery::{Commits, Recovery};
use crate::reducer::{
    DeviceExchange, DeviceReducer, HostReducer, InDouble, Reducer, Setup, StagedReducer,
};
use crate::scaler::GradScaler;
use crate::sync_batch_norm::Ranks;
use crate::verify;
use crate::zero::{Sharded, Shares};
use average::Rounds;
pub use join::{Give, Given};
use join::{Handover, Room};
pub use options::{Backend, DdpOptions, Reduction, SHARDS_DEFAULT};
use pacing::Clock;
pub(crate) use parts::Parts;
pub use parts::Pieces;
pub use state::{DdpState, OwnTensor};
pub use step::{BackwardPart, Reduced, ShardStep};
use step::{blame, extra};

/// Makes the reducer for a model on a device.
type MakeReducer = Arc<dyn Fn(&Device, Setup) -> Result<Arc<dyn Reducer>, DdpError> + Send + Sync>;

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
/// *Lost ranks*: with [`DdpOptions::recovery`], the ranks that are left go on without them, with the same bits, and
/// [`admit`](Self::admit) takes in the processes that replace them.
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
    make: MakeReducer,
    tree: Arc<Tree>,
    plan: Arc<BucketPlan>,
    reducer: Arc<dyn Reducer>,
    sink: Arc<dyn GradientSink>,
    /// Set until the order of uses has been learnt.
    pub(crate) uses: Option<Arc<Uses>>,
    parameters: Vec<Entry>,
    buffers: Vec<Entry>,
    /// Of the parameters that pass a hook.
    index: HashMap<ParamId, usize>,
    buffer_index: HashMap<ParamId, usize>,
    tokens: Tokens,
    device: Device,
    /// `None` on devices where the compute thread itself computes.
    device_threads: Option<DeviceThreads>,
    casts: Casts,
    scaler: Option<GradScaler>,
    fingerprint: Fingerprint,
    placement: Option<Arc<dyn Placement>>,
    /// The parameters of blocks, if they are dealt to the ranks.
    sharded: Option<Arc<Sharded>>,
    options: DdpOptions,
    step: u64,
    /// Steps that failed, and were undone, with this group.
    undone: u64,
    commits: Commits,
    clock: Clock,
    pace: Pace,
    /// Whether the launcher has the other ranks go on if this one leaves.
    is_expendable: bool,
    /// What the ranks compared at the job's start, with live recovery.
    manifest: verify::Manifest,
    /// The learnt order of the parameters; empty if it is that of registration.
    pub(crate) order: Vec<usize>,
    /// Whether the ranks agreed in the last step to admit replacements.
    is_invited: bool,
    /// The program's bytes, from the rank that handed its state over to this one.
    handover: Option<Given>,
    #[cfg(test)]
    pub(crate) successor: Option<recover::Successor>,
    is_timed: bool,
    /// The ranks' slices of gradients and optimizer state, with a sharded optimizer.
    shares: Option<Arc<Shares>>,
    /// The other parts of the model, if this one is a part.
    parts: Option<Parts>,
    /// The weights that are made when it is known who keeps them.
    deferred: Deferred,
    /// The signal that the ranks agreed on in the last step.
    stop: Option<StopSignal>,
    /// Whether all ranks skipped the last step.
    skipped: bool,
    /// Rounds of steps that ranks take by themselves.
    rounds: Option<Rounds>,
    /// The ranks, for the model's `SyncBatchNorm`s.
    norms: Option<Arc<Ranks>>,
    /// The last step's digests, if they are recorded.
    recorder: Option<Arc<Recorder>>,
}

impl Ddp {
    /// Compares models and settings over all ranks and returns the replica with rank 0's weights.
    ///
    /// In a process that replaces a lost rank it returns when the others have [admitted](Self::admit) it, with their weights and
    /// at their step.
    ///
    /// *Memory*: until its program has taken what another rank [gave](Self::take_handover), a replacement holds that and its weights
    /// twice. Up to 1 GiB, it also holds memory for the program to fill, which makes six times the weights with Adam.
    ///
    /// *Blocks*: until all ranks have arrived, at most the group's timeout; in a replacement, as long as the job runs.
    ///
    /// *Errors*: [`DdpError::Mismatch`] on every rank when any rank differs; [`DdpError::OtherBits`] if [`DdpOptions::same_bits`] is strict; unsupported types; no parameters; fewer shards
    /// than ranks; a precision that the device lacks; a `keep_f32` name that the model lacks; no memory for the buckets, unless
    /// [`DdpOptions::deferred_init`] leaves them to a sharded optimizer.
    pub fn new<M: Module>(
        group: ProcessGroup,
        model: M,
        options: DdpOptions,
    ) -> Result<(Self, M), DdpError> {
        let (backend, reduction) = (options.backend, options.reduction);
        let make =
            Arc::new(move |device: &Device, setup| reducer(backend, reduction, device, setup));
        let made = match group.is_joining() {
            true => Self::join(group, model, options, make),
            false => Self::assemble(group, model, options, make, None),
        };
        let made = made.and_then(|(ddp, model)| {
            ddp.require_recoverable()?;
            Ok((ddp, model))
        });
        let is_misconfigured = made.as_ref().is_err_and(DdpError::is_configuration);
        page::tell_misconfigured(is_misconfigured);
        let (mut ddp, model) = made?;
        if ddp.has_joined() {
            return Ok((ddp, model));
        }
        // What a hook keeps of a bucket belongs to the plan.
        let learns = ddp.group.world() > 1 && !ddp.options.comm_hook.is_per_shard();
        ddp.uses = learns.then(Arc::default);
        Ok((ddp, model))
    }

    /// Like [`new`](Self::new), in a process that replaces a lost rank.
    fn join<M: Module>(
        group: ProcessGroup,
        model: M,
        options: DdpOptions,
        make: MakeReducer,
    ) -> Result<(Self, M), DdpError> {
        // Burn makes a weight when it is first used. The others wait for all that comes after the next lines.
        let mut room = Some(Room::new(&buffer::inventory(&model)));
        options.fingerprint(buffer::device_of(&model).as_ref(), group.world())?;
        let mut pending = group;
        loop {
            let (group, mut handover) = Handover::meet(pending, &options, room.take())?;
            let (given, settings) = (model.clone(), options.clone());
            let seat = group.clone();
            match Self::assemble(seat, given, settings, make.clone(), Some(&mut handover)) {
                // Another rank is lost: the others come back to this one after their step.
                Err(_) if group.is_lost() => pending = group,
                made => {
                    let (mut ddp, model) = made?;
                    ddp.take_over(handover)?;
                    return Ok((ddp, model));
                }
            }
        }
    }

    /// Like [`new`](Self::new), with the reducer that `make` returns for the model's device.
    #[cfg(test)]
    pub(crate) fn with_reducer<M: Module>(
        group: ProcessGroup,
        model: M,
        options: DdpOptions,
        make: impl Fn(&Device, Setup) -> Result<Arc<dyn Reducer>, DdpError> + Send + Sync + 'static,
    ) -> Result<(Self, M), DdpError> {
        Self::assemble(group, model, options, Arc::new(make), None)
    }

    /// With the weights of `handover`, or else with rank 0's.
    fn assemble<M: Module>(
        group: ProcessGroup,
        model: M,
        options: DdpOptions,
        make: MakeReducer,
        handover: Option<&mut Handover>,
    ) -> Result<(Self, M), DdpError> {
        group.set_phase(Phase::Starting, 0);
        let (deferred, model) = match options.deferred_init {
            true => Deferred::take(model),
            false => (Deferred::default(), model),
        };
        let mut entries = buffer::inventory(&model);
        deferred.complete(&mut entries);
        let device = buffer::device_of(&model);
        let shards = options.shard_count(group.world());
        let with_role = |role| entries.iter().filter(move |e| e.role == role).cloned();
        // Without the placeholders of parameters that other ranks hold.
        let parameters = with_role(Role::Parameter).enumerate();
        let parameters = parameters.filter(|(_, entry)| entry.len() > 0);
        let (places, parameters): (Vec<usize>, Vec<Entry>) = parameters.unzip();
        let buffers: Vec<Entry> = with_role(Role::Buffer).collect();
        let lens = |entries: &[Entry]| entries.iter().map(Entry::len).collect::<Vec<_>>();
        // `extra` adds sums of its own.
        let plan = BucketPlan::new(
            &lens(&parameters),
            &lens(&buffers),
            options.caps,
            extra::busy(options.sums, shards),
            device.as_ref().map_or(Layout::Host, sharding::layout),
        );
        let mut settings = options.compared(group.world());
        let deferred_weights = deferred.len().to_string();
        settings.push(("deferred weights".into(), deferred_weights));
        let fingerprint = options.fingerprint(device.as_ref(), group.world())?;
        let manifest = verify::manifest(&entries, &plan.describe(), &settings, fingerprint);
        let same_bits = options.same_bits;
        match &handover {
            Some(handover) => handover.verify(&group, &manifest, same_bits)?,
            None => verify::compare(&group, &manifest, same_bits)
                .inspect_err(|error| blame(&group, error))?,
        }
        buffer::require_summable(&entries)?;
        let device = match device {
            Some(device) if !parameters.is_empty() => device,
            _ => return Err(DdpError::NoParameters),
        };
        let world = group.world();
        let tree = Tree::split(shards, world).map_err(|_| DdpError::Shards { shards, world })?;
        if options.shards.is_none() && world > SHARDS_DEFAULT && group.rank() == 0 {
            paceline_rendezvous::notice!(
                WARN,
                "with more than {SHARDS_DEFAULT} ranks the result depends on their number: set `shards: \
                 Some(n)` in DdpOptions, and keep that n"
            );
        }
        let norms = Ranks::connect(&group, &tree, &model)?;
        if options.stop_on_signal {
            let listens = group.stop_on_signal();
            listens.map_err(|error| DdpError::Signals(Arc::new(error)))?;
        }
        let hook = options.comm_hook;
        if let Some(why) = hook.refuses_scaler().filter(|_| options.scaler.is_some()) {
            return Err(DdpError::CommHook {
                hook,
                what: "a gradient scaler",
                why,
                instead: "take int8, bf16, fp16 or none, or compute in bf16, which needs no scaler",
            });
        }
        let recorder: Option<Arc<Recorder>> = options.record.map(|_| Arc::default());
        let plan = Arc::new(plan);
        let setup = Setup {
            group: group.clone(),
            plan: plan.clone(),
            tree: tree.clone(),
            hook,
            dtype: buffer::dtype_of_sums(&parameters),
            shapes: (places.into_iter())
                .zip(parameters.iter().map(|entry| entry.shape.clone()))
                .collect(),
            shares: None,
            keeps_tail: options.recovery == Recovery::Live,
            recorder: recorder.clone(),
        };
        let prepare = || {
            let reducer = make(&device, setup)?;
            if !options.deferred_init {
                reducer.reserve()?;
            }
            Ok((reducer, Tokens::new(parameters.len(), &device)))
        };
        let (model, (reducer, tokens)) = match handover {
            Some(handover) => {
                let prepared = handover.receive_while(&group, prepare)?;
                (handover.load(model)?, prepared)
            }
            None => {
                let model = placement::broadcast(&group, None, model, HashMap::new())?;
                (model, prepare()?)
            }
        };
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
        let mut ddp = Self {
            make,
            fingerprint: Fingerprint::new(&fingerprinted, options.fingerprint_every),
            tokens,
            device_threads: (!buffer::is_host(&device)).then(DeviceThreads::watch),
            sink: reducer.clone(),
            uses: None,
            step: 0,
            undone: 0,
            commits: Commits::default(),
            clock: Clock::default(),
            pace: Pace::default(),
            is_expendable: false,
            manifest: match options.recovery {
                Recovery::Live => manifest,
                Recovery::None => verify::Manifest::default(),
            },
            order: Vec::new(),
            is_invited: false,
            handover: None,
            #[cfg(test)]
            successor: None,
            is_timed: false,
            shares: None,
            parts: None,
            deferred,
            stop: None,
            skipped: false,
            rounds: Rounds::new(options.comm_hook),
            norms,
            recorder,
            placement: None,
            sharded: None,
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
        ddp.is_expendable = ddp.is_live() && ddp.group.declare_recovery();
        if ddp.is_live() && !ddp.is_expendable && ddp.group.world() > 1 {
            paceline_rendezvous::notice!(
                WARN,
                "a lost rank ends the job: its launcher does not recover live (--recovery live)"
            );
        }
        Ok((ddp, model))
    }

    /// For other buckets, or for another group.
    fn setup(&self, plan: Arc<BucketPlan>) -> Setup {
        Setup {
            group: self.group.clone(),
            plan,
            tree: self.tree.clone(),
            hook: self.options.comm_hook,
            dtype: buffer::dtype_of_sums(&self.parameters),
            shapes: Arc::new([]),
            shares: None,
            keeps_tail: self.is_live(),
            recorder: self.recorder.clone(),
        }
    }

    /// Gives this rank's gradients other buckets in the same group, which have no memory yet.
    fn change_buckets(&mut self, setup: Setup) -> Result<(), DdpError> {
        let made = match self.reducer.with_setup(&setup) {
            Some(made) => made,
            None => (self.make)(&self.device, setup)?,
        };
        self.replace_reducer(made);
        Ok(())
    }

    /// The memory of the buckets until now serves the new ones, unless somebody still has the reducer until now or gradients of it.
    fn replace_reducer(&mut self, reducer: Arc<dyn Reducer>) {
        self.sink = reducer.clone();
        self.reducer = reducer;
    }

    pub(crate) fn parameters(&self) -> &[Entry] {
        &self.parameters
    }

    /// The shards that this rank computes.
    pub fn shards(&self) -> Range<usize> {
        self.tree.range(self.group.rank())
    }

    /// Number of shards of the job.
    pub fn shard_count(&self) -> usize {
        self.tree.leaves()
    }

    /// The tree that orders the sum over shards.
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

    /// What happens when a rank is lost, see [`DdpOptions::recovery`].
    pub fn recovery(&self) -> Recovery {
        self.options.recovery
    }

    /// Digests of the gradients of this rank's shards in the last step, with [`DdpOptions::record`].
    pub fn digests(&self) -> Vec<ShardDigests> {
        let recorder = self.recorder.as_ref();
        recorder.map_or_else(Vec::new, |recorder| recorder.digests())
    }

    /// The paths of the trained parameters, in the order of their [digests](Self::digests).
    pub fn parameter_paths(&self) -> impl Iterator<Item = &str> {
        self.parameters.iter().map(|entry| entry.path.as_str())
    }

    /// For how many steps digests of gradients are kept, see [`DdpOptions::record`].
    pub fn record(&self) -> Option<NonZeroU64> {
        self.options.record
    }

    /// Whether the last step changed nothing because it had an infinity or NaN, see [`Reduced::skipped`].
    pub fn has_skipped(&self) -> bool {
        self.skipped
    }

    /// The signal, if any, that asked a rank to stop before the last step. All ranks get the same answer after the same step.
    ///
    /// Call it after the optimizer's step. If it returns a signal, save and exit with 0 or [`StopSignal::exit_code`]. The
    /// launcher is told that this rank stops and exits with that code once all ranks have ended. Without
    /// [`DdpOptions::stop_on_signal`] it returns `None`.
    pub fn stop_requested(&self) -> Option<StopSignal> {
        let signal = self.stop?;
        self.group.set_stopped(signal, self.step);
        Some(signal)
    }

    /// Waits until the device has finished the work of earlier steps.
    ///
    /// Call it before you save or print weights: if gradients stay on their device, [`step`](Self::step) does not wait for
    /// them. Otherwise it returns at once.
    ///
    /// *Blocks*: at most the group's timeout and a little.
    ///
    /// *Errors*: the first failure of that work.
    pub fn synchronize(&self) -> Result<(), DdpError> {
        let done = self.reducer.synchronize();
        let done = done.and_then(|()| self.check_device());
        done.inspect_err(|error| self.abandon(error))
    }

    /// Makes [`Reduced::timeline`] show when the device computed instead of when work was submitted. Each pass then waits for
    /// the device. Has no effect where the compute thread itself computes.
    pub fn time_device(&mut self, is_timed: bool) {
        self.is_timed = is_timed && !buffer::is_host(&self.device);
    }

    /// `model` for evaluation: [`Module::valid`] in the training precision. At stage 3 of ZeRO it works in
    /// [`evaluate`](Self::evaluate) only.
    pub fn valid<M: Module>(&self, model: &M) -> M {
        self.casts.apply(model.valid())
    }

    /// The scaler as it enters the next step. Save its [`state_dict`](GradScaler::state_dict) with the weights.
    pub fn scaler(&self) -> Option<&GradScaler> {
        self.scaler.as_ref()
    }

    /// Number of trained values.
    pub fn parameter_count(&self) -> usize {
        self.parameters.iter().map(Entry::len).sum()
    }

    /// Whether gradients are summed where they are, as NCCL does. Each of their buckets leaves after a whole backward pass.
    pub fn reduces_on_device(&self) -> bool {
        !self.reducer.is_on_host()
    }

    /// Exchanges between the ranks of `group`, such as those that share a layer's parts, of values that stay on their device. `None`
    /// if gradients go through the host on one of the ranks, or if two ranks share a device. All ranks of the group call it, after
    /// the same steps. Sums are in the order of `tree`.
    ///
    /// The calls of all groups and the gradients' buckets run in one order on each device, that of their submission. So the ranks of
    /// `group` must run the same program, with the same calls between the passes of the same blocks, as those of a row of a mesh do.
    ///
    /// *Blocks*: until all ranks have called it and have tested their links.
    ///
    /// *Errors*: failed operations between the ranks; with [`Backend::Nccl`] a device that two ranks share.
    pub fn device_exchange(
        &self,
        group: &ProcessGroup,
        tree: &Arc<Tree>,
    ) -> Result<Option<Arc<dyn DeviceExchange>>, DdpError> {
        let port = self.reducer.port();
        let mut has_port = [i32::from(port.is_some())];
        let agreed = group.all_reduce(&mut has_port, ReduceOp::Min);
        agreed.map_err(|error| DdpError::along(group, error))?;
        let Some(port) = port.filter(|_| has_port[0] > 0) else {
            return Ok(None);
        };
        port.join(group, tree)
    }

    /// Number of gradient buckets.
    pub fn bucket_count(&self) -> usize {
        self.plan.tail()
    }
}

/// The reducer for a model on `device`.
fn reducer(
    backend: Backend,
    reduction: Reduction,
    device: &Device,
    setup: Setup,
) -> Result<Arc<dyn Reducer>, DdpError> {
    let is_host = buffer::is_host(device);
    if is_host && backend == Backend::Nccl {
        return Err(DdpError::Backend("the model is not on a CUDA device"));
    }
    let hook = setup.hook;
    let is_recorded = setup.recorder.is_some();
    let unrecordable = [
        (setup.dtype == DType::F64, "parameters in f64"),
        (
            !hook.keeps_bits(),
            "a communication hook whose result depends on the number of ranks",
        ),
        (backend == Backend::Nccl, "gradients that stay on a GPU"),
    ];
    let unrecordable = unrecordable.into_iter().find(|(is_set, _)| *is_set);
    if let Some((_, what)) = unrecordable.filter(|_| is_recorded) {
        return Err(DdpError::Record { what });
    }
    if setup.dtype == DType::F64 {
        return match (is_host, hook) {
            (true, CommHook::None) => {
                let sums = InDouble::new(&setup, device);
                Ok(Arc::new(DeviceReducer::new(setup, Arc::new(sums))))
            }
            (true, hook) => Err(DdpError::CommHook {
                hook,
                what: "parameters in f64",
                why: "hooks compress sums in f32",
                instead: "take none, or parameters in f32",
            }),
            (false, _) => Err(DdpError::Backend(
                "gradients of f64 parameters are summed in ordinary memory only",
            )),
        };
    }
    if is_host {
        return Ok(Arc::new(HostReducer::new(setup)));
    }
    if backend == Backend::Nccl && hook.is_per_shard() {
        return Err(DdpError::CommHook {
            hook,
            what: "backend nccl",
            why: "it compresses in the host's memory",
            instead: "take backend auto, with which these gradients go through the host",
        });
    }
    if !hook.is_per_shard()
        && !is_recorded
        && let Some(reducer) = on_nccl(backend, reduction, device, &setup)?
    {
        return Ok(reducer);
    }
    Ok(Arc::new(StagedReducer::new(setup)?))
}

/// NCCL's, or `None` where gradients go through the host.
#[cfg(feature = "cuda")]
fn on_nccl(
    backend: Backend,
    reduction: Reduction,
    device: &Device,
    setup: &Setup,
) -> Result<Option<Arc<dyn Reducer>>, DdpError> {
    use paceline_nccl::{NcclOptions, Probe};

    use crate::cuda::{Cuda, ordinal};
    use crate::reducer::{NcclDevice, NcclGroup};

    let is_wanted = match backend {
        Backend::Auto => ordinal(device).is_some(),
        Backend::Host => false,
        Backend::Nccl => true,
    };
    if !is_wanted {
        return Ok(None);
    }
    let Some(ordinal) = ordinal(device) else {
        return Err(DdpError::Device(
            "NCCL needs a CUDA device, and the model is on another kind".into(),
        ));
    };
    let on = NcclDevice {
        device,
        ordinal,
        backend,
        reduction,
    };
    let options = NcclOptions {
        // The first generation has tested each pair of devices, and later ones have no others.
        probe: match setup.group.generation() {
            0 => Probe::default(),
            _ => Probe::Check,
        },
        ..NcclOptions::default()
    };
    let joined = NcclGroup::join(setup, on, Cuda, &options)?;
    Ok(joined.map(|group| {
        let reducer: Arc<dyn Reducer> =
            Arc::new(DeviceReducer::new(setup.clone(), Arc::new(group)));
        reducer
    }))
}

#[cfg(not(feature = "cuda"))]
fn on_nccl(
    backend: Backend,
    _: Reduction,
    _: &Device,
    _: &Setup,
) -> Result<Option<Arc<dyn Reducer>>, DdpError> {
    match backend {
        Backend::Auto | Backend::Host => Ok(None),
        Backend::Nccl => Err(DdpError::Backend(
            "this program is built without the `cuda` feature, which includes NCCL",
        )),
    }
}
