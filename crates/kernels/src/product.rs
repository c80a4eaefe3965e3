//! The one inner loop of convolutions: a product of a matrix that lies anywhere in memory and a panel of columns.

#![expect(
    unsafe_code,
    reason = "the inner loop reads without checks what was checked before it"
)]

use crate::isa::Task;
use crate::registers::Register;

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
    /// One row for each of `rows`.
    pub(crate) out: &'a mut [[f32; WIDTH]],
    /// Adds the sums to what `out` has.
    pub(crate) adds: bool,
}

impl<const WIDTH: usize> Task for Product<'_, WIDTH> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(self) {
        let most = |offsets: &[u32]| offsets.iter().copied().max().map(|most| most as usize);
        if let (Some(row), Some(step)) = (most(self.rows), most(self.steps)) {
            assert!(row + step < self.a.len(), "offsets within the matrix");
        }
        assert!(self.b.len() >= self.steps.len() && self.out.len() == self.rows.len());
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
    fn tiles<R: Register, const REGISTERS: usize, const ROWS: usize>(self) {
        let load = |from: &[f32; WIDTH]| -> [R; REGISTERS] {
            std::array::from_fn(|at| R::load(&from[at * R::LEN..]))
        };
        let first = load(self.first);
        let tiles = self.rows.chunks(ROWS).zip(self.out.chunks_mut(ROWS));
        for (rows, out) in tiles {
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
            for (out, sums) in out.iter_mut().zip(sums) {
                for (at, sum) in sums.into_iter().enumerate() {
                    let out = &mut out[at * R::LEN..];
                    match self.adds {
                        true => R::load(out).add(sum).store(out),
                        false => sum.store(out),
                    }
                }
            }
        }
    }
}
