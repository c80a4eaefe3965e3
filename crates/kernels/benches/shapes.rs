//! Speed of each kernel for the layers of common networks: GFLOP/s and the share of what fused multiply-adds on registers
//! reach on as many threads in the same rounds. A layer's FLOP/byte are those for each byte of its tensors, read or written once:
//! benches/pictures.py draws them.
//!
//! Usage: cargo bench -p paceline-kernels [-- --rounds N] [--threads N] [ISA]

use std::cell::RefCell;
use std::hint::black_box;
use std::time::{Duration, Instant};

use paceline_kernels::{AdamW, After, Attention, BatchNorm, Conv, Gemm, Isa, Kernels, LayerNorm};

/// Shortest time of a measurement.
const MEASURED: Duration = Duration::from_millis(20);

/// Images, channels, side, outputs, taps, stride.
const CONVS: [(&str, [usize; 6]); 16] = [
    ("digits conv1", [64, 1, 8, 16, 3, 1]),
    ("digits conv2", [64, 16, 8, 32, 3, 1]),
    ("resnet20 first", [64, 3, 32, 16, 3, 1]),
    ("resnet20 stage 1", [64, 16, 32, 16, 3, 1]),
    ("resnet20 down", [64, 16, 32, 32, 3, 2]),
    ("resnet20 stage 2", [64, 32, 16, 32, 3, 1]),
    ("resnet20 stage 3", [64, 64, 8, 64, 3, 1]),
    ("resnet50 stem", [2, 3, 224, 64, 7, 2]),
    ("resnet50 3x3, 56", [2, 64, 56, 64, 3, 1]),
    ("resnet50 1x1, 56", [2, 64, 56, 256, 1, 1]),
    ("resnet50 3x3, 14", [2, 256, 14, 256, 3, 1]),
    ("resnet50 3x3, down", [2, 128, 56, 128, 3, 2]),
    ("resnet50 1x1, 14", [2, 1024, 14, 256, 1, 1]),
    ("resnet50 1x1, 7", [2, 512, 7, 2048, 1, 1]),
    ("resnet50 1x1, down", [2, 256, 56, 512, 1, 2]),
    ("resnet50 3x3, 7", [2, 512, 7, 512, 3, 1]),
];

/// Rows, inputs, outputs.
const LINEARS: [(&str, [usize; 3]); 7] = [
    ("digits head", [64, 512, 10]),
    ("mlp first", [64, 784, 1024]),
    ("mlp second", [64, 1024, 1024]),
    ("gpt query", [1024, 256, 256]),
    ("gpt up", [1024, 256, 1024]),
    ("gpt down", [1024, 1024, 256]),
    ("gpt head", [1024, 256, 512]),
];

fn main() {
    let (mut rounds, mut threads) = (5, 1);
    let mut kernels = Kernels::of_process();
    // `cargo test` runs each shape once, and passes the tests' arguments.
    let is_test = !std::env::args().any(|arg| arg == "--bench");
    let mut args = std::env::args().skip(1).filter(|_| !is_test);
    while let Some(arg) = args.next() {
        match &*arg {
            "--bench" => {}
            "--rounds" => rounds = number(args.next()),
            "--threads" => threads = number(args.next()),
            isa => kernels = isa.parse::<Isa>().and_then(Kernels::with),
        }
    }
    let kernels = kernels.unwrap_or_else(|error| panic!("{error}"));
    let least = if is_test { Duration::ZERO } else { MEASURED };
    let rounds = if is_test { 1 } else { rounds };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    pool.expect("threads")
        .install(|| print(kernels, rounds, least));
}

fn number(arg: Option<String>) -> usize {
    arg.and_then(|arg| arg.parse().ok()).expect("a number")
}

