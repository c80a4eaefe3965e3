//! Dry steps on this machine: the figures that a [plan](crate::plan) is computed from, and whole steps to check it with.

use std::time::Instant;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use paceline_collective::{DeviceMesh, ProcessGroup, ReduceOp};
use paceline_ddp::timeline::Activity;
use paceline_ddp::{CommHook, Ddp, DdpOptions, Recovery, Reduced, ShardStep};
use paceline_nn::{Recompute, visited_block};
use paceline_split::tensor::ParallelGpt;
use paceline_usage::memory::{peak_resident_bytes, resident_file_bytes};
use serde::{Deserialize, Serialize};

use crate::classify::Supervised;
use crate::config::{Task, TrainConfig, Zero};
use crate::cuts::Cuts;
use crate::error::TrainError;
use crate::language::Text;
use crate::layout::Layout;
use crate::model::Net;
use crate::optimizer::Optimizer;
use crate::plan::{Depth, Link, Shape};
use crate::setup::{ddp_options, open_devices};
use crate::stages::Stages;
use crate::task::{Compute, Loss, Part, TrainTask};
use crate::trainer::RankBatch;

/// Measured steps, after one to warm up.
const STEPS: usize = 3;
/// Layers of the deeper of the two models that are measured, unless the model has fewer.
const LAYERS_MEASURED: usize = 6;
/// Measured all-reduces, after some to warm up.
const REDUCTIONS: usize = 9;
const REDUCTIONS_TO_WARM_UP: usize = 3;
/// Values of the all-reduce that shows the latency, and most values of the one that shows the bandwidth.
const FEW_VALUES: usize = 64;
const MANY_VALUES: usize = 4 << 20;

/// A dry step to measure.
#[derive(Clone, Copy, Debug)]
pub struct Dry {
    /// Layers of the model; `None` for a few.
    pub layers: Option<usize>,
    /// Ranks that share each layer.
    pub tp: usize,
    /// Whether blocks are recomputed.
    pub recompute: bool,
    /// Samples of a pass.
    pub samples: usize,
    /// Whether such passes wait for others between forward and backward.
    pub waits: bool,
}

/// What the ranks have measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Probe {
    /// The model with some of its layers.
    pub depth: Depth,
    /// The shape of the whole model.
    pub shape: Shape,
    /// The link between the ranks, if there are several.
    pub link: Option<Link>,
}

/// Whole steps of a layout.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Rehearsal {
    /// Least seconds of a step.
    pub seconds: f64,
    /// Most resident bytes of the process.
    pub peak_bytes: f64,
    /// Bytes that a rank sends in a step.
    pub sent_bytes: f64,
}

impl Rehearsal {
    /// Of two runs of the same layout, the time of the quieter one and the larger memory.
    #[must_use]
    pub fn or_quieter(self, other: Self) -> Self {
        Self {
            seconds: self.seconds.min(other.seconds),
            peak_bytes: self.peak_bytes.max(other.peak_bytes),
            sent_bytes: self.sent_bytes.max(other.sent_bytes),
        }
    }
}

/// Measures passes and the optimizer alone, on all ranks of `group` at once, and then the link between them: the model with
/// few layers, and with `dry.tp` ranks for each of them. Other dry steps belong into other processes, whose memory is fresh.
///
/// The figures are those of the slowest and largest rank, and the same on all ranks.
///
/// *Blocks*: until all ranks have measured.
///
/// *Errors*: data or devices that cannot be used, and those of the steps.
pub fn probe(config: &TrainConfig, group: &ProcessGroup, dry: Dry) -> Result<Probe, TrainError> {
    match config.task {
        Task::Digits | Task::Idx | Task::Csv | Task::Images => {
            measure::<Supervised<Net>>(config, group, dry)
        }
        Task::Lm if dry.tp > 1 => measure::<Text<ParallelGpt>>(config, group, dry),
        Task::Lm => measure::<Text>(config, group, dry),
    }
}

/// Runs whole steps as `paceline train` would with these settings.
///
/// *Blocks*, *Errors*: as [`probe`].
pub fn rehearse(config: &TrainConfig, group: &ProcessGroup) -> Result<Rehearsal, TrainError> {
    match config.task {
        Task::Digits | Task::Idx | Task::Csv | Task::Images => {
            whole_steps::<Supervised<Net>>(config, group)
        }
        Task::Lm if config.tp.is_some() => whole_steps::<Text<ParallelGpt>>(config, group),
        Task::Lm => whole_steps::<Text>(config, group),
    }
}

