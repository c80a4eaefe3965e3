//! The numbers that can be reduced, and the ways to combine two of them.

use std::fmt;
use std::mem::discriminant;

use half::{bf16, f16};

use crate::named::named;

named! {
    /// Type of the numbers in a buffer.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum DType: 9 {
        /// 64-bit IEEE 754.
        F64 = 2, "f64";
        /// 32-bit IEEE 754.
        F32 = 1, "f32";
        /// 16-bit IEEE 754.
        F16 = 4, "f16";
        /// The upper half of an [`F32`](Self::F32): its range with 8 bits of precision.
        BF16 = 5, "bf16";
        /// 64-bit two's complement.
        I64 = 3, "i64";
        /// 32-bit two's complement.
        I32 = 6, "i32";
        /// 8-bit two's complement.
        I8 = 7, "i8";
        /// Bytes.
        U8 = 8, "u8";
        /// Truth values: a byte that is 0 or 1.
        Bool = 9, "bool";
    }
}

impl DType {
    /// Size of one element.
    ///
    /// *Units*: bytes.
    pub fn bytes(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }

    /// Whether the numbers have fractions.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::F16 | Self::BF16)
    }

    /// The name with its article.
    fn one(self) -> String {
        let article = match self {
            Self::BF16 | Self::U8 | Self::Bool => "a",
            Self::F64 | Self::F32 | Self::F16 | Self::I64 | Self::I32 | Self::I8 => "an",
        };
        format!("{article} {self}")
    }
}

/// How the ranks' numbers are combined.
///
/// *Numerics*: `f64`, `f32` and integers are combined in their own type, floats with one rounding per operation. `f16`
/// and `bf16` are combined in `f32` over the whole reduction and rounded once at its end, to nearest and ties to even.
/// Integers wrap around. Of `bool`, sum and maximum mean "or", product and minimum mean "and".
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The sum, divided once by the number of leaves of the tree. Refused for integers, as Gloo does.
    Average,
    /// The product.
    Product,
    /// The smallest; a NaN anywhere gives a NaN, and of equal zeros the leftmost stays.
    Min,
    /// The largest; a NaN anywhere gives a NaN, and of equal zeros the leftmost stays.
    Max,
    /// Bits that are set everywhere; integers and `bool` only.
    BitAnd,
    /// Bits that are set anywhere; integers and `bool` only.
    BitOr,
    /// Bits that are set an odd number of times; integers and `bool` only.
    BitXor,
    /// The sum of every rank's numbers times this factor, which may differ between ranks. Refused for integers.
    ///
    /// *Numerics*: the factor is rounded once to the type of the numbers, and so is each product before the sum
    /// begins, that of `f16` and `bf16` being computed in `f32`. *Source*: `ncclRedOpCreatePreMulSum`.
    PreMulSum(f64),
}

impl ReduceOp {
    /// Whether the combination makes sense, or why not.
    ///
    /// *Errors*: averages and factors of numbers without fractions; bits of floats.
    pub fn check(self, dtype: DType) -> Result<(), String> {
        match self {
            Self::Average if !dtype.is_float() => {
                Err(format!("an average of {dtype} is not {}", dtype.one()))
            }
            Self::PreMulSum(_) if !dtype.is_float() => Err(format!(
                "{} times a factor is not {}",
                dtype.one(),
                dtype.one()
            )),
            Self::BitAnd | Self::BitOr | Self::BitXor if dtype.is_float() => {
                Err(format!("a {self} of {dtype} is not a number"))
            }
            _ => Ok(()),
        }
    }

    /// The reduction as ranks compare it: factors are every rank's own.
    pub(crate) fn compared(self) -> Self {
        match self {
            Self::PreMulSum(_) => Self::PreMulSum(1.0),
            other => other,
        }
    }

    /// All of them with their names, in the order of their codes from 1.
    const CODED: [(Self, &str); 9] = [
        (Self::Sum, "sum"),
        (Self::Average, "average"),
        (Self::Min, "min"),
        (Self::Max, "max"),
        (Self::Product, "product"),
        (Self::BitAnd, "bitwise and"),
        (Self::BitOr, "bitwise or"),
        (Self::BitXor, "bitwise xor"),
        (Self::PreMulSum(1.0), "premultiplied sum"),
    ];

    fn place(self) -> usize {
        let is_it = |(op, _): &(Self, &str)| discriminant(op) == discriminant(&self);
        let place = Self::CODED.iter().position(is_it);
        place.expect("every reduction is in the table")
    }

