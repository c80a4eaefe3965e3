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
            DispatchTensorKind::Flex(BackendTensor::Float(tensor)) => Some(Self(in_order(tensor))),
            _ => None,
        }
    }

    /// Those of an optional tensor. `None` if there is one that cannot be read.
    pub(crate) fn of_optional<const D: usize>(tensor: Option<&Tensor<D>>) -> Option<Option<Self>> {
        match tensor {
            None => Some(None),
            Some(tensor) => Self::of(tensor).map(Some),
        }
    }

    /// Those of a gradient of what the kernels computed.
    pub(crate) fn of_gradient<const D: usize>(gradient: &Tensor<D>) -> Self {
        Self::of(gradient).expect("of the type and the device of the output")
    }

    pub(crate) fn slice(&self) -> &[f32] {
        self.0.as_slice().expect("f32 in order")
    }
}

/// The tensor itself, if its values lie in order.
fn in_order(tensor: FloatTensor<Flex>) -> FloatTensor<Flex> {
    match tensor.is_contiguous() {
        true => tensor,
        false => tensor.to_contiguous(),
    }
}

/// Whether the kernels can read a tensor: it is on a CPU and in f32.
pub(crate) fn are_readable<const D: usize>(tensor: &Tensor<D>) -> bool {
    let kind = plain(tensor.clone()).into_dispatch().kind;
    tensor.dtype() == DType::F32
        && matches!(kind, DispatchTensorKind::Flex(BackendTensor::Float(_)))
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
        Self(in_order(tensor))
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
        Tensor::from_data(self.0.into_data(), (&Device::flex(), DType::F32))
    }
}

/// A tensor without autodiff that takes `values` over.
pub(crate) fn tensor<const D: usize>(values: Vec<f32>, shape: [usize; D]) -> Tensor<D> {
    let data = TensorData::new(values, shape);
    Tensor::from_data(data, (&Device::flex(), DType::F32))
}

/// The kernels of this process.
///
/// # Panics
///
/// If `PACELINE_ISA` names none that this processor has.
pub(crate) fn of_process() -> Kernels {
    Kernels::of_process().unwrap_or_else(|error| panic!("PACELINE_ISA: {error}"))
}
