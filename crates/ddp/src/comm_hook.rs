//! `CommHook`: how gradients travel between ranks.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How gradients travel between ranks: as they are, or compressed.
///
/// All ranks get the same bits with every hook. Only gradients are compressed: weights of the average, flags, running
/// statistics and the program's sums always travel in f32.
///
/// The hooks are named after those of PyTorch's `ddp_comm_hooks`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum CommHook {
    /// f32, as summed: 4 bytes for each element.
    #[default]
    None,
    /// Rounded to bf16, summed in f32, and rounded again: half the bytes, as with `bf16_compress_hook`.
    ///
    /// *Numerics*: a rank's sum over its own shards is rounded once, so with several shards per rank the result depends on
    /// the number of ranks.
    Bf16Compress,
    /// As [`Bf16Compress`](Self::Bf16Compress), in f16, as with `fp16_compress_hook`: three more digits.
    ///
    /// *Numerics*: sums of gradients times their weights above 65,504 become infinite.
    Fp16Compress,
}

impl fmt::Display for CommHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Bf16Compress => "bf16",
            Self::Fp16Compress => "fp16",
        })
    }
}

/// A text that is no [`CommHook`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("communication hook: expected {expected}, got {0:?}", expected = CommHook::EXPECTED)]
pub struct CommHookParseError(String);

impl CommHook {
    /// The texts that are read.
    pub const EXPECTED: &str = "none, bf16 or fp16";
}

impl FromStr for CommHook {
    type Err = CommHookParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self::None),
            "bf16" => Ok(Self::Bf16Compress),
            "fp16" => Ok(Self::Fp16Compress),
            _ => Err(CommHookParseError(text.to_string())),
        }
    }
}

impl TryFrom<String> for CommHook {
    type Error = CommHookParseError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<CommHook> for String {
    fn from(hook: CommHook) -> Self {
        hook.to_string()
    }
}
