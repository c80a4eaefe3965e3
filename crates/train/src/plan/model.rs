//! What a model costs on one rank, from dry steps of the same model with few layers. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Link, MOMENTS, VALUE_BYTES};

/// All-reduces of a layer that is cut into parts: two in the forward pass and two in the backward pass.
const REDUCTIONS_OF_LAYER: f64 = 4.0;
/// Those of the embedding and the scores.
const REDUCTIONS_OUTSIDE: f64 = 2.0;
/// What the ranks that share the scores of a prediction send for its loss: a maximum, a sum and the score of the right token.
const LOSS_BYTES: f64 = 12.0;

/// One depth of a model, as a dry step has shown it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Depth {
    /// Layers of this model.
    pub layers: usize,
    /// Ranks that share each layer.
    pub tp: usize,
    /// Whether blocks were recomputed.
    pub recompute: bool,
    /// Samples of the pass.
    pub samples: usize,
    /// Trained values of a rank outside of the layers, and in one of them.
    pub parameters: [usize; 2],
    /// Seconds of a forward pass.
    pub forward: f64,
    /// Seconds of a backward pass.
    pub backward: f64,
    /// Seconds of the optimizer's step.
    pub optimizer: f64,
    /// Seconds of a step on one rank besides these.
    pub other: f64,
    /// Resident bytes of the process without the model.
    pub rest_bytes: f64,
    /// Most resident bytes up to the end of the backward pass.
    pub pass_bytes: f64,
    /// Most resident bytes from there to the end of the step.
    pub end_bytes: f64,
}

impl Depth {
    /// Of two runs of the same dry step, the times of the quieter one and the larger memory.
    #[must_use]
    pub fn or_quieter(self, other: Self) -> Self {
        let seconds = |one: &Self| one.forward + one.backward + one.optimizer + one.other;
        let quieter = match seconds(&other) < seconds(&self) {
            true => other,
            false => self,
        };
        let larger = match other.pass_bytes > self.pass_bytes {
            true => other,
            false => self,
        };
        Self {
            rest_bytes: larger.rest_bytes,
            pass_bytes: larger.pass_bytes,
            end_bytes: larger.end_bytes,
            ..quieter
        }
    }

    fn values(&self) -> f64 {
        let [outer, layer] = self.parameters.map(|count| count as f64);
        outer + layer * self.layers as f64
    }

    /// What is resident besides the process and so many values for each trained one.
    fn besides(&self, bytes: f64, copies: f64) -> f64 {
        bytes - self.rest_bytes - VALUE_BYTES * self.values() * copies
    }
}

/// Costs of a part of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PartCosts {
    /// Trained values.
    pub parameters: f64,
    /// Seconds of its forward pass for a sample.
    pub forward: f64,
    /// Seconds of its backward pass for a sample.
    pub backward: f64,
    /// Bytes for a sample of a pass: those kept for the backward pass, and temporary ones.
    pub activations: f64,
    /// Those that wait for the backward pass.
    pub kept: f64,
    /// Seconds of the optimizer's step for it.
    pub optimizer: f64,
    /// Seconds of copying and averaging its gradients, on one rank.
    pub other: f64,
}

/// A way to compute the model, and its costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Way {
    /// Ranks that share each layer.
    pub tp: usize,
    /// Whether blocks are recomputed, as part of the backward pass.
    pub recompute: bool,
    /// Samples of a pass.
    pub samples: usize,
    /// Everything outside of the layers. With recomputed blocks its activations contain those of one layer.
    pub outer: PartCosts,
    /// One layer.
    pub layer: PartCosts,
}

/// What a model costs on one rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ModelCosts {
    /// The model.
    pub shape: Shape,
    /// The measured ways, the plain one first.
    pub ways: Vec<Way>,
    /// Bytes of the process without a model.
    pub rest: f64,
    /// Temporary bytes of the optimizer's step.
    pub step_extra: f64,
}

/// The shape of a model that the figures do not show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Equal layers; 0 for a model that is no list of layers.
    pub layers: usize,
    /// Attention heads of a layer, which tensor parallelism deals out; 0 for none.
    pub heads: usize,
    /// Values of a sample between two layers.
    pub boundary: usize,
    /// Predictions of a sample.
    pub predictions: usize,
}