fn measure<T: TrainTask>(
    config: &TrainConfig,
    group: &ProcessGroup,
    dry: Dry,
) -> Result<Probe, TrainError> {
    let cuts = T::cuts();
    let shape = cuts.shape(&T::open(config, None)?, config.precision);
    let layers = dry.layers.unwrap_or(shape.layers.min(LAYERS_MEASURED));
    let config = &TrainConfig {
        layers: Some(layers).filter(|layers| *layers > 0),
        zero: Zero::Off,
        dp: 1,
        tp: Some(dry.tp).filter(|parts| *parts > 1),
        pp: None,
        // Arithmetic counts what it needs.
        comm_hook: CommHook::None,
        ..config.clone()
    };
    let task = T::open(config, None)?;
    let device = open_devices(config, group)?.remove(0);
    // A replica alone: what replicas tell each other is measured apart.
    let mesh = DeviceMesh::new(group, &[("dp", group.world() / dry.tp), ("tp", dry.tp)])?;
    let layout = Layout::new(config, mesh.group("tp")?)?;
    let options = DdpOptions {
        shards: Some(1),
        accumulate: 1,
        recompute: match dry.recompute {
            true => Recompute::Blocks,
            false => Recompute::None,
        },
        recovery: Recovery::None,
        ..ddp_options(config, &task)
    };
    let rest = reset_peak() - file_bytes();
    device.seed(config.seed);
    let net = cuts.model(&task, config, &device, &layout)?;
    let parameters = parameters(&net);
    let weights_bytes = (4 * (parameters[0] + layers * parameters[1])).max(1) as f64;
    let mut steps = Steps::new(config, (&task, &cuts), &layout, (net, options), group)?;
    let batch = 0..dry.samples;
    let kept_bytes = match dry.waits {
        true => Some(steps.kept(batch.clone())?),
        false => None,
    };
    let ran = steps.run(|_| vec![batch.clone()])?;
    let quietest = quietest(&ran);
    let depth = Depth {
        layers,
        tp: dry.tp,
        recompute: dry.recompute,
        samples: dry.samples,
        parameters,
        state: steps.optimizer.bytes()? / weights_bytes,
        forward: quietest.forward,
        backward: quietest.backward,
        optimizer: quietest.optimizer,
        other: (quietest.seconds - quietest.forward - quietest.backward - quietest.optimizer)
            .max(0.0),
        // The program's own pages come in while it runs.
        rest_bytes: rest + file_bytes(),
        kept_bytes,
        pass_bytes: most(&ran, |one| one.pass_bytes),
        end_bytes: most(&ran, |one| one.end_bytes),
    };
    Ok(Probe {
        depth,
        shape,
        link: (group.world() > 1).then(|| link(group)).transpose()?,
    })
}

fn whole_steps<T: TrainTask>(
    config: &TrainConfig,
    group: &ProcessGroup,
) -> Result<Rehearsal, TrainError> {
    let cuts = T::cuts();
    let task = T::open(config, None)?;
    let device = open_devices(config, group)?.remove(0);
    let layout = Layout::new(config, group)?;
    device.seed(config.seed);
    let net = cuts.model(&task, config, &device, &layout)?;
    let options = DdpOptions {
        recovery: Recovery::None,
        ..ddp_options(config, &task)
    };
    let mut steps = Steps::new(config, (&task, &cuts), &layout, (net, options), group)?;
    let to_start = peak();
    let parts = config.shards * config.accumulate;
    let size = config.global_batch.div_ceil(parts).max(1);
    let ran = steps.run(|shard| {
        let first = shard * config.accumulate;
        let parts = first..first + config.accumulate;
        parts.map(|part| part * size..(part + 1) * size).collect()
    })?;
    Ok(Rehearsal {
        seconds: quietest(&ran).seconds,
        peak_bytes: most(&ran, |one| one.pass_bytes.max(one.end_bytes)).max(to_start),
        sent_bytes: most(&ran, |one| one.sent_bytes),
    })
}

/// Steps of a model, outside of a training.
struct Steps<'a, T: TrainTask> {
    config: &'a TrainConfig,
    task: &'a T,
    /// All ranks.
    group: &'a ProcessGroup,
    ddp: Ddp,
    stages: Option<Box<dyn Stages<T>>>,
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
    sent_bytes: f64,
}

impl<'a, T: TrainTask> Steps<'a, T> {
    fn new(
        config: &'a TrainConfig,
        (task, cuts): (&'a T, &Cuts<T>),
        layout: &Layout,
        (net, options): (T::Model, DdpOptions),
        group: &'a ProcessGroup,
    ) -> Result<Self, TrainError> {
        let options = DdpOptions {
            stop_on_signal: false,
            ..options
        };
        let (stages, mut ddp, net) = cuts.wrap(layout, net, None, options)?;
        let (optimizer, net) = Optimizer::new(config, task, &mut ddp, net)?;
        Ok(Self {
            optimizer,
            net: Some(net),
            stages,
            config,
            task,
            group,
            ddp,
        })
    }

    /// Bytes that a forward pass leaves for its backward pass: what a third one adds while two wait. Before the first step
    /// the allocator has no free memory that it could take.
    fn kept(&mut self, samples: std::ops::Range<usize>) -> Result<f64, TrainError> {
        let (task, precision) = (self.task, self.config.precision);
        let net = self.net.as_ref().expect("the model is always put back");
        let batch = self.batch(samples)?;
        let mut peaks = [0.0; 3];
        self.ddp.step(net, |shard: &mut ShardStep<'_, T::Model>| {
            let device = shard.device().clone();
            let compute = Compute::new(&device, precision);
            let mut waiting = Vec::new();
            for bytes in &mut peaks {
                waiting.push(task.loss(&shard.model()?, &batch, compute)?);
                *bytes = peak();
            }
            shard.micro_batches(0);
            Ok::<_, TrainError>(())
        })?;
        let mut kept = [peaks[2] - peaks[1]];
        self.group.all_reduce(&mut kept, ReduceOp::Max)?;
        Ok(kept[0])
    }

