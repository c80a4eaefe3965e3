//! `CommHook::TopK`: the largest elements of each shard's gradients, with error feedback.
//!
//! Every rank gets every shard's elements and adds them in the order of the shards.

use std::sync::Arc;

use paceline_collective::{AllGather, Error, Ticket};

use super::residuals::Residuals;
use super::{Compressor, Context, Kept, Leaf, Received};

/// Numbers that one element takes: its index and its bits.
const PAIR: usize = 2;

pub(super) struct TopK {
    context: Context,
    residuals: Residuals,
    /// Elements of each bucket that a shard sends.
    kept: Vec<usize>,
    /// Messages of this rank's shards, by bucket.
    messages: Vec<Vec<i32>>,
    sent: Vec<Option<Ticket<i32>>>,
}

impl TopK {
    pub(super) fn new(context: Context, fraction: f64) -> Self {
        let of_bucket = |bucket: &crate::plan::Bucket| {
            let len: usize = bucket.segments.iter().map(|segment| segment.len).sum();
            ((fraction * len as f64).ceil() as usize).clamp(len.min(1), len)
        };
        let buckets = context.buckets();
        Self {
            kept: context.plan.buckets[..buckets]
                .iter()
                .map(of_bucket)
                .collect(),
            residuals: Residuals::new(&context),
            messages: vec![Vec::new(); buckets],
            sent: (0..buckets).map(|_| None).collect(),
            context,
        }
    }
}

impl Compressor for TopK {
    fn begin(&mut self, step: u64) {
        self.context.step = step;
        self.residuals.begin();
        self.messages.iter_mut().for_each(Vec::clear);
    }

    fn add(&mut self, leaf: Leaf<'_>) -> Result<(), Error> {
        let rest = self.residuals.add(&self.context, &leaf);
        let message = &mut self.messages[leaf.bucket];
        for at in largest(rest, self.kept[leaf.bucket]) {
            // Buckets are far smaller than 2^31 elements.
            message.extend([at as i32, rest[at].to_bits() as i32]);
            rest[at] = 0.0;
        }
        Ok(())
    }

    fn send(&mut self, bucket: usize) -> Result<(), Error> {
        let (group, each) = (&self.context.group, PAIR * self.kept[bucket]);
        let ranks = 0..group.world();
        let counts = ranks.map(|rank| each * self.context.shards(rank));
        let counts: Arc<[usize]> = counts.collect();
        let mut buffer = group.buffer(counts.iter().sum())?;
        let own = counts[..group.rank()].iter().sum::<usize>();
        let message = &self.messages[bucket];
        buffer[own..own + message.len()].copy_from_slice(message);
        let call = AllGather {
            counts: Some(counts),
            bucket: Some(bucket as u32),
            step: self.context.step,
        };
        self.sent[bucket] = Some(group.all_gather_async(buffer, call));
        Ok(())
    }

    fn resend(&mut self, _bucket: usize) -> Result<(), Error> {
        Ok(())
    }

    fn receive(&mut self, bucket: usize) -> Result<Received, Error> {
        let done = self.sent[bucket]
            .take()
            .expect("every bucket is sent")
            .wait()?;
        let mut values = vec![0.0; self.context.len(bucket)];
        for pair in done.buffer.chunks_exact(PAIR) {
            if let Some(slot) = values.get_mut(pair[0] as usize) {
                *slot += f32::from_bits(pair[1] as u32);
            }
        }
        Ok(Received {
            values,
            bytes: size_of_val(&self.messages[bucket][..]),
            timing: Some([done.timing; 2]),
            own: None,
        })
    }

    fn commit(&mut self) {
        self.residuals.commit(&self.context);
    }

    fn kept(&mut self, kept: Kept, index: usize) -> Option<&mut [f32]> {
        match kept {
            Kept::Residual { shard } => self.residuals.of(&self.context, shard, index),
            Kept::Factor | Kept::Momentum => None,
        }
    }
}

/// The places of the `count` largest magnitudes, in ascending order; of equal ones the first. NaN counts as the largest.
fn largest(values: &[f32], count: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..values.len()).collect();
    if count < places.len() {
        places.select_nth_unstable_by(count, |a, b| {
            let magnitudes = values[*b].abs().total_cmp(&values[*a].abs());
            magnitudes.then(a.cmp(b))
        });
        places.truncate(count);
    }
    places.sort_unstable();
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_magnitudes_are_taken_and_of_equal_ones_the_first() {
        assert_eq!(largest(&[1.0, -3.0, 2.0, 3.0, -2.0], 3), [1, 2, 3]);
        assert_eq!(largest(&[1.0, 1.0, 1.0], 2), [0, 1]);
        assert_eq!(largest(&[0.0, f32::NAN, 9.0], 1), [1]);
        assert_eq!(largest(&[1.0, 2.0], 2), [0, 1]);
        assert_eq!(largest(&[], 0), [0; 0]);
    }
}
