//! Which rank owns which elements of each gradient bucket: pure data that every rank computes identically.

use std::ops::Range;
use std::sync::Arc;

use super::ZeroStage;
use crate::plan::BucketPlan;

/// Elements of a parameter whose squares are added in one sum for the gradient's norm. Ranks own whole chunks, so the norm
/// has the same bits on any number of ranks.
pub(crate) const CHUNK: usize = 1024;

/// The owners of all gradient buckets.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Shares {
    stage: ZeroStage,
    /// For each gradient bucket: the elements of its block that each rank owns, in rank order.
    counts: Vec<Arc<[usize]>>,
}

impl Shares {
    /// Deals every bucket to `world` ranks, as evenly as possible: in chunks of a parameter, or in whole parameters where
    /// `is_whole(parameter)`.
    pub(crate) fn new(plan: &BucketPlan, world: usize, is_whole: impl Fn(usize) -> bool) -> Self {
        // What each rank has of the buckets so far: a bucket that cannot be cut evenly is made up for by later ones.
        let mut loads = vec![0; world];
        let mut total = 0;
        let mut counts = Vec::with_capacity(plan.tail());
        for bucket in &plan.buckets[..plan.tail()] {
            let mut cuts = Vec::new();
            for segment in &bucket.segments {
                let step = if is_whole(segment.index) {
                    segment.len.max(1)
                } else {
                    CHUNK
                };
                cuts.extend((0..segment.len).step_by(step).map(|at| segment.offset + at));
            }
            cuts.push(bucket.stride);
            total += bucket.stride;
            let short: Vec<usize> = loads
                .iter()
                .map(|load| (total / world).saturating_sub(*load).max(1))
                .collect();
            let (all, mut wanted, mut start) = (short.iter().sum::<usize>(), 0, 0);
            let dealt = loads.iter_mut().zip(short).map(|(load, short)| {
                wanted += short;
                let end = nearest(&cuts, wanted * bucket.stride / all);
                let count = end - start;
                *load += count;
                start = end;
                count
            });
            counts.push(dealt.collect());
        }
        let stage = ZeroStage::Optimizer;
        Self { stage, counts }
    }

    pub(crate) fn at_stage(self, stage: ZeroStage) -> Self {
        Self { stage, ..self }
    }

    pub(crate) fn stage(&self) -> ZeroStage {
        self.stage
    }

    /// The elements of the bucket's block that `rank` owns.
    pub(crate) fn span(&self, bucket: usize, rank: usize) -> Range<usize> {
        let counts = &self.counts[bucket];
        let first: usize = counts[..rank].iter().sum();
        first..first + counts[rank]
    }

    /// The elements of the bucket's block that each rank owns.
    pub(crate) fn counts(&self, bucket: usize) -> &Arc<[usize]> {
        &self.counts[bucket]
    }

    /// The elements of parameter `index` that `rank` owns; empty if it owns none.
    pub(crate) fn owned(&self, plan: &BucketPlan, index: usize, rank: usize) -> Range<usize> {
        let (bucket, position) = plan.places[index];
        let segment = &plan.buckets[bucket].segments[position];
        let span = self.span(bucket, rank);
        let inside = |at: usize| at.clamp(segment.offset, segment.offset + segment.len);
        inside(span.start) - segment.offset..inside(span.end) - segment.offset
    }
}

/// The cut closest to `wanted`; the lower of two.
fn nearest(cuts: &[usize], wanted: usize) -> usize {
    let above = cuts.partition_point(|cut| *cut < wanted);
    let candidates = [above.checked_sub(1), Some(above)].into_iter().flatten();
    let candidates = candidates.filter_map(|at| cuts.get(at).copied());
    candidates
        .min_by_key(|cut| cut.abs_diff(wanted))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{BucketCaps, Layout};

    fn plan(lens: &[usize], bytes: usize) -> BucketPlan {
        let caps = BucketCaps {
            first_bytes: bytes,
            bytes,
        };
        BucketPlan::new(lens, &[], caps, 0, Layout::Host)
    }

    /// Every parameter's owned ranges, rank by rank.
    fn owned(lens: &[usize], bytes: usize, world: usize, whole: bool) -> Vec<Vec<Range<usize>>> {
        let plan = plan(lens, bytes);
        let shares = Shares::new(&plan, world, |_| whole);
        for bucket in 0..plan.tail() {
            let sum: usize = shares.counts(bucket).iter().sum();
            assert_eq!(sum, plan.buckets[bucket].stride);
        }
        let of = |index| {
            let ranks = 0..world;
            ranks.map(|rank| shares.owned(&plan, index, rank)).collect()
        };
        (0..lens.len()).map(of).collect()
    }

    #[test]
    fn every_element_has_one_owner_and_slices_begin_at_chunks() {
        let lens = [10, 5000, 0, 1, 100_000, 2047, 2048, 2049];
        for world in [1, 2, 3, 4, 7, 64] {
            for bytes in [1, 40_000, 1 << 20] {
                for whole in [false, true] {
                    let owned = owned(&lens, bytes, world, whole);
                    for (len, ranges) in lens.iter().zip(owned) {
                        let mut end = 0;
                        for range in ranges.iter().filter(|range| !range.is_empty()) {
                            assert_eq!(range.start, end);
                            assert!(range.start.is_multiple_of(CHUNK));
                            assert!(!whole || *range == (0..*len));
                            end = range.end;
                        }
                        assert_eq!(end, *len);
                    }
                }
            }
        }
    }

    #[test]
    fn large_parameters_are_cut_evenly() {
        let owned = owned(&[1 << 20, 1 << 20], 25 << 20, 4, false);
        let loads = (0..4).map(|rank| owned[0][rank].len() + owned[1][rank].len());
        assert!(
            loads
                .clone()
                .all(|load| load.abs_diff(1 << 19) <= 2 * CHUNK),
            "{:?}",
            loads.collect::<Vec<_>>()
        );
    }

    #[test]
    fn whole_parameters_in_buckets_of_their_own_go_round() {
        let owned = owned(&[4096; 8], 1, 4, true);
        for rank in 0..4 {
            let has = owned.iter().filter(|ranges| !ranges[rank].is_empty());
            assert_eq!(has.count(), 2, "rank {rank}");
        }
    }
}
