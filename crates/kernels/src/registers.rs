//! Vector registers of each instruction set.

use std::mem::MaybeUninit;

/// A register of values. Its operations are those of IEEE 754 for each value.
pub(crate) trait Register: Copy {
    /// Values in it.
    const LEN: usize;

    fn splat(value: f32) -> Self;
    /// The first values of a slice that has enough.
    fn load(from: &[f32]) -> Self;
    /// To the first values of a slice that has enough.
    fn store(self, to: &mut [f32]);
    /// [`store`](Self::store) to values that were never written.
    fn write(self, to: &mut [MaybeUninit<f32>]);
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    /// `self * factor + addend`, rounded once.
    fn mul_add(self, factor: Self, addend: Self) -> Self;
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
    fn write(self, to: &mut [MaybeUninit<f32>]) {
        to[..8].write_copy_of_slice(&self.0);
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
    use std::mem::MaybeUninit;

    use super::Register;

    // SAFETY, of all blocks below: only `Kernels` name these types, on processors that have the instructions. Loads and stores are
    // of as many values as the slice has, which is asserted.
    macro_rules! register {
        ($name:ident, $register:ty, $len:literal, $set:ident, $load:ident, $store:ident, $add:ident, $sub:ident, $fma:ident) => {
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
                fn write(self, to: &mut [MaybeUninit<f32>]) {
                    assert!(to.len() >= $len);
                    unsafe { $store(to.as_mut_ptr().cast(), self.0) }
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
        _mm256_fmadd_ps
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
        _mm512_fmadd_ps
    );
}
