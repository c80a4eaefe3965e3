//! The samples that each shard evaluates: each exactly once, so that a metric over all shards is exact.

use std::ops::Range;

use super::{SamplerError, check_shards};

/// Arguments of `eval_split`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvalOptions {
    /// Samples of the data set.
    pub len: usize,
    /// Number of shards.
    pub shards: usize,
    /// Samples of a batch; the data set's last batch may be shorter.
    pub batch: usize,
}

/// The batches of each shard, as ranges of sample indices.
///
/// Unlike a padded training sampler, it repeats and drops no sample. The batches do not depend on the number of shards, and
/// each shard has consecutive batches: the concatenated lists are the data set in order. The first `batches % shards` shards
/// have one batch more; with fewer batches than shards, the last shards have none.
///
/// *Errors*: `EmptyDataset`, `NoShards`, `TooManyShards`, `ZeroBatch`.
///
/// ```
/// # use paceline_ddp::sampler::{EvalOptions, eval_split};
/// let split = eval_split(&EvalOptions { len: 10, shards: 2, batch: 4 })?;
/// assert_eq!(split, [vec![0..4, 4..8], vec![8..10]]);
/// # Ok::<(), paceline_ddp::sampler::SamplerError>(())
/// ```
pub fn eval_split(options: &EvalOptions) -> Result<Vec<Vec<Range<usize>>>, SamplerError> {
    let EvalOptions { len, shards, batch } = *options;
    if len == 0 {
        return Err(SamplerError::EmptyDataset);
    }
    check_shards(shards)?;
    if batch == 0 {
        return Err(SamplerError::ZeroBatch);
    }
    let batches = len.div_ceil(batch);
    let mut next = 0;
    let split = (0..shards).map(|shard| {
        let first = next;
        next += batches / shards + usize::from(shard < batches % shards);
        (first..next)
            .map(|index| index * batch..len.min((index + 1).saturating_mul(batch)))
            .collect()
    });
    Ok(split.collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split(len: usize, shards: usize, batch: usize) -> Vec<Vec<Range<usize>>> {
        eval_split(&EvalOptions { len, shards, batch }).expect("a valid split")
    }

    #[test]
    fn the_first_shards_have_one_batch_more_and_the_last_batch_is_short() {
        assert_eq!(split(11, 2, 4).concat(), [0..4, 4..8, 8..11]);
        assert_eq!(split(11, 2, 4)[0].len(), 2);
    }

    #[test]
    fn shards_beyond_the_batches_have_nothing() {
        let lens: Vec<_> = split(3, 4, 8).iter().map(Vec::len).collect();
        assert_eq!(lens, [1, 0, 0, 0]);
    }

    #[test]
    fn a_batch_larger_than_memory_is_one_batch() {
        assert_eq!(split(3, 1, usize::MAX)[0][0], 0..3);
    }

    #[test]
    fn nothing_to_divide_and_nobody_to_divide_it_among_are_errors() {
        let with = |len, shards, batch| eval_split(&EvalOptions { len, shards, batch });
        assert_eq!(with(0, 1, 1), Err(SamplerError::EmptyDataset));
        assert_eq!(with(1, 0, 1), Err(SamplerError::NoShards));
        let shards = usize::MAX;
        assert_eq!(
            with(1, shards, 1),
            Err(SamplerError::TooManyShards { shards })
        );
        assert_eq!(with(1, 1, 0), Err(SamplerError::ZeroBatch));
    }

    proptest! {
        #[test]
        fn the_lists_one_after_another_are_the_data_set_in_order(
            len in 1usize..500, shards in 1usize..20, batch in 1usize..60,
        ) {
            let split = split(len, shards, batch);
            prop_assert_eq!(split.len(), shards);
            prop_assert!(split.iter().flatten().cloned().flatten().eq(0..len));
            let counts = || split.iter().map(Vec::len);
            prop_assert!(counts().max().unwrap() - counts().min().unwrap() <= 1);
        }

        #[test]
        fn the_batches_are_the_same_for_any_number_of_shards(
            len in 1usize..500, shards in 1usize..20, batch in 1usize..60,
        ) {
            prop_assert_eq!(split(len, shards, batch).concat(), split(len, 1, batch).concat());
        }
    }
}
