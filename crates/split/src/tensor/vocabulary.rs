//! Scores whose classes are cut into parts: cross entropy and the best class, without all classes of a score in one place.

use burn::tensor::{Bool, FloatDType, IndexingUpdateOp, Int, Tensor};
use paceline_collective::ReduceOp;
use paceline_ddp::DdpError;
use paceline_nn::Failure;
use paceline_nn::tape::plain;

use super::TensorParallel;
use super::exchange::{Like, sums_of};
use super::operations::{Slots, deposits};

/// Where classes lie in one part.
pub(super) struct Places<const D: usize> {
    /// The number in the part; 0 for a class of another part.
    pub(super) index: Tensor<D, Int>,
    /// Whether the class belongs to another part.
    pub(super) elsewhere: Tensor<D, Bool>,
}

impl TensorParallel {
    /// Where `classes`, of `total`, lie in part `part`.
    pub(super) fn places_in<const D: usize>(
        &self,
        part: usize,
        total: usize,
        classes: &Tensor<D, Int>,
    ) -> Places<D> {
        let share = self.share(total, part);
        let index = classes.clone() - share.start as i64;
        let below = index.clone().lower_elem(0);
        let elsewhere = below.bool_or(index.clone().greater_equal_elem(share.len() as i64));
        Places {
            index: index.mask_fill(elsewhere.clone(), 0),
            elsewhere,
        }
    }

    /// The cross entropy of each prediction: minus the logarithm of the softmax of its right class.
    ///
    /// *Shape*: for each part of this rank the scores of its classes, `[predictions, classes of the part]`; the right classes,
    /// `[predictions]`, numbered over all parts; to `[predictions]`. `classes` is the number of all classes, of which each part
    /// has its [`share`](Self::share).
    ///
    /// *Numerics*: in f32, or f64 for scores of f64; sums along the tree over the parts.
    ///
    /// *Memory*: the softmax of this rank's classes until the backward pass, nothing of the other ranks'. *Cost*: all-reduces of
    /// 1 and 2 numbers for each prediction if there are several ranks; nothing backward.
    ///
    /// *Source*: Shoeybi et al. 2019, Megatron-LM.
    pub fn cross_entropy(
        &self,
        scores: Vec<Tensor<2>>,
        classes: usize,
        right: Tensor<1, Int>,
    ) -> Tensor<1> {
        let dtype: FloatDType = scores[0].dtype().into();
        let right: Tensor<2, Int> = right.inner().unsqueeze_dim(1);
        let places: Vec<Places<2>> = self
            .local()
            .map(|part| self.places_in(part, classes, &right))
            .collect();
        let values = scores.iter().cloned();
        let values = values.map(|scores| plain(scores).cast(sums_of(dtype)));
        let failure = Failure::current();
        let values: Vec<Tensor<2>> = values.collect();
        let like = Like::of(&values[0].clone().narrow(1, 0, 1));
        let computed = failure.attempt(|| self.log_sum(values, &places));
        let (losses, softmax) = match computed {
            Some((losses, softmax)) => (losses, Some(softmax)),
            None => (like.zeros(), None),
        };
        let slots = Slots::<1>::new(1);
        let softmax = softmax.map(Slots::filled);
        let likes: Vec<Like<2>> = scores.iter().map(Like::of).collect();
        let point = deposits(scores, |at| {
            let (slots, softmax) = (slots.clone(), softmax.clone());
            let Places { index, elsewhere } = &places[at];
            let (index, elsewhere) = (index.clone(), elsewhere.clone());
            let like = likes[at].clone();
            move || {
                let gradient: Tensor<2> = slots.get(0)?.unsqueeze_dim(1);
                let Some(softmax) = softmax.and_then(|softmax| softmax.pull(at)) else {
                    return Some(like.zeros());
                };
                let hit = gradient.ones_like().neg().mask_fill(elsewhere, 0.0);
                let error = softmax.scatter(1, index, hit, IndexingUpdateOp::Add);
                Some((error * gradient).cast(dtype))
            }
        });
        slots.outputs(&point, vec![losses.squeeze_dim(1)]).remove(0)
    }

    /// The losses, `[predictions, 1]`, and the softmax of each part of this rank.
    fn log_sum(
        &self,
        scores: Vec<Tensor<2>>,
        places: &[Places<2>],
    ) -> Result<(Tensor<2>, Vec<Tensor<2>>), DdpError> {
        let largest = scores.iter().map(|scores| scores.clone().max_dim(1));
        let largest = largest.reduce(Tensor::max_pair);
        let largest = self.max(largest.expect("every rank has a part"))?;
        let mut sums = Vec::new();
        let mut powers = Vec::new();
        for (scores, place) in scores.into_iter().zip(places) {
            let shifted = scores - largest.clone();
            let hit = shifted.clone().gather(1, place.index.clone());
            let hit = hit.mask_fill(place.elsewhere.clone(), 0.0);
            let power = shifted.exp();
            sums.push(Tensor::cat(vec![power.clone().sum_dim(1), hit], 1));
            powers.push(power);
        }
        let sums = self.sum(sums)?;
        let (total, hit) = (sums.clone().narrow(1, 0, 1), sums.narrow(1, 1, 1));
        let softmax = powers.into_iter().map(|power| power / total.clone());
        Ok((total.clone().log() - hit, softmax.collect()))
    }

    /// The class with the highest score of each prediction; the first one of several.
    ///
    /// *Shape*: as [`cross_entropy`](Self::cross_entropy). *Cost*: two all-reduces of 1 number for each prediction.
    ///
    /// *Errors*: failed collectives.
    pub fn argmax(
        &self,
        scores: Vec<Tensor<2>>,
        classes: usize,
    ) -> Result<Tensor<1, Int>, DdpError> {
        let best: Vec<(Tensor<2>, Tensor<2, Int>)> = scores
            .into_iter()
            .map(|scores| {
                let dtype = sums_of(scores.dtype().into());
                let scores = plain(scores).cast(dtype);
                (scores.clone().max_dim(1), scores.argmax(1))
            })
            .collect();
        let largest = best.iter().map(|(score, _)| score.clone());
        let largest = largest.reduce(Tensor::max_pair);
        let largest = self.max(largest.expect("every rank has a part"))?;
        let first = self.local().zip(best).map(|(part, (score, class))| {
            let class = class + self.share(classes, part).start as i64;
            class.mask_fill(score.not_equal(largest.clone()), classes as i64)
        });
        let first = first.reduce(Tensor::min_pair);
        let first: Tensor<1, Int> = first.expect("every rank has a part").squeeze_dim(1);
        if self.group.world() == 1 {
            return Ok(first);
        }
        let device = first.device();
        let data = first.into_data().convert::<i64>();
        let mut all: Vec<i64> = data.try_into_vec().expect("it was converted");
        let done = self.group.all_reduce(&mut all, ReduceOp::Min);
        done.map_err(|error| self.failed(error))?;
        Ok(Tensor::from_data(&all[..], &device))
    }
}