fn print(kernels: Kernels, rounds: usize, least: Duration) {
    let threads = match rayon::current_num_threads() {
        1 => "one thread".to_owned(),
        threads => format!("{threads} threads"),
    };
    println!("{}, {threads}, medians of {rounds} rounds", kernels.isa());
    println!(
        "| layer | FLOP/byte | output, GFLOP/s | gradient of the input | gradient of the weight | multiply-adds on registers |"
    );
    println!("|---|---:|---:|---:|---:|---:|");
    for (name, [images, channels, side, outputs, taps, stride]) in CONVS {
        let conv = Conv {
            input: [images, channels, side, side],
            weight: [outputs, channels, taps, taps],
            stride: [stride; 2],
            padding: [[taps / 2; 2]; 2],
            dilation: [1, 1],
            groups: 1,
        };
        let values = |shape: [usize; 4]| vec![0.5_f32; shape.iter().product()];
        let (x, weight, gradient) = (
            values(conv.input),
            values(conv.weight),
            values(conv.output()),
        );
        let flops = 2 * gradient.len() * channels * taps * taps;
        let intensity = intensity(flops, x.len() + weight.len() + gradient.len());
        let [y, of_input, of_weight, peak] = medians(rounds, |_| {
            [
                rate(flops, least, || kernels.conv(&conv, &x, &weight, None)),
                rate(flops, least, || {
                    kernels.conv_input_gradient(&conv, &weight, &gradient)
                }),
                rate(flops, least, || {
                    kernels.conv_weight_gradient(&conv, &x, &gradient)
                }),
                peak(kernels, least),
            ]
        });
        let share = |rate: f64| format!("{rate:.1} ({:.0} %)", 100.0 * rate / peak);
        let [y, of_input, of_weight] = [y, of_input, of_weight].map(share);
        println!("| {name} | {intensity} | {y} | {of_input} | {of_weight} | {peak:.1} |");
    }
    println!();
    println!(
        "| linear layer | FLOP/byte | output, GFLOP/s | gradient of the input | gradient of the weight | multiply-adds on registers |"
    );
    println!("|---|---:|---:|---:|---:|---:|");
    for (name, [rows, inputs, outputs]) in LINEARS {
        let values = |count: usize| vec![0.5_f32; count];
        let (x, weight, gradient) = (
            values(rows * inputs),
            values(inputs * outputs),
            values(rows * outputs),
        );
        let gemm = |[rows, columns, depth]: [usize; 3], a_transposed, b_transposed| Gemm {
            rows,
            columns,
            depth,
            a_transposed,
            b_transposed,
        };
        let of_output = gemm([rows, outputs, inputs], false, false);
        let of_input = gemm([rows, inputs, outputs], false, true);
        let of_weight = gemm([inputs, outputs, rows], true, false);
        let flops = 2 * rows * inputs * outputs;
        let intensity = intensity(flops, x.len() + weight.len() + gradient.len());
        let [y, of_input, of_weight, peak] = medians(rounds, |_| {
            [
                rate(flops, least, || kernels.gemm(&of_output, &x, &weight, None)),
                rate(flops, least, || {
                    kernels.gemm(&of_input, &gradient, &weight, None)
                }),
                rate(flops, least, || {
                    kernels.gemm(&of_weight, &x, &gradient, None)
                }),
                peak(kernels, least),
            ]
        });
        let share = |rate: f64| format!("{rate:.1} ({:.0} %)", 100.0 * rate / peak);
        let [y, of_input, of_weight] = [y, of_input, of_weight].map(share);
        println!("| {name} | {intensity} | {y} | {of_input} | {of_weight} | {peak:.1} |");
    }
    println!("\n| batch norm | forward, GB/s | backward, GB/s | copy, GB/s |");
    println!("|---|---:|---:|---:|");
    for (images, channels, positions) in [(64, 16, 1024), (64, 64, 64), (8, 64, 3136)] {
        let norm = BatchNorm {
            images,
            channels,
            positions,
            epsilon: 1e-5,
        };
        let count = images * channels * positions;
        let (x, ones) = (vec![0.5_f32; count], vec![1.0; channels]);
        let (_, moments) = kernels.batch_norm(&norm, &x, [&ones; 2], After::Nothing);
        let [forward, backward, copy] = medians(rounds, |_| {
            [
                rate(8 * count, least, || {
                    kernels.batch_norm(&norm, &x, [&ones; 2], After::Nothing)
                }),
                rate(12 * count, least, || {
                    kernels.batch_norm_gradients(
                        &norm,
                        &x,
                        [&ones; 2],
                        &moments,
                        After::Nothing,
                        &x,
                    )
                }),
                rate(8 * count, least, || black_box(&x).to_vec()),
            ]
        });
        println!(
            "| {images} x {channels} x {positions} | {forward:.1} | {backward:.1} | {copy:.1} |"
        );
    }
    print_attention(kernels, rounds, least);
    print_rows(kernels, rounds, least);
    print_values(kernels, rounds, least);
    print_memory(rounds, least);
}

