//! `Stages`: how a task trains and evaluates in a pipeline.

use std::ops::Range;
use std::time::{Duration, Instant};

use burn::tensor::{Device, Int, Tensor};
use paceline_checkpoint::by_rank_0;
use paceline_collective::ProcessGroup;
use paceline_ddp::{Ddp, Precision, Reduced};
use paceline_split::pipeline::{Act, Action, MicroBatches, Pipeline, Schedule, cut};
use paceline_split::tensor::TensorParallel;
use paceline_usage::{self as usage, Lane, Lanes};
use serde::Serialize;

use crate::config::TrainConfig;
use crate::error::TrainError;
use crate::language::{LanguageModel, Sequences, Text};
use crate::layout::Cuts;
use crate::task::{Part, Sums, TrainTask};
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
        precision: Precision,
        device: &Device,
    ) -> Result<Vec<Sums>, TrainError>;

    /// The stages.
    fn pipeline(&self) -> &Pipeline<3>;
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
        let (pipeline, micro_batches) = (stages.pipeline(), config.accumulate);
        let ideal_idle_share = pipeline.ideal(micro_batches)?.bubble();
        let busy = pipeline.busy();
        let blocks = pipeline.cuts().iter().map(ExactSizeIterator::len);
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
    let own: Vec<Piece> = stages.pipeline().intervals().iter().map(piece).collect();
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

/// Cuts by the time of each block on rank 0, which has a whole model while it measures.
///
/// *Blocks*: until rank 0 has measured.
pub(crate) fn equal_stages<T: TrainTask>(
    config: &TrainConfig,
    (task, cuts): (&T, &dyn Cuts<T>),
    group: &ProcessGroup,
    device: &Device,
) -> Result<Vec<usize>, TrainError> {
    let stages = config
        .pipeline()
        .map_or(1, |options| options.size(1).stages());
    let cuts = by_rank_0(group, || {
        let stages = cut(&cuts.block_costs(task, config, device)?, stages)?;
        let starts = stages.iter().skip(1).map(|blocks| blocks.start);
        Ok::<_, TrainError>(starts.collect())
    });
    cuts?
}

/// A shard of a text.
struct Shard<'a, M> {
    task: &'a Text<M>,
    net: &'a M,
    batches: &'a [Sequences],
    precision: Precision,
    device: Device,
}

impl<M: LanguageModel> MicroBatches<Tensor<2, Int>, M::Output> for Shard<'_, M> {
    fn count(&self) -> usize {
        self.batches.len()
    }

    fn weight(&self, micro_batch: usize) -> f32 {
        self.batches[micro_batch].predictions() as f32
    }

    fn input(&self, micro_batch: usize) -> Tensor<2, Int> {
        self.task.input(&self.batches[micro_batch], &self.device)
    }

    fn loss(&self, micro_batch: usize, output: M::Output) -> Tensor<1> {
        let batch = &self.batches[micro_batch];
        batch.scores(self.net, output, self.precision).loss().mean
    }
}

impl<M: LanguageModel> Stages<Text<M>> for Pipeline<3> {
    fn step(
        &mut self,
        ddp: &mut Ddp,
        net: &M,
        task: &Text<M>,
        batch: &RankBatch<Sequences>,
        precision: Precision,
    ) -> Result<Reduced, TrainError> {
        let first = ddp.shards().start;
        Self::step(self, ddp, net, |pipeline, shard| {
            let batches = Shard {
                task,
                net,
                batches: &batch[shard.shard() - first],
                precision,
                device: shard.device().clone(),
            };
            for (micro_batch, loss) in pipeline.shard(shard, &batches)?.into_iter().enumerate() {
                shard.add_loss(loss * batches.weight(micro_batch));
            }
            Ok(())
        })
    }

    fn evaluate(
        &mut self,
        ddp: &Ddp,
        net: &M,
        task: &Text<M>,
        shards: &[Vec<Range<usize>>],
        precision: Precision,
        device: &Device,
    ) -> Result<Vec<Sums>, TrainError> {
        let numbered = shards.iter().enumerate();
        let batches = numbered.flat_map(|(shard, batches)| batches.iter().map(move |b| (shard, b)));
        let batches: Vec<_> = batches.collect();
        let load = |at: usize| {
            let read = task.sequences(Part::HeldOut, batches[at].1.clone());
            // Other stages wait for this one, which has no way to tell them.
            read.unwrap_or_else(|error| panic!("{error}"))
        };
        let input = |at| task.input(&load(at), device);
        let mut sums: Vec<Option<Sums>> = vec![None; shards.len()];
        let mut failed = None;
        Self::evaluate(
            self,
            ddp,
            net,
            batches.len(),
            input,
            |at, output| match load(at).scores(net, output, precision).sums() {
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

    fn pipeline(&self) -> &Pipeline<3> {
        self
    }
}
