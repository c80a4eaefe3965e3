//! Work that is split over threads: always over outputs, so that the bits do not depend on their number.

use std::mem::MaybeUninit;

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
    let threads = rayon::current_num_threads();
    let units = out.len() / unit.max(1);
    if threads == 1 || units < 2 || cost < WORK_MIN {
        return work(0, out);
    }
    let size = units.div_ceil(TASKS_EACH * threads);
    out.par_chunks_mut(size * unit)
        .enumerate()
        .for_each(|(task, part)| work(task * size, part));
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
    let mut values = Vec::with_capacity(len);
    each_mut(&mut values.spare_capacity_mut()[..len], unit, cost, work);
    // SAFETY: the vector has room for them, and `work` has written them all.
    unsafe { values.set_len(len) };
    values
}
