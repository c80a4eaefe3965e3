//! Between planes, where the values of a channel are side by side, and rows of 16 or 32 channels.

use std::mem::MaybeUninit;

use crate::isa::{Kernels, Task};
use crate::registers::Register;

/// Rows that stay in the nearest cache while all their lanes are written.
const CACHED: usize = 64;

/// `rows[at][lane] = planes[lane * step + at]` for the first `lanes`, and 0 in the others.
pub(crate) fn to_rows<const WIDTH: usize>(
    kernels: Kernels,
    planes: &[f32],
    step: usize,
    lanes: usize,
    rows: &mut [[f32; WIDTH]],
) {
    kernels.run(ToRows {
        planes,
        step,
        lanes,
        rows,
    });
}

/// `planes[lane * step + at] = rows[at][lane]` for the first `lanes`.
pub(crate) fn to_planes<const WIDTH: usize>(
    kernels: Kernels,
    rows: &[[f32; WIDTH]],
    planes: &mut [MaybeUninit<f32>],
    step: usize,
    lanes: usize,
) {
    kernels.run(ToPlanes {
        rows,
        planes,
        step,
        lanes,
    });
}

struct ToRows<'a, const WIDTH: usize> {
    planes: &'a [f32],
    step: usize,
    lanes: usize,
    rows: &'a mut [[f32; WIDTH]],
}

impl<const WIDTH: usize> Task for ToRows<'_, WIDTH> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let lanes = self.lanes;
        for (rows, first) in self.rows.chunks_mut(CACHED).zip((0..).step_by(CACHED)) {
            let count = rows.len();
            let plane = |lane: usize| &self.planes[lane * self.step + first..][..count];
            let eights = if count < 8 { 0 } else { lanes / 8 * 8 };
            for lane in (0..eights).step_by(8) {
                let planes = eight(plane, lane);
                for at in blocks::<8>(count) {
                    let block = R::transposed(eight(|lane| first_of(&planes[lane][at..]), 0));
                    for (row, values) in rows[at..at + 8].iter_mut().zip(block) {
                        row[lane..lane + 8].copy_from_slice(&values);
                    }
                }
            }
            let fours = if count < 4 { eights } else { lanes / 4 * 4 };
            for lane in (eights..fours).step_by(4) {
                let planes = [
                    plane(lane),
                    plane(lane + 1),
                    plane(lane + 2),
                    plane(lane + 3),
                ];
                for at in blocks::<4>(count) {
                    let block = transposed(planes.map(|plane| *first_of(&plane[at..])));
                    for (row, values) in rows[at..at + 4].iter_mut().zip(block) {
                        row[lane..lane + 4].copy_from_slice(&values);
                    }
                }
            }
            for lane in fours..lanes {
                for (row, value) in rows.iter_mut().zip(plane(lane)) {
                    row[lane] = *value;
                }
            }
            for row in rows {
                row[lanes..].fill(0.0);
            }
        }
    }
}

struct ToPlanes<'a, const WIDTH: usize> {
    rows: &'a [[f32; WIDTH]],
    planes: &'a mut [MaybeUninit<f32>],
    step: usize,
    lanes: usize,
}

impl<const WIDTH: usize> Task for ToPlanes<'_, WIDTH> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let (rows, lanes) = (self.rows, self.lanes);
        let count = rows.len();
        let eights = if count < 8 { 0 } else { lanes / 8 * 8 };
        for lane in (0..eights).step_by(8) {
            for at in blocks::<8>(count) {
                let block = R::transposed(eight(|row| first_of(&rows[at + row][lane..]), 0));
                for (plane, values) in (lane..).zip(block) {
                    self.planes[plane * self.step + at..][..8].write_copy_of_slice(&values);
                }
            }
        }
        let fours = if count < 4 { eights } else { lanes / 4 * 4 };
        for lane in (eights..fours).step_by(4) {
            for at in blocks::<4>(count) {
                let row = |row: usize| *first_of(&rows[at + row][lane..]);
                let block = transposed([row(0), row(1), row(2), row(3)]);
                for (plane, values) in (lane..).zip(block) {
                    self.planes[plane * self.step + at..][..4].write_copy_of_slice(&values);
                }
            }
        }
        for lane in fours..lanes {
            for (value, row) in self.planes[lane * self.step..].iter_mut().zip(rows) {
                value.write(row[lane]);
            }
        }
    }
}

