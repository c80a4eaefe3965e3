//! `ZeroStage`: the state that a sharded optimizer deals to the ranks.

use std::fmt;
use std::str::FromStr;

/// The state that a [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer) deals to the ranks.
///
/// *Numerics*: the same bits at every stage. *Cost*: the bytes of an all-reduce per step at stages 1 and 2.
///
/// *Source*: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ZeroStage {
    /// Stage 1: the optimizer's state.
    #[default]
    Optimizer,
    /// Stage 2: the gradients too. Gradient buckets take turns in a pool of memory: a bucket takes memory when its first
    /// gradient arrives, and gives it back during the backward pass, once this rank's slice has been copied out.
    ///
    /// *Memory*: with one shard per rank (`DdpOptions::shards` is the number of ranks), the gradients of
    /// `parameters / world` elements and two buckets. A rank with several shards adds them up in the buckets, so all
    /// buckets keep their memory until its last shard. A parameter that a step does not use keeps later buckets waiting until
    /// the backward pass ends.
    Gradients,
    /// Stage 3, PyTorch's FSDP: the trained parameters of [`Block`](paceline_nn::Block)s too. A block gathers its parameters
    /// before it runs, while the block before it computes, and drops them afterwards. In the backward pass it gathers them
    /// again, runs again, and its gradients are scattered while the pass goes on.
    ///
    /// Parameters outside of blocks, in [shared](paceline_nn::Block::shared) blocks or in several blocks, frozen ones and running
    /// statistics stay whole on every rank. A block runs at most once in a pass, and blocks run in the order of their indices.
    ///
    /// *Memory*: weights, gradients and optimizer state of `parameters / world` elements; one block's weights, the next one's
    /// on their way, and with one shard per rank the gradients of three blocks: one computed, one in its bucket, one on its
    /// way. *Cost*: two gathers of the weights per pass on top of the reduce-scatter, 1.5 times the bytes of an all-reduce with
    /// one pass per step; the blocks' forward passes twice.
    Parameters,
}

impl ZeroStage {
    const ALL: [Self; 3] = [Self::Optimizer, Self::Gradients, Self::Parameters];

    pub(crate) fn shards_gradients(self) -> bool {
        self != Self::Optimizer
    }

    pub(crate) fn shards_parameters(self) -> bool {
        self == Self::Parameters
    }
}

impl fmt::Display for ZeroStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Optimizer => "1",
            Self::Gradients => "2",
            Self::Parameters => "3",
        })
    }
}

/// A text that is no [`ZeroStage`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("ZeRO stage: expected 1, 2 or 3, got {0:?}")]
pub struct ZeroStageParseError(String);

impl FromStr for ZeroStage {
    type Err = ZeroStageParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut stages = Self::ALL.into_iter();
        let stage = stages.find(|stage| stage.to_string() == text);
        stage.ok_or_else(|| ZeroStageParseError(text.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_written_as_numbers() {
        for stage in ZeroStage::ALL {
            assert_eq!(stage.to_string().parse(), Ok(stage));
        }
        let error = "zero".parse::<ZeroStage>().expect_err("not a number");
        assert_eq!(
            error.to_string(),
            "ZeRO stage: expected 1, 2 or 3, got \"zero\""
        );
    }
}
