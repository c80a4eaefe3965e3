//! Layers on kernels of our own give what Burn's give, to rounding, and their gradients reach every parameter.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Tensor, Tolerance};
use paceline_nn::{Pass, Recompute, batch_norm, checkpoint, conv2d};

use crate::support::{Bits, device, values};

/// Two convolutions, one strided and in groups, with a norm.
#[derive(Module, Debug)]
struct Net {
    first: Conv2d,
    norm: BatchNorm,
    second: Conv2d,
}

impl Net {
    fn new(device: &Device) -> Self {
        let first = Conv2dConfig::new([3, 8], [3, 3]).with_padding(PaddingConfig2d::Same);
        let second = Conv2dConfig::new([8, 20], [3, 2])
            .with_stride([2, 1])
            .with_padding(PaddingConfig2d::Explicit(1, 0, 0, 2))
            .with_dilation([1, 2])
            .with_groups(4)
            .with_bias(false);
        let net = Self {
            first: first.init(device),
            norm: BatchNormConfig::new(8).init(device),
            second: second.init(device),
        };
        Self {
            first: Conv2d {
                weight: Param::from_tensor(values([8, 3, 3, 3], device)),
                bias: Some(Param::from_tensor(values([8], device))),
                ..net.first
            },
            second: Conv2d {
                weight: Param::from_tensor(values([20, 2, 3, 2], device)),
                ..net.second
            },
            ..net
        }
    }

    fn ours(&self, x: Tensor<4>) -> Tensor<4> {
        let x = relu(batch_norm(&self.norm, conv2d(&self.first, x)));
        conv2d(&self.second, x)
    }

    fn burns(&self, x: Tensor<4>) -> Tensor<4> {
        let x = relu(self.norm.forward(self.first.forward(x)));
        self.second.forward(x)
    }
}

/// Output, gradients of the input and of all parameters, running statistics. Copies of a net would share these.
fn bits(net: Net, x: &Tensor<4>, forward: impl Fn(&Net, Tensor<4>) -> Tensor<4>) -> Bits {
    let output = forward(&net, x.clone());
    let mut bits = Bits::default();
    bits.add("output", Some(output.clone()));
    let weights = values(output.dims(), &x.device());
    let gradients = (output * weights).sum().backward();
    bits.add("input", x.grad(&gradients));
    bits.add_model(&net, &gradients);
    bits
}

#[test]
fn layers_agree_with_burns() {
    let (device, _alone) = device();
    for shape in [[5, 3, 9, 7], [1, 3, 16, 16]] {
        let x = values(shape, &device).require_grad();
        let ours = bits(Net::new(&device), &x, Net::ours);
        let burns = bits(Net::new(&device), &x, Net::burns);
        assert_eq!(ours.missing(), burns.missing());
        ours.assert_close(&burns, Tolerance::rel_abs(1e-4, 1e-4));
        // They are other sums, or this compares nothing.
        assert!(ours.differing(&burns).contains(&"output"));
        // A view in another order.
        let turned = |net: &Net, x: Tensor<4>| net.ours(x.swap_dims(2, 3));
        let turned = bits(Net::new(&device), &x, turned);
        let burns = |net: &Net, x: Tensor<4>| net.burns(x.swap_dims(2, 3));
        let burns = bits(Net::new(&device), &x, burns);
        turned.assert_close(&burns, Tolerance::rel_abs(1e-4, 1e-4));
    }
}

#[test]
fn what_the_kernels_lack_is_left_to_burn() {
    let (device, _alone) = device();
    let net = Net::new(&device);
    let x: Tensor<4> = values([4, 8, 6, 6], &device);
    let valid = net.valid();
    let inner = x.inner();
    let expected = valid.norm.forward(inner.clone()).into_data();
    assert_eq!(batch_norm(&valid.norm, inner).into_data(), expected);
    let flat: Tensor<2> = values([4, 8], &device);
    let expected = net.norm.forward(flat.clone()).into_data();
    assert_eq!(batch_norm(&net.norm, flat).into_data(), expected);
    let double = Conv2d {
        weight: Param::from_tensor(values([20, 2, 3, 2], &device).cast(DType::F64)),
        ..net.second
    };
    let x: Tensor<4> = values([2, 8, 6, 6], &device).cast(DType::F64);
    let expected = double.forward(x.clone()).into_data();
    assert_eq!(conv2d(&double, x).into_data(), expected);
}

#[test]
fn frozen_parameters_and_recomputed_blocks() {
    let (device, _alone) = device();
    let x = values([3, 3, 8, 8], &device).require_grad();
    let plain = bits(Net::new(&device), &x, Net::ours);
    for recompute in [Recompute::None, Recompute::Blocks] {
        let again = bits(Net::new(&device), &x, |net, x| {
            let pass = Pass::new(recompute);
            pass.enter(|| checkpoint(net, x, Net::ours))
        });
        assert!(
            plain.differing(&again).is_empty(),
            "{:?}",
            plain.differing(&again)
        );
    }
    let net = Net::new(&device);
    let frozen = Net {
        first: net.first.clone().no_grad(),
        ..net
    };
    let bits = bits(frozen, &x, Net::ours);
    // Its weights, in place of gradients.
    assert_eq!(plain.differing(&bits), ["first.weight", "first.bias"]);
}
