//! Normalisation of rows.

#![expect(unsafe_code, reason = "results are not filled with zeros first")]

use std::mem::MaybeUninit;

use crate::isa::{Kernels, Task};
use crate::registers::Register;
use crate::scratch::Scratch;
use crate::sums::{moments, squares, sums};
use crate::threads::{each_mut, written_beside};

/// Rows whose gradients of gamma and beta are added up in f32; the sums of such pieces are added in f64. Part of the bits.
const PIECE: usize = 32;

/// Layer normalisation of values of this shape: each row by the mean and the variance of its values.
///
/// *Numerics*: sums over a row are in a fixed order of 32 lanes. The variance is the biased one, as that of the normalisation in Burn
/// and PyTorch.
///
/// *Source*: Ba, Kiros and Hinton 2016, "Layer Normalization"; Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
///
/// *Example*:
/// ```
/// use paceline_kernels::{Kernels, LayerNorm};
///
/// let norm = LayerNorm {
///     rows: 1,
///     width: 4,
///     epsilon: 0.0,
///     is_centred: true,
/// };
/// let (y, moments) = Kernels::of_process()?.layer_norm(&norm, &[1.0, 3.0, 5.0, 7.0], &[1.0; 4], None);
/// assert_eq!(moments.mean, [4.0]);
/// assert!((y[3] - 3.0 / 5.0_f32.sqrt()).abs() < 1e-6);
/// # Ok::<(), paceline_kernels::IsaError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm {
    /// Rows of the input.
    pub rows: usize,
    /// Values of a row.
    pub width: usize,
    /// Added to the variance, against division by zero.
    pub epsilon: f64,
    /// Whether the mean is taken away. Without that the variance is the mean square: RMS normalisation.
    pub is_centred: bool,
}

/// What the gradients need of each row.
#[derive(Clone, Debug, PartialEq)]
pub struct RowMoments {
    /// The means, which are 0 for rows that are not centred.
    pub mean: Vec<f32>,
    /// `1 / sqrt(variance + epsilon)`.
    pub inverse: Vec<f32>,
}

/// Gradients of a layer normalisation.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerNormGradients {
    /// Of the input, in its shape.
    pub input: Vec<f32>,
    /// Of the scale of each column.
    pub gamma: Vec<f32>,
    /// Of the shift of each column.
    pub beta: Vec<f32>,
}

impl LayerNorm {
    fn check(&self, of_values: &[&[f32]], of_columns: &[&[f32]], of_rows: &[&[f32]]) {
        let has = |all: &[&[f32]], len| all.iter().all(|values| values.len() == len);
        assert!(
            has(of_values, self.rows * self.width)
                && has(of_columns, self.width)
                && has(of_rows, self.rows),
            "slices for {self:?}"
        );
    }
}

impl Kernels {
    /// `(x - mean) / sqrt(variance + epsilon) * gamma + beta`, with the moments of each row of `x`.
    ///
    /// *Shape*: `x` and the result are `[rows, width]`; `gamma` and `beta` have a value for each column.
    ///
    /// # Panics
    ///
    /// If a slice has another length.
    pub fn layer_norm(
        self,
        norm: &LayerNorm,
        x: &[f32],
        gamma: &[f32],
        beta: Option<&[f32]>,
    ) -> (Vec<f32>, RowMoments) {
        let zeros = vec![0.0; norm.width];
        let beta = beta.unwrap_or(&zeros);
        norm.check(&[x], &[gamma, beta], &[]);
        let width = norm.width;
        let mut moments = vec![[0.0; 2]; norm.rows];
        let fill = |first: usize, y: &mut [MaybeUninit<f32>], moments: &mut [[f32; 2]]| {
            self.run(Normalise {
                norm,
                x: &x[first * width..][..y.len()],
                gamma,
                beta,
                y,
                moments,
            });
        };
        // SAFETY: it writes a value for each of `x`.
        let y = unsafe { written_beside((x.len(), width), (&mut moments, 1), 4 * x.len(), fill) };
        let (mean, inverse) = moments
            .iter()
            .map(|[mean, inverse]| (mean, inverse))
            .unzip();
        (y, RowMoments { mean, inverse })
    }

    /// The gradients, from that of the output.
    ///
    /// *Shape*: `gradient` is that of `x`.
    ///
    /// # Panics
    ///
    /// If a slice has another length.
    pub fn layer_norm_gradients(
        self,
        norm: &LayerNorm,
        x: &[f32],
        gamma: &[f32],
        moments: &RowMoments,
        gradient: &[f32],
    ) -> LayerNormGradients {
        norm.check(&[x, gradient], &[gamma], &[&moments.mean, &moments.inverse]);
        let width = norm.width;
        // For each piece a row of gamma's gradients and one of beta's.
        let mut pieces = vec![0.0; norm.rows.div_ceil(PIECE) * 2 * width];
        let fill = |first: usize, out: &mut [MaybeUninit<f32>], pieces: &mut [f32]| {
            let range = first * PIECE * width..first * PIECE * width + out.len();
            self.run(Differentiate {
                norm,
                x: &x[range.clone()],
                gradient: &gradient[range],
                gamma,
                mean: &moments.mean[first * PIECE..],
                inverse: &moments.inverse[first * PIECE..],
                out,
                pieces,
            });
        };
        let units = (x.len(), PIECE * width);
        // SAFETY: it writes a value for each of `x`.
        let input = unsafe { written_beside(units, (&mut pieces, 2 * width), 8 * x.len(), fill) };
        let mut sums = vec![0.0; 2 * width];
        each_mut(&mut sums, 1, pieces.len(), |first, sums| {
            self.run(AddPieces {
                pieces: &pieces,
                first,
                stride: 2 * width,
                sums,
            });
        });
        let mut gamma: Vec<f32> = sums.iter().map(|sum| *sum as f32).collect();
        let beta = gamma.split_off(width);
        LayerNormGradients { input, gamma, beta }
    }
}

