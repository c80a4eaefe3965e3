//! The cost of one layout. Pure.

use paceline_split::pipeline::{Act, Action, PipelineSize, cut, in_flight, simulate};
use serde::Serialize;

use super::{Cluster, Layout, Link, MOMENTS, ModelCosts, PartCosts, VALUE_BYTES, Workload};

/// Gradient buckets that hold memory at once at stage 2 of ZeRO: two on their way and one being filled.
const POOLED_BUCKETS: f64 = 3.0;
/// Blocks whose weights are gathered at once at stage 3: the one that computes, and the next.
const GATHERED_BLOCKS: f64 = 2.0;
/// All-reduces of a layer that is cut into parts: two in the forward pass and two in the backward pass.
const REDUCTIONS_OF_PARTS: f64 = 4.0;
/// Micro-batches for each stage of a pipeline.
const MICRO_BATCHES: usize = 4;

/// Memory of the rank that needs most, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Memory {
    /// Weights, and gathered ones.
    pub weights: f64,
    /// Averaged gradients on their way to the optimizer.
    pub gradients: f64,
    /// The optimizer's state.
    pub optimizer: f64,
    /// Values that wait for the backward pass, and temporary ones.
    pub activations: f64,
    /// Buckets that gradients are reduced in.
    pub buckets: f64,
    /// The program, its data, and temporary values of the optimizer's step.
    pub other: f64,
    /// The most that is there at once: activations and averaged gradients take turns.
    pub peak: f64,
    /// Pages of other ranks' buckets that this rank maps. The system counts them as resident in each process, but they are no
    /// memory of their own.
    pub mapped: f64,
}

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

