//! What can be wrong with a pipeline.

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
            Self::Empty(_) | Self::Stuck { .. } => None,
        }
    }
}
