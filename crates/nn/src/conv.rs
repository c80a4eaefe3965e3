//! Convolutions on the kernels of [`paceline_kernels`].

use std::sync::{Arc, OnceLock};

use burn::module::Param;
use burn::nn::PaddingConfig2d;
use burn::nn::conv::Conv2d;
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
    let (Some(x), Some(w), Some(b)) = (
        Values::of(&input),
        Values::of(&weight),
        Values::of_optional(bias.as_ref()),
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
        let of_output = Values::of_gradient(&of_output);
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
