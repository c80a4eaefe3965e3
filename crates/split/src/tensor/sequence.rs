//! What stands between the matrices of a layer: whole on every rank, or each part's share of every sequence.

use std::iter::repeat;
use std::ops::Range;

use burn::module::{Module, Param, ParamId};
use burn::nn::Dropout;
use burn::tensor::{FloatDType, Tensor};
use paceline_nn::tape::{Point, plain};
use paceline_nn::{Failure, MapParams, Pass, map_params, mix};

use super::TensorParallel;
use super::exchange::Like;
use super::operations::{Slots, deposits};

/// The dimension of the sequence: the last but one.
const fn dim<const D: usize>() -> usize {
    assert!(D > 1, "a sequence has a dimension for its values");
    D - 2
}

/// Activations between the matrices are a `Vec`: one tensor that all ranks have alike, or with sequence parallelism each
/// [`local`](Self::local) part's share of the sequence.
///
/// *Shape*: `[.., length, width]`. With sequence parallelism the parts divide the length; otherwise its operations panic.
impl TensorParallel {
    /// From activations to the whole sequence for each part: [`copy`](Self::copy), or with sequence parallelism an all-gather
    /// whose backward pass is a reduce-scatter.
    ///
    /// *Cost*: in f32, the elements of the whole sequence once in the backward pass, and with sequence parallelism half an
    /// all-reduce of them in each direction.
    pub fn enter<const D: usize>(&self, mut x: Vec<Tensor<D>>) -> Vec<Tensor<D>> {
        if !self.cuts_sequence {
            return self.copy(x.remove(0));
        }
        let failure = Failure::current();
        let whole = self.gathered(&failure, x.iter().cloned().map(plain).collect());
        let (slots, shares) = (Slots::new(x.len()), Slots::new(x.len()));
        let (tp, gradients, to) = (self.clone(), slots.clone(), shares.clone());
        let like = Like::of(&whole);
        let point = deposits(x, |at| {
            let shares = shares.clone();
            move || shares.get(at)
        });
        let point = point.then(move || {
            let parts = gradients.take(repeat(&like));
            to.fill(tp.scattered(&failure, parts));
        });
        let copies = vec![whole; self.local().len()];
        slots.outputs(&point, copies)
    }

    /// From each part's share of a sum to activations: [`reduce`](Self::reduce), or with sequence parallelism a reduce-scatter
    /// whose backward pass is an all-gather.
    ///
    /// *Cost*: as [`enter`](Self::enter), with forward and backward exchanged.
    pub fn leave<const D: usize>(&self, parts: Vec<Tensor<D>>) -> Vec<Tensor<D>> {
        if !self.cuts_sequence {
            return vec![self.reduce(parts)];
        }
        let failure = Failure::current();
        let shares = self.scattered(&failure, parts.iter().cloned().map(plain).collect());
        let likes: Vec<Like<D>> = shares.iter().map(Like::of).collect();
        let (slots, whole) = (Slots::new(shares.len()), Slots::new(1));
        let (tp, gradients, to) = (self.clone(), slots.clone(), whole.clone());
        let point = deposits(parts, |_| {
            let whole = whole.clone();
            move || whole.get(0)
        });
        let point = point.then(move || {
            let shares = gradients.take(&likes);
            to.fill(vec![tp.gathered(&failure, shares)]);
        });
        slots.outputs(&point, shares)
    }

