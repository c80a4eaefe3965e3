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
    /// Bytes that the rank which sends most sends in a step.
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

        let link = cluster.link(self.tp);
        let of_ranks = ranks.iter().enumerate().map(|(rank, stage)| {
            let blocks = way.layer.parameters * stage.layers;
            let bytes = [stage.part.parameters - blocks, blocks].map(|values| values * VALUE_BYTES);
            let (over_replicas, sent) = self.over_replicas(cluster, work, bytes, passes.count());
            let size = [self.tp as f64, stage.layers, passes.samples];
            let has_ends = [rank == 0, stage.has_head];
            let of_pass = (model.shape).between_parts(link, size, self.recompute, has_ends);
            let [over_parts, to_parts] = of_pass.map(|figure| figure * passes.count());
            let between_stages = self.between_stages(model, rank, &stages, &passes);
            [over_replicas, over_parts, sent + to_parts + between_stages]
        });
        let most = |all: [f64; 3], rank: [f64; 3]| std::array::from_fn(|at| all[at].max(rank[at]));
        let [over_replicas, over_parts, wire] = of_ranks.fold([0.0; 3], most);
        let over_stages = self.over_stages(cluster, model, &stages, &passes);
        // Gradients travel while the backward pass runs, unless both need the same cores.
        let hidden = match cluster.shares_cores {
            true => 0.0,
            false => over_replicas.min(slowest(|part| part.backward) * passes.samples),
        };
        let communication = over_replicas - hidden + over_parts + over_stages;
        Ok(Cost {
            memory: memory.ok_or("there are no stages")?,
            wire,
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

    /// Seconds and bytes sent of the gradients of one step, and of the weights that ZeRO gathers. The bytes of either in f32 are those
    /// outside of blocks and in them.
    fn over_replicas(
        &self,
        cluster: &Cluster,
        work: &Workload,
        [outside, blocks]: [f64; 2],
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
        let (of_gradients, of_outside, of_blocks) = match self.zero {
            0 => (1.0, 0.0, 0.0),
            1 | 2 => (0.5, 0.5, 0.5),
            _ => (0.5, 0.5, passes),
        };
        let gradients = match work.halves_gradients {
            true => (outside + blocks) / 2.0,
            false => outside + blocks,
        };
        let all = |cost: &dyn Fn(f64) -> f64| {
            of_gradients * cost(gradients) + of_outside * cost(outside) + of_blocks * cost(blocks)
        };
        (all(&all_reduce), all(&sent))
    }

    /// Seconds that a pipeline waits for a tied matrix: its value leaves the first stage once in a step, and its gradient comes back in
    /// every pass.
    fn over_stages(
        &self,
        cluster: &Cluster,
        model: &ModelCosts,
        stages: &[Stage],
        passes: &Passes,
    ) -> f64 {
        if self.pp == 1 {
            return 0.0;
        }
        let link = cluster.link(self.tp * self.pp);
        (passes.count() + 1.0) * link.message(tied_bytes(model, stages))
    }

    /// Bytes that a rank sends to other stages in a step.
    fn between_stages(
        &self,
        model: &ModelCosts,
        rank: usize,
        stages: &[Stage],
        passes: &Passes,
    ) -> f64 {
        let boundary = model.shape.boundary_bytes() * passes.samples;
        let sent = |at: usize| {
            // Outputs to the next stage, gradients to the one before.
            let neighbours = usize::from(at > 0) + usize::from(at + 1 < stages.len());
            let own = &stages[at..=at];
            let of_pass = boundary * neighbours as f64 + tied_bytes(model, own);
            let values = match at {
                0 => tied_bytes(model, stages),
                _ => 0.0,
            };
            of_pass * passes.count() + values
        };
        passes.size.stages_of(rank).map(sent).sum()
    }
}

/// Bytes of what these stages read of others' parameters, on their way.
fn tied_bytes(model: &ModelCosts, stages: &[Stage]) -> f64 {
    let values: f64 = stages.iter().map(|stage| stage.tied).sum();
    values * model.shape.boundary_value_bytes as f64
}
