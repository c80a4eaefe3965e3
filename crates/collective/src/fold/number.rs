//! The scalar steps of the fold: how elements are widened, combined, divided and rounded back.

use half::{bf16, f16};

use super::halves::{bf16_to_f32, f32_to_bf16};
use super::isa::Isa;

/// A type as it lies in memory.
pub(super) trait Stored: Copy + 'static {
    /// What it is combined in.
    type Wide: Number;
    /// Whether memory holds `Wide` already, so that it can be combined where it is.
    const PLAIN: bool;

    /// Both have the same length, as in [`narrow`](Self::narrow).
    ///
    /// # Safety
    ///
    /// The machine has the instructions of `I`.
    unsafe fn widen<I: Isa>(from: &[Self], to: &mut [Self::Wide]);

    /// Rounds once, where there is anything to round.
    ///
    /// # Safety
    ///
    /// The machine has the instructions of `I`.
    unsafe fn narrow<I: Isa>(from: &[Self::Wide], to: &mut [Self]);
}

/// A type that numbers are combined in. Each step rounds once and is never fused with another one.
pub(super) trait Number: Stored<Wide = Self> {
    fn add(self, right: Self) -> Self;
    fn multiply(self, right: Self) -> Self;
    /// The smaller one; the left one where they compare equal; a NaN when either is one.
    fn least(self, right: Self) -> Self;
    /// The larger one; the left one where they compare equal; a NaN when either is one.
    fn most(self, right: Self) -> Self;
}

/// A [`Number`] that can be divided.
pub(super) trait Float: Number {
    /// One correctly rounded division by a count below 2^24.
    fn over(self, count: usize) -> Self;
}

/// How two numbers become one.
pub(super) trait Combine<A>: Copy {
    fn combine(left: A, right: A) -> A;
}

macro_rules! combine {
    ($name:ident, $of:ident, $method:ident) => {
        #[derive(Debug, Clone, Copy)]
        pub(super) struct $name;

        impl<A: $of> Combine<A> for $name {
            #[inline(always)]
            fn combine(left: A, right: A) -> A {
                left.$method(right)
            }
        }
    };
    ($name:ident, $operator:tt) => {
        #[derive(Debug, Clone, Copy)]
        pub(super) struct $name;

        impl Combine<u8> for $name {
            #[inline(always)]
            fn combine(left: u8, right: u8) -> u8 {
                left $operator right
            }
        }
    };
}

combine!(Add, Number, add);
combine!(Multiply, Number, multiply);
combine!(Least, Number, least);
combine!(Most, Number, most);
// Bits are the same in all types, so bytes are enough.
combine!(And, &);
combine!(Or, |);
combine!(Xor, ^);

/// What happens to a finished number before it is rounded to how it is stored.
pub(super) trait Finish<A>: Copy {
    fn finish(self, value: A) -> A;
}

/// Nothing.
#[derive(Debug, Clone, Copy)]
pub(super) struct Keep;

impl<A> Finish<A> for Keep {
    #[inline(always)]
    fn finish(self, value: A) -> A {
        value
    }
}

/// One division by a count.
#[derive(Debug, Clone, Copy)]
pub(super) struct Divide(pub(super) usize);

impl<A: Float> Finish<A> for Divide {
    #[inline(always)]
    fn finish(self, value: A) -> A {
        value.over(self.0)
    }
}

/// One multiplication with a factor.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times<A>(pub(super) A);

impl<A: Number> Finish<A> for Times<A> {
    #[inline(always)]
    fn finish(self, value: A) -> A {
        value.multiply(self.0)
    }
}

macro_rules! plain {
    ($type:ty) => {
        impl Stored for $type {
            type Wide = Self;
            const PLAIN: bool = true;

            #[inline(always)]
            unsafe fn widen<I: Isa>(from: &[Self], to: &mut [Self]) {
                to.copy_from_slice(from);
            }

            #[inline(always)]
            unsafe fn narrow<I: Isa>(from: &[Self], to: &mut [Self]) {
                to.copy_from_slice(from);
            }
        }
    };
}

macro_rules! float {
    ($type:ty) => {
        plain!($type);

        impl Number for $type {
            #[inline(always)]
            fn add(self, right: Self) -> Self {
                self + right
            }

            #[inline(always)]
            fn multiply(self, right: Self) -> Self {
                self * right
            }

            // Comparisons instead of `f32::min`: that leaves open which of two zeros, and drops NaNs. The negated one
            // is true for a right NaN; both are evaluated so that no branch is in the way of vectors.
            #[inline(always)]
            #[allow(clippy::neg_cmp_op_on_partial_ord)]
            fn least(self, right: Self) -> Self {
                let take_right = !self.is_nan() & !(right >= self);
                if take_right { right } else { self }
            }

            #[inline(always)]
            #[allow(clippy::neg_cmp_op_on_partial_ord)]
            fn most(self, right: Self) -> Self {
                let take_right = !self.is_nan() & !(right <= self);
                if take_right { right } else { self }
            }
        }

        impl Float for $type {
            // A division and not a product with the reciprocal: 1/count is not exact unless it is a power of two.
            #[inline(always)]
            fn over(self, count: usize) -> Self {
                self / count as $type
            }
        }
    };
}

float!(f32);
float!(f64);

macro_rules! integer {
    ($type:ty) => {
        plain!($type);

        impl Number for $type {
            #[inline(always)]
            fn add(self, right: Self) -> Self {
                self.wrapping_add(right)
            }

            #[inline(always)]
            fn multiply(self, right: Self) -> Self {
                self.wrapping_mul(right)
            }

            #[inline(always)]
            fn least(self, right: Self) -> Self {
                self.min(right)
            }

            #[inline(always)]
            fn most(self, right: Self) -> Self {
                self.max(right)
            }
        }
    };
}

integer!(i64);
integer!(i32);
integer!(i8);
integer!(u8);

impl Stored for f16 {
    type Wide = f32;
    const PLAIN: bool = false;

    #[inline(always)]
    unsafe fn widen<I: Isa>(from: &[Self], to: &mut [f32]) {
        // SAFETY: the caller's contract.
        unsafe { I::widen_f16(from, to) }
    }

    #[inline(always)]
    unsafe fn narrow<I: Isa>(from: &[f32], to: &mut [Self]) {
        // SAFETY: the caller's contract.
        unsafe { I::narrow_f16(from, to) }
    }
}

impl Stored for bf16 {
    type Wide = f32;
    const PLAIN: bool = false;

    #[inline(always)]
    unsafe fn widen<I: Isa>(from: &[Self], to: &mut [f32]) {
        convert(from, to, bf16_to_f32);
    }

    #[inline(always)]
    unsafe fn narrow<I: Isa>(from: &[f32], to: &mut [Self]) {
        convert(from, to, f32_to_bf16);
    }
}

/// A `bool` in memory that a peer may have written: any byte, of which only zero is false.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(super) struct Truth(u8);

impl Stored for Truth {
    type Wide = u8;
    const PLAIN: bool = false;

    #[inline(always)]
    unsafe fn widen<I: Isa>(from: &[Self], to: &mut [u8]) {
        convert(from, to, |truth| u8::from(truth.0 != 0));
    }

    #[inline(always)]
    unsafe fn narrow<I: Isa>(from: &[u8], to: &mut [Self]) {
        convert(from, to, Truth);
    }
}

#[inline(always)]
pub(super) fn convert<A: Copy, B>(from: &[A], to: &mut [B], each: impl Fn(A) -> B) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = each(*from);
    }
}
