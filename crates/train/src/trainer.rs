//! The training loop of one rank.

mod best;
mod epoch;
mod judge;
mod losses;
mod shards;
mod show;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use burn::module::Module;
use burn::tensor::Device;
use paceline_checkpoint::{Checkpoint, CheckpointError, Checkpoints, Origin, Saved};
use paceline_collective::ProcessGroup;
use paceline_ddp::loader::{Loader, LoaderOptions};
use paceline_ddp::sampler::{SamplerState, ShardedBatches, StepPlan};
use paceline_ddp::{Ddp, DdpError, Reduced, ShardStep, odd_ranks};
use paceline_rendezvous::page::Phase;
use paceline_rendezvous::stop::StopSignal;
use paceline_split::DataParallel;
use paceline_split::tensor::ParallelGpt;
use paceline_usage::environment::Environment;
use paceline_usage::spans::{Kind, is_kept};
use serde::{Deserialize, Serialize};

use crate::classes::{confused, figures};
use crate::classify::Supervised;
use crate::config::{NonFinite, Recovery, Strategy, Task, TrainConfig};
use crate::console::{At, Console, Output};
use crate::error::{TrainError, loader_error};
use crate::language::Text;
use crate::layout::Layout;
use crate::model::Net;
use crate::observe::{Observer, all_gather};
use crate::optimizer::Optimizer;
use crate::records::{Figures, StartRecord, StepRecord, StoppedRecord};
use crate::report;
use crate::run_dir::{self, Metrics};
use crate::schedule::Schedule;
use crate::setup::{
    copied, ddp_options, loader_options, open_checkpoints, open_devices, sharded_batches,
};
use crate::stages::{PipelineReport, Stages};
use crate::task::{Part, Step, TrainTask, Unit};
use best::Best;
pub(crate) use epoch::monitored;
use judge::{Numbers, Policy, Row, Verdict, judge};
use shards::Loaded;
pub(crate) use shards::{RankBatch, of_shard, run_shard};

/// Most classes whose figures are in the record of the end.
const CLASSES_MAX: usize = 100;

/// How training ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// All epochs are done.
    Finished,
    /// All ranks stopped at a step boundary, after saving, because of this signal.
    Stopped {
        /// The signal.
        signal: StopSignal,
    },
}

/// Trains with `config` as one rank of `group`. Rank 0 reports in the format `output`.
///
/// *Blocks*: until the job has ended on all ranks.
///
/// *Errors*: any; the other ranks get the cause before this returns.
pub fn train(config: &TrainConfig, group: ProcessGroup, output: Output) -> Result<End, TrainError> {
    match config.task {
        Task::Digits | Task::Idx | Task::Csv | Task::Images => {
            train_task::<Supervised<Net>>(config, group, output)
        }
        Task::Lm if config.tp.is_some() => train_task::<Text<ParallelGpt>>(config, group, output),
        Task::Lm => train_task::<Text>(config, group, output),
    }
}

/// Trains a user's own task, as [`train`] trains the built-in ones.
///
/// *Blocks*, *Errors*: as there.
pub fn train_task<T: TrainTask>(
    config: &TrainConfig,
    group: ProcessGroup,
    output: Output,
) -> Result<End, TrainError> {
    group.declare_finish();
    let layout = Layout::new(config, &group).inspect_err(|error| tell(&group, None, error))?;
    let trainer = Trainer::<T>::new(config, group.clone(), layout.clone(), output);
    let mut trainer = trainer.inspect_err(|error| tell(&group, Some(&layout), error))?;
    // A failed group ends when nothing holds it any more.
    drop((group, layout));
    let result = trainer.run();
    match &result {
        Ok(_) => {
            // The other ranks have ended: none waits while this one uploads its last checkpoint.
            let Trainer {
                checkpoints, group, ..
            } = trainer;
            checkpoints.finish()?;
            group.set_phase(Phase::Finished, 0);
        }
        Err(error) => tell(&trainer.group, Some(&trainer.layout), error),
    }
    result
}

