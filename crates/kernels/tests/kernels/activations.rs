//! Activations and their gradients against f64.

use paceline_kernels::Kernels;

use crate::functions::erfc;
use crate::support::{everywhere, noise};

/// An activation and its gradient, of `[x, gradient]`.
type Ours = fn(Kernels, [&[f32]; 2]) -> [Vec<f32>; 2];
/// Its value, and the factor of the gradient, in f64.
type Exact = fn(f64) -> [f64; 2];

/// With the largest errors: of a value for its size, of a value that is tiny, of the factor.
const ACTIVATIONS: [(&str, Ours, Exact, [f64; 3]); 4] = [
    (
        "gelu",
        |kernels, [x, gradient]| [kernels.gelu(x), kernels.gelu_gradient(x, gradient)],
        |x| {
            let [below, density] = normal(x);
            [x * below, below + x * density]
        },
        [6e-7, 1e-44, 3e-7],
    ),
    (
        "silu",
        |kernels, [x, gradient]| [kernels.silu(x), kernels.silu_gradient(x, gradient)],
        |x| {
            let [value, rest] = logistic(x);
            [x * value, value * (1.0 + x * rest)]
        },
        [3e-7, 1.5e-43, 2.9e-7],
    ),
    (
        "sigmoid",
        |kernels, [x, gradient]| {
            let y = kernels.sigmoid(x);
            let of_x = kernels.sigmoid_gradient(&y, gradient);
            [y, of_x]
        },
        |x| {
            let [value, rest] = logistic(x);
            [value, value * rest]
        },
        [2.5e-7, 1.5e-45, 1e-7],
    ),
    (
        "tanh",
        |kernels, [x, gradient]| {
            let y = kernels.tanh(x);
            let of_x = kernels.tanh_gradient(&y, gradient);
            [y, of_x]
        },
        |x| [x.tanh(), 1.0 / x.cosh().powi(2)],
        [1.3e-7, 1.5e-45, 2e-7],
    ),
];

/// The probability that a normal variable lies below `x`, and its density, in f64.
fn normal(x: f64) -> [f64; 2] {
    let beyond = erfc(x.abs() / 2.0_f64.sqrt()) / 2.0;
    let density = (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt();
    [if x < 0.0 { beyond } else { 1.0 - beyond }, density]
}

/// The logistic function of `x` and of `-x`, in f64.
fn logistic(x: f64) -> [f64; 2] {
    [1.0 / (1.0 + (-x).exp()), 1.0 / (1.0 + x.exp())]
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
    for (name, ours, exact, bounds) in ACTIVATIONS {
        let [y, of_x] = everywhere(|kernels| ours(kernels, [&x, &g]));
        let [relative, tiny, of_factor] = bounds;
        let mut worst = [0.0_f64; 2];
        for (at, x) in x.iter().enumerate() {
            let [value, factor] = exact(f64::from(*x));
            let error = (f64::from(y[at]) - value).abs();
            let for_size = (error - tiny).max(0.0) / value.abs().max(f32::MIN_POSITIVE.into());
            let (given, got) = (f64::from(g[at]), f64::from(of_x[at]));
            let of_this = (got - given * factor).abs() / given.abs().max(1e-30);
            assert!(
                for_size < relative,
                "{name}({x}) = {:e} in place of {value:e}",
                y[at]
            );
            assert!(
                of_this < of_factor,
                "{name} at {x}: {got:e} in place of {:e}",
                given * factor
            );
            worst = [worst[0].max(for_size), worst[1].max(of_this)];
        }
        println!(
            "{name}: relative {:e}; factor of the gradient: {:e}",
            worst[0], worst[1]
        );
    }
}

#[test]
fn any_number_of_values() {
    for count in [0, 1, 31, 32, 33, 1009, 10_007] {
        let x = noise(3, count);
        for (name, ours, exact, _) in ACTIVATIONS {
            let [y, of_x] = everywhere(|kernels| ours(kernels, [&x, &x]));
            assert_eq!((y.len(), of_x.len()), (count, count), "{name}");
            for (at, x) in x.iter().enumerate() {
                let x = f64::from(*x);
                let [value, factor] = exact(x);
                assert!((f64::from(y[at]) - value).abs() < 2e-7, "{name}({x})");
                assert!(
                    (f64::from(of_x[at]) - x * factor).abs() < 3e-7,
                    "{name} at {x}"
                );
            }
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
    // Which bits a NaN has is left open.
    let of_all = |name: &str| {
        let (_, ours, ..) = ACTIVATIONS
            .into_iter()
            .find(|(of, ..)| *of == name)
            .unwrap();
        let one_nan = |value: f32| if value.is_nan() { f32::NAN } else { value };
        everywhere(|kernels| {
            let both = ours(kernels, [&x, &[2.0; 7]]);
            both.map(|values| values.into_iter().map(one_nan).collect())
        })
    };
    for name in ["gelu", "silu"] {
        let [y, of_x] = of_all(name);
        assert!(y[0].is_nan() && y[2].is_nan() && of_x[0].is_nan());
        assert!(of_x[1].is_nan() && of_x[2].is_nan());
        assert_eq!(y[1], f32::INFINITY);
        assert_eq!([y[3], y[4], y[5], y[6]], [0.0, f32::MAX, 0.0, 0.0]);
        assert_eq!([of_x[3], of_x[4], of_x[5], of_x[6]], [0.0, 2.0, 1.0, 1.0]);
    }
    let [y, of_x] = of_all("sigmoid");
    assert!(y[0].is_nan() && of_x[0].is_nan());
    assert_eq!(y[1..], [1.0, 0.0, 0.0, 1.0, 0.5, 0.5]);
    assert_eq!(of_x[1..], [0.0, 0.0, 0.0, 0.0, 0.5, 0.5]);
    let [y, of_x] = of_all("tanh");
    assert!(y[0].is_nan() && of_x[0].is_nan());
    assert_eq!(y[1..], [1.0, -1.0, -1.0, 1.0, 0.0, 0.0]);
    assert_eq!(of_x[1..], [0.0, 0.0, 0.0, 0.0, 2.0, 2.0]);
}
