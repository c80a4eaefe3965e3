//! Dry steps on this machine: the figures that a [plan](crate::plan) is computed from, and whole steps to check it with.

use std::time::Instant;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use paceline_collective::{GroupOptions, ProcessGroup, ReduceOp};
use paceline_ddp::timeline::Activity;
use paceline_ddp::{Ddp, DdpOptions, ShardStep};
use paceline_nn::{Recompute, visited_block};
use paceline_split::tensor::ParallelGpt;
use paceline_usage::memory::peak_resident_bytes;
use serde::{Deserialize, Serialize};

use crate::config::{Task, TrainConfig, Zero};
use crate::data::Dataset;
use crate::error::TrainError;
use crate::language::Text;
use crate::layout::Layout;
use crate::optimizer::Optimizer;
use crate::plan::{Depth, Link, Shape};
use crate::setup::{ddp_options, open_devices};
use crate::task::{Part, TrainTask};

/// Measured steps, after one to warm up.
const STEPS: usize = 5;
/// Layers of the deeper of the two models that are measured, unless the model has fewer.
const LAYERS_MEASURED: usize = 4;
/// Measured all-reduces, after some to warm up.
const REDUCTIONS: usize = 9;
const REDUCTIONS_TO_WARM_UP: usize = 3;
/// Values of the all-reduce that shows the latency, and most values of the one that shows the bandwidth.
const FEW_VALUES: usize = 64;
const MANY_VALUES: usize = 4 << 20;

/// What a rank has measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Probe {
    /// The model with some of its layers.
    pub depth: Depth,
    /// The shape of the whole model.
    pub shape: Shape,
    /// Samples of a pass.
    pub samples: usize,
    /// The link between the ranks, if there are several.
    pub link: Option<Link>,
}

/// Whole steps of a layout.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Rehearsal {
    /// Median seconds of a step.
    pub seconds: f64,
    /// Most resident bytes of a step.
    pub peak_bytes: f64,
}

impl Probe {
    /// The slowest and largest figures of all ranks.
    #[must_use]
    pub fn worst(mut self, others: impl IntoIterator<Item = Self>) -> Self {
        for other in others {
            let (own, other) = (&mut self.depth, other.depth);
            own.forward = own.forward.max(other.forward);
            own.backward = own.backward.max(other.backward);
            own.optimizer = own.optimizer.max(other.optimizer);
            own.other = own.other.max(other.other);
            if other.pass_bytes.max(other.end_bytes) > own.pass_bytes.max(own.end_bytes) {
                own.rest_bytes = other.rest_bytes;
                own.pass_bytes = other.pass_bytes;
                own.end_bytes = other.end_bytes;
            }
        }
        self
    }
}

/// Measures passes and the optimizer alone, on all ranks of `group` at once, and then the link between them: the model with
/// `layers` layers, or with a few. Another depth belongs into another process, whose memory is fresh.
///
/// *Blocks*: until all ranks have measured.
///
/// *Errors*: data or devices that cannot be used, and those of the steps.
pub fn probe(
    config: &TrainConfig,
    group: &ProcessGroup,
    layers: Option<usize>,
) -> Result<Probe, TrainError> {
    match config.task {
        Task::Digits | Task::Idx | Task::Csv => measure::<Dataset>(config, group, layers),
        Task::Lm => measure::<Text>(config, group, layers),
    }
}

/// Runs whole steps as `paceline train` would with these settings.
///
/// *Blocks*, *Errors*: as [`probe`].
pub fn rehearse(config: &TrainConfig, group: &ProcessGroup) -> Result<Rehearsal, TrainError> {
    match config.task {
        Task::Digits | Task::Idx | Task::Csv => whole_steps::<Dataset>(config, group),
        Task::Lm if config.tp.is_some() => whole_steps::<Text<ParallelGpt>>(config, group),
        Task::Lm => whole_steps::<Text>(config, group),
    }
}

/// Samples of a micro-batch.
fn samples(config: &TrainConfig) -> usize {
    let parts = config.shards * config.accumulate;
    config.global_batch.div_ceil(parts).max(1)
}