/// The checkpoint that the job goes on from.
fn newest(
    config: &TrainConfig,
    checkpoints: &Checkpoints,
    is_restarted: bool,
) -> Result<Option<Saved>, TrainError> {
    // A new run has none in its folder, but its ranks may have been started again: there may be one in memory.
    let may_be_in_memory = is_restarted || config.memory_checkpoint > 0;
    let saved = match config.resume || may_be_in_memory {
        true => checkpoints.latest()?,
        false => None,
    };
    match saved {
        None if config.resume => Err(TrainError::NoCheckpoint {
            path: run_dir::checkpoints(&config.run_dir),
        }),
        saved => Ok(saved),
    }
}

/// Tells the other ranks and the launcher which rank failed first.
fn tell(group: &ProcessGroup, layout: Option<&Layout>, error: &TrainError) {
    if group.world() == 1 {
        return;
    }
    let replicas = layout.map_or(group, Layout::replicas);
    let spokesman = error.spokesman().map(|rank| match error {
        TrainError::Ddp(_) => replicas.global_rank(rank),
        _ => rank,
    });
    match spokesman {
        // All ranks have this error; otherwise the launcher would report the one that happens to exit first. A rank that blames
        // itself fails on behalf of all.
        Some(rank) => group.blame(rank),
        // A failed group keeps its first cause; otherwise the others get ours.
        None => {
            let why = error.to_string();
            group.abort(&why);
            layout.iter().for_each(|layout| layout.abort_parts(&why));
        }
    }
}

/// The trainer's own values in a checkpoint.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Progress {
    /// Sum of losses and of the weights of predictions of the current epoch.
    epoch_sums: [f64; 2],
    #[serde(default)]
    row: Row,
    #[serde(default)]
    best: Best,
    /// The last lines of the metrics, in a state that a rank leaves: a lost rank 0 may not have written them.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    unwritten: String,
}

type RankLoader<B> = Loader<StepPlan, RankBatch<B>, TrainError>;

struct Trainer<'a, T: TrainTask> {
    config: &'a TrainConfig,
    group: ProcessGroup,
    layout: Layout,
    device: Device,
    /// The replicas of `--strategy dp`.
    replicas: Option<DataParallel>,
    /// The pipeline of `--pp`.
    stages: Option<Box<dyn Stages<T>>>,
    task: Arc<T>,
    batches: ShardedBatches,
    checkpoints: Checkpoints,
    schedule: Schedule,
    ddp: Ddp,
    net: Option<T::Model>,
    optimizer: Optimizer,
    console: Console,
    output: Output,
    metrics: Option<Metrics>,
    observer: Observer,
    /// Which classes the last evaluation took for which.
    confusion: BTreeMap<[u32; 2], u64>,
    /// Steps done.
    step: u64,
    last_saved: Option<u64>,
    progress: Progress,
    epoch_start: Instant,
    /// Predictions since the start of the epoch or of the resumed job.
    epoch_predictions: f64,
    /// Steps skipped since the start of the epoch or of the resumed job.
    epoch_skipped: u64,
    /// Rank 0 was lost, maybe while it wrote a checkpoint.
    has_to_save: bool,
    /// Whether the optimizer keeps the averages that the settings ask for, if any. Its first step shows that.
    keeps_averages: bool,
}

/// The state of a trainer that is at this position in the data.
fn checkpoint<'a, M: Module>(
    net: &'a Option<M>,
    optimizer: &'a Optimizer,
    progress: &Progress,
    sampler: &SamplerState,
) -> Checkpoint<'a, M> {
    let net = net.as_ref().expect("the model is always put back");
    Checkpoint::new(net, optimizer)
        .sampler(sampler)
        .value(progress)
}

/// Whether a checkpoint was only in memory when a whole job started from it.
fn was_in_memory(saved: &Saved) -> bool {
    !matches!(saved.origin(), Origin::File | Origin::Peers)
}

