//! The samples that each shard reads: PyTorch's distributed sampler, index for index, and the steps cut from it.
//!
//! Pure arithmetic on indices: no clock, no I/O, no world size. A rank that owns shards `a..b` takes the lists `a..b` of
//! every [`StepPlan`], so a job reads the same samples on any number of ranks.

mod batches;
mod evaluation;
mod permutation;

pub use batches::{
    BatchLayout, BatchOptions, Padding, SamplerState, ShardedBatches, StepPlan, micro_batches,
};
pub use evaluation::{EvalOptions, eval_split};
pub use permutation::permutation;

/// Maximum number of shards in a job.
pub const SHARDS_MAX: usize = 65_536;

/// Settings of a [`DistributedSampler`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplerOptions {
    /// Samples in the data set.
    pub len: usize,
    /// Shards that the data set is dealt to; PyTorch's `num_replicas`.
    pub shards: usize,
    /// Seed of the shuffle; epoch `e` is shuffled with `seed + e`.
    pub seed: u64,
    /// Whether to read every epoch in a new random order instead of the data set's order.
    pub shuffle: bool,
    /// Whether to drop samples instead of repeating some if the data set does not divide evenly.
    pub drop_last: bool,
}

impl Default for SamplerOptions {
    /// PyTorch's defaults. `len` has no default and must be set.
    fn default() -> Self {
        Self {
            len: 0,
            shards: 1,
            seed: 0,
            shuffle: true,
            drop_last: false,
        }
    }
}

/// PyTorch's `DistributedSampler`, index for index, without its state: the epoch is an argument.
///
/// In PyTorch, forgetting `set_epoch` silently repeats one order for ever; that mistake is impossible here.
/// [`ShardedBatches`] counts the epochs.
///
/// *Source*: `torch/utils/data/distributed.py`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DistributedSampler {
    options: SamplerOptions,
}

impl DistributedSampler {
    /// A sampler over `options.len` samples.
    ///
    /// *Errors*: `EmptyDataset`, `NoShards`, `TooManyShards`.
    pub fn new(options: SamplerOptions) -> Result<Self, SamplerError> {
        if options.len == 0 {
            return Err(SamplerError::EmptyDataset);
        }
        check_shards(options.shards)?;
        Ok(Self { options })
    }

    /// The settings of the sampler.
    #[must_use]
    pub fn options(&self) -> &SamplerOptions {
        &self.options
    }

    /// Number of indices per shard and epoch, the same for all shards, as in PyTorch.
    ///
    /// Zero only with `drop_last` and fewer samples than shards.
    #[must_use]
    pub fn samples_per_shard(&self) -> usize {
        let SamplerOptions { len, shards, .. } = self.options;
        if self.options.drop_last {
            len / shards
        } else {
            len.div_ceil(shards)
        }
    }

    /// The order of an epoch before it is dealt to shards: each index of the data set once.
    ///
    /// *Cost*: a shuffle of the whole data set.
    #[must_use]
    pub fn order(&self, epoch: u64) -> Vec<usize> {
        if self.options.shuffle {
            // Only the low 32 bits matter, so a wrapped sum loses nothing.
            permutation(self.options.len, self.options.seed.wrapping_add(epoch))
        } else {
            (0..self.options.len).collect()
        }
    }

    /// The indices that `shard` reads in `epoch`, in order: every `shards`-th of the epoch's order, from `shard` on.
    ///
    /// If the data set does not divide evenly, the order continues from its start (repeatedly, if it is too short), or is cut
    /// with `drop_last`.
    ///
    /// *Cost*: a shuffle of the whole data set per call.
    /// *Errors*: `ShardOutOfRange`.
    ///
    /// ```
    /// # use paceline_ddp::sampler::{DistributedSampler, SamplerOptions};
    /// let sampler = DistributedSampler::new(SamplerOptions {
    ///     len: 11,
    ///     shards: 4,
    ///     seed: 3,
    ///     ..SamplerOptions::default()
    /// })?;
    /// assert_eq!(sampler.indices(2, 1)?, [5, 2, 1]);
    /// # Ok::<(), paceline_ddp::sampler::SamplerError>(())
    /// ```
    pub fn indices(&self, epoch: u64, shard: usize) -> Result<Vec<usize>, SamplerError> {
        let SamplerOptions { len, shards, .. } = self.options;
        if shard >= shards {
            return Err(SamplerError::ShardOutOfRange { shard, shards });
        }
        let order = self.order(epoch);
        let places = (0..self.samples_per_shard()).map(|turn| shard + turn * shards);
        Ok(places.map(|place| order[place % len]).collect())
    }
}

