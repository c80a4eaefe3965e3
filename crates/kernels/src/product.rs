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
/// A tile of rows meets all panels while it stays in the nearest cache, so results are written along their rows.
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
    /// They start from what is there, which was written where the sums are: the steps go on with its chains.
    Chain(&'a mut [MaybeUninit<f32>]),
}

impl<'a> Out<'a> {
    /// Sums that start from these.
    pub(crate) fn chain(values: &'a mut [f32]) -> Self {
        let (values, len) = (values.as_mut_ptr().cast(), values.len());
        // SAFETY: they are the same values, and a product writes nothing else to them than values.
        Self::Chain(unsafe { std::slice::from_raw_parts_mut(values, len) })
    }

    /// Writes a value to each lane of each row.
    pub(crate) fn fill_rows(&mut self, values: &[f32], lanes: usize, step: usize) {
        for (row, value) in values.iter().enumerate() {
            let at = row * step;
            match self {
                Self::New(out) | Self::Chain(out) => {
                    out[at..][..lanes].fill(MaybeUninit::new(*value));
                }
                Self::Old(out) | Self::Sum(out) => out[at..][..lanes].fill(*value),
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
            Self::New(values) | Self::Chain(values) => Self::Chain(values),
            Self::Old(values) | Self::Sum(values) => Self::chain(values),
        }
    }
}

impl Kernels {
    /// Whether panels of 32 of these columns are faster than those of 16: two of the widest registers for one value of the left matrix.
    pub(crate) fn is_wide(self, columns: usize) -> bool {
        let wasted = columns.next_multiple_of(32) - columns.next_multiple_of(16);
        self.isa() == Isa::Avx512 && 8 * wasted <= columns
    }

    /// Rows of [`Left::Windows`] that are computed at once.
    pub(crate) fn windows(self) -> usize {
        if self.isa() == Isa::Avx512 { 10 } else { 6 }
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
        // As many rows as there are registers for: of values, and of addresses if the rows are anywhere. For the last rows half as many.
        match (R::LEN, WIDTH / R::LEN) {
            (16, 1) => self.tiles::<R, 1, 10, 5, 14, 7, 1>(),
            (16, 2) => self.tiles::<R, 2, 10, 5, 14, 7, 1>(),
            (8, 2) => self.tiles::<R, 2, 6, 3, 6, 3, 4>(),
            _ => unreachable!("panels of 16 columns, or of 32 for wide registers"),
        }
    }
}

/// Panics unless each sum of one of these and one of those is the place of a value.
#[inline(always)]
pub(crate) fn check_offsets(rows: &[u32], steps: &[u32], values: &[f32]) {
    let most = |offsets: &[u32]| offsets.iter().copied().max().map(|at| at as usize);
    if let (Some(row), Some(step)) = (most(rows), most(steps)) {
        assert!(row + step < values.len(), "offsets within the values");
    }
}

#[inline(always)]
fn load<R: Register, const REGISTERS: usize, const WIDTH: usize>(
    from: &[f32; WIDTH],
) -> [R; REGISTERS] {
    std::array::from_fn(|at| R::load(&from[at * R::LEN..]))
}

impl<'a, const WIDTH: usize> Product<'a, WIDTH> {
    #[inline(always)]
    fn tiles<
        R: Register,
        const REGISTERS: usize,
        const ROWS: usize,
        const HALF: usize,
        const PACKED: usize,
        const HALF_PACKED: usize,
        const TOGETHER: usize,
    >(
        mut self,
    ) {
        let b = self.b;
        match self.a {
            Left::Windows {
                values,
                rows,
                steps,
            } => {
                check_offsets(rows, steps, values);
                let sums = self.sums(rows.len(), steps.len());
                for (rows, first) in rows.chunks(ROWS).zip((0..).step_by(ROWS)) {
                    for panel in 0..sums.panels() {
                        let tile = sums.tile(first, rows.len(), panel);
                        let b = &b[panel * self.b_step..];
                        match rows.len() <= HALF {
                            true => tile.of_windows::<R, REGISTERS, HALF>(values, rows, steps, b),
                            false => tile.of_windows::<R, REGISTERS, ROWS>(values, rows, steps, b),
                        }
                    }
                }
            }
            Left::Tiles {
                values,
                rows,
                steps,
            } => {
                let (values, _) = values.as_chunks::<PACKED>();
                let sums = self.sums(rows, steps);
                // Narrow panels are cheap to keep in the nearest cache, too, for a few tiles.
                for together in (0..rows).step_by(TOGETHER * PACKED) {
                    for panel in 0..sums.panels() {
                        let b = &b[panel * self.b_step..];
                        let end = rows.min(together + TOGETHER * PACKED);
                        for first in (together..end).step_by(PACKED) {
                            let values = &values[first / PACKED * steps..][..steps];
                            let tile = sums.tile(first, PACKED.min(rows - first), panel);
                            match tile.rows <= HALF_PACKED {
                                true => tile.of::<R, REGISTERS, HALF_PACKED, PACKED>(values, b),
                                false => tile.of::<R, REGISTERS, PACKED, PACKED>(values, b),
                            }
                        }
                    }
                }
            }
        }
    }

