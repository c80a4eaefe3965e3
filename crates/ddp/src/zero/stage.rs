//! `ZeroStage`: the state that a sharded optimizer deals to the ranks.

use std::fmt;
use std::str::FromStr;

/// The state that a [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer) deals to the ranks.
///
/// *Numerics*: the same bits at every stage. *Cost*: the bytes of an all-reduce per step at every stage.
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
    /// `parameters / world` elements and three buckets. A rank with several shards adds them up in the buckets, so all
    /// buckets keep their memory until its last shard. A parameter that a step does not use keeps later buckets waiting until
    /// the backward pass ends.
    Gradients,
}

impl ZeroStage {
    const ALL: [Self; 2] = [Self::Optimizer, Self::Gradients];

    pub(crate) fn shards_gradients(self) -> bool {
        self == Self::Gradients
    }
}

impl fmt::Display for ZeroStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Optimizer => "1",
            Self::Gradients => "2",
        })
    }
}

/// A text that is no [`ZeroStage`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("ZeRO stage: expected 1 or 2, got {0:?}")]
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
            "ZeRO stage: expected 1 or 2, got \"zero\""
        );
    }
}
