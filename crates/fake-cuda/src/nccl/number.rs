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

/// Adds another rank's numbers; each sum is rounded to its type.
pub(super) fn add(into: &mut [u8], other: &[u8], kind: Type) {
    macro_rules! sum {
        ($type:ty, $add:expr) => {
            both(
                into,
                other,
                <$type>::from_le_bytes,
                <$type>::to_le_bytes,
                $add,
            )
        };
    }
    match kind {
        Type::U8 => sum!(u8, u8::wrapping_add),
        Type::F16 => sum!(f16, |a, b| a + b),
        Type::F32 => sum!(f32, |a, b| a + b),
        Type::Bf16 => sum!(bf16, |a, b| a + b),
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
            add(&mut sum, &bf16::from_f32(1.0).to_le_bytes(), Type::Bf16);
        }
        assert_eq!(bf16::from_le_bytes(sum).to_f32(), 256.0);
    }
}
