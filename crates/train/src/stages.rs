//! `Stages`: how a task trains and evaluates in a pipeline.

use std::cell::Cell;
use std::ops::Range;
use std::time::{Duration, Instant};

use burn::tensor::{Device, Tensor};
use paceline_collective::ProcessGroup;
use paceline_ddp::{Ddp, Precision, Reduced};
use paceline_split::pipeline::{
    Act, Action, Busy, MicroBatches, Pipeline, PipelineError, Schedule, Sequential, Trace,
};
use paceline_split::tensor::TensorParallel;
use paceline_usage::{self as usage, Lane, Lanes};
use serde::Serialize;

use crate::config::TrainConfig;
use crate::cuts::{InputOf, OutputOf, SequentialTask};
use crate::error::TrainError;
use crate::task::{Compute, Part, Sums, TrainTask};
use crate::trainer::RankBatch;

/// A pipeline of a task's model.
pub(crate) trait Stages<T: TrainTask> {
    /// Runs one step on this rank's batch.
    fn step(
        &mut self,
        ddp: &mut Ddp,
        net: &T::Model,
        task: &T,
        batch: &RankBatch<T::Batch>,
        precision: Precision,
    ) -> Result<Reduced, TrainError>;

    /// Evaluates this rank's shards, each of which is a list of batches of held-out samples. The sums of each shard are on the
    /// last stage's rank, or on the first of several.
    fn evaluate(
        &mut self,
        ddp: &Ddp,
        net: &T::Model,
        task: &T,
        shards: &[Vec<Range<usize>>],
        compute: Compute<'_>,
    ) -> Result<Vec<Sums>, TrainError>;

    /// As [`Pipeline::ideal`].
    fn ideal(&self, micro_batches: usize) -> Result<Trace, PipelineError>;

    /// As [`Pipeline::busy`].
    fn busy(&self) -> Busy;

    /// As [`Pipeline::cuts`].
    fn cuts(&self) -> &[Range<usize>];

    /// As [`Pipeline::intervals`].
    fn intervals(&self) -> &[(Action, Instant, Instant)];
}

/// How much of its time each rank of a job waited in its pipeline.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PipelineReport {
    schedule: Schedule,
    /// Blocks of each stage.
    blocks: Vec<usize>,
    micro_batches: usize,
    /// If all stages took the same time, and messages none.
    ideal_idle_share: f64,
    /// By rank: the share of its steps in which it did not compute.
    idle_shares: Vec<f64>,
    /// By rank: the share of its steps in which it computed gradients of weights, if apart from those of inputs.
    weight_shares: Option<Vec<f64>>,
}

impl PipelineReport {
    /// *Blocks*: until all ranks have come.
    pub(crate) fn gather<T: TrainTask>(
        stages: &dyn Stages<T>,
        config: &TrainConfig,
        group: &ProcessGroup,
    ) -> Result<Self, TrainError> {
        let micro_batches = config.accumulate;
        let ideal_idle_share = stages.ideal(micro_batches)?.bubble();
        let busy = stages.busy();
        let blocks = stages.cuts().iter().map(ExactSizeIterator::len);
        let share = |time: Duration| {
            let share = time.as_secs_f64() / busy.total.as_secs_f64().max(f64::MIN_POSITIVE);
            share.min(1.0)
        };
        let of_all = |own: f64| {
            let mut all = vec![0.0; group.world()];
            group.all_gather(&[own], &mut all).map(|_| all)
        };
        let idle_shares = of_all(1.0 - share(busy.computed))?;
        let splits = config.schedule.puts_off_weights();
        let weight_shares = splits.then(|| of_all(share(busy.weights))).transpose()?;
        Ok(Self {
            weight_shares,
            schedule: config.schedule,
            blocks: blocks.collect(),
            micro_batches,
            ideal_idle_share,
            idle_shares,
        })
    }

