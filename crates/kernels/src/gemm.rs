//! Products of two matrices.

#![expect(unsafe_code, reason = "results are not filled with zeros first")]

use std::mem::MaybeUninit;

use crate::isa::Kernels;
use crate::product::{Out, PIECE, Product};
use crate::scratch::Scratch;
use crate::threads::{each_mut, written};
use crate::transpose::{to_planes, to_rows};

/// Rows of the left matrix that stay in the second cache while all panels pass.
const BLOCK: usize = 96;
/// Rows that the registers of every instruction set share evenly.
const UNIT: usize = 24;

/// A matrix anywhere in memory.
#[derive(Clone, Copy)]
struct View<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    /// Whether the values of a column, not those of a row, are side by side.
    transposed: bool,
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
    /// *Memory*: a copy of the smaller matrix, if `b` is transposed.
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
    let packed = b.transposed.then(|| Packed::<WIDTH>::new(b));
    let first: Vec<[f32; WIDTH]> = match bias {
        Some(bias) => bias.chunks(WIDTH).map(padded).collect(),
        None => vec![[0.0; WIDTH]; columns.div_ceil(WIDTH)],
    };
    let steps = a.steps();
    let fill = |unit: usize, out: &mut [MaybeUninit<f32>]| {
        let mut own = Scratch::new(PIECE.min(b.rows) * WIDTH);
        let (own, _) = own.as_chunks_mut();
        let blocks = out
            .chunks_mut(BLOCK * columns)
            .zip((unit * UNIT..).step_by(BLOCK));
        for (out, row) in blocks {
            let rows = a.starts(row, out.len() / columns);
            for (piece, steps) in pieces(&steps).enumerate() {
                for (panel, first) in first.iter().enumerate() {
                    let out = &mut out[panel * WIDTH..];
                    let place = (panel, piece * PIECE);
                    kernels.run(Product {
                        a: a.values,
                        rows: &rows,
                        steps,
                        b: match &packed {
                            Some(packed) => packed.panel(place),
                            None => {
                                let own = &mut own[..steps.len()];
                                b.pack(place, own);
                                own
                            }
                        },
                        first: if piece == 0 { first } else { &[0.0; WIDTH] },
                        out: match piece {
                            0 => Out::New(out),
                            // SAFETY: the first piece has written all panels of these rows.
                            _ => Out::Sum(unsafe { out.assume_init_mut() }),
                        },
                        out_step: columns,
                        lanes: WIDTH.min(columns - panel * WIDTH),
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
    let packed = Packed::<WIDTH>::new(b);
    let steps = a.steps();
    let fill = |panel: usize, out: &mut [MaybeUninit<f32>]| {
        let mut sums = [[0.0; WIDTH]; BLOCK];
        for (out, panel) in out.chunks_mut(WIDTH * a.rows).zip(panel..) {
            let lanes = out.len() / a.rows;
            for row in (0..a.rows).step_by(BLOCK) {
                let rows = a.starts(row, BLOCK.min(a.rows - row));
                let sums = &mut sums[..rows.len()];
                for (piece, steps) in pieces(&steps).enumerate() {
                    let out = sums.as_flattened_mut();
                    kernels.run(Product {
                        a: a.values,
                        rows: &rows,
                        steps,
                        b: packed.panel((panel, piece * PIECE)),
                        first: &[0.0; WIDTH],
                        out: if piece == 0 {
                            Out::Old(out)
                        } else {
                            Out::Sum(out)
                        },
                        out_step: WIDTH,
                        lanes: WIDTH,
                    });
                }
                to_planes(sums, &mut out[row..], a.rows, lanes);
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

/// The parts of all steps, at least one.
fn pieces(steps: &[u32]) -> impl Iterator<Item = &[u32]> {
    (0..steps.len().max(1))
        .step_by(PIECE)
        .map(|from| &steps[from..steps.len().min(from + PIECE)])
}

impl View<'_> {
    fn transpose(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            transposed: !self.transposed,
            ..self
        }
    }

    /// Where rows start.
    fn starts(&self, first: usize, count: usize) -> Vec<u32> {
        let step = if self.transposed { 1 } else { self.columns };
        (first..first + count)
            .map(|row| offset(row * step))
            .collect()
    }

    /// Where a row has its values, from its start.
    fn steps(&self) -> Vec<u32> {
        let step = if self.transposed { self.rows } else { 1 };
        (0..self.columns).map(|at| offset(at * step)).collect()
    }

    /// Copies columns from the panel's first on, and rows from the given one on.
    fn pack<const WIDTH: usize>(&self, (panel, row): (usize, usize), out: &mut [[f32; WIDTH]]) {
        let column = panel * WIDTH;
        if self.transposed {
            let lanes = WIDTH.min(self.columns - column);
            to_rows(
                &self.values[column * self.rows + row..],
                self.rows,
                lanes,
                out,
            );
            return;
        }
        let rows = self.values[row * self.columns..].chunks_exact(self.columns);
        for (row, out) in rows.zip(out) {
            *out = match row[column..].first_chunk() {
                Some(row) => *row,
                None => padded(&row[column..]),
            };
        }
    }
}

/// Panels of all columns, with a row for each step.
struct Packed<const WIDTH: usize> {
    values: Scratch,
    steps: usize,
}

impl<const WIDTH: usize> Packed<WIDTH> {
    fn new(matrix: View<'_>) -> Self {
        let steps = matrix.rows;
        let mut values = Scratch::new(matrix.columns.div_ceil(WIDTH) * steps * WIDTH);
        let (panels, _) = values.as_chunks_mut::<WIDTH>();
        each_mut(panels, steps, matrix.values.len(), |panel, panels| {
            for (panel, out) in (panel..).zip(panels.chunks_exact_mut(steps.max(1))) {
                matrix.pack((panel, 0), out);
            }
        });
        Self { values, steps }
    }

    fn panel(&self, (panel, step): (usize, usize)) -> &[[f32; WIDTH]] {
        let (panels, _) = self.values.as_chunks();
        &panels[panel * self.steps + step..]
    }
}

fn padded<const WIDTH: usize>(values: &[f32]) -> [f32; WIDTH] {
    let mut row = [0.0; WIDTH];
    row[..values.len()].copy_from_slice(values);
    row
}

fn offset(at: usize) -> u32 {
    at.try_into().expect("a matrix of less than 16 GiB")
}
