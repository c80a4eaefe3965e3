//! The optimizer takes Burn's steps, and its state is Burn's.

use burn::nn::{Linear, LinearConfig};
use burn::optim::{self as burns, GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, Tensor, Tolerance};
use paceline_nn::AdamWConfig;

use crate::support::{device, values};

struct Training {
    net: Linear,
    optimizer: ModuleOptimizer,
}

impl Training {
    fn steps(mut self, count: usize) -> Self {
        let device = self.net.weight.device();
        for step in 0..count {
            let x = Tensor::<2>::full([3, 7], 0.1 * (step + 1) as f32, &device);
            let x = (x + values([3, 7], &device)).cast(self.net.weight.val().dtype());
            let gradients = self.net.forward(x).powi_scalar(2).mean().backward();
            let gradients = GradientsParams::from_grads(gradients, &self.net);
            self.net = self.optimizer.step(3e-2, self.net, gradients);
        }
        self
    }

    fn assert_is(&self, other: &Self) {
        let weights = |training: &Self| training.net.weight.val().into_data();
        weights(self).assert_approx_eq::<f32>(&weights(other), Tolerance::rel_abs(1e-5, 1e-6));
    }
}

fn ours() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.1).init()
}

fn burns() -> ModuleOptimizer {
    burns::AdamWConfig::new().with_weight_decay(0.1).init()
}

fn start(optimizer: ModuleOptimizer, device: &Device) -> Training {
    let mut net: Linear = LinearConfig::new(7, 5).with_bias(false).init(device);
    net.weight = net
        .weight
        .map(|weight| values(weight.dims(), device).require_grad());
    Training { net, optimizer }
}

#[test]
fn steps_are_burns_to_rounding_and_each_goes_on_from_the_others_state() {
    let (device, _alone) = device();
    let ours_first = start(ours(), &device).steps(4);
    let burns_first = start(burns(), &device).steps(4);
    ours_first.assert_is(&burns_first);
    let record = |training: &Training| training.optimizer.to_record();
    let crossed = Training {
        optimizer: ours().load_record(record(&burns_first)),
        net: burns_first.net.clone(),
    };
    let back = Training {
        optimizer: burns().load_record(record(&ours_first)),
        net: ours_first.net.clone(),
    };
    let straight = ours_first.steps(4);
    crossed.steps(4).assert_is(&straight);
    back.steps(4).assert_is(&straight);
    burns_first.steps(4).assert_is(&straight);
}

#[test]
fn a_tensor_that_is_shared_is_not_changed() {
    let (device, _alone) = device();
    let training = start(ours(), &device);
    let before = training.net.clone();
    let data = before.weight.val().into_data();
    let after = training.steps(2);
    assert_eq!(before.weight.val().into_data(), data);
    assert_ne!(after.net.weight.val().into_data(), data);
}

#[test]
fn options_and_types_that_the_kernel_lacks_are_burns() {
    let (device, _alone) = device();
    let amsgrad = |ours: bool| match ours {
        true => AdamWConfig::new().with_amsgrad(true).init(),
        false => burns::AdamWConfig::new().with_amsgrad(true).init(),
    };
    let weights = |training: Training| training.net.weight.val().into_data();
    let expected = weights(start(amsgrad(false), &device).steps(3));
    assert_eq!(weights(start(amsgrad(true), &device).steps(3)), expected);
    let half = |optimizer| {
        let mut training = start(optimizer, &device);
        training.net.weight = training
            .net
            .weight
            .map(|weight| weight.cast(DType::BF16).detach().require_grad());
        training
    };
    let expected = weights(half(burns()).steps(3));
    assert_eq!(weights(half(ours()).steps(3)), expected);
}
