//! Error feedback: what a lossy hook did not send of a shard's gradients is added to the shard's next ones.
//!
//! *Source*: Karimireddy et al. 2019, "Error feedback fixes SignSGD and other gradient compression schemes".

use super::{Context, Leaf};

/// The residuals of this rank's shards, by bucket and turn.
pub(super) struct Residuals(Vec<Vec<Residual>>);

struct Residual {
    /// Per unit of weight, so that it means the same in a step with other weights.
    kept: Vec<f32>,
    next: Option<Next>,
}

/// The residual after this step. It takes effect when the step has succeeded, so that one that fails leaves no trace.
struct Next {
    rest: Vec<f32>,
    weight: f32,
    used: Vec<bool>,
}

impl Residuals {
    pub(super) fn new(context: &Context) -> Self {
        let shards = context.shards(context.group.rank());
        let of_bucket = |bucket| {
            let residual = || Residual {
                kept: vec![0.0; context.len(bucket)],
                next: None,
            };
            std::iter::repeat_with(residual).take(shards).collect()
        };
        Self((0..context.buckets()).map(of_bucket).collect())
    }

    /// Forgets a step that did not end.
    pub(super) fn begin(&mut self) {
        for residual in self.0.iter_mut().flatten() {
            residual.next = None;
        }
    }

    /// The shard's gradients and its residual, times the shard's weight. Returns them to be changed into what is not sent.
    ///
    /// A parameter that the shard did not use is zero and keeps its residual: if no shard uses it, the optimizer gets
    /// nothing.
    pub(super) fn add(&mut self, context: &Context, leaf: &Leaf<'_>) -> &mut [f32] {
        let residual = &mut self.0[leaf.bucket][context.turn(leaf.shard)];
        let mut rest = vec![0.0; leaf.values.len()];
        let segments = &context.plan.buckets[leaf.bucket].segments;
        let used = leaf
            .used
            .iter()
            .map(|used| *used > 0.0 && leaf.weight > 0.0);
        let used: Vec<bool> = used.collect();
        for (segment, _) in segments.iter().zip(&used).filter(|(_, used)| **used) {
            let range = segment.offset..segment.offset + segment.len;
            let known = leaf.values[range.clone()]
                .iter()
                .zip(&residual.kept[range.clone()]);
            for (rest, (value, kept)) in rest[range].iter_mut().zip(known) {
                *rest = value + leaf.weight * kept;
            }
        }
        let next = residual.next.insert(Next {
            rest,
            weight: leaf.weight,
            used,
        });
        &mut next.rest
    }

    /// What [`add`](Self::add) returned for the shard of this turn.
    pub(super) fn rest(&mut self, bucket: usize, turn: usize) -> &mut [f32] {
        let next = self.0[bucket][turn].next.as_mut();
        &mut next.expect("every shard was added").rest
    }

    /// The residual of a parameter, if it is of one of this rank's shards.
    pub(super) fn of(
        &mut self,
        context: &Context,
        shard: usize,
        index: usize,
    ) -> Option<&mut [f32]> {
        let own = context.tree.range(context.group.rank());
        let (bucket, position) = context.plan.places[index];
        let segment = &context.plan.buckets[bucket].segments[position];
        let range = segment.offset..segment.offset + segment.len;
        let residual = own.contains(&shard).then(|| context.turn(shard))?;
        Some(&mut self.0[bucket][residual].kept[range])
    }

    /// Takes over the residuals of a step that has succeeded.
    pub(super) fn commit(&mut self, context: &Context) {
        for (bucket, residuals) in context.plan.buckets.iter().zip(&mut self.0) {
            for residual in residuals {
                let Some(next) = residual.next.take() else {
                    continue;
                };
                let used = bucket.segments.iter().zip(&next.used);
                for (segment, _) in used.filter(|(_, used)| **used) {
                    let range = segment.offset..segment.offset + segment.len;
                    let rest = &next.rest[range.clone()];
                    for (kept, rest) in residual.kept[range].iter_mut().zip(rest) {
                        *kept = rest / next.weight;
                    }
                }
            }
        }
    }
}
