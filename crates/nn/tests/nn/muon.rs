//! The optimizer takes Burn's steps, and its state is Burn's.

use burn::nn::{Linear, LinearConfig};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::{AdjustLrFn, GradientsParams, ModuleOptimizer};
use burn::tensor::{Tensor, Tolerance};
use paceline_nn::MuonConfig;

use crate::support::{device, values};

fn ours() -> ModuleOptimizer {
    ModuleOptimizer::from(MuonConfig::new().build())
}

fn burns() -> ModuleOptimizer {
    let config = burn::optim::MuonConfig::new()
        .with_weight_decay(Some(WeightDecayConfig::new(0.1)))
        .with_adjust_lr_fn(AdjustLrFn::MatchRmsAdamW);
    config.init()
}

#[test]
fn steps_are_burns_to_rounding_for_wide_and_tall_matrices_and_from_the_others_state() {
    let (device, _alone) = device();
    for shape in [[7, 5], [3, 40], [1, 9]] {
        let [inputs, outputs] = shape;
        let steps = |mut net: Linear, mut optimizer: ModuleOptimizer| {
            for step in 0..3 {
                let x = values([4, inputs], &device) + 0.1 * step as f32;
                let gradients = net.forward(x).powi_scalar(2).mean().backward();
                let gradients = GradientsParams::from_grads(gradients, &net);
                net = optimizer.step(3e-2, net, gradients);
            }
            (net, optimizer)
        };
        let start = || {
            let config = LinearConfig::new(inputs, outputs).with_bias(false);
            let mut net: Linear = config.init(&device);
            net.weight = net
                .weight
                .map(|weight| values(weight.dims(), &device).require_grad());
            net
        };
        let near = |one: &Linear, other: &Linear| {
            let data = |net: &Linear| net.weight.val().into_data();
            data(one).assert_approx_eq::<f32>(&data(other), Tolerance::rel_abs(1e-3, 1e-4));
        };
        let (own, own_state) = steps(start(), ours());
        let (net, state) = steps(start(), burns());
        near(&own, &net);
        let (own, _) = steps(own, ours().load_record(state.to_record()));
        let (net, _) = steps(net, burns().load_record(own_state.to_record()));
        near(&own, &net);
    }
}

#[test]
fn a_gradient_of_zeros_moves_nothing_but_the_decay() {
    let (device, _alone) = device();
    let net: Linear = LinearConfig::new(3, 2).with_bias(false).init(&device);
    let before = net.weight.val().into_data();
    let gradients = net.forward(Tensor::<2>::zeros([1, 3], &device)).sum();
    let gradients = GradientsParams::from_grads(gradients.backward(), &net);
    let net = ours().step(0.5, net, gradients);
    let kept = Tensor::<2>::from_data(before, &device.inner()).mul_scalar(0.95);
    let tolerance = Tolerance::rel_abs(1e-6, 1e-7);
    (net.weight.val().into_data()).assert_approx_eq::<f32>(&kept.into_data(), tolerance);
}
