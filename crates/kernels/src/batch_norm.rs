//! Batch normalisation in training.

#![expect(unsafe_code, reason = "results are not filled with zeros first")]

use std::mem::MaybeUninit;

use crate::activations::{relu, relu_gradient};
use crate::isa::{Kernels, Task};
use crate::registers::Register;
use crate::sums::{moments, sums};
use crate::threads::{each_mut, written, written_beside};

/// Batch normalisation of values of this shape: each channel by the mean and the variance of its values in all images.
///
/// *Numerics*: mean and squared distances are those of each image's plane, in a fixed order of 32 lanes, and put together in f64 by
/// the rule of Chan, Golub and LeVeque 1979 ("Updating formulae and a pairwise algorithm for computing sample variances"). The variance is the biased one, as that
/// of the normalisation in Burn and PyTorch.
///
/// *Source*: Ioffe and Szegedy 2015, "Batch Normalization".
///
/// *Example*:
/// ```
/// use paceline_kernels::{After, BatchNorm, Kernels};
///
/// let norm = BatchNorm {
///     images: 2,
///     channels: 1,
///     positions: 2,
///     epsilon: 0.0,
/// };
/// let (x, kernels) = ([1.0, 3.0, 5.0, 7.0], Kernels::of_process()?);
/// let (y, moments) = kernels.batch_norm(&norm, &x, [&[1.0], &[0.0]], After::Nothing);
/// assert_eq!((moments.mean[0], moments.variance[0]), (4.0, 5.0));
/// assert!((y[3] - 3.0 / 5.0_f32.sqrt()).abs() < 1e-6);
/// # Ok::<(), paceline_kernels::IsaError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct BatchNorm {
    /// Images in the batch.
    pub images: usize,
    /// Channels of an image.
    pub channels: usize,
    /// Values of a channel in an image.
    pub positions: usize,
    /// Added to the variance, against division by zero.
    pub epsilon: f64,
}

/// What a batch normalisation's values go through in the same pass over memory, with the bits of passes of their own.
#[derive(Clone, Copy, Debug)]
pub enum After<'a> {
    /// Nothing.
    Nothing,
    /// [`Kernels::relu`].
    Relu,
    /// A sum, then [`Kernels::relu`]. The values are those that are added, and for the gradients those of the output.
    AddRelu(&'a [f32]),
}

/// Mean and variance of each channel.
#[derive(Clone, Debug, PartialEq)]
pub struct Moments {
    /// The means.
    pub mean: Vec<f32>,
    /// The biased variances.
    pub variance: Vec<f32>,
}

/// Gradients of a batch normalisation.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchNormGradients {
    /// Of the input, in its shape.
    pub input: Vec<f32>,
    /// Of the scale of each channel.
    pub gamma: Vec<f32>,
    /// Of the shift of each channel.
    pub beta: Vec<f32>,
    /// Of what [`After::AddRelu`] adds, in the shape of the input.
    pub added: Option<Vec<f32>>,
}

impl<'a> After<'a> {
    /// Its values, or else these.
    fn values(self, or: &'a [f32]) -> &'a [f32] {
        match self {
            Self::AddRelu(values) => values,
            Self::Nothing | Self::Relu => or,
        }
    }

    /// What belongs to a part of the input.
    fn part(self, from: usize, len: usize) -> Self {
        match self {
            Self::AddRelu(values) => Self::AddRelu(&values[from..][..len]),
            Self::Nothing | Self::Relu => self,
        }
    }
}

impl BatchNorm {
    fn values(&self) -> usize {
        self.images * self.channels * self.positions
    }

    fn check(&self, of_values: &[&[f32]], of_channels: &[&[f32]]) {
        let has = |all: &[&[f32]], len| all.iter().all(|values| values.len() == len);
        assert!(
            has(of_values, self.values()) && has(of_channels, self.channels),
            "slices for {self:?}"
        );
    }

