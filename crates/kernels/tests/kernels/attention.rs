//! Attention against sums in f64, and its bits on every instruction set and number of threads.

use crate::support::{assert_close, everywhere, noise};
use paceline_kernels::{Attention, Kernels};

/// Output, and the gradients of queries, keys and values, in f64 and the plainest way.
fn expected(attention: &Attention, [q, k, v, g]: [&[f32]; 4]) -> [Vec<f64>; 4] {
    let Attention {
        sequences,
        heads,
        queries,
        keys,
        width,
        causal,
    } = *attention;
    let mut all = [q, q, k, v].map(|like| vec![0.0; like.len()]);
    let scale = 1.0 / (width as f64).sqrt();
    for (sequence, head) in (0..sequences).flat_map(|s| (0..heads).map(move |h| (s, h))) {
        let place = |rows: usize, row: usize, column: usize| {
            ((sequence * rows + row) * heads + head) * width + column
        };
        let dot = |a: &[f32], i: usize, b: &[f32], j: usize| -> f64 {
            let columns = (0..width)
                .map(|c| f64::from(a[place(queries, i, c)]) * f64::from(b[place(keys, j, c)]));
            columns.sum()
        };
        for i in 0..queries {
            let seen = if causal { (i + 1).min(keys) } else { keys };
            let scores: Vec<f64> = (0..seen).map(|j| dot(q, i, k, j) * scale).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let weights: Vec<f64> = weights.iter().map(|weight| weight / sum).collect();
            let of_weights: Vec<f64> = (0..seen).map(|j| dot(g, i, v, j)).collect();
            let along: f64 = weights.iter().zip(&of_weights).map(|(w, g)| w * g).sum();
            for (j, weight) in weights.iter().enumerate() {
                let of_score = weight * (of_weights[j] - along) * scale;
                for c in 0..width {
                    let (query, key) = (place(queries, i, c), place(keys, j, c));
                    all[0][query] += weight * f64::from(v[key]);
                    all[1][query] += of_score * f64::from(k[key]);
                    all[2][key] += of_score * f64::from(q[query]);
                    all[3][key] += weight * f64::from(g[query]);
                }
            }
        }
    }
    all
}

fn check(attention: Attention) {
    let Attention {
        sequences,
        heads,
        queries,
        keys,
        width,
        ..
    } = attention;
    let of = |rows: usize| sequences * rows * heads * width;
    let q = noise(1, of(queries));
    let (k, v) = (noise(2, of(keys)), noise(3, of(keys)));
    let g = noise(4, of(queries));
    let got = everywhere(|kernels| {
        let inputs = [&q[..], &k, &v];
        let (output, sums) = kernels.attention(&attention, inputs);
        let gradients = kernels.attention_gradients(&attention, inputs, &sums, &output, &g);
        [output, gradients.queries, gradients.keys, gradients.values]
    });
    let case = format!("{attention:?}");
    for (got, expected) in got.iter().zip(expected(&attention, [&q, &k, &v, &g])) {
        assert_close(got, &expected, &case);
    }
}

#[test]
fn shapes_around_those_of_blocks_panels_and_lanes() {
    for causal in [false, true] {
        for (queries, keys) in [
            (1, 1),
            (2, 3),
            (31, 31),
            (33, 17),
            (64, 64),
            (65, 65),
            (130, 97),
            (1, 197),
            (197, 197),
        ] {
            for width in [1, 8, 16, 17, 32, 64] {
                check(Attention {
                    sequences: 2,
                    heads: 3,
                    queries,
                    keys,
                    width,
                    causal,
                });
            }
        }
    }
}

#[test]
fn nothing_to_attend_is_empty() {
    check(Attention {
        sequences: 0,
        heads: 2,
        queries: 3,
        keys: 3,
        width: 4,
        causal: true,
    });
    check(Attention {
        sequences: 2,
        heads: 2,
        queries: 0,
        keys: 3,
        width: 4,
        causal: false,
    });
}

#[test]
fn large_products_do_not_overflow() {
    let attention = Attention {
        sequences: 1,
        heads: 1,
        queries: 2,
        keys: 2,
        width: 1,
        causal: false,
    };
    let inputs: [&[f32]; 3] = [&[1e4, -1e4], &[1e4, -1e4], &[3.0, 5.0]];
    let [output] = everywhere(|kernels| [kernels.attention(&attention, inputs).0]);
    assert_eq!(output, [3.0, 5.0]);
}

#[test]
fn what_is_not_a_number_reaches_the_queries_that_see_it() {
    let attention = Attention {
        sequences: 1,
        heads: 1,
        queries: 3,
        keys: 3,
        width: 1,
        causal: true,
    };
    let inputs: [&[f32]; 3] = [&[1.0; 3], &[1.0, f32::NAN, 1.0], &[2.0; 3]];
    let [output] = everywhere(|kernels| [kernels.attention(&attention, inputs).0]);
    assert_eq!(output[0], 2.0);
    assert!(output[1].is_nan() && output[2].is_nan());
}

#[test]
#[should_panic(expected = "the keys of")]
fn keys_of_another_size_are_refused() {
    let attention = Attention {
        sequences: 1,
        heads: 1,
        queries: 2,
        keys: 2,
        width: 1,
        causal: false,
    };
    let kernels = Kernels::of_process().unwrap();
    let _ = kernels.attention(&attention, [&[0.0; 2], &[0.0; 3], &[0.0; 2]]);
}
