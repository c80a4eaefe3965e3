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

/// Whether the kernels can read a tensor: it is on a CPU and in f32.
pub(crate) fn are_readable<const D: usize>(tensor: &Tensor<D>) -> bool {
    Values::of(tensor).is_some()
}

/// The values of a tensor that the kernels can read, in row-major order, to be changed in place. If another tensor has them too they are
/// copied first.
pub(crate) struct Owned<const D: usize>(FloatTensor<Flex>);

impl<const D: usize> Owned<D> {
    pub(crate) fn new(tensor: Tensor<D>) -> Self {
        let tensor: FloatTensor<Flex> = match plain(tensor).into_dispatch().kind {
            DispatchTensorKind::Flex(BackendTensor::Float(tensor)) => tensor,
            other => panic!("a tensor that the kernels cannot read: {other:?}"),
        };
        match tensor.is_contiguous() {
            true => Self(tensor),
            false => Self(tensor.to_contiguous()),
        }
    }

    pub(crate) fn slice(&self) -> &[f32] {
        self.0.as_slice().expect("f32 in order")
    }

    pub(crate) fn slice_mut(&mut self) -> &mut [f32] {
        let range = self.0.layout().contiguous_offsets();
        let (start, end) = range.expect("in order");
        &mut self.0.storage_mut()[start..end]
    }

    pub(crate) fn tensor(self) -> Tensor<D> {
        Tensor::from_data(self.0.into_data(), &Device::flex())
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
