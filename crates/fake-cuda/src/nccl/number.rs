//! Number types and their sums.

use half::{bf16, f16};

/// The types that tests send. *Source*: `ncclDataType_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Type {
    U8,
    F16,
    F32,
    Bf16,
}

impl Type {
    pub(crate) fn of(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::U8),
            6 => Some(Self::F16),
            7 => Some(Self::F32),
            9 => Some(Self::Bf16),
            _ => None,
        }
    }

    pub(crate) fn size(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// How two ranks' numbers become one. *Source*: `ncclRedOp_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fold {
    /// Each sum is rounded to its type.
    Sum,
    Max,
}

impl Fold {
    pub(crate) fn of(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Sum),
            2 => Some(Self::Max),
            _ => None,
        }
    }

    /// Folds another rank's numbers into these.
    pub(super) fn fold(self, into: &mut [u8], other: &[u8], kind: Type) {
        macro_rules! fold {
            ($type:ty, $add:expr, $max:expr) => {
                both(
                    into,
                    other,
                    <$type>::from_le_bytes,
                    <$type>::to_le_bytes,
                    match self {
                        Self::Sum => $add,
                        Self::Max => $max,
                    },
                )
            };
        }
        match kind {
            Type::U8 => fold!(u8, u8::wrapping_add, u8::max),
            Type::F16 => fold!(f16, |a, b| a + b, f16::max),
            Type::F32 => fold!(f32, |a, b| a + b, f32::max),
            Type::Bf16 => fold!(bf16, |a, b| a + b, bf16::max),
        }
    }
}

fn both<T, const N: usize>(
    into: &mut [u8],
    other: &[u8],
    read: fn([u8; N]) -> T,
    write: fn(T) -> [u8; N],
    add: fn(T, T) -> T,
) {
    let (into, other) = (into.as_chunks_mut().0, other.as_chunks().0);
    for (one, other) in into.iter_mut().zip(other) {
        *one = write(add(read(*one), read(*other)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_floats_are_rounded_at_every_sum() {
        let mut sum = bf16::from_f32(256.0).to_le_bytes();
        for _ in 0..4 {
            Fold::Sum.fold(&mut sum, &bf16::from_f32(1.0).to_le_bytes(), Type::Bf16);
        }
        assert_eq!(bf16::from_le_bytes(sum).to_f32(), 256.0);
    }
}
