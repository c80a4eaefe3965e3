//! Burn's layers on the kernels of [`paceline_kernels`].

use std::sync::{Arc, OnceLock};

use burn::module::{Param, RunningState};
use burn::nn::conv::Conv2d;
use burn::nn::{BatchNorm, PaddingConfig2d};
use burn::tensor::Tensor;
use paceline_kernels::{self as kernels, Conv, Kernels};

use crate::tape::{Point, Slot};
use crate::values::{self, Values};

/// `layer.forward(input)`, and its backward pass, faster on CPUs: on the kernels of this crate's own.
///
/// On other devices, and in other types than f32, it is `layer.forward`.
///
/// *Shape*: `[batch, channels, height, width]` to `[batch, outputs, height, width]`.
///
/// *Numerics*: each value is one chain of fused multiply-adds in an order that the shapes fix, so the bits are the same on any number of
/// threads and with any instruction set (`PACELINE_ISA`). They are not those of `layer.forward`.
///
/// *Memory*: as `layer.forward`, the input until the backward pass.
///
/// # Panics
///
/// As `layer.forward`, and if `PACELINE_ISA` names an instruction set that this processor does not have.
///
/// *Example*:
/// ```
/// use burn::nn::conv::{Conv2d, Conv2dConfig};
/// use burn::tensor::{Device, Tensor};
/// use paceline_nn::conv2d;
///
/// let device = Device::flex().autodiff();
/// let layer: Conv2d = Conv2dConfig::new([3, 8], [3, 3]).init(&device);
/// let output = conv2d(&layer, Tensor::ones([2, 3, 10, 10], &device));
/// assert_eq!(output.dims(), [2, 8, 8, 8]);
/// assert!(layer.weight.grad(&output.sum().backward()).is_some());
/// ```
pub fn conv2d(layer: &Conv2d, input: Tensor<4>) -> Tensor<4> {
    let (weight, bias) = (layer.weight.val(), layer.bias.as_ref().map(Param::val));
    let of_bias = bias.as_ref().map(Values::of);
    let (Some(x), Some(w), Some(b)) = (
        Values::of(&input),
        Values::of(&weight),
        of_bias.map_or(Some(None), |bias| bias.map(Some)),
    ) else {
        return layer.forward(input);
    };
    let conv = Conv {
        input: input.dims(),
        weight: weight.dims(),
        stride: layer.stride,
        padding: padding(layer, input.dims()),
        dilation: layer.dilation,
        groups: layer.groups,
    };
    let kernels = of_process();
    let output = kernels.conv(&conv, x.slice(), w.slice(), b.as_ref().map(Values::slice));
    let output = values::tensor(output, conv.output());
    // What is deposited last is computed first: a weight's gradient, which may be on its way to other ranks then.
    let gradient = Arc::new(OnceLock::new());
    let given = |gradient: &OnceLock<Values>| {
        let given = gradient.get().expect("it comes before its deposits");
        given.clone()
    };
    let mut tip = Point::origin(&input);
    if input.is_tracked() {
        let gradient = gradient.clone();
        tip = tip.deposit(input, move || {
            let of_x = kernels.conv_input_gradient(&conv, w.slice(), given(&gradient).slice());
            Some(values::tensor(of_x, conv.input))
        });
    }
    if weight.is_tracked() {
        let gradient = gradient.clone();
        tip = tip.deposit(weight, move || {
            let of_w = kernels.conv_weight_gradient(&conv, x.slice(), given(&gradient).slice());
            Some(values::tensor(of_w, conv.weight))
        });
    }
    if let Some(bias) = bias.filter(Tensor::is_tracked) {
        let gradient = gradient.clone();
        tip = tip.deposit(bias, move || {
            let of_b = kernels.conv_bias_gradient(&conv, given(&gradient).slice());
            Some(values::tensor(of_b, [conv.weight[0]]))
        });
    }
    tip.output(output, move |of_output| {
        let of_output = Values::of(&of_output).expect("of the type and the device of the output");
        assert!(gradient.set(of_output).is_ok(), "a step runs once");
    })
}