impl Shape {
    /// Bytes of a sample between two layers.
    pub(super) fn boundary_bytes(&self) -> f64 {
        self.boundary as f64 * VALUE_BYTES
    }

    /// Seconds that the ranks of `tp` wait for each other in a pass of `samples` samples through `layers` layers, and bytes that
    /// each of them sends.
    pub(super) fn between_parts(
        &self,
        link: Link,
        [tp, layers, samples]: [f64; 3],
        recompute: bool,
    ) -> [f64; 2] {
        // Recomputed blocks send their forward half again.
        let again = if recompute { 1.5 } else { 1.0 };
        let times = REDUCTIONS_OF_LAYER * layers * again + REDUCTIONS_OUTSIDE;
        let bytes = self.boundary_bytes() * samples;
        let loss = LOSS_BYTES * self.predictions as f64 * samples;
        let seconds = times * link.all_reduce(tp, bytes) + link.all_reduce(tp, loss);
        [seconds, 2.0 * (tp - 1.0) / tp * (times * bytes + loss)]
    }
}

impl ModelCosts {
    /// The costs of a model of this shape, from the same model with fewer layers. `link` was between the ranks that measured.
    #[must_use]
    pub fn of(depths: &[Depth], shape: Shape, link: Option<Link>) -> Self {
        let mut kinds: BTreeMap<(usize, bool, usize), Vec<Depth>> = BTreeMap::new();
        for depth in depths {
            let kind = (depth.tp, depth.recompute, depth.samples);
            kinds.entry(kind).or_default().push(*depth);
        }
        let ways = kinds.into_iter().map(|((tp, recompute, _), mut measured)| {
            measured.sort_by_key(|depth| depth.layers);
            if let Some(link) = link.filter(|_| tp > 1) {
                // What the ranks wait for each other is planned for other links too.
                measured.iter_mut().for_each(|depth| {
                    let size = [tp, depth.layers, depth.samples].map(|count| count as f64);
                    let [seconds, _] = shape.between_parts(link, size, recompute);
                    let computed = (depth.forward + depth.backward - seconds).max(0.0);
                    let share = computed / (depth.forward + depth.backward);
                    depth.forward *= share;
                    depth.backward *= share;
                });
            }
            Way::of(&measured)
        });
        let mut ways: Vec<Way> = ways.collect();
        let measured = ways.clone();
        ways.iter_mut().for_each(|way| way.part_kept(&measured));
        let whole = || depths.iter().filter(|depth| depth.tp == 1);
        // A pass leaves memory with the allocator, the less the smaller it was.
        let extra = whole().map(|depth| depth.besides(depth.end_bytes, 3.0 + MOMENTS));
        Self {
            shape,
            ways,
            rest: whole().map(|depth| depth.rest_bytes).fold(0.0, f64::max),
            step_extra: extra.reduce(f64::min).unwrap_or_default().max(0.0),
        }
    }

    /// The costs with these parts in passes of so many samples, measured or derived from those that were.
    pub(super) fn way(&self, tp: usize, recompute: bool, samples: f64) -> Way {
        if let Some(way) = self.nearest(samples, |way| (way.tp, way.recompute) == (tp, recompute)) {
            return way;
        }
        let fewer = |way: &&Way| !way.recompute && tp.is_multiple_of(way.tp);
        let most = self.ways.iter().filter(fewer).map(|way| way.tp).max();
        let most = self.nearest(samples, |way| !way.recompute && Some(way.tp) == most);
        let way = most
            .unwrap_or_default()
            .cut(tp, self.shape.boundary_bytes());
        match recompute {
            true => self.recomputed(way),
            false => way,
        }
    }

    /// The one whose passes are most like these.
    fn nearest(&self, samples: f64, fits: impl Fn(&Way) -> bool) -> Option<Way> {
        let fitting = self.ways.iter().filter(|way| fits(way));
        let nearest = fitting.min_by(|a, b| {
            let ratio = |way: &Way| (way.samples as f64 / samples).ln().abs();
            ratio(a).total_cmp(&ratio(b))
        });
        nearest.copied()
    }

