//! The loops of the fold, over blocks of one cache line and what is left after the last whole one.

use std::marker::PhantomData;

use super::isa::{Isa, LINE_BYTES, Work};
use super::number::{Combine, Finish, Number, Stored};

/// Brings `n` elements to the type they are combined in.
pub(super) struct Widen<T: Stored, const N: usize> {
    pub(super) from: *const T,
    pub(super) to: *mut T::Wide,
    pub(super) n: usize,
}

impl<T: Stored, const N: usize> Work for Widen<T, N> {
    #[inline(always)]
    unsafe fn work<I: Isa>(self) {
        // SAFETY: blocks and single elements lie within the `n` elements of both pointers.
        unsafe {
            let mut at = 0;
            while at + N <= self.n {
                put(self.to.add(at), T::widen::<I, N>(get(self.from.add(at))));
                at = next_block(at + N);
            }
            while at < self.n {
                put(self.to.add(at), T::widen::<I, 1>(get(self.from.add(at))));
                at += 1;
            }
        }
    }
}

/// Combines `n` numbers. `to` may be either operand: every block is read before it is written.
pub(super) struct Merge<A: Number, M: Combine<A>, const N: usize> {
    pub(super) left: *const A,
    pub(super) right: *const A,
    pub(super) to: *mut A,
    pub(super) n: usize,
    pub(super) merge: PhantomData<M>,
}

impl<A: Number, M: Combine<A>, const N: usize> Work for Merge<A, M, N> {
    #[inline(always)]
    unsafe fn work<I: Isa>(self) {
        // SAFETY: as above.
        unsafe {
            let mut at = 0;
            while at + N <= self.n {
                let (left, right) = (get(self.left.add(at)), get(self.right.add(at)));
                put(self.to.add(at), combine::<A, M, N>(left, right));
                at = next_block(at + N);
            }
            while at < self.n {
                let (left, right) = (get(self.left.add(at)), get(self.right.add(at)));
                put(self.to.add(at), combine::<A, M, 1>(left, right));
                at += 1;
            }
        }
    }
}

/// The last combination of a fold: finishes `n` numbers and stores them.
pub(super) struct Last<'a, T: Stored, M: Combine<T::Wide>, F: Finish<T::Wide>, const N: usize> {
    pub(super) left: *const T::Wide,
    pub(super) right: *const T::Wide,
    pub(super) sink: Sink<'a>,
    pub(super) n: usize,
    pub(super) finish: F,
    pub(super) merge: PhantomData<(T, M)>,
}

impl<T: Stored, M: Combine<T::Wide>, F: Finish<T::Wide>, const N: usize> Work
    for Last<'_, T, M, F, N>
{
    #[inline(always)]
    unsafe fn work<I: Isa>(self) {
        // SAFETY: as above, and so for the outputs.
        unsafe {
            let mut at = 0;
            while at + N <= self.n {
                let (left, right) = (get(self.left.add(at)), get(self.right.add(at)));
                let sum = combine::<T::Wide, M, N>(left, right);
                self.sink
                    .put::<I, T, N>(at, finish::<I, T, F, N>(sum, self.finish));
                at = next_block(at + N);
            }
            while at < self.n {
                let (left, right) = (get(self.left.add(at)), get(self.right.add(at)));
                let sum = combine::<T::Wide, M, 1>(left, right);
                self.sink
                    .put::<I, T, 1>(at, finish::<I, T, F, 1>(sum, self.finish));
                at += 1;
            }
        }
    }
}

/// Finishes and stores the `n` elements of a single input.
pub(super) struct Single<'a, T: Stored, F: Finish<T::Wide>, const N: usize> {
    pub(super) from: *const T,
    pub(super) sink: Sink<'a>,
    pub(super) n: usize,
    pub(super) finish: F,
}

impl<T: Stored, F: Finish<T::Wide>, const N: usize> Work for Single<'_, T, F, N> {
    #[inline(always)]
    unsafe fn work<I: Isa>(self) {
        // SAFETY: as above.
        unsafe {
            let mut at = 0;
            while at + N <= self.n {
                let wide = T::widen::<I, N>(get(self.from.add(at)));
                self.sink
                    .put::<I, T, N>(at, finish::<I, T, F, N>(wide, self.finish));
                at = next_block(at + N);
            }
            while at < self.n {
                let wide = T::widen::<I, 1>(get(self.from.add(at)));
                self.sink
                    .put::<I, T, 1>(at, finish::<I, T, F, 1>(wide, self.finish));
                at += 1;
            }
        }
    }
}

/// Where results go: the same place in every output.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sink<'a> {
    pub(super) outputs: &'a [*mut u8],
    /// The place.
    pub(super) first_byte: usize,
    /// Around the caches; every output is aligned to a line at `first_byte`.
    pub(super) streaming: bool,
}

impl Sink<'_> {
    /// # Safety
    ///
    /// Every output has `N` elements from `at` on, a multiple of `N` where `N` elements are a line; the machine has the
    /// instructions of `I`.
    #[inline(always)]
    unsafe fn put<I: Isa, T: Stored, const N: usize>(&self, at: usize, block: [T; N]) {
        for output in self.outputs {
            // SAFETY: the caller's contract, and the alignment of a streaming sink.
            unsafe {
                let to = output.add(self.first_byte).cast::<T>().add(at);
                if self.streaming && size_of::<[T; N]>() == LINE_BYTES {
                    I::stream(to.cast(), block);
                } else {
                    put(to, block);
                }
            }
        }
    }
}

/// The compiler turns each block into vectors. Seeing through the loop over blocks it would go on to make vectors of
/// elements a line apart, which took six times as long with AVX-512; an index that it knows nothing of stops that.
#[inline(always)]
fn next_block(at: usize) -> usize {
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    {
        let mut at = at;
        // SAFETY: no instructions.
        unsafe {
            std::arch::asm!("/* {0} */", inout(reg) at, options(pure, nomem, nostack, preserves_flags));
        }
        at
    }
    #[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
    at
}

/// # Safety
///
/// `from` has `N` initialised elements.
#[inline(always)]
unsafe fn get<T: Copy, const N: usize>(from: *const T) -> [T; N] {
    // SAFETY: the caller's contract.
    unsafe { from.cast::<[T; N]>().read_unaligned() }
}

/// # Safety
///
/// `to` has room for `N` elements.
#[inline(always)]
unsafe fn put<T: Copy, const N: usize>(to: *mut T, block: [T; N]) {
    // SAFETY: the caller's contract.
    unsafe { to.cast::<[T; N]>().write_unaligned(block) }
}

#[inline(always)]
fn combine<A: Copy, M: Combine<A>, const N: usize>(mut left: [A; N], right: [A; N]) -> [A; N] {
    for (left, right) in left.iter_mut().zip(right) {
        *left = M::combine(*left, right);
    }
    left
}

/// # Safety
///
/// The machine has the instructions of `I`.
#[inline(always)]
unsafe fn finish<I: Isa, T: Stored, F: Finish<T::Wide>, const N: usize>(
    block: [T::Wide; N],
    finish: F,
) -> [T; N] {
    // SAFETY: the caller's contract.
    unsafe { T::narrow::<I, N>(block.map(|value| finish.finish(value))) }
}
