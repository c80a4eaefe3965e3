//! What operations must give, computed by one thread from the definitions.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses its own part"
)]

pub mod expected;

use paceline_collective::{DType, ReduceOp, bf16, f16};

pub use crate::common::assert_same;
use crate::common::{Bits, noise, reference};

/// A type under test: values made from noise, how two combine in the type that sums are kept in, and how a result is
/// rounded.
pub trait Tested: Bits {
    type Sum: Copy;

    fn make(noise: f32) -> Self;
    fn widen(self) -> Self::Sum;
    fn combine(op: ReduceOp, left: Self::Sum, right: Self::Sum) -> Self::Sum;
    fn finish(sum: Self::Sum, divide: Option<usize>) -> Self;
}

macro_rules! float {
    ($type:ty, $sum:ty, $widen:expr, $narrow:expr) => {
        impl Tested for $type {
            type Sum = $sum;

            fn make(noise: f32) -> Self {
                $narrow(noise as $sum)
            }

            fn widen(self) -> $sum {
                $widen(self)
            }

            fn combine(op: ReduceOp, left: $sum, right: $sum) -> $sum {
                match op {
                    ReduceOp::Sum | ReduceOp::Average => left + right,
                    ReduceOp::Product => left * right,
                    ReduceOp::Min if right < left => right,
                    ReduceOp::Max if right > left => right,
                    ReduceOp::Min | ReduceOp::Max => left,
                    other => panic!("no {other} of floats"),
                }
            }

            fn finish(sum: $sum, divide: Option<usize>) -> Self {
                $narrow(divide.map_or(sum, |count| sum / count as $sum))
            }
        }
    };
}

float!(f32, f32, |x| x, |x| x);
float!(f64, f64, |x| x, |x| x);
float!(f16, f32, |x: f16| x.to_f32(), f16::from_f32);
float!(bf16, f32, |x: bf16| x.to_f32(), bf16::from_f32);

macro_rules! integer {
    ($($type:ty),*) => {$(
        impl Tested for $type {
            type Sum = Self;

            fn make(noise: f32) -> Self {
                // All bits of the type, and both signs.
                (i64::from(noise.to_bits()).wrapping_mul(0x9E37_79B9_7F4A_7C15_u64 as i64) >> 7) as $type
            }

            fn widen(self) -> Self {
                self
            }

            fn combine(op: ReduceOp, left: Self, right: Self) -> Self {
                match op {
                    ReduceOp::Sum => left.wrapping_add(right),
                    ReduceOp::Product => left.wrapping_mul(right),
                    ReduceOp::Min => left.min(right),
                    ReduceOp::Max => left.max(right),
                    ReduceOp::BitAnd => left & right,
                    ReduceOp::BitOr => left | right,
                    ReduceOp::BitXor => left ^ right,
                    other => panic!("no {other} of integers"),
                }
            }

            fn finish(sum: Self, _: Option<usize>) -> Self {
                sum
            }

        }
    )*};
}

integer!(i64, i32, i8, u8);

impl Tested for bool {
    type Sum = Self;

    fn make(noise: f32) -> Self {
        noise.to_bits() & 4 != 0
    }

    fn widen(self) -> Self {
        self
    }

    fn combine(op: ReduceOp, left: Self, right: Self) -> Self {
        match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => left | right,
            ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => left & right,
            ReduceOp::BitXor => left ^ right,
            other => panic!("no {other} of bools"),
        }
    }

    fn finish(sum: Self, _: Option<usize>) -> Self {
        sum
    }
}

/// The reductions that the type has.
pub fn reductions<T: Tested>() -> impl Iterator<Item = ReduceOp> {
    let float = matches!(T::DTYPE, DType::F64 | DType::F32 | DType::F16 | DType::BF16);
    [
        ReduceOp::Sum,
        ReduceOp::Average,
        ReduceOp::Product,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::BitAnd,
        ReduceOp::BitOr,
        ReduceOp::BitXor,
    ]
    .into_iter()
    .filter(move |op| match op {
        ReduceOp::Average => float,
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => !float,
        _ => true,
    })
}

pub fn values<T: Tested>(leaf: usize, len: usize) -> Vec<T> {
    noise(leaf, len).into_iter().map(T::make).collect()
}

/// The reduction of the leaves' values over the fixed tree.
pub fn reduced<T: Tested>(op: ReduceOp, leaves: usize, len: usize) -> Vec<T> {
    let inputs: Vec<Vec<T::Sum>> = (0..leaves)
        .map(|leaf| values::<T>(leaf, len).into_iter().map(T::widen).collect())
        .collect();
    let sums = reference(&inputs, &|left, right| T::combine(op, left, right));
    let divide = (op == ReduceOp::Average).then_some(leaves);
    sums.into_iter().map(|sum| T::finish(sum, divide)).collect()
}
