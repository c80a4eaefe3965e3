//! Convolutions against sums in f64, and their bits on every instruction set and number of threads.

use crate::support::{assert_close, everywhere, noise};
use paceline_kernels::{Conv, Kernels};

/// Output, and the gradients of input and weight, in f64 and the plainest way.
fn expected(conv: &Conv, x: &[f32], weight: &[f32], bias: &[f32], g: &[f32]) -> [Vec<f64>; 3] {
    let [images, outputs, height, width] = conv.output();
    let [_, channels, rows, columns] = conv.input;
    let [_, of_group, taps_down, taps_right] = conv.weight;
    let mut all = [
        vec![0.0; images * outputs * height * width],
        vec![0.0; x.len()],
        vec![0.0; weight.len()],
    ];
    for image in 0..images {
        for (output, bias) in bias.iter().enumerate() {
            let group = output / (outputs / conv.groups);
            for (y, right) in (0..height).flat_map(|y| (0..width).map(move |x| (y, x))) {
                let at = ((image * outputs + output) * height + y) * width + right;
                all[0][at] += f64::from(*bias);
                for channel in 0..of_group {
                    for (down, across) in
                        (0..taps_down).flat_map(|d| (0..taps_right).map(move |a| (d, a)))
                    {
                        let row = (y * conv.stride[0] + down * conv.dilation[0]) as isize
                            - conv.padding[0][0] as isize;
                        let column = (right * conv.stride[1] + across * conv.dilation[1]) as isize
                            - conv.padding[1][0] as isize;
                        if row < 0
                            || column < 0
                            || row >= rows as isize
                            || column >= columns as isize
                        {
                            continue;
                        }
                        let from = ((image * channels + group * of_group + channel) * rows
                            + row as usize)
                            * columns
                            + column as usize;
                        let tap = ((output * of_group + channel) * taps_down + down) * taps_right
                            + across;
                        all[0][at] += f64::from(x[from]) * f64::from(weight[tap]);
                        all[1][from] += f64::from(g[at]) * f64::from(weight[tap]);
                        all[2][tap] += f64::from(g[at]) * f64::from(x[from]);
                    }
                }
            }
        }
    }
    all
}

fn check(conv: &Conv) {
    let count = |shape: [usize; 4]| shape.iter().product();
    let x = noise(1, count(conv.input));
    let weight = noise(2, count(conv.weight));
    let bias = noise(3, conv.weight[0]);
    let g = noise(4, count(conv.output()));
    let [y, of_x, of_weight] = expected(conv, &x, &weight, &bias, &g);
    let mut of_bias = vec![0.0; bias.len()];
    let plane = conv.output()[2] * conv.output()[3];
    for (at, value) in g.iter().enumerate() {
        of_bias[at / plane % bias.len()] += f64::from(*value);
    }
    let got = everywhere(|kernels| {
        [
            kernels.conv(conv, &x, &weight, Some(&bias)),
            kernels.conv_input_gradient(conv, &weight, &g),
            kernels.conv_weight_gradient(conv, &x, &g),
            kernels.conv_bias_gradient(conv, &g),
        ]
    });
    let case = format!("{conv:?}");
    for (got, expected) in got.iter().zip([y, of_x, of_weight, of_bias]) {
        assert_close(got, &expected, &case);
    }
}

fn square(images: usize, [channels, outputs]: [usize; 2], side: usize, taps: usize) -> Conv {
    Conv {
        input: [images, channels, side, side],
        weight: [outputs, channels, taps, taps],
        stride: [1, 1],
        padding: [[taps / 2; 2]; 2],
        dilation: [1, 1],
        groups: 1,
    }
}

