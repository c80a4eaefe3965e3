//! `CommHook`: how gradients travel between ranks.

use std::fmt;
use std::num::NonZeroUsize;
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
    /// 8 bits for each element, in chunks of 256 with a scale each: a quarter of the bytes with one shard per rank, and more
    /// with several, because every shard is quantised by itself. Similar to `quantization_pertensor_hook`, but ranks exchange
    /// slices instead of whole buckets.
    ///
    /// *Numerics*: rounded twice, by at most 1/254 of a chunk's largest element each time. The same bits on any number of
    /// ranks.
    Int8,
    /// The largest elements of each bucket, by magnitude, of each shard: 8 bytes for each element sent. The others are kept and
    /// added to the shard's next gradients (error feedback).
    ///
    /// *Numerics*: the same bits on any number of ranks. *Memory*: two copies of the gradients for each shard of the rank.
    ///
    /// *Source*: Aji and Heafield 2017, "Sparse communication for distributed gradient descent"; Stich et al. 2018,
    /// "Sparsified SGD with memory".
    TopK {
        /// The fraction of elements that a shard sends, above 0 and at most 1.
        fraction: f64,
    },
    /// Gradients of matrices as products of two thin matrices, with error feedback, as with `powerSGD_hook`.
    ///
    /// *Numerics*: the same bits on any number of ranks. *Memory*: two copies of the gradients for each shard of the rank.
    ///
    /// *Source*: Vogels et al. 2019, "PowerSGD: practical low-rank gradient compression for distributed optimization".
    PowerSgd(PowerSgdOptions),
}

/// Options of [`CommHook::PowerSgd`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PowerSgdOptions {
    /// Columns of the two thin matrices: PyTorch's `matrix_approximation_rank`.
    pub rank: NonZeroUsize,
    /// Gradients are sent whole in steps before this one: PyTorch's `start_powerSGD_iter`. The first steps change the weights
    /// most, and compressing them costs accuracy.
    pub start_iter: u64,
}

impl Default for PowerSgdOptions {
    /// Rank 1 as in PyTorch, from step 10 on; PyTorch's 1,000 is for jobs of many more steps.
    fn default() -> Self {
        Self {
            rank: NonZeroUsize::MIN,
            start_iter: 10,
        }
    }
}

impl fmt::Display for CommHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Bf16Compress => f.write_str("bf16"),
            Self::Fp16Compress => f.write_str("fp16"),
            Self::Int8 => f.write_str("int8"),
            Self::TopK { fraction } => write!(f, "topk:{fraction}"),
            Self::PowerSgd(PowerSgdOptions { rank, start_iter }) => {
                write!(f, "powersgd:{rank}:{start_iter}")
            }
        }
    }
}

/// A text that is no [`CommHook`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("communication hook: expected {expected}, got {0:?}", expected = CommHook::EXPECTED)]
pub struct CommHookParseError(String);

impl CommHook {
    /// The texts that are read.
    pub const EXPECTED: &str = "none, bf16, fp16, int8, topk[:FRACTION] or powersgd[:RANK[:START]]";

    /// Whether the gradients of each shard are compressed by themselves.
    pub(crate) fn is_per_shard(self) -> bool {
        !matches!(self, Self::None | Self::Bf16Compress | Self::Fp16Compress)
    }

    /// Whether a part of the gradients is kept for later steps.
    pub(crate) fn has_residuals(self) -> bool {
        matches!(self, Self::TopK { .. } | Self::PowerSgd(_))
    }
}

impl FromStr for CommHook {
    type Err = CommHookParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let words: Vec<&str> = text.split(':').collect();
        let read = || {
            Some(match words[..] {
                ["none"] => Self::None,
                ["bf16"] => Self::Bf16Compress,
                ["fp16"] => Self::Fp16Compress,
                ["int8"] => Self::Int8,
                ["topk"] => Self::TopK { fraction: 0.01 },
                ["topk", fraction] => Self::TopK {
                    fraction: fraction.parse().ok().filter(|f| *f > 0.0 && *f <= 1.0)?,
                },
                ["powersgd"] => Self::PowerSgd(PowerSgdOptions::default()),
                ["powersgd", rank] => Self::PowerSgd(PowerSgdOptions {
                    rank: rank.parse().ok()?,
                    ..PowerSgdOptions::default()
                }),
                ["powersgd", rank, start_iter] => Self::PowerSgd(PowerSgdOptions {
                    rank: rank.parse().ok()?,
                    start_iter: start_iter.parse().ok()?,
                }),
                _ => return None,
            })
        };
        read().ok_or_else(|| CommHookParseError(text.to_string()))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hooks_are_written_as_they_are_read() {
        for (text, written) in [
            ("none", "none"),
            ("bf16", "bf16"),
            ("fp16", "fp16"),
            ("int8", "int8"),
            ("topk", "topk:0.01"),
            ("topk:0.25", "topk:0.25"),
            ("powersgd", "powersgd:1:10"),
            ("powersgd:4", "powersgd:4:10"),
            ("powersgd:4:100", "powersgd:4:100"),
        ] {
            let hook: CommHook = text.parse().expect(text);
            assert_eq!(hook.to_string(), written);
            assert_eq!(written.parse(), Ok(hook));
        }
        for text in [
            "",
            "f32",
            "int4",
            "int8:2",
            "topk:0",
            "topk:2",
            "topk:nan",
            "powersgd:0",
        ] {
            assert!(text.parse::<CommHook>().is_err(), "{text}");
        }
        let error = "gzip".parse::<CommHook>().expect_err("no hook");
        assert_eq!(
            error.to_string(),
            "communication hook: expected none, bf16, fp16, int8, topk[:FRACTION] or powersgd[:RANK[:START]], got \"gzip\""
        );
    }
}
