//! `checkpoint` against the same function on Burn's own tape.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, Linear,
    LinearConfig,
};
use burn::tensor::activation::{gelu, relu, softmax};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use paceline_nn::{CapturedTensor, Pass, Recompute, checkpoint};

use crate::support::{Bits, device, values};

/// Output, gradient of the input and gradients of the model after two passes, which update running statistics twice.
fn passes<M: Module, const D: usize, const E: usize>(
    model: &M,
    input: &Tensor<D>,
    forward: impl Fn(&M, Tensor<D>) -> Tensor<E>,
) -> Bits {
    let mut bits = Bits::default();
    for seed in [3, 4] {
        input.device().seed(seed);
        let output = forward(model, input.clone());
        bits.add("output", Some(output.clone()));
        if !output.is_tracked() {
            continue;
        }
        // A gradient with a different value at each place.
        let weights = values(output.dims(), &input.device());
        let gradients = (output * weights).sum().backward();
        bits.add("input", input.grad(&gradients));
        bits.add_model(model, &gradients);
    }
    bits
}

/// `forward`, checkpointed, has the bits of `forward`: with and without a gradient for the input, and with each of Burn's own
/// strategies.
fn check<M: Module + 'static, const D: usize, const E: usize>(
    make: impl Fn(&Device) -> M,
    shape: [usize; D],
    forward: impl Fn(&M, Tensor<D>) -> Tensor<E> + Send + Copy + 'static,
) {
    let (device, _alone) = device();
    for device in [device.clone(), device.gradient_checkpointing()] {
        for wants_input in [true, false] {
            let input = values(shape, &device).set_require_grad(wants_input);
            // Each has running statistics of its own, and the same weights.
            let fresh = || {
                device.seed(1);
                let model = make(&device);
                // Burn makes weights at their first use.
                let _ = model.valid();
                model
            };
            let (first, second) = (fresh(), fresh());
            let plain = passes(&first, &input, forward);
            let again = passes(&second, &input, move |model, input| {
                checkpoint(model, input, forward)
            });
            assert_eq!(plain, again);
        }
    }
}

#[derive(Module, Debug)]
struct Mlp {
    first: Linear,
    second: Linear,
}

impl Mlp {
    fn new(device: &Device) -> Self {
        Self {
            first: LinearConfig::new(6, 10).init(device),
            second: LinearConfig::new(10, 5).init(device),
        }
    }

    fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.second.forward(gelu(self.first.forward(x)))
    }
}

#[test]
fn an_mlp_has_the_same_bits_for_inputs_of_any_rank() {
    check(Mlp::new, [6], Mlp::forward);
    check(Mlp::new, [3, 6], Mlp::forward);
    check(Mlp::new, [2, 3, 6], Mlp::forward);
    check(Mlp::new, [2, 1, 3, 6], Mlp::forward);
}

#[derive(Module, Debug)]
struct Dropping {
    linear: Linear,
    dropout: Dropout,
}

