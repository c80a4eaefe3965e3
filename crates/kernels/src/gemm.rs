//! Products of two matrices.

#![expect(unsafe_code, reason = "results are not filled with zeros first")]

use std::mem::MaybeUninit;
use std::ops::Range;

use crate::isa::{Kernels, Task};
use crate::product::{Left, Out, PIECE, Product, padded};
use crate::registers::Register;
use crate::scratch::Scratch;
use crate::threads::{each_mut, written};
use crate::transpose::{to_planes, to_rows};

/// Rows of the left matrix that stay in the second cache while all panels pass.
pub(crate) const BLOCK: usize = 168;
/// Panels that stay in the second cache while a block of rows passes.
const GROUP: usize = 16;
/// Panels that are copied at once.
const TOGETHER: usize = 4;
/// Rows that the registers of every instruction set share evenly.
const UNIT: usize = 42;

/// A matrix anywhere in memory.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Whether the values of a column, not those of a row, are side by side.
    pub(crate) transposed: bool,
}

/// A product of two matrices with these shapes, each of which may lie transposed in memory.
///
/// *Numerics*: a value starts from the bias, or zero, and is a sum of pieces of up to 256 steps along the depth, each one fused
/// multiply-add after another.
///
/// *Example*:
/// ```
/// use paceline_kernels::{Gemm, Kernels};
///
/// let gemm = Gemm { rows: 2, columns: 1, depth: 3, a_transposed: false, b_transposed: false };
/// let product = Kernels::of_process()?.gemm(&gemm, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[1.0, 1.0, 2.0], None);
/// assert_eq!(product, [9.0, 21.0]);
/// # Ok::<(), paceline_kernels::IsaError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Gemm {
    /// Of the left matrix and the result.
    pub rows: usize,
    /// Of the right matrix and the result.
    pub columns: usize,
    /// Columns of the left matrix and rows of the right one.
    pub depth: usize,
    /// The left matrix is `[depth, rows]` in memory.
    pub a_transposed: bool,
    /// The right matrix is `[columns, depth]` in memory.
    pub b_transposed: bool,
}

impl Kernels {
    /// The product of `a` and `b`, to which `bias` is added for each column.
    ///
    /// *Shape*: `a` is `[rows, depth]`, `b` is `[depth, columns]`, `bias` has a value for each column; the result is `[rows, columns]`.
    ///
    /// *Memory*: a copy of `b`, or of `a` if that is smaller and `b` transposed; less for few rows.
    ///
    /// # Panics
    ///
    /// If a slice has another length.
    pub fn gemm(self, gemm: &Gemm, a: &[f32], b: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
        let Gemm {
            rows,
            columns,
            depth,
            ..
        } = *gemm;
        assert_eq!(a.len(), rows * depth, "the left matrix of {gemm:?}");
        assert_eq!(b.len(), depth * columns, "the right matrix of {gemm:?}");
        assert!(
            bias.is_none_or(|bias| bias.len() == columns),
            "a bias for each column of {gemm:?}"
        );
        if rows == 0 || columns == 0 {
            return Vec::new();
        }
        let a = View {
            values: a,
            rows,
            columns: depth,
            transposed: gemm.a_transposed,
        };
        let b = View {
            values: b,
            rows: depth,
            columns,
            transposed: gemm.b_transposed,
        };
        // The right matrix is copied, which is slow if it is transposed.
        let swaps = b.transposed && rows < columns && bias.is_none();
        match (swaps, self.is_wide(if swaps { rows } else { columns })) {
            (false, true) => product::<32>(self, a, b, bias),
            (false, false) => product::<16>(self, a, b, bias),
            (true, true) => transposed_product::<32>(self, b.transpose(), a.transpose()),
            (true, false) => transposed_product::<16>(self, b.transpose(), a.transpose()),
        }
    }
}

