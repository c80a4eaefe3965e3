//! What can be wrong with a pipeline.

use paceline_collective::Error;
use paceline_ddp::DdpError;

use super::schedule::{Action, PipelineSize, Schedule};

/// A pipeline that cannot be built or run.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PipelineError {
    /// A size is 0.
    #[error("pipeline: {} ranks, {} micro-batches, {} stages for each rank: expected at least 1 of each", .0.ranks, .0.micro_batches, .0.chunks)]
    Empty(PipelineSize),
    /// More stages than blocks.
    #[error("pipeline: {stages} stages for {blocks} blocks")]
    TooManyStages {
        /// Stages asked for.
        stages: usize,
        /// Blocks of the model.
        blocks: usize,
    },
    /// Several stages for each rank in a schedule that has one.
    #[error("pipeline: schedule {schedule} has 1 stage for each rank, got {chunks}")]
    Chunks {
        /// The schedule.
        schedule: Schedule,
        /// Stages for each rank.
        chunks: usize,
    },
    /// Micro-batches that the interleaved schedule cannot deal to the ranks.
    #[error(
        "pipeline: schedule interleaved needs a number of micro-batches that is a multiple of its {ranks} ranks, got {micro_batches}"
    )]
    Uneven {
        /// Micro-batches.
        micro_batches: usize,
        /// Ranks of the pipeline.
        ranks: usize,
    },
    /// Ranks that do not make up whole pipelines.
    #[error("pipeline: {world} ranks do not divide into pipelines of {ranks}")]
    World {
        /// Ranks of the job.
        world: usize,
        /// Ranks of a pipeline.
        ranks: usize,
    },
    /// Cuts that do not make up the model.
    #[error("pipeline: cuts {cuts:?} of {blocks} blocks: expected {expected} ascending numbers from 1 to {}", .blocks - 1)]
    Cuts {
        /// The first block of each stage but the first.
        cuts: Vec<usize>,
        /// Blocks of the model.
        blocks: usize,
        /// Cuts that make up the stages.
        expected: usize,
    },
    /// A rank has nothing to train.
    #[error("pipeline: all parameters of the stages of the pipeline's rank {rank} are frozen")]
    Frozen {
        /// The rank, of those of a pipeline.
        rank: usize,
    },
    /// More stages or micro-batches than messages can name.
    #[error("pipeline: {stages} stages and {micro_batches} micro-batches are too many")]
    TooMany {
        /// Stages.
        stages: usize,
        /// Micro-batches.
        micro_batches: usize,
    },
    /// The input of a stage is not what it was in the first step.
    #[error("pipeline: stage {stage} expected an input of {expected}, got {got}")]
    Shape {
        /// The stage.
        stage: usize,
        /// Type and shape that were agreed.
        expected: String,
        /// Type and shape that came.
        got: String,
    },
    /// The output of a stage has a type that is not sent.
    #[error("pipeline: a stage returned {dtype}; expected F32, F16, BF16 or F64")]
    Type {
        /// Its type.
        dtype: String,
    },
    /// A block failed; the step returns its error.
    #[error("pipeline: a block failed")]
    Block,
    /// A group of the mesh could not be used.
    #[error(transparent)]
    Collective(#[from] Error),
    /// A mesh with pipelines of another size.
    #[error("pipeline: {ranks} ranks, but the mesh has {mesh} along pp")]
    Mesh {
        /// Ranks of a pipeline.
        ranks: usize,
        /// Ranks along the mesh's dimension `pp`.
        mesh: usize,
    },
    /// The model's parts are on other ranks than the mesh's.
    #[error("pipeline: the model has parts on {tp} ranks, but the mesh has {} along tp", .mesh)]
    Parts {
        /// Ranks that share the model's parts.
        tp: usize,
        /// Ranks along the mesh's dimension `tp`.
        mesh: usize,
    },
    /// A stage's replicas or a message to another stage failed.
    #[error(transparent)]
    Ddp(#[from] DdpError),
    /// A plan in which ranks wait for each other.
    #[error("pipeline: rank {rank} waits for ever in {:?} of stage {}, micro-batch {}", .action.act, .action.stage, .action.micro_batch)]
    Stuck {
        /// The first rank that waits.
        rank: usize,
        /// What it waits for.
        action: Action,
    },
}

impl PipelineError {
    /// The job's number of the rank to blame, if known.
    pub fn culprit(&self) -> Option<usize> {
        match self {
            Self::Collective(error) => error.culprit(),
            Self::Ddp(DdpError::Along { rank, .. }) => *rank,
            // The numbers of its ranks are those of a stage's group.
            _ => None,
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::TooManyStages { blocks, .. } => Some(format!("use at most {blocks} stages")),
            Self::Chunks { .. } => {
                Some("choose the schedule interleaved for several stages on each rank".into())
            }
            Self::Uneven {
                micro_batches,
                ranks,
            } => {
                let up = micro_batches.next_multiple_of(*ranks);
                Some(format!(
                    "use {up} micro-batches, or schedule 1f1b, which takes any number"
                ))
            }
            Self::World { world, ranks } => {
                let fits: Vec<_> = (1..=*world)
                    .filter(|size| world.is_multiple_of(*size))
                    .map(|size| size.to_string())
                    .collect();
                Some(format!(
                    "use {} stages, or a number of ranks that is a multiple of {ranks}",
                    fits.join(", ")
                ))
            }
            Self::Frozen { rank } => Some(format!(
                "use fewer ranks, or cuts that give rank {rank} a block that is trained"
            )),
            Self::Shape { .. } => Some("give all micro-batches samples of one shape".into()),
            Self::Collective(error) => error.hint(),
            Self::Parts { .. } => {
                Some("make the model's group of the mesh, and the pipeline with `on`".into())
            }
            Self::Ddp(error) => error.hint(),
            _ => None,
        }
    }
}
