//! Averages over all shards, where the reducer left them.

use std::ops::Range;

use burn::tensor::{AllocationProperty, Bytes, Tensor};

use super::blocks::Landed;
use crate::buffer::Value;

/// Averages over all shards, by parameter; `None` where no rank used it, or where this rank owns nothing of it. Slices
/// instead of whole parameters with [`Setup::shares`](super::Setup::shares).
pub(crate) enum Means {
    Host(HostMeans),
    Device(Vec<Option<Tensor<1>>>),
}

impl Means {
    pub(crate) fn scale(&mut self, factor: f32) {
        match self {
            Self::Host(means) => means.scale(factor),
            Self::Device(values) => {
                for slot in values.iter_mut() {
                    *slot = slot.take().map(|mean| mean.mul_scalar(factor));
                }
            }
        }
    }

    /// Removes all averages.
    pub(crate) fn clear(&mut self) {
        match self {
            Self::Host(means) => *means = HostMeans::of(means.places.len()),
            Self::Device(values) => values.fill(None),
        }
    }
}

/// Averages in ordinary memory: that of their buckets, which comes back to the reducer with the last gradient that is made of it.
pub(crate) struct HostMeans {
    buckets: Vec<Landed>,
    /// By parameter: its bucket, and its place in the values of that.
    places: Vec<Option<(usize, Range<usize>)>>,
}

impl HostMeans {
    /// Of so many parameters, none of which has an average yet.
    pub(super) fn of(parameters: usize) -> Self {
        Self {
            buckets: Vec::new(),
            places: vec![None; parameters],
        }
    }

    /// Takes a bucket's sums, and divides them by the sum of the weights. `places` are those of its parameters, by their index.
    pub(super) fn push(
        &mut self,
        mut sums: Landed,
        weight: f32,
        places: impl IntoIterator<Item = (usize, Range<usize>)>,
    ) {
        let bucket = self.buckets.len();
        for (index, place) in places {
            divide(&mut sums.values_mut()[place.clone()], weight);
            self.places[index] = Some((bucket, place));
        }
        self.buckets.push(sums);
    }

    fn scale(&mut self, factor: f32) {
        for (bucket, place) in self.places.iter().flatten() {
            let values = &mut self.buckets[*bucket].values_mut()[place.clone()];
            values.iter_mut().for_each(|value| *value *= factor);
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Option<&[f32]>> {
        let places = self.places.iter();
        places.map(|at| {
            let (bucket, place) = at.as_ref()?;
            Some(&self.buckets[*bucket].values()[place.clone()])
        })
    }

    /// Lends the averages' memory.
    pub(crate) fn into_values(self) -> Vec<Option<Value>> {
        let buckets = self.buckets.into_iter().map(bytes::Bytes::from_owner);
        let buckets: Vec<bytes::Bytes> = buckets.collect();
        let lend = |(bucket, Range { start, end }): (usize, Range<usize>)| {
            let bytes = start * size_of::<f32>()..end * size_of::<f32>();
            let bytes = buckets[bucket].slice(bytes);
            Value::Lent(Bytes::from_shared(bytes, AllocationProperty::Other))
        };
        self.places.into_iter().map(|at| at.map(lend)).collect()
    }
}

/// `values / weight`
fn divide(values: &mut [f32], weight: f32) {
    if weight == 1.0 {
        return;
    }
    // A power of two, as most batches have, has an exact inverse: products are faster and have the same bits.
    let inverse = 1.0 / weight;
    match weight.to_bits() & 0x007f_ffff == 0 && inverse.is_normal() {
        true => values.iter_mut().for_each(|value| *value *= inverse),
        false => values.iter_mut().for_each(|value| *value /= weight),
    }
}

impl AsRef<[u8]> for Landed {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(self.values())
    }
}

#[cfg(test)]
impl From<Vec<Option<Vec<f32>>>> for HostMeans {
    fn from(values: Vec<Option<Vec<f32>>>) -> Self {
        let mut means = Self::of(values.len());
        for (index, values) in values.into_iter().enumerate() {
            let Some(values) = values else { continue };
            let place = 0..values.len();
            means.push(Landed::Slice(values, 0), 1.0, [(index, place)]);
        }
        means
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_with_an_inverse_have_the_bits_of_quotients() {
        let values: Vec<f32> = (0..=u16::MAX)
            .map(|high| f32::from_bits((u32::from(high) << 16) | 0x1235))
            .filter(|value| !value.is_nan())
            .collect();
        let weights = (-140..=127).map(|power| 2.0_f32.powi(power));
        for weight in weights.chain([0.0, -4.0, 3.0, 1e-40, f32::INFINITY]) {
            let mut divided = values.clone();
            divide(&mut divided, weight);
            for (value, divided) in values.iter().zip(divided) {
                let expected = value / weight;
                assert_eq!(divided.to_bits(), expected.to_bits(), "{value} / {weight}");
            }
        }
    }
}
