//! Mixed precision: compute types, the same bits on any number of ranks, and skipped steps.

use std::collections::HashMap;

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Tensor, TensorData};
use paceline_collective::ProcessGroup;
use paceline_ddp::{
    Ddp, DdpError, DdpOptions, DdpState, GradScaler, GradScalerOptions, Precision, Reduced, in_f32,
    weights,
};

use crate::support::{batch, device, optimizer, options, ranks, samples};

/// A layer that is used twice, and one that needs f32.
#[derive(Module, Debug)]
struct Net {
    first: Linear,
    norm: BatchNorm,
    tied: Linear,
    same: Linear,
    last: Linear,
}

impl Net {
    /// Weights that do not depend on random numbers, since threads share Burn's generator.
    fn new(device: &Device) -> Self {
        let tied: Linear = LinearConfig::new(8, 8).init(device);
        let net = Self {
            first: LinearConfig::new(6, 8).init(device),
            norm: BatchNormConfig::new(8).init(device),
            same: tied.clone(),
            tied,
            last: LinearConfig::new(8, 3).init(device),
        };
        let values = weights::export(&net).into_iter().enumerate();
        let values = values
            .filter(|(_, (path, _))| !path.starts_with("norm"))
            .map(|(at, (path, data))| {
                let len = data.num_elements();
                let value = |i: usize| ((i * 37 + at * 11) % 29) as f32 / 29.0 - 0.5;
                let values: Vec<f32> = (0..len).map(value).collect();
                (path, TensorData::new(values, data.shape().clone()))
            });
        let net = weights::import(net, values.collect());
        Self {
            same: net.tied.clone(),
            ..net
        }
    }

    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        let x = self.first.forward(input);
        let x = relu(in_f32(x, |x| self.norm.forward(x)));
        let x = relu(self.tied.forward(x));
        let x = relu(self.same.forward(x));
        self.last.forward(x)
    }
}

fn loss(precision: Precision, net: &Net, indices: &[usize], device: &Device) -> Tensor<1> {
    let (x, y) = batch(indices, device);
    let output = precision.logits(net.forward(precision.input(x)));
    (output - y).powf_scalar(2.0).mean()
}

fn mixed(precision: Precision, shards: usize) -> DdpOptions {
    DdpOptions {
        precision,
        scaler: (precision == Precision::F16).then(GradScaler::default),
        ..options(shards)
    }
}

fn step(ddp: &mut Ddp, precision: Precision, net: &Net, factor: f32) -> Result<Reduced, DdpError> {
    let device = device();
    ddp.step(net, |shard| {
        let samples = samples(shard.step(), shard.shard());
        let micro: Vec<&[usize]> = samples.chunks(3).collect();
        shard.micro_batches(micro.len());
        for indices in micro {
            let loss = loss(precision, &shard.model()?, indices, &device).mul_scalar(factor);
            shard.backward(loss, indices.len() as f32)?;
        }
        Ok(())
    })
}

/// One step over four samples on one rank.
fn one_step(options: DdpOptions) -> (Net, Result<Reduced, DdpError>) {
    let device = device();
    let precision = options.precision;
    let group = ranks(1, |group| group).remove(0);
    let (mut ddp, net) = Ddp::new(group, Net::new(&device), options).expect("ranks agree");
    let reduced = ddp.step(&net, |shard| {
        let loss = loss(precision, &shard.model()?, &[1, 2, 3, 4], &device);
        shard.backward(loss, 4.0)
    });
    (net, reduced)
}

fn gradient(grads: &GradientsParams, layer: &Linear) -> Vec<f32> {
    let gradient: Tensor<2> = grads.get(layer.weight.id).expect("a gradient");
    assert_eq!(gradient.dtype(), DType::F32);
    gradient.into_data().try_to_vec().expect("f32")
}

/// Largest difference, relative to the largest value.
fn difference(a: &[f32], b: &[f32]) -> f32 {
    let largest = a.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let apart = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    apart.fold(0.0f32, f32::max) / largest
}