    /// Where the sums of so many rows and steps start and go.
    #[inline(always)]
    fn sums(&mut self, rows: usize, steps: usize) -> Sums<'a, WIDTH> {
        let (out, len, kind): (*mut f32, _, _) = match &mut self.out {
            Out::New(values) => (values.as_mut_ptr().cast(), values.len(), Kind::Set),
            Out::Old(values) => (values.as_mut_ptr(), values.len(), Kind::Set),
            Out::Sum(values) => (values.as_mut_ptr(), values.len(), Kind::Add),
            Out::Chain(values) => (values.as_mut_ptr().cast(), values.len(), Kind::Chain),
        };
        let sums = Sums {
            out,
            out_step: self.out_step,
            columns: self.columns,
            kind,
            first: self.first,
        };
        let panels = sums.panels();
        assert!(self.b.len() >= panels.saturating_sub(1) * self.b_step + steps);
        assert!(self.first.is_empty() || self.first.len() >= panels);
        assert!(rows == 0 || len >= (rows - 1) * self.out_step + self.columns);
        sums
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// The sums take the place of what is there.
    Set,
    Add,
    /// They start from what is there.
    Chain,
}

/// [`Product::out`] with all that belongs to it, in registers: as parts of a product they would be read again after each write.
#[derive(Clone, Copy)]
struct Sums<'a, const WIDTH: usize> {
    out: *mut f32,
    out_step: usize,
    columns: usize,
    kind: Kind,
    first: &'a [[f32; WIDTH]],
}

impl<'a, const WIDTH: usize> Sums<'a, WIDTH> {
    const ZEROS: [f32; WIDTH] = [0.0; WIDTH];

    #[inline(always)]
    fn panels(&self) -> usize {
        self.columns.div_ceil(WIDTH)
    }

    /// Those of `rows` rows from row `first` on, in a panel.
    #[inline(always)]
    fn tile(&self, first: usize, rows: usize, panel: usize) -> Tile<'a, WIDTH> {
        // All blocks below rest on this.
        // SAFETY: `Product::sums` has seen that the values of all rows and columns are there.
        let out = unsafe { self.out.add(first * self.out_step + panel * WIDTH) };
        Tile {
            out,
            step: self.out_step,
            rows,
            lanes: WIDTH.min(self.columns - panel * WIDTH),
            kind: self.kind,
            first: self.first.get(panel).unwrap_or(&Self::ZEROS),
        }
    }
}

/// The sums of a few rows in a panel.
#[derive(Clone, Copy)]
struct Tile<'a, const WIDTH: usize> {
    out: *mut f32,
    /// From one row to the next.
    step: usize,
    rows: usize,
    lanes: usize,
    kind: Kind,
    first: &'a [f32; WIDTH],
}