    /// `way` with recomputed blocks, in the proportion that was measured without parts.
    fn recomputed(&self, mut way: Way) -> Way {
        let samples = way.samples.max(1) as f64;
        let again = self.nearest(samples, |way| way.tp == 1 && way.recompute);
        let plain = again.and_then(|again| {
            let samples = again.samples as f64;
            self.nearest(samples, |way| way.tp == 1 && !way.recompute)
        });
        // By how much the backward pass is longer, in forward passes, and the memory larger, in layers.
        let (mut longer, mut larger) = (1.0, 1.0);
        let mut input = self.shape.boundary_bytes();
        let mut fixed = 0.0;
        if let (Some(plain), Some(again)) = (plain, again) {
            let [before, now] = [plain, again].map(|way| way.outer.activations);
            let ratio = |more: f64, than: f64| if than > 0.0 { more / than } else { 1.0 };
            longer = ratio(
                again.layer.backward - plain.layer.backward,
                plain.layer.forward,
            );
            larger = ratio(now - before, plain.layer.activations);
            input = input.max(again.layer.kept);
            // What a layer has in any pass is shared as its weights are.
            let share = ratio(way.layer.parameters, again.layer.parameters);
            fixed = (again.layer.activations - input).max(0.0) * again.samples as f64 * share;
        }
        way.outer.activations += larger.max(0.0) * way.layer.activations;
        way.layer.backward += longer.max(0.0) * way.layer.forward;
        way.layer.kept = input;
        way.layer.activations = input + fixed / samples;
        way.recompute = true;
        way
    }
}

impl Way {
    /// From the same model with few layers and with more.
    fn of(depths: &[Depth]) -> Self {
        let (Some(first), Some(last)) = (depths.first(), depths.last()) else {
            return Self::default();
        };
        let more = (last.layers - first.layers) as f64;
        // For a sample: outside of the layers, and in each of them.
        let split = |figure: &dyn Fn(&Depth) -> f64| {
            let of = |depth: &Depth| figure(depth) / depth.samples.max(1) as f64;
            let layer = match more > 0.0 {
                true => ((of(last) - of(first)) / more).max(0.0),
                false => 0.0,
            };
            [(of(last) - layer * last.layers as f64).max(0.0), layer]
        };
        let forward = split(&|depth| depth.forward);
        let backward = split(&|depth| depth.backward);
        // Weights, buckets and moments are there in the pass; the averages join them at its end.
        let activations = split(&|depth| depth.besides(depth.pass_bytes, 2.0 + MOMENTS));
        let per_value = |seconds: f64| seconds.max(0.0) / last.values().max(1.0);
        let part = |at: usize| {
            let parameters = last.parameters[at] as f64;
            PartCosts {
                parameters,
                forward: forward[at],
                backward: backward[at],
                activations: activations[at],
                kept: activations[at],
                optimizer: parameters * per_value(last.optimizer),
                other: parameters * per_value(last.other),
            }
        };
        Self {
            tp: last.tp,
            recompute: last.recompute,
            samples: last.samples,
            outer: part(0),
            layer: part(1),
        }
    }

    /// Tells what waits for the backward pass from what a pass has anyway: the first grows with the samples of a pass.
    fn part_kept(&mut self, all: &[Self]) {
        let other = all.iter().copied().find(|way| {
            (way.tp, way.recompute) == (self.tp, self.recompute) && way.samples != self.samples
        });
        if let Some(other) = other {
            let (here, there) = (self.samples as f64, other.samples as f64);
            let kept = |own: &PartCosts, other: &PartCosts| {
                let grown = own.activations * here - other.activations * there;
                (grown / (here - there)).clamp(0.0, own.activations.min(other.activations))
            };
            self.outer.kept = kept(&self.outer, &other.outer);
            self.layer.kept = kept(&self.layer, &other.layer);
        }
    }

    /// The same in more parts, if each takes its share of the work. What is between the layers is whole in every part.
    fn cut(self, tp: usize, boundary: f64) -> Self {
        let share = self.tp as f64 / tp as f64;
        let cut = |part: PartCosts, whole: f64| PartCosts {
            activations: whole + (part.activations - whole) * share,
            kept: part.kept * share,
            parameters: part.parameters * share,
            forward: part.forward * share,
            backward: part.backward * share,
            optimizer: part.optimizer * share,
            other: part.other * share,
        };
        Self {
            tp,
            outer: cut(self.outer, 0.0),
            layer: cut(self.layer, (2.0 * boundary).min(self.layer.activations)),
            ..self
        }
    }
}