    /// One line.
    pub(crate) fn render(&self) -> String {
        let percent = |share: f64| format!("{:.1} %", share * 100.0);
        let blocks: Vec<_> = self.blocks.iter().map(ToString::to_string).collect();
        let ranks = self.idle_shares.iter().enumerate();
        let ranks: Vec<_> = ranks
            .map(|(rank, idle)| format!("rank {rank} {}", percent(*idle)))
            .collect();
        let weights = self.weight_shares.iter().map(|shares| {
            let shares: Vec<_> = shares.iter().map(|share| percent(*share)).collect();
            format!("; gradients of weights {}", shares.join(", "))
        });
        let weights: String = weights.collect();
        format!(
            "pipeline  {}, stages of {} blocks, {}: idle {} at best, {}{weights}",
            self.schedule,
            blocks.join(", "),
            match self.micro_batches {
                1 => "1 micro-batch".to_owned(),
                count => format!("{count} micro-batches"),
            },
            percent(self.ideal_idle_share),
            ranks.join(", "),
        )
    }
}

/// What a rank computed: start and end in seconds, kind, and label.
type Piece = (f64, f64, usize, String);

/// The last step of all ranks as a picture, on rank 0.
///
/// *Blocks*: until all ranks have come.
pub(crate) fn picture<T: TrainTask>(
    stages: &dyn Stages<T>,
    group: &ProcessGroup,
    origin: Instant,
    subtitle: String,
) -> Result<Option<String>, TrainError> {
    let since = |at: Instant| at.saturating_duration_since(origin).as_secs_f64();
    let piece = |(action, start, end): &(Action, Instant, Instant)| -> Piece {
        let kind = match action.act {
            Act::Forward => 0,
            Act::BackwardWeight => 2,
            _ => 1,
        };
        (
            since(*start),
            since(*end),
            kind,
            action.micro_batch.to_string(),
        )
    };
    let own: Vec<Piece> = stages.intervals().iter().map(piece).collect();
    let own = serde_json::to_vec(&own).expect("numbers always encode");
    let all = group.all_gather_bytes(&own)?;
    if group.rank() != 0 {
        return Ok(None);
    }
    let all = all.iter();
    let all: Vec<Vec<Piece>> = all
        .map(|bytes| serde_json::from_slice(bytes).unwrap_or_default())
        .collect();
    let times = || all.iter().flatten();
    let first = times().map(|piece| piece.0).fold(f64::INFINITY, f64::min);
    let last = times().map(|piece| piece.1).fold(first, f64::max);
    let lane = |(rank, pieces): (usize, &Vec<Piece>)| {
        let busy: f64 = pieces.iter().map(|(start, end, ..)| end - start).sum();
        let pieces = pieces.iter().map(|(start, end, kind, label)| usage::Piece {
            start_s: start - first,
            end_s: end - first,
            kind: *kind,
            label: label.clone(),
        });
        let idle = 1.0 - (busy / (last - first).max(f64::MIN_POSITIVE)).min(1.0);
        Lane {
            name: format!("rank {rank}"),
            figure: format!("idle {:.2}%", idle * 100.0),
            pieces: pieces.collect(),
        }
    };
    let is_split = times().any(|piece| piece.2 == 2);
    let kinds: &[&str] = match is_split {
        true => &["forward", "backward: inputs", "backward: weights"],
        false => &["forward", "backward"],
    };
    let lanes = Lanes {
        title: "Pipeline".into(),
        subtitle,
        kinds: kinds.iter().map(ToString::to_string).collect(),
        lanes: all.iter().enumerate().map(lane).collect(),
    };
    Ok(Some(lanes.svg()))
}

/// The micro-batches of a shard.
struct Shard<'a, const D: usize, T: TrainTask> {
    task: &'a T,
    net: &'a T::Model,
    batches: &'a [T::Batch],
    precision: Precision,
    device: Device,
    /// A loss that no step can have.
    failed: Cell<Option<TrainError>>,
}