    pub(crate) fn code(self) -> u8 {
        self.place() as u8 + 1
    }

    /// The reduction as ranks [compare](Self::compared) it.
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        let (op, _) = Self::CODED.get(usize::from(code).checked_sub(1)?)?;
        Some(*op)
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::CODED[self.place()].1)
    }
}

mod sealed {
    /// Keeps [`Element`](super::Element) to the types whose kernels exist.
    pub trait Sealed {}
}

/// A type of number that collectives move and reduce: `f64`, `f32`, [`struct@f16`], [`bf16`], `i64`, `i32`, `i8`, `u8` or
/// `bool`.
///
/// Zero bytes are a value of each type, and every bit pattern is one except of `bool`, whose byte is 0 or 1. That is
/// what lets buffers live in memory that other ranks write. Reductions of `bool` write nothing but 0 and 1, whatever
/// they read; after a transfer that only copies, the group makes every byte that is not 0 a 1 before anybody reads it
/// as a `bool`.
///
/// *Numerics*: those of [`ReduceOp`].
pub trait Element:
    sealed::Sealed + Copy + Default + PartialEq + fmt::Debug + Send + Sync + 'static
{
    /// The type's tag in headers.
    const DTYPE: DType;
}

macro_rules! element {
    ($($type:ty => $dtype:ident),*) => {$(
        impl sealed::Sealed for $type {}

        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

element!(f64 => F64, f32 => F32, f16 => F16, bf16 => BF16, i64 => I64, i32 => I32, i8 => I8, u8 => U8, bool => Bool);

/// Makes memory that peers wrote fit to be read as `bool`: whatever is not 0 becomes 1.
pub(crate) fn normalise_bools(bytes: &mut [u8]) {
    for byte in bytes {
        *byte = u8::from(*byte != 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
        }
        let known: Vec<u8> = (0..=u8::MAX)
            .filter(|code| DType::from_code(*code).is_some())
            .collect();
        assert_eq!(known, [1, 2, 3, 4, 5, 6, 7, 8, 9]);
        for code in 0..=u8::MAX {
            let op = ReduceOp::from_code(code);
            assert_eq!(op.is_some(), (1..=9).contains(&code));
            assert!(op.is_none_or(|op| op.code() == code && op.compared() == op));
        }
    }

    #[test]
    fn a_factor_is_not_compared() {
        let (left, right) = (ReduceOp::PreMulSum(0.5), ReduceOp::PreMulSum(f64::NAN));
        assert_eq!(left.compared(), right.compared());
        assert_eq!(ReduceOp::from_code(left.code()), Some(left.compared()));
        assert_ne!(left.compared(), ReduceOp::Sum.compared());
    }

    #[test]
    fn senseless_combinations_are_refused_in_words() {
        let words = |op: ReduceOp, dtype| op.check(dtype).unwrap_err();
        assert_eq!(
            words(ReduceOp::Average, DType::I64),
            "an average of i64 is not an i64"
        );
        assert_eq!(
            words(ReduceOp::Average, DType::Bool),
            "an average of bool is not a bool"
        );
        assert_eq!(
            words(ReduceOp::PreMulSum(0.5), DType::U8),
            "a u8 times a factor is not a u8"
        );
        assert_eq!(
            words(ReduceOp::BitXor, DType::BF16),
            "a bitwise xor of bf16 is not a number"
        );
        for dtype in DType::ALL {
            for code in 1..=9 {
                let op = ReduceOp::from_code(code).unwrap();
                let fractions = matches!(op, ReduceOp::Average | ReduceOp::PreMulSum(_));
                let bits = matches!(op, ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor);
                let sense = if dtype.is_float() { !bits } else { !fractions };
                assert_eq!(op.check(dtype).is_ok(), sense, "{op} of {dtype}");
            }
        }
    }

    #[test]
    fn sizes_are_those_of_the_types() {
        fn same<T: Element>() -> bool {
            T::DTYPE.bytes() == size_of::<T>()
        }
        assert!(same::<f64>() && same::<f32>() && same::<f16>() && same::<bf16>());
        assert!(same::<i64>() && same::<i32>() && same::<i8>() && same::<u8>() && same::<bool>());
    }

    #[test]
    fn every_byte_but_zero_is_true() {
        let mut bytes = [0, 1, 2, 0x80, 0xFF];
        normalise_bools(&mut bytes);
        assert_eq!(bytes, [0, 1, 1, 1, 1]);
    }
}
