//! The inner loop of all products: a matrix that lies anywhere in memory, times a panel of columns.

#![expect(
    unsafe_code,
    reason = "the inner loop reads without checks what was checked before it"
)]

use std::mem::MaybeUninit;

use crate::isa::{Isa, Kernels, Task};
use crate::registers::Register;

/// Steps that one chain adds up where there may be many; the sums of such pieces are added one after another. Part of the bits.
pub(crate) const PIECE: usize = 256;

/// `out[i][j] = first[j] + sum over t of a[i][t] * b[t][j]`, one fused multiply-add after another in the order of `t`.
pub(crate) struct Product<'a, const WIDTH: usize> {
    pub(crate) a: Left<'a>,
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

/// The left matrix of a product.
#[derive(Clone, Copy)]
pub(crate) enum Left<'a> {
    /// `a[i][t]` is at `rows[i] + steps[t]`, so it may be windows of an image that were never copied.
    Windows {
        values: &'a [f32],
        rows: &'a [u32],
        steps: &'a [u32],
    },
    /// Tiles of [`Kernels::tile`] rows, one after another, with the values of all its rows side by side for each step. The last tile has
    /// anything for the rows that it lacks.
    Tiles {
        values: &'a [f32],
        rows: usize,
        steps: usize,
    },
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
    pub(crate) fn after(&mut self, at: usize) -> Out<'_> {
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

    /// Rows of [`Left::Tiles`].
    pub(crate) fn tile(self) -> usize {
        if self.isa() == Isa::Avx512 { 12 } else { 6 }
    }
}

impl<const WIDTH: usize> Task for Product<'_, WIDTH> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        // As many rows as there are registers for.
        match (R::LEN, WIDTH / R::LEN) {
            (16, 1) => self.tiles::<R, 1, 8, 12>(),
            (16, 2) => self.tiles::<R, 2, 8, 12>(),
            (8, 2) => self.tiles::<R, 2, 6, 6>(),
            _ => unreachable!("panels of 16 columns, or of 32 for wide registers"),
        }
    }
}

impl<const WIDTH: usize> Product<'_, WIDTH> {
    #[inline(always)]
    fn tiles<R: Register, const REGISTERS: usize, const ROWS: usize, const PACKED: usize>(
        mut self,
    ) {
        let load = |from: &[f32; WIDTH]| -> [R; REGISTERS] {
            std::array::from_fn(|at| R::load(&from[at * R::LEN..]))
        };
        let first = load(self.first);
        match self.a {
            Left::Windows {
                values,
                rows,
                steps,
            } => {
                let most = |offsets: &[u32]| offsets.iter().copied().max().map(|at| at as usize);
                if let (Some(row), Some(step)) = (most(rows), most(steps)) {
                    assert!(row + step < values.len(), "offsets within the matrix");
                }
                self.check(rows.len(), steps.len());
                for (rows, tile) in rows.chunks(ROWS).zip((0..).step_by(ROWS)) {
                    // Rows past the last one repeat it, and are not written.
                    let from: [*const f32; ROWS] = std::array::from_fn(|at| {
                        let row = rows[at.min(rows.len() - 1)];
                        values.as_ptr().wrapping_add(row as usize)
                    });
                    let mut sums = [first; ROWS];
                    for (step, b) in steps.iter().zip(self.b) {
                        let b = load(b);
                        for row in 0..ROWS {
                            // SAFETY: the sum of the largest offsets is within the matrix.
                            let a = R::splat(unsafe { *from[row].add(*step as usize) });
                            for at in 0..REGISTERS {
                                sums[row][at] = a.mul_add(b[at], sums[row][at]);
                            }
                        }
                    }
                    self.put(tile, rows.len(), sums);
                }
            }
            Left::Tiles {
                values,
                rows,
                steps,
            } => {
                let (values, _) = values.as_chunks::<PACKED>();
                self.check(rows, steps);
                for tile in (0..rows).step_by(PACKED) {
                    let mut sums = [first; PACKED];
                    let values = &values[tile / PACKED * steps..][..steps];
                    for (a, b) in values.iter().zip(self.b) {
                        let b = load(b);
                        for row in 0..PACKED {
                            let a = R::splat(a[row]);
                            for at in 0..REGISTERS {
                                sums[row][at] = a.mul_add(b[at], sums[row][at]);
                            }
                        }
                    }
                    self.put(tile, PACKED.min(rows - tile), sums);
                }
            }
        }
    }

    #[inline(always)]
    fn check(&self, rows: usize, steps: usize) {
        let end = rows.saturating_sub(1) * self.out_step + self.lanes;
        assert!(self.b.len() >= steps && self.lanes <= WIDTH);
        assert!(rows == 0 || self.out.len() >= end);
    }

    /// Writes or adds the first `count` rows of sums, from row `first` on. They are not a slice, which would be in memory.
    #[inline(always)]
    fn put<R: Register, const REGISTERS: usize, const ROWS: usize>(
        &mut self,
        first: usize,
        count: usize,
        sums: [[R; REGISTERS]; ROWS],
    ) {
        for (row, sums) in sums.iter().enumerate() {
            if row >= count {
                return;
            }
            let to = (first + row) * self.out_step;
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
