//! What a block takes and returns: tensors of any kind and rank, and tuples of them.

use burn::tensor::kind::Autodiff;
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
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.any(tensor)
    }

    /// Replaces a tensor of integers or booleans, and floating-point ones too unless [`float`](Self::float) does.
    fn any<const D: usize, K: Kind>(&mut self, tensor: Tensor<D, K>) -> Tensor<D, K> {
        tensor
    }
}

/// What a tensor holds: numbers of either kind, or booleans.
pub trait Kind: Autodiff + Clone + 'static {}

impl<K: Autodiff + Clone + 'static> Kind for K {}

/// `tensors` on `device`: those on another one are copied, and in the backward pass their gradients are copied back.
pub fn to_device<T: Tensors>(tensors: T, device: &Device) -> T {
    tensors.map(&mut Near(std::slice::from_ref(device)))
}

/// Copies tensors that are on none of these devices to the first of them.
pub(crate) struct Near<'a>(pub(crate) &'a [Device]);

impl MapTensors for Near<'_> {
    fn any<const D: usize, K: Kind>(&mut self, tensor: Tensor<D, K>) -> Tensor<D, K> {
        match self.0 {
            [first, ..] if !self.0.contains(&tensor.device()) => tensor.to_device(first),
            _ => tensor,
        }
    }
}

impl<const D: usize> Tensors for Tensor<D> {
    fn map(self, each: &mut impl MapTensors) -> Self {
        each.float(self)
    }
}

impl<const D: usize> Tensors for Tensor<D, Int> {
    fn map(self, each: &mut impl MapTensors) -> Self {
        each.any(self)
    }
}

impl<const D: usize> Tensors for Tensor<D, Bool> {
    fn map(self, each: &mut impl MapTensors) -> Self {
        each.any(self)
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
