//! Which parameters are cast, by name and by type.

use burn::nn::{BatchNorm, BatchNormConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{DType, Device};

use paceline_nn::in_f32;

use super::*;
use crate::buffer::{Role, inventory};

#[derive(Module, Debug)]
struct Block {
    linear: Linear,
    norm: LayerNorm,
}

#[derive(Module, Debug)]
struct Net {
    first: Block,
    second: Vec<Block>,
    batch_norm: BatchNorm,
}

fn net(device: &Device) -> Net {
    let block = || Block {
        linear: LinearConfig::new(2, 2).init(device),
        norm: LayerNormConfig::new(2).init(device),
    };
    Net {
        first: block(),
        second: vec![block()],
        batch_norm: BatchNormConfig::new(2).init(device),
    }
}

/// The paths that are still f32 after the casts.
fn kept(precision: Precision, keep: &[&str]) -> Result<Vec<String>, DdpError> {
    let device = Device::flex().autodiff();
    let net = net(&device);
    let keep: Vec<String> = keep.iter().map(ToString::to_string).collect();
    let buffers = inventory(&net).into_iter();
    let buffers = buffers.filter(|entry| entry.role == Role::Buffer);
    let buffers = buffers.enumerate().map(|(at, entry)| (entry.id, at));
    let casts = Casts::new(&net, &device, precision, &keep, &buffers.collect())?;
    let cast = casts.apply(net);
    let kept = inventory(&cast).into_iter();
    let kept = kept.filter(|entry| entry.dtype == DType::F32);
    Ok(kept.map(|entry| entry.path).collect())
}

const OF_BATCH_NORM: [&str; 4] = [
    "batch_norm.gamma",
    "batch_norm.beta",
    "batch_norm.running_mean",
    "batch_norm.running_var",
];

#[test]
fn what_is_kept_is_named_by_type_or_by_path() {
    let check = |keep: &[&str], expect: &[&str]| {
        let expect = [expect, &OF_BATCH_NORM].concat();
        assert_eq!(
            kept(Precision::Bf16, keep).expect("valid"),
            expect,
            "{keep:?}"
        );
    };
    check(&[], &[]);
    check(
        &NORMS,
        &[
            "first.norm.gamma",
            "first.norm.beta",
            "second.0.norm.gamma",
            "second.0.norm.beta",
        ],
    );
    check(&["first.norm"], &["first.norm.gamma", "first.norm.beta"]);
    check(&["first.linear.bias"], &["first.linear.bias"]);
    check(
        &["second.0.linear", "first.norm.beta"],
        &[
            "first.norm.beta",
            "second.0.linear.weight",
            "second.0.linear.bias",
        ],
    );
    // A path ends at a dot.
    check(
        &["second", "LayerNorm"],
        &[
            "first.norm.gamma",
            "first.norm.beta",
            "second.0.linear.weight",
            "second.0.linear.bias",
            "second.0.norm.gamma",
            "second.0.norm.beta",
        ],
    );
}

#[test]
fn a_name_that_fits_nothing_is_refused_unless_it_is_a_norm() {
    let error = kept(Precision::Bf16, &["RmsNorm", "secon"]).expect_err("refused");
    assert_eq!(
        error.to_string(),
        "keep_f32 names secon, which is neither a path nor a module type in the model"
    );
}

#[test]
fn in_f32_nothing_is_cast_whatever_is_named() {
    assert_eq!(kept(Precision::F32, &["secon"]).expect("valid").len(), 12);
}

#[test]
fn inputs_and_logits_change_type_and_come_back() {
    let device = Device::flex();
    for (precision, dtype) in [
        (Precision::F32, DType::F32),
        (Precision::Bf16, DType::BF16),
        (Precision::F16, DType::F16),
    ] {
        let x = precision.input(Tensor::<1>::ones([2], &device));
        assert_eq!(x.dtype(), dtype);
        let y = in_f32(x, |x| {
            assert_eq!(x.dtype(), DType::F32);
            x.unsqueeze::<2>()
        });
        assert_eq!((y.dtype(), y.dims()), (dtype, [1, 2]));
        assert_eq!(precision.logits(y).dtype(), DType::F32);
    }
}

#[test]
fn only_what_burn_says_about_types_is_explained() {
    let casts = Casts {
        precision: Precision::Bf16,
        cast: HashSet::new(),
    };
    assert_eq!(casts.explain(3, || 1).expect("no panic"), 1);
    let panics = |text: &'static str| {
        let explain = || casts.explain(3, || -> () { std::panic::panic_any(text) });
        catch_unwind(AssertUnwindSafe(explain)).map_err(|_| "still a panic")
    };
    let error = panics("matmul: dtype mismatch\n  left: F32").expect("explained");
    assert_eq!(
        error.expect_err("an error").to_string(),
        "step 3: tensors of different types meet: matmul: dtype mismatch left: F32"
    );
    assert_eq!(panics("index out of bounds").err(), Some("still a panic"));
}
