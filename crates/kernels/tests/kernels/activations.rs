//! GELU and its gradient against f64.

use crate::functions::erfc;
use crate::support::{everywhere, noise};

/// The probability that a normal variable lies below `x`, and its density, in f64.
fn normal(x: f64) -> (f64, f64) {
    let beyond = erfc(x.abs() / 2.0_f64.sqrt()) / 2.0;
    let density = (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt();
    (if x < 0.0 { beyond } else { 1.0 - beyond }, density)
}

#[test]
fn values_keep_their_digits_on_both_sides() {
    // All sizes, and the values between -16 and 16 evenly.
    let sizes = (0..=u32::MAX)
        .step_by(10_007)
        .map(f32::from_bits)
        .filter(|x| x.is_finite());
    let x: Vec<f32> = noise(1, 1 << 19)
        .iter()
        .map(|x| 16.0 * x)
        .chain(sizes)
        .collect();
    let g = noise(2, x.len());
    let [y, of_x] = everywhere(|kernels| [kernels.gelu(&x), kernels.gelu_gradient(&x, &g)]);
    let mut worst = [0.0_f64; 2];
    for (at, x) in x.iter().enumerate() {
        let exact = f64::from(*x);
        let (below, density) = normal(exact);
        let (value, factor) = (exact * below, below + exact * density);
        let error = (f64::from(y[at]) - value).abs();
        let relative = (error - 1e-44).max(0.0) / value.abs().max(f32::MIN_POSITIVE.into());
        let absolute = (f64::from(of_x[at]) - f64::from(g[at]) * factor).abs()
            / f64::from(g[at]).abs().max(1e-30);
        assert!(
            relative < 6e-7,
            "gelu({x}) = {:e} in place of {value:e}",
            y[at]
        );
        assert!(
            absolute < 3e-7,
            "at {x}: {:e} in place of {:e}",
            of_x[at],
            f64::from(g[at]) * factor
        );
        worst = [worst[0].max(relative), worst[1].max(absolute)];
    }
    println!(
        "gelu: relative {:e}; factor of the gradient: {:e}",
        worst[0], worst[1]
    );
}

#[test]
fn any_number_of_values() {
    for count in [0, 1, 31, 32, 33, 1009, 10_007] {
        let x = noise(3, count);
        let [y, of_x] = everywhere(|kernels| [kernels.gelu(&x), kernels.gelu_gradient(&x, &x)]);
        assert_eq!((y.len(), of_x.len()), (count, count));
        for (at, x) in x.iter().enumerate() {
            let exact = f64::from(*x);
            let (below, density) = normal(exact);
            assert!((f64::from(y[at]) - exact * below).abs() < 2e-7);
            assert!((f64::from(of_x[at]) - exact * (below + exact * density)).abs() < 3e-7);
        }
    }
}

#[test]
fn numbers_that_are_not_finite_give_what_the_formula_gives() {
    let x = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        -1e30,
        f32::MAX,
        0.0,
        -0.0,
    ];
    let [y, of_x] = everywhere(|kernels| [kernels.gelu(&x), kernels.gelu_gradient(&x, &[2.0; 7])]);
    assert!(y[0].is_nan() && y[2].is_nan() && of_x[0].is_nan());
    assert!(of_x[1].is_nan() && of_x[2].is_nan());
    assert_eq!(y[1], f32::INFINITY);
    assert_eq!([y[3], y[4], y[5], y[6]], [0.0, f32::MAX, 0.0, 0.0]);
    assert_eq!([of_x[3], of_x[4], of_x[5], of_x[6]], [0.0, 2.0, 1.0, 1.0]);
}
