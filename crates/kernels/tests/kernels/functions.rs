//! Functions of one value against f64, over all of f32.

use crate::support::{everywhere, noise};
use paceline_kernels::Kernels;

/// Steps from one tested f32 to the next. The errors in the documentation were measured with 61.
const STRIDE: usize = 4099;

/// `1 - erf(x)` for `x` from 0, in f64: the series of erf, or the continued fraction of erfc where the series cancels.
pub(crate) fn erfc(x: f64) -> f64 {
    if x < 2.0 {
        return 1.0 - erf(x);
    }
    let fraction = (1..=60)
        .rev()
        .fold(0.0, |rest, n| f64::from(n) / 2.0 / (x + rest));
    (-x * x).exp() / std::f64::consts::PI.sqrt() / (x + fraction)
}

/// The error function in f64.
pub(crate) fn erf(x: f64) -> f64 {
    if x.abs() >= 2.0 {
        return (1.0 - erfc(x.abs())).copysign(x);
    }
    // All terms of this series have one sign.
    let (mut term, mut sum) = (x, x);
    for n in 1..60 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum
}

/// Distance in units of the last place that an f32 of this size has.
fn ulps(got: f32, expected: f64) -> f64 {
    let rounded = expected as f32;
    if got.to_bits() == rounded.to_bits() || (got.is_nan() && rounded.is_nan()) {
        return if rounded.is_finite() {
            (f64::from(got) - expected).abs() / ulp(expected)
        } else {
            0.0
        };
    }
    // An infinite result that should be finite is as far off as the value that would come next.
    let got = if got.is_infinite() {
        2.0_f64.powi(128).copysign(got.into())
    } else {
        got.into()
    };
    (got - expected).abs() / ulp(expected)
}

fn ulp(value: f64) -> f64 {
    let exponent = (value.abs().to_bits() >> 52) as i32 - 1023;
    2.0_f64.powi(exponent.clamp(-126, 127) - 23)
}

fn check(
    name: &str,
    function: fn(Kernels, &[f32]) -> Vec<f32>,
    expected: fn(f64) -> f64,
    bound: f64,
) {
    let special = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MIN_POSITIVE,
        1e-45,
        f32::MAX,
    ];
    let mut worst = (0.0, 0.0);
    let mut all = (0..=u32::MAX)
        .step_by(STRIDE)
        .map(f32::from_bits)
        .chain(special)
        .peekable();
    while all.peek().is_some() {
        let x: Vec<f32> = all.by_ref().take(1 << 20).collect();
        let [y] = everywhere(|kernels| [function(kernels, &x)]);
        for (x, y) in x.into_iter().zip(y) {
            let expected = expected(x.into());
            let error = ulps(y, expected);
            assert!(
                error < bound,
                "{name}({x:e}) = {y:e} in place of {expected:e}"
            );
            assert_eq!(
                y.is_sign_negative() || y.is_nan(),
                expected.is_sign_negative() || expected.is_nan(),
                "{name}({x:e})"
            );
            if error > worst.0 {
                worst = (error, x);
            }
        }
    }
    println!("{name}: {:.3} ulp at {:e}", worst.0, worst.1);
}

#[test]
fn exp_is_within_an_ulp() {
    check("exp", Kernels::exp, f64::exp, 1.0);
}

#[test]
fn log_is_within_an_ulp() {
    check("log", Kernels::log, f64::ln, 1.0);
}

#[test]
fn tanh_is_within_an_ulp_and_a_tenth() {
    check("tanh", Kernels::tanh, f64::tanh, 1.1);
}

#[test]
fn erf_is_within_an_ulp_and_a_half() {
    check("erf", Kernels::erf, erf, 1.5);
}

#[test]
fn any_number_of_values() {
    for count in [0, 1, 7, 31, 32, 33, 100, 10_007] {
        let x = noise(1, count);
        let [y] = everywhere(|kernels| [kernels.exp(&x)]);
        let expected = x.iter().map(|x| x.exp());
        assert!(
            y.iter()
                .zip(expected)
                .all(|(y, expected)| (y - expected).abs() < 1e-6)
        );
        assert_eq!(y.len(), count);
    }
}
