//! Normalisation of rows against f64, and its bits on every instruction set and number of threads.

use crate::support::{assert_close, everywhere, noise};
use paceline_kernels::LayerNorm;

/// `x` to the output, moments, and gradients of input, gamma and beta, in f64.
fn expected(norm: &LayerNorm, x: &[f32], gamma: &[f32], beta: &[f32], g: &[f32]) -> [Vec<f64>; 6] {
    let width = norm.width;
    let count = width as f64;
    let mut all = [x.len(), norm.rows, norm.rows, x.len(), width, width].map(|len| vec![0.0; len]);
    for row in 0..norm.rows {
        let range = row * width..(row + 1) * width;
        let of =
            |values: &[f32]| -> Vec<f64> { values.iter().map(|value| f64::from(*value)).collect() };
        let (x, g) = (of(&x[range.clone()]), of(&g[range]));
        let mean = if norm.is_centred {
            x.iter().sum::<f64>() / count
        } else {
            0.0
        };
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
        let inverse = 1.0 / (variance + norm.epsilon).sqrt();
        let normal: Vec<f64> = x.iter().map(|x| (x - mean) * inverse).collect();
        let scaled: Vec<f64> = g
            .iter()
            .zip(gamma)
            .map(|(g, gamma)| g * f64::from(*gamma))
            .collect();
        let sum = if norm.is_centred {
            scaled.iter().sum::<f64>()
        } else {
            0.0
        };
        let product = scaled
            .iter()
            .zip(&normal)
            .map(|(scaled, normal)| scaled * normal)
            .sum::<f64>();
        (all[1][row], all[2][row]) = (mean, inverse);
        for at in 0..width {
            all[0][row * width + at] = normal[at] * f64::from(gamma[at]) + f64::from(beta[at]);
            all[3][row * width + at] =
                inverse * (scaled[at] - sum / count - normal[at] * product / count);
            all[4][at] += g[at] * normal[at];
            all[5][at] += g[at];
        }
    }
    all
}

fn run(norm: &LayerNorm, x: &[f32], beta: Option<&[f32]>) -> ([Vec<f32>; 6], [Vec<f64>; 6]) {
    let (gamma, g) = (noise(6, norm.width), noise(8, x.len()));
    let got = everywhere(|kernels| {
        let (y, moments) = kernels.layer_norm(norm, x, &gamma, beta);
        let gradients = kernels.layer_norm_gradients(norm, x, &gamma, &moments, &g);
        [
            y,
            moments.mean,
            moments.inverse,
            gradients.input,
            gradients.gamma,
            gradients.beta,
        ]
    });
    let zeros = vec![0.0; norm.width];
    (got, expected(norm, x, &gamma, beta.unwrap_or(&zeros), &g))
}

#[test]
fn shapes_with_and_without_a_rest() {
    for (rows, width) in [
        (0, 5),
        (0, 0),
        (1, 2),
        (2, 3),
        (7, 31),
        (31, 32),
        (32, 33),
        (33, 64),
        (65, 100),
        (100, 768),
        (1009, 17),
        (2, 4099),
    ] {
        for is_centred in [true, false] {
            let norm = LayerNorm {
                rows,
                width,
                epsilon: 1e-5,
                is_centred,
            };
            let beta = noise(7, width);
            let (got, expected) = run(&norm, &noise(5, rows * width), is_centred.then_some(&beta));
            for (number, (got, expected)) in got.iter().zip(&expected).enumerate() {
                assert_close(got, expected, &format!("result {number} of {norm:?}"));
            }
        }
    }
}

#[test]
fn values_far_from_zero_keep_their_variance() {
    let norm = LayerNorm {
        rows: 8,
        width: 200,
        epsilon: 1e-5,
        is_centred: true,
    };
    let x: Vec<f32> = noise(9, 1600).iter().map(|value| 1000.0 + value).collect();
    let (got, expected) = run(&norm, &x, None);
    for (got, expected) in got[2].iter().zip(&expected[2]) {
        assert!(
            (f64::from(*got) / expected - 1.0).abs() < 1e-5,
            "{got} {expected}"
        );
    }
}

#[test]
fn equal_values_are_normal() {
    let norm = LayerNorm {
        rows: 2,
        width: 1,
        epsilon: 1e-5,
        is_centred: true,
    };
    let (got, _) = run(&norm, &[3.0, -4.0], Some(&[0.5]));
    assert_eq!(
        (&got[0][..], &got[3][..]),
        (&[0.5, 0.5][..], &[0.0, 0.0][..])
    );
}

#[test]
fn one_number_that_is_not_finite_spoils_its_row_only() {
    let norm = LayerNorm {
        rows: 3,
        width: 40,
        epsilon: 1e-5,
        is_centred: true,
    };
    for spoiled in [f32::INFINITY, f32::NAN] {
        let mut x = noise(3, 120);
        x[43] = spoiled;
        let [y] = everywhere(|kernels| [kernels.layer_norm(&norm, &x, &[1.0; 40], None).0]);
        for (at, value) in y.iter().enumerate() {
            assert_eq!(value.is_finite(), at / 40 != 1, "{at}");
        }
    }
}
