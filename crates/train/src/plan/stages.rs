//! The stages of a layout, and the passes that they make in a step. Pure.

use paceline_split::pipeline::{Action, PipelineSize, cut, in_flight};

use super::{Layout, ModelCosts, PartCosts, Shape, Way, Workload};

/// Micro-batches for each stage of a pipeline that keep its ranks waiting for little of a step.
pub(crate) const MICRO_BATCHES_PER_STAGE: usize = 4;

/// A part of the model that one rank has.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stage {
    pub(super) part: PartCosts,
    pub(super) layers: f64,
    /// Whether it makes the scores.
    pub(super) has_head: bool,
    /// Values that belong to another stage and are read here too.
    pub(super) tied: f64,
}

impl Stage {
    fn add(&mut self, other: &Self) {
        self.part.add(&other.part);
        self.layers += other.layers;
        self.has_head |= other.has_head;
        self.tied += other.tied;
    }

    /// All stages of a rank.
    pub(super) fn of_rank(size: &PipelineSize, rank: usize, stages: &[Self]) -> Self {
        let mut all = Self::default();
        size.stages_of(rank)
            .for_each(|stage| all.add(&stages[stage]));
        all
    }
}

impl PartCosts {
    fn add(&mut self, other: &Self) {
        self.parameters += other.parameters;
        self.forward += other.forward;
        self.backward += other.backward;
        self.kept += other.kept;
        self.optimizer += other.optimizer;
        self.other += other.other;
    }
}

/// The blocks of a model as a pipeline cuts them: the embedding, the layers, and the head. The head takes the time of what is
/// outside of the layers, and the embedding has its weights.
fn blocks(shape: &Shape, way: &Way) -> Vec<Stage> {
    let PartCosts {
        parameters,
        optimizer,
        other,
        ..
    } = way.outer;
    let embedding = PartCosts {
        parameters,
        optimizer,
        other,
        ..PartCosts::default()
    };
    let head = PartCosts {
        parameters: 0.0,
        optimizer: 0.0,
        other: 0.0,
        ..way.outer
    };
    let block = |part| Stage {
        part,
        ..Stage::default()
    };
    let layer = Stage {
        layers: 1.0,
        ..block(way.layer)
    };
    let mut blocks = vec![block(embedding)];
    blocks.extend(std::iter::repeat_n(layer, shape.layers));
    blocks.push(Stage {
        has_head: true,
        ..block(head)
    });
    blocks
}

/// The first block of each stage but the first, and the stages.
pub(super) fn stages(
    layout: &Layout,
    model: &ModelCosts,
    way: &Way,
) -> Result<(Vec<usize>, Vec<Stage>), String> {
    let blocks = blocks(&model.shape, way);
    let seconds = blocks
        .iter()
        .map(|block| block.part.forward + block.part.backward);
    let runs = cut(&seconds.collect::<Vec<_>>(), layout.pp * layout.chunks());
    let runs = runs.map_err(|error| error.to_string())?;
    let cuts = runs.iter().skip(1).map(|run| run.start).collect();
    let stages = runs.iter().map(|run| {
        let mut stage = Stage::default();
        blocks[run.clone()]
            .iter()
            .for_each(|block| stage.add(block));
        match (layout.pp > 1, stage.has_head) {
            (true, true) => stage.tied = (model.shape.tied / way.tp) as f64,
            // The output is held until its gradient arrives.
            (true, false) => stage.part.kept += model.shape.boundary_bytes(),
            (false, _) => {}
        }
        stage
    });
    Ok((cuts, stages.collect()))
}

impl Layout {
    /// Samples of a pass, rounded up.
    #[must_use]
    pub fn samples(&self, work: &Workload) -> usize {
        let Batches { shards, accumulate } = Batches::of(self, work);
        work.global_batch.div_ceil(shards * accumulate).max(1)
    }
}

/// How a step's samples are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Batches {
    pub(super) shards: usize,
    /// Micro-batches of a shard.
    pub(super) accumulate: usize,
}

impl Batches {
    fn of(layout: &Layout, work: &Workload) -> Self {
        let shards = work.shards.unwrap_or(layout.dp).max(layout.dp);
        let of_shard = work.global_batch / shards;
        let accumulate = match layout.pp > 1 && work.accumulate == 1 {
            true => (MICRO_BATCHES_PER_STAGE * layout.pp).min(of_shard).max(1),
            false => work.accumulate,
        };
        Self { shards, accumulate }
    }
}

/// The passes of a rank in a step.
pub(super) struct Passes {
    pub(super) batches: Batches,
    /// Shards of a rank.
    pub(super) own: usize,
    /// Samples of a pass.
    pub(super) samples: f64,
    /// Blocks of memory on a bucket's stack.
    pub(super) stack: f64,
    pub(super) size: PipelineSize,
    /// What each rank of a pipeline does.
    pub(super) plan: Vec<Vec<Action>>,
}

impl Passes {
    /// *Errors*: a schedule that cannot deal with the micro-batches.
    pub(super) fn new(layout: &Layout, work: &Workload) -> Result<Self, String> {
        let batches = Batches::of(layout, work);
        let Batches { shards, accumulate } = batches;
        let own = shards.div_ceil(layout.dp);
        let size = PipelineSize {
            ranks: layout.pp,
            micro_batches: accumulate,
            chunks: layout.chunks(),
        };
        let plan = match layout.pp {
            1 => Ok(Vec::new()),
            _ => size.plan(layout.schedule),
        };
        Ok(Self {
            batches,
            own,
            samples: work.global_batch as f64 / (shards * accumulate) as f64,
            stack: match own {
                1 => 1.0,
                _ => 1.0 + (own as f64).log2().floor(),
            },
            size,
            plan: plan.map_err(|error| error.to_string())?,
        })
    }

    /// How many.
    pub(super) fn count(&self) -> f64 {
        (self.own * self.batches.accumulate) as f64
    }

    /// Bytes for a sample that wait for their backward pass on a rank, with the stage that runs.
    pub(super) fn kept(&self, rank: usize, stages: &[Stage]) -> f64 {
        let of = |stage: &Stage| stage.part.kept;
        match self.plan.get(rank) {
            Some(actions) => in_flight(actions, |action| of(&stages[action.stage])),
            None => stages.iter().map(of).sum(),
        }
    }
}