/// Zeros before and after the rows and the columns, as Burn counts them.
fn padding(layer: &Conv2d, [.., height, width]: [usize; 4]) -> [[usize; 2]; 2] {
    match layer.padding {
        PaddingConfig2d::Valid => [[0; 2]; 2],
        PaddingConfig2d::Explicit(top, left, bottom, right) => [[top, bottom], [left, right]],
        PaddingConfig2d::Same => [0, 1].map(|dim| {
            let (side, stride) = ([height, width][dim], layer.stride[dim]);
            let needed = side.div_ceil(stride).saturating_sub(1) * stride + layer.kernel_size[dim];
            let all = needed.saturating_sub(side);
            [all / 2, all - all / 2]
        }),
    }
}

/// `layer.forward(input)`, and its backward pass, faster in training on CPUs: on the kernels of this crate's own.
///
/// On other devices, in other types than f32, outside of training, and for an input without a dimension beside batch and features it is
/// `layer.forward`.
///
/// *Shape*: `[batch, features, ...]`.
///
/// *Numerics*: sums in a fixed order of 32 lanes over each sample, and in f64 over the batch; see [`conv2d`]. The running statistics
/// take in the batch's as those of `layer.forward` do.
///
/// # Panics
///
/// As [`conv2d`].
///
/// *Example*:
/// ```
/// use burn::nn::{BatchNorm, BatchNormConfig};
/// use burn::tensor::{Device, Tensor};
/// use paceline_nn::batch_norm;
///
/// let device = Device::flex().autodiff();
/// let layer: BatchNorm = BatchNormConfig::new(8).init(&device);
/// let output = batch_norm(&layer, Tensor::<4>::ones([2, 8, 5, 5], &device));
/// assert_eq!(output.dims(), [2, 8, 5, 5]);
/// ```
pub fn batch_norm<const D: usize>(layer: &BatchNorm, input: Tensor<D>) -> Tensor<D> {
    let (gamma, beta) = (layer.gamma.val(), layer.beta.val());
    let is_training = input.device().is_autodiff() && layer.training.is_enabled();
    let all = (Values::of(&input), Values::of(&gamma), Values::of(&beta));
    let (Some(x), Some(scale), Some(shift)) = all else {
        return layer.forward(input);
    };
    let shape = input.dims();
    let positions: usize = shape.iter().skip(2).product();
    if !is_training || positions < 2 || shape[1] != gamma.dims()[0] {
        return layer.forward(input);
    }
    let norm = kernels::BatchNorm {
        images: shape[0],
        channels: shape[1],
        positions,
        epsilon: layer.epsilon,
    };
    let kernels = of_process();
    let (output, moments) = kernels.batch_norm(&norm, x.slice(), scale.slice(), shift.slice());
    for (running, batch) in [
        (&layer.running_mean, &moments.mean),
        (&layer.running_var, &moments.variance),
    ] {
        take_in(running, batch, layer.momentum);
    }
    let slots = [(); 3].map(|()| Slot::default());
    let [of_x, of_gamma, of_beta] = slots.clone();
    let mut tip = Point::origin(&input);
    if input.is_tracked() {
        tip = tip.deposit(input, move || of_x.take());
    }
    if gamma.is_tracked() {
        tip = tip.deposit(gamma, move || of_gamma.take());
    }
    if beta.is_tracked() {
        tip = tip.deposit(beta, move || of_beta.take());
    }
    let output = values::tensor(output, shape);
    tip.output(output, move |of_output: Tensor<D>| {
        let given = Values::of(&of_output).expect("of the type and the device of the output");
        let gradients =
            kernels.batch_norm_gradients(&norm, x.slice(), scale.slice(), &moments, given.slice());
        let [of_x, of_gamma, of_beta] = slots;
        let features = [norm.channels];
        of_x.put(Some(values::tensor(gradients.input, shape)));
        of_gamma.put(Some(values::tensor(gradients.gamma, features)));
        of_beta.put(Some(values::tensor(gradients.beta, features)));
    })
}

/// Moves a running statistic towards that of a batch, as Burn does.
fn take_in(running: &RunningState<Tensor<1>>, batch: &[f32], momentum: f64) {
    let old = running.value_sync();
    let batch = Tensor::<1>::from_data(batch, &old.device()).cast(old.dtype());
    let new = old.mul_scalar(1.0 - momentum) + batch.mul_scalar(momentum);
    running.update(new.detach());
}

fn of_process() -> Kernels {
    Kernels::of_process().unwrap_or_else(|error| panic!("PACELINE_ISA: {error}"))
}