/// `a * b + bias`.
fn product<const WIDTH: usize>(
    kernels: Kernels,
    a: View<'_>,
    b: View<'_>,
    bias: Option<&[f32]>,
) -> Vec<f32> {
    let columns = b.columns;
    // A panel that few rows meet is copied when they do, and never leaves the nearest cache.
    let packed = (b.transposed || a.rows > 2 * BLOCK).then(|| Packed::<WIDTH>::new(kernels, b));
    let first: Vec<[f32; WIDTH]> = match bias {
        Some(bias) => bias.chunks(WIDTH).map(padded).collect(),
        None => vec![[0.0; WIDTH]; columns.div_ceil(WIDTH)],
    };
    let fill = |unit: usize, out: &mut [MaybeUninit<f32>]| {
        let some = match packed {
            Some(_) => 0,
            None => GROUP.min(first.len()) * PIECE.min(b.rows),
        };
        let mut own = Scratch::new(some * WIDTH);
        let mut copied = Scratch::new(BLOCK * PIECE.min(a.columns));
        let blocks = out
            .chunks_mut(BLOCK * columns)
            .zip((unit * UNIT..).step_by(BLOCK));
        for (out, row) in blocks {
            let rows = row..row + out.len() / columns;
            for steps in pieces(b.rows) {
                let windows;
                let left = match first.len() < 3 && !a.transposed {
                    true => {
                        windows = a.windows(&rows, &steps);
                        windows.left()
                    }
                    false => a.tiles(kernels, &rows, &steps, &mut copied),
                };
                for (group, first) in first.chunks(GROUP).enumerate() {
                    let panel = group * GROUP;
                    // Where the panels are, and from one to the next.
                    let (panels, step) = match &packed {
                        Some(packed) => (packed.panel((panel, steps.start)), packed.steps),
                        None => {
                            let own = &mut own.rows_mut()[..first.len() * steps.len()];
                            b.pack(kernels, (panel, steps.start), steps.len(), own);
                            (&*own, steps.len())
                        }
                    };
                    let column = panel * WIDTH;
                    let out = &mut out[column..];
                    kernels.run(Product {
                        a: left,
                        b: panels,
                        b_step: step,
                        first: if steps.start == 0 { first } else { &[] },
                        out: match steps.start {
                            0 => Out::New(out),
                            // SAFETY: the first piece has written all panels of these rows.
                            _ => Out::Sum(unsafe { out.assume_init_mut() }),
                        },
                        out_step: columns,
                        columns: (columns - column).min(first.len() * WIDTH),
                    });
                }
            }
        }
    };
    // SAFETY: each block writes all panels of its rows.
    unsafe {
        written(
            a.rows * columns,
            UNIT * columns,
            a.rows * b.values.len(),
            fill,
        )
    }
}

/// The transposed of `a * b`.
fn transposed_product<const WIDTH: usize>(kernels: Kernels, a: View<'_>, b: View<'_>) -> Vec<f32> {
    let packed = Packed::<WIDTH>::new(kernels, b);
    let fill = |panel: usize, out: &mut [MaybeUninit<f32>]| {
        let mut sums = Scratch::new(BLOCK * WIDTH);
        let sums = sums.rows_mut::<WIDTH>();
        for (out, panel) in out.chunks_mut(WIDTH * a.rows).zip(panel..) {
            let lanes = out.len() / a.rows;
            for row in (0..a.rows).step_by(BLOCK) {
                let rows = row..a.rows.min(row + BLOCK);
                let sums = &mut sums[..rows.len()];
                for steps in pieces(a.columns) {
                    let out = sums.as_flattened_mut();
                    kernels.run(Product {
                        a: a.windows(&rows, &steps).left(),
                        b: packed.panel((panel, steps.start)),
                        b_step: 0,
                        first: &[],
                        out: if steps.start == 0 {
                            Out::Old(out)
                        } else {
                            Out::Sum(out)
                        },
                        out_step: WIDTH,
                        columns: WIDTH,
                    });
                }
                to_planes(kernels, sums, &mut out[row..], a.rows, lanes);
            }
        }
    };
    // SAFETY: the panels have all columns, and each has all rows.
    unsafe {
        written(
            a.rows * b.columns,
            WIDTH * a.rows,
            b.columns * a.values.len(),
            fill,
        )
    }
}

/// Parts of all steps, at least one.
pub(crate) fn pieces(steps: usize) -> impl Iterator<Item = Range<usize>> {
    let count = steps.div_ceil(PIECE).max(1);
    (0..count).map(move |piece| piece * PIECE..steps.min((piece + 1) * PIECE))
}

