//! The bucket plan: the place of each gradient, as pure data that every rank computes identically.

use std::collections::BTreeMap;

/// Segments and blocks are rounded up to this many elements: 64 bytes of f32, one cache line, so that no two parameters share
/// a line and vector loops start aligned.
const HOST_ALIGN: usize = 16;

/// The same on other devices: 512 bytes of f32. A slice of a tensor with these bounds needs no copy.
///
/// *Source*: `memory.alignment` of CubeCL's CUDA runtime; the other runtimes have smaller ones, which divide it.
pub(crate) const DEVICE_ALIGN: usize = 128;

/// Upper bounds of the gradient bytes in a bucket.
///
/// *Source*: PyTorch DDP's defaults; a small first bucket starts the communication early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketCaps {
    /// Cap of the first bucket, in bytes.
    pub first_bytes: usize,
    /// Cap of every later bucket, in bytes.
    pub bytes: usize,
}

impl Default for BucketCaps {
    fn default() -> Self {
        Self {
            first_bytes: 1 << 20,
            bytes: 25 << 20,
        }
    }
}

/// One parameter's (or buffer's) place in its bucket, in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of the parameter (or buffer) in registration order.
    pub index: usize,
    /// Offset of its first element in a block of the bucket.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
}

/// The kind of memory that buckets are laid out for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Ordinary memory: segments begin on a cache line.
    Host,
    /// Device memory: segments begin where the device can take a slice without a copy.
    Device,
}

impl Layout {
    /// Alignment of segments and blocks, in f32 elements.
    fn align(self) -> usize {
        match self {
            Self::Host => HOST_ALIGN,
            Self::Device => DEVICE_ALIGN,
        }
    }
}

/// The layout of one bucket.
///
/// A block of the bucket is laid out as
///
/// ```text
/// | segment | segment | ... | used flags, one per segment | weight | extras ... | padding |
/// ```
///
/// The flags, the weight and the extras are reduced with the gradients, so a reduced bucket can be scaled and applied without
/// any other message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Parameters in the order in which the backward pass is expected to finish them.
    pub segments: Vec<Segment>,
    /// Offset of the first used flag.
    pub flags: usize,
    /// Offset of the weight.
    pub weight: usize,
    /// Offsets of the extras; empty except in the last bucket.
    pub extras: std::ops::Range<usize>,
    /// Elements per block, a multiple of 16 (128 on a device).
    pub stride: usize,
}

impl Bucket {
    fn new(lens: &[(usize, usize)], extras: usize, layout: Layout) -> Self {
        let align = layout.align();
        let mut offset = 0;
        let mut segments = Vec::with_capacity(lens.len());
        for &(index, len) in lens {
            segments.push(Segment { index, offset, len });
            offset += len.next_multiple_of(align);
        }
        let flags = offset;
        let weight = flags + lens.len();
        let extras = weight + 1..weight + 1 + extras;
        Self {
            segments,
            flags,
            weight,
            stride: extras.end.next_multiple_of(align),
            extras,
        }
    }
}

/// All buckets of a model: gradient buckets in launch order, then one tail bucket with the buffers
/// (running statistics) and the extras.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketPlan {
    /// Gradient buckets, launched strictly in this order; the tail bucket is the last.
    pub buckets: Vec<Bucket>,
    /// For every parameter: its bucket and its position among that bucket's segments.
    pub places: Vec<(usize, usize)>,
}

impl BucketPlan {
    /// Plans buckets for parameters and buffers of the given element counts (f32), both in
    /// registration order.
    ///
    /// Parameters are taken in reverse registration order, because the backward pass finishes the last layers
    /// first. A bucket is closed when the next parameter would exceed its cap; a parameter larger than
    /// the cap has a bucket of its own.
    pub fn new(
        parameters: &[usize],
        buffers: &[usize],
        caps: BucketCaps,
        extras: usize,
        layout: Layout,
    ) -> Self {
        let groups = grouped(parameters.iter().copied().enumerate(), caps);
        let tail: Vec<(usize, usize)> = buffers.iter().copied().enumerate().collect();
        Self::of_groups(&groups, Bucket::new(&tail, extras, Layout::Host), layout)
    }

    /// The same parameters in one bucket for each block, from the last block to the first, and after them those without a
    /// block. `parameters` are their blocks and numbers of elements in registration order.
    pub(crate) fn by_block(
        &self,
        parameters: &[(Option<usize>, usize)],
        caps: BucketCaps,
        layout: Layout,
    ) -> Self {
        let mut blocks: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
        let mut others = Vec::new();
        for (index, (block, len)) in parameters.iter().enumerate() {
            match block {
                Some(block) => blocks.entry(*block).or_default().insert(0, (index, *len)),
                None => others.push((index, *len)),
            }
        }
        let mut groups: Vec<_> = blocks.into_values().rev().collect();
        groups.extend(grouped(others.into_iter(), caps));
        Self::of_groups(&groups, self.buckets[self.tail()].clone(), layout)
    }

    /// The same parameters in buckets of another order: the last one of `order` comes first.
    pub(crate) fn in_order(
        &self,
        order: &[usize],
        lens: &[usize],
        caps: BucketCaps,
        layout: Layout,
    ) -> Self {
        let groups = grouped(order.iter().map(|index| (*index, lens[*index])), caps);
        Self::of_groups(&groups, self.buckets[self.tail()].clone(), layout)
    }

