//! Vector registers of each instruction set.

use crate::activations::relu_gradient;

/// A register of values. Its operations are those of IEEE 754 for each value.
pub(crate) trait Register: Copy {
    /// Values in it.
    const LEN: usize;

    fn splat(value: f32) -> Self;
    /// The first values of a slice that has enough.
    fn load(from: &[f32]) -> Self;
    /// To the first values of a slice that has enough.
    fn store(self, to: &mut [f32]);
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    /// `self * factor + addend`, rounded once.
    fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// The values, with 0 where that of `output` is 0 or below.
    fn where_positive(self, output: Self) -> Self;
    /// Eight rows of eight values as their columns.
    fn transposed(rows: [&[f32; 8]; 8]) -> [[f32; 8]; 8];
}

/// Values that the compiler may put into registers, or not.
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; 8]);

impl Register for Portable {
    const LEN: usize = 8;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; 8])
    }

    #[inline(always)]
    fn load(from: &[f32]) -> Self {
        Self(from[..8].try_into().expect("eight values"))
    }

    #[inline(always)]
    fn store(self, to: &mut [f32]) {
        to[..8].copy_from_slice(&self.0);
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at] + other.0[at]))
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at] - other.0[at]))
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        let value = |at: usize| self.0[at].mul_add(factor.0[at], addend.0[at]);
        Self(std::array::from_fn(value))
    }

    #[inline(always)]
    fn where_positive(self, output: Self) -> Self {
        let value = |at: usize| relu_gradient(output.0[at], self.0[at]);
        Self(std::array::from_fn(value))
    }

    #[inline(always)]
    fn transposed(rows: [&[f32; 8]; 8]) -> [[f32; 8]; 8] {
        std::array::from_fn(|row| std::array::from_fn(|column| rows[column][row]))
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
#[expect(
    unsafe_code,
    reason = "instructions that not every processor has, in functions that no other runs"
)]
mod x86 {
    use std::arch::x86_64::*;

    use super::Register;

    // SAFETY, of all blocks below: only `Kernels` name these types, on processors that have the instructions. Loads and stores are
    // of as many values as the slice has, which is asserted.
    macro_rules! register {
        ($name:ident, $register:ty, $len:literal, $set:ident, $load:ident, $store:ident, $add:ident, $sub:ident, $fma:ident, $where_positive:ident) => {
            #[derive(Clone, Copy)]
            pub(crate) struct $name($register);

            impl Register for $name {
                const LEN: usize = $len;

                #[inline(always)]
                fn splat(value: f32) -> Self {
                    Self(unsafe { $set(value) })
                }

                #[inline(always)]
                fn load(from: &[f32]) -> Self {
                    assert!(from.len() >= $len);
                    Self(unsafe { $load(from.as_ptr()) })
                }

                #[inline(always)]
                fn store(self, to: &mut [f32]) {
                    assert!(to.len() >= $len);
                    unsafe { $store(to.as_mut_ptr(), self.0) }
                }

                #[inline(always)]
                fn add(self, other: Self) -> Self {
                    Self(unsafe { $add(self.0, other.0) })
                }

                #[inline(always)]
                fn sub(self, other: Self) -> Self {
                    Self(unsafe { $sub(self.0, other.0) })
                }

                #[inline(always)]
                fn mul_add(self, factor: Self, addend: Self) -> Self {
                    Self(unsafe { $fma(self.0, factor.0, addend.0) })
                }

                #[inline(always)]
                fn where_positive(self, output: Self) -> Self {
                    Self(unsafe { $where_positive(self.0, output.0) })
                }

                #[inline(always)]
                fn transposed(rows: [&[f32; 8]; 8]) -> [[f32; 8]; 8] {
                    unsafe { transposed(rows) }
                }
            }
        };
    }

    register!(
        Avx2,
        __m256,
        8,
        _mm256_set1_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_add_ps,
        _mm256_sub_ps,
        _mm256_fmadd_ps,
        where_positive_256
    );
    register!(
        Avx512,
        __m512,
        16,
        _mm512_set1_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_add_ps,
        _mm512_sub_ps,
        _mm512_fmadd_ps,
        where_positive_512
    );

    /// Both instruction sets have registers of eight values.
    #[inline(always)]
    unsafe fn transposed(rows: [&[f32; 8]; 8]) -> [[f32; 8]; 8] {
        // The halves of two rows in one register, so that no value has to cross to the other half later.
        macro_rules! halves {
            ($at:literal, $from:literal) => {
                _mm256_insertf128_ps::<1>(
                    _mm256_castps128_ps256(_mm_loadu_ps(rows[$at].as_ptr().add($from))),
                    _mm_loadu_ps(rows[$at + 4].as_ptr().add($from)),
                )
            };
        }
        macro_rules! four {
            ($from:literal) => {{
                let (a, b) = (halves!(0, $from), halves!(1, $from));
                let (c, d) = (halves!(2, $from), halves!(3, $from));
                let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
                let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
                [
                    _mm256_shuffle_ps::<0b01_00_01_00>(ab_low, cd_low),
                    _mm256_shuffle_ps::<0b11_10_11_10>(ab_low, cd_low),
                    _mm256_shuffle_ps::<0b01_00_01_00>(ab_high, cd_high),
                    _mm256_shuffle_ps::<0b11_10_11_10>(ab_high, cd_high),
                ]
            }};
        }
        unsafe {
            let ([a, b, c, d], [e, f, g, h]) = (four!(0), four!(4));
            let mut columns = [[0.0; 8]; 8];
            _mm256_storeu_ps(columns[0].as_mut_ptr(), a);
            _mm256_storeu_ps(columns[1].as_mut_ptr(), b);
            _mm256_storeu_ps(columns[2].as_mut_ptr(), c);
            _mm256_storeu_ps(columns[3].as_mut_ptr(), d);
            _mm256_storeu_ps(columns[4].as_mut_ptr(), e);
            _mm256_storeu_ps(columns[5].as_mut_ptr(), f);
            _mm256_storeu_ps(columns[6].as_mut_ptr(), g);
            _mm256_storeu_ps(columns[7].as_mut_ptr(), h);
            columns
        }
    }

    #[inline(always)]
    unsafe fn where_positive_256(values: __m256, output: __m256) -> __m256 {
        unsafe {
            let is_below = _mm256_cmp_ps::<_CMP_LE_OQ>(output, _mm256_setzero_ps());
            _mm256_andnot_ps(is_below, values)
        }
    }

    #[inline(always)]
    unsafe fn where_positive_512(values: __m512, output: __m512) -> __m512 {
        unsafe {
            let is_below = _mm512_cmp_ps_mask::<_CMP_LE_OQ>(output, _mm512_setzero_ps());
            _mm512_maskz_mov_ps(!is_below, values)
        }
    }
}