    /// Runs steps in which a shard has these samples for each micro-batch, after one to warm up.
    fn run(
        &mut self,
        samples: impl Fn(usize) -> Vec<std::ops::Range<usize>>,
    ) -> Result<Vec<Step>, TrainError> {
        let micro_batch = |samples| self.batch(samples);
        let shard = |shard| samples(shard).into_iter().map(micro_batch).collect();
        let batch = self.ddp.shards().map(shard);
        let batch: RankBatch<T::Batch> = batch.collect::<Result<_, TrainError>>()?;
        self.one(&batch)?;
        (0..STEPS).map(|_| self.one(&batch)).collect()
    }

    fn batch(&self, samples: std::ops::Range<usize>) -> Result<T::Batch, TrainError> {
        let count = self.task.len(Part::Train);
        let samples = samples.map(|sample| sample % count);
        self.task.batch(Part::Train, Some(0), samples)
    }

    /// One step of all ranks at once. Its figures are those of the slowest and largest rank.
    fn one(&mut self, batch: &RankBatch<T::Batch>) -> Result<Step, TrainError> {
        let net = self.net.take().expect("the model is always put back");
        let mut step = Step::default();
        self.group.barrier()?;
        reset_peak();
        let sent = self.group.sent_bytes();
        let start = Instant::now();
        let reduced = self.reduce(&net, batch, &mut step)?;
        let reduced_at = Instant::now();
        let net = self.optimizer.step(self.config.lr, net, reduced.grads)?;
        self.ddp.synchronize()?;
        let end = Instant::now();
        self.net = Some(net);
        step.end_bytes = peak();
        step.sent_bytes = (self.group.sent_bytes() - sent) as f64;
        for span in &reduced.timeline.spans {
            let seconds = (span.end - span.start).as_secs_f64();
            match span.activity {
                Activity::Forward => step.forward += seconds,
                Activity::Backward => step.backward += seconds,
            }
        }
        step.optimizer = (end - reduced_at).as_secs_f64();
        step.seconds = (end - start).as_secs_f64();
        let mut figures = [
            step.forward,
            step.backward,
            step.optimizer,
            step.seconds,
            step.pass_bytes,
            step.end_bytes,
            step.sent_bytes,
        ];
        self.group.all_reduce(&mut figures, ReduceOp::Max)?;
        let [
            forward,
            backward,
            optimizer,
            seconds,
            pass_bytes,
            end_bytes,
            sent_bytes,
        ] = figures;
        Ok(Step {
            forward,
            backward,
            optimizer,
            seconds,
            pass_bytes,
            end_bytes,
            sent_bytes,
        })
    }

    /// The passes, and the averaged gradients. Notes the peak up to the end of the last pass.
    fn reduce(
        &mut self,
        net: &T::Model,
        batch: &RankBatch<T::Batch>,
        step: &mut Step,
    ) -> Result<Reduced, TrainError> {
        let (task, precision) = (self.task, self.config.precision);
        if let Some(stages) = &mut self.stages {
            return stages.step(&mut self.ddp, net, task, batch, precision);
        }
        let first = self.ddp.shards().start;
        self.ddp.step(net, |shard: &mut ShardStep<'_, T::Model>| {
            let parts = &batch[shard.shard() - first];
            shard.micro_batches(parts.len());
            for part in parts {
                let device = shard.device().clone();
                let compute = Compute::new(&device, precision);
                let Loss { mean, weight, .. } = task.loss(&shard.model()?, part, compute)?;
                shard.backward(mean, weight)?;
            }
            step.pass_bytes = step.pass_bytes.max(reset_peak_after());
            Ok(())
        })
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

/// The fastest step: other programs only add to its time.
fn quietest(steps: &[Step]) -> Step {
    let fastest = steps.iter().min_by(|a, b| a.seconds.total_cmp(&b.seconds));
    fastest.copied().unwrap_or_default()
}

fn most(steps: &[Step], figure: impl Fn(&Step) -> f64) -> f64 {
    steps.iter().map(figure).fold(0.0, f64::max)
}

/// Most resident bytes since the last reset.
fn peak() -> f64 {
    peak_resident_bytes().unwrap_or(0) as f64
}

/// Resident bytes of files, such as the program.
fn file_bytes() -> f64 {
    resident_file_bytes().unwrap_or(0) as f64
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