/// Whether something that happens every `every` steps, or never if that is 0, happens after `step` steps.
fn is_due(every: u64, step: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}

impl<'a, T: TrainTask> Trainer<'a, T> {
    fn new(
        config: &'a TrainConfig,
        group: ProcessGroup,
        mut layout: Layout,
        output: Output,
    ) -> Result<Self, TrainError> {
        let joins = group.is_joining();
        if config.memory_checkpoint > 0 && group.env().memory_folder.is_none() {
            return Err(CheckpointError::NoMemory.into());
        }
        let devices = open_devices(config, &group)?;
        let device = devices[0].clone();
        let task = Arc::new(T::open(config, Some(&group))?);
        let cuts = T::cuts();
        cuts.check(config)?;
        let starts = match config.measures_blocks() {
            true => Some(cuts.equal_stages(&task, config, &group, &device)?),
            false => None,
        };
        device.seed(config.seed);
        let net = cuts.model(&task, config, &device, &layout)?;
        let mut checkpoints = open_checkpoints(config, &*task, &group)?;
        let mut saved = match joins {
            true => None,
            false => newest(config, &checkpoints, group.env().restart_count > 0)?,
        };
        let position = saved.as_ref().map(Saved::sampler).transpose()?;
        let mut batches = sharded_batches(config, task.len(Part::Train), position)?;
        let schedule = Schedule::new(config, batches.steps_per_epoch());
        let options = ddp_options(config, &*task);
        let net = match config.strategy {
            Strategy::Model => task.place(net, &devices),
            _ => net,
        };
        let (stages, mut ddp, net) = cuts.wrap(&layout, net, starts, options)?;
        if joins {
            saved = checkpoints.resume(&mut ddp)?;
            let position = saved.as_ref().map(Saved::sampler).transpose()?;
            position.map_or(Ok(()), |position| batches.load_state_dict(position))?;
            layout.follow(ddp.group());
        }
        let group = match joins {
            true => ddp.group().clone(),
            false => group,
        };
        let step = saved.as_ref().map_or(0, Saved::step);
        let (mut optimizer, mut net) = Optimizer::new(config, &*task, &mut ddp, net)?;
        let mut progress = Progress::default();
        if let Some(saved) = &mut saved {
            (net, optimizer) = saved.restore(&mut ddp, net, optimizer)?;
            progress = saved.value()?;
        }
        let console = Console::new(group.rank(), output, schedule.total_steps, step);
        let leaves = config.leaves_state() && checkpoints.leave_after_a_loss(&ddp);
        let unwritten = std::mem::take(&mut progress.unwritten);
        let metrics = match group.rank() {
            0 => Some(Metrics::open(
                &config.run_dir,
                saved.as_ref().map(Saved::step),
                unwritten.as_bytes(),
            )?),
            _ => (leaves || config.recovery == Recovery::Live)
                .then(|| Metrics::understudy(&config.run_dir)),
        };
        let mut trainer = Self {
            schedule,
            observer: Observer::start(&mut ddp, &group)?,
            last_saved: saved
                .as_ref()
                .filter(|saved| !was_in_memory(saved))
                .map(Saved::step),
            progress,
            epoch_start: Instant::now(),
            epoch_predictions: 0.0,
            epoch_skipped: 0,
            has_to_save: false,
            keeps_averages: config.ema.is_none(),
            confusion: BTreeMap::new(),
            output,
            config,
            group,
            layout,
            device,
            stages,
            replicas: (config.strategy == Strategy::Dp).then(|| DataParallel::new(devices)),
            task,
            batches,
            checkpoints: copied(config, checkpoints)?,
            ddp,
            net: Some(net),
            optimizer,
            console,
            metrics,
            step,
        };
        let came_from = saved.map(|saved| {
            let origin = match saved.origin() {
                Origin::File => saved.path().display().to_string(),
                Origin::Memory => "memory".to_owned(),
                Origin::OtherMemory => "another host's memory".to_owned(),
                Origin::Peers => "the other ranks".to_owned(),
                Origin::Survivors => "the memory of the ranks that were left".to_owned(),
            };
            (saved.step(), origin)
        });
        let header = trainer.header(came_from);
        trainer.console.print(&header.render());
        trainer.console.emit(&header);
        // A rank that joins does not start the job.
        if let Some(metrics) = trainer.metrics.as_mut().filter(|_| !joins) {
            metrics.write(&StartRecord {
                header: &header,
                step,
                environment: Environment::here(),
            })?;
            metrics.flush()?;
        }
        Ok(trainer)
    }

