//! Layers on kernels of our own give what Burn's give, to rounding, and their gradients reach every parameter.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, LayerNorm, LayerNormConfig, Linear, PaddingConfig1d,
    PaddingConfig2d, RmsNorm, RmsNormConfig,
};
use burn::tensor::activation as burns;
use burn::tensor::module::attention as burns_attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{DType, Device, Tensor, Tolerance};
use paceline_nn::{
    Pass, Recompute, attention, batch_norm, batch_norm_add_relu, batch_norm_relu, checkpoint,
    conv1d, conv2d, gelu, layer_norm, linear, product, relu, rms_norm, scores, sigmoid, silu,
    softmax, tanh,
};

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
        let x = burns::relu(self.norm.forward(self.first.forward(x)));
        self.second.forward(x)
    }
}

/// Attention behind a norm, beside two more products.
#[derive(Module, Debug)]
struct Transformer {
    norm: LayerNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    rows: Param<Tensor<2>>,
    is_causal: bool,
}

impl Transformer {
    const WIDTH: usize = 24;
    const HEADS: usize = 3;

    fn new(is_causal: bool, device: &Device) -> Self {
        let layer = |bias: bool| Linear {
            weight: Param::from_tensor(values([Self::WIDTH; 2], device)),
            bias: bias.then(|| Param::from_tensor(values([Self::WIDTH], device))),
        };
        let config = LayerNormConfig::new(Self::WIDTH).with_epsilon(1e-3);
        let mut norm: LayerNorm = config.init(device);
        norm.gamma = Param::from_tensor(values([Self::WIDTH], device));
        Self {
            norm,
            query: layer(true),
            key: layer(false),
            value: layer(true),
            rows: Param::from_tensor(values([11, Self::WIDTH], device)),
            is_causal,
        }
    }

    fn ours(&self, x: Tensor<3>) -> Tensor<3> {
        let y = layer_norm(&self.norm, x.clone());
        let inputs = [
            linear(&self.query, y.clone()),
            linear(&self.key, y.clone()),
            product(
                y,
                self.value.weight.val(),
                self.value.bias.as_ref().map(Param::val),
            ),
        ];
        scores(
            gelu(x + attention(inputs, Self::HEADS, self.is_causal)),
            self.rows.val(),
        )
    }

    fn burns(&self, x: Tensor<3>) -> Tensor<3> {
        let y = self.norm.forward(x.clone());
        let [batch, length, width] = x.dims();
        let [query, key, value] = [&self.query, &self.key, &self.value].map(|layer| {
            let y = layer.forward(y.clone());
            y.reshape([batch, length, Self::HEADS, width / Self::HEADS])
                .swap_dims(1, 2)
        });
        let options = AttentionModuleOptions {
            is_causal: self.is_causal,
            ..AttentionModuleOptions::default()
        };
        let y = burns_attention(query, key, value, None, None, options);
        let y = y.swap_dims(1, 2).reshape([batch, length, width]);
        burns::gelu(x + y).matmul(self.rows.val().transpose().unsqueeze())
    }
}

/// Two convolutions of sequences, one strided and in groups, with a norm and gates.
#[derive(Module, Debug)]
struct Sequence {
    first: Conv1d,
    norm: RmsNorm,
    second: Conv1d,
}

impl Sequence {
    fn new(device: &Device) -> Self {
        let first = Conv1dConfig::new(3, 8, 4).with_padding(PaddingConfig1d::Same);
        let second = Conv1dConfig::new(8, 12, 3)
            .with_stride(2)
            .with_padding(PaddingConfig1d::Explicit(3, 0))
            .with_dilation(2)
            .with_groups(4)
            .with_bias(false);
        let norm: RmsNorm = RmsNormConfig::new(8).with_epsilon(1e-3).init(device);
        Self {
            first: Conv1d {
                weight: Param::from_tensor(values([8, 3, 4], device)),
                bias: Some(Param::from_tensor(values([8], device))),
                ..first.init(device)
            },
            norm: RmsNorm {
                gamma: Param::from_tensor(values([8], device)),
                ..norm
            },
            second: Conv1d {
                weight: Param::from_tensor(values([12, 2, 3], device)),
                ..second.init(device)
            },
        }
    }

