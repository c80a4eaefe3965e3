//! Convolutions with the positions of a row of the output side by side in registers: for few outputs, which would leave registers of outputs
//! half empty, or fill only one for each value of the image.

#![expect(
    unsafe_code,
    reason = "the inner loop reads without checks what was checked before it, and results are not filled with zeros first"
)]

use std::mem::MaybeUninit;
use std::slice;

use crate::isa::{Isa, Kernels, Task};
use crate::product::check_offsets;
use crate::registers::Register;

/// The sums of one image for a panel of outputs, each in the order of the steps as those of a [`Product`](crate::product::Product).
pub(crate) struct ByRows<'a, const WIDTH: usize> {
    /// An image, in which windows are.
    pub(crate) values: &'a [f32],
    /// Offset of each position's window. Those of a row are one after another.
    pub(crate) positions: &'a [u32],
    /// Positions of a row, at least as many as a register has values.
    pub(crate) row: usize,
    /// Offset of each tap in a window.
    pub(crate) steps: &'a [u32],
    /// The outputs' weights for each step.
    pub(crate) weights: &'a [[f32; WIDTH]],
    /// Where the outputs' sums start.
    pub(crate) first: &'a [f32; WIDTH],
    /// Outputs that there are in the panel.
    pub(crate) outputs: usize,
    /// Their planes.
    pub(crate) out: &'a mut [MaybeUninit<f32>],
    /// From one plane to the next.
    pub(crate) plane: usize,
}

impl Kernels {
    /// Whether this is faster than panels of so many outputs, for rows of so many positions.
    pub(crate) fn is_by_rows(self, outputs: usize, row: usize) -> bool {
        match self.isa() {
            Isa::Avx512 => row >= 16 && !self.is_wide(outputs),
            Isa::Avx2 | Isa::Portable => row >= 8 && outputs <= 8,
        }
    }
}

impl<const WIDTH: usize> Task for ByRows<'_, WIDTH> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(mut self) {
        check_offsets(self.positions, self.steps, self.values);
        assert!(R::LEN <= self.row && self.positions.len().is_multiple_of(self.row));
        assert!(self.weights.len() == self.steps.len() && self.outputs <= WIDTH);
        assert!(self.out.len() >= (self.outputs - 1) * self.plane + self.positions.len());
        // As many outputs as there are registers for, with two for each.
        match R::LEN {
            16 => self.rows::<R, 8>(),
            _ => self.rows::<R, 4>(),
        }
    }
}

impl<const WIDTH: usize> ByRows<'_, WIDTH> {
    #[inline(always)]
    fn rows<R: Register, const MANY: usize>(&mut self) {
        for at in (0..self.positions.len()).step_by(self.row) {
            for output in (0..self.outputs).step_by(MANY) {
                match self.outputs - output {
                    1 => self.registers::<R, 1>(at, output),
                    _ => self.registers::<R, MANY>(at, output),
                }
            }
        }
    }

    /// Some outputs of a row. Its last positions may be computed twice.
    #[inline(always)]
    fn registers<R: Register, const OUTPUTS: usize>(&mut self, at: usize, output: usize) {
        let mut column = 0;
        while column < self.row {
            if self.row - column > R::LEN && self.row >= 2 * R::LEN {
                let from = column.min(self.row - 2 * R::LEN);
                self.sums::<R, OUTPUTS, 2>(at + from, output);
                column += 2 * R::LEN;
            } else {
                self.sums::<R, OUTPUTS, 1>(at + column.min(self.row - R::LEN), output);
                column += R::LEN;
            }
        }
    }

    /// The sums of some registers of positions for some outputs.
    #[inline(always)]
    fn sums<R: Register, const OUTPUTS: usize, const REGISTERS: usize>(
        &mut self,
        position: usize,
        output: usize,
    ) {
        // SAFETY, of all blocks: `run` has seen that the windows of all positions are in the image, and planes with them in the output. A
        // position is followed by those of `REGISTERS` registers in its row. A panel has a multiple of `OUTPUTS` lanes.
        let from = self.values.as_ptr();
        let from = from.wrapping_add(self.positions[position] as usize);
        let mut sums: [[R; REGISTERS]; OUTPUTS] =
            std::array::from_fn(|at| [R::splat(self.first[output + at]); REGISTERS]);
        for (step, weights) in self.steps.iter().zip(self.weights) {
            let values: [R; REGISTERS] = std::array::from_fn(|at| {
                R::load(unsafe {
                    slice::from_raw_parts(from.add(*step as usize + at * R::LEN), R::LEN)
                })
            });
            for (at, sums) in sums.iter_mut().enumerate() {
                let weight = R::splat(unsafe { *weights.as_ptr().add(output + at) });
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = weight.mul_add(value, *sum);
                }
            }
        }
        for (output, sums) in (output..).zip(sums) {
            if output >= self.outputs {
                break;
            }
            for (at, sum) in sums.into_iter().enumerate() {
                sum.store(unsafe {
                    let to = output * self.plane + position + at * R::LEN;
                    slice::from_raw_parts_mut(self.out.as_mut_ptr().add(to).cast(), R::LEN)
                });
            }
        }
    }
}