    /// `1 / sqrt(variance + epsilon)`.
    fn inverse(&self, variance: f32) -> f64 {
        1.0 / (f64::from(variance) + self.epsilon).sqrt()
    }

    /// Mean, scale and shift of each channel.
    fn factors(&self, [gamma, beta]: [&[f32]; 2], moments: &Moments) -> Vec<[f32; 3]> {
        (0..self.channels)
            .map(|channel| {
                let scale = f64::from(gamma[channel]) * self.inverse(moments.variance[channel]);
                [moments.mean[channel], scale as f32, beta[channel]]
            })
            .collect()
    }
}

impl Kernels {
    /// `(x - mean) / sqrt(variance + epsilon) * gamma + beta`, with the moments of `x`, and what comes after it.
    ///
    /// *Shape*: `x` and the result are `[images, channels, positions]`; `gamma` and `beta` have a value for each channel.
    ///
    /// # Panics
    ///
    /// If a slice has another length.
    pub fn batch_norm(
        self,
        norm: &BatchNorm,
        x: &[f32],
        [gamma, beta]: [&[f32]; 2],
        after: After<'_>,
    ) -> (Vec<f32>, Moments) {
        norm.check(&[x, after.values(x)], &[gamma, beta]);
        let (channels, positions) = (norm.channels, norm.positions);
        let mut planes = vec![[0.0; 2]; norm.images * channels];
        each_mut(&mut planes, 1, 2 * x.len(), |first, planes| {
            self.run(PlaneMoments {
                x: &x[first * positions..][..planes.len() * positions],
                positions,
                planes,
            });
        });
        let moments = norm.together(&planes);
        let moments = Moments {
            mean: moments.iter().map(|(mean, _)| *mean as f32).collect(),
            variance: moments
                .iter()
                .map(|(_, variance)| *variance as f32)
                .collect(),
        };
        let factors = norm.factors([gamma, beta], &moments);
        let fill = |first: usize, y: &mut [MaybeUninit<f32>]| {
            self.run(Scale {
                x: &x[first * positions..][..y.len()],
                after: after.part(first * positions, y.len()),
                positions,
                first,
                factors: &factors,
                y,
            });
        };
        // SAFETY: it writes a value for each of `x`.
        let y = unsafe { written(x.len(), positions, x.len(), fill) };
        (y, moments)
    }