impl<const WIDTH: usize> Tile<'_, WIDTH> {
    /// Those of the first `ROWS` of `PACKED` rows.
    #[inline(always)]
    fn of<R: Register, const REGISTERS: usize, const ROWS: usize, const PACKED: usize>(
        self,
        values: &[[f32; PACKED]],
        b: &[[f32; WIDTH]],
    ) {
        self.add_up::<_, R, REGISTERS, ROWS>(values, b, |values, row| values[row]);
    }

    /// Those of rows and steps at these offsets, whose sums are within the values.
    #[inline(always)]
    fn of_windows<R: Register, const REGISTERS: usize, const ROWS: usize>(
        self,
        values: &[f32],
        rows: &[u32],
        steps: &[u32],
        b: &[[f32; WIDTH]],
    ) {
        // Rows past the last one repeat it, and are not written.
        let from: [*const f32; ROWS] = std::array::from_fn(|at| {
            let row = rows[at.min(rows.len() - 1)];
            values.as_ptr().wrapping_add(row as usize)
        });
        // SAFETY: the sum of the largest offsets is within the matrix.
        let value = |step: &u32, row: usize| unsafe { *from[row].add(*step as usize) };
        self.add_up::<_, R, REGISTERS, ROWS>(steps, b, value);
    }

    /// The chain of each row: of `value(step, row)` and a row of `b` for each step.
    #[inline(always)]
    fn add_up<S, R: Register, const REGISTERS: usize, const ROWS: usize>(
        self,
        steps: &[S],
        b: &[[f32; WIDTH]],
        value: impl Fn(&S, usize) -> f32,
    ) {
        let mut sums: [[R; REGISTERS]; ROWS] = self.start();
        for (step, b) in steps.iter().zip(b) {
            let b = load::<R, REGISTERS, WIDTH>(b);
            for (row, sums) in sums.iter_mut().enumerate() {
                let a = R::splat(value(step, row));
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum = a.mul_add(b, *sum);
                }
            }
        }
        self.put(sums);
    }

    /// Where they start. Rows past the last one repeat it.
    #[inline(always)]
    fn start<R: Register, const REGISTERS: usize, const ROWS: usize>(
        self,
    ) -> [[R; REGISTERS]; ROWS] {
        let some;
        // Addresses in place of two kinds of loads, between which the compiler would keep the sums in memory.
        let from: [*const f32; ROWS] = match self.kind {
            // SAFETY: the row is one of these.
            Kind::Chain if self.lanes == WIDTH => std::array::from_fn(|row| unsafe {
                self.out
                    .add(row.min(self.rows - 1) * self.step)
                    .cast_const()
            }),
            Kind::Chain => {
                some = self.some::<ROWS>();
                some.each_ref().map(|row| row.as_ptr())
            }
            _ => [self.first.as_ptr(); ROWS],
        };
        // SAFETY: each is the address of a row of so many values.
        from.map(|from| load(unsafe { &*from.cast::<[f32; WIDTH]>() }))
    }

    /// Writes or adds them. They are not a slice, which would be in memory.
    #[inline(always)]
    fn put<R: Register, const REGISTERS: usize, const ROWS: usize>(
        self,
        sums: [[R; REGISTERS]; ROWS],
    ) {
        if self.rows < ROWS || self.lanes < WIDTH {
            let mut values = [[0.0; WIDTH]; ROWS];
            for (values, sums) in values.iter_mut().zip(sums) {
                for (at, sum) in sums.into_iter().enumerate() {
                    sum.store(&mut values[at * R::LEN..]);
                }
            }
            return self.put_some(&values);
        }
        let is_sum = self.kind == Kind::Add;
        for (row, sums) in sums.into_iter().enumerate() {
            for (at, sum) in sums.into_iter().enumerate() {
                // SAFETY: all rows and lanes are there.
                let out = unsafe {
                    let at = self.out.add(row * self.step + at * R::LEN);
                    std::slice::from_raw_parts_mut(at, R::LEN)
                };
                match is_sum {
                    true => R::load(out).add(sum).store(out),
                    false => sum.store(out),
                }
            }
        }
    }

    /// What is there, with zeros in the lanes past the last one.
    #[inline(never)]
    fn some<const ROWS: usize>(self) -> [[f32; WIDTH]; ROWS] {
        std::array::from_fn(|row| {
            // SAFETY: the row and its lanes are there.
            padded(unsafe {
                let row = self.out.add(row.min(self.rows - 1) * self.step);
                std::slice::from_raw_parts(row, self.lanes)
            })
        })
    }

    /// Writes or adds the rows and lanes that there are.
    #[inline(never)]
    fn put_some<const ROWS: usize>(self, values: &[[f32; WIDTH]; ROWS]) {
        for (row, values) in values[..self.rows].iter().enumerate() {
            // SAFETY: the row and its lanes are there.
            let out = unsafe {
                std::slice::from_raw_parts_mut(self.out.add(row * self.step), self.lanes)
            };
            match self.kind {
                Kind::Add => out
                    .iter_mut()
                    .zip(values)
                    .for_each(|(out, value)| *out += value),
                _ => out.copy_from_slice(&values[..self.lanes]),
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