/// The output, and mean and `1 / sqrt(variance + epsilon)` of each row.
struct Normalise<'a> {
    norm: &'a LayerNorm,
    x: &'a [f32],
    gamma: &'a [f32],
    beta: &'a [f32],
    y: &'a mut [MaybeUninit<f32>],
    moments: &'a mut [[f32; 2]],
}

impl Task for Normalise<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let width = self.norm.width.max(1);
        let rows = self
            .x
            .chunks_exact(width)
            .zip(self.y.chunks_exact_mut(width));
        for ((x, y), of_row) in rows.zip(self.moments) {
            let [mean, squares] = match self.norm.is_centred {
                true => moments::<R>(x),
                false => [0.0, squares::<R>(x, 0.0)],
            };
            let variance = f64::from(squares) / x.len() as f64;
            let inverse = (1.0 / (variance + self.norm.epsilon).sqrt()) as f32;
            *of_row = [mean, inverse];
            let parameters = self.gamma.iter().zip(self.beta);
            for ((x, y), (gamma, beta)) in x.iter().zip(y).zip(parameters) {
                y.write(((x - mean) * inverse).mul_add(*gamma, *beta));
            }
        }
    }
}

/// The gradients of the input, and the sums of those of gamma and beta over each piece of the rows, which are zeros first.
struct Differentiate<'a> {
    norm: &'a LayerNorm,
    x: &'a [f32],
    gradient: &'a [f32],
    gamma: &'a [f32],
    mean: &'a [f32],
    inverse: &'a [f32],
    out: &'a mut [MaybeUninit<f32>],
    pieces: &'a mut [f32],
}

impl Task for Differentiate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let width = self.norm.width.max(1);
        let mut scaled = Scratch::new(width);
        let inputs = self
            .x
            .chunks_exact(width)
            .zip(self.gradient.chunks_exact(width));
        let moments = self.mean.iter().zip(self.inverse);
        let rows = inputs.zip(self.out.chunks_exact_mut(width)).zip(moments);
        for (row, (((x, gradient), out), (mean, inverse))) in rows.enumerate() {
            let (of_gamma, of_beta) =
                self.pieces[row / PIECE * 2 * width..][..2 * width].split_at_mut(width);
            add_row(
                [x, gradient, self.gamma],
                [*mean, *inverse],
                of_gamma,
                of_beta,
                &mut scaled,
            );
            let shift = R::splat(*mean);
            let [sum, product] = sums(&scaled, x, |[sum, product], scaled: R, x| {
                [sum.add(scaled), scaled.mul_add(x.sub(shift), product)]
            });
            let count = width as f32;
            let of_normal = -product * inverse / count;
            let shift = if self.norm.is_centred {
                -sum / count
            } else {
                0.0
            };
            for ((x, scaled), out) in x.iter().zip(scaled.iter()).zip(out) {
                let normal = (x - mean) * inverse;
                out.write(normal.mul_add(of_normal, scaled + shift) * inverse);
            }
        }
    }
}

/// Adds a row's gradients to those of gamma and beta, and writes its products with gamma. The compiler only knows of parameters that
/// they lie apart.
#[inline(always)]
fn add_row(
    [x, gradient, gamma]: [&[f32]; 3],
    [mean, inverse]: [f32; 2],
    of_gamma: &mut [f32],
    of_beta: &mut [f32],
    scaled: &mut [f32],
) {
    let inputs = x.iter().zip(gradient).zip(gamma);
    let outputs = of_gamma.iter_mut().zip(of_beta).zip(scaled);
    for (((x, gradient), gamma), ((of_gamma, of_beta), scaled)) in inputs.zip(outputs) {
        *of_gamma = gradient.mul_add((x - mean) * inverse, *of_gamma);
        *of_beta += gradient;
        *scaled = gradient * gamma;
    }
}

/// Adds up columns of all pieces, from number `first` on.
struct AddPieces<'a> {
    pieces: &'a [f32],
    first: usize,
    stride: usize,
    sums: &'a mut [f64],
}

impl Task for AddPieces<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        for piece in self.pieces.chunks_exact(self.stride.max(1)) {
            for (sum, value) in self.sums.iter_mut().zip(&piece[self.first..]) {
                *sum += f64::from(*value);
            }
        }
    }
}