    /// The gradients, from that of the output.
    ///
    /// *Shape*: `gradient` is that of `x`.
    ///
    /// # Panics
    ///
    /// If a slice has another length.
    pub fn batch_norm_gradients(
        self,
        norm: &BatchNorm,
        x: &[f32],
        [gamma, beta]: [&[f32]; 2],
        moments: &Moments,
        after: After<'_>,
        gradient: &[f32],
    ) -> BatchNormGradients {
        norm.check(
            &[x, gradient, after.values(x)],
            &[gamma, beta, &moments.mean, &moments.variance],
        );
        let (channels, positions) = (norm.channels, norm.positions);
        let scales = norm.factors([gamma, beta], moments);
        let products = |first: usize, added: &mut [MaybeUninit<f32>], planes: &mut [[f32; 2]]| {
            let range = first * positions..(first + planes.len()) * positions;
            self.run(PlaneProducts {
                x: &x[range.clone()],
                gradient: &gradient[range.clone()],
                after: after.part(range.start, range.len()),
                positions,
                first,
                factors: &scales,
                added,
                planes,
            });
        };
        let mut planes = vec![[0.0; 2]; norm.images * channels];
        let added = match after {
            After::AddRelu(_) => {
                // SAFETY: it writes a value for each of `x`.
                let added = unsafe {
                    let all = (x.len(), positions);
                    written_beside(all, (&mut planes, 1), 2 * x.len(), products)
                };
                Some(added)
            }
            After::Nothing | After::Relu => {
                let products = |first, planes: &mut [_]| products(first, &mut [], planes);
                each_mut(&mut planes, 1, 2 * x.len(), products);
                None
            }
        };
        let gradient = added.as_deref().unwrap_or(gradient);
        let count = (norm.images * positions) as f64;
        let of_channels: Vec<([f32; 2], [f32; 2])> = (0..channels)
            .map(|channel| {
                let [mut sum, mut product] = [0.0; 2];
                for plane in planes.iter().skip(channel).step_by(channels) {
                    sum += f64::from(plane[0]);
                    product += f64::from(plane[1]);
                }
                let inverse = norm.inverse(moments.variance[channel]);
                let scale = f64::from(gamma[channel]) * inverse;
                let of_distance = -scale * product * inverse * inverse / count;
                let factors = [of_distance, -scale * sum / count].map(|factor| factor as f32);
                (factors, [(product * inverse) as f32, sum as f32])
            })
            .collect();
        let (factors, parameters): (Vec<_>, Vec<_>) = of_channels.into_iter().unzip();
        let fill = |first: usize, out: &mut [MaybeUninit<f32>]| {
            let range = first * positions..first * positions + out.len();
            self.run(Combine {
                x: &x[range.clone()],
                gradient: &gradient[range],
                is_rectified: matches!(after, After::Relu),
                positions,
                first,
                scales: &scales,
                factors: &factors,
                out,
            });
        };
        // SAFETY: it writes a value for each of `x`.
        let input = unsafe { written(x.len(), positions, 2 * x.len(), fill) };
        BatchNormGradients {
            input,
            gamma: parameters.iter().map(|[gamma, _]| *gamma).collect(),
            beta: parameters.iter().map(|[_, beta]| *beta).collect(),
            added,
        }
    }
}

impl BatchNorm {
    /// Mean and variance of each channel, from the means and the sums of squared distances of all planes.
    fn together(&self, planes: &[[f32; 2]]) -> Vec<(f64, f64)> {
        let positions = self.positions as f64;
        let mut moments = vec![(0.0, 0.0); self.channels];
        // All channels side by side, because the sums of one wait for each other.
        let images = planes.chunks_exact(self.channels.max(1));
        for (image, planes) in images.enumerate() {
            let (before, count) = (image as f64, image as f64 + 1.0);
            for ((mean, squares), [plane_mean, plane_squares]) in moments.iter_mut().zip(planes) {
                let distance = f64::from(*plane_mean) - *mean;
                *mean += distance / count;
                *squares +=
                    f64::from(*plane_squares) + distance * distance * positions * before / count;
            }
        }
        for (_, squares) in &mut moments {
            *squares /= self.images as f64 * positions;
        }
        moments
    }
}

/// Mean and sum of the squared distances from it, for each plane.
struct PlaneMoments<'a> {
    x: &'a [f32],
    positions: usize,
    planes: &'a mut [[f32; 2]],
}

impl Task for PlaneMoments<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        for (x, plane) in self.x.chunks_exact(self.positions.max(1)).zip(self.planes) {
            *plane = moments::<R>(x);
        }
    }
}

/// Sums of the gradients, and of their products with the distances of `x` from its mean.
struct PlaneProducts<'a> {
    x: &'a [f32],
    gradient: &'a [f32],
    after: After<'a>,
    positions: usize,
    first: usize,
    factors: &'a [[f32; 3]],
    /// The gradients before [`After::AddRelu`], of which the sums are then.
    added: &'a mut [MaybeUninit<f32>],
    planes: &'a mut [[f32; 2]],
}