/// Every step loops over all shards, so their number is bounded.
fn check_shards(shards: usize) -> Result<(), SamplerError> {
    match shards {
        0 => Err(SamplerError::NoShards),
        1..=SHARDS_MAX => Ok(()),
        _ => Err(SamplerError::TooManyShards { shards }),
    }
}

/// A request that the sampler cannot satisfy.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplerError {
    /// `len` is zero.
    #[error("the data set has no samples: len is 0")]
    EmptyDataset,
    /// `shards` is zero.
    #[error("the samples need at least one shard: shards is 0")]
    NoShards,
    /// More shards than any real job has; almost certainly a wrong argument.
    #[error("{shards} shards are more than the {SHARDS_MAX} supported")]
    TooManyShards {
        /// The requested number.
        shards: usize,
    },
    /// The sampler has no such shard.
    #[error("shard {shard} is out of range 0..{shards}")]
    ShardOutOfRange {
        /// The requested shard.
        shard: usize,
        /// Number of shards.
        shards: usize,
    },
    /// `batch` is zero.
    #[error("an evaluation batch needs at least one sample: batch is 0")]
    ZeroBatch,
    /// Some shard would never get a sample.
    #[error("global batch {global_batch} is smaller than the {shards} shards that share it")]
    BatchBelowShards {
        /// Samples of a step.
        global_batch: usize,
        /// Shards that share them.
        shards: usize,
    },
    /// With `drop_last`, no step would remain.
    #[error(
        "no full step: {len} samples over {shards} shards do not fill one global batch of {global_batch}"
    )]
    NoFullStep {
        /// Samples in the data set.
        len: usize,
        /// Shards that share a step.
        shards: usize,
        /// Samples of a step.
        global_batch: usize,
    },
    /// The saved state was shuffled with another seed.
    #[error("sampler state was saved with seed {saved}, but seed is now {now}")]
    SeedDiffers {
        /// Seed in the state.
        saved: u64,
        /// Seed of the sampler.
        now: u64,
    },
    /// The rest of a started epoch must be dealt like its beginning.
    #[error(
        "sampler state was saved within epoch {epoch}, after {consumed} samples, with {differences}"
    )]
    LayoutDiffers {
        /// Epoch of the state.
        epoch: u64,
        /// Samples of that epoch that were read.
        consumed: u64,
        /// Each setting that differs, with its value then and now.
        differences: String,
        /// Shards then, if the number differs.
        shards: Option<usize>,
    },
    /// No step ends at the saved number of samples.
    #[error(
        "sampler state has {consumed} samples read in epoch {epoch}, but no step of {global_batch} ends there"
    )]
    NotAtAStep {
        /// Epoch of the state.
        epoch: u64,
        /// Samples of that epoch that were read.
        consumed: u64,
        /// Samples of a step.
        global_batch: usize,
    },
}

impl SamplerError {
    /// Advice, if there is any.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::EmptyDataset => "check the path and the split of the data set".to_owned(),
            Self::NoShards | Self::ZeroBatch => "give at least 1".to_owned(),
            Self::TooManyShards { .. } | Self::ShardOutOfRange { .. } => return None,
            Self::BatchBelowShards { shards, .. } => {
                format!("use a global batch of at least {shards}, or fewer shards")
            }
            Self::NoFullStep { .. } => {
                "use a smaller global batch, or keep the short step (drop_last = false)".to_owned()
            }
            Self::SeedDiffers { saved, .. } => {
                format!("resume with seed {saved}, or start a new job")
            }
            Self::LayoutDiffers {
                shards: Some(shards),
                ..
            } => format!(
                "resume with the saved settings (with {shards} shards on at most {shards} ranks) until the epoch ends; a checkpoint from \
                 there can be resumed with others. `DdpOptions::shards` fixes the number for all ranks"
            ),
            Self::LayoutDiffers { .. } => {
                "resume with the saved settings until the epoch ends; a checkpoint from there can be resumed with others"
                    .to_owned()
            }
            Self::NotAtAStep { .. } => {
                "the state is damaged: resume from an earlier one".to_owned()
            }
        };
        Some(hint)
    }
}

