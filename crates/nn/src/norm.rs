//! Normalisation on the kernels of [`paceline_kernels`].

use burn::module::{Content, DisplaySettings, ModuleDisplay, Param, RunningState};
use burn::nn::{BatchNorm, LayerNorm};
use burn::tensor::Tensor;
use paceline_kernels as kernels;

use crate::tape::{Point, Slot};
use crate::values::{self, Values, of_process};

/// `layer.forward(input)`, and its backward pass, faster in training on CPUs: on the kernels of this crate's own.
///
/// On other devices, in other types than f32, outside of training, and for an input without a dimension beside batch and features it is
/// `layer.forward`.
///
/// *Shape*: `[batch, features, ...]`.
///
/// *Numerics*: sums in a fixed order of 32 lanes over each sample, and in f64 over the batch; see [`conv2d`](crate::conv2d). The running statistics
/// take in the batch's as those of `layer.forward` do.
///
/// # Panics
///
/// As [`conv2d`](crate::conv2d).
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
    let output = values::tensor(output, shape);
    on_tape(output, input, gamma, Some(beta), move |given| {
        let gradients =
            kernels.batch_norm_gradients(&norm, x.slice(), scale.slice(), &moments, given);
        [gradients.input, gradients.gamma, gradients.beta]
    })
}

/// Moves a running statistic towards that of a batch, as Burn does.
fn take_in(running: &RunningState<Tensor<1>>, batch: &[f32], momentum: f64) {
    let old = running.value_sync();
    let batch = Tensor::<1>::from_data(batch, &old.device()).cast(old.dtype());
    let new = old.mul_scalar(1.0 - momentum) + batch.mul_scalar(momentum);
    running.update(new.detach());
}

/// `layer.forward(input)`, and its backward pass, faster on CPUs: on the kernels of this crate's own.
///
/// On other devices, and in other types than f32, it is `layer.forward`.
///
/// *Shape*: `[.., width]`.
///
/// *Numerics*: sums over a row in a fixed order of 32 lanes; see [`conv2d`](crate::conv2d).
///
/// # Panics
///
/// As [`conv2d`](crate::conv2d).
///
/// *Example*:
/// ```
/// use burn::nn::{LayerNorm, LayerNormConfig};
/// use burn::tensor::{Device, Tensor};
/// use paceline_nn::layer_norm;
///
/// let device = Device::flex();
/// let layer: LayerNorm = LayerNormConfig::new(8).init(&device);
/// assert_eq!(layer_norm(&layer, Tensor::<3>::ones([2, 5, 8], &device)).dims(), [2, 5, 8]);
/// ```
pub fn layer_norm<const D: usize>(layer: &LayerNorm, input: Tensor<D>) -> Tensor<D> {
    let (gamma, beta) = (layer.gamma.val(), layer.beta.as_ref().map(Param::val));
    let (Some(x), Some(scale), Some(shift), Some(epsilon)) = (
        Values::of(&input),
        Values::of(&gamma),
        Values::of_optional(beta.as_ref()),
        epsilon(layer),
    ) else {
        return layer.forward(input);
    };
    let (shape, [width]) = (input.dims(), gamma.dims());
    if shape[D - 1] != width {
        return layer.forward(input);
    }
    let norm = kernels::LayerNorm {
        rows: shape[..D - 1].iter().product(),
        width,
        epsilon,
        is_centred: true,
    };
    let kernels = of_process();
    let shift = shift.as_ref().map(Values::slice);
    let (output, moments) = kernels.layer_norm(&norm, x.slice(), scale.slice(), shift);
    let output = values::tensor(output, shape);
    on_tape(output, input, gamma, beta, move |given| {
        let gradients =
            kernels.layer_norm_gradients(&norm, x.slice(), scale.slice(), &moments, given);
        [gradients.input, gradients.gamma, gradients.beta]
    })
}

/// `output` as that of a norm. `gradients` computes those of the input, gamma and beta from the output's.
fn on_tape<const D: usize>(
    output: Tensor<D>,
    input: Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    gradients: impl FnOnce(&[f32]) -> [Vec<f32>; 3] + Send + 'static,
) -> Tensor<D> {
    let (shape, features) = (input.dims(), gamma.dims());
    let slots = [(); 3].map(|()| Slot::default());
    let mut tip = Point::origin(&input)
        .deposit_from(input, &slots[0])
        .deposit_from(gamma, &slots[1]);
    if let Some(beta) = beta {
        tip = tip.deposit_from(beta, &slots[2]);
    }
    tip.output(output, move |of_output: Tensor<D>| {
        let given = Values::of_gradient(&of_output);
        let [of_input, of_gamma, of_beta] = gradients(given.slice());
        slots[0].put(Some(values::tensor(of_input, shape)));
        slots[1].put(Some(values::tensor(of_gamma, features)));
        slots[2].put(Some(values::tensor(of_beta, features)));
    })
}

/// The layer's epsilon, which Burn shows only when it prints a layer.
fn epsilon(layer: &LayerNorm) -> Option<f64> {
    let content = layer.custom_content(Content::new(DisplaySettings::new()))?;
    let mut attributes = content.attributes.iter();
    let epsilon = attributes.find(|attribute| attribute.name == "epsilon")?;
    epsilon.value.parse().ok()
}
