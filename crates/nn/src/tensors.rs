//! What a block takes and returns: tensors of any kind and rank, and tuples of them.

use burn::tensor::{Bool, Device, Int, Tensor};

/// Tensors of any kind and rank: a tensor, or a tuple, vector or option of `Tensors`.
pub trait Tensors: Clone + Send + 'static {
    /// The same structure with every tensor replaced by what `each` returns for it.
    #[must_use]
    fn map(self, each: &mut impl MapTensors) -> Self;
}

/// What [`Tensors::map`] does with each tensor.
pub trait MapTensors {
    /// Replaces a floating-point tensor.
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D>;

    /// Replaces an integer tensor.
    fn int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        tensor
    }

    /// Replaces a boolean tensor.
    fn bool<const D: usize>(&mut self, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
        tensor
    }
}

/// `tensors` on `device`: those on another one are copied, and in the backward pass their gradients are copied back.
pub fn to_device<T: Tensors>(tensors: T, device: &Device) -> T {
    tensors.map(&mut Near(std::slice::from_ref(device)))
}

/// Copies tensors that are on none of these devices to the first of them.
pub(crate) struct Near<'a>(pub(crate) &'a [Device]);

macro_rules! near {
    ($self:ident, $tensor:ident) => {
        match $self.0 {
            [first, ..] if !$self.0.contains(&$tensor.device()) => $tensor.to_device(first),
            _ => $tensor,
        }
    };
}

impl MapTensors for Near<'_> {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        near!(self, tensor)
    }

    fn int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        near!(self, tensor)
    }

    fn bool<const D: usize>(&mut self, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
        near!(self, tensor)
    }
}

impl<const D: usize> Tensors for Tensor<D> {
    fn map(self, each: &mut impl MapTensors) -> Self {
        each.float(self)
    }
}

impl<const D: usize> Tensors for Tensor<D, Int> {
    fn map(self, each: &mut impl MapTensors) -> Self {
        each.int(self)
    }
}

impl<const D: usize> Tensors for Tensor<D, Bool> {
    fn map(self, each: &mut impl MapTensors) -> Self {
        each.bool(self)
    }
}

impl<T: Tensors> Tensors for Option<T> {
    fn map(self, each: &mut impl MapTensors) -> Self {
        self.map(|tensors| tensors.map(each))
    }
}

impl<T: Tensors> Tensors for Vec<T> {
    fn map(self, each: &mut impl MapTensors) -> Self {
        self.into_iter().map(|tensors| tensors.map(each)).collect()
    }
}

macro_rules! tuple {
    ($($kind:ident $name:ident),+) => {
        impl<$($kind: Tensors),+> Tensors for ($($kind,)+) {
            fn map(self, each: &mut impl MapTensors) -> Self {
                let ($($name,)+) = self;
                ($($name.map(each),)+)
            }
        }
    };
}

tuple!(A a, B b);
tuple!(A a, B b, C c);
tuple!(A a, B b, C c, D d);