    /// Runs a module that all ranks have alike, such as a norm, on activations. With sequence parallelism it runs on each
    /// part's share, and its parameters get the sum of all parts' gradients.
    ///
    /// *Cost*: with sequence parallelism an all-reduce of the module's parameters in the backward pass.
    pub fn on_activations<M: Module, const D: usize>(
        &self,
        module: &M,
        x: Vec<Tensor<D>>,
        mut f: impl FnMut(&M, Tensor<D>) -> Tensor<D>,
    ) -> Vec<Tensor<D>> {
        if !self.cuts_sequence {
            return x.into_iter().map(|x| f(module, x)).collect();
        }
        let through = Slots::new(x.len());
        let mut shared = Shared {
            point: deposits(x.clone(), |at| {
                let through = through.clone();
                move || through.get(at)
            }),
            sums: Slots::new(0),
            params: Vec::new(),
        };
        // Nothing is replaced: the mapper only visits each parameter once.
        drop(map_params(module.clone(), &mut shared));
        let Shared {
            point,
            sums,
            params,
        } = shared;
        let per_part: Vec<Slots<1>> = x.iter().map(|_| Slots::new(params.len())).collect();
        let (tp, failure, gradients) = (self.clone(), Failure::current(), per_part.clone());
        let likes: Vec<Like<1>> = params.iter().map(|param| param.like.clone()).collect();
        let is_double = likes.iter().any(Like::is_double);
        let dtype = match is_double {
            true => FloatDType::F64,
            false => FloatDType::F32,
        };
        let point = match params.is_empty() {
            true => point,
            false => point.then(move || {
                let parts = gradients.iter().map(|slots| {
                    let flat = slots.take(&likes).into_iter();
                    Tensor::cat(flat.map(|values| values.cast(dtype)).collect(), 0)
                });
                let parts: Vec<Tensor<1>> = parts.collect();
                let like = Like::of(&parts[0]);
                let sum = failure.attempt(|| tp.sum(parts));
                let sum = sum.unwrap_or_else(|| like.zeros());
                let mut start = 0;
                let cut = likes.iter().map(|like| {
                    let end = start + like.elements();
                    let values = sum.clone().slice(start..end);
                    start = end;
                    values
                });
                sums.fill(cut.collect());
            }),
        };
        let x = through.outputs(&point, x.into_iter().map(plain).collect());
        x.into_iter()
            .zip(per_part)
            .map(|(x, slots)| {
                let mut copies = Copies {
                    point: &point,
                    slots,
                    params: &params,
                };
                f(&map_params(module.clone(), &mut copies), x)
            })
            .collect()
    }

    /// Dropout on activations. With sequence parallelism each part's share has random numbers of its own, from the seed of the
    /// [`Pass`], so they do not depend on where the part is.
    pub fn dropout<const D: usize>(&self, dropout: &Dropout, x: Vec<Tensor<D>>) -> Vec<Tensor<D>> {
        let pass = Pass::current().filter(|_| self.cuts_sequence);
        let Some(seed) = pass.and_then(|pass| pass.seed_of_parts()) else {
            return x.into_iter().map(|x| dropout.forward(x)).collect();
        };
        let device = x[0].device();
        let dropped = self.local().zip(x).map(|(part, x)| {
            device.seed(mix(seed, part as u64, 0));
            dropout.forward(x)
        });
        let dropped = dropped.collect();
        device.seed(mix(seed, self.parts() as u64, 0));
        dropped
    }

    /// Activations as one tensor, for the next stage of a pipeline.
    ///
    /// *Cost*: with sequence parallelism and several parts on this rank, a copy.
    pub(crate) fn join<const D: usize>(&self, mut x: Vec<Tensor<D>>) -> Tensor<D> {
        if x.len() == 1 {
            return x.remove(0);
        }
        let share = x[0].dims()[dim::<D>()];
        let joined = Tensor::cat(x.iter().cloned().map(plain).collect(), dim::<D>());
        let slots = Slots::new(1);
        let point = deposits(x, |at| {
            let slots = slots.clone();
            move || {
                let gradient: Tensor<D> = slots.get(0)?;
                let (device, dtype) = (gradient.device(), gradient.dtype());
                let gradient = gradient.narrow(dim::<D>(), at * share, share);
                Some(Tensor::from_data(gradient.into_data(), (&device, dtype)))
            }
        });
        slots.outputs(&point, vec![joined]).remove(0)
    }

