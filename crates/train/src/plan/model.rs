//! What a model costs on one rank, from dry steps of the same model with few layers. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Link, VALUE_BYTES};

/// All-reduces of a layer that is cut into parts: two in the forward pass and two in the backward pass.
const REDUCTIONS_OF_LAYER: f64 = 4.0;
/// Those of the embedding, in the forward pass, and of the scores, in the backward pass.
const REDUCTIONS_OUTSIDE: [f64; 2] = [1.0, 1.0];
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
    /// Bytes of the optimizer's state for each byte of weights: 2 for AdamW, 0 for SGD without momentum.
    pub state: f64,
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
    /// Bytes that a forward pass leaves for its backward pass, where this was measured.
    pub kept_bytes: Option<f64>,
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
            kept_bytes: (self.kept_bytes.into_iter())
                .chain(other.kept_bytes)
                .reduce(f64::max),
            pass_bytes: larger.pass_bytes,
            end_bytes: larger.end_bytes,
            ..quieter
        }
    }

    fn values(&self) -> f64 {
        let [outer, layer] = self.parameters.map(|count| count as f64);
        outer + layer * self.layers as f64
    }

    /// Bytes of values that wait in the largest pass, and temporary ones.
    fn in_pass(&self) -> f64 {
        // Weights, gradients in their buckets, and the optimizer's state were there.
        self.besides(self.pass_bytes, 2.0 + self.state)
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
    /// Bytes for a sample that the forward pass leaves for the backward pass.
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
    /// Everything outside of the layers.
    pub outer: PartCosts,
    /// One layer.
    pub layer: PartCosts,
    /// Bytes for a sample that come and go in a pass. With recomputed blocks these are the values of one of them.
    pub temporary: f64,
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
    /// Bytes of the optimizer's state for each byte of weights.
    pub state: f64,
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
    /// Bytes of one of them on its way from stage to stage, and of a tied value; parts add up in f32.
    pub boundary_value_bytes: usize,
    /// Predictions of a sample.
    pub predictions: usize,
    /// Trained values that both ends of the model read.
    pub tied: usize,
}

impl Shape {
    /// Bytes of a sample between two layers.
    pub(super) fn boundary_bytes(&self) -> f64 {
        (self.boundary * self.boundary_value_bytes) as f64
    }

    /// Seconds that the ranks of `tp` wait for each other in a pass of `samples` samples through `layers` layers, and bytes that
    /// each of them sends. `has_ends` says whether embedding and scores are among them.
    pub(super) fn between_parts(
        &self,
        link: Link,
        [tp, layers, samples]: [f64; 3],
        recompute: bool,
        has_ends: [bool; 2],
    ) -> [f64; 2] {
        // Recomputed blocks send their forward half again.
        let again = if recompute { 1.5 } else { 1.0 };
        let [embedding, scores] = has_ends.map(f64::from);
        let [of_embedding, of_scores] = REDUCTIONS_OUTSIDE;
        let times =
            REDUCTIONS_OF_LAYER * layers * again + of_embedding * embedding + of_scores * scores;
        let bytes = self.boundary as f64 * VALUE_BYTES * samples;
        let loss = LOSS_BYTES * self.predictions as f64 * samples * scores;
        let seconds = times * link.all_reduce(tp, bytes) + scores * link.all_reduce(tp, loss);
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
            let alike = |recompute| {
                let depths = depths.iter().copied();
                let alike = depths.filter(|depth| (depth.tp, depth.recompute) == (tp, recompute));
                alike.collect::<Vec<_>>()
            };
            let plain = PassMemory::of(&alike(false));
            let memory = match recompute {
                true => PassMemory::recomputed(&alike(true), plain, shape.boundary_bytes()),
                false => plain,
            };
            if let Some(link) = link.filter(|_| tp > 1) {
                // What the ranks wait for each other is planned for other links too.
                measured.iter_mut().for_each(|depth| {
                    let size = [tp, depth.layers, depth.samples].map(|count| count as f64);
                    let [seconds, _] = shape.between_parts(link, size, recompute, [true; 2]);
                    let computed = (depth.forward + depth.backward - seconds).max(0.0);
                    let share = computed / (depth.forward + depth.backward);
                    depth.forward *= share;
                    depth.backward *= share;
                });
            }
            Way::of(&measured, memory)
        });
        let ways: Vec<Way> = ways.collect();
        let whole = || depths.iter().filter(|depth| depth.tp == 1);
        // A pass leaves memory with the allocator, the less the smaller it was.
        let extra = whole().map(|depth| depth.besides(depth.end_bytes, 3.0 + depth.state));
        Self {
            shape,
            ways,
            rest: whole().map(|depth| depth.rest_bytes).fold(0.0, f64::max),
            step_extra: extra.reduce(f64::min).unwrap_or_default().max(0.0),
            // That of most layers is the nearest to the model's.
            state: (depths.iter().max_by_key(|depth| depth.layers))
                .map_or(0.0, |depth| depth.state),
        }
    }

    /// The costs with these parts in passes of so many samples, measured or derived from those that were.
    pub(super) fn way(&self, tp: usize, recompute: bool, samples: f64) -> Way {
        if let Some(way) = self.nearest(samples, |way| (way.tp, way.recompute) == (tp, recompute)) {
            return way;
        }
        let alike = |way: &Way| way.recompute == recompute && tp.is_multiple_of(way.tp);
        let fewer = self.ways.iter().filter(|way| alike(way));
        let most = fewer.map(|way| way.tp).max();
        let most = self.nearest(samples, |way| alike(way) && Some(way.tp) == most);
        most.unwrap_or_default()
            .cut(tp, self.shape.boundary_bytes())
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
}

