//! Functions of one value, without the system's math library, whose results differ between systems.
//!
//! Each is a few operations of IEEE 754 without branches, which the compiler spreads over registers. The polynomials were fitted to
//! values of 40 digits, for the smallest relative error on the interval that each comment names: least squares whose weights move to
//! where the error is largest (Lawson). Each coefficient was rounded to f32, from the lowest power up, before the others were fitted again.

#![expect(unsafe_code, reason = "results are not filled with zeros first")]

use std::mem::MaybeUninit;

use crate::isa::{Kernels, Task};
use crate::registers::Register;
use crate::threads::written;

/// Added to a small value and taken away again, it leaves the nearest integer, which is in the lowest bits in between.
const ROUND: f32 = 12_582_912.0;
/// The logarithm of 2: its upper bits, whose products with exponents are exact, and the rest.
const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];

/// The value of a polynomial with these coefficients, from the lowest power up. With a loop in its place the compiler did not vectorise
/// loops that call the functions.
macro_rules! polynomial {
    ($x:expr; $last:expr) => { $last };
    ($x:expr; $first:expr, $($rest:expr),+) => { f32::mul_add(polynomial!($x; $($rest),+), $x, $first) };
}

// Errors: the largest at every 61st f32, which the tests print with that stride.
impl Kernels {
    /// e to the power of each value.
    ///
    /// *Numerics*: within 0.88 ulp. Results below the normal values are rounded as others; NaN stays NaN, here and below.
    pub fn exp(self, x: &[f32]) -> Vec<f32> {
        map(self, [x; 2], 16, |x, _| exp(x))
    }

    /// The natural logarithm of each value.
    ///
    /// *Numerics*: within 0.80 ulp; NaN below 0.
    pub fn log(self, x: &[f32]) -> Vec<f32> {
        map(self, [x; 2], 16, |x, _| log(x))
    }

    /// The hyperbolic tangent of each value.
    ///
    /// *Numerics*: within 1.01 ulp.
    pub fn tanh(self, x: &[f32]) -> Vec<f32> {
        map(self, [x; 2], 32, |x, _| tanh(x))
    }

    /// The error function of each value.
    ///
    /// *Numerics*: within 1.32 ulp.
    pub fn erf(self, x: &[f32]) -> Vec<f32> {
        map(self, [x; 2], 32, |x, _| erf(x))
    }
}

/// `function` of each pair of values, which takes the time of `cost` multiplications. It is compiled for the instruction set.
pub(crate) fn map(
    kernels: Kernels,
    [a, b]: [&[f32]; 2],
    cost: usize,
    function: impl Fn(f32, f32) -> f32 + Copy + Sync,
) -> Vec<f32> {
    struct Map<'a, F> {
        a: &'a [f32],
        b: &'a [f32],
        out: &'a mut [MaybeUninit<f32>],
        function: F,
    }

    impl<F: Fn(f32, f32) -> f32> Task for Map<'_, F> {
        type Output = ();

        #[inline(always)]
        fn run<R: Register>(self) {
            for ((a, b), out) in self.a.iter().zip(self.b).zip(self.out) {
                out.write((self.function)(*a, *b));
            }
        }
    }

    assert_eq!(a.len(), b.len(), "pairs of values");
    let fill = |first: usize, out: &mut [MaybeUninit<f32>]| {
        let range = first..first + out.len();
        let (a, b) = (&a[range.clone()], &b[range]);
        kernels.run(Map {
            a,
            b,
            out,
            function,
        });
    };
    // SAFETY: it writes a value for each pair.
    unsafe { written(a.len(), 1, cost * a.len(), fill) }
}

