//! Work that is split over threads: always over outputs, so that the bits do not depend on their number.

use std::cell::OnceCell;
use std::mem::MaybeUninit;
use std::ops::Range;

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Tasks for each thread, because threads may start late or be slowed down.
const TASKS_EACH: usize = 2;
/// Multiplications below which waking other threads takes longer than they save.
const WORK_MIN: usize = 1 << 17;

thread_local! {
    /// The pool that this thread is one of, for as long as the thread runs.
    static OWN: OnceCell<Option<ThreadPool>> = const { OnceCell::new() };
}

/// Lets the calling thread compute its share of kernels, and of whatever else it does with rayon, from now on: it becomes one of the threads of a
/// pool of its own, as large as the current one. Otherwise it sleeps until threads of the global pool have done all of it, and each kernel waits for
/// both to wake up: with two threads a step of ResNet-20 takes a tenth longer. The first call of a thread counts; one that is in a pool stays there.
///
/// Meant for a thread that trains. If no threads can be started, everything stays as it was.
pub fn compute_here() {
    OWN.with(|own| {
        own.get_or_init(|| {
            let threads = rayon::current_num_threads();
            let pool = ThreadPoolBuilder::new().num_threads(threads);
            pool.use_current_thread().build().ok()
        });
    });
}

/// Calls `work` with parts of `out`, and with the number of the first unit of each: a unit is `unit` elements. `cost` are the
/// multiplications of all.
pub(crate) fn each_mut<T: Send>(
    out: &mut [T],
    unit: usize,
    cost: usize,
    work: impl Fn(usize, &mut [T]) + Sync,
) {
    let mut nothing = vec![(); out.len().div_ceil(unit.max(1))];
    let work = |first: usize, out: &mut [T], _: &mut [()]| work(first, out);
    each_pair_mut((out, unit), (&mut nothing, 1), cost, work);
}

/// [`each_mut`] of two slices, each with the elements of its unit. They have as many units; the last of each may be a part.
pub(crate) fn each_pair_mut<T: Send, U: Send>(
    (out, unit): (&mut [T], usize),
    (more, more_unit): (&mut [U], usize),
    cost: usize,
    work: impl Fn(usize, &mut [T], &mut [U]) + Sync,
) {
    let threads = rayon::current_num_threads();
    let units = out.len() / unit.max(1);
    if threads == 1 || units < 2 || cost < WORK_MIN {
        return work(0, out, more);
    }
    let size = units.div_ceil(TASKS_EACH * threads);
    out.par_chunks_mut(size * unit)
        .zip(more.par_chunks_mut(size * more_unit))
        .enumerate()
        .for_each(|(task, (part, more))| work(task * size, part, more));
}

/// The parts of a range that are in one unit each: counted from the range's first element, the unit's number, and where in the unit they begin.
pub(crate) fn by_unit(
    range: Range<usize>,
    unit: usize,
) -> impl Iterator<Item = (Range<usize>, usize, usize)> {
    let (first, unit) = (range.start, unit.max(1));
    (first / unit..range.end.div_ceil(unit)).map(move |number| {
        let from = first.max(number * unit);
        let to = range.end.min((number + 1) * unit);
        (from - first..to - first, number, from - number * unit)
    })
}

/// A vector of `len` values that `work` writes, called as in [`each_mut`]. Zeros first would cost a pass over memory.
///
/// # Safety
///
/// `work` writes every value that it gets.
#[expect(unsafe_code, reason = "values that were not written first")]
pub(crate) unsafe fn written(
    len: usize,
    unit: usize,
    cost: usize,
    work: impl Fn(usize, &mut [MaybeUninit<f32>]) + Sync,
) -> Vec<f32> {
    let mut nothing = vec![(); len.div_ceil(unit.max(1))];
    let work = |first: usize, out: &mut [_], _: &mut [()]| work(first, out);
    // SAFETY: the caller's.
    unsafe { written_beside((len, unit), (&mut nothing, 1), cost, work) }
}

/// [`written`], beside a slice that `work` gets as in [`each_pair_mut`].
///
/// # Safety
///
/// `work` writes every value that it gets.
#[expect(unsafe_code, reason = "values that were not written first")]
pub(crate) unsafe fn written_beside<U: Send>(
    (len, unit): (usize, usize),
    more: (&mut [U], usize),
    cost: usize,
    work: impl Fn(usize, &mut [MaybeUninit<f32>], &mut [U]) + Sync,
) -> Vec<f32> {
    let units = |len: usize, unit: usize| len.div_ceil(unit.max(1));
    assert_eq!(
        units(len, unit),
        units(more.0.len(), more.1),
        "units of both"
    );
    let mut values = Vec::with_capacity(len);
    let out = &mut values.spare_capacity_mut()[..len];
    each_pair_mut((out, unit), more, cost, work);
    // SAFETY: the vector has room for them, and `work` has written them all.
    unsafe { values.set_len(len) };
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_computes_here_is_one_of_its_pool_and_others_stay_outside() {
        let outside = || rayon::current_thread_index().is_none();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let threads = rayon::current_num_threads();
                assert!(outside());
                compute_here();
                compute_here();
                assert_eq!(rayon::current_thread_index(), Some(0));
                assert_eq!(rayon::current_num_threads(), threads);
                let mut out = vec![0; 1 << 10];
                each_mut(&mut out, 1, WORK_MIN, |first, part| {
                    (first..).zip(part).for_each(|(at, value)| *value = at);
                });
                assert!(out.into_iter().eq(0..1 << 10));
            });
            scope.spawn(move || assert!(outside()));
        });
    }
}
