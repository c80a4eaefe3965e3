//! `CommHook`: how gradients travel between ranks.

use std::fmt;
use std::num::{NonZeroU64, NonZeroUsize};
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
    /// 8 bits for each element, in chunks of up to 256 of a parameter with a scale each: a quarter of the bytes with one shard per rank, and more
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
    /// No gradients at all: each replica takes steps by itself, and the weights of all are averaged after some steps, as
    /// with `post_localSGD_hook` and `PeriodicModelAverager`; with an outer optimizer this is DiLoCo. The program passes the
    /// model to [`Ddp::average`](crate::Ddp::average) after each step of its optimizer.
    ///
    /// The tail still travels in every step: running statistics, the program's sums, votes to stop.
    ///
    /// *Numerics*: a replica averages the gradients of its own shards only, so the result depends on the number of replicas. During
    /// a round the norm for clipping, and the weights, are each replica's own. The ranks that share the stages or parts of one model
    /// are one replica.
    ///
    /// *Source*: Stich 2019, "Local SGD converges fast and communicates little"; Lin et al. 2020, "Don't use large
    /// mini-batches, use local SGD"; Douillard et al. 2023, "DiLoCo: distributed low-communication training of language
    /// models".
    LocalSgd(LocalSgdOptions),
}

/// Options of [`CommHook::LocalSgd`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalSgdOptions {
    /// Steps of a round: the averager's `period`, DiLoCo's H.
    pub period: NonZeroU64,
    /// Gradients are averaged in steps before this one: PyTorch's `start_localSGD_iter`.
    pub start_iter: u64,
    /// What happens to the average: `None` makes it the new weights.
    pub outer: Option<OuterOptimizer>,
}

/// DiLoCo's outer optimizer: SGD with Nesterov momentum. Its gradient is the weights at the start of the round minus the
/// average at its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OuterOptimizer {
    /// Learning rate.
    pub lr: f32,
    /// Momentum.
    pub momentum: f32,
}

impl Default for OuterOptimizer {
    /// The paper's values.
    fn default() -> Self {
        Self {
            lr: 0.7,
            momentum: 0.9,
        }
    }
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
            Self::LocalSgd(LocalSgdOptions {
                period,
                start_iter,
                outer,
            }) => match outer {
                None => write!(f, "localsgd:{period}:{start_iter}"),
                Some(OuterOptimizer { lr, momentum }) => {
                    write!(f, "diloco:{period}:{start_iter}:{lr}:{momentum}")
                }
            },
        }
    }
}

/// A text that is no [`CommHook`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("communication hook: expected {expected}, got {0:?}", expected = CommHook::EXPECTED)]
pub struct CommHookParseError(String);

impl CommHook {
    /// The texts that are read.
    pub const EXPECTED: &str = "none, bf16, fp16, int8, topk[:FRACTION], powersgd[:RANK[:START]], \
                                localsgd:PERIOD[:START] or diloco:PERIOD[:START:LR:MOMENTUM]";

    /// Whether the gradients of each shard are compressed by themselves.
    pub fn is_per_shard(self) -> bool {
        !matches!(self, Self::None | Self::Bf16Compress | Self::Fp16Compress)
    }

    /// Whether the result has the same bits on any number of ranks.
    pub fn keeps_bits(self) -> bool {
        match self {
            Self::None | Self::Int8 | Self::TopK { .. } | Self::PowerSgd(_) => true,
            Self::Bf16Compress | Self::Fp16Compress | Self::LocalSgd(_) => false,
        }
    }

    /// Why it does not work with a gradient scaler, which needs the same gradients on all ranks, from one step each; `None` if it does.
    pub fn refuses_scaler(self) -> Option<&'static str> {
        match self {
            Self::None | Self::Bf16Compress | Self::Fp16Compress | Self::Int8 => None,
            Self::TopK { .. } | Self::PowerSgd(_) => {
                Some("what the hook has not sent yet has the scale of an earlier step")
            }
            Self::LocalSgd(_) => {
                Some("ranks that take steps by themselves do not agree on a scale")
            }
        }
    }

    /// Why it does not work between ranks that share the parts of some parameters and each have others whole; `None` if it does.
    pub fn refuses_parts(self) -> Option<&'static str> {
        match self {
            Self::TopK { .. } => Some(
                "it takes the largest elements of whole buckets, so ranks with other slices would take others of what all have whole",
            ),
            _ => None,
        }
    }

    /// Why it does not work with a [`ZeroRedundancyOptimizer`](crate::ZeroRedundancyOptimizer); `None` if it does.
    pub fn refuses_sharded_optimizer(self) -> Option<&'static str> {
        match self {
            Self::None | Self::Bf16Compress | Self::Fp16Compress => None,
            Self::Int8 | Self::TopK { .. } | Self::PowerSgd(_) => {
                Some("the hook compresses whole gradients, of which a rank gets only its slices")
            }
            Self::LocalSgd(_) => Some(
                "replicas take steps by themselves, for which each needs its whole optimizer state",
            ),
        }
    }
}

impl FromStr for CommHook {
    type Err = CommHookParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let words: Vec<&str> = text.split(':').collect();
        let local = |period: &str, start: &str, outer| {
            Some(Self::LocalSgd(LocalSgdOptions {
                period: period.parse().ok()?,
                start_iter: start.parse().ok()?,
                outer,
            }))
        };
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
                ["localsgd", period] => local(period, "0", None)?,
                ["localsgd", period, start] => local(period, start, None)?,
                ["diloco", period] => local(period, "0", Some(OuterOptimizer::default()))?,
                ["diloco", period, start, lr, momentum] => {
                    let in_range = |text: &str, most: f32| {
                        let number = text.parse().ok();
                        number.filter(|number| (0.0..=most).contains(number))
                    };
                    let outer = OuterOptimizer {
                        lr: in_range(lr, 100.0)?,
                        momentum: in_range(momentum, 1.0)?,
                    };
                    local(period, start, Some(outer))?
                }
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
            ("localsgd:8", "localsgd:8:0"),
            ("localsgd:8:100", "localsgd:8:100"),
            ("diloco:50", "diloco:50:0:0.7:0.9"),
            ("diloco:50:10:1:0", "diloco:50:10:1:0"),
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
            "localsgd",
            "localsgd:0",
            "diloco:5:0:nan:0",
        ] {
            assert!(text.parse::<CommHook>().is_err(), "{text}");
        }
        let error = "gzip".parse::<CommHook>().expect_err("no hook");
        assert_eq!(
            error.to_string(),
            format!(
                "communication hook: expected {}, got \"gzip\"",
                CommHook::EXPECTED
            )
        );
    }
}
