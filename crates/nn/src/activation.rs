//! Activations on the kernels of [`paceline_kernels`].

use burn::tensor::{Tensor, activation as burns};
use paceline_kernels::Kernels;

use crate::tape::{Point, custom};
use crate::values::{self, Values, of_process};

/// Burn's `relu`, in one pass over memory on CPUs. NaN stays NaN.
///
/// *Numerics*: the same values on every device.
pub fn relu<const D: usize>(input: Tensor<D>) -> Tensor<D> {
    let output = computed(&input, Kept::Output, Kernels::relu, Kernels::relu_gradient);
    output.unwrap_or_else(|| burns::relu(input))
}

/// Burn's `gelu`, in one pass over memory on CPUs.
///
/// *Numerics*: the exact one, not that by `tanh`; in f32 on CPUs within 1e-6 of the result's size, with the same bits on any machine.
///
/// *Source*: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units (GELUs)".
pub fn gelu<const D: usize>(input: Tensor<D>) -> Tensor<D> {
    let output = computed(&input, Kept::Input, Kernels::gelu, Kernels::gelu_gradient);
    output.unwrap_or_else(|| burns::gelu(input))
}

/// Burn's `silu`, `x * sigmoid(x)`, in one pass over memory on CPUs. Also known as Swish.
///
/// *Numerics*: in f32 on CPUs within 3e-7 of the result's size down to `x = -86`, with the same bits on any machine.
///
/// *Source*: Ramachandran, Zoph and Le 2017, "Searching for Activation Functions".
///
/// *Example*:
/// ```
/// use burn::tensor::{Device, Tensor};
/// use paceline_nn::silu;
///
/// let output = silu(Tensor::<1>::from_floats([-1.0, 0.0, 1.0], &Device::flex()));
/// let values: Vec<f32> = output.into_data().try_into_vec().unwrap();
/// assert!((values[2] - 0.731_058_6).abs() < 1e-6);
/// ```
pub fn silu<const D: usize>(input: Tensor<D>) -> Tensor<D> {
    let output = computed(&input, Kept::Input, Kernels::silu, Kernels::silu_gradient);
    output.unwrap_or_else(|| burns::silu(input))
}

/// Burn's `sigmoid`, in one pass over memory on CPUs.
///
/// *Numerics*: in f32 on CPUs within 2e-7 of the result's size down to `x = -86`, with the same bits on any machine.
pub fn sigmoid<const D: usize>(input: Tensor<D>) -> Tensor<D> {
    let output = computed(
        &input,
        Kept::Output,
        Kernels::sigmoid,
        Kernels::sigmoid_gradient,
    );
    output.unwrap_or_else(|| burns::sigmoid(input))
}

/// Burn's `tanh`, in one pass over memory on CPUs.
///
/// *Numerics*: in f32 on CPUs within 1.01 ulp, with the same bits on any machine.
pub fn tanh<const D: usize>(input: Tensor<D>) -> Tensor<D> {
    let output = computed(&input, Kept::Output, Kernels::tanh, Kernels::tanh_gradient);
    output.unwrap_or_else(|| burns::tanh(input))
}

/// Burn's `softmax` along a dimension, in one pass over memory on CPUs if that is the last one.
///
/// *Numerics*: in f32 on CPUs, sums in a fixed order of 32 lanes, so the bits are the same on any machine.
///
/// # Panics
///
/// If `input` has no such dimension.
pub fn softmax<const D: usize>(input: Tensor<D>, dim: usize) -> Tensor<D> {
    if dim + 1 < D {
        return softmax(input.swap_dims(dim, D - 1), D - 1).swap_dims(dim, D - 1);
    }
    let output = match input.dims().get(dim) {
        // Burn's says what is wrong with a dimension, and has no values for none.
        None | Some(0) => None,
        Some(&width) => computed(
            &input,
            Kept::Output,
            |kernels, x| kernels.softmax(x, width),
            move |kernels, y, gradient| kernels.softmax_gradient(y, gradient, width),
        ),
    };
    output.unwrap_or_else(|| burns::softmax(input, dim))
}

/// The values that a backward pass gets beside the output's gradient.
enum Kept {
    Input,
    Output,
}

/// `forward` of the input's values. `None` if they cannot be read.
fn computed<const D: usize>(
    input: &Tensor<D>,
    kept: Kept,
    forward: impl FnOnce(Kernels, &[f32]) -> Vec<f32>,
    backward: impl FnOnce(Kernels, &[f32], &[f32]) -> Vec<f32> + Send + 'static,
) -> Option<Tensor<D>> {
    let (x, shape) = (Values::of(input)?, input.dims());
    let output = values::tensor(forward(of_process(), x.slice()), shape);
    let kept = match kept {
        Kept::Input => x,
        Kept::Output => Values::of_gradient(&output),
    };
    let after = Point::origin(input);
    let step = move |gradient: Tensor<D>| {
        let gradient = Values::of_gradient(&gradient);
        let of_input = backward(of_process(), kept.slice(), gradient.slice());
        Some(values::tensor(of_input, shape))
    };
    Some(custom(output, input.clone(), &after, step))
}