    fn of_groups(groups: &[Vec<(usize, usize)>], tail: Bucket, layout: Layout) -> Self {
        let mut places = vec![(0, 0); groups.iter().map(Vec::len).sum()];
        for (bucket, group) in groups.iter().enumerate() {
            for (position, &(index, _)) in group.iter().enumerate() {
                places[index] = (bucket, position);
            }
        }
        let gradients = groups.iter().map(|group| Bucket::new(group, 0, layout));
        let buckets = gradients.chain([tail]).collect();
        Self { buckets, places }
    }

    /// The tail bucket alone, with one more sum per parameter. It goes through host memory when the gradients do not.
    pub(crate) fn tail_alone(&self) -> Self {
        Self {
            buckets: vec![self.tail_with_flags()],
            places: Vec::new(),
        }
    }

    /// The same plan with one more sum per parameter in the tail: no rank sees the flags of a bucket that is scattered.
    pub(crate) fn flags_in_tail(mut self) -> Self {
        let tail = self.tail();
        self.buckets[tail] = self.tail_with_flags();
        self
    }

    fn tail_with_flags(&self) -> Bucket {
        let tail = &self.buckets[self.tail()];
        let buffers: Vec<(usize, usize)> = tail.segments.iter().map(|s| (s.index, s.len)).collect();
        let extras = tail.extras.len() + self.places.len();
        Bucket::new(&buffers, extras, Layout::Host)
    }

    /// Index of the tail bucket.
    pub fn tail(&self) -> usize {
        self.buckets.len() - 1
    }

    /// One line that is equal on two ranks if and only if their plans are.
    pub fn describe(&self) -> String {
        let parts: Vec<String> = self
            .buckets
            .iter()
            .map(|b| format!("{}x{}", b.segments.len(), b.stride))
            .collect();
        parts.join(" ")
    }
}

/// Parameters (index and length), from the last to the first, in groups of at most the caps.
fn grouped(
    parameters: impl DoubleEndedIterator<Item = (usize, usize)>,
    caps: BucketCaps,
) -> Vec<Vec<(usize, usize)>> {
    let mut groups: Vec<Vec<(usize, usize)>> = Vec::new();
    let mut open: Vec<(usize, usize)> = Vec::new();
    let mut open_bytes = 0;
    for (index, len) in parameters.rev() {
        let cap = if groups.is_empty() {
            caps.first_bytes
        } else {
            caps.bytes
        };
        let bytes = len * size_of::<f32>();
        if !open.is_empty() && open_bytes + bytes > cap {
            groups.push(std::mem::take(&mut open));
            open_bytes = 0;
        }
        open.push((index, len));
        open_bytes += bytes;
    }
    if !open.is_empty() {
        groups.push(open);
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caps(first: usize, rest: usize) -> BucketCaps {
        BucketCaps {
            first_bytes: first * size_of::<f32>(),
            bytes: rest * size_of::<f32>(),
        }
    }

    fn members(plan: &BucketPlan) -> Vec<Vec<usize>> {
        plan.buckets
            .iter()
            .map(|b| b.segments.iter().map(|s| s.index).collect())
            .collect()
    }

    #[test]
    fn parameters_are_taken_from_the_last_and_buckets_close_by_size() {
        let plan = BucketPlan::new(&[10, 20, 30, 40], &[], caps(40, 50), 0, Layout::Host);
        assert_eq!(members(&plan), vec![vec![3], vec![2, 1], vec![0], vec![]]);
        assert_eq!(plan.places, vec![(2, 0), (1, 1), (1, 0), (0, 0)]);
    }

    #[test]
    fn a_parameter_larger_than_the_cap_has_a_bucket_of_its_own() {
        let plan = BucketPlan::new(&[5, 1000, 5], &[], caps(10, 10), 0, Layout::Host);
        assert_eq!(members(&plan), vec![vec![2], vec![1], vec![0], vec![]]);
    }

    #[test]
    fn the_tail_carries_buffers_and_extras() {
        let plan = BucketPlan::new(&[3], &[7, 8], BucketCaps::default(), 3, Layout::Host);
        let tail = &plan.buckets[plan.tail()];
        assert_eq!(tail.segments.len(), 2);
        assert_eq!(tail.extras.len(), 3);
        assert!(plan.buckets[0].extras.is_empty());
    }

    #[test]
    fn the_tail_alone_has_a_sum_more_for_each_parameter() {
        let plan = BucketPlan::new(
            &[3, 4, 5],
            &[7, 8],
            BucketCaps::default(),
            3,
            Layout::Device,
        );
        let alone = plan.tail_alone();
        assert_eq!((alone.buckets.len(), alone.tail()), (1, 0));
        assert_eq!(alone.buckets[0].extras.len(), 6);
        assert_eq!(
            alone.buckets[0].segments,
            plan.buckets[plan.tail()].segments
        );
    }

    #[test]
    fn no_two_ranges_of_a_block_overlap_and_all_lie_inside_the_stride() {
        let lens: Vec<usize> = vec![0, 1, 15, 16, 17, 63, 1000];
        for layout in [Layout::Host, Layout::Device] {
            let plan = BucketPlan::new(&lens, &lens, caps(64, 128), 5, layout);
            for (at, bucket) in plan.buckets.iter().enumerate() {
                let align = if at == plan.tail() {
                    HOST_ALIGN
                } else {
                    layout.align()
                };
                let mut end = 0;
                for segment in &bucket.segments {
                    assert!(segment.offset >= end && segment.offset % align == 0);
                    end = segment.offset + segment.len;
                }
                assert!(bucket.flags >= end);
                assert_eq!(bucket.weight, bucket.flags + bucket.segments.len());
                assert_eq!(bucket.extras.start, bucket.weight + 1);
                assert!(bucket.extras.end <= bucket.stride);
                assert_eq!(bucket.stride % align, 0);
            }
        }
    }
}
