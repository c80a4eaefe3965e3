//! The cost of one layout. Pure.

use paceline_split::pipeline::{Act, Action, simulate};
use serde::Serialize;

use super::memory::{Facts, Memory};
use super::stages::{Passes, Stage, stages};
use super::{Cluster, Layout, ModelCosts, PartCosts, VALUE_BYTES, Workload};

/// Share of a layer's backward pass that the gradients of its weights take, where a schedule computes them later.
const WEIGHTS_SHARE: f64 = 0.4;

/// Seconds of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Seconds {
    /// Forward and backward passes.
    pub compute: f64,
    /// Waiting for other stages of the pipeline.
    pub bubble: f64,
    /// Waiting for other ranks' values.
    pub communication: f64,
    /// The optimizer's step, and what else a step does.
    pub optimizer: f64,
    /// All of it.
    pub step: f64,
}

/// What a layout costs, and how it cuts batch and model.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Cost {
    /// Memory of a rank.
    pub memory: Memory,
    /// Bytes that a rank sends in a step.
    pub wire: f64,
    /// Time of a step.
    pub seconds: Seconds,
    /// Shards of a step.
    pub shards: usize,
    /// Micro-batches of a shard.
    pub accumulate: usize,
    /// The first block of each stage but the first.
    pub cuts: Vec<usize>,
}

impl Layout {
    /// What it costs.
    ///
    /// *Errors*: why the layout is not possible.
    pub fn cost(
        &self,
        model: &ModelCosts,
        cluster: &Cluster,
        work: &Workload,
    ) -> Result<Cost, String> {
        self.check(model, work)?;
        let passes = Passes::new(self, work)?;
        let way = model.way(self.tp, self.recompute, passes.samples);
        let (cuts, stages) = stages(self, model, &way)?;
        let ranks: Vec<Stage> = (0..self.pp)
            .map(|rank| Stage::of_rank(&passes.size, rank, &stages))
            .collect();
        let facts = Facts {
            layout: self,
            model,
            cluster,
            work,
            way: &way,
            passes: &passes,
            stages: &stages,
        };
        let memories = ranks.iter().enumerate();
        let memories = memories.map(|(rank, stage)| facts.of_rank(rank, stage));
        let memory = memories.max_by(|a, b| a.peak.total_cmp(&b.peak));

        let slowest = |figure: fn(&PartCosts) -> f64| {
            let figures = ranks.iter().map(|stage| figure(&stage.part));
            figures.fold(0.0, f64::max)
        };
        let dealt = match self.zero {
            0 => 1.0,
            _ => self.dp as f64,
        };
        let optimizer = slowest(|part| part.optimizer + part.other) / dealt;
        let samples = passes.samples * passes.count();
        let compute = slowest(|part| part.forward + part.backward) * samples;
        let piped = self.piped(cluster, &stages, &passes, model)?;

        let gradients = slowest(|part| part.parameters) * VALUE_BYTES;
        let (over_replicas, dp_bytes) =
            self.over_replicas(cluster, work, gradients, passes.count());
        let (over_stages, pp_bytes) = self.over_stages(cluster, model, &ranks, &passes);
        let layers = ranks.iter().map(|stage| stage.layers).fold(0.0, f64::max);
        let size = [self.tp as f64, layers, passes.samples];
        let link = cluster.link(self.tp);
        let of_pass = model.shape.between_parts(link, size, self.recompute);
        let [over_parts, tp_bytes] = of_pass.map(|figure| figure * passes.count());
        // Gradients travel while the backward pass runs, unless both need the same cores.
        let hidden = match cluster.shares_cores {
            true => 0.0,
            false => over_replicas.min(slowest(|part| part.backward) * passes.samples),
        };
        let communication = over_replicas - hidden + over_parts + over_stages;
        Ok(Cost {
            memory: memory.ok_or("there are no stages")?,
            wire: dp_bytes + tp_bytes + pp_bytes,
            seconds: Seconds {
                compute,
                bubble: (piped - compute).max(0.0),
                communication,
                optimizer,
                step: piped.max(compute) + communication + optimizer,
            },
            shards: passes.batches.shards,
            accumulate: passes.batches.accumulate,
            cuts,
        })
    }

