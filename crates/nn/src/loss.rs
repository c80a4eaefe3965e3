//! Losses on the kernels of [`paceline_kernels`].

use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::{Int, Tensor};

use crate::tape::{Point, custom};
use crate::values::{self, Values, of_process};

/// The mean cross-entropy of logits: what `CrossEntropyLossConfig::new().init(device).forward(logits, targets)` returns, in one pass over
/// memory on CPUs.
///
/// *Shape*: logits `[predictions, classes]`, the number of the right class for each, to `[1]`.
///
/// *Numerics*: the sum of a prediction in a fixed order of 32 lanes, the mean in f64, with the same bits on any machine. `NaN` without
/// predictions.
///
/// # Panics
///
/// If there is no such class, or not one target for each prediction.
///
/// *Example*:
/// ```
/// use burn::tensor::{Device, Tensor};
/// use paceline_nn::cross_entropy;
///
/// let device = Device::flex();
/// let logits = Tensor::<2>::zeros([3, 10], &device);
/// let loss = cross_entropy(logits, Tensor::from_ints([0, 9, 4], &device)).into_scalar::<f32>();
/// assert!((loss - 10_f32.ln()).abs() < 1e-6);
/// ```
pub fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let Some(values) = Values::of(&logits) else {
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        return loss.forward(logits, targets);
    };
    let shape = logits.dims();
    let targets = targets.into_data();
    // A negative number is past the last class.
    let targets: Vec<usize> = targets
        .iter::<i64>()
        .map(|target| target as usize)
        .collect();
    let kernels = of_process();
    let (loss, sums) = kernels.cross_entropy(values.slice(), shape[1], &targets);
    let after = Point::origin(&logits);
    custom(
        values::tensor(vec![loss], [1]),
        logits,
        &after,
        move |gradient| {
            let gradient = Values::of_gradient(&gradient).slice()[0];
            let of_logits =
                kernels.cross_entropy_gradient(values.slice(), shape[1], &targets, &sums, gradient);
            Some(values::tensor(of_logits, shape))
        },
    )
}