fn measure<T: TrainTask>(
    config: &TrainConfig,
    group: &ProcessGroup,
    layers: Option<usize>,
) -> Result<Probe, TrainError> {
    let shape = T::open(config, None)?.shape();
    let layers = layers.unwrap_or(shape.layers.min(LAYERS_MEASURED));
    let config = &TrainConfig {
        layers: Some(layers).filter(|layers| *layers > 0),
        zero: Zero::Off,
        tp: None,
        pp: None,
        ..config.clone()
    };
    let task = T::open(config, None)?;
    let device = open_devices(config, group)?.remove(0);
    let own = ProcessGroup::local(1, &GroupOptions::default())?.remove(0);
    let layout = Layout::new(config, &own)?;
    let options = DdpOptions {
        shards: Some(1),
        accumulate: 1,
        recompute: Recompute::None,
        stop_on_signal: false,
        ..ddp_options(config, &task, 0)
    };
    let rest = reset_peak();
    device.seed(config.seed);
    let net = task.model(config, &device, &layout)?;
    let parameters = parameters(&net);
    let mut steps = Steps::new(config, &task, &layout, (net, options))?;
    group.barrier()?;
    let batch = 0..samples(config);
    let ran = steps.run(|_| vec![batch.clone()])?;
    let depth = Depth {
        layers,
        parameters,
        forward: median(&ran, |one| one.forward),
        backward: median(&ran, |one| one.backward),
        optimizer: median(&ran, |one| one.optimizer),
        other: median(&ran, |one| {
            one.seconds - one.forward - one.backward - one.optimizer
        }),
        rest_bytes: rest,
        pass_bytes: most(&ran, |one| one.pass_bytes),
        end_bytes: median(&ran, |one| one.end_bytes),
    };
    group.barrier()?;
    Ok(Probe {
        depth,
        shape,
        samples: samples(config),
        link: (group.world() > 1).then(|| link(group)).transpose()?,
    })
}

fn whole_steps<T: TrainTask>(
    config: &TrainConfig,
    group: &ProcessGroup,
) -> Result<Rehearsal, TrainError> {
    let task = T::open(config, None)?;
    let device = open_devices(config, group)?.remove(0);
    let layout = Layout::new(config, group)?;
    device.seed(config.seed);
    let net = task.model(config, &device, &layout)?;
    let options = DdpOptions {
        stop_on_signal: false,
        ..ddp_options(config, &task, 0)
    };
    let mut steps = Steps::new(config, &task, &layout, (net, options))?;
    let size = samples(config);
    let ran = steps.run(|shard| {
        let first = shard * config.accumulate;
        let parts = first..first + config.accumulate;
        parts.map(|part| part * size..(part + 1) * size).collect()
    })?;
    Ok(Rehearsal {
        seconds: median(&ran, |one| one.seconds),
        peak_bytes: most(&ran, |one| one.pass_bytes.max(one.end_bytes)),
    })
}

/// Steps of a model, outside of a training.
struct Steps<'a, T: TrainTask> {
    config: &'a TrainConfig,
    task: &'a T,
    ddp: Ddp,
    net: Option<T::Model>,
    optimizer: Optimizer,
}

/// One of them.
#[derive(Clone, Copy, Default)]
struct Step {
    forward: f64,
    backward: f64,
    optimizer: f64,
    seconds: f64,
    pass_bytes: f64,
    end_bytes: f64,
}

impl<'a, T: TrainTask> Steps<'a, T> {
    fn new(
        config: &'a TrainConfig,
        task: &'a T,
        layout: &Layout,
        (net, options): (T::Model, DdpOptions),
    ) -> Result<Self, TrainError> {
        let (mut ddp, net) = Ddp::new(layout.replicas().clone(), net, options)?;
        layout.join(&mut ddp, &net)?;
        let (optimizer, net) = Optimizer::new(config, &mut ddp, net)?;
        Ok(Self {
            optimizer,
            net: Some(net),
            config,
            task,
            ddp,
        })
    }

    /// Runs steps in which a shard has these samples for each micro-batch.
    fn run(
        &mut self,
        samples: impl Fn(usize) -> Vec<std::ops::Range<usize>>,
    ) -> Result<Vec<Step>, TrainError> {
        let steps = (0..=STEPS).map(|_| self.one(&samples));
        let ran: Result<Vec<Step>, TrainError> = steps.collect();
        Ok(ran?.split_off(1))
    }

