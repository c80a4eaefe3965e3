//! The numbers that can be reduced, and the ways to combine two of them.

use std::fmt;

/// Type of the numbers in a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit IEEE 754.
    F32,
    /// 64-bit IEEE 754.
    F64,
    /// 64-bit two's complement.
    I64,
    /// 8-bit.
    U8,
}

impl DType {
    /// Size of one element.
    ///
    /// *Units*: bytes.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F64 | Self::I64 => 8,
            Self::U8 => 1,
        }
    }

    pub(crate) fn code(self) -> u8 {
        match self {
            Self::F32 => 1,
            Self::F64 => 2,
            Self::I64 => 3,
            Self::U8 => 4,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        [Self::F32, Self::F64, Self::I64, Self::U8]
            .into_iter()
            .find(|dtype| dtype.code() == code)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::I64 => "i64",
            Self::U8 => "u8",
        })
    }
}

/// How the ranks' numbers are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum; integers wrap around.
    Sum,
    /// The sum, divided once by the number of leaves of the tree. Refused for integers, as Gloo does.
    Average,
    /// The smallest; a NaN anywhere gives a NaN.
    Min,
    /// The largest; a NaN anywhere gives a NaN.
    Max,
}

impl ReduceOp {
    pub(crate) fn check(self, dtype: DType) -> Result<(), String> {
        if self == Self::Average && dtype == DType::I64 {
            return Err("an average of i64 is not an i64".into());
        }
        Ok(())
    }

    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Sum => 1,
            Self::Average => 2,
            Self::Min => 3,
            Self::Max => 4,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        [Self::Sum, Self::Average, Self::Min, Self::Max]
            .into_iter()
            .find(|op| op.code() == code)
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Average => "average",
            Self::Min => "min",
            Self::Max => "max",
        })
    }
}

pub(crate) mod sealed {
    /// Keeps [`Element`](super::Element) to the types whose kernels exist, and holds those kernels' scalar steps.
    ///
    /// The names keep out of the way of `std::ops` in callers that are generic over elements.
    pub trait Number: Copy {
        /// One addition in the type's own rounding; never fused with another operation.
        fn reduce_add(self, right: Self) -> Self;
        /// The smaller one; the left one where they compare equal.
        fn reduce_least(self, right: Self) -> Self;
        /// The larger one; the left one where they compare equal.
        fn reduce_most(self, right: Self) -> Self;
        /// One correctly rounded division by a count.
        fn reduce_over(self, count: usize) -> Self;
    }
}

/// A type of number that collectives move and reduce: `f32`, `f64` or `i64`.
///
/// Every bit pattern is a value of the type, zero bytes included, which is what lets buffers live in shared memory.
pub trait Element:
    sealed::Number + Copy + Default + PartialEq + fmt::Debug + Send + Sync + 'static
{
    /// The type's tag in headers.
    const DTYPE: DType;
}

macro_rules! float {
    ($type:ty, $dtype:expr) => {
        impl Element for $type {
            const DTYPE: DType = $dtype;
        }

        impl sealed::Number for $type {
            #[inline(always)]
            fn reduce_add(self, right: Self) -> Self {
                self + right
            }

            // Comparisons instead of `f32::min`: that leaves open which of two zeros, and drops NaNs.
            #[inline(always)]
            fn reduce_least(self, right: Self) -> Self {
                if self.is_nan() || !(right < self || right.is_nan()) {
                    self
                } else {
                    right
                }
            }

            #[inline(always)]
            fn reduce_most(self, right: Self) -> Self {
                if self.is_nan() || !(right > self || right.is_nan()) {
                    self
                } else {
                    right
                }
            }

            // A division and not a product with the reciprocal: 1/count is not exact unless it is a power of two.
            #[inline(always)]
            fn reduce_over(self, count: usize) -> Self {
                self / count as $type
            }
        }
    };
}

float!(f32, DType::F32);
float!(f64, DType::F64);

impl Element for i64 {
    const DTYPE: DType = DType::I64;
}

impl Element for u8 {
    const DTYPE: DType = DType::U8;
}

impl sealed::Number for u8 {
    fn reduce_add(self, right: Self) -> Self {
        self.wrapping_add(right)
    }
    fn reduce_least(self, right: Self) -> Self {
        self.min(right)
    }
    fn reduce_most(self, right: Self) -> Self {
        self.max(right)
    }
    fn reduce_over(self, count: usize) -> Self {
        self / count as u8
    }
}

impl sealed::Number for i64 {
    #[inline(always)]
    fn reduce_add(self, right: Self) -> Self {
        self.wrapping_add(right)
    }

    #[inline(always)]
    fn reduce_least(self, right: Self) -> Self {
        self.min(right)
    }

    #[inline(always)]
    fn reduce_most(self, right: Self) -> Self {
        self.max(right)
    }

    // Never reached: `Average` on integers is refused before an operation starts.
    #[inline(always)]
    fn reduce_over(self, count: usize) -> Self {
        self / count as i64
    }
}

#[cfg(test)]
mod tests {
    use super::sealed::Number;
    use super::*;

    #[test]
    fn codes_round_trip() {
        for dtype in [DType::F32, DType::F64, DType::I64] {
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
        }
        for op in [
            ReduceOp::Sum,
            ReduceOp::Average,
            ReduceOp::Min,
            ReduceOp::Max,
        ] {
            assert_eq!(ReduceOp::from_code(op.code()), Some(op));
        }
        assert_eq!(DType::from_code(0), None);
        assert_eq!(ReduceOp::from_code(9), None);
    }

    #[test]
    fn a_nan_on_either_side_survives_min_and_max() {
        for (left, right) in [(f32::NAN, 1.0), (1.0, f32::NAN), (f32::NAN, f32::NAN)] {
            assert!(left.reduce_least(right).is_nan() && left.reduce_most(right).is_nan());
        }
    }

    #[test]
    fn equal_zeros_keep_the_left_one() {
        assert_eq!((-0.0_f64).reduce_least(0.0).to_bits(), (-0.0_f64).to_bits());
        assert_eq!(0.0_f64.reduce_most(-0.0).to_bits(), 0.0_f64.to_bits());
    }

    #[test]
    fn integers_wrap() {
        assert_eq!(Number::reduce_add(i64::MAX, 1), i64::MIN);
    }
}
