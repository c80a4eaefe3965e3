//! Products of the numbers of tiles.

#![expect(
    unsafe_code,
    reason = "inner loops read without checks what was checked before them"
)]

use super::LANES;
use crate::isa::Task;
use crate::product::{Left, Out, Product};
use crate::registers::Register;

/// Steps whose weights stay in the nearest cache while tiles pass, where there are no registers for them.
const CACHED: usize = 144;
/// Tiles whose chains are added up at once: beside the weights, as many as there are registers for. An addition takes as long as eight,
/// but values come unevenly.
const TOGETHER: usize = 14;

/// One number of some tiles times its weights, over channels. Each sum is one chain.
pub(super) struct Products<'a> {
    /// For each tile, the values of its channels.
    pub(super) values: &'a [f32],
    /// A row for each channel.
    pub(super) weights: &'a [[f32; LANES]],
    /// A row for each tile.
    pub(super) sums: &'a mut [[f32; LANES]],
    /// Where each tile's values begin, and each channel's value after that.
    pub(super) offsets: [&'a [u32]; 2],
}

impl Task for Products<'_> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(mut self) {
        let (tiles, channels) = (self.sums.len(), self.weights.len());
        assert!(self.values.len() == tiles * channels && channels.is_multiple_of(LANES));
        if R::LEN < LANES {
            return self.with_weights_in_memory::<R>();
        }
        for first in (0..channels).step_by(LANES) {
            let mut weights = [R::splat(0.0); LANES];
            for (weight, row) in weights.iter_mut().zip(&self.weights[first..]) {
                *weight = R::load(row);
            }
            let whole = tiles / TOGETHER * TOGETHER;
            for tile in (0..whole).step_by(TOGETHER) {
                self.add::<R, TOGETHER>(weights, tile, first);
            }
            let fours = whole + (tiles - whole) / 4 * 4;
            for tile in (whole..fours).step_by(4) {
                self.add::<R, 4>(weights, tile, first);
            }
            for tile in fours..tiles {
                self.add::<R, 1>(weights, tile, first);
            }
        }
    }
}

impl Products<'_> {
    /// Goes on with the chains of some tiles: over the channels of these weights, which stay in registers.
    #[inline(always)]
    fn add<R: Register, const TILES: usize>(
        &mut self,
        weights: [R; LANES],
        tile: usize,
        first: usize,
    ) {
        let channels = self.weights.len();
        let sums = &mut self.sums[tile..][..TILES];
        let values = self.values[tile * channels + first..].as_ptr();
        let mut rows = [values; TILES];
        for (tile, row) in rows.iter_mut().enumerate() {
            *row = values.wrapping_add(tile * channels);
        }
        let mut chains = [R::splat(0.0); TILES];
        if first > 0 {
            for (chain, row) in chains.iter_mut().zip(&*sums) {
                *chain = R::load(row);
            }
        }
        // A loop would not be unrolled, and its weights be read from memory.
        macro_rules! steps {
            ($($step:literal)*) => {$(
                for (row, chain) in rows.iter().zip(&mut chains) {
                    // SAFETY: `run` has seen that each tile has a value for each weight.
                    let value = R::splat(unsafe { *row.add($step) });
                    *chain = value.mul_add(weights[$step], *chain);
                }
            )*};
        }
        steps!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
        for (chain, row) in chains.into_iter().zip(sums) {
            chain.store(row);
        }
    }

    #[inline(always)]
    fn with_weights_in_memory<R: Register>(self) {
        let channels = self.weights.len();
        let (tiles, [rows, steps]) = (self.sums.len(), self.offsets);
        let sums = self.sums.as_flattened_mut();
        for first in (0..channels).step_by(CACHED) {
            let some = first..channels.min(first + CACHED);
            let product = Product {
                a: Left::Windows {
                    values: self.values,
                    rows: &rows[..tiles],
                    steps: &steps[some.clone()],
                },
                b: &self.weights[some],
                b_step: 0,
                first: &[],
                out: match first {
                    0 => Out::Old(sums),
                    _ => Out::chain(sums),
                },
                out_step: LANES,
                columns: LANES,
            };
            product.run::<R>();
        }
    }
}

/// One number of some tiles: of a group of channels, times that of the outputs' gradients. Each sum is one chain.
pub(super) struct Chain<'a, const WIDTH: usize> {
    /// From the first channel of the first tile on.
    pub(super) values: &'a [f32],
    pub(super) step: usize,
    /// A row for each tile.
    pub(super) gradient: &'a [[f32; WIDTH]],
    /// A row for each channel.
    pub(super) sums: &'a mut [[f32; WIDTH]],
    /// Whether there is nothing yet that the chain is added to.
    pub(super) is_first: bool,
}

impl<const WIDTH: usize> Task for Chain<'_, WIDTH> {
    type Output = ();

    #[inline(always)]
    fn run<R: Register>(mut self) {
        let tiles = self.gradient.len();
        assert!(self.sums.len() == LANES && tiles > 0);
        assert!(self.values.len() >= (tiles - 1) * self.step + LANES);
        match (R::LEN, WIDTH / R::LEN) {
            (16, 1) => self.rows::<R, 1, 16>(),
            (16, 2) => self.rows::<R, 2, 8>(),
            (8, 2) => self.rows::<R, 2, 4>(),
            _ => unreachable!("panels of 16 columns, or of 32 for wide registers"),
        }
    }
}

impl<const WIDTH: usize> Chain<'_, WIDTH> {
    #[inline(always)]
    fn rows<R: Register, const REGISTERS: usize, const ROWS: usize>(&mut self) {
        for first in (0..LANES).step_by(ROWS) {
            let mut chains = [[R::splat(0.0); REGISTERS]; ROWS];
            let mut from = self.values[first..].as_ptr();
            for gradient in self.gradient {
                let mut factors = [R::splat(0.0); REGISTERS];
                for (at, factor) in factors.iter_mut().enumerate() {
                    *factor = R::load(&gradient[at * R::LEN..]);
                }
                for (row, chains) in chains.iter_mut().enumerate() {
                    // SAFETY: there are as many values for each tile.
                    let value = R::splat(unsafe { *from.add(row) });
                    for (chain, factor) in chains.iter_mut().zip(factors) {
                        *chain = value.mul_add(factor, *chain);
                    }
                }
                from = from.wrapping_add(self.step);
            }
            for (chains, sums) in chains.into_iter().zip(&mut self.sums[first..]) {
                for (at, chain) in chains.into_iter().enumerate() {
                    let sums = &mut sums[at * R::LEN..];
                    match self.is_first {
                        true => chain.store(sums),
                        false => R::load(sums).add(chain).store(sums),
                    }
                }
            }
        }
    }
}
