//! Which vector instructions the fold uses: found once at run time, and what each set does by hand.
//!
//! Loops are written once over blocks of 64 bytes and compiled for each set of instructions; the compiler turns a block
//! into vectors. Only what it cannot reach by itself is written with intrinsics: stores that go around the caches, and
//! the conversion of half precision.

use half::f16;

use super::halves::{f16_to_f32, f32_to_f16};
use super::number::convert;

/// Size of a block, which is a cache line: what a streaming store needs at once, and aligned, to go around the caches.
///
/// *Units*: bytes.
pub(super) const LINE_BYTES: usize = 64;

/// A set of instructions that this machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    /// What every machine of the target has: SSE2 on x86-64, NEON on aarch64.
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// The widest set of this machine.
    pub(crate) fn best() -> Self {
        *Self::available()
            .last()
            .expect("every machine has the portable level")
    }

    /// All sets of this machine, narrowest first.
    pub(crate) fn available() -> &'static [Self] {
        // The standard library asks the processor once and keeps its answer.
        #[cfg(target_arch = "x86_64")]
        {
            if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("f16c") {
                if std::is_x86_feature_detected!("avx512f")
                    && std::is_x86_feature_detected!("avx512bw")
                    && std::is_x86_feature_detected!("avx512dq")
                    && std::is_x86_feature_detected!("avx512vl")
                {
                    return &[Self::Portable, Self::Avx2, Self::Avx512];
                }
                return &[Self::Portable, Self::Avx2];
            }
        }
        &[Self::Portable]
    }

    /// Does the work with this level's instructions.
    ///
    /// # Safety
    ///
    /// The machine has the level; what the work asks for.
    pub(super) unsafe fn run<W: Work>(self, work: W) {
        // SAFETY: the caller's contract.
        unsafe {
            match self {
                Self::Portable => work.work::<Portable>(),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2 => x86::with_avx2(work),
                #[cfg(target_arch = "x86_64")]
                Self::Avx512 => x86::with_avx512(work),
            }
        }
    }
}

/// A loop over memory that is compiled once for each set of instructions.
pub(super) trait Work {
    /// Implementations are `#[inline(always)]`, so that the loop takes on the features of the function it ends up in.
    ///
    /// # Safety
    ///
    /// The machine has the instructions of `I`; the pointers in `self` are good for what the implementation says.
    unsafe fn work<I: Isa>(self);
}

/// What the compiler does not find by itself, for one set of instructions.
pub(super) trait Isa {
    /// Stores a line around the caches.
    ///
    /// # Safety
    ///
    /// `to` is writable for a line and aligned to one; the machine has the instructions, as in all functions here.
    unsafe fn stream<B: Copy>(to: *mut u8, line: B);

    /// Exact. Both have the same length.
    ///
    /// # Safety
    ///
    /// As above.
    #[inline(always)]
    unsafe fn widen_f16(from: &[f16], to: &mut [f32]) {
        convert(from, to, f16_to_f32);
    }

    /// Rounds to nearest, ties to even. Both have the same length.
    ///
    /// # Safety
    ///
    /// As above.
    #[inline(always)]
    unsafe fn narrow_f16(from: &[f32], to: &mut [f16]) {
        convert(from, to, f32_to_f16);
    }
}

/// Orders streaming stores before whatever other threads are told next; ordinary releases do not.
pub(super) fn fence() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[derive(Debug)]
pub(super) struct Portable;