    fn one(
        &mut self,
        samples: &impl Fn(usize) -> Vec<std::ops::Range<usize>>,
    ) -> Result<Step, TrainError> {
        let (task, precision) = (self.task, self.config.precision);
        let count = task.len(Part::Train);
        let net = self.net.take().expect("the model is always put back");
        let mut step = Step::default();
        reset_peak();
        let start = Instant::now();
        let reduced = self.ddp.step(&net, |shard: &mut ShardStep<'_, T::Model>| {
            let parts = samples(shard.shard());
            shard.micro_batches(parts.len());
            for part in parts {
                let batch = task.batch(Part::Train, part.map(|sample| sample % count));
                let device = shard.device().clone();
                let scores = task.scores(&shard.model()?, &batch, precision, &device);
                let weight = scores.count() as f32;
                shard.backward(scores.loss(), weight)?;
            }
            step.pass_bytes = step.pass_bytes.max(reset_peak_after());
            Ok::<(), TrainError>(())
        })?;
        let reduced_at = Instant::now();
        let net = self.optimizer.step(self.config.lr, net, reduced.grads)?;
        self.ddp.synchronize()?;
        let end = Instant::now();
        self.net = Some(net);
        step.end_bytes = peak();
        for span in &reduced.timeline.spans {
            let seconds = (span.end - span.start).as_secs_f64();
            match span.activity {
                Activity::Forward => step.forward += seconds,
                Activity::Backward => step.backward += seconds,
            }
        }
        step.optimizer = (end - reduced_at).as_secs_f64();
        step.seconds = (end - start).as_secs_f64();
        Ok(step)
    }
}

/// Trained values outside of blocks and in the first one, and those of one layer. Parameters that do not exist yet stay so.
fn parameters<M: Module>(net: &M) -> [usize; 2] {
    struct Count {
        /// Outside of blocks and in block 0, and in block 1.
        values: [usize; 2],
        seen: std::collections::HashSet<burn::module::ParamId>,
    }
    impl ModuleVisitor for Count {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let len = param.lazy_shape().num_elements();
            if !self.seen.insert(param.id) {
                return;
            }
            match visited_block() {
                None | Some(0) => self.values[0] += len,
                Some(1) => self.values[1] += len,
                Some(_) => {}
            }
        }
    }
    let mut count = Count {
        values: [0; 2],
        seen: Default::default(),
    };
    net.visit(&mut count);
    count.values
}

/// The latency and bandwidth of all-reduces.
fn link(group: &ProcessGroup) -> Result<Link, TrainError> {
    let seconds = |count: usize| -> Result<f64, TrainError> {
        let mut values = vec![1.0_f32; count];
        let mut times = Vec::new();
        for round in 0..REDUCTIONS_TO_WARM_UP + REDUCTIONS {
            group.barrier()?;
            let start = Instant::now();
            group.all_reduce(&mut values, ReduceOp::Max)?;
            if round >= REDUCTIONS_TO_WARM_UP {
                times.push(start.elapsed().as_secs_f64());
            }
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    };
    let (small, large) = (seconds(FEW_VALUES)?, seconds(MANY_VALUES)?);
    let bytes = (MANY_VALUES * size_of::<f32>()) as f64;
    Ok(Link::of_all_reduce(group.world(), small, bytes, large))
}

fn median(steps: &[Step], figure: impl Fn(&Step) -> f64) -> f64 {
    let mut values: Vec<f64> = steps.iter().map(figure).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

fn most(steps: &[Step], figure: impl Fn(&Step) -> f64) -> f64 {
    steps.iter().map(figure).fold(0.0, f64::max)
}

/// Most resident bytes since the last reset.
fn peak() -> f64 {
    peak_resident_bytes().unwrap_or(0) as f64
}

/// Starts to watch for the peak afresh; returns the resident bytes now.
///
/// *Source*: `/proc/PID/clear_refs` of Linux. Where it cannot be written, the peak is that of the whole process.
fn reset_peak() -> f64 {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    peak()
}

/// The peak so far, which is forgotten.
fn reset_peak_after() -> f64 {
    let so_far = peak();
    reset_peak();
    so_far
}