    /// The activations that were [joined](Self::join).
    pub(crate) fn part<const D: usize>(&self, x: Tensor<D>) -> Vec<Tensor<D>> {
        if !self.cuts_sequence {
            return vec![x];
        }
        let parts = self.local().len();
        let share = x.dims()[dim::<D>()] / parts;
        self.by_part(x, dim::<D>(), &vec![share; parts])
    }

    /// The places in sequences of `length` that the tensors of activations hold.
    pub(super) fn places(&self, length: usize) -> Vec<Range<usize>> {
        match self.cuts_sequence {
            false => std::iter::once(0..length).collect(),
            true => self.local().map(|part| self.share(length, part)).collect(),
        }
    }

    /// The whole sequence, of each part's share; zeros after a failure.
    fn gathered<const D: usize>(&self, failure: &Failure, shares: Vec<Tensor<D>>) -> Tensor<D> {
        let rows = Tensor::cat(shares, dim::<D>()).swap_dims(0, dim::<D>());
        let length = rows.dims()[0] / self.local().len() * self.parts();
        let like = Like::of(&rows).with_rows(length);
        let whole = failure.attempt(|| self.gather_rows(rows, length));
        let whole = whole.unwrap_or_else(|| like.zeros());
        whole.swap_dims(0, dim::<D>())
    }

    /// This rank's parts' shares of the sum of all parts; zeros after a failure.
    fn scattered<const D: usize>(
        &self,
        failure: &Failure,
        parts: Vec<Tensor<D>>,
    ) -> Vec<Tensor<D>> {
        let length = parts[0].dims()[dim::<D>()];
        if let Err(error) = self.divides(length, "places of a sequence") {
            panic!("{error}");
        }
        let mine = self.share_of_rank(length, self.group.rank());
        let parts: Vec<Tensor<D>> = parts
            .into_iter()
            .map(|part| part.swap_dims(0, dim::<D>()))
            .collect();
        let like = Like::of(&parts[0]).with_rows(mine.len());
        let rows = failure.attempt(|| self.sum_rows(parts));
        let rows = rows.unwrap_or_else(|| like.zeros());
        let places = self.places(length).into_iter();
        places
            .map(|place| {
                let rows = rows.clone();
                let rows = rows.slice(place.start - mine.start..place.end - mine.start);
                rows.swap_dims(0, dim::<D>())
            })
            .collect()
    }
}

/// A parameter of a module that all ranks have alike.
struct SharedParam {
    id: ParamId,
    /// Row-major.
    like: Like<1>,
}

/// Goes through the tracked parameters: each gets its gradient from `sums`.
struct Shared {
    point: Point,
    sums: Slots<1>,
    params: Vec<SharedParam>,
}

impl MapParams for Shared {
    fn map<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Param<Tensor<D>>> {
        let tensor = param.val();
        if tensor.is_tracked() {
            let (at, sums) = (self.params.len(), self.sums.clone());
            let (shape, dtype): (_, FloatDType) = (tensor.dims(), tensor.dtype().into());
            let like = Like::of(&plain(tensor.clone()).reshape([-1]));
            self.params.push(SharedParam { id: param.id, like });
            let gradient = move || Some(sums.get(at)?.reshape(shape).cast(dtype));
            self.point = self.point.clone().deposit(tensor, gradient);
        }
        None
    }
}

/// Puts a part's copies in the place of the tracked parameters.
struct Copies<'a> {
    point: &'a Point,
    slots: Slots<1>,
    params: &'a [SharedParam],
}

impl MapParams for Copies<'_> {
    fn map<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Option<Param<Tensor<D>>> {
        let at = self.params.iter().position(|known| known.id == param.id)?;
        let (id, tensor, mapper) = param.clone().consume();
        let slots = self.slots.clone();
        let keep = move |gradient: Tensor<D>| slots.put(at, gradient.reshape([-1]));
        let copy = self.point.output(plain(tensor), keep);
        Some(Param::from_mapped_value(id, copy, mapper))
    }
}