/// Where blocks begin that have all places, of which there are at least as many as in a block. The last may have some of the one before.
#[inline(always)]
fn blocks<const LEN: usize>(count: usize) -> impl Iterator<Item = usize> {
    (0..count).step_by(LEN).map(move |at| at.min(count - LEN))
}

#[inline(always)]
fn eight<T>(of: impl Fn(usize) -> T, first: usize) -> [T; 8] {
    [
        of(first),
        of(first + 1),
        of(first + 2),
        of(first + 3),
        of(first + 4),
        of(first + 5),
        of(first + 6),
        of(first + 7),
    ]
}

#[inline(always)]
fn first_of<const LEN: usize>(values: &[f32]) -> &[f32; LEN] {
    values.first_chunk().expect("as many values")
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn transposed(block: [[f32; 4]; 4]) -> [[f32; 4]; 4] {
    std::array::from_fn(|row| std::array::from_fn(|column| block[column][row]))
}

/// The compiler finds no shuffles for this by itself.
#[cfg(target_arch = "x86_64")]
#[expect(
    unsafe_code,
    reason = "conversions of arrays to registers, which every such processor has"
)]
#[inline(always)]
fn transposed(block: [[f32; 4]; 4]) -> [[f32; 4]; 4] {
    use std::arch::x86_64::*;

    // SAFETY: loads and stores are of the four values of an array.
    unsafe {
        let [a, b, c, d] = block.map(|row| _mm_loadu_ps(row.as_ptr()));
        let (ab_low, ab_high) = (_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
        let (cd_low, cd_high) = (_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
        [
            _mm_movelh_ps(ab_low, cd_low),
            _mm_movehl_ps(cd_low, ab_low),
            _mm_movelh_ps(ab_high, cd_high),
            _mm_movehl_ps(cd_high, ab_high),
        ]
        .map(|row| {
            let mut values = [0.0; 4];
            _mm_storeu_ps(values.as_mut_ptr(), row);
            values
        })
    }
}

#[cfg(test)]
#[expect(unsafe_code, reason = "all values were written before")]
mod tests {
    use super::*;
    use crate::isa::Isa;

    const LANES: usize = 16;

    #[test]
    fn planes_become_rows_and_planes_again() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for lanes in 1..=LANES {
                for count in [0, 1, 3, 4, 7, 8, 13, 80] {
                    check(Kernels::with(isa).unwrap(), lanes, count);
                }
            }
        }
    }

    fn check(kernels: Kernels, lanes: usize, count: usize) {
        let step = count + 2;
        let planes: Vec<f32> = (0..lanes * step).map(|at| at as f32 + 1.0).collect();
        let mut rows = vec![[9.0; LANES]; count];
        to_rows(kernels, &planes, step, lanes, &mut rows);
        for (at, row) in rows.iter().enumerate() {
            for (lane, value) in row.iter().enumerate() {
                let expected = match lane < lanes {
                    true => planes[lane * step + at],
                    false => 0.0,
                };
                assert_eq!(*value, expected, "{lanes} lanes, {count} values");
            }
        }
        let mut back = vec![MaybeUninit::new(0.0); lanes * step];
        to_planes(kernels, &rows, &mut back, step, lanes);
        for (at, value) in back.iter().enumerate() {
            let value = unsafe { value.assume_init() };
            let expected = if at % step < count { planes[at] } else { 0.0 };
            assert_eq!(value, expected);
        }
    }
}
