//! The gradient of a weight: tiles of the output's gradient are filters of the input's, and each sum is over tiles.

#![expect(unsafe_code, reason = "results are not filled with zeros first")]

use std::mem::MaybeUninit;
use std::ops::Range;

use super::numbers::{Places, ToFilters, ToWindows};
use super::products::Chain;
use super::{LANES, NUMBERS, Planes, TAPS, Winograd};
use crate::isa::Kernels;
use crate::scratch::Scratch;
use crate::threads::{by_unit, each_mut, written};
use crate::transpose::to_planes;

/// Tiles that a chain adds up, or those of one row. Part of the bits.
const CHAIN: usize = 128;

impl Winograd {
    /// The gradient of the weight, from images and the gradient of their outputs.
    pub(crate) fn weight_gradient(
        &self,
        kernels: Kernels,
        x: &[f32],
        gradient: &[f32],
    ) -> Vec<f32> {
        match kernels.is_wide(self.outputs) {
            true => self.weight_gradient_of::<32>(kernels, x, gradient),
            false => self.weight_gradient_of::<16>(kernels, x, gradient),
        }
    }

    fn weight_gradient_of<const WIDTH: usize>(
        &self,
        kernels: Kernels,
        x: &[f32],
        gradient: &[f32],
    ) -> Vec<f32> {
        let [down, across] = self.tiles();
        let panels = self.outputs.div_ceil(WIDTH);
        let depth = self.channels.next_multiple_of(LANES);
        // An odd number of cache lines, so that tiles have different places in the nearest cache.
        let step = ((depth / LANES) | 1) * LANES;
        // Rows of tiles, of whichever images, and tiles of a chain.
        let rows = x.len() / self.of_input() * down;
        let of_chain = CHAIN.div_ceil(across);
        let of_panel = of_chain * across;
        let of_x = of_panel * step + LANES;
        let of_gradient = panels * of_panel * WIDTH + LANES;
        let of_both = NUMBERS * (of_x + of_gradient);
        let chains: Vec<Range<usize>> = (0..rows)
            .step_by(of_chain)
            .map(|start| start..rows.min(start + of_chain))
            .collect();
        let threads = rayon::current_num_threads();
        let mut numbers = Scratch::new(threads.min(chains.len()) * of_both);
        // By number and panel, with a row for each channel.
        let mut sums = Scratch::new(NUMBERS * panels * depth * WIDTH);
        if chains.is_empty() {
            sums.fill(0.0);
        }
        for (round, chains) in chains.chunks(threads).enumerate() {
            let numbers = &mut numbers[..chains.len() * of_both];
            let cost = numbers.len();
            each_mut(numbers, of_both, cost, |first, numbers| {
                let mut strip = Scratch::new(self.strip(of_chain));
                for (chain, numbers) in chains[first..]
                    .iter()
                    .zip(numbers.chunks_exact_mut(of_both))
                {
                    let (in_x, in_gradient) = numbers.split_at_mut(NUMBERS * of_x);
                    for (part, image, row) in by_unit(chain.clone(), down) {
                        let first = part.start * across;
                        let x = &x[image * self.of_input()..][..self.of_input()];
                        let out = &mut in_x[first * step..];
                        let tiles = [part.len(), across];
                        let places = Places {
                            tiles,
                            step,
                            of_number: of_x,
                        };
                        self.turn(kernels, x, row, &mut strip, out, places);
                        let places = Places {
                            tiles,
                            step: WIDTH,
                            of_number: of_gradient,
                        };
                        let gradient = &gradient[image * self.of_output()..][..self.of_output()];
                        for output in (0..self.outputs).step_by(LANES) {
                            let at = (output / WIDTH * of_panel + first) * WIDTH + output % WIDTH;
                            let out = &mut in_gradient[at..];
                            let from = [output, row];
                            self.turn_filters(kernels, gradient, from, &mut strip, out, places);
                        }
                    }
                }
            });
            let numbers = &*numbers;
            let sums = sums.rows_mut::<WIDTH>();
            let cost = sums.len() * WIDTH * of_panel * chains.len();
            each_mut(sums, LANES, cost, |first, sums| {
                let all = first * LANES..first * LANES + sums.len();
                for (some, at, channel) in by_unit(all, depth) {
                    let (number, panel) = (at / panels, at % panels);
                    let channels = (channel..).step_by(LANES);
                    for (sums, channel) in sums[some].chunks_exact_mut(LANES).zip(channels) {
                        for (chain, rows) in chains.iter().enumerate() {
                            let of_chain = &numbers[chain * of_both..][..of_both];
                            let (in_x, in_gradient) = of_chain.split_at(NUMBERS * of_x);
                            let gradient = number * of_gradient + panel * of_panel * WIDTH;
                            let gradient = &in_gradient[gradient..][..rows.len() * across * WIDTH];
                            kernels.run(Chain {
                                values: &in_x[number * of_x + channel..],
                                step,
                                gradient: gradient.as_chunks().0,
                                sums,
                                is_first: round + chain == 0,
                            });
                        }
                    }
                }
            });
        }
        let of_output = self.channels * TAPS;
        let fill = |first: usize, result: &mut [MaybeUninit<f32>]| {
            let mut windows = Scratch::new(of_output * WIDTH);
            let windows = windows.rows_mut::<WIDTH>();
            let panels_of = result.chunks_mut(WIDTH * of_output);
            for (panel, result) in (first..).zip(panels_of) {
                kernels.run(ToWindows {
                    sums: &sums[panel * depth * WIDTH..],
                    of_number: panels * depth * WIDTH,
                    windows,
                });
                let lanes = result.len() / of_output;
                to_planes(kernels, windows, result, of_output, lanes);
            }
        };
        let len = self.outputs * of_output;
        // SAFETY: the panels have all outputs, and rows for all taps.
        unsafe { written(len, WIDTH * of_output, sums.len(), fill) }
    }

    /// Writes the numbers of the tiles of some outputs' gradients, from an output and a row of tiles on.
    fn turn_filters(
        &self,
        kernels: Kernels,
        gradient: &[f32],
        [output, row]: [usize; 2],
        strip: &mut Scratch,
        out: &mut [f32],
        places: Places,
    ) {
        let [down, across] = places.tiles;
        let rows = 2 * row..2 * (row + down);
        let strip = strip.rows_mut();
        let planes = Planes {
            values: &gradient[output * self.out[0] * self.out[1]..],
            count: LANES.min(self.outputs - output),
            size: self.out,
            padding: [0; 2],
        };
        planes.copy(kernels, rows, 2 * across, strip);
        kernels.run(ToFilters { strip, out, places });
    }
}