#[test]
fn usual_layers() {
    check(&square(3, [1, 16], 8, 3));
    check(&square(2, [16, 32], 16, 3));
    check(&square(2, [3, 17], 11, 5));
    check(&square(5, [7, 5], 9, 1));
    check(&Conv {
        stride: [2, 2],
        ..square(2, [8, 16], 14, 3)
    });
    check(&Conv {
        stride: [2, 2],
        ..square(2, [3, 20], 15, 7)
    });
    check(&Conv {
        stride: [2, 2],
        padding: [[0; 2]; 2],
        ..square(4, [6, 4], 10, 1)
    });
    // More steps than meet a block of positions at once.
    check(&square(2, [20, 8], 9, 3));
    // Panels with positions of several images, and more channels and outputs than are multiplied at once.
    check(&square(5, [300, 170], 7, 1));
    // More positions than one chain adds up, and more images than a batch has.
    check(&square(9, [2, 3], 37, 3));
    check(&square(40, [16, 16], 20, 3));
}

/// Layers that are computed in tiles, and others around the limits of those.
#[test]
fn tiles_with_and_without_a_rest() {
    for side in [3, 4, 5, 8, 11] {
        check(&square(2, [16, 16], side, 3));
    }
    for channels in [[15, 16], [16, 17], [40, 33], [48, 16], [160, 32]] {
        check(&square(2, channels, 7, 3));
    }
    for padding in [[[0, 0], [2, 1]], [[1, 3], [0, 2]], [[2, 2], [3, 1]]] {
        check(&Conv {
            input: [3, 16, 9, 6],
            padding,
            ..square(3, [16, 24], 9, 3)
        });
    }
    // More tiles than one chain adds up, and rows of more tiles than that.
    check(&square(5, [16, 16], 20, 3));
    check(&Conv {
        input: [1, 16, 4, 300],
        ..square(1, [16, 16], 4, 3)
    });
    check(&square(0, [16, 16], 6, 3));
    // More tiles than are turned at once, of several images.
    check(&square(70, [32, 32], 6, 3));
}

#[test]
fn tiles_from_a_seed() {
    let mut draw = draws(12);
    for _ in 0..30 {
        let channels = [draw(14, 50), draw(14, 50)];
        check(&Conv {
            input: [draw(1, 4), channels[0], draw(2, 15), draw(2, 15)],
            padding: [[draw(1, 2), draw(0, 3)], [draw(1, 2), draw(0, 3)]],
            ..square(1, channels, 1, 3)
        });
    }
}

#[test]
fn tiles_are_about_as_accurate_as_chains() {
    let tiled = square(2, [32, 32], 16, 3);
    // A column of zeros changes no sum, and windows of 3 x 4 are no tiles.
    let chained = Conv {
        weight: [32, 32, 3, 4],
        padding: [[1, 1], [1, 2]],
        ..tiled
    };
    let count = 2 * 32 * 256;
    // As behind an activation.
    let x: Vec<f32> = noise(1, count).iter().map(|x| x.max(0.0)).collect();
    let (weight, g) = (noise(2, 32 * 32 * 9), noise(3, count));
    let wider = |rows: &[f32]| {
        let rows = rows.chunks_exact(3);
        rows.flat_map(|row| [row[0], row[1], row[2], 0.0])
            .collect::<Vec<_>>()
    };
    let expected = expected(&tiled, &x, &weight, &[0.0; 32], &g);
    let kernels = Kernels::of_process().unwrap();
    let run = |conv: &Conv, weight: &[f32]| {
        [
            kernels.conv(conv, &x, weight, None),
            kernels.conv_input_gradient(conv, weight, &g),
            kernels.conv_weight_gradient(conv, &x, &g),
        ]
    };
    let mut chains = run(&chained, &wider(&weight));
    let of_weight = chains[2].chunks_exact(4);
    chains[2] = of_weight.flat_map(|row| row[..3].to_vec()).collect();
    let errors = |got: &[Vec<f32>; 3]| {
        [0, 1, 2].map(|at| {
            let squares = got[at].iter().zip(&expected[at]);
            let squares = squares.map(|(got, expected)| (f64::from(*got) - expected).powi(2));
            squares.sum::<f64>().sqrt()
        })
    };
    let (tiles, chains) = (errors(&run(&tiled, &weight)), errors(&chains));
    for (at, most) in [(0, 1.0), (1, 1.0), (2, 2.0)] {
        let ratio = tiles[at] / chains[at];
        assert!((0.3..most).contains(&ratio), "{at}: {ratio}");
    }
}

