//! Multiplies a rank's own numbers with its factor.

use half::{bf16, f16};

use super::halves::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16, f64_to_odd_f32};
use super::isa::Level;
use super::number::{Stored, Times};
use super::work::{Narrow, Single, Sink, Widen};
use crate::element::DType;

/// Multiplies a rank's own numbers with its factor, in front of the sum of a [`PreMulSum`](crate::ReduceOp::PreMulSum).
///
/// *Numerics*: the factor is rounded once to `dtype`, and so is each product; those of `f16` and `bf16` are computed in
/// `f32`.
///
/// # Safety
///
/// `from` is readable and `to` writable for `len` elements, both aligned for `dtype`; they are the same or do not
/// overlap. Nobody else touches them.
pub(crate) unsafe fn premultiply(
    dtype: DType,
    from: *const u8,
    to: *mut u8,
    len: usize,
    factor: f64,
) {
    // SAFETY: the caller's contract; the best level is one that the machine has.
    unsafe { premultiply_at(Level::best(), dtype, from, to, len, factor) }
}

/// # Safety
///
/// As [`premultiply`], and the machine has the level.
pub(super) unsafe fn premultiply_at(
    level: Level,
    dtype: DType,
    from: *const u8,
    to: *mut u8,
    len: usize,
    factor: f64,
) {
    // Rounded to a half and back, so that the factor is one.
    let odd = f64_to_odd_f32(factor);
    // SAFETY: the caller's contract; the types match the dtype.
    unsafe {
        match dtype {
            DType::F64 => scale::<f64, 8>(level, from, to, len, factor),
            DType::F32 => scale::<f32, 16>(level, from, to, len, factor as f32),
            DType::F16 => {
                let factor = f16_to_f32(f32_to_f16(odd));
                scale::<f16, 16>(level, from, to, len, factor);
            }
            DType::BF16 => {
                let factor = bf16_to_f32(f32_to_bf16(odd));
                scale::<bf16, 16>(level, from, to, len, factor);
            }
            DType::I64 | DType::I32 | DType::I8 | DType::U8 | DType::Bool => {
                unreachable!("a factor of {dtype} is refused before it starts")
            }
        }
    }
}

/// # Safety
///
/// As [`premultiply_at`]; `T` is the type of the elements.
unsafe fn scale<T: Stored, const N: usize>(
    level: Level,
    from: *const u8,
    to: *mut u8,
    len: usize,
    factor: T::Wide,
) {
    let (from, to) = (from.cast::<T>(), to.cast::<T>());
    let finish = Times(factor);
    // SAFETY: the caller's contract; what is widened lies in memory of its own.
    unsafe {
        if T::PLAIN {
            level.run(Single::<T::Wide, _, N> {
                from: from.cast(),
                sink: Sink::at_start(&[to.cast()]),
                n: len,
                finish,
            });
            return;
        }
        let mut wide = [factor; 512];
        for first in (0..len).step_by(wide.len()) {
            let n = wide.len().min(len - first);
            level.run(Widen::<T> {
                from: std::slice::from_raw_parts(from.add(first), n),
                to: &mut wide[..n],
            });
            let start = wide.as_mut_ptr();
            level.run(Single::<T::Wide, _, N> {
                from: start,
                sink: Sink::at_start(&[start.cast()]),
                n,
                finish,
            });
            level.run(Narrow::<T> {
                from: &wide[..n],
                to: std::slice::from_raw_parts_mut(to.add(first), n),
            });
        }
    }
}
