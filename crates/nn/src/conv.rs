//! Convolutions on the kernels of [`paceline_kernels`].

use std::sync::{Arc, OnceLock};

use burn::module::Param;
use burn::nn::conv::{Conv1d, Conv2d};
use burn::nn::{PaddingConfig1d, PaddingConfig2d};
use burn::tensor::Tensor;
use paceline_kernels::Conv;

use crate::tape::Point;
use crate::values::{self, Values, of_process};

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
    let conv = Conv {
        input: input.dims(),
        weight: weight.dims(),
        stride: layer.stride,
        padding: padding(layer, input.dims()),
        dilation: layer.dilation,
        groups: layer.groups,
    };
    let output = convolve(&conv, &input, weight, bias, |shape| shape);
    output.unwrap_or_else(|| layer.forward(input))
}

/// `layer.forward(input)`, and its backward pass, faster on CPUs: on the kernels of this crate's own.
///
/// On other devices, and in other types than f32, it is `layer.forward`.
///
/// *Shape*: `[batch, channels, length]` to `[batch, outputs, length]`.
///
/// *Numerics*, *Memory*, *Panics*: as [`conv2d`].
///
/// *Example*:
/// ```
/// use burn::nn::conv::{Conv1d, Conv1dConfig};
/// use burn::tensor::{Device, Tensor};
/// use paceline_nn::conv1d;
///
/// let device = Device::flex();
/// let layer: Conv1d = Conv1dConfig::new(3, 8, 5).init(&device);
/// assert_eq!(conv1d(&layer, Tensor::ones([2, 3, 20], &device)).dims(), [2, 8, 16]);
/// ```
pub fn conv1d(layer: &Conv1d, input: Tensor<3>) -> Tensor<3> {
    let (weight, bias) = (layer.weight.val(), layer.bias.as_ref().map(Param::val));
    let one_row = |[first, second, length]: [usize; 3]| [first, second, 1, length];
    let along = match layer.padding {
        PaddingConfig1d::Valid => [0; 2],
        PaddingConfig1d::Explicit(left, right) => [left, right],
        PaddingConfig1d::Same => same(input.dims()[2], layer.kernel_size, layer.stride),
    };
    let conv = Conv {
        input: one_row(input.dims()),
        weight: one_row(weight.dims()),
        stride: [1, layer.stride],
        padding: [[0; 2], along],
        dilation: [1, layer.dilation],
        groups: layer.groups,
    };
    let output = convolve(
        &conv,
        &input,
        weight,
        bias,
        |[batch, outputs, _, length]| [batch, outputs, length],
    );
    output.unwrap_or_else(|| layer.forward(input))
}

/// The convolution, whose output's shape becomes `shape` of it. `None` if the values cannot be read.
fn convolve<const D: usize>(
    conv: &Conv,
    input: &Tensor<D>,
    weight: Tensor<D>,
    bias: Option<Tensor<1>>,
    shape: impl FnOnce([usize; 4]) -> [usize; D],
) -> Option<Tensor<D>> {
    let (x, w) = (Values::of(input)?, Values::of(&weight)?);
    let b = Values::of_optional(bias.as_ref())?;
    let (conv, kernels) = (*conv, of_process());
    let output = kernels.conv(&conv, x.slice(), w.slice(), b.as_ref().map(Values::slice));
    let output = values::tensor(output, shape(conv.output()));
    // What is deposited last is computed first: a weight's gradient, which may be on its way to other ranks then.
    let gradient = Arc::new(OnceLock::new());
    let given = |gradient: &OnceLock<Values>| {
        let given = gradient.get().expect("it comes before its deposits");
        given.clone()
    };
    let mut tip = Point::origin(input);
    if input.is_tracked() {
        let (gradient, shape) = (gradient.clone(), input.dims());
        tip = tip.deposit(input.clone(), move || {
            let of_x = kernels.conv_input_gradient(&conv, w.slice(), given(&gradient).slice());
            Some(values::tensor(of_x, shape))
        });
    }
    if weight.is_tracked() {
        let (gradient, shape) = (gradient.clone(), weight.dims());
        tip = tip.deposit(weight, move || {
            let of_w = kernels.conv_weight_gradient(&conv, x.slice(), given(&gradient).slice());
            Some(values::tensor(of_w, shape))
        });
    }
    if let Some(bias) = bias.filter(Tensor::is_tracked) {
        let gradient = gradient.clone();
        tip = tip.deposit(bias, move || {
            let of_b = kernels.conv_bias_gradient(&conv, given(&gradient).slice());
            Some(values::tensor(of_b, [conv.weight[0]]))
        });
    }
    Some(tip.output(output, move |of_output| {
        let of_output = Values::of_gradient(&of_output);
        assert!(gradient.set(of_output).is_ok(), "a step runs once");
    }))
}

/// Zeros before and after the rows and the columns, as Burn counts them.
fn padding(layer: &Conv2d, [.., height, width]: [usize; 4]) -> [[usize; 2]; 2] {
    match layer.padding {
        PaddingConfig2d::Valid => [[0; 2]; 2],
        PaddingConfig2d::Explicit(top, left, bottom, right) => [[top, bottom], [left, right]],
        PaddingConfig2d::Same => [0, 1].map(|dim| {
            same(
                [height, width][dim],
                layer.kernel_size[dim],
                layer.stride[dim],
            )
        }),
    }
}

/// Zeros before and after a side of which an output has as many windows as strides.
fn same(side: usize, window: usize, stride: usize) -> [usize; 2] {
    let needed = side.div_ceil(stride).saturating_sub(1) * stride + window;
    let all = needed.saturating_sub(side);
    [all / 2, all - all / 2]
}