#[test]
fn layers_compute_in_the_precision_and_weights_stay_f32() {
    for (precision, dtype) in [
        (Precision::F32, DType::F32),
        (Precision::Bf16, DType::BF16),
        (Precision::F16, DType::F16),
    ] {
        let device = device();
        let group = ranks(1, |group| group).remove(0);
        let (mut ddp, net) =
            Ddp::new(group, Net::new(&device), mixed(precision, 1)).expect("ranks agree");
        let reduced = ddp.step(&net, |shard| {
            let net = shard.model()?;
            assert_eq!(net.first.weight.val().dtype(), dtype);
            assert_eq!(net.norm.gamma.val().dtype(), DType::F32);
            let (x, _) = batch(&[1, 2], &device);
            let output = net.forward(precision.input(x));
            assert_eq!(output.dtype(), dtype);
            shard.backward(precision.logits(output).mean(), 2.0)
        });
        let reduced = reduced.expect("a step");
        assert!(!reduced.skipped);
        gradient(&reduced.grads, &net.last);
        let net = optimizer().step(0.01, net, reduced.grads);
        let tensors = weights::export(&net);
        assert!(tensors.iter().all(|(_, data)| data.dtype() == DType::F32));
        assert_eq!(ddp.valid(&net).first.weight.val().dtype(), dtype);
    }
}

#[test]
fn gradients_are_those_of_f32_but_for_rounding_and_a_tied_layer_gets_one() {
    let (net, reduced) = one_step(mixed(Precision::F32, 1));
    let exact = reduced.expect("a step").grads;
    let layers = |net: &Net| [&net.first, &net.tied, &net.last].map(Clone::clone);
    for (precision, digits) in [(Precision::Bf16, 0.05), (Precision::F16, 0.01)] {
        let (mixed_net, reduced) = one_step(mixed(precision, 1));
        let reduced = reduced.expect("a step");
        assert_eq!(reduced.grads.len(), exact.len());
        for (layer, mixed_layer) in layers(&net).iter().zip(&layers(&mixed_net)) {
            let (exact, found) = (
                gradient(&exact, layer),
                gradient(&reduced.grads, mixed_layer),
            );
            let apart = difference(&exact, &found);
            assert!(
                apart > 0.0 && apart < digits,
                "{precision}: {apart} of the largest value"
            );
        }
    }
}

#[test]
fn weights_have_the_same_bits_on_any_number_of_ranks_in_every_precision() {
    let train = |precision: Precision, group: ProcessGroup| {
        let mut optimizer = optimizer();
        let net = Net::new(&device());
        let (mut ddp, mut net) = Ddp::new(group, net, mixed(precision, 4)).expect("ranks agree");
        for _ in 0..6 {
            let reduced = step(&mut ddp, precision, &net, 1.0).expect("a step");
            net = optimizer.step(0.01, net, reduced.grads);
        }
        let scale = ddp.scaler().map(GradScaler::get_scale);
        (weights::sha256(&weights::export(&net)), scale)
    };
    let mut seen = Vec::new();
    for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
        let alone = ranks(1, |group| train(precision, group)).remove(0);
        for world in [2, 3, 4] {
            for rank in ranks(world, |group| train(precision, group)) {
                assert_eq!(rank, alone, "{precision} on {world} ranks");
            }
        }
        assert!(!seen.contains(&alone), "{precision} gives bits of its own");
        seen.push(alone);
    }
}