/// Attention: two products, and five in the backward pass. If it is causal, half of each is seen.
fn print_attention(kernels: Kernels, rounds: usize, least: Duration) {
    const CASES: [(bool, [usize; 4]); 4] = [
        (true, [8, 4, 128, 64]),
        (true, [2, 12, 512, 64]),
        (true, [1, 8, 2048, 64]),
        (false, [8, 3, 197, 64]),
    ];
    println!(
        "\n| attention | FLOP/byte | output, GFLOP/s | FLOP/byte | gradients | multiply-adds on registers |"
    );
    println!("|---|---:|---:|---:|---:|---:|");
    for (causal, [sequences, heads, length, width]) in CASES {
        let attention = Attention {
            sequences,
            heads,
            queries: length,
            keys: length,
            width,
            causal,
        };
        let x = vec![0.5_f32; sequences * length * heads * width];
        let inputs = [&x[..]; 3];
        let (_, sums) = kernels.attention(&attention, inputs);
        let product = x.len() * length * if causal { 1 } else { 2 };
        let [output, gradients, peak] = medians(rounds, |_| {
            [
                rate(2 * product, least, || kernels.attention(&attention, inputs)),
                rate(5 * product, least, || {
                    kernels.attention_gradients(&attention, inputs, &sums, &x, &x)
                }),
                peak(kernels, least),
            ]
        });
        let share = |rate: f64| format!("{rate:.1} ({:.0} %)", 100.0 * rate / peak);
        let [output, gradients] = [output, gradients].map(share);
        let forward = intensity(2 * product, 4 * x.len());
        let backward = intensity(5 * product, 8 * x.len());
        let kind = if causal { "causal" } else { "full" };
        println!(
            "| {kind}, {sequences} x {length} x {heads} x {width} | {forward} | {output} | {backward} | {gradients} | {peak:.1} |"
        );
    }
}

/// Operations for each byte of so many values, as a table has it.
fn intensity(flops: usize, values: usize) -> String {
    format!("{:.1}", flops as f64 / (4 * values) as f64)
}

/// What memory gives to one thread.
fn print_memory(rounds: usize, least: Duration) {
    // Far more than a core's share of the caches, but in tests.
    let mib = if least.is_zero() { 1 } else { 256 };
    let x = vec![0.5_f32; mib << 18];
    let to = RefCell::new(x.clone());
    let [copy] = medians(rounds, |_| {
        [rate(8 * x.len(), least, || {
            black_box(&mut to.borrow_mut()[..]).copy_from_slice(black_box(&x));
        })]
    });
    println!("\nmemory: {copy:.1} GB/s read and written by a copy of {mib} MiB");
}

