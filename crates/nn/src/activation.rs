//! Activations on the kernels of [`paceline_kernels`].

use burn::tensor::{Tensor, activation as burns};

use crate::tape::{Point, custom};
use crate::values::{self, Values, of_process};

/// Burn's `relu`, in one pass over memory on CPUs. NaN stays NaN.
///
/// *Numerics*: the same values on every device.
pub fn relu<const D: usize>(input: Tensor<D>) -> Tensor<D> {
    let Some(x) = Values::of(&input) else {
        return burns::relu(input);
    };
    let shape = input.dims();
    let output = values::tensor(of_process().relu(x.slice()), shape);
    let after = Point::origin(&input);
    custom(output.clone(), input, &after, move |gradient: Tensor<D>| {
        let (y, gradient) = (Values::of_gradient(&output), Values::of_gradient(&gradient));
        let of_input = of_process().relu_gradient(y.slice(), gradient.slice());
        Some(values::tensor(of_input, shape))
    })
}

/// Burn's `gelu`, in one pass over memory on CPUs.
///
/// *Numerics*: the exact one, not that by `tanh`; in f32 on CPUs within 1e-6 of the result's size, with the same bits on any machine.
///
/// *Source*: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units (GELUs)".
pub fn gelu<const D: usize>(input: Tensor<D>) -> Tensor<D> {
    let Some(x) = Values::of(&input) else {
        return burns::gelu(input);
    };
    let shape = input.dims();
    let output = values::tensor(of_process().gelu(x.slice()), shape);
    let after = Point::origin(&input);
    custom(output, input, &after, move |gradient: Tensor<D>| {
        let gradient = Values::of_gradient(&gradient);
        let of_input = of_process().gelu_gradient(x.slice(), gradient.slice());
        Some(values::tensor(of_input, shape))
    })
}