/// What a layout costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Cost {
    /// Memory of a rank.
    pub memory: Memory,
    /// Bytes that a rank sends in a step.
    pub wire: f64,
    /// Time of a step.
    pub seconds: Seconds,
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
        let stages = self.stages(model)?;
        let passes = Passes::new(self, model, work);
        let costs = stages.iter().enumerate().map(|(at, stage)| {
            let flight = passes.in_flight(at);
            self.memory(model, cluster, work, *stage, flight, &passes)
        });
        let memory = costs.max_by(|a, b| a.peak.total_cmp(&b.peak));
        let memory = memory.ok_or("there are no stages")?;
        let held = stages
            .iter()
            .map(|stage| stage.part.parameters)
            .fold(0.0, f64::max);
        let gradients = held * VALUE_BYTES;

        let dealt = match self.zero {
            0 => 1.0,
            _ => self.dp as f64,
        };
        let slowest = |figure: fn(&PartCosts) -> f64| {
            stages
                .iter()
                .map(|stage| figure(&stage.part))
                .fold(0.0, f64::max)
        };
        let optimizer = slowest(|part| part.optimizer) / dealt + slowest(|part| part.other);
        let busy = slowest(|part| part.forward + part.backward) * passes.scale * passes.count
            + if self.recompute {
                stages.iter().map(|stage| stage.again).fold(0.0, f64::max)
                    * passes.scale
                    * passes.count
            } else {
                0.0
            };
        let piped = self.piped(cluster, &stages, &passes)?;

        let (dp_seconds, dp_bytes) = self.over_replicas(cluster, gradients, &passes);
        let (tp_seconds, tp_bytes) = self.over_parts(model, cluster, &stages, &passes);
        let pp_bytes = match self.pp {
            1 => 0.0,
            _ => 2.0 * model.boundary * passes.scale * passes.count,
        };
        // Gradients travel while the backward pass runs, unless both need the same cores.
        let hidden = match cluster.shares_cores {
            true => 0.0,
            false => dp_seconds.min(slowest(|part| part.backward) * passes.scale),
        };
        let communication = dp_seconds - hidden + tp_seconds;
        let seconds = Seconds {
            compute: busy,
            bubble: (piped - busy).max(0.0),
            communication,
            optimizer,
            step: piped.max(busy) + communication + optimizer,
        };
        Ok(Cost {
            memory,
            wire: dp_bytes + tp_bytes + pp_bytes,
            seconds,
        })
    }

    fn check(&self, model: &ModelCosts, work: &Workload) -> Result<(), String> {
        let Self {
            dp, pp, tp, zero, ..
        } = *self;
        if work.global_batch < dp {
            return Err(format!(
                "{dp} replicas for a global batch of {}",
                work.global_batch
            ));
        }
        if pp > model.layers + 1 {
            return Err(format!("{pp} stages for {} blocks", model.layers + 1));
        }
        if tp > 1 && (model.heads == 0 || !model.heads.is_multiple_of(tp)) {
            return Err(format!("{tp} parts do not divide {} heads", model.heads));
        }
        if zero > 0 && dp == 1 {
            return Err("one replica has nothing to deal out".into());
        }
        if zero == 3 && (model.layers == 0 || !self.recompute) {
            return Err("stage 3 of ZeRO computes blocks again".into());
        }
        if self.recompute && model.layers == 0 {
            return Err("there are no blocks to compute again".into());
        }
        Ok(())
    }

    /// The stages of a pipeline, or the whole model, as each rank has them.
    fn stages(&self, model: &ModelCosts) -> Result<Vec<Stage>, String> {
        let layer = model.layer;
        // The head of a language model takes the time of what is outside of layers, and the embedding has its weights.
        let mut blocks = vec![Stage::default(); model.layers + 1];
        for block in &mut blocks[1..] {
            block.part = layer;
            block.again = layer.forward;
            block.layers = 1.0;
        }
        let last = model.layers;
        let PartCosts {
            parameters,
            optimizer,
            other,
            ..
        } = model.outer;
        blocks[0].part.add(&PartCosts {
            parameters,
            optimizer,
            other,
            ..PartCosts::default()
        });
        blocks[last].part.add(&PartCosts {
            parameters: 0.0,
            optimizer: 0.0,
            other: 0.0,
            ..model.outer
        });
        let seconds: Vec<f64> = blocks
            .iter()
            .map(|block| block.part.forward + block.part.backward)
            .collect();
        let runs = cut(&seconds, self.pp).map_err(|error| error.to_string())?;
        let count = runs.len();
        let parts = self.tp as f64;
        let stages = runs.into_iter().enumerate().map(|(at, run)| {
            let mut stage = Stage::default();
            blocks[run].iter().for_each(|block| stage.add(block));
            if at + 1 == count && count > 1 {
                // The head has a copy of the tied embedding.
                stage.part.parameters += parameters;
            }
            stage.part.parameters /= parts;
            stage.part.forward /= parts;
            stage.part.backward /= parts;
            stage.part.optimizer /= parts;
            stage.part.other /= parts;
            stage.again /= parts;
            stage
        });
        Ok(stages.collect())
    }

    fn memory(
        &self,
        model: &ModelCosts,
        cluster: &Cluster,
        work: &Workload,
        stage: Stage,
        flight: f64,
        passes: &Passes,
    ) -> Memory {
        let bytes = stage.part.parameters * VALUE_BYTES;
        let replicas = self.dp as f64;
        let share = |from: u8| {
            if self.zero >= from {
                bytes / replicas
            } else {
                bytes
            }
        };
        let largest =
            model.layer.parameters.max(model.outer.parameters) * VALUE_BYTES / self.tp as f64;
        let gathered = match self.zero {
            3 => (GATHERED_BLOCKS * largest).min(bytes),
            _ => 0.0,
        };
        let weights = share(3) + gathered;
        let buckets = match self.zero {
            0 | 1 => bytes * passes.stack,
            2 => match passes.stack > 1.0 {
                true => bytes * passes.stack,
                false => bytes.min(POOLED_BUCKETS * work.bucket),
            },
            _ => gathered,
        };
        let optimizer = MOMENTS * share(1);
        let gradients = share(1);
        // Boundaries are whole in every part; what is inside a layer is dealt out.
        let boundary = model.boundary * passes.scale;
        let in_parts = |activations: f64, layers: f64| {
            let whole = (2.0 * boundary * layers).min(activations);
            whole + (activations - whole) / self.tp as f64
        };
        let layer = model.layer.activations * passes.scale;
        let all = stage.part.activations * passes.scale;
        let outer = (all - layer * stage.layers).max(0.0);
        let activations = match self.recompute && stage.layers > 0.0 {
            false => flight * in_parts(all, stage.layers),
            true => {
                flight * boundary * stage.layers
                    + in_parts(layer, 1.0)
                    + flight * outer / self.tp as f64
            }
        };
        // Two buckets of weights arrive before they replace the old ones. The allocator keeps this memory.
        let (arriving, slices) = match self.zero {
            1 | 2 => (bytes.min(2.0 * work.bucket), 2.0 * bytes / replicas),
            _ => (0.0, 0.0),
        };
        let extra = (model.step_extra / self.tp as f64).max(arriving + slices);
        let local = self.replicas_per_node(cluster);
        let pass = weights + buckets + optimizer + activations + arriving;
        let end = weights + buckets + optimizer + gradients + extra;
        Memory {
            weights,
            gradients,
            optimizer,
            activations,
            buckets,
            other: model.rest + extra,
            peak: model.rest + pass.max(end),
            mapped: 2.0 * (local - 1.0) / local * buckets / passes.stack,
        }
    }

    /// Seconds of the passes of a pipeline, with its bubbles.
    fn piped(&self, cluster: &Cluster, stages: &[Stage], passes: &Passes) -> Result<f64, String> {
        let again = |stage: &Stage| if self.recompute { stage.again } else { 0.0 };
        if self.pp == 1 {
            let pass = stages[0].part.forward + stages[0].part.backward + again(&stages[0]);
            return Ok(pass * passes.scale * passes.count);
        }
        let link = match self.tp * self.pp <= cluster.ranks_per_node {
            true => cluster.within,
            false => cluster.between,
        };
        let micro = passes.size.micro_batches as f64;
        let message = link.latency + passes.boundary / micro / link.bandwidth;
        let share = passes.scale / micro;
        let cost = |action: &Action| {
            let stage = &stages[action.stage];
            let backward = stage.part.backward + again(stage);
            share
                * match action.act {
                    Act::Forward => stage.part.forward,
                    Act::Backward => backward,
                    _ => backward / 2.0,
                }
        };
        let plan = passes
            .size
            .plan(self.schedule)
            .map_err(|error| error.to_string())?;
        let trace = simulate(&plan, cost, message).map_err(|error| error.to_string())?;
        Ok(trace.end() * passes.count)
    }

    fn replicas_per_node(&self, cluster: &Cluster) -> f64 {
        let ranks = cluster.ranks_per_node / (self.tp * self.pp);
        ranks.clamp(1, self.dp) as f64
    }

    /// Seconds and bytes sent of the gradients of one step.
    fn over_replicas(&self, cluster: &Cluster, bytes: f64, passes: &Passes) -> (f64, f64) {
        let replicas = self.dp as f64;
        if self.dp == 1 {
            return (0.0, 0.0);
        }
        let here = self.replicas_per_node(cluster);
        let far = (replicas / here).ceil();
        let once =
            cluster.within.all_reduce(here, bytes) + cluster.between.all_reduce(far, bytes / here);
        let sent = 2.0 * (replicas - 1.0) / replicas * bytes;
        // Stage 3 gathers the weights before each pass and again in it, and scatters its gradients: three halves for each.
        let times = match self.zero {
            3 => 1.5 * passes.count,
            _ => 1.0,
        };
        (once * times, sent * times)
    }

    /// The same of the all-reduces inside layers that are cut into parts.
    fn over_parts(
        &self,
        model: &ModelCosts,
        cluster: &Cluster,
        stages: &[Stage],
        passes: &Passes,
    ) -> (f64, f64) {
        let parts = self.tp as f64;
        if self.tp == 1 {
            return (0.0, 0.0);
        }
        let link: Link = match self.tp <= cluster.ranks_per_node {
            true => cluster.within,
            false => cluster.between,
        };
        let bytes = model.boundary * passes.scale;
        let layers = stages.iter().map(|stage| stage.layers).fold(0.0, f64::max);
        let again = if self.recompute { 1.5 } else { 1.0 };
        let times = REDUCTIONS_OF_PARTS * again * layers * passes.count;
        (
            times * link.all_reduce(parts, bytes),
            times * 2.0 * (parts - 1.0) / parts * bytes,
        )
    }
}

