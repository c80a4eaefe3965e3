//! Work that is split over threads: always over outputs, so that the bits do not depend on their number.

use std::mem::MaybeUninit;
use std::ops::Range;

use rayon::prelude::*;

/// Tasks for each thread, because threads may start late or be slowed down.
const TASKS_EACH: usize = 2;
/// Multiplications below which waking other threads takes longer than they save.
const WORK_MIN: usize = 1 << 17;

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
