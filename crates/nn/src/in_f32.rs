//! A part of a model that keeps f32 while the rest computes in fewer bits.

use burn::tensor::{FloatDType, Tensor};

/// Runs a part of a model in f32 and returns its result in the type of `input`.
///
/// For layers whose parameters stay in f32 under mixed precision, such as norms, and for functions without parameters that
/// need f32's digits, such as a softmax. An f32 `input` is not cast, so a model with `in_f32` runs in every precision.
///
/// *Example*:
/// ```
/// use burn::nn::{LayerNorm, LayerNormConfig};
/// use burn::tensor::{DType, Device, FloatDType, Tensor};
/// use paceline_nn::in_f32;
///
/// let device = Device::flex();
/// let norm: LayerNorm = LayerNormConfig::new(4).init(&device);
/// let x = Tensor::<2>::ones([2, 4], &device).cast(FloatDType::BF16);
/// let y = in_f32(x, |x| norm.forward(x));
/// assert_eq!(y.dtype(), DType::BF16);
/// ```
pub fn in_f32<const D: usize, const E: usize>(
    input: Tensor<D>,
    part: impl FnOnce(Tensor<D>) -> Tensor<E>,
) -> Tensor<E> {
    let dtype: FloatDType = input.dtype().into();
    part(input.cast(FloatDType::F32)).cast(dtype)
}