#[test]
fn images_do_not_depend_on_others() {
    let conv = square(7, [16, 24], 9, 3);
    let (mut x, weight) = (noise(1, 7 * 16 * 81), noise(2, 24 * 16 * 9));
    let mut g = noise(3, 7 * 24 * 81);
    x[2 * 16 * 81 + 40] = f32::INFINITY;
    g[4 * 24 * 81] = f32::NAN;
    everywhere(|kernels| {
        let y = kernels.conv(&conv, &x, &weight, None);
        let of_x = kernels.conv_input_gradient(&conv, &weight, &g);
        let (x, g) = (x.chunks_exact(16 * 81), g.chunks_exact(24 * 81));
        let of_images = y.chunks_exact(24 * 81).zip(of_x.chunks_exact(16 * 81));
        for ((x, g), (y, of_x)) in x.zip(g).zip(of_images) {
            let alone = square(1, [16, 24], 9, 3);
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert!(bits(y) == bits(&kernels.conv(&alone, x, &weight, None)));
            assert!(bits(of_x) == bits(&kernels.conv_input_gradient(&alone, &weight, g)));
        }
        [y, of_x]
    });
}

#[test]
fn tiles_keep_numbers_that_are_not_finite_from_their_neighbours() {
    let conv = square(2, [16, 16], 8, 3);
    let mut x = noise(1, 2 * 16 * 64);
    let weight = noise(2, 16 * 16 * 9);
    let mut g = noise(4, x.len());
    (x[3 * 64 + 9], x[3 * 64 + 63]) = (f32::INFINITY, f32::NAN);
    g[16 * 64 + 9] = f32::NEG_INFINITY;
    let expected = expected(&conv, &x, &weight, &[0.0; 16], &g);
    let got = everywhere(|kernels| {
        [
            kernels.conv(&conv, &x, &weight, None),
            kernels.conv_input_gradient(&conv, &weight, &g),
            kernels.conv_weight_gradient(&conv, &x, &g),
        ]
    });
    for (got, expected) in got.iter().zip(expected) {
        assert!(expected.iter().any(|value| value.is_finite()));
        assert!(expected.iter().any(|value| !value.is_finite()));
        for (got, expected) in got.iter().zip(expected) {
            match expected.is_finite() {
                true => assert!((f64::from(*got) - expected).abs() < 1e-4),
                false => assert_eq!(got.to_string(), expected.to_string()),
            }
        }
    }
}

#[test]
fn batches_do_not_depend_on_the_width_of_panels() {
    // 144 outputs are 9 panels of 16 and 5 of 32.
    let conv = square(9, [8, 144], 14, 3);
    let (x, g) = (noise(1, 9 * 8 * 196), noise(2, 9 * 144 * 196));
    everywhere(|kernels| [kernels.conv_weight_gradient(&conv, &x, &g)]);
}

#[test]
fn nothing_gives_nothing_or_zeros() {
    for (taps, stride) in [(1, 1), (1, 2), (3, 1), (3, 2)] {
        for [images, channels, outputs] in [[0, 3, 5], [2, 0, 5], [2, 3, 0]] {
            check(&Conv {
                stride: [stride; 2],
                ..square(images, [channels, outputs], 6, taps)
            });
        }
    }
}

#[test]
fn one_pixel_has_the_bits_of_a_window_in_a_padded_image() {
    let conv = square(3, [270, 180], 7, 1);
    let padded = Conv {
        padding: [[1; 2]; 2],
        ..conv
    };
    let (x, weight) = (noise(1, 3 * 270 * 49), noise(2, 180 * 270));
    let [inner, outer] =
        everywhere(|kernels| [conv, padded].map(|conv| kernels.conv(&conv, &x, &weight, None)));
    for (inner, outer) in inner.chunks(49).zip(outer.chunks(81)) {
        for (inner, outer) in inner.chunks(7).zip(outer.chunks(9).skip(1)) {
            assert_eq!(inner, &outer[1..8]);
        }
    }
}