#[test]
fn an_infinity_on_one_rank_makes_all_ranks_leave_the_step_out() {
    let found = ranks(3, |group| {
        let rank = group.rank();
        let net = Net::new(&device());
        let (mut ddp, mut net) =
            Ddp::new(group, net, mixed(Precision::F16, 3)).expect("ranks agree");
        let mut optimizer = optimizer();
        let mut steps = Vec::new();
        for at in 0..4 {
            let factor = if (rank, at) == (1, 2) {
                f32::INFINITY
            } else {
                1.0
            };
            let before = weights::sha256(&weights::export(&net));
            let reduced = step(&mut ddp, Precision::F16, &net, factor).expect("a step");
            let (skipped, scale) = (reduced.skipped, reduced.scale);
            assert_eq!(reduced.grads.is_empty(), skipped);
            net = optimizer.step(0.01, net, reduced.grads);
            // The optimizer does not own running statistics: they have changed.
            let parameters = weights::export(&net);
            let moved = before != weights::sha256(&parameters);
            steps.push((skipped, scale, moved));
        }
        let scale = ddp.scaler().expect("a scaler").get_scale();
        (steps, scale, weights::sha256(&weights::export(&net)))
    });
    assert_eq!(found[1], found[0]);
    assert_eq!(found[2], found[0]);
    let skipped: Vec<bool> = found[0].0.iter().map(|step| step.0).collect();
    assert_eq!(skipped, [false, false, true, false]);
    let scales: Vec<f32> = found[0].0.iter().map(|step| step.1).collect();
    assert_eq!(scales, [65536.0, 65536.0, 65536.0, 32768.0]);
    assert_eq!(found[0].1, 32768.0);
}

#[test]
fn a_skipped_step_changes_no_weight_and_no_optimizer_state() {
    let run = |factors: &[f32]| {
        let group = ranks(1, |group| group).remove(0);
        let net = Net::new(&device());
        // In f32 a lower scale changes no digit of later steps.
        let options = DdpOptions {
            scaler: Some(GradScaler::default()),
            ..mixed(Precision::F32, 1)
        };
        let (mut ddp, mut net) = Ddp::new(group, net, options).expect("ranks agree");
        let mut optimizer = optimizer();
        for factor in factors {
            // The same samples in each step.
            let reduced = ddp.step(&net, |shard| {
                let loss = loss(Precision::F32, &shard.model()?, &[1, 2, 3], &device());
                shard.backward(loss.mul_scalar(*factor), 3.0)
            });
            net = optimizer.step(0.01, net, reduced.expect("a step").grads);
        }
        // The forward pass writes running statistics even in a skipped step.
        let values = weights::export(&net).into_iter();
        let values = values.filter(|(path, _)| !path.contains("running"));
        weights::sha256(&values.collect::<Vec<_>>())
    };
    let (all, good) = (run(&[f32::NAN, 1.0, f32::INFINITY, 2.0]), run(&[1.0, 2.0]));
    assert_eq!(all, good);
}

#[test]
fn gradients_are_unscaled_before_they_are_clipped() {
    let clipped = |scaler: Option<GradScaler>| {
        let options = DdpOptions {
            clip_norm: Some(1e-3),
            scaler,
            ..options(1)
        };
        let (net, reduced) = one_step(options);
        let reduced = reduced.expect("a step");
        (reduced.grad_norm, gradient(&reduced.grads, &net.last))
    };
    // Powers of two, so that not even rounding differs.
    let (norm, gradient) = clipped(None);
    assert!(norm.expect("a norm") > 1e-3);
    assert_eq!(clipped(Some(GradScaler::default())), (norm, gradient));
}

#[test]
fn small_gradients_vanish_in_f16_without_a_scaler() {
    let device = device();
    let vanished = |scaler: Option<GradScaler>| {
        let options = DdpOptions {
            scaler,
            ..mixed(Precision::F16, 1)
        };
        let group = ranks(1, |group| group).remove(0);
        let (mut ddp, net) = Ddp::new(group, Net::new(&device), options).expect("ranks agree");
        let reduced = ddp.step(&net, |shard| {
            let loss = loss(Precision::F16, &shard.model()?, &[1, 2, 3], &device);
            shard.backward(loss.mul_scalar(1e-8), 3.0)
        });
        let gradient = gradient(&reduced.expect("a step").grads, &net.first);
        gradient.iter().all(|value| *value == 0.0)
    };
    assert!(vanished(None));
    assert!(!vanished(Some(GradScaler::default())));
}

