//! Activations, and their gradients.

use crate::functions::{exp, map, scaled_erfc};
use crate::isa::Kernels;

/// Multiplications that take the time of a value.
const COST: usize = 32;

impl Kernels {
    /// `x` where it is above 0, and 0 elsewhere. NaN stays NaN.
    pub fn relu(self, x: &[f32]) -> Vec<f32> {
        map(self, [x; 2], 1, |x, _| relu(x))
    }

    /// The gradient of [`Kernels::relu`]'s input, from its output and that of the output.
    ///
    /// # Panics
    ///
    /// If the slices have different lengths.
    pub fn relu_gradient(self, output: &[f32], gradient: &[f32]) -> Vec<f32> {
        map(self, [output, gradient], 1, relu_gradient)
    }

    /// `x * P(x)` for each value, `P(x) = (1 + erf(x / sqrt(2))) / 2` being the probability that a normal variable lies below `x`.
    ///
    /// *Numerics*: within 4.1e-7 of the result's size, and 1e-6 for `x` below -12.9. For `x` below 0, `P(x)` is computed without taking a number near 1 from 1, so the result keeps its
    /// digits until it is no normal value.
    ///
    /// *Source*: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units (GELUs)"; the exact one, not that by `tanh`.
    pub fn gelu(self, x: &[f32]) -> Vec<f32> {
        map(self, [x; 2], COST, |x, _| {
            let (below, _) = normal(x);
            x * below
        })
    }

    /// The gradient of [`Kernels::gelu`]'s input, from that of its output: `gradient * (P(x) + x * p(x))`, with the density `p`.
    ///
    /// *Numerics*: the factor of `gradient`, which is at most 1.13, is within 2.2e-7.
    ///
    /// # Panics
    ///
    /// If the slices have different lengths.
    pub fn gelu_gradient(self, x: &[f32], gradient: &[f32]) -> Vec<f32> {
        map(self, [x, gradient], COST, |x, gradient| {
            let (below, density) = normal(x);
            gradient * x.mul_add(density, below)
        })
    }

    /// `1 / (1 + exp(-x))` for each value, the logistic function.
    ///
    /// *Numerics*: within 1.8e-7 of the result's size, and 1.5e-45 for `x` below -86.
    pub fn sigmoid(self, x: &[f32]) -> Vec<f32> {
        map(self, [x; 2], COST, |x, _| logistic(x)[0])
    }

    /// The gradient of [`Kernels::sigmoid`]'s input, from its output and that of the output.
    ///
    /// # Panics
    ///
    /// If the slices have different lengths.
    pub fn sigmoid_gradient(self, output: &[f32], gradient: &[f32]) -> Vec<f32> {
        map(self, [output, gradient], 2, |y, gradient| {
            gradient * y.mul_add(-y, y)
        })
    }

    /// `x * sigmoid(x)` for each value.
    ///
    /// *Numerics*: within 2.2e-7 of the result's size, and 1.5e-43 for `x` below -86.
    ///
    /// *Source*: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units (GELUs)"; Ramachandran, Zoph and Le 2017, "Searching for Activation Functions", as Swish.
    pub fn silu(self, x: &[f32]) -> Vec<f32> {
        map(self, [x; 2], COST, |x, _| x * logistic(x)[0])
    }

    /// The gradient of [`Kernels::silu`]'s input, from that of its output: `gradient * s * (1 + x * (1 - s))` with `s = sigmoid(x)`.
    ///
    /// *Numerics*: the factor of `gradient`, which is at most 1.1, is within 2.5e-7.
    ///
    /// # Panics
    ///
    /// If the slices have different lengths.
    pub fn silu_gradient(self, x: &[f32], gradient: &[f32]) -> Vec<f32> {
        map(self, [x, gradient], COST, |x, gradient| {
            let [value, rest] = logistic(x);
            gradient * (value * x.mul_add(rest, 1.0))
        })
    }

    /// The gradient of [`Kernels::tanh`]'s input, from its output and that of the output.
    ///
    /// # Panics
    ///
    /// If the slices have different lengths.
    pub fn tanh_gradient(self, output: &[f32], gradient: &[f32]) -> Vec<f32> {
        map(self, [output, gradient], 2, |y, gradient| {
            gradient * (-y).mul_add(y, 1.0)
        })
    }
}

/// The logistic function of `x`, and what it lacks of 1, without taking a number near 1 from 1.
#[inline(always)]
fn logistic(x: f32) -> [f32; 2] {
    let power = exp(-x.abs());
    let sum = 1.0 + power;
    let (value, rest) = if x < 0.0 { (power, 1.0) } else { (1.0, power) };
    [value / sum, rest / sum]
}

#[inline(always)]
pub(crate) fn relu(x: f32) -> f32 {
    if x <= 0.0 { 0.0 } else { x }
}

#[inline(always)]
pub(crate) fn relu_gradient(output: f32, gradient: f32) -> f32 {
    if output <= 0.0 { 0.0 } else { gradient }
}

/// The probability that a normal variable with variance 1 lies below `x`, and its density there.
#[inline(always)]
fn normal(x: f32) -> (f32, f32) {
    use std::f32::consts::FRAC_1_SQRT_2;
    const FRAC_1_SQRT_TAU: f32 = 0.398_942_3;
    // From here on the density is 0. NaN is not beyond.
    let size = if x.abs() > 15.0 { 15.0 } else { x.abs() };
    // What rounding takes from the square matters: the exponent of a distant value has few digits after the point.
    let square = size * size;
    let rest = size.mul_add(size, -square);
    let power = exp(-0.5 * square);
    let power = (-0.5 * rest).mul_add(power, power);
    let beyond = 0.5 * power * scaled_erfc(size * FRAC_1_SQRT_2);
    let below = if x < 0.0 { beyond } else { 1.0 - beyond };
    (below, power * FRAC_1_SQRT_TAU)
}