    fn run(&mut self) -> Result<End, TrainError> {
        self.follow()?;
        let mut shards = self.ddp.shards();
        let mut position = self.batches.state();
        // The job may have been lost while it saved its best state.
        if self.last_saved.is_none() && self.progress.best.step() == Some(self.step) {
            self.save(&position)?;
        }
        let mut loader = self.loader(&position)?;
        self.epoch_start = Instant::now();
        loop {
            self.group.set_phase(Phase::DataLoader, self.step);
            self.keep_snapshot(&position)?;
            let asked = Instant::now();
            let next = match self.stops_early() {
                true => None,
                false => loader.next(),
            };
            let done = match next {
                Some(item) => {
                    let (plan, batch) = item.map_err(loader_error)?;
                    let steps = self.batches.steps_per_epoch();
                    let keeps_spans = is_kept(plan.step_in_epoch, steps);
                    self.observer.begin_step(asked, keeps_spans);
                    let loaded = Loaded {
                        shards: shards.clone(),
                        batch,
                    };
                    self.one_step(&plan, &loaded, &position)
                        .map(|()| plan.after)
                }
                None => match self.agreed_hash() {
                    Ok(hash) => {
                        drop(loader);
                        return self.finish(&hash, &position);
                    }
                    Err(error) => Err(error),
                },
            };
            let has_gone_back = done.is_err();
            position = done.or_else(|error| self.go_back(error))?;
            if has_gone_back || self.ddp.shards() != shards {
                // The samples read ahead are those of other shards, or of later steps.
                shards = self.ddp.shards();
                loader = self.loader(&position)?;
            }
            if self.step < self.schedule.total_steps
                && let Some(signal) = self.ddp.stop_requested()
            {
                self.save(&position)?;
                self.checkpoints.wait()?;
                self.console.finish();
                self.console.print(&format!(
                    "stopped by {signal} after step {} of {}, saved; continue with --resume {}",
                    self.step,
                    self.schedule.total_steps,
                    self.config.run_dir.display()
                ));
                let record = StoppedRecord {
                    kind: "stopped",
                    step: self.step,
                    signal: signal.to_string(),
                };
                self.console.emit(&record);
                if let Some(metrics) = &mut self.metrics {
                    metrics.write(&record)?;
                }
                self.flush_metrics()?;
                return Ok(End::Stopped { signal });
            }
        }
    }

    /// Whether there was no better epoch for too long.
    fn stops_early(&self) -> bool {
        self.step < self.schedule.total_steps && self.progress.best.is_over(self.config.patience)
    }

    /// Reads this rank's shards ahead.
    fn loader(&self, from: &SamplerState) -> Result<RankLoader<T::Batch>, TrainError> {
        let mut batches = self.batches.clone();
        batches.load_state_dict(from)?;
        let options = LoaderOptions {
            workers: self.config.workers,
            ..loader_options(self.config)
        };
        let (task, shards) = (self.task.clone(), self.ddp.shards());
        let accumulate = self.config.accumulate;
        let load = move |plan: &StepPlan| {
            let shards = shards.clone();
            shards
                .map(|shard| of_shard(&*task, plan, shard, accumulate))
                .collect()
        };
        Loader::new(options, batches, load).map_err(loader_error)
    }

