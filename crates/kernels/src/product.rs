//! The one inner loop of all products: of a matrix that lies anywhere in memory and a panel of columns.

#![expect(
    unsafe_code,
    reason = "the inner loop reads without checks what was checked before it"
)]

use std::mem::MaybeUninit;

use crate::isa::{Isa, Kernels, Task};
use crate::registers::Register;

/// Steps that one chain adds up where there may be many; the sums of such pieces are added one after another. Part of the bits.
pub(crate) const PIECE: usize = 256;

/// `out[i][j] = first[j] + sum over t of a[rows[i] + steps[t]] * b[t][j]`, one fused multiply-add after another in the order of `t`.
///
/// Rows and steps are offsets, so the left matrix may be windows of an image that were never copied.
pub(crate) struct Product<'a, const WIDTH: usize> {
    pub(crate) a: &'a [f32],
    pub(crate) rows: &'a [u32],
    pub(crate) steps: &'a [u32],
    /// One row for each step.
    pub(crate) b: &'a [[f32; WIDTH]],
    /// Where the sums of each row start.
    pub(crate) first: &'a [f32; WIDTH],
    pub(crate) out: Out<'a>,
    /// From one row of `out` to the next.
    pub(crate) out_step: usize,
    /// The first columns, which `out` has.
    pub(crate) lanes: usize,
}

/// Where the sums go.
pub(crate) enum Out<'a> {
    /// To values that were never written.
    New(&'a mut [MaybeUninit<f32>]),
    /// In place of what is there.
    Old(&'a mut [f32]),
    /// They are added to what is there.
    Sum(&'a mut [f32]),
}

impl Out<'_> {
    /// The same from a later value on.
    pub(crate) fn from(&mut self, at: usize) -> Out<'_> {
        match self {
            Self::New(values) => Out::New(&mut values[at..]),
            Self::Old(values) => Out::Old(&mut values[at..]),
            Self::Sum(values) => Out::Sum(&mut values[at..]),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::New(values) => values.len(),
            Self::Old(values) | Self::Sum(values) => values.len(),
        }
    }

    /// Adds or writes the values of a row.
    #[inline(always)]
    fn put<R: Register>(&mut self, at: usize, sums: R) {
        match self {
            Self::New(values) => sums.write(&mut values[at..]),
            Self::Old(values) => sums.store(&mut values[at..]),
            Self::Sum(values) => {
                let values = &mut values[at..];
                R::load(values).add(sums).store(values);
            }
        }
    }

    /// The same for fewer values than a register has.
    fn put_some(&mut self, at: usize, sums: &[f32]) {
        match self {
            Self::New(values) => {
                values[at..][..sums.len()].write_copy_of_slice(sums);
            }
            Self::Old(values) => values[at..][..sums.len()].copy_from_slice(sums),
            Self::Sum(values) => {
                for (value, sum) in values[at..].iter_mut().zip(sums) {
                    *value += sum;
                }
            }
        }
    }
}

impl Kernels {
    /// Whether panels of 32 of these columns are faster than those of 16: two of the widest registers for one value of the left matrix.
    pub(crate) fn is_wide(self, columns: usize) -> bool {
        let wasted = columns.next_multiple_of(32) - columns.next_multiple_of(16);
        self.isa() == Isa::Avx512 && 8 * wasted <= columns
    }
}

impl<const WIDTH: usize> Task for Product<'_, WIDTH> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let most = |offsets: &[u32]| offsets.iter().copied().max().map(|most| most as usize);
        if let (Some(row), Some(step)) = (most(self.rows), most(self.steps)) {
            assert!(row + step < self.a.len(), "offsets within the matrix");
        }
        let end = self.rows.len().saturating_sub(1) * self.out_step + self.lanes;
        assert!(self.b.len() >= self.steps.len() && self.lanes <= WIDTH);
        assert!(self.rows.is_empty() || self.out.len() >= end);
        // As many rows as there are registers for.
        match WIDTH / R::LEN {
            1 => self.tiles::<R, 1, 8>(),
            2 if R::LEN == 16 => self.tiles::<R, 2, 8>(),
            2 => self.tiles::<R, 2, 6>(),
            4 => self.tiles::<R, 4, 3>(),
            _ => unreachable!("panels of 16 or 32 columns"),
        }
    }
}

impl<const WIDTH: usize> Product<'_, WIDTH> {
    #[inline(always)]
    fn tiles<R: Register, const REGISTERS: usize, const ROWS: usize>(mut self) {
        let load = |from: &[f32; WIDTH]| -> [R; REGISTERS] {
            std::array::from_fn(|at| R::load(&from[at * R::LEN..]))
        };
        let first = load(self.first);
        for (rows, tile) in self.rows.chunks(ROWS).zip((0..).step_by(ROWS)) {
            // Rows past the last one repeat it, and are not written.
            let from: [*const f32; ROWS] = std::array::from_fn(|at| {
                let row = rows[at.min(rows.len() - 1)];
                self.a.as_ptr().wrapping_add(row as usize)
            });
            let mut sums = [first; ROWS];
            for (step, b) in self.steps.iter().zip(self.b) {
                let b = load(b);
                for row in 0..ROWS {
                    // SAFETY: `run` has compared the sum of the largest offsets with the length.
                    let a = R::splat(unsafe { *from[row].add(*step as usize) });
                    for at in 0..REGISTERS {
                        sums[row][at] = a.mul_add(b[at], sums[row][at]);
                    }
                }
            }
            for (row, sums) in sums.iter().enumerate().take(rows.len()) {
                let to = (tile + row) * self.out_step;
                if self.lanes == WIDTH {
                    for (at, sum) in sums.iter().enumerate() {
                        self.out.put(to + at * R::LEN, *sum);
                    }
                } else {
                    let mut values = [0.0; WIDTH];
                    for (at, sum) in sums.iter().enumerate() {
                        sum.store(&mut values[at * R::LEN..]);
                    }
                    self.out.put_some(to, &values[..self.lanes]);
                }
            }
        }
    }
}
