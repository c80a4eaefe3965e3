//! Sums whose order is that of 32 lanes, whatever the width of the registers, and sums over rows.

use crate::isa::{Kernels, Task};
use crate::product::PIECE;
use crate::registers::Register;
use crate::threads::each_mut;

/// Sums that grow side by side.
pub(crate) const LANES: usize = 32;

/// Sums over pairs of values: `add` adds what belongs to a pair to each of `N` sums. Every 32nd pair goes to the same lane; the lanes
/// are added last, in a fixed tree.
#[inline(always)]
pub(crate) fn sums<R: Register, const N: usize>(
    a: &[f32],
    b: &[f32],
    add: impl Fn([R; N], R, R) -> [R; N],
) -> [f32; N] {
    // A register has 8 lanes or more.
    match LANES / R::LEN {
        2 => sums_of::<R, N, 2>(a, b, add),
        4 => sums_of::<R, N, 4>(a, b, add),
        _ => unreachable!("registers of 8 or 16 values"),
    }
}

#[inline(always)]
fn sums_of<R: Register, const N: usize, const REGISTERS: usize>(
    a: &[f32],
    b: &[f32],
    add: impl Fn([R; N], R, R) -> [R; N],
) -> [f32; N] {
    let mut sums = [[R::splat(0.0); N]; REGISTERS];
    let (whole_a, rest_a) = a.as_chunks::<LANES>();
    let (whole_b, rest_b) = b.as_chunks::<LANES>();
    for (a, b) in whole_a.iter().zip(whole_b) {
        for (at, sums) in sums.iter_mut().enumerate() {
            let from = at * R::LEN;
            *sums = add(*sums, R::load(&a[from..]), R::load(&b[from..]));
        }
    }
    let mut lanes = [[0.0; LANES]; N];
    for (at, sums) in sums.iter().enumerate() {
        for (sum, lanes) in sums.iter().zip(&mut lanes) {
            sum.store(&mut lanes[at * R::LEN..]);
        }
    }
    if !rest_a.is_empty() {
        let mut padded = [[0.0; LANES]; 2];
        padded[0][..rest_a.len()].copy_from_slice(rest_a);
        padded[1][..rest_b.len()].copy_from_slice(rest_b);
        for (at, sums) in sums.iter().enumerate() {
            let from = at * R::LEN;
            let [a, b] = padded.each_ref().map(|values| R::load(&values[from..]));
            let more = add(*sums, a, b);
            // Lanes that have no value left keep their sums.
            let left = rest_a.len().saturating_sub(from).min(R::LEN);
            for (more, lanes) in more.iter().zip(&mut lanes) {
                let mut with_rest = [0.0; LANES];
                more.store(&mut with_rest);
                lanes[from..][..left].copy_from_slice(&with_rest[..left]);
            }
        }
    }
    lanes.map(add_lanes)
}

/// The sum of all lanes.
#[inline(always)]
pub(crate) fn add_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut count = LANES / 2;
    while count > 0 {
        for lane in 0..count {
            lanes[lane] += lanes[lane + count];
        }
        count /= 2;
    }
    lanes[0]
}

/// The mean, and the sum of squared distances from it, of values of which there is at least one.
#[inline(always)]
pub(crate) fn moments<R: Register>(x: &[f32]) -> [f32; 2] {
    // Distances from any value lose fewer digits than the values.
    let shift = R::splat(x[0]);
    let [sum] = sums(x, x, |[sum], x: R, _| [sum.add(x.sub(shift))]);
    let mean = x[0] + sum / x.len() as f32;
    [mean, squares::<R>(x, mean)]
}

/// The sum of squared distances from `middle`.
#[inline(always)]
pub(crate) fn squares<R: Register>(x: &[f32], middle: f32) -> f32 {
    let middle = R::splat(middle);
    let [squares] = sums(x, x, |[sum], x: R, _| {
        let distance = x.sub(middle);
        [distance.mul_add(distance, sum)]
    });
    squares
}

/// The sum of all values.
pub(crate) fn sum(kernels: Kernels, values: &[f32]) -> f32 {
    struct Sum<'a>(&'a [f32]);

    impl Task for Sum<'_> {
        type Output = f32;

        #[inline(always)]
        fn run<R: Register>(self) -> f32 {
            let [sum] = sums(self.0, self.0, |[sum]: [R; 1], value, _| [sum.add(value)]);
            sum
        }
    }

    kernels.run(Sum(values))
}

impl Kernels {
    /// The sum of each column.
    ///
    /// *Shape*: `[rows, columns]` to `[columns]`.
    ///
    /// *Numerics*: 256 rows one after another, and such pieces in f64.
    ///
    /// # Panics
    ///
    /// If the values do not fill the rows.
    pub fn column_sums(self, values: &[f32], columns: usize) -> Vec<f32> {
        let mut sums = vec![0.0; columns];
        if columns > 0 {
            assert!(
                values.len().is_multiple_of(columns),
                "rows of {columns} columns"
            );
            each_mut(&mut sums, 64, values.len(), |unit, sums| {
                let values = &values[unit * 64..];
                self.run(ColumnSums {
                    values,
                    columns,
                    sums,
                });
            });
        }
        sums
    }
}

/// Sums of the first columns.
struct ColumnSums<'a> {
    values: &'a [f32],
    columns: usize,
    sums: &'a mut [f32],
}

impl Task for ColumnSums<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let mut total = vec![0.0_f64; self.sums.len()];
        for piece in self.values.chunks(PIECE * self.columns) {
            self.sums.fill(0.0);
            for row in piece.chunks(self.columns) {
                for (sum, value) in self.sums.iter_mut().zip(row) {
                    *sum += value;
                }
            }
            for (total, sum) in total.iter_mut().zip(&*self.sums) {
                *total += f64::from(*sum);
            }
        }
        for (sum, total) in self.sums.iter_mut().zip(total) {
            *sum = total as f32;
        }
    }
}