    /// Runs one step and the work due after it.
    fn one_step(
        &mut self,
        plan: &StepPlan,
        loaded: &Loaded<T::Batch>,
        position: &SamplerState,
    ) -> Result<(), TrainError> {
        let start = Instant::now();
        let net = self.net.take().expect("the model is always put back");
        #[cfg(test)]
        let net = tests::disturbed(net, &self.config.run_dir, self.group.rank(), self.step);
        self.ddp.time_device(self.config.trace == Some(self.step));
        let reduced = match self.reduce(&net, plan, loaded) {
            Ok(reduced) => reduced,
            Err(error) => {
                self.net = Some(net);
                self.leave(&error, position);
                return Err(error);
            }
        };
        self.follow()?;
        let loss = reduced.loss as f32;
        let verdict = self.judge(&reduced)?;
        self.observer.reduced(&reduced.timeline);
        let lr = self.schedule.rate(self.step);
        let Reduced {
            grads,
            weight,
            grad_norm,
            skipped,
            scale,
            mut timeline,
            ..
        } = reduced;
        let may_skip = self.may_skip();
        let optimizing = Instant::now();
        let net = self.optimizer.step(lr, net, grads)?;
        let net = self.ddp.average(net)?;
        let (net, figures) = match skipped {
            true => (net, Vec::new()),
            false => self.task.after_step(
                net,
                &Step {
                    number: self.step + 1,
                    epoch: plan.epoch + 1,
                    loss: reduced.loss,
                    lr,
                    grad_norm,
                },
            )?,
        };
        let figures = Figures::new(figures)?;
        self.net = Some(net);
        self.observer
            .did(Kind::Optimizer, optimizing, Instant::now());
        if !self.keeps_averages && !skipped {
            // An evaluation would be the first to miss them, maybe hours later.
            let net = self.net.as_ref().expect("the model was put back");
            self.optimizer.averaged(self.config, net)?;
            self.keeps_averages = true;
        }
        if self.config.trace == Some(self.step) {
            timeline.settle();
            self.write_trace(&timeline, optimizing)?;
        }
        let back_to = match verdict {
            Verdict::Back => Some(self.give_up(plan)?),
            Verdict::Counts | Verdict::Skip => {
                self.checkpoints.record(&self.ddp, plan)?;
                None
            }
        };
        self.step += 1;
        if loss.is_finite() && back_to.is_none() {
            self.progress.epoch_sums[0] += reduced.loss * weight;
            self.progress.epoch_sums[1] += weight;
        }
        // Weights of classes are not counted.
        let predictions = match T::UNIT {
            Unit::Samples => plan.samples() as f64,
            Unit::Tokens => weight,
        };
        self.epoch_predictions += predictions;
        self.epoch_skipped += u64::from(skipped);
        self.console.step(|| At {
            step: self.step,
            epochs: (plan.epoch + 1, self.config.epochs as u64),
            loss,
            per_second: self.epoch_predictions / self.epoch_start.elapsed().as_secs_f64(),
            unit: T::UNIT.name(),
            ranks: self.group.world(),
            all_busy: self.observer.all_busy(),
        });
        let [samples, tokens] = T::UNIT.split(predictions);
        if let Some(metrics) = &mut self.metrics {
            metrics.write_step(StepRecord {
                kind: "step",
                step: self.step,
                epoch: plan.epoch + 1,
                loss: f64::from(loss),
                lr,
                samples,
                tokens,
                grad_norm,
                scale: self.ddp.scaler().map(|_| scale),
                skipped: may_skip.then_some(skipped),
                back_to,
                seconds: start.elapsed().as_secs_f64(),
                waited_seconds: timeline.waited().as_secs_f64(),
                figures,
            })?;
        }
        if plan.ends_epoch() {
            self.end_epoch(plan)?;
        } else if is_due(self.config.evaluate_every, self.step) {
            self.evaluate_within_epoch()?;
        }
        // With a file too: that may be on a host that is lost.
        if is_due(self.config.memory_checkpoint, self.step) {
            self.save_by(Checkpoints::save_in_memory, &plan.after)?;
        }
        let is_due = is_due(self.config.save_every, self.step) || plan.ends_epoch();
        // The job may wait for long, and end if no node comes.
        if is_due || self.has_to_save || self.group.is_held() {
            self.has_to_save = false;
            self.save(&plan.after)?;
        }
        self.observer.end_step(self.step, &self.group);
        self.admit(&plan.after)
    }