    fn check(&self, model: &ModelCosts, work: &Workload) -> Result<(), String> {
        let Self {
            dp, pp, tp, zero, ..
        } = *self;
        let (batch, layers, heads) = (work.global_batch, model.shape.layers, model.shape.heads);
        if batch < dp {
            return Err(format!("{dp} replicas for a global batch of {batch}"));
        }
        // The embedding and the head are blocks too.
        let (stages, blocks) = (pp * self.chunks(), layers + 2);
        if stages > blocks {
            return Err(format!("{stages} stages for {blocks} blocks"));
        }
        if tp > 1 && (heads == 0 || !heads.is_multiple_of(tp)) {
            return Err(format!("{tp} parts do not divide {heads} heads"));
        }
        if zero > 0 && dp == 1 {
            return Err("one replica has nothing to deal out".into());
        }
        if zero == 3 && (layers == 0 || !self.recompute) {
            return Err("stage 3 of ZeRO computes blocks again".into());
        }
        if layers == 0 && (self.recompute || pp > 1) {
            return Err("the model is no list of blocks".into());
        }
        Ok(())
    }

    /// Seconds of the passes of a pipeline, with its bubbles.
    fn piped(
        &self,
        cluster: &Cluster,
        stages: &[Stage],
        passes: &Passes,
        model: &ModelCosts,
    ) -> Result<f64, String> {
        if self.pp == 1 {
            return Ok(0.0);
        }
        let link = cluster.link(self.tp * self.pp);
        let bytes = model.shape.boundary_bytes() * passes.samples;
        // Layers that are cut into parts or gathered compute all gradients at once.
        let weights = match self.tp == 1 && self.zero < 3 {
            true => WEIGHTS_SHARE * model.way(1, false, passes.samples).layer.backward,
            false => 0.0,
        };
        let cost = |action: &Action| {
            let Stage { part, layers, .. } = &stages[action.stage];
            passes.samples
                * match action.act {
                    Act::Forward => part.forward,
                    Act::BackwardInput => part.backward - weights * layers,
                    Act::BackwardWeight => weights * layers,
                    _ => part.backward,
                }
        };
        let trace = simulate(&passes.plan, cost, link.message(bytes));
        let trace = trace.map_err(|error| error.to_string())?;
        Ok(trace.end() * passes.own as f64)
    }

    pub(super) fn replicas_per_node(&self, cluster: &Cluster) -> f64 {
        let ranks = cluster.ranks_per_node / (self.tp * self.pp);
        ranks.clamp(1, self.dp) as f64
    }

    /// Seconds and bytes sent of the gradients of one step, and of the weights that ZeRO gathers. `bytes` are those of either in f32.
    fn over_replicas(
        &self,
        cluster: &Cluster,
        work: &Workload,
        bytes: f64,
        passes: f64,
    ) -> (f64, f64) {
        let replicas = self.dp as f64;
        if self.dp == 1 {
            return (0.0, 0.0);
        }
        let here = self.replicas_per_node(cluster);
        let far = (replicas / here).ceil();
        let all_reduce = |bytes: f64| {
            cluster.within.all_reduce(here, bytes) + cluster.between.all_reduce(far, bytes / here)
        };
        let sent = |bytes: f64| 2.0 * (replicas - 1.0) / replicas * bytes;
        // In all-reduces: half of one scatters the gradients, and each gather of the weights is half of one.
        let (of_gradients, of_weights) = match self.zero {
            0 => (1.0, 0.0),
            1 | 2 => (0.5, 0.5),
            _ => (0.5, passes),
        };
        let gradients = match work.halves_gradients {
            true => bytes / 2.0,
            false => bytes,
        };
        let both =
            |cost: &dyn Fn(f64) -> f64| of_gradients * cost(gradients) + of_weights * cost(bytes);
        (both(&all_reduce), both(&sent))
    }

    /// Seconds that a pipeline waits for a tied matrix, and bytes that a rank between two stages sends.
    fn over_stages(
        &self,
        cluster: &Cluster,
        model: &ModelCosts,
        ranks: &[Stage],
        passes: &Passes,
    ) -> (f64, f64) {
        if self.pp == 1 {
            return (0.0, 0.0);
        }
        // Its value comes once in a step, and its gradient goes back in every pass.
        let tied = ranks.iter().map(|stage| stage.tied).fold(0.0, f64::max) * VALUE_BYTES;
        let times = passes.count() + 1.0;
        let link = cluster.link(self.tp * self.pp);
        let boundary = model.shape.boundary_bytes() * passes.samples;
        let chunks = passes.size.chunks as f64;
        (
            times * link.message(tied),
            2.0 * boundary * passes.count() * chunks + tied * times,
        )
    }
}
