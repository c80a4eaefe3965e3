//! The values of tensors of the CPU back end, for kernels that read slices. Knows Burn's internals.

use burn::backend::tensor::FloatTensor;
use burn::backend::{BackendTensor, DispatchTensorKind, Flex};
use burn::tensor::{DType, Device, Tensor, TensorData};
use paceline_kernels::Kernels;

use crate::tape::plain;

/// The values of a tensor in f32, in row-major order. They are those of the tensor itself, unless it is a view in another order.
#[derive(Clone)]
pub(crate) struct Values(FloatTensor<Flex>);

impl Values {
    /// `None` on another back end, and for another type.
    pub(crate) fn of<const D: usize>(tensor: &Tensor<D>) -> Option<Self> {
        if tensor.dtype() != DType::F32 {
            return None;
        }
        match plain(tensor.clone()).into_dispatch().kind {
            DispatchTensorKind::Flex(BackendTensor::Float(tensor)) => {
                Some(Self(tensor.to_contiguous()))
            }
            _ => None,
        }
    }

    pub(crate) fn slice(&self) -> &[f32] {
        self.0.as_slice().expect("f32 in order")
    }
}

/// A tensor without autodiff that takes `values` over.
pub(crate) fn tensor<const D: usize>(values: Vec<f32>, shape: [usize; D]) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), &Device::flex())
}

/// The kernels of this process.
///
/// # Panics
///
/// If `PACELINE_ISA` names none that this processor has.
pub(crate) fn of_process() -> Kernels {
    Kernels::of_process().unwrap_or_else(|error| panic!("PACELINE_ISA: {error}"))
}