    fn may_skip(&self) -> bool {
        self.ddp.scaler().is_some() || self.config.non_finite != NonFinite::Stop
    }

    /// What becomes of a step by its numbers.
    ///
    /// *Errors*: the job ends because of them.
    fn judge(&mut self, reduced: &Reduced) -> Result<Verdict, TrainError> {
        let policy = Policy {
            non_finite: self.config.non_finite,
            snapshot_every: self.config.snapshot_every,
        };
        let numbers = Numbers {
            step: self.step + 1,
            loss: reduced.loss as f32,
            skipped: reduced.skipped,
            scale: self.ddp.scaler().map(|_| reduced.scale),
        };
        let verdict = judge(policy, &numbers, &mut self.progress.row)?;
        if verdict != Verdict::Counts {
            let (step, what) = (numbers.step, numbers.what());
            self.console.print(&format!("step {step} skipped: {what}"));
        }
        Ok(verdict)
    }

    fn reduce(
        &mut self,
        net: &T::Model,
        plan: &StepPlan,
        loaded: &Loaded<T::Batch>,
    ) -> Result<Reduced, TrainError> {
        let (config, task) = (self.config, &*self.task);
        if let Some(stages) = &mut self.stages {
            return stages.step(&mut self.ddp, net, task, &loaded.batch, config.precision);
        }
        let run = |shard: &mut ShardStep<'_, T::Model>| {
            let late;
            let micro = match loaded.of(shard.shard()) {
                Some(micro) => micro,
                // A lost rank's.
                None => {
                    late = of_shard(task, plan, shard.shard(), config.accumulate)?;
                    &late
                }
            };
            run_shard(task, config, shard, micro)
        };
        match &self.replicas {
            Some(replicas) => replicas.step(&mut self.ddp, net, run),
            None => self.ddp.step(net, run),
        }
    }

    /// Makes the weights of all ranks one, if they take steps by themselves.
    fn end_round(&mut self) -> Result<(), TrainError> {
        let net = self.net.take().expect("the model is always put back");
        self.net = Some(self.ddp.end_round(net)?);
        Ok(())
    }

    /// Saves, once per step.
    fn save(&mut self, sampler: &SamplerState) -> Result<(), TrainError> {
        if self.last_saved == Some(self.step) {
            return Ok(());
        }
        self.last_saved = Some(self.step);
        let best_step = self.progress.best.step();
        let save =
            |checkpoints: &mut Checkpoints, ddp: &Ddp, checkpoint: Checkpoint<'_, T::Model>| {
                checkpoints.save(ddp, checkpoint.best_step(best_step))
            };
        self.save_by(save, sampler)
    }

    fn save_by(
        &mut self,
        save: impl FnOnce(
            &mut Checkpoints,
            &Ddp,
            Checkpoint<'_, T::Model>,
        ) -> Result<(), CheckpointError>,
        sampler: &SamplerState,
    ) -> Result<(), TrainError> {
        let start = Instant::now();
        self.end_round()?;
        // A run resumed from here then has the records of all earlier steps.
        if let Some(metrics) = &mut self.metrics {
            metrics.hand_over_lines()?;
        }
        let checkpoint = checkpoint(&self.net, &self.optimizer, &self.progress, sampler);
        save(&mut self.checkpoints, &self.ddp, checkpoint)?;
        self.observer.did(Kind::Save, start, Instant::now());
        Ok(())
    }

    fn flush_metrics(&mut self) -> Result<(), TrainError> {
        match &mut self.metrics {
            Some(metrics) => metrics.flush(),
            None => Ok(()),
        }
    }

    /// The hash of the weights at the end, which all ranks have.
    fn agreed_hash(&mut self) -> Result<String, TrainError> {
        self.checkpoints.wait()?;
        self.ddp.synchronize()?;
        let net = self.net.as_ref().expect("the model is always put back");
        let hash = self.ddp.sha256(net)?;
        let hashes = all_gather(&mut self.ddp, &self.group, hash.as_bytes())?;
        self.follow()?;
        if let Some(ranks) = odd_ranks(&hashes) {
            let started = ranks.iter().map(|rank| self.group.started_rank(*rank));
            let started: Vec<usize> = started.collect();
            let first = started.first().copied();
            self.group.slot().set_differs(self.step, first);
            return Err(TrainError::Ended(DdpError::Diverged {
                step: self.step,
                what: "the model".into(),
                since: self.ddp.agreed_step().unwrap_or(0),
                culprit: ranks.first().copied(),
                ranks: started,
            }));
        }
        Ok(hash)
    }

    fn finish(&mut self, hash: &str, position: &SamplerState) -> Result<End, TrainError> {
        self.close_window()?;
        let totals = self
            .observer
            .totals(&mut self.ddp, &self.group, &self.device)?;
        self.follow()?;
        let usage = self.observer.usage();
        let (best, monitor) = (&self.progress.best, &*self.config.monitor);
        let stops_early = self.stops_early();
        let why = stops_early.then(|| best.reason(self.step, monitor));
        let results = why.into_iter().chain(best.render());
        let mut summary: String = results.map(|line| line + "\n").collect();
        let confusion = confused(std::mem::take(&mut self.confusion));
        let classes = match confusion.is_empty() {
            true => Vec::new(),
            false => figures(self.task.classes(), &confusion),
        };
        summary += &report::classes(&classes, &confusion);
        summary += report::summary(usage, &totals).trim_end();
        for straggler in self.ddp.stragglers() {
            summary.push_str(&format!("\n{straggler}"));
        }
        summary.push_str(&format!("\nweights sha256: {hash}"));
        let report = self.stages.as_deref();
        let report = report.map(|stages| PipelineReport::gather(stages, self.config, &self.group));
        let report = report.transpose()?;
        if let Some(report) = &report {
            summary.push_str(&format!("\n{}", report.render()));
        }
        let mut record = serde_json::json!({
            "kind": "end", "step": self.step, "weights_sha256": hash, "usage": usage, "ranks": totals,
        });
        if let Some(best) = best.record(monitor) {
            record["best"] = best;
            record["stopped_early"] = stops_early.into();
        }
        if (1..=CLASSES_MAX).contains(&classes.len()) {
            record["classes"] = serde_json::to_value(classes).expect("plain data encodes");
            record["confusion"] = serde_json::to_value(confusion).expect("plain data encodes");
        }
        if !self.ddp.stragglers().is_empty() {
            let stragglers = serde_json::to_value(self.ddp.stragglers());
            record["stragglers"] = stragglers.expect("plain data encodes");
        }
        if let Some(report) = report {
            record["pipeline"] = serde_json::to_value(report).expect("plain data encodes");
        }
        if let Some(metrics) = &mut self.metrics {
            metrics.write(&record)?;
        }
        let mut is_told = false;
        // Until the rank that was rank 0 while it told the result still is, so that the result cannot be lost with it.
        while !is_told {
            if std::mem::take(&mut self.has_to_save) {
                self.last_saved = None;
                self.save(position)?;
                self.checkpoints.wait()?;
            }
            self.flush_metrics()?;
            is_told = self.group.rank() == 0;
            self.console.finish();
            self.console.print(&summary);
            self.console.emit(&record);
            if self.config.recovery != Recovery::Live {
                break;
            }
            // Before the others end: they would have to go on if this rank were lost while it saves.
            let saved = self.checkpoints.wait();
            let told = all_gather(&mut self.ddp, &self.group, &[u8::from(is_told)])?;
            self.follow()?;
            is_told = told[0] == [1];
            saved?;
        }
        Ok(End::Finished)
    }
}

#[cfg(test)]
mod tests;