#[test]
fn a_resumed_scaler_goes_on_with_its_scale() {
    let options = GradScalerOptions {
        init_scale: 4.0,
        growth_interval: 2,
        ..GradScalerOptions::default()
    };
    let run = |scaler: GradScaler, from: Option<DdpState>, steps: u64| {
        let group = ranks(1, |group| group).remove(0);
        let options = DdpOptions {
            scaler: Some(scaler),
            ..mixed(Precision::F16, 1)
        };
        let (mut ddp, mut net) =
            Ddp::new(group, Net::new(&device()), options).expect("ranks agree");
        if let Some(state) = from {
            net = ddp
                .load_state_dict(net, &state, HashMap::new())
                .expect("valid");
        }
        let scales = (0..steps).map(|_| {
            let reduced = ddp.step(&net, |shard| {
                let loss = loss(Precision::F16, &shard.model()?, &[1, 2], &device());
                shard.backward(loss, 2.0)
            });
            reduced.expect("a step").scale
        });
        let scales: Vec<f32> = scales.collect();
        (scales, ddp.state_dict())
    };
    let fresh = || GradScaler::new(options.clone()).expect("valid");
    let (whole, end) = run(fresh(), None, 7);
    assert_eq!(whole, [4.0, 4.0, 8.0, 8.0, 16.0, 16.0, 32.0]);
    let (first, saved) = run(fresh(), None, 3);
    let (second, resumed) = run(GradScaler::default(), Some(saved), 4);
    assert_eq!([first, second].concat(), whole);
    assert_eq!(resumed, end);
}

#[test]
fn what_was_not_cast_is_an_error_that_says_what_to_do() {
    let device = device();
    let fails = |pass: fn(&Net, Tensor<2>) -> Tensor<1>| {
        let group = ranks(1, |group| group).remove(0);
        let options = mixed(Precision::Bf16, 1);
        let (mut ddp, net) = Ddp::new(group, Net::new(&device), options).expect("ranks agree");
        let reduced = ddp.step(&net, |shard| {
            let loss = pass(&shard.model()?, batch(&[1, 2, 3], &device).0);
            shard.backward(loss, 3.0)
        });
        let error = reduced.err().expect("types differ");
        let hint = error.hint().expect("something can be done");
        (error.to_string(), hint)
    };
    let (error, hint) = fails(|net, input| net.forward(input).mean());
    assert!(
        error.starts_with("step 0: tensors of different types meet: ") && error.contains("dtype"),
        "{error}"
    );
    assert!(hint.contains("Precision::input"), "{hint}");

    let (error, hint) = fails(|net, input| {
        let x = net.first.forward(Precision::Bf16.input(input));
        net.norm.forward(x).mean()
    });
    assert!(error.contains("types meet"), "{error}");
    assert!(hint.contains("in_f32"), "{hint}");

    let (error, hint) = fails(|net, input| net.forward(Precision::Bf16.input(input)).mean());
    assert_eq!(
        error,
        "step 0: the loss has type BF16, which has too few digits for it"
    );
    assert!(hint.contains("Precision::logits"), "{hint}");
}

#[test]
fn ranks_of_different_precision_or_scale_are_refused() {
    let refusal = |options: fn(usize) -> DdpOptions| {
        let errors = ranks(2, |group| {
            let options = options(group.rank());
            let opened = Ddp::new(group, Net::new(&device()), options);
            opened.err().expect("they differ").to_string()
        });
        assert_eq!(errors[0], errors[1]);
        errors[0].clone()
    };
    assert_eq!(
        refusal(|rank| mixed([Precision::F32, Precision::Bf16][rank], 2)),
        "ranks do not agree on setting precision: rank 0 has f32, rank 1 has bf16"
    );
    let other = refusal(|rank| {
        let mut scaler = GradScaler::default();
        scaler.update(rank == 1);
        DdpOptions {
            scaler: Some(scaler),
            ..mixed(Precision::F16, 2)
        }
    });
    assert!(other.contains("setting scaler"), "{other}");
    assert!(other.contains("32768"), "{other}");
}
