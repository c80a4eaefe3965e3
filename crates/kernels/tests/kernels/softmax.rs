//! Softmax and its gradient against f64, and their bits on every instruction set and number of threads.

use crate::support::{assert_close, everywhere, noise};

/// Output, and the gradient of the input, in f64.
fn expected(x: &[f32], width: usize, g: &[f32]) -> [Vec<f64>; 2] {
    let mut all = [Vec::new(), Vec::new()];
    for (x, g) in x.chunks(width).zip(g.chunks(width)) {
        let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let powers = x.iter().map(|x| (f64::from(*x) - f64::from(largest)).exp());
        let sum: f64 = powers.clone().sum();
        let y: Vec<f64> = powers.map(|power| power / sum).collect();
        let product: f64 = y.iter().zip(g).map(|(y, g)| y * f64::from(*g)).sum();
        all[1].extend(y.iter().zip(g).map(|(y, g)| y * (f64::from(*g) - product)));
        all[0].extend(y);
    }
    all
}

#[test]
fn shapes_with_and_without_a_rest() {
    for (rows, width) in [
        (0, 3),
        (1, 1),
        (3, 2),
        (5, 31),
        (7, 32),
        (33, 33),
        (1009, 10),
        (64, 197),
        (3, 4099),
    ] {
        for size in [1.0, 30.0] {
            let x: Vec<f32> = noise(1, rows * width).iter().map(|x| size * x).collect();
            let g = noise(2, x.len());
            let got = everywhere(|kernels| {
                let y = kernels.softmax(&x, width);
                let of_x = kernels.softmax_gradient(&y, &g, width);
                [y, of_x]
            });
            for (got, expected) in got.iter().zip(expected(&x, width, &g)) {
                assert_close(got, &expected, &format!("{rows} x {width}"));
            }
        }
    }
}

#[test]
fn small_probabilities_keep_their_digits() {
    let x: Vec<f32> = noise(3, 1000).iter().map(|x| 40.0 * x).collect();
    let [y] = everywhere(|kernels| [kernels.softmax(&x, 100)]);
    for (got, expected) in y.iter().zip(&expected(&x, 100, &x)[0]) {
        assert!(
            (f64::from(*got) / expected - 1.0).abs() < 5e-6,
            "{got:e} {expected:e}"
        );
    }
}

#[test]
fn masked_logits_have_no_probability_and_a_row_of_them_is_nan() {
    const MASKED: f32 = f32::NEG_INFINITY;
    let x = [
        MASKED,
        1.0,
        MASKED,
        1.0,
        MASKED,
        MASKED,
        MASKED,
        MASKED,
        1.0,
        f32::NAN,
        1.0,
        1.0,
        -0.0,
        0.0,
        MASKED,
        0.0,
    ];
    let [y] = everywhere(|kernels| [kernels.softmax(&x, 4)]);
    assert_eq!(y[..4], [0.0, 0.5, 0.0, 0.5]);
    assert!(y[4..12].iter().all(|y| y.is_nan()));
    assert!(
        y[12..]
            .iter()
            .zip([1.0, 1.0, 0.0, 1.0])
            .all(|(y, share)| (y - share / 3.0_f32).abs() < 1e-7)
    );
}