/// Kernels of rows: the bytes that they must read and write for each second.
fn print_rows(kernels: Kernels, rounds: usize, least: Duration) {
    println!(
        "\n| rows | layer norm, GB/s | backward | softmax | backward | cross-entropy | backward | copy |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|---:|");
    for [count, width] in [[4096, 256], [2048, 768], [512, 4096]] {
        let norm = LayerNorm {
            rows: count,
            width,
            epsilon: 1e-5,
            is_centred: true,
        };
        let values = count * width;
        let (x, ones) = (vec![0.5_f32; values], vec![1.0; width]);
        let (_, moments) = kernels.layer_norm(&norm, &x, &ones, None);
        let targets = vec![1; count];
        let (_, sums) = kernels.cross_entropy(&x, width, &targets);
        let rates: [f64; 7] = medians(rounds, |_| {
            [
                rate(8 * values, least, || {
                    kernels.layer_norm(&norm, &x, &ones, None)
                }),
                rate(12 * values, least, || {
                    kernels.layer_norm_gradients(&norm, &x, &ones, &moments, &x)
                }),
                rate(8 * values, least, || kernels.softmax(&x, width)),
                rate(12 * values, least, || {
                    kernels.softmax_gradient(&x, &x, width)
                }),
                rate(4 * values, least, || {
                    kernels.cross_entropy(&x, width, &targets)
                }),
                rate(8 * values, least, || {
                    kernels.cross_entropy_gradient(&x, width, &targets, &sums, 1.0)
                }),
                rate(8 * values, least, || black_box(&x).to_vec()),
            ]
        });
        let rates = rates.map(|rate| format!("{rate:.1}")).join(" | ");
        println!("| {count} x {width} | {rates} |");
    }
}

/// Functions of each value, on values in the second cache.
fn print_values(kernels: Kernels, rounds: usize, least: Duration) {
    type Function = fn(Kernels, &[f32]) -> Vec<f32>;
    const FUNCTIONS: [(&str, Function); 7] = [
        ("exp", Kernels::exp),
        ("log", Kernels::log),
        ("tanh", Kernels::tanh),
        ("erf", Kernels::erf),
        ("gelu", Kernels::gelu),
        ("gelu's gradient", |kernels, x| kernels.gelu_gradient(x, x)),
        ("copy", |_, x| x.to_vec()),
    ];
    println!("\n| function | ns for a value |");
    println!("|---|---:|");
    let x: Vec<f32> = (0..1 << 16).map(|at| at as f32 / 9973.0).collect();
    for (name, function) in FUNCTIONS {
        let [rate] = medians(rounds, |_| {
            [rate(x.len(), least, || function(kernels, black_box(&x)))]
        });
        println!("| {name} | {:.2} |", 1.0 / rate);
    }
    let optimizer = AdamW {
        learning_rate: 1e-3,
        beta_1: 0.9,
        beta_2: 0.999,
        epsilon: 1e-8,
        weight_decay: 0.01,
    };
    let state = RefCell::new([(); 3].map(|()| x.clone()));
    let [rate] = medians(rounds, |_| {
        [rate(x.len(), least, || {
            let [parameter, first, second] = &mut *state.borrow_mut();
            kernels.adamw(&optimizer, 1, parameter, &x, [first, second]);
        })]
    });
    println!("| AdamW | {:.2} |", 1.0 / rate);
}

fn medians<const N: usize>(rounds: usize, measure: impl Fn(usize) -> [f64; N]) -> [f64; N] {
    let rounds: Vec<[f64; N]> = (0..rounds).map(measure).collect();
    std::array::from_fn(|at| {
        let mut values: Vec<f64> = rounds.iter().map(|round| round[at]).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    })
}

/// 10^9 of `count` for each second, over repeated calls of `work`.
fn rate<T>(count: usize, least: Duration, work: impl Fn() -> T) -> f64 {
    let mut calls = 0;
    let start = Instant::now();
    while calls == 0 || start.elapsed() < least {
        black_box(work());
        calls += 1;
    }
    (calls * count) as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// GFLOP/s of multiply-adds on registers, on all threads.
fn peak(kernels: Kernels, least: Duration) -> f64 {
    const COUNT: usize = 1 << 20;
    let of_thread = || rate(2 * COUNT, least, || kernels.multiply_adds(black_box(COUNT)));
    rayon::broadcast(|_| of_thread()).iter().sum()
}