impl<const D: usize, T: SequentialTask<D>> MicroBatches<InputOf<T, D>, OutputOf<T, D>>
    for Shard<'_, D, T>
{
    fn count(&self) -> usize {
        self.batches.len()
    }

    fn weight(&self, micro_batch: usize) -> f32 {
        self.task.weight(&self.batches[micro_batch])
    }

    fn input(&self, micro_batch: usize) -> InputOf<T, D> {
        self.task.input(&self.batches[micro_batch], &self.device)
    }

    fn loss(&self, micro_batch: usize, output: OutputOf<T, D>) -> Tensor<1> {
        let batch = &self.batches[micro_batch];
        let compute = Compute::new(&self.device, self.precision);
        let loss = self.task.loss_of(self.net, batch, output, compute);
        let (of, said) = (self.task.name(), self.task.weight(batch));
        let mean = loss.mean.clone();
        let checked = loss.checked(of).and_then(|loss| match loss.weight {
            weight if weight == said => Ok(loss.mean),
            weight => Err(TrainError::usage(
                format!("the loss of a batch of {of} has the weight {weight}, and `SequentialTask::weight` says {said}"),
                "return the same weight from both",
            )),
        });
        checked.unwrap_or_else(|error| {
            self.failed.set(Some(error));
            // The pass goes on with one value, and then the step fails.
            mean.mean()
        })
    }
}

impl<const D: usize, T: SequentialTask<D>> Stages<T> for Pipeline<D> {
    fn step(
        &mut self,
        ddp: &mut Ddp,
        net: &T::Model,
        task: &T,
        batch: &RankBatch<T::Batch>,
        precision: Precision,
    ) -> Result<Reduced, TrainError> {
        let first = ddp.shards().start;
        Self::step(self, ddp, net, |pipeline, shard| {
            let batches = Shard::<D, T> {
                task,
                net,
                batches: &batch[shard.shard() - first],
                precision,
                device: shard.device().clone(),
                failed: Cell::new(None),
            };
            let losses = pipeline.shard(shard, &batches)?;
            batches.failed.take().map_or(Ok(()), Err)?;
            for (loss, batch) in losses.into_iter().zip(batches.batches) {
                shard.add_loss(loss * task.weight(batch));
            }
            Ok(())
        })
    }

    fn evaluate(
        &mut self,
        ddp: &Ddp,
        net: &T::Model,
        task: &T,
        shards: &[Vec<Range<usize>>],
        compute: Compute<'_>,
    ) -> Result<Vec<Sums>, TrainError> {
        let numbered = shards.iter().enumerate();
        let batches = numbered.flat_map(|(shard, batches)| batches.iter().map(move |b| (shard, b)));
        let batches: Vec<_> = batches.collect();
        let load = |at: usize| {
            let read = task.batch(Part::HeldOut, None, batches[at].1.clone());
            // Other stages wait for this one, which has no way to tell them.
            read.unwrap_or_else(|error| panic!("{error}"))
        };
        let input = |at| task.input(&load(at), compute.device);
        let mut sums: Vec<Option<Sums>> = vec![None; shards.len()];
        let mut failed = None;
        Self::evaluate(
            self,
            ddp,
            net,
            batches.len(),
            input,
            |at, output| match task.sums_of(net, &load(at), output, compute) {
                Ok(batch) => {
                    let shard = sums[batches[at].0].get_or_insert_default();
                    *shard = std::mem::take(shard).add(batch);
                }
                Err(error) => failed = Some(error),
            },
        )?;
        failed.map_or(Ok(()), Err)?;
        let is_copy = |tp: &TensorParallel| tp.group().rank() > 0;
        if net.tensor_parallel().is_some_and(is_copy) {
            return Ok(Vec::new());
        }
        // A shard without samples has sums on every rank, and they are 0.
        Ok(sums.into_iter().flatten().collect())
    }

    fn ideal(&self, micro_batches: usize) -> Result<Trace, PipelineError> {
        Self::ideal(self, micro_batches)
    }

    fn busy(&self) -> Busy {
        Self::busy(self)
    }

    fn cuts(&self) -> &[Range<usize>] {
        Self::cuts(self)
    }

    fn intervals(&self) -> &[(Action, Instant, Instant)] {
        Self::intervals(self)
    }
}
