//! Half precision to single and back. Without branches and questions about the processor, which the `half` crate asks at
//! each call, so that loops over these become vectors.

use half::{bf16, f16};

/// Exact; a NaN becomes a quiet one.
#[inline(always)]
pub(super) fn f16_to_f32(value: f16) -> f32 {
    /// Exponent bias of `f32` less that of `f16`, in place.
    const REBIAS: u32 = (127 - 15) << 23;
    /// 2^-14, the smallest normal number.
    const LEAST_NORMAL: u32 = (127 - 14) << 23;
    let bits = u32::from(value.to_bits());
    let magnitude = bits & 0x7FFF;
    let placed = magnitude << 13;
    let normal = placed + REBIAS;
    // Without a leading one the exponent would be one lower: put the one there and take it away again.
    let subnormal =
        (f32::from_bits(placed + LEAST_NORMAL) - f32::from_bits(LEAST_NORMAL)).to_bits();
    let quiet = if magnitude > 0x7C00 { 1 << 22 } else { 0 };
    let special = placed | 0xFF << 23 | quiet;
    let finite = if magnitude < 0x0400 {
        subnormal
    } else {
        normal
    };
    let unsigned = if magnitude >= 0x7C00 { special } else { finite };
    f32::from_bits(unsigned | (bits & 0x8000) << 16)
}

/// Rounds to nearest, ties to even; a NaN becomes a quiet one.
#[inline(always)]
pub(super) fn f32_to_f16(value: f32) -> f16 {
    /// 2^16, which no rounding brings back into range.
    const TOO_LARGE: u32 = (127 + 16) << 23;
    const LEAST_NORMAL: u32 = (127 - 14) << 23;
    /// 0.5: the last place of its mantissa is worth the smallest subnormal number, 2^-24.
    const HALF: u32 = 126 << 23;
    let bits = value.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    let odd = magnitude >> 13 & 1;
    let normal = magnitude
        .wrapping_sub((127 - 15) << 23)
        .wrapping_add(0x0FFF + odd)
        >> 13;
    // The addition rounds as it should.
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(HALF))
        .to_bits()
        .wrapping_sub(HALF);
    let special = if magnitude > 0x7F80_0000 {
        0x7E00 | magnitude >> 13 & 0x01FF
    } else {
        0x7C00
    };
    let finite = if magnitude < LEAST_NORMAL {
        subnormal
    } else {
        normal
    };
    let unsigned = if magnitude >= TOO_LARGE {
        special
    } else {
        finite
    };
    f16::from_bits((unsigned | bits >> 16 & 0x8000) as u16)
}

/// Exact.
#[inline(always)]
pub(super) fn bf16_to_f32(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Rounds to nearest, ties to even; a NaN becomes a quiet one.
#[inline(always)]
pub(super) fn f32_to_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    let nan = bits & 0x7FFF_FFFF > 0x7F80_0000;
    bf16::from_bits((if nan { quiet } else { rounded }) as u16)
}

/// To `f32` in such a way that rounding the result again to half precision rounds as if once.
///
/// What does not fit goes to the neighbour with an odd last place, which no later tie can mistake for exact.
/// *Source*: Boldo and Melquiond, "When double rounding is odd", 2005.
pub(super) fn f64_to_odd_f32(value: f64) -> f32 {
    let near = value as f32;
    let back = f64::from(near);
    let bits = near.to_bits();
    if back == value || value.is_nan() || bits & 1 == 1 {
        return near;
    }
    f32::from_bits(if back.abs() > value.abs() {
        bits - 1
    } else {
        bits + 1
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_as_in_the_half_crate() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (
                f16_to_f32(f16::from_bits(bits)),
                f16::from_bits(bits).to_f32(),
            );
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan());
            let (ours, theirs) = (
                bf16_to_f32(bf16::from_bits(bits)),
                bf16::from_bits(bits).to_f32(),
            );
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan());
        }
    }

    #[test]
    fn floats_round_to_halves_as_in_the_half_crate() {
        let step = if cfg!(miri) { 0x0010_0FFF } else { 0x0FFF };
        // Around every exponent and every place that rounds, ties included: the odd step hits all low bit patterns.
        for start in [0, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001_u32] {
            for bits in (start..=u32::MAX - step).step_by(step as usize) {
                let value = f32::from_bits(bits);
                for value in [
                    value,
                    f32::from_bits(bits & !0xFFF),
                    f32::from_bits(bits & !0x7FFF),
                ] {
                    let (ours, theirs) = (f32_to_f16(value), f16::from_f32(value));
                    assert!(
                        ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                        "{value:e} became {ours:?} and {theirs:?}"
                    );
                    let (ours, theirs) = (f32_to_bf16(value), bf16::from_f32(value));
                    assert!(
                        ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                        "{value:e} became {ours:?} and {theirs:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_double_rounds_to_a_half_as_if_once() {
        // Just above the middle between 1 and the next half; by way of the nearest f32 it would be a tie and go down.
        let above = 1.0 + 2.0_f64.powi(-11) + 2.0_f64.powi(-40);
        assert_eq!(f32_to_f16(above as f32), f16::ONE);
        assert_eq!(f32_to_f16(f64_to_odd_f32(above)), f16::ONE + f16::EPSILON);
        let below = 1.0 + 3.0 * 2.0_f64.powi(-11) - 2.0_f64.powi(-40);
        assert_eq!(f32_to_f16(f64_to_odd_f32(below)), f16::ONE + f16::EPSILON);
        for exact in [0.0, -0.0, 1.0, -0.375, f64::INFINITY] {
            assert_eq!(f64::from(f64_to_odd_f32(exact)).to_bits(), exact.to_bits());
        }
        assert!(f64_to_odd_f32(f64::NAN).is_nan());
        assert_eq!(f32_to_f16(f64_to_odd_f32(1e300)), f16::INFINITY);
        assert_eq!(f32_to_bf16(f64_to_odd_f32(-1e300)), bf16::NEG_INFINITY);
        assert_eq!(f32_to_bf16(f64_to_odd_f32(-1e-300)).to_bits(), 0x8000);
    }
}