impl Dropping {
    fn new(device: &Device) -> Self {
        Self {
            linear: LinearConfig::new(6, 6).init(device),
            dropout: DropoutConfig::new(0.5).init(),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.dropout
            .forward(self.linear.forward(self.dropout.forward(x)))
    }
}

#[test]
fn a_transformer_layer_has_the_same_bits_apart_from_dropout() {
    let make = |device: &Device| {
        TransformerEncoderConfig::new(8, 16, 2, 2)
            .with_dropout(0.0)
            .init(device)
    };
    check(
        make,
        [2, 5, 8],
        |model: &TransformerEncoder, x: Tensor<3>| model.forward(TransformerEncoderInput::new(x)),
    );
}

/// Without a pass the seed is drawn from the device, so the bits differ from those of a plain run, but both runs of a
/// checkpoint agree: where dropout zeroed the output, the gradient is zero.
#[test]
fn both_runs_of_a_checkpoint_drop_the_same_values() {
    let (device, _alone) = device();
    let dropout = DropoutConfig::new(0.5).init();
    let mut outputs = Vec::new();
    for _ in 0..2 {
        let input = Tensor::<2>::ones([16, 16], &device).require_grad();
        let output = checkpoint(&dropout, input.clone(), |dropout, x| dropout.forward(x));
        // Other draws between the runs must not matter.
        let _ = values([3], &device).random_like(burn::tensor::Distribution::Default);
        let gradients = output.clone().sum().backward();
        let gradient = input.grad(&gradients).expect("a gradient").into_data();
        assert_eq!(output.inner().into_data(), gradient);
        outputs.push(gradient);
    }
    assert_ne!(outputs[0], outputs[1], "each call draws its own seed");
}

#[test]
fn dropout_has_the_bits_of_the_pass() {
    let (device, _alone) = device();
    let model = Dropping::new(&device);
    let input = values([9, 6], &device).require_grad();
    let forward = |model: &Dropping, x| {
        Pass::default()
            .with_seed(5)
            .enter(|| checkpoint(model, x, Dropping::forward))
    };
    let bits = passes(&model, &input, forward);
    assert_eq!(bits, passes(&model, &input, forward));
    let nested = |model: &Dropping, x| {
        Pass::default().with_seed(5).enter(|| {
            checkpoint(model, x, |model: &Dropping, x| {
                let x = checkpoint(model, x, Dropping::forward);
                checkpoint(model, x, Dropping::forward)
            })
        })
    };
    let once = |model: &Dropping, x| {
        Pass::default().with_seed(5).enter(|| {
            // The outer call without recomputation: seeds come from the block.
            paceline_nn::Block::new(usize::MAX, model.clone()).forward(x, |model, x| {
                let x = checkpoint(model, x, Dropping::forward);
                checkpoint(model, x, Dropping::forward)
            })
        })
    };
    assert_eq!(passes(&model, &input, nested), passes(&model, &input, once));
}

#[derive(Module, Debug)]
struct Normed {
    conv: Conv2d,
    norm: BatchNorm,
}

#[test]
fn batch_norm_updates_its_running_statistics_once() {
    let make = |device: &Device| Normed {
        conv: Conv2dConfig::new([2, 3], [3, 3]).init(device),
        norm: BatchNormConfig::new(3).init(device),
    };
    check(make, [4, 2, 6, 6], |model: &Normed, x: Tensor<4>| {
        relu(model.norm.forward(model.conv.forward(x)))
    });
}

#[derive(Module, Debug)]
struct Tied {
    first: Linear,
    second: Linear,
    third: Linear,
}

#[test]
fn tied_parameters_get_the_sum_over_their_uses_once() {
    let make = |device: &Device| {
        let linear: Linear = LinearConfig::new(6, 6).init(device);
        Tied {
            first: linear.clone(),
            second: linear.clone(),
            third: linear,
        }
    };
    check(make, [4, 6], |model: &Tied, x: Tensor<2>| {
        let x = gelu(model.first.forward(x));
        let x = gelu(model.second.forward(x));
        model.third.forward(x)
    });
}

#[test]
fn frozen_parameters_stay_without_a_gradient() {
    let make = |device: &Device| {
        let mut model = Mlp::new(device);
        model.first = model.first.no_grad();
        model
    };
    check(make, [3, 6], Mlp::forward);
    check(|device| Mlp::new(device).no_grad(), [3, 6], Mlp::forward);
}

#[test]
fn nested_checkpoints_have_the_same_bits() {
    check(Mlp::new, [3, 6], |model: &Mlp, x: Tensor<2>| {
        let hidden = checkpoint(&model.first, x, |first, x| gelu(first.forward(x)));
        checkpoint(&model.second, hidden, Linear::forward)
    });
}

#[test]
fn layers_in_bf16_and_f16_have_the_same_bits() {
    for dtype in [FloatDType::BF16, FloatDType::F16] {
        check(Mlp::new, [3, 6], move |model: &Mlp, x: Tensor<2>| {
            // The casts of mixed precision: f32 weights, layers in fewer digits, f32 for the loss.
            let cast = |linear: Linear| Linear {
                weight: linear.weight.map(|weight| weight.cast(dtype)),
                bias: linear.bias.map(|bias| bias.map(|bias| bias.cast(dtype))),
            };
            let model = Mlp {
                first: cast(model.first.clone()),
                second: cast(model.second.clone()),
            };
            let output = checkpoint(&model, x.cast(dtype), Mlp::forward);
            output.cast(FloatDType::F32)
        });
    }
}

#[derive(Module, Debug)]
struct Scores {
    tokens: Embedding,
    scale: Param<Tensor<1>>,
    idle: Linear,
}

/// Two inputs of different kinds and ranks, three outputs of which one is not used.
#[test]
fn several_inputs_and_outputs_have_the_same_bits() {
    let (device, _alone) = device();
    let model = Scores {
        tokens: EmbeddingConfig::new(7, 4).init(&device),
        scale: Param::from_tensor(values([4], &device)),
        idle: LinearConfig::new(2, 2).init(&device),
    };
    let tokens = Tensor::<2, Int>::from_ints([[1, 2, 3], [3, 0, 6]], &device);
    let bias = values([2, 3, 4], &device).require_grad();
    let forward = |model: &Scores, (tokens, bias): (Tensor<2, Int>, Tensor<3>)| {
        let x = model.tokens.forward(tokens) + bias.clone();
        let x = x * model.scale.val().reshape([1, 1, 4]);
        (softmax(x.clone(), 2), vec![x.clone().sum_dim(2), x * bias])
    };
    let bits = |(first, mut rest): (Tensor<3>, Vec<Tensor<3>>)| {
        let weights = values([2, 3, 4], &device);
        let loss = (first.clone() * weights).sum() + rest.remove(0).sum().powf_scalar(2.0);
        let gradients = loss.backward();
        let mut bits = Bits::default();
        bits.add("output", Some(first));
        bits.add("bias", bias.grad(&gradients));
        bits.add_model(&model, &gradients);
        bits
    };
    let plain = bits(forward(&model, (tokens.clone(), bias.clone())));
    let again = bits(checkpoint(&model, (tokens, bias.clone()), forward));
    assert_eq!(plain, again);
    assert_eq!(
        again.missing(),
        ["idle.weight", "idle.bias"],
        "a parameter that the function does not read has no gradient"
    );
}

#[test]
fn nothing_is_recorded_where_nothing_is_trained() {
    let (device, _alone) = device();
    let model = Mlp::new(&device);
    let input = values([3, 6], &device);
    let valid = checkpoint(&model.valid(), input.clone().inner(), Mlp::forward);
    assert!(!valid.is_autodiff());
    let frozen = checkpoint(&model.no_grad(), input, Mlp::forward);
    assert!(frozen.is_autodiff() && !frozen.is_tracked());
}

#[test]
fn a_captured_tensor_of_the_tape_is_an_error_of_the_pass() {
    let (device, _alone) = device();
    let model = Mlp::new(&device);
    let captured = values([3, 5], &device).require_grad() * 2.0;
    let pass = Pass::new(Recompute::None);
    let output = pass.enter(|| {
        checkpoint(&model, values([3, 6], &device), move |model, x| {
            model.forward(x) + captured.clone()
        })
    });
    let _ = output.sum().backward();
    let error = pass.finish().expect_err("a captured tensor");
    assert!(error.is::<CapturedTensor>(), "{error}");
}

#[test]
#[should_panic(expected = "captures a tensor that requires a gradient")]
fn a_captured_tensor_outside_of_a_pass_panics() {
    let (device, _alone) = device();
    let model = Mlp::new(&device);
    let captured = model.first.bias.clone().expect("a bias").val();
    checkpoint(&model, values([3, 6], &device), move |model, x| {
        model.forward(x).sum() + captured.clone().sum()
    });
}