/// A part of the model that one rank has.
#[derive(Clone, Copy, Debug, Default)]
struct Stage {
    part: PartCosts,
    /// Seconds to compute its blocks again.
    again: f64,
    layers: f64,
}

impl Stage {
    fn add(&mut self, other: &Self) {
        self.part.add(&other.part);
        self.again += other.again;
        self.layers += other.layers;
    }
}

impl PartCosts {
    fn add(&mut self, other: &Self) {
        self.parameters += other.parameters;
        self.forward += other.forward;
        self.backward += other.backward;
        self.activations += other.activations;
        self.optimizer += other.optimizer;
        self.other += other.other;
    }
}

/// The passes of a rank in a step.
struct Passes {
    /// How many.
    count: f64,
    /// Samples of one of them, as a share of those measured.
    scale: f64,
    /// Blocks of memory on a bucket's stack.
    stack: f64,
    size: PipelineSize,
    /// For each stage, the passes that wait for their backward pass, as a share of one.
    flights: Vec<f64>,
    /// Bytes between two stages in one pass.
    boundary: f64,
}

impl Passes {
    fn new(layout: &Layout, model: &ModelCosts, work: &Workload) -> Self {
        let shards = work.shards.max(layout.dp);
        let own = shards.div_ceil(layout.dp);
        let samples = work.global_batch as f64 / (shards * work.accumulate) as f64;
        let scale = samples / model.samples.max(1.0);
        let micro_batches = (MICRO_BATCHES * layout.pp).min(samples as usize).max(1);
        let size = PipelineSize {
            ranks: layout.pp,
            micro_batches,
            chunks: 1,
        };
        let flights = match size.plan(layout.schedule) {
            Ok(plan) if layout.pp > 1 => plan
                .iter()
                .map(|actions| in_flight(actions) as f64 / micro_batches as f64)
                .collect(),
            _ => vec![1.0; layout.pp],
        };
        Self {
            count: (own * work.accumulate) as f64,
            scale,
            stack: if own == 1 {
                1.0
            } else {
                1.0 + (own as f64).log2().floor()
            },
            size,
            flights,
            boundary: model.boundary * scale,
        }
    }

    fn in_flight(&self, stage: usize) -> f64 {
        self.flights.get(stage).copied().unwrap_or(1.0)
    }
}