paceline_rendezvous::debug_with_hint!(SamplerError);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sampler(options: SamplerOptions) -> DistributedSampler {
        DistributedSampler::new(options).expect("valid options")
    }

    fn all_shards(options: SamplerOptions, epoch: u64) -> Vec<Vec<usize>> {
        let sampler = sampler(options);
        let of = |shard| sampler.indices(epoch, shard).expect("a shard in range");
        (0..options.shards).map(of).collect()
    }

    /// PyTorch's algorithm step by step: build the list, pad or cut it, then stride.
    fn like_torch(options: SamplerOptions, epoch: u64) -> Vec<Vec<usize>> {
        let SamplerOptions { len, shards, .. } = options;
        let mut list = sampler(options).order(epoch);
        let ceil = |a: usize, b: usize| a / b + usize::from(!a.is_multiple_of(b));
        let per_shard = if options.drop_last && !len.is_multiple_of(shards) {
            ceil(len.saturating_sub(shards), shards)
        } else {
            ceil(len, shards)
        };
        let total = per_shard * shards;
        if options.drop_last {
            list.truncate(total);
        } else {
            let pad = total - len;
            let repeats = list.repeat(ceil(pad, len));
            list.extend(&repeats[..pad]);
        }
        assert_eq!(list.len(), total);
        let stride = |shard| list.iter().copied().skip(shard).step_by(shards).collect();
        (0..shards).map(stride).collect()
    }

    #[test]
    fn shards_read_what_pytorch_printed() {
        let options = SamplerOptions {
            len: 11,
            shards: 4,
            seed: 3,
            ..SamplerOptions::default()
        };
        assert_eq!(
            all_shards(options, 2),
            [[9, 10, 7], [5, 2, 1], [0, 3, 4], [8, 6, 9]]
        );
        let dropping = SamplerOptions {
            shuffle: false,
            drop_last: true,
            ..options
        };
        assert_eq!(all_shards(dropping, 2), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    }

    #[test]
    fn padding_goes_round_when_shards_outnumber_samples() {
        let options = SamplerOptions {
            len: 2,
            shards: 5,
            shuffle: false,
            ..SamplerOptions::default()
        };
        assert_eq!(all_shards(options, 0), [[0], [1], [0], [1], [0]]);
        let dropping = SamplerOptions {
            drop_last: true,
            ..options
        };
        assert_eq!(sampler(dropping).samples_per_shard(), 0);
    }

    #[test]
    fn impossible_options_are_refused() {
        let with = |len, shards| {
            DistributedSampler::new(SamplerOptions {
                len,
                shards,
                ..SamplerOptions::default()
            })
        };
        assert_eq!(with(0, 1), Err(SamplerError::EmptyDataset));
        assert_eq!(with(1, 0), Err(SamplerError::NoShards));
        let shards = SHARDS_MAX + 1;
        assert_eq!(with(1, shards), Err(SamplerError::TooManyShards { shards }));
        let out_of_range = with(8, 4).expect("valid").indices(0, 4);
        assert_eq!(
            out_of_range.unwrap_err().to_string(),
            "shard 4 is out of range 0..4"
        );
    }

    proptest! {
        #[test]
        fn shards_read_the_padded_or_cut_list_as_pytorch_builds_it(
            len in 1usize..200, shards in 1usize..40, seed: u64, epoch in 0u64..5,
            shuffle: bool, drop_last: bool,
        ) {
            let options = SamplerOptions { len, shards, seed, shuffle, drop_last };
            prop_assert_eq!(all_shards(options, epoch), like_torch(options, epoch));
        }
    }
}
