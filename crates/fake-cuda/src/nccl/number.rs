//! Types of numbers, and how two of them are reduced to one.

use half::{bf16, f16};

/// *Source*: `ncclDataType_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Type {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
}

/// *Source*: `ncclRedOp_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reduction {
    Sum,
    Prod,
    Max,
    Min,
    Avg,
}

impl Type {
    pub(crate) fn of(number: u32) -> Option<Self> {
        const ALL: [Type; 10] = {
            use Type::*;
            [I8, U8, I32, U32, I64, U64, F16, F32, F64, Bf16]
        };
        ALL.get(number as usize).copied()
    }

    pub(crate) fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }
}

impl Reduction {
    pub(crate) fn of(number: u32) -> Option<Self> {
        let all = [Self::Sum, Self::Prod, Self::Max, Self::Min, Self::Avg];
        all.get(number as usize).copied()
    }
}

/// What is done to each rank's numbers before they meet those of others: for an average of floats, they are divided first.
///
/// *Source*: NCCL's `ncclDevPreMulSum`, which it takes for averages of floats.
pub(super) fn before(bytes: &mut [u8], kind: Type, reduction: Reduction, world: usize) {
    if reduction != Reduction::Avg {
        return;
    }
    let share = 1.0 / world as f64;
    match kind {
        Type::F16 => each(bytes, |number: f16| number * f16::from_f64(share)),
        Type::Bf16 => each(bytes, |number: bf16| number * bf16::from_f64(share)),
        Type::F32 => each(bytes, |number: f32| number * share as f32),
        Type::F64 => each(bytes, |number: f64| number * share),
        _ => {}
    }
}

/// What is done to the result: for an average of integers, it is divided.
///
/// *Source*: NCCL's `ncclDevSumPostDiv`.
pub(super) fn after(bytes: &mut [u8], kind: Type, reduction: Reduction, world: usize) {
    if reduction != Reduction::Avg {
        return;
    }
    match kind {
        Type::I8 => each(bytes, |number: i8| (i64::from(number) / world as i64) as i8),
        Type::U8 => each(bytes, |number: u8| (u64::from(number) / world as u64) as u8),
        Type::I32 => each(bytes, |number: i32| {
            (i64::from(number) / world as i64) as i32
        }),
        Type::U32 => each(bytes, |number: u32| {
            (u64::from(number) / world as u64) as u32
        }),
        Type::I64 => each(bytes, |number: i64| number / world as i64),
        Type::U64 => each(bytes, |number: u64| number / world as u64),
        Type::F16 | Type::F32 | Type::F64 | Type::Bf16 => {}
    }
}

/// Reduces the numbers of two ranks into the first's place.
pub(super) fn reduce(into: &mut [u8], other: &[u8], kind: Type, reduction: Reduction) {
    macro_rules! reduce {
        ($type:ty, $add:expr, $multiply:expr) => {
            match reduction {
                Reduction::Sum | Reduction::Avg => both(into, other, $add),
                Reduction::Prod => both(into, other, $multiply),
                Reduction::Max => both(into, other, |one: $type, other: $type| one.max(other)),
                Reduction::Min => both(into, other, |one: $type, other: $type| one.min(other)),
            }
        };
    }
    match kind {
        Type::I8 => reduce!(i8, i8::wrapping_add, i8::wrapping_mul),
        Type::U8 => reduce!(u8, u8::wrapping_add, u8::wrapping_mul),
        Type::I32 => reduce!(i32, i32::wrapping_add, i32::wrapping_mul),
        Type::U32 => reduce!(u32, u32::wrapping_add, u32::wrapping_mul),
        Type::I64 => reduce!(i64, i64::wrapping_add, i64::wrapping_mul),
        Type::U64 => reduce!(u64, u64::wrapping_add, u64::wrapping_mul),
        Type::F16 => reduce!(
            f16,
            |one: f16, other: f16| one + other,
            |one: f16, other: f16| one * other
        ),
        Type::F32 => reduce!(
            f32,
            |one: f32, other: f32| one + other,
            |one: f32, other: f32| one * other
        ),
        Type::F64 => reduce!(
            f64,
            |one: f64, other: f64| one + other,
            |one: f64, other: f64| one * other
        ),
        Type::Bf16 => reduce!(
            bf16,
            |one: bf16, other: bf16| one + other,
            |one: bf16, other: bf16| one * other
        ),
    }
}

/// A number that is read from and written to bytes.
trait Number: Copy {
    fn read(bytes: &[u8]) -> Self;
    fn write(self, bytes: &mut [u8]);
}

macro_rules! numbers {
    ($($type:ty),*) => {
        $(impl Number for $type {
            fn read(bytes: &[u8]) -> Self {
                let mut own = [0; size_of::<$type>()];
                own.copy_from_slice(bytes);
                Self::from_le_bytes(own)
            }

            fn write(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_le_bytes());
            }
        })*
    };
}
numbers!(i8, u8, i32, u32, i64, u64, f16, f32, f64, bf16);

fn each<T: Number>(bytes: &mut [u8], change: impl Fn(T) -> T) {
    for number in bytes.chunks_exact_mut(size_of::<T>()) {
        change(T::read(number)).write(number);
    }
}

fn both<T: Number>(into: &mut [u8], other: &[u8], join: impl Fn(T, T) -> T) {
    let size = size_of::<T>();
    for (one, other) in into.chunks_exact_mut(size).zip(other.chunks_exact(size)) {
        join(T::read(one), T::read(other)).write(one);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_divided_after_and_floats_before() {
        let mut halves = 3.0_f32.to_le_bytes();
        before(&mut halves, Type::F32, Reduction::Avg, 2);
        after(&mut halves, Type::F32, Reduction::Avg, 2);
        assert_eq!(f32::from_le_bytes(halves), 1.5);
        let mut sevens = 7_i64.to_le_bytes();
        before(&mut sevens, Type::I64, Reduction::Avg, 2);
        assert_eq!(i64::from_le_bytes(sevens), 7);
        after(&mut sevens, Type::I64, Reduction::Avg, 2);
        assert_eq!(i64::from_le_bytes(sevens), 3);
    }

    #[test]
    fn short_floats_are_rounded_at_every_sum() {
        let mut sum = bf16::from_f32(256.0).to_le_bytes();
        for _ in 0..4 {
            reduce(
                &mut sum,
                &bf16::from_f32(1.0).to_le_bytes(),
                Type::Bf16,
                Reduction::Sum,
            );
        }
        assert_eq!(bf16::from_le_bytes(sum).to_f32(), 256.0);
    }
}
