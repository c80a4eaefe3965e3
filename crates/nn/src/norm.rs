//! Normalisation on the kernels of [`paceline_kernels`].

use burn::module::{Content, DisplaySettings, ModuleDisplay, Param, RunningState};
use burn::nn::{BatchNorm, LayerNorm, RmsNorm};
use burn::tensor::Tensor;
use paceline_kernels::{self as kernels, After};

use crate::activation::relu;
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
    of_batch(layer, input, false, None)
}

/// `relu(batch_norm(layer, input))` with the same bits, in fewer passes over memory.
///
/// *Shape*: as [`batch_norm`].
///
/// *Memory*: the input until the backward pass, and not the output.
///
/// # Panics
///
/// As [`conv2d`](crate::conv2d).
pub fn batch_norm_relu<const D: usize>(layer: &BatchNorm, input: Tensor<D>) -> Tensor<D> {
    of_batch(layer, input, true, None)
}

/// `relu(batch_norm(layer, input) + residual)` with the same bits, in fewer passes over memory: the end of a residual block.
///
/// *Shape*: as [`batch_norm`]; `residual` is as `input`.
///
/// # Panics
///
/// As [`conv2d`](crate::conv2d), and if the sum panics.
///
/// *Source*: He and others 2016, "Deep Residual Learning for Image Recognition".
pub fn batch_norm_add_relu<const D: usize>(
    layer: &BatchNorm,
    input: Tensor<D>,
    residual: Tensor<D>,
) -> Tensor<D> {
    of_batch(layer, input, true, Some(residual))
}

/// What follows in the kernels: `values` are those of the residual or the output.
fn after(is_rectified: bool, values: Option<&Values>) -> After<'_> {
    match (is_rectified, values) {
        (_, Some(values)) => After::AddRelu(values.slice()),
        (true, None) => After::Relu,
        (false, None) => After::Nothing,
    }
}

