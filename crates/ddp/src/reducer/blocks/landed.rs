//! Buckets on their way to the other ranks and back: `Flight`, `Landed`, and `Arrived`, the view of what came.

use std::ops::Range;
use std::time::Instant;

use super::super::compress::Own;
use super::super::pool::{Lent, Pool};
use super::super::sent::Sent;
use crate::error::DdpError;
use crate::plan::Bucket;
use crate::timeline::BucketTiming;

/// A bucket back from the other ranks.
pub(in crate::reducer) enum Landed {
    /// In front of its memory.
    Whole(Lent),
    /// This rank's slice, and its offset in the block.
    Slice(Vec<f32>, usize),
    /// The sums over this rank's shards.
    Own(Vec<f32>, Own),
}

impl Landed {
    /// Whether this rank's optimizer gets a gradient of the segment at `position`, which some rank used.
    pub(in crate::reducer) fn concerns(&self, position: usize) -> bool {
        match self {
            Self::Own(_, own) => own.weight != 0.0 && own.used[position],
            Self::Whole(_) | Self::Slice(..) => true,
        }
    }

    /// The bucket's memory, or the part of its first block.
    pub(in crate::reducer) fn values(&self) -> &[f32] {
        match self {
            Self::Whole(memory) => memory.blocks(),
            Self::Slice(values, _) | Self::Own(values, _) => values,
        }
    }

    pub(in crate::reducer) fn values_mut(&mut self) -> &mut [f32] {
        match self {
            Self::Whole(memory) => memory.blocks_mut(),
            Self::Slice(values, _) | Self::Own(values, _) => values,
        }
    }

    /// Offset of the values in the block.
    fn start(&self) -> usize {
        match self {
            Self::Slice(_, start) => *start,
            Self::Whole(_) | Self::Own(..) => 0,
        }
    }
}

/// A bucket on its way to the other ranks.
pub(in crate::reducer) struct Flight {
    pub(super) sent: Sent,
    /// The reported number of the bucket.
    pub(super) bucket: usize,
    pub(super) stride: usize,
    pub(super) pool: Pool,
    /// The collective.
    pub(super) operation: &'static str,
    /// When it was complete on this rank.
    pub(super) ready: Instant,
}

impl Flight {
    /// Waits for the sum, which then lies in front of the memory.
    pub(in crate::reducer) fn land(self) -> Result<(Lent, BucketTiming), DdpError> {
        let bytes = self.stride * self.sent.bytes_each();
        let wait_start = Instant::now();
        let (memory, done) = self.sent.wait(self.stride)?;
        let named = (self.bucket, bytes, self.operation);
        let timing = BucketTiming::on_host(named, Some(self.ready), done, wait_start);
        Ok((Lent::new(memory, self.pool), timing))
    }
}

/// The sums of one bucket over all shards, still to be divided by `weight`.
pub(in crate::reducer) struct Arrived<'a> {
    bucket: &'a Bucket,
    /// The first block of the bucket, reduced, or a part of it.
    values: &'a [f32],
    /// Offset of the part in the block.
    start: usize,
    weight: f32,
}

impl<'a> Arrived<'a> {
    /// `known` is the weight if the bucket's own copy was rounded or is on another rank.
    pub(in crate::reducer) fn new(
        bucket: &'a Bucket,
        landed: &'a Landed,
        known: Option<f32>,
    ) -> Self {
        let values = match landed {
            Landed::Whole(memory) => &memory.blocks()[..bucket.stride],
            part => part.values(),
        };
        let known = match landed {
            Landed::Own(_, own) => Some(own.weight),
            _ => known,
        };
        Self {
            bucket,
            values,
            start: landed.start(),
            weight: known.unwrap_or_else(|| values[bucket.weight]),
        }
    }

    /// Sum of the shards' weights.
    pub(in crate::reducer) fn weight(&self) -> f32 {
        self.weight
    }

    /// The whole block, or the part of it.
    pub(in crate::reducer) fn values(&self) -> &[f32] {
        self.values
    }

    /// The sums that travel with the bucket.
    pub(in crate::reducer) fn extras(&self) -> Vec<f32> {
        self.values[self.bucket.extras.clone()].to_vec()
    }

    /// Whether any shard on any rank used the segment at `position` and any had a sample: a step without samples changes
    /// nothing.
    pub(in crate::reducer) fn used(&self, position: usize) -> bool {
        self.values[self.bucket.flags + position] > 0.0 && self.weight() != 0.0
    }

    /// Where some elements of the segment at `position` lie in the values.
    pub(in crate::reducer) fn place(&self, position: usize, range: Range<usize>) -> Range<usize> {
        let offset = self.bucket.segments[position].offset;
        let first = offset + range.start - self.start;
        first..first + range.len()
    }

    /// The segment at `position`, divided by the weight.
    pub(in crate::reducer) fn mean(&self, position: usize) -> Vec<f32> {
        let place = self.place(position, 0..self.bucket.segments[position].len);
        let weight = self.weight();
        self.values[place].iter().map(|sum| sum / weight).collect()
    }
}
