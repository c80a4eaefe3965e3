//! What a block takes and returns: tensors of any kind and rank, and tuples of them.

use burn::tensor::{Bool, Int, Tensor};

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