    fn ours(&self, x: Tensor<3>) -> Tensor<3> {
        let x = silu(conv1d(&self.first, x)).swap_dims(1, 2);
        let x = tanh(rms_norm(&self.norm, x)).swap_dims(1, 2);
        let x = conv1d(&self.second, x);
        softmax(x.clone(), 1) + sigmoid(x.clone()) * softmax(x, 2)
    }

    fn burns(&self, x: Tensor<3>) -> Tensor<3> {
        let x = burns::silu(self.first.forward(x)).swap_dims(1, 2);
        let x = burns::tanh(self.norm.forward(x)).swap_dims(1, 2);
        let x = self.second.forward(x);
        burns::softmax(x.clone(), 1) + burns::sigmoid(x.clone()) * burns::softmax(x, 2)
    }
}

/// Output, gradients of the input and of all parameters, running statistics. Copies of a net would share these.
fn bits<M: Module, const D: usize>(
    net: M,
    x: &Tensor<D>,
    forward: impl Fn(&M, Tensor<D>) -> Tensor<D>,
) -> Bits {
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
fn layers_of_sequences_agree_with_burns() {
    let (device, _alone) = device();
    for shape in [[5, 3, 17], [1, 3, 32], [2, 3, 3]] {
        let x = values(shape, &device).require_grad();
        let ours = bits(Sequence::new(&device), &x, Sequence::ours);
        let burns = bits(Sequence::new(&device), &x, Sequence::burns);
        assert_eq!(ours.missing(), burns.missing());
        ours.assert_close(&burns, Tolerance::rel_abs(1e-4, 1e-4));
        assert!(ours.differing(&burns).contains(&"output"));
        let inner = Sequence::new(&device).valid();
        let output = inner.ours(x.clone().inner()).into_data();
        let burns = inner.burns(x.inner()).into_data();
        output.assert_approx_eq::<f32>(&burns, Tolerance::rel_abs(1e-4, 1e-4));
    }
}

#[test]
#[should_panic(expected = "dim")]
fn softmax_needs_its_dimension() {
    let _ = softmax(Tensor::<2>::ones([2, 3], &Device::flex()), 2);
}

#[test]
fn what_follows_a_batch_norm_has_the_same_bits_in_one_pass() {
    let (device, _alone) = device();
    let norm = |device: &Device| {
        let norm: BatchNorm = BatchNormConfig::new(3).init(device);
        BatchNorm {
            gamma: Param::from_tensor(values([3], device)),
            beta: Param::from_tensor(values([3], device)),
            ..norm
        }
    };
    let x = values([4, 3, 5, 7], &device).require_grad();
    let residual = values([4, 5, 7, 3], &device)
        .swap_dims(1, 3)
        .swap_dims(2, 3);
    let residual: Tensor<4> = residual.require_grad();
    let rectified = bits(norm(&device), &x, batch_norm_relu);
    let apart = bits(norm(&device), &x, |norm, x| relu(batch_norm(norm, x)));
    assert_eq!(rectified.differing(&apart), [""; 0]);
    for of_residual in [&x, &residual] {
        let together = bits(norm(&device), of_residual, |norm, residual| {
            batch_norm_add_relu(norm, x.clone(), residual)
        });
        let apart = bits(norm(&device), of_residual, |norm, residual| {
            relu(batch_norm(norm, x.clone()) + residual)
        });
        assert_eq!(together.missing(), [""; 0]);
        assert_eq!(together.differing(&apart), [""; 0]);
    }
}

#[test]
fn a_transformers_layers_agree_with_burns() {
    let (device, _alone) = device();
    // 197 are the patches of an image of 224 x 224 and its class.
    let cases = [
        (true, 2, 7),
        (true, 1, 70),
        (false, 2, 1),
        (false, 2, 7),
        (false, 1, 197),
    ];
    for (is_causal, batch, length) in cases {
        let new = || Transformer::new(is_causal, &device);
        let shape = [batch, length, Transformer::WIDTH];
        let x = values(shape, &device).require_grad();
        let ours = bits(new(), &x, Transformer::ours);
        let burns = bits(new(), &x, Transformer::burns);
        assert_eq!(ours.missing(), burns.missing());
        ours.assert_close(&burns, Tolerance::rel_abs(1e-4, 1e-3));
        assert!(ours.differing(&burns).contains(&"output"));
        let again = bits(new(), &x, |net, x| {
            let pass = Pass::new(Recompute::Blocks);
            pass.enter(|| checkpoint(net, x, Transformer::ours))
        });
        assert_eq!(ours.differing(&again), [""; 0]);
        // Without autodiff, and in another type.
        let inner = new().valid();
        let output = inner.ours(x.clone().inner()).into_data();
        let burns = inner.burns(x.inner()).into_data();
        output.assert_approx_eq::<f32>(&burns, Tolerance::rel_abs(1e-4, 1e-3));
    }
}

#[test]
#[should_panic(expected = "causal attention of 2 queries and 5 keys")]
fn causal_attention_needs_a_key_for_each_query() {
    let x = |length| Tensor::<3>::ones([1, length, 8], &Device::flex());
    let _ = attention([x(2), x(5), x(5)], 2, true);
}

#[test]
fn a_view_of_a_longer_tensor_is_read_where_it_lies() {
    let (device, _alone) = device();
    let long: Tensor<2> = values([9, 6], &device);
    let view = long.clone().slice([2..5, 0..6]);
    let copy = Tensor::<2>::from_data(view.clone().into_data(), &device);
    assert_eq!(gelu(view.clone()).into_data(), gelu(copy).into_data());
    let weight: Tensor<2> = values([4, 6], &device);
    let straight = scores(view.clone(), weight.clone()).into_data();
    assert_eq!(
        product(view, weight.transpose(), None).into_data(),
        straight
    );
}

#[test]
fn activations_keep_what_is_not_a_number() {
    let x = Tensor::<1>::from_floats(
        [f32::NAN, -0.0, f32::INFINITY, -2.0, 3.0],
        &Device::flex().autodiff(),
    );
    let x = x.require_grad();
    let y = relu(x.clone());
    let gradients = y.clone().sum().backward();
    let of_x: Vec<f32> = x
        .grad(&gradients)
        .unwrap()
        .into_data()
        .try_into_vec()
        .unwrap();
    assert_eq!(of_x, [1.0, 0.0, 1.0, 0.0, 1.0]);
    let y: Vec<f32> = y.into_data().try_into_vec().unwrap();
    assert!(y[0].is_nan());
    assert_eq!(y[1..], [0.0, f32::INFINITY, 0.0, 3.0]);
    assert!(gelu(x).narrow(0, 0, 1).into_scalar::<f32>().is_nan());
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
    assert_eq!(batch_norm(&net.norm, flat.clone()).into_data(), expected);
    let expected = burns::relu(net.norm.forward(flat.clone()));
    let got = batch_norm_relu(&net.norm, flat.clone()).into_data();
    assert_eq!(got, expected.into_data());
    let residual: Tensor<2> = values([1, 8], &device);
    let expected = burns::relu(net.norm.forward(flat.clone()) + residual.clone());
    let got = batch_norm_add_relu(&net.norm, flat, residual).into_data();
    assert_eq!(got, expected.into_data());
    let double = Conv2d {
        weight: Param::from_tensor(values([20, 2, 3, 2], &device).cast(DType::F64)),
        ..net.second
    };
    let x: Tensor<4> = values([2, 8, 6, 6], &device).cast(DType::F64);
    let expected = double.forward(x.clone()).into_data();
    assert_eq!(conv2d(&double, x).into_data(), expected);
    let x: Tensor<2> = values([4, 8], &device).cast(DType::F64);
    let expected = burns::gelu(x.clone()).into_data();
    assert_eq!(gelu(x.clone()).into_data(), expected);
    let pairs = [
        (silu(x.clone()), burns::silu(x.clone())),
        (sigmoid(x.clone()), burns::sigmoid(x.clone())),
        (tanh(x.clone()), burns::tanh(x.clone())),
        (softmax(x.clone(), 1), burns::softmax(x.clone(), 1)),
    ];
    for (ours, burns) in pairs {
        assert_eq!(ours.into_data(), burns.into_data());
    }
    let mut norm: RmsNorm = RmsNormConfig::new(8).init(&device);
    norm.gamma = Param::from_tensor(values([8], &device).cast(DType::F64));
    let expected = norm.forward(x.clone()).into_data();
    assert_eq!(rms_norm(&norm, x.clone()).into_data(), expected);
    let mut norm: LayerNorm = LayerNormConfig::new(8).with_bias(false).init(&device);
    norm.gamma = Param::from_tensor(values([8], &device).cast(DType::F64));
    let expected = norm.forward(x.clone()).into_data();
    assert_eq!(layer_norm(&norm, x).into_data(), expected);
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