/// Bytes of a pass for a sample.
#[derive(Clone, Copy, Default)]
struct PassMemory {
    /// Kept outside of the layers, and in each of them.
    kept: [f64; 2],
    temporary: f64,
}

impl PassMemory {
    /// From the same model with few layers and with more. Passes that were never seen waiting keep all that they have.
    fn of(depths: &[Depth]) -> Self {
        let figures = |figure: fn(&Depth) -> Option<f64>| {
            let measured = depths.iter();
            let measured = measured.filter_map(|depth| Some((depth, figure(depth)?)));
            measured.collect::<Vec<_>>()
        };
        let mut kept = figures(|depth| depth.kept_bytes);
        if kept.is_empty() {
            let most = depths.iter().map(|depth| depth.samples).max();
            kept = figures(|depth| Some(depth.in_pass()));
            kept.retain(|(depth, _)| Some(depth.samples) == most);
        }
        kept.sort_by_key(|(depth, _)| depth.layers);
        Self::with(of_layers(&kept), depths)
    }

    /// With recomputed blocks, whose layers keep their inputs; what is outside of them keeps what it does in a `plain` pass.
    fn recomputed(depths: &[Depth], plain: Self, input: f64) -> Self {
        Self::with([plain.kept[0], input], depths)
    }

    /// The largest pass shows what comes and goes, in a process where nothing else has waited.
    fn with(kept: [f64; 2], depths: &[Depth]) -> Self {
        let alone = depths.iter().filter(|depth| depth.kept_bytes.is_none());
        let largest = alone.max_by_key(|depth| (depth.samples, depth.layers));
        let temporary = largest.map_or(0.0, |depth| {
            let [outer, layer] = kept;
            let waits = outer + layer * depth.layers as f64;
            (depth.in_pass() / depth.samples.max(1) as f64 - waits).max(0.0)
        });
        Self { kept, temporary }
    }
}

/// Of a figure of the same model with few layers and with more, what a sample adds outside of the layers and in each of them.
fn of_layers(figures: &[(&Depth, f64)]) -> [f64; 2] {
    let (Some(first), Some(last)) = (figures.first(), figures.last()) else {
        return [0.0; 2];
    };
    let of = |(depth, figure): &(&Depth, f64)| figure / depth.samples.max(1) as f64;
    let more = last.0.layers - first.0.layers;
    let layer = match more > 0 {
        true => ((of(last) - of(first)) / more as f64).max(0.0),
        false => 0.0,
    };
    [(of(last) - layer * last.0.layers as f64).max(0.0), layer]
}

impl Way {
    /// From the same model with few layers and with more.
    fn of(depths: &[Depth], memory: PassMemory) -> Self {
        let Some(last) = depths.last() else {
            return Self::default();
        };
        let split = |seconds: fn(&Depth) -> f64| {
            let figures = depths.iter().map(|depth| (depth, seconds(depth)));
            of_layers(&figures.collect::<Vec<_>>())
        };
        let forward = split(|depth| depth.forward);
        let backward = split(|depth| depth.backward);
        let per_value = |seconds: f64| seconds.max(0.0) / last.values().max(1.0);
        let part = |at: usize| {
            let parameters = last.parameters[at] as f64;
            PartCosts {
                parameters,
                forward: forward[at],
                backward: backward[at],
                kept: memory.kept[at],
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
            temporary: memory.temporary,
        }
    }

    /// The same in more parts, if each takes its share of the work. What is between the layers is whole in every part.
    fn cut(self, tp: usize, boundary: f64) -> Self {
        let share = self.tp as f64 / tp as f64;
        let cut = |part: PartCosts, whole: f64| PartCosts {
            kept: whole + (part.kept - whole) * share,
            parameters: part.parameters * share,
            forward: part.forward * share,
            backward: part.backward * share,
            optimizer: part.optimizer * share,
            other: part.other * share,
        };
        Self {
            tp,
            outer: cut(self.outer, 0.0),
            layer: cut(self.layer, (2.0 * boundary).min(self.layer.kept)),
            temporary: self.temporary * share,
            ..self
        }
    }
}
