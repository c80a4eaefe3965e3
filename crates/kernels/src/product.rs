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
///
/// A few rows meet all panels while they stay in the nearest cache, so results are written along their rows.
pub(crate) struct Product<'a, const WIDTH: usize> {
    pub(crate) a: Left<'a>,
    /// Panels of columns, one row for each step.
    pub(crate) b: &'a [[f32; WIDTH]],
    /// Rows of `b` from one panel to the next.
    pub(crate) b_step: usize,
    /// Where the sums of each panel's rows start, or nothing for zeros.
    pub(crate) first: &'a [[f32; WIDTH]],
    pub(crate) out: Out<'a>,
    /// From one row of `out` to the next.
    pub(crate) out_step: usize,
    /// Of all panels: the last may have fewer than the others.
    pub(crate) columns: usize,
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
    /// They start from what is there: the steps go on with its chains.
    Chain(&'a mut [f32]),
}

impl<'a> Out<'a> {
    /// Writes a value to each lane of each row.
    pub(crate) fn fill_rows(&mut self, values: &[f32], lanes: usize, step: usize) {
        for (row, value) in values.iter().enumerate() {
            let at = row * step;
            match self {
                Self::New(out) => out[at..][..lanes].fill(MaybeUninit::new(*value)),
                Self::Old(out) | Self::Sum(out) | Self::Chain(out) => {
                    out[at..][..lanes].fill(*value);
                }
            }
        }
    }

    /// The same place for sums that start from what is there.
    ///
    /// # Safety
    ///
    /// All values that a product has there were written.
    pub(crate) unsafe fn chained(self) -> Self {
        match self {
            // SAFETY: the caller's; a product looks at no other values.
            Self::New(values) => Self::Chain(unsafe { values.assume_init_mut() }),
            Self::Old(values) | Self::Sum(values) | Self::Chain(values) => Self::Chain(values),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::New(values) => values.len(),
            Self::Old(values) | Self::Sum(values) | Self::Chain(values) => values.len(),
        }
    }

    /// Where the values are, and whether sums are added to them.
    fn place(&mut self) -> (*mut f32, bool) {
        match self {
            Self::New(values) => (values.as_mut_ptr().cast(), false),
            Self::Old(values) | Self::Chain(values) => (values.as_mut_ptr(), false),
            Self::Sum(values) => (values.as_mut_ptr(), true),
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
        if self.isa() == Isa::Avx512 { 14 } else { 6 }
    }
}

impl<const WIDTH: usize> Task for Product<'_, WIDTH> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        // As many rows as there are registers for.
        match (R::LEN, WIDTH / R::LEN) {
            (16, 1) => self.tiles::<R, 1, 8, 14>(),
            (16, 2) => self.tiles::<R, 2, 8, 14>(),
            (8, 2) => self.tiles::<R, 2, 6, 6>(),
            _ => unreachable!("panels of 16 columns, or of 32 for wide registers"),
        }
    }
}

#[inline(always)]
fn load<R: Register, const REGISTERS: usize, const WIDTH: usize>(
    from: &[f32; WIDTH],
) -> [R; REGISTERS] {
    std::array::from_fn(|at| R::load(&from[at * R::LEN..]))
}