#[test]
fn groups_and_dilation() {
    check(&Conv {
        weight: [12, 2, 3, 3],
        groups: 3,
        ..square(2, [6, 12], 7, 3)
    });
    // Depthwise.
    check(&Conv {
        weight: [20, 1, 3, 3],
        groups: 20,
        ..square(2, [20, 20], 6, 3)
    });
    check(&Conv {
        dilation: [2, 3],
        padding: [[2, 2], [3, 3]],
        ..square(2, [4, 6], 13, 3)
    });
    check(&Conv {
        dilation: [2, 1],
        stride: [3, 2],
        padding: [[0, 3], [2, 1]],
        ..square(2, [4, 6], 17, 3)
    });
}

#[test]
fn odd_shapes() {
    // One dimension, as a plane of one row.
    check(&Conv {
        input: [3, 5, 1, 31],
        weight: [7, 5, 1, 4],
        stride: [1, 2],
        padding: [[0, 0], [1, 2]],
        dilation: [1, 2],
        groups: 1,
    });
    // Strides beyond the window leave inputs without a gradient.
    check(&Conv {
        stride: [4, 3],
        padding: [[0; 2]; 2],
        ..square(2, [2, 3], 11, 2)
    });
    check(&Conv {
        stride: [9, 9],
        padding: [[0; 2]; 2],
        ..square(1, [1, 1], 5, 5)
    });
    // Padding beyond the window: outputs that see zeros only.
    check(&Conv {
        padding: [[4, 4], [5, 0]],
        ..square(1, [2, 2], 4, 2)
    });
    check(&square(1, [1, 1], 1, 1));
    // No image at all.
    let none = square(0, [2, 3], 4, 3);
    let kernels = paceline_kernels::Kernels::of_process().unwrap();
    assert_eq!(kernels.conv(&none, &[], &[1.0; 54], None), []);
    assert_eq!(kernels.conv_weight_gradient(&none, &[], &[]), [0.0; 54]);
}

/// Numbers between two others, both included.
fn draws(mut state: u64) -> impl FnMut(usize, usize) -> usize {
    move |from, to| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        from + (state >> 33) as usize % (to - from + 1)
    }
}

#[test]
fn shapes_from_a_seed() {
    let mut draw = draws(11);
    let mut checked = 0;
    while checked < 60 {
        let groups = draw(1, 3);
        let (channels, outputs) = (groups * draw(1, 5), groups * draw(1, 19));
        let conv = Conv {
            input: [draw(1, 4), channels, draw(1, 14), draw(1, 40)],
            weight: [outputs, channels / groups, draw(1, 4), draw(1, 4)],
            stride: [draw(1, 3), draw(1, 3)],
            padding: [[draw(0, 3), draw(0, 3)], [draw(0, 3), draw(0, 3)]],
            dilation: [draw(1, 3), draw(1, 3)],
            groups,
        };
        let fits = (0..2).all(|dim| {
            let window = (conv.weight[2 + dim] - 1) * conv.dilation[dim] + 1;
            window <= conv.input[2 + dim] + conv.padding[dim][0] + conv.padding[dim][1]
        });
        if fits {
            check(&conv);
            checked += 1;
        }
    }
}

#[test]
fn numbers_that_are_not_finite_reach_what_they_should() {
    let conv = square(1, [1, 1], 5, 3);
    let mut x = vec![1.0; 25];
    (x[0], x[24]) = (f32::NAN, f32::INFINITY);
    let [y] = everywhere(|kernels| [kernels.conv(&conv, &x, &[1.0; 9], None)]);
    for (at, value) in y.iter().enumerate() {
        let (row, column) = (at / 5, at % 5);
        match (row.max(column) <= 1, row.min(column) >= 3) {
            (true, _) => assert!(value.is_nan()),
            (_, true) => assert_eq!(*value, f32::INFINITY),
            _ => assert!(value.is_finite()),
        }
    }
}