/// e to the power of `x`.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Beyond these lie 0 and infinity. NaN is neither.
    let is_zero = x < -104.0;
    let x = if is_zero { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let rounded = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let power = rounded - ROUND;
    let rest = power.mul_add(-LN_2[1], power.mul_add(-LN_2[0], x));
    // (e^r - 1 - r) / r^2 for |r| < 0.3466, error 3.1e-9 of e^r.
    let q =
        polynomial!(rest; 0.499_999_94, 0.166_665_21, 0.041_668_255, 0.008_368_663, 0.001_382_147);
    let value = q.mul_add(rest, 1.0).mul_add(rest, 1.0);
    // Two factors, because 2^power may be no f32. Only the last product is rounded.
    let power = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = power >> 1;
    let two_to = |power: i32| f32::from_bits((power.wrapping_add(127) as u32) << 23);
    let rest = two_to(power.wrapping_sub(half));
    // A product that rounding makes 0 takes 14 times longer, and masked logits are common.
    value * two_to(half) * if is_zero { 0.0 } else { rest }
}

/// The natural logarithm.
#[inline(always)]
pub(crate) fn log(x: f32) -> f32 {
    // Values below the normal ones are moved up by 2^24.
    let is_small = x < f32::MIN_POSITIVE;
    let scaled = if is_small { x * 16_777_216.0 } else { x };
    let moved = if is_small { -24.0 } else { 0.0 };
    // x = 2^power * (1 + f), f from -1/3 to 1/3.
    let power = (scaled.to_bits().wrapping_sub((2.0_f32 / 3.0).to_bits()) as i32) >> 23;
    let f = f32::from_bits(scaled.to_bits().wrapping_sub((power << 23) as u32)) - 1.0;
    let power = power as f32 + moved;
    // (log(1 + f) - f + f^2 / 2) / f^3, error 8.8e-10 of log(1 + f).
    let q = polynomial!(f;
        0.333_333_34, -0.249_998_27, 0.199_996_81, -0.166_792_96, 0.143_027_17,
        -0.121_994_18, 0.107_695_56, -0.128_301_1, 0.119_584_6
    );
    let rest = q.mul_add(f, -0.5).mul_add(f * f, power * LN_2[1]);
    let value = power.mul_add(LN_2[0], f + rest);
    let value = if x == 0.0 { f32::NEG_INFINITY } else { value };
    let value = if x < 0.0 { f32::NAN } else { value };
    // Infinity and NaN stay what they are.
    if x < f32::INFINITY { value } else { x }
}

/// The hyperbolic tangent.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let size = x.abs();
    let square = x * x;
    // (tanh(x) / x - 1) / x^2 for |x| < 0.8, error 3.5e-9 of tanh(x) / x.
    let q = polynomial!(square; -0.333_333, 0.133_322_43, -0.053_853_63, 0.021_306_163, -0.007_412_815_5, 0.001_585_826_7);
    let near = (q * square).mul_add(size, size);
    let far = 1.0 - 2.0 / (exp(2.0 * size) + 1.0);
    (if size < 0.8 { near } else { far }).copysign(x)
}

/// The error function.
#[inline(always)]
pub(crate) fn erf(x: f32) -> f32 {
    let size = x.abs();
    // erf(x) / x - 1 as a polynomial in x^2 for |x| < 1, error 1.3e-9 of erf(x) / x.
    let q = polynomial!(x * x; 0.128_379_17, -0.376_126_3, 0.112_836_18, -0.026_855_126, 0.005_190_734, -8.030_761_4e-4, 7.920_368e-5);
    let near = q.mul_add(size, size);
    let far = exp(-size * size).mul_add(-scaled_erfc(size), 1.0);
    (if size < 1.0 { near } else { far }).copysign(x)
}

/// `exp(x * x) * (1 - erf(x))` for `x` from 0; only a bounded value beyond 10.7, where `exp(-x * x)` is 0.
#[inline(always)]
pub(crate) fn scaled_erfc(x: f32) -> f32 {
    const MIDDLE: f32 = 3.0;
    let inverse = 1.0 / (x + MIDDLE);
    // Times x + 3 it is a polynomial in (x - 3) / (x + 3), error 7.7e-9.
    let t = inverse.mul_add(-2.0 * MIDDLE, 1.0);
    let q = polynomial!(t;
        1.074_006_9, -0.883_394_5, 0.590_227_84, -0.310_466_1, 0.119_533_78,
        -0.026_838_38, -0.001_242_610_4, 0.003_072_172_4, -4.648_005_7e-4, -3.120_545_3e-4
    );
    q * inverse
}
