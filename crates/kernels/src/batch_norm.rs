//! Batch normalisation in training.

#![expect(unsafe_code, reason = "results are not filled with zeros first")]

use std::mem::MaybeUninit;

use crate::isa::{Kernels, Task};
use crate::registers::Register;
use crate::sums::{moments, sums};
use crate::threads::{each_mut, written};

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
/// use paceline_kernels::{BatchNorm, Kernels};
///
/// let norm = BatchNorm {
///     images: 2,
///     channels: 1,
///     positions: 2,
///     epsilon: 0.0,
/// };
/// let (y, moments) = Kernels::of_process()?.batch_norm(&norm, &[1.0, 3.0, 5.0, 7.0], &[1.0], &[0.0]);
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
}

impl Kernels {
    /// `(x - mean) / sqrt(variance + epsilon) * gamma + beta`, with the moments of `x`.
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
        gamma: &[f32],
        beta: &[f32],
    ) -> (Vec<f32>, Moments) {
        norm.check(&[x], &[gamma, beta]);
        let (channels, positions) = (norm.channels, norm.positions);
        let mut planes = vec![[0.0; 2]; norm.images * channels];
        each_mut(&mut planes, 1, 2 * x.len(), |first, planes| {
            self.run(PlaneMoments {
                x: &x[first * positions..][..planes.len() * positions],
                positions,
                planes,
            });
        });
        let moments: Vec<(f64, f64)> = (0..channels)
            .map(|channel| norm.together(planes.iter().skip(channel).step_by(channels)))
            .collect();
        let moments = Moments {
            mean: moments.iter().map(|(mean, _)| *mean as f32).collect(),
            variance: moments
                .iter()
                .map(|(_, variance)| *variance as f32)
                .collect(),
        };
        let factors: Vec<[f32; 3]> = (0..channels)
            .map(|channel| {
                let scale = f64::from(gamma[channel]) * norm.inverse(moments.variance[channel]);
                [moments.mean[channel], scale as f32, beta[channel]]
            })
            .collect();
        let fill = |first: usize, y: &mut [MaybeUninit<f32>]| {
            self.run(Scale {
                x: &x[first * positions..][..y.len()],
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
        gamma: &[f32],
        moments: &Moments,
        gradient: &[f32],
    ) -> BatchNormGradients {
        norm.check(&[x, gradient], &[gamma, &moments.mean, &moments.variance]);
        let (channels, positions) = (norm.channels, norm.positions);
        let mut planes = vec![[0.0; 2]; norm.images * channels];
        each_mut(&mut planes, 1, 2 * x.len(), |first, planes| {
            let range = first * positions..(first + planes.len()) * positions;
            self.run(PlaneProducts {
                x: &x[range.clone()],
                gradient: &gradient[range],
                positions,
                first,
                mean: &moments.mean,
                planes,
            });
        });
        let count = (norm.images * positions) as f64;
        let of_channels: Vec<([f32; 4], [f32; 2])> = (0..channels)
            .map(|channel| {
                let [mut sum, mut product] = [0.0; 2];
                for plane in planes.iter().skip(channel).step_by(channels) {
                    sum += f64::from(plane[0]);
                    product += f64::from(plane[1]);
                }
                let inverse = norm.inverse(moments.variance[channel]);
                let scale = f64::from(gamma[channel]) * inverse;
                let of_distance = -scale * product * inverse * inverse / count;
                let factors =
                    [scale, of_distance, -scale * sum / count].map(|factor| factor as f32);
                let [scale, of_distance, shift] = factors;
                let factors = [moments.mean[channel], scale, of_distance, shift];
                (factors, [(product * inverse) as f32, sum as f32])
            })
            .collect();
        let (factors, parameters): (Vec<_>, Vec<_>) = of_channels.into_iter().unzip();
        let fill = |first: usize, out: &mut [MaybeUninit<f32>]| {
            let range = first * positions..first * positions + out.len();
            self.run(Combine {
                x: &x[range.clone()],
                gradient: &gradient[range],
                positions,
                first,
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
        }
    }
}

impl BatchNorm {
    /// Mean and variance of the values of several planes with these means and sums of squared distances.
    fn together<'a>(&self, planes: impl Iterator<Item = &'a [f32; 2]>) -> (f64, f64) {
        let positions = self.positions as f64;
        let (mut mean, mut squares) = (0.0, 0.0);
        for (before, [plane_mean, plane_squares]) in planes.enumerate() {
            let (before, count) = (before as f64, before as f64 + 1.0);
            let distance = f64::from(*plane_mean) - mean;
            mean += distance / count;
            squares += f64::from(*plane_squares) + distance * distance * positions * before / count;
        }
        (mean, squares / (self.images as f64 * positions))
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
    positions: usize,
    first: usize,
    mean: &'a [f32],
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
        for (number, ((x, gradient), plane)) in (self.first..).zip(pairs.zip(self.planes)) {
            let mean = R::splat(self.mean[number % self.mean.len()]);
            *plane = sums(gradient, x, |[sum, product], gradient: R, x: R| {
                [sum.add(gradient), gradient.mul_add(x.sub(mean), product)]
            });
        }
    }
}

/// `(x - mean) * scale + shift` with the factors of each plane's channel.
struct Scale<'a> {
    x: &'a [f32],
    positions: usize,
    first: usize,
    factors: &'a [[f32; 3]],
    y: &'a mut [MaybeUninit<f32>],
}

impl Task for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let positions = self.positions.max(1);
        let pairs = self
            .x
            .chunks_exact(positions)
            .zip(self.y.chunks_exact_mut(positions));
        for (number, (x, y)) in (self.first..).zip(pairs) {
            let [mean, scale, shift] = self.factors[number % self.factors.len()];
            for (x, y) in x.iter().zip(y) {
                y.write((x - mean).mul_add(scale, shift));
            }
        }
    }
}

/// `gradient * scale + (x - mean) * of_distance + shift` with the factors of each plane's channel.
struct Combine<'a> {
    x: &'a [f32],
    gradient: &'a [f32],
    positions: usize,
    first: usize,
    factors: &'a [[f32; 4]],
    out: &'a mut [MaybeUninit<f32>],
}

impl Task for Combine<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let positions = self.positions.max(1);
        let pairs = self
            .x
            .chunks_exact(positions)
            .zip(self.gradient.chunks_exact(positions));
        let all = pairs.zip(self.out.chunks_exact_mut(positions));
        for (number, ((x, gradient), out)) in (self.first..).zip(all) {
            let [mean, scale, of_distance, shift] = self.factors[number % self.factors.len()];
            for ((x, gradient), out) in x.iter().zip(gradient).zip(out) {
                out.write(gradient.mul_add(scale, (x - mean).mul_add(of_distance, shift)));
            }
        }
    }
}
