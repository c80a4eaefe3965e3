//! Between planes, where the values of a channel are side by side, and rows of 16 or 32 channels.

use std::mem::MaybeUninit;

/// Rows that stay in the nearest cache while all their lanes are written.
const CACHED: usize = 64;

/// `rows[at][lane] = planes[lane * step + at]` for the first `lanes`, and 0 in the others.
pub(crate) fn to_rows<const WIDTH: usize>(
    planes: &[f32],
    step: usize,
    lanes: usize,
    rows: &mut [[f32; WIDTH]],
) {
    let quarters = lanes / 4 * 4;
    for (rows, first) in rows.chunks_mut(CACHED).zip((0..).step_by(CACHED)) {
        let whole = rows.len() / 4 * 4;
        let count = rows.len();
        let plane = |lane: usize| &planes[lane * step + first..][..count];
        for lane in (0..quarters).step_by(4) {
            let planes: [&[f32]; 4] = std::array::from_fn(|at| plane(lane + at));
            for at in (0..whole).step_by(4) {
                let block = planes.map(|plane| four(&plane[at..]));
                for (row, values) in rows[at..at + 4].iter_mut().zip(transposed(block)) {
                    row[lane..lane + 4].copy_from_slice(&values);
                }
            }
            for at in whole..rows.len() {
                for (value, plane) in rows[at][lane..].iter_mut().zip(planes) {
                    *value = plane[at];
                }
            }
        }
        for lane in quarters..lanes {
            for (row, value) in rows.iter_mut().zip(plane(lane)) {
                row[lane] = *value;
            }
        }
        for row in rows {
            row[lanes..].fill(0.0);
        }
    }
}

/// `planes[lane * step + at] = rows[at][lane]` for the first `lanes`.
pub(crate) fn to_planes<const WIDTH: usize>(
    rows: &[[f32; WIDTH]],
    planes: &mut [MaybeUninit<f32>],
    step: usize,
    lanes: usize,
) {
    let quarters = lanes / 4 * 4;
    let whole = rows.len() / 4 * 4;
    for lane in (0..quarters).step_by(4) {
        for at in (0..whole).step_by(4) {
            let block = std::array::from_fn(|row| four(&rows[at + row][lane..]));
            for (plane, values) in (lane..).zip(transposed(block)) {
                planes[plane * step + at..][..4].write_copy_of_slice(&values);
            }
        }
        for at in whole..rows.len() {
            for (plane, value) in (lane..).zip(four(&rows[at][lane..])) {
                planes[plane * step + at].write(value);
            }
        }
    }
    for lane in quarters..lanes {
        for (value, row) in planes[lane * step..].iter_mut().zip(rows) {
            value.write(row[lane]);
        }
    }
}

#[inline(always)]
fn four(values: &[f32]) -> [f32; 4] {
    values[..4].try_into().expect("four values")
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

    const LANES: usize = 16;

    #[test]
    fn planes_become_rows_and_planes_again() {
        for lanes in 1..=LANES {
            for count in [0, 1, 3, 4, 7, 8, 13] {
                let step = count + 2;
                let planes: Vec<f32> = (0..lanes * step).map(|at| at as f32 + 1.0).collect();
                let mut rows = vec![[9.0; LANES]; count];
                to_rows(&planes, step, lanes, &mut rows);
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
                to_planes(&rows, &mut back, step, lanes);
                for (at, value) in back.iter().enumerate() {
                    let value = unsafe { value.assume_init() };
                    let expected = if at % step < count { planes[at] } else { 0.0 };
                    assert_eq!(value, expected);
                }
            }
        }
    }
}
