//! Batch normalisation against f64, and its bits on every instruction set and number of threads.

use crate::support::{assert_close, everywhere, noise};
use paceline_kernels::{After, BatchNorm, Kernels};

/// `x` to the output, moments, and gradients of input, gamma and beta, in f64.
fn expected(norm: &BatchNorm, x: &[f32], gamma: &[f32], beta: &[f32], g: &[f32]) -> [Vec<f64>; 6] {
    let (channels, positions) = (norm.channels, norm.positions);
    let count = (norm.images * positions) as f64;
    let of = |channel: usize| (0..x.len()).filter(move |at| at / positions % channels == channel);
    let mut all = [0; 6].map(|_| vec![0.0; channels]);
    (all[0], all[3]) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    for channel in 0..channels {
        let mean = of(channel).map(|at| f64::from(x[at])).sum::<f64>() / count;
        let square = |at: usize| (f64::from(x[at]) - mean).powi(2);
        let variance = of(channel).map(square).sum::<f64>() / count;
        let inverse = 1.0 / (variance + norm.epsilon).sqrt();
        let normal = |at: usize| (f64::from(x[at]) - mean) * inverse;
        let of_beta = of(channel).map(|at| f64::from(g[at])).sum::<f64>();
        let of_gamma = of(channel)
            .map(|at| f64::from(g[at]) * normal(at))
            .sum::<f64>();
        let (gamma, beta) = (f64::from(gamma[channel]), f64::from(beta[channel]));
        for at in of(channel) {
            all[0][at] = normal(at) * gamma + beta;
            let distance = f64::from(g[at]) - of_beta / count - normal(at) * of_gamma / count;
            all[3][at] = gamma * inverse * distance;
        }
        (all[1][channel], all[2][channel]) = (mean, variance);
        (all[4][channel], all[5][channel]) = (of_gamma, of_beta);
    }
    all
}

fn run(norm: &BatchNorm, x: &[f32]) -> ([Vec<f32>; 6], [Vec<f64>; 6]) {
    let gamma = noise(6, norm.channels);
    let beta = noise(7, norm.channels);
    let g = noise(8, x.len());
    let got = everywhere(|kernels: Kernels| {
        let factors = [&gamma[..], &beta];
        let (y, moments) = kernels.batch_norm(norm, x, factors, After::Nothing);
        let gradients =
            kernels.batch_norm_gradients(norm, x, factors, &moments, After::Nothing, &g);
        [
            y,
            moments.mean,
            moments.variance,
            gradients.input,
            gradients.gamma,
            gradients.beta,
        ]
    });
    (got, expected(norm, x, &gamma, &beta, &g))
}

#[test]
fn shapes_with_and_without_a_rest() {
    for (images, channels, positions) in [
        (1, 1, 2),
        (2, 3, 1),
        (3, 5, 7),
        (4, 16, 64),
        (8, 3, 31),
        (2, 33, 100),
        (7, 2, 1024),
        (64, 16, 333),
    ] {
        let norm = BatchNorm {
            images,
            channels,
            positions,
            epsilon: 1e-5,
        };
        let (got, expected) = run(&norm, &noise(5, images * channels * positions));
        for (got, expected) in got.iter().zip(&expected) {
            assert_close(got, expected, &format!("{norm:?}"));
        }
    }
}

#[test]
fn values_far_from_zero_keep_their_variance() {
    let norm = BatchNorm {
        images: 8,
        channels: 2,
        positions: 100,
        epsilon: 1e-5,
    };
    let x: Vec<f32> = noise(9, 1600).iter().map(|value| 1000.0 + value).collect();
    let (got, expected) = run(&norm, &x);
    for (got, expected) in got[2].iter().zip(&expected[2]) {
        assert!(
            (f64::from(*got) / expected - 1.0).abs() < 1e-5,
            "{got} {expected}"
        );
    }
}

#[test]
fn one_number_that_is_not_finite_spoils_its_channel_only() {
    let norm = BatchNorm {
        images: 2,
        channels: 2,
        positions: 40,
        epsilon: 1e-5,
    };
    let mut x = noise(3, 160);
    x[3] = f32::INFINITY;
    let [y] = everywhere(|kernels| {
        let (y, _) = kernels.batch_norm(&norm, &x, [&[1.0; 2], &[0.0; 2]], After::Nothing);
        [y]
    });
    for (at, value) in y.iter().enumerate() {
        assert_eq!(value.is_finite(), at / 40 % 2 == 1, "{at}");
    }
}

#[test]
fn what_comes_after_has_the_bits_of_passes_of_its_own() {
    for (images, channels, positions) in [(2, 3, 1), (3, 5, 7), (4, 16, 64), (2, 33, 100)] {
        let norm = BatchNorm {
            images,
            channels,
            positions,
            epsilon: 1e-5,
        };
        let count = images * channels * positions;
        let (x, more, g) = (noise(5, count), noise(6, count), noise(8, count));
        let (gamma, beta) = (noise(6, channels), noise(7, channels));
        let factors = [&gamma[..], &beta];
        let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|x| x.to_bits()).collect() };
        everywhere(|kernels| {
            let norms = |after| kernels.batch_norm(&norm, &x, factors, after).0;
            let (y, moments) = kernels.batch_norm(&norm, &x, factors, After::Nothing);
            let gradients = |after, g: &[f32]| {
                let all = kernels.batch_norm_gradients(&norm, &x, factors, &moments, after, g);
                let of_norm = [all.input, all.gamma, all.beta].map(|values| bits(&values));
                (of_norm, all.added.as_deref().map(bits))
            };
            let relu = kernels.relu(&y);
            assert_eq!(bits(&norms(After::Relu)), bits(&relu), "{norm:?}");
            let expected = gradients(After::Nothing, &kernels.relu_gradient(&relu, &g));
            assert_eq!(gradients(After::Relu, &g), expected, "{norm:?}");

            let sum: Vec<f32> = y.iter().zip(&more).map(|(y, more)| y + more).collect();
            let relu = kernels.relu(&sum);
            assert_eq!(bits(&norms(After::AddRelu(&more))), bits(&relu), "{norm:?}");
            let of_sum = kernels.relu_gradient(&relu, &g);
            let (expected, _) = gradients(After::Nothing, &of_sum);
            let got = gradients(After::AddRelu(&relu), &g);
            assert_eq!(got, (expected, Some(bits(&of_sum))), "{norm:?}");
            [relu]
        });
    }
}