impl Isa for Portable {
    #[inline(always)]
    unsafe fn stream<B: Copy>(to: *mut u8, line: B) {
        debug_assert_eq!(size_of::<B>(), LINE_BYTES);
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: SSE2 is part of x86-64; a line has the size of four vectors; `to` as the contract says.
        unsafe {
            use std::arch::x86_64::{__m128i, _mm_stream_si128};
            let parts: [__m128i; 4] = std::mem::transmute_copy(&line);
            let to = to.cast::<__m128i>();
            for (index, part) in parts.into_iter().enumerate() {
                _mm_stream_si128(to.add(index), part);
            }
        }
        // SAFETY: as the contract says. Elsewhere no such store can be asked for.
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        unsafe {
            to.cast::<B>().write_unaligned(line);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::mem::transmute_copy;

    use half::f16;

    use super::{Isa, LINE_BYTES, Work};
    use crate::fold::halves::{f16_to_f32, f32_to_f16};
    use crate::fold::number::convert;

    /// # Safety
    ///
    /// The machine has AVX2 and F16C; what the work asks for.
    #[target_feature(enable = "avx2,f16c")]
    pub(super) unsafe fn with_avx2<W: Work>(work: W) {
        // SAFETY: the caller's contract.
        unsafe { work.work::<Avx2>() }
    }

    /// # Safety
    ///
    /// The machine has AVX-512 F, BW, DQ and VL; what the work asks for.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")]
    pub(super) unsafe fn with_avx512<W: Work>(work: W) {
        // SAFETY: the caller's contract.
        unsafe { work.work::<Avx512>() }
    }

    /// The conversions of half precision, by the instructions for `$n` numbers at once.
    macro_rules! halves {
        (
            $n:literal, $halves:ty, $load:ident, $store:ident,
            $widen:ident, $narrow:ident, $load_wide:ident, $store_wide:ident
        ) => {
            #[inline(always)]
            unsafe fn widen_f16(from: &[f16], to: &mut [f32]) {
                let (from, from_rest) = from.as_chunks::<$n>();
                let (to, to_rest) = to.as_chunks_mut::<$n>();
                for (to, from) in to.iter_mut().zip(from) {
                    // SAFETY: as many elements each; the machine has F16C, or AVX-512 F for 16.
                    unsafe {
                        let half: $halves = $load(from.as_ptr().cast());
                        $store_wide(to.as_mut_ptr(), $widen(half));
                    }
                }
                convert(from_rest, to_rest, f16_to_f32);
            }

            #[inline(always)]
            unsafe fn narrow_f16(from: &[f32], to: &mut [f16]) {
                let (from, from_rest) = from.as_chunks::<$n>();
                let (to, to_rest) = to.as_chunks_mut::<$n>();
                for (to, from) in to.iter_mut().zip(from) {
                    // SAFETY: as above.
                    unsafe {
                        let wide = $load_wide(from.as_ptr());
                        let half: $halves = $narrow::<_MM_FROUND_TO_NEAREST_INT>(wide);
                        $store(to.as_mut_ptr().cast(), half);
                    }
                }
                convert(from_rest, to_rest, f32_to_f16);
            }
        };
    }

    #[derive(Debug)]
    pub(in crate::fold) struct Avx2;

    impl Isa for Avx2 {
        #[inline(always)]
        unsafe fn stream<B: Copy>(to: *mut u8, line: B) {
            debug_assert_eq!(size_of::<B>(), LINE_BYTES);
            // SAFETY: a line has the size of two vectors; the rest is the caller's contract.
            unsafe {
                let [low, high]: [__m256i; 2] = transmute_copy(&line);
                _mm256_stream_si256(to.cast(), low);
                _mm256_stream_si256(to.add(32).cast(), high);
            }
        }

        halves!(
            8,
            __m128i,
            _mm_loadu_si128,
            _mm_storeu_si128,
            _mm256_cvtph_ps,
            _mm256_cvtps_ph,
            _mm256_loadu_ps,
            _mm256_storeu_ps
        );
    }

    #[derive(Debug)]
    pub(in crate::fold) struct Avx512;

    impl Isa for Avx512 {
        #[inline(always)]
        unsafe fn stream<B: Copy>(to: *mut u8, line: B) {
            debug_assert_eq!(size_of::<B>(), LINE_BYTES);
            // SAFETY: a line has the size of one vector; the rest is the caller's contract.
            unsafe { _mm512_stream_si512(to.cast(), transmute_copy(&line)) }
        }

        halves!(
            16,
            __m256i,
            _mm256_loadu_si256,
            _mm256_storeu_si256,
            _mm512_cvtph_ps,
            _mm512_cvtps_ph,
            _mm512_loadu_ps,
            _mm512_storeu_ps
        );
    }
}