impl<const WIDTH: usize> Product<'_, WIDTH> {
    const ZEROS: [f32; WIDTH] = [0.0; WIDTH];

    #[inline(always)]
    fn tiles<R: Register, const REGISTERS: usize, const ROWS: usize, const PACKED: usize>(
        mut self,
    ) {
        let load = load::<R, REGISTERS, WIDTH>;
        let panels = self.columns.div_ceil(WIDTH);
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
                    for panel in 0..panels {
                        let place = [tile, rows.len(), panel];
                        let mut sums = self.start::<R, REGISTERS, ROWS>(place);
                        for (step, b) in steps.iter().zip(&self.b[panel * self.b_step..]) {
                            let b = load(b);
                            for row in 0..ROWS {
                                // SAFETY: the sum of the largest offsets is within the matrix.
                                let a = R::splat(unsafe { *from[row].add(*step as usize) });
                                for at in 0..REGISTERS {
                                    sums[row][at] = a.mul_add(b[at], sums[row][at]);
                                }
                            }
                        }
                        self.put(place, sums);
                    }
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
                    let values = &values[tile / PACKED * steps..][..steps];
                    for panel in 0..panels {
                        let place = [tile, PACKED.min(rows - tile), panel];
                        let mut sums = self.start::<R, REGISTERS, PACKED>(place);
                        for (a, b) in values.iter().zip(&self.b[panel * self.b_step..]) {
                            let b = load(b);
                            for row in 0..PACKED {
                                let a = R::splat(a[row]);
                                for at in 0..REGISTERS {
                                    sums[row][at] = a.mul_add(b[at], sums[row][at]);
                                }
                            }
                        }
                        self.put(place, sums);
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn check(&self, rows: usize, steps: usize) {
        let panels = self.columns.div_ceil(WIDTH);
        assert!(self.b.len() >= panels.saturating_sub(1) * self.b_step + steps);
        assert!(self.first.is_empty() || self.first.len() >= panels);
        let end = rows.saturating_sub(1) * self.out_step + self.columns;
        assert!(rows == 0 || self.out.len() >= end);
    }

    /// Where the sums of `count` rows from row `tile` on start. Rows past the last one repeat it.
    #[inline(always)]
    fn start<R: Register, const REGISTERS: usize, const ROWS: usize>(
        &mut self,
        [tile, count, panel]: [usize; 3],
    ) -> [[R; REGISTERS]; ROWS] {
        let some;
        // Addresses in place of two kinds of loads, between which the compiler would keep the sums in memory.
        let from: [*const f32; ROWS] = match &self.out {
            Out::Chain(values) => {
                let lanes = WIDTH.min(self.columns - panel * WIDTH);
                let row = |row: usize| {
                    let at = (tile + row.min(count - 1)) * self.out_step + panel * WIDTH;
                    &values[at..][..lanes]
                };
                if lanes < WIDTH {
                    some = std::array::from_fn::<_, ROWS, _>(|at| padded::<WIDTH>(row(at)));
                    some.each_ref().map(|row| row.as_ptr())
                } else {
                    std::array::from_fn(|at| row(at).as_ptr())
                }
            }
            _ => [self.first.get(panel).unwrap_or(&Self::ZEROS).as_ptr(); ROWS],
        };
        // SAFETY: each is the address of a row of so many values.
        from.map(|from| load(unsafe { &*from.cast::<[f32; WIDTH]>() }))
    }

    /// Writes or adds `count` rows of sums, from row `tile` on. They are not a slice, which would be in memory.
    #[inline(always)]
    fn put<R: Register, const REGISTERS: usize, const ROWS: usize>(
        &mut self,
        [tile, count, panel]: [usize; 3],
        sums: [[R; REGISTERS]; ROWS],
    ) {
        let (out, is_sum) = self.out.place();
        let lanes = WIDTH.min(self.columns - panel * WIDTH);
        // SAFETY, of this and the other blocks: `check` has seen that the values of all rows are there.
        let out = unsafe { out.add(tile * self.out_step + panel * WIDTH) };
        if count == ROWS && lanes == WIDTH {
            for (row, sums) in sums.into_iter().enumerate() {
                for (at, sum) in sums.into_iter().enumerate() {
                    let out = unsafe {
                        let at = out.add(row * self.out_step + at * R::LEN);
                        std::slice::from_raw_parts_mut(at, R::LEN)
                    };
                    match is_sum {
                        true => R::load(out).add(sum).store(out),
                        false => sum.store(out),
                    }
                }
            }
            return;
        }
        let mut values = [[0.0; WIDTH]; ROWS];
        for (values, sums) in values.iter_mut().zip(sums) {
            for (at, sum) in sums.into_iter().enumerate() {
                sum.store(&mut values[at * R::LEN..]);
            }
        }
        for (row, values) in values[..count].iter().enumerate() {
            for (at, value) in values[..lanes].iter().enumerate() {
                let out = unsafe { &mut *out.add(row * self.out_step + at) };
                *out = if is_sum { *out + value } else { *value };
            }
        }
    }
}

/// A row with zeros after the values.
pub(crate) fn padded<const WIDTH: usize>(values: &[f32]) -> [f32; WIDTH] {
    let mut row = [0.0; WIDTH];
    row[..values.len()].copy_from_slice(values);
    row
}