impl Task for PlaneProducts<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let positions = self.positions.max(1);
        let pairs = self
            .x
            .chunks_exact(positions)
            .zip(self.gradient.chunks_exact(positions));
        for (at, ((x, gradient), plane)) in pairs.zip(self.planes).enumerate() {
            let factors = self.factors[(self.first + at) % self.factors.len()];
            let [mean, scale, shift] = factors.map(R::splat);
            let add = |[sum, product]: [R; 2], gradient: R, distance: R| {
                [sum.add(gradient), gradient.mul_add(distance, product)]
            };
            *plane = match self.after {
                After::Nothing => sums(gradient, x, |all, gradient: R, x: R| {
                    add(all, gradient, x.sub(mean))
                }),
                After::Relu => sums(gradient, x, |all, gradient: R, x: R| {
                    let distance = x.sub(mean);
                    let output = distance.mul_add(scale, shift);
                    add(all, gradient.where_positive(output), distance)
                }),
                After::AddRelu(output) => {
                    let range = at * positions..(at + 1) * positions;
                    let added = &mut self.added[range.clone()];
                    let pairs = gradient.iter().zip(&output[range]);
                    for (added, (gradient, output)) in added.iter_mut().zip(pairs) {
                        added.write(relu_gradient(*output, *gradient));
                    }
                    // SAFETY: all were written.
                    let gradient = unsafe { added.assume_init_ref() };
                    sums(gradient, x, |all, gradient: R, x: R| {
                        add(all, gradient, x.sub(mean))
                    })
                }
            };
        }
    }
}

/// `(x - mean) * scale + shift` with the factors of each plane's channel, and what comes after it.
struct Scale<'a> {
    x: &'a [f32],
    after: After<'a>,
    positions: usize,
    first: usize,
    factors: &'a [[f32; 3]],
    y: &'a mut [MaybeUninit<f32>],
}

impl Task for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        match self.after {
            After::Nothing => self.each(|value, _| value),
            After::Relu => self.each(|value, _| relu(value)),
            After::AddRelu(_) => self.each(|value, added| relu(value + added)),
        }
    }
}

impl Scale<'_> {
    #[inline(always)]
    fn each(self, after: impl Fn(f32, f32) -> f32) {
        let positions = self.positions.max(1);
        let pairs = self
            .x
            .chunks_exact(positions)
            .zip(self.after.values(self.x).chunks_exact(positions));
        let all = pairs.zip(self.y.chunks_exact_mut(positions));
        for (number, ((x, added), y)) in (self.first..).zip(all) {
            let [mean, scale, shift] = self.factors[number % self.factors.len()];
            for ((x, added), y) in x.iter().zip(added).zip(y) {
                y.write(after((x - mean).mul_add(scale, shift), *added));
            }
        }
    }
}

/// `gradient * scale + (x - mean) * of_distance + shift` with the factors of each plane's channel.
struct Combine<'a> {
    x: &'a [f32],
    gradient: &'a [f32],
    /// Whether the gradient is that of [`After::Relu`].
    is_rectified: bool,
    positions: usize,
    first: usize,
    /// Mean, scale and shift of the output.
    scales: &'a [[f32; 3]],
    /// Distance and shift of the gradient.
    factors: &'a [[f32; 2]],
    out: &'a mut [MaybeUninit<f32>],
}

impl Task for Combine<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        match self.is_rectified {
            true => self.each(relu_gradient),
            false => self.each(|_, gradient| gradient),
        }
    }
}

impl Combine<'_> {
    /// `gradient` is that of the norm alone, from its output and the gradient given.
    #[inline(always)]
    fn each(self, gradient: impl Fn(f32, f32) -> f32) {
        let positions = self.positions.max(1);
        let pairs = self
            .x
            .chunks_exact(positions)
            .zip(self.gradient.chunks_exact(positions));
        let all = pairs.zip(self.out.chunks_exact_mut(positions));
        for (number, ((x, given), out)) in (self.first..).zip(all) {
            let channel = number % self.factors.len();
            let [mean, scale, output_shift] = self.scales[channel];
            let [of_distance, shift] = self.factors[channel];
            for ((x, given), out) in x.iter().zip(given).zip(out) {
                let distance = x - mean;
                let gradient = gradient(distance.mul_add(scale, output_shift), *given);
                out.write(gradient.mul_add(scale, distance.mul_add(of_distance, shift)));
            }
        }
    }
}