/// A batch norm, plus the residual if there is one, rectified or not.
fn of_batch<const D: usize>(
    layer: &BatchNorm,
    input: Tensor<D>,
    is_rectified: bool,
    residual: Option<Tensor<D>>,
) -> Tensor<D> {
    let (gamma, beta) = (layer.gamma.val(), layer.beta.val());
    let shape = input.dims();
    let positions: usize = shape.iter().skip(2).product();
    let fits = input.device().is_autodiff()
        && layer.training.is_enabled()
        && positions > 1
        && shape[1] == gamma.dims()[0]
        && residual
            .as_ref()
            .is_none_or(|residual| residual.dims() == shape);
    let (Some(x), Some(scale), Some(shift), Some(added), true) = (
        Values::of(&input),
        Values::of(&gamma),
        Values::of(&beta),
        Values::of_optional(residual.as_ref()),
        fits,
    ) else {
        let output = layer.forward(input);
        let sum = match residual {
            Some(residual) => output + residual,
            None => output,
        };
        return if is_rectified { relu(sum) } else { sum };
    };
    let norm = kernels::BatchNorm {
        images: shape[0],
        channels: shape[1],
        positions,
        epsilon: layer.epsilon,
    };
    let kernels = of_process();
    let factors = [scale.slice(), shift.slice()];
    let follows = after(is_rectified, added.as_ref());
    let (output, moments) = kernels.batch_norm(&norm, x.slice(), factors, follows);
    for (running, batch) in [
        (&layer.running_mean, &moments.mean),
        (&layer.running_var, &moments.variance),
    ] {
        take_in(running, batch, layer.momentum);
    }
    let output = values::tensor(output, shape);
    let kept = added.map(|_| Values::of_gradient(&output));
    let parents = (input, gamma, Some(beta), residual);
    on_tape(output, parents, move |given| {
        let factors = [scale.slice(), shift.slice()];
        let follows = after(is_rectified, kept.as_ref());
        let all = kernels.batch_norm_gradients(&norm, x.slice(), factors, &moments, follows, given);
        ([all.input, all.gamma, all.beta], all.added)
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
    let beta = layer.beta.as_ref().map(Param::val);
    let output = epsilon(layer)
        .and_then(|epsilon| of_rows(&input, layer.gamma.val(), beta, (epsilon, true)));
    output.unwrap_or_else(|| layer.forward(input))
}

/// `layer.forward(input)`, and its backward pass, faster on CPUs: on the kernels of this crate's own.
///
/// On other devices, and in other types than f32, it is `layer.forward`.
///
/// *Shape*: `[.., width]`.
///
/// *Numerics*: as [`layer_norm`].
///
/// # Panics
///
/// As [`conv2d`](crate::conv2d).
///
/// *Source*: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
///
/// *Example*:
/// ```
/// use burn::nn::{RmsNorm, RmsNormConfig};
/// use burn::tensor::{Device, Tensor};
/// use paceline_nn::rms_norm;
///
/// let device = Device::flex();
/// let layer: RmsNorm = RmsNormConfig::new(8).init(&device);
/// assert_eq!(rms_norm(&layer, Tensor::<3>::ones([2, 5, 8], &device)).dims(), [2, 5, 8]);
/// ```
pub fn rms_norm<const D: usize>(layer: &RmsNorm, input: Tensor<D>) -> Tensor<D> {
    let output = of_rows(&input, layer.gamma.val(), None, (layer.epsilon, false));
    output.unwrap_or_else(|| layer.forward(input))
}

/// A norm of rows, with the mean taken away or not. `None` if the kernels cannot compute it.
fn of_rows<const D: usize>(
    input: &Tensor<D>,
    gamma: Tensor<1>,
    beta: Option<Tensor<1>>,
    (epsilon, is_centred): (f64, bool),
) -> Option<Tensor<D>> {
    let (x, scale) = (Values::of(input)?, Values::of(&gamma)?);
    let shift = Values::of_optional(beta.as_ref())?;
    let (shape, [width]) = (input.dims(), gamma.dims());
    if shape[D - 1] != width {
        return None;
    }
    let norm = kernels::LayerNorm {
        rows: shape[..D - 1].iter().product(),
        width,
        epsilon,
        is_centred,
    };
    let kernels = of_process();
    let shift = shift.as_ref().map(Values::slice);
    let (output, moments) = kernels.layer_norm(&norm, x.slice(), scale.slice(), shift);
    let output = values::tensor(output, shape);
    let parents = (input.clone(), gamma, beta, None);
    Some(on_tape(output, parents, move |given| {
        let gradients =
            kernels.layer_norm_gradients(&norm, x.slice(), scale.slice(), &moments, given);
        ([gradients.input, gradients.gamma, gradients.beta], None)
    }))
}

/// `output` as that of a norm with this input, gamma, beta and residual. `gradients` computes those of the first three, and of the residual,
/// from the output's.
fn on_tape<const D: usize>(
    output: Tensor<D>,
    (input, gamma, beta, residual): (Tensor<D>, Tensor<1>, Option<Tensor<1>>, Option<Tensor<D>>),
    gradients: impl FnOnce(&[f32]) -> ([Vec<f32>; 3], Option<Vec<f32>>) + Send + 'static,
) -> Tensor<D> {
    let (shape, features) = (input.dims(), gamma.dims());
    let slots = [(); 4].map(|()| Slot::default());
    let mut tip = Point::origin(&input);
    if let Some(residual) = residual {
        tip = tip.deposit_from(residual, &slots[3]);
    }
    tip = tip
        .deposit_from(input, &slots[0])
        .deposit_from(gamma, &slots[1]);
    if let Some(beta) = beta {
        tip = tip.deposit_from(beta, &slots[2]);
    }
    tip.output(output, move |of_output: Tensor<D>| {
        let given = Values::of_gradient(&of_output);
        let ([of_input, of_gamma, of_beta], of_residual) = gradients(given.slice());
        slots[0].put(Some(values::tensor(of_input, shape)));
        slots[1].put(Some(values::tensor(of_gamma, features)));
        slots[2].put(Some(values::tensor(of_beta, features)));
        slots[3].put(of_residual.map(|values| values::tensor(values, shape)));
    })
}

/// The layer's epsilon, which Burn shows only when it prints a layer.
fn epsilon(layer: &LayerNorm) -> Option<f64> {
    let content = layer.custom_content(Content::new(DisplaySettings::new()))?;
    let mut attributes = content.attributes.iter();
    let epsilon = attributes.find(|attribute| attribute.name == "epsilon")?;
    epsilon.value.parse().ok()
}
