//! The loops of the fold, over blocks of one cache line and what is left after the last whole one.

use std::marker::PhantomData;

use super::isa::{Isa, LINE_BYTES, Work};
use super::number::{Combine, Finish, Number, Stored};

/// Brings elements to the type they are combined in.
pub(super) struct Widen<'a, T: Stored> {
    pub(super) from: &'a [T],
    pub(super) to: &'a mut [T::Wide],
}

impl<T: Stored> Work for Widen<'_, T> {
    #[inline(always)]
    unsafe fn work<I: Isa>(self) {
        // SAFETY: the caller's contract.
        unsafe { T::widen::<I>(self.from, self.to) }
    }
}

/// Brings elements back to the type they are stored in.
pub(super) struct Narrow<'a, T: Stored> {
    pub(super) from: &'a [T::Wide],
    pub(super) to: &'a mut [T],
}

impl<T: Stored> Work for Narrow<'_, T> {
    #[inline(always)]
    unsafe fn work<I: Isa>(self) {
        // SAFETY: the caller's contract.
        unsafe { T::narrow::<I>(self.from, self.to) }
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

/// The last combination of a fold: finishes `n` numbers and stores them. Outputs may be operands, as above.
pub(super) struct Last<'a, A: Number, M: Combine<A>, F: Finish<A>, const N: usize> {
    pub(super) left: *const A,
    pub(super) right: *const A,
    pub(super) sink: Sink<'a>,
    pub(super) n: usize,
    pub(super) finish: F,
    pub(super) merge: PhantomData<M>,
}

impl<A: Number, M: Combine<A>, F: Finish<A>, const N: usize> Work for Last<'_, A, M, F, N> {
    #[inline(always)]
    unsafe fn work<I: Isa>(self) {
        // SAFETY: as above, and so for the outputs.
        unsafe {
            let mut at = 0;
            while at + N <= self.n {
                let (left, right) = (get(self.left.add(at)), get(self.right.add(at)));
                let sum = combine::<A, M, N>(left, right);
                self.sink
                    .put::<I, A, N>(at, sum.map(|x| self.finish.finish(x)));
                at = next_block(at + N);
            }
            while at < self.n {
                let (left, right) = (get(self.left.add(at)), get(self.right.add(at)));
                let sum = combine::<A, M, 1>(left, right);
                self.sink
                    .put::<I, A, 1>(at, sum.map(|x| self.finish.finish(x)));
                at += 1;
            }
        }
    }
}

/// Finishes and stores the `n` numbers of a single input. Outputs may be the input.
pub(super) struct Single<'a, A: Number, F: Finish<A>, const N: usize> {
    pub(super) from: *const A,
    pub(super) sink: Sink<'a>,
    pub(super) n: usize,
    pub(super) finish: F,
}

impl<A: Number, F: Finish<A>, const N: usize> Work for Single<'_, A, F, N> {
    #[inline(always)]
    unsafe fn work<I: Isa>(self) {
        // SAFETY: as above.
        unsafe {
            let mut at = 0;
            while at + N <= self.n {
                let block: [A; N] = get(self.from.add(at));
                self.sink
                    .put::<I, A, N>(at, block.map(|x| self.finish.finish(x)));
                at = next_block(at + N);
            }
            while at < self.n {
                let block: [A; 1] = get(self.from.add(at));
                self.sink
                    .put::<I, A, 1>(at, block.map(|x| self.finish.finish(x)));
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

impl<'a> Sink<'a> {
    /// Ordinary stores, from where the outputs begin.
    pub(super) fn at_start(outputs: &'a [*mut u8]) -> Self {
        Self {
            outputs,
            first_byte: 0,
            streaming: false,
        }
    }

    /// # Safety
    ///
    /// Every output has `N` elements from `at` on, a multiple of `N` where `N` elements are a line; the machine has the
    /// instructions of `I`.
    #[inline(always)]
    unsafe fn put<I: Isa, T: Number, const N: usize>(&self, at: usize, block: [T; N]) {
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