impl View<'_> {
    pub(crate) fn transpose(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            transposed: !self.transposed,
            ..self
        }
    }

    /// Rows of a left matrix that stay where they are, and some of their values: for few panels, which would not pay for a copy. It is not
    /// transposed.
    fn windows(&self, rows: &Range<usize>, steps: &Range<usize>) -> Windows<'_> {
        let offset = |at: usize| at.try_into().expect("a block of less than 16 GiB");
        Windows {
            values: &self.values
                [(rows.start * self.columns + steps.start).min(self.values.len())..],
            rows: (0..rows.len())
                .map(|row| offset(row * self.columns))
                .collect(),
            steps: (0..steps.len()).map(offset).collect(),
        }
    }

    /// Copies rows of a left matrix, and some of their values.
    pub(crate) fn tiles<'a>(
        &self,
        kernels: Kernels,
        rows: &Range<usize>,
        steps: &Range<usize>,
        out: &'a mut [f32],
    ) -> Left<'a> {
        match kernels.tile() {
            14 => self.copy_tiles::<14>(kernels, rows, steps, out.as_chunks_mut().0),
            6 => self.copy_tiles::<6>(kernels, rows, steps, out.as_chunks_mut().0),
            _ => unreachable!("tiles of 14 or 6 rows"),
        }
        Left::Tiles {
            values: out,
            rows: rows.len(),
            steps: steps.len(),
        }
    }

    fn copy_tiles<const TILE: usize>(
        &self,
        kernels: Kernels,
        rows: &Range<usize>,
        steps: &Range<usize>,
        out: &mut [[f32; TILE]],
    ) {
        if self.transposed {
            // One step after another, because a row is read faster than a column.
            let values = self.values[steps.start * self.rows..].chunks_exact(self.rows);
            for (step, values) in values.take(steps.len()).enumerate() {
                let (whole, rest) = values[rows.clone()].as_chunks();
                let mut tiles = out[step..].iter_mut().step_by(steps.len());
                for (values, tile) in whole.iter().zip(tiles.by_ref()) {
                    *tile = *values;
                }
                if let Some(tile) = tiles.next() {
                    tile[..rest.len()].copy_from_slice(rest);
                }
            }
            return;
        }
        let tiles = out.chunks_mut(steps.len().max(1));
        for (out, row) in tiles.zip(rows.clone().step_by(TILE)) {
            let values = &self.values[row * self.columns + steps.start..];
            let height = TILE.min(rows.end - row);
            to_rows(
                kernels,
                values,
                self.columns,
                height,
                &mut out[..steps.len()],
            );
        }
    }

    /// Copies panels from the given one on, as many as there is room for, with so many rows from the given one on.
    fn pack<const WIDTH: usize>(
        &self,
        kernels: Kernels,
        (panel, row): (usize, usize),
        steps: usize,
        out: &mut [[f32; WIDTH]],
    ) {
        let steps = steps.max(1);
        let columns = (panel * WIDTH..).step_by(WIDTH);
        if self.transposed {
            for (out, column) in out.chunks_exact_mut(steps).zip(columns) {
                let lanes = WIDTH.min(self.columns - column);
                let values = &self.values[column * self.rows + row..];
                to_rows(kernels, values, self.rows, lanes, out);
            }
            return;
        }
        kernels.run(Pack {
            rows: &self.values[row * self.columns..],
            step: self.columns,
            first: panel * WIDTH,
            steps,
            out,
        });
    }
}

/// Panels of columns from the first one on, of rows with this step.
struct Pack<'a, const WIDTH: usize> {
    rows: &'a [f32],
    step: usize,
    first: usize,
    steps: usize,
    out: &'a mut [[f32; WIDTH]],
}

impl<const WIDTH: usize> Task for Pack<'_, WIDTH> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        // Some panels at a time, because a row is read faster than a column, and lines of many panels share places in the nearest cache.
        let groups = self.out.chunks_mut(TOGETHER * self.steps);
        for (out, column) in groups.zip((self.first..).step_by(TOGETHER * WIDTH)) {
            for at in 0..self.steps {
                let values = &self.rows[at * self.step..][column..self.step];
                let (whole, rest) = values.as_chunks::<WIDTH>();
                let mut rows = out[at..].iter_mut().step_by(self.steps);
                for (values, row) in whole.iter().zip(rows.by_ref()) {
                    for at in (0..WIDTH).step_by(R::LEN) {
                        R::load(&values[at..]).store(&mut row[at..]);
                    }
                }
                if let Some(row) = rows.next() {
                    *row = padded(rest);
                }
            }
        }
    }
}

/// Values, and the offsets of rows and steps.
struct Windows<'a> {
    values: &'a [f32],
    rows: Vec<u32>,
    steps: Vec<u32>,
}

impl Windows<'_> {
    fn left(&self) -> Left<'_> {
        Left::Windows {
            values: self.values,
            rows: &self.rows,
            steps: &self.steps,
        }
    }
}

/// Panels of all columns, with a row for each step.
struct Packed<const WIDTH: usize> {
    values: Scratch,
    steps: usize,
}

impl<const WIDTH: usize> Packed<WIDTH> {
    fn new(kernels: Kernels, matrix: View<'_>) -> Self {
        let steps = matrix.rows;
        let mut values = Scratch::new(matrix.columns.div_ceil(WIDTH) * steps * WIDTH);
        each_mut(
            values.rows_mut::<WIDTH>(),
            steps,
            matrix.values.len(),
            |panel, panels| {
                matrix.pack(kernels, (panel, 0), steps, panels);
            },
        );
        Self { values, steps }
    }

    fn panel(&self, (panel, step): (usize, usize)) -> &[[f32; WIDTH]] {
        &self.values.rows()[panel * self.steps + step..]
    }
}
