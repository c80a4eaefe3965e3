//! Probabilities from logits, and their gradient.

#![expect(unsafe_code, reason = "results are not filled with zeros first")]

use std::mem::MaybeUninit;

use crate::functions::exp;
use crate::isa::{Kernels, Task};
use crate::registers::Register;
use crate::sums::{LANES, add_lanes, sums};
use crate::threads::written;

impl Kernels {
    /// `exp(x) / sum(exp(x))` for each row of `width` values.
    ///
    /// *Numerics*: the row's largest value is first taken from all, and the sum is in a fixed order of 32 lanes. `-inf` has probability 0;
    /// a row that has nothing else, or NaN or `inf`, becomes NaN.
    ///
    /// # Panics
    ///
    /// If `x` is not made of rows.
    pub fn softmax(self, x: &[f32], width: usize) -> Vec<f32> {
        check(x.len(), width);
        let fill = |first: usize, y: &mut [MaybeUninit<f32>]| {
            let x = &x[first * width..][..y.len()];
            self.run(Softmax { x, width, y });
        };
        // SAFETY: it writes a value for each of `x`.
        unsafe { written(x.len(), width, 16 * x.len(), fill) }
    }

    /// The gradient of the input of [`Kernels::softmax`], from its output `y` and that one's gradient:
    /// `y * (gradient - sum(gradient * y))`.
    ///
    /// # Panics
    ///
    /// If the slices have different lengths, or are not made of rows.
    pub fn softmax_gradient(self, y: &[f32], gradient: &[f32], width: usize) -> Vec<f32> {
        check(y.len(), width);
        assert_eq!(y.len(), gradient.len(), "a gradient for each value");
        let fill = |first: usize, out: &mut [MaybeUninit<f32>]| {
            let range = first * width..first * width + out.len();
            self.run(Gradient {
                y: &y[range.clone()],
                gradient: &gradient[range],
                width,
                out,
            });
        };
        // SAFETY: it writes a value for each of `y`.
        unsafe { written(y.len(), width, 2 * y.len(), fill) }
    }
}

fn check(len: usize, width: usize) {
    assert!(len.is_multiple_of(width), "{len} values in rows of {width}");
}

/// The largest value of a row, and the sum of `exp(x - largest)`.
#[inline(always)]
pub(crate) fn max_and_sum(row: &[f32]) -> [f32; 2] {
    let largest = largest(row);
    let mut lanes = [0.0; LANES];
    let (whole, rest) = row.as_chunks();
    for x in whole {
        add_powers(&mut { *x }, largest, &mut lanes);
    }
    if !rest.is_empty() {
        add_powers(&mut padded(rest), largest, &mut lanes);
    }
    [largest, add_lanes(lanes)]
}

/// Makes a row `exp(x - largest)`. The result is that of [`max_and_sum`], in the same bits.
#[inline(always)]
pub(crate) fn to_powers(row: &mut [f32]) -> [f32; 2] {
    let largest = largest(row);
    let mut lanes = [0.0; LANES];
    let (whole, rest) = row.as_chunks_mut();
    for x in whole {
        add_powers(x, largest, &mut lanes);
    }
    if !rest.is_empty() {
        let mut last = padded(rest);
        add_powers(&mut last, largest, &mut lanes);
        rest.copy_from_slice(&last[..rest.len()]);
    }
    [largest, add_lanes(lanes)]
}

/// The largest value that is a number, with the sign of 0 taken off: that would depend on the order.
#[inline(always)]
fn largest(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (whole, rest) = row.as_chunks::<LANES>();
    for x in whole {
        take_larger(&mut lanes, x);
    }
    if !rest.is_empty() {
        take_larger(&mut lanes, &padded(rest));
    }
    let mut count = LANES / 2;
    while count > 0 {
        let (lanes, others) = lanes.split_at_mut(count);
        take_larger(lanes, others);
        count /= 2;
    }
    lanes[0] + 0.0
}

#[inline(always)]
fn take_larger(lanes: &mut [f32], x: &[f32]) {
    for (lane, x) in lanes.iter_mut().zip(x) {
        *lane = if *x > *lane { *x } else { *lane };
    }
}

#[inline(always)]
fn add_powers(x: &mut [f32; LANES], largest: f32, lanes: &mut [f32; LANES]) {
    for (lane, x) in lanes.iter_mut().zip(x) {
        *x = exp(*x - largest);
        *lane += *x;
    }
}

/// The rest of a row, with values that add 0 to a sum.
#[inline(always)]
fn padded(rest: &[f32]) -> [f32; LANES] {
    let mut padded = [f32::NEG_INFINITY; LANES];
    padded[..rest.len()].copy_from_slice(rest);
    padded
}

struct Softmax<'a> {
    x: &'a [f32],
    width: usize,
    y: &'a mut [MaybeUninit<f32>],
}

impl Task for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let width = self.width.max(1);
        let rows = self
            .x
            .chunks_exact(width)
            .zip(self.y.chunks_exact_mut(width));
        for (x, y) in rows {
            let y = y.write_copy_of_slice(x);
            let [_, sum] = to_powers(y);
            let inverse = 1.0 / sum;
            y.iter_mut().for_each(|y| *y *= inverse);
        }
    }
}

struct Gradient<'a> {
    y: &'a [f32],
    gradient: &'a [f32],
    width: usize,
    out: &'a mut [MaybeUninit<f32>],
}

impl Task for Gradient<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let width = self.width.max(1);
        let pairs = self
            .y
            .chunks_exact(width)
            .zip(self.gradient.chunks_exact(width));
        for ((y, gradient), out) in pairs.zip(self.out.chunks_exact_mut(width)) {
            let [product] = sums(y, gradient, |[sum], y: R, gradient| {
                [gradient.mul_add(y, sum)]
            });
            for ((y, gradient), out) in y.iter().zip(gradient).zip(out) {
                out.write((gradient - product) * y);
            }
        }
    }
}
