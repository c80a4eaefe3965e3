//! Convolutions with windows of 3 x 3 and a stride of 1, by [Winograd's minimal filtering][paper]: 2.25 times fewer multiplications.
//!
//! Outputs come in tiles of 2 x 2, each from 4 x 4 values of the input. Both are turned into 16 numbers by additions, and so are the windows of
//! the weight. Each of the 16 is then a product of matrices: tiles by channels, and channels by outputs. For the gradient of the weight,
//! the gradient's tiles are the filters, the weight's windows are the outputs, and the sums are over tiles.
//!
//! [paper]: https://arxiv.org/abs/1509.09308

#![expect(unsafe_code, reason = "results are not filled with zeros first")]

mod numbers;
mod products;
mod weight_gradient;

use std::mem::MaybeUninit;
use std::ops::Range;

use self::numbers::{FromSums, Places, ToNumbers, ToWeights};
use self::products::Products;
use crate::conv::Conv;
use crate::isa::Kernels;
use crate::scratch::Scratch;
use crate::threads::{by_unit, each_mut, written};
use crate::transpose::{to_planes, to_rows};

/// Values of a window of the weight.
const TAPS: usize = 9;
/// Numbers of a tile, in rows of four.
const NUMBERS: usize = 16;
/// Planes that are turned at once.
const LANES: usize = 16;
/// Channels, and outputs, below which turning takes longer than it saves.
const CHANNELS_MIN: usize = 16;
/// Rows and columns of a plane, likewise.
const SIDE_MIN: usize = 4;
/// Windows of a weight above which their numbers do not stay in a cache.
const WINDOWS_MAX: usize = 1 << 16;
/// Values of tiles that an output has at once. They stay in the second cache.
const VALUES: usize = 1 << 17;
/// Tiles that it has at least, to use each weight for.
const TILES_MIN: usize = 60;

/// A convolution, from planes to planes.
#[derive(Clone, Copy)]
pub(crate) struct Winograd {
    /// Planes of an input.
    channels: usize,
    /// Planes of an output.
    outputs: usize,
    /// Rows and columns of an input.
    plane: [usize; 2],
    /// Rows and columns of an output.
    out: [usize; 2],
    /// Zeros before the rows, and before the columns.
    padding: [usize; 2],
}

impl Winograd {
    /// How the output comes from the input, and the gradient of the weight from both. Nothing if `conv` is another convolution, or gains nothing.
    /// The number of images has no say, so that it does not change what comes of an image.
    pub(crate) fn forward(conv: &Conv) -> Option<Self> {
        let [_, channels, height, width] = conv.input;
        let [outputs, ..] = conv.weight;
        let [.., out_height, out_width] = conv.output();
        let padding = conv.padding.map(|[before, _]| before);
        let is_served = conv.weight[2..] == [3, 3]
            && conv.stride == [1, 1]
            && conv.dilation == [1, 1]
            && conv.groups == 1
            && padding.iter().all(|before| *before <= 2)
            && channels.min(outputs) >= CHANNELS_MIN
            && channels * outputs <= WINDOWS_MAX
            && height.min(width).min(out_height).min(out_width) >= SIDE_MIN;
        is_served.then_some(Self {
            channels,
            outputs,
            plane: [height, width],
            out: [out_height, out_width],
            padding,
        })
    }

    /// How the gradient of the input comes from that of the output.
    fn backward(self) -> Self {
        Self {
            channels: self.outputs,
            outputs: self.channels,
            plane: self.out,
            out: self.plane,
            padding: self.padding.map(|before| 2 - before),
        }
    }

    /// Rows of tiles, and tiles of a row.
    fn tiles(&self) -> [usize; 2] {
        self.out.map(|side| side.div_ceil(2))
    }

    fn of_input(&self) -> usize {
        self.channels * self.plane[0] * self.plane[1]
    }

    fn of_output(&self) -> usize {
        self.outputs * self.out[0] * self.out[1]
    }

    /// The outputs of images. `direct` gives those of one.
    pub(crate) fn output(
        &self,
        kernels: Kernels,
        x: &[f32],
        weight: &[f32],
        bias: Option<&[f32]>,
        direct: impl Fn(&[f32]) -> Vec<f32> + Sync,
    ) -> Vec<f32> {
        let of_output = self.channels * TAPS;
        let pack = |output: usize, lanes: usize, windows: &mut [[f32; LANES]]| {
            to_rows(
                kernels,
                &weight[output * of_output..],
                of_output,
                lanes,
                windows,
            );
        };
        let weights = self.weights(kernels, false, pack);
        self.run(kernels, &weights, bias, x, direct)
    }

    /// The gradient of images, from that of their outputs. `direct` gives that of one.
    pub(crate) fn input_gradient(
        &self,
        kernels: Kernels,
        weight: &[f32],
        gradient: &[f32],
        direct: impl Fn(&[f32]) -> Vec<f32> + Sync,
    ) -> Vec<f32> {
        let pack = |channel: usize, lanes: usize, windows: &mut [[f32; LANES]]| {
            let of_output = windows.chunks_exact_mut(TAPS);
            for (window, at) in of_output.zip((channel * TAPS..).step_by(self.channels * TAPS)) {
                to_rows(kernels, &weight[at..], TAPS, lanes, window);
            }
        };
        let backward = self.backward();
        let weights = backward.weights(kernels, true, pack);
        backward.run(kernels, &weights, None, gradient, direct)
    }

    /// The numbers of the weight's windows: by panel of outputs and number, with a row for each channel. `pack` gets a panel's first output, how many it
    /// has, and rows for the taps of all channels, which it writes.
    fn weights(
        &self,
        kernels: Kernels,
        are_turned: bool,
        pack: impl Fn(usize, usize, &mut [[f32; LANES]]) + Sync,
    ) -> Scratch {
        let of_number = self.channels.next_multiple_of(LANES) * LANES;
        let of_panel = NUMBERS * of_number;
        let mut weights = Scratch::new(self.outputs.div_ceil(LANES) * of_panel);
        let cost = weights.len();
        each_mut(&mut weights, of_panel, cost, |first, weights| {
            let mut windows = Scratch::new(TAPS * of_number);
            let windows = windows.rows_mut();
            windows[self.channels * TAPS..].fill([0.0; LANES]);
            let outputs = (first * LANES..self.outputs).step_by(LANES);
            for (weights, output) in weights.chunks_exact_mut(of_panel).zip(outputs) {
                let lanes = LANES.min(self.outputs - output);
                pack(output, lanes, &mut windows[..self.channels * TAPS]);
                kernels.run(ToWeights {
                    windows,
                    are_turned,
                    out: weights,
                    of_number,
                });
            }
        });
        weights
    }

    /// The outputs of all images; of one that has others than finite ones, by `direct`, because tiles would spread them to their neighbours.
    fn run(
        &self,
        kernels: Kernels,
        weights: &Scratch,
        bias: Option<&[f32]>,
        x: &[f32],
        direct: impl Fn(&[f32]) -> Vec<f32> + Sync,
    ) -> Vec<f32> {
        let [down, across] = self.tiles();
        let panels = self.outputs.div_ceil(LANES);
        let depth = self.channels.next_multiple_of(LANES);
        let weights = weights.rows::<LANES>();
        let steps: Vec<u32> = (0..depth as u32).collect();
        let of_image = |image: usize| &x[image * self.of_input()..][..self.of_input()];
        let fill = |first: usize, output: &mut [MaybeUninit<f32>]| {
            let images = output.len() / self.of_output();
            // Rows of tiles, of whichever images.
            let at_once = VALUES / (NUMBERS * (depth + panels * LANES));
            let at_once = at_once
                .max(TILES_MIN)
                .div_ceil(across)
                .min(images * down)
                .max(1);
            let count = at_once * across;
            // A line more than the values, because numbers with equal places in the nearest cache would push each other out.
            let of_number = count * depth + LANES;
            let of_sums = panels * count * LANES + LANES;
            let mut numbers = Scratch::new(NUMBERS * of_number);
            let mut sums = Scratch::new(NUMBERS * of_sums);
            let mut strip = Scratch::new(self.strip(at_once));
            let mut block = Scratch::new(4 * across * LANES);
            let rows: Vec<u32> = (0..count).map(|tile| (tile * depth) as u32).collect();
            let mut are_finite = vec![true; images];
            for start in (0..images * down).step_by(at_once) {
                let some = start..(start + at_once).min(images * down);
                for (part, image, row) in by_unit(some.clone(), down) {
                    let x = of_image(first + image);
                    let places = Places {
                        tiles: [part.len(), across],
                        step: depth,
                        of_number,
                    };
                    let out = &mut numbers[part.start * across * depth..];
                    self.turn(kernels, x, row, &mut strip, out, places);
                }
                let tiles = some.len() * across;
                for number in 0..NUMBERS {
                    for panel in 0..panels {
                        let sums = &mut sums[number * of_sums + panel * count * LANES..];
                        kernels.run(Products {
                            values: &numbers[number * of_number..][..tiles * depth],
                            weights: &weights[(panel * NUMBERS + number) * depth..][..depth],
                            sums: &mut sums.as_chunks_mut().0[..tiles],
                            offsets: [&rows, &steps],
                        });
                    }
                }
                for (part, image, row) in by_unit(some, down) {
                    let output = &mut output[image * self.of_output()..][..self.of_output()];
                    for (row, place) in (row..).zip(part) {
                        for panel in 0..panels {
                            let at = (panel * count + place * across) * LANES;
                            let sums = (&sums[at..], of_sums);
                            let block = &mut block.rows_mut()[..4 * across];
                            are_finite[image] &=
                                self.put(kernels, sums, bias, [row, panel], block, output);
                        }
                    }
                }
            }
            let outputs = output.chunks_exact_mut(self.of_output());
            for ((image, output), is_finite) in (first..).zip(outputs).zip(are_finite) {
                if !is_finite {
                    output.write_copy_of_slice(&direct(of_image(image)));
                }
            }
        };
        let len = x.len() / self.of_input() * self.of_output();
        let cost = len * self.channels * NUMBERS / 4;
        // SAFETY: all rows of tiles of all images, with all outputs, are written.
        unsafe { written(len, self.of_output(), cost, fill) }
    }

    /// Values of a strip of so many rows of tiles, or all rows of an image.
    fn strip(&self, rows: usize) -> usize {
        let [down, across] = self.tiles();
        (2 * rows.min(down) + 2) * (2 * across + 2) * LANES
    }

    /// Writes the numbers of an image's tiles, from a row of them on.
    fn turn(
        &self,
        kernels: Kernels,
        x: &[f32],
        row: usize,
        strip: &mut Scratch,
        out: &mut [f32],
        places: Places,
    ) {
        let [down, across] = places.tiles;
        let rows = 2 * row..2 * (row + down) + 2;
        let strip = strip.rows_mut();
        for channel in (0..self.channels).step_by(LANES) {
            let planes = Planes {
                values: &x[channel * self.plane[0] * self.plane[1]..],
                count: LANES.min(self.channels - channel),
                size: self.plane,
                padding: self.padding,
            };
            planes.copy(kernels, rows.clone(), 2 * across + 2, strip);
            kernels.run(ToNumbers {
                strip,
                out: &mut out[channel..],
                places,
            });
        }
    }

    /// Writes a row of tiles of a panel of outputs, from the sums of their numbers, which are so far apart. Whether all are finite.
    fn put(
        &self,
        kernels: Kernels,
        (sums, of_number): (&[f32], usize),
        bias: Option<&[f32]>,
        [row, panel]: [usize; 2],
        block: &mut [[f32; LANES]],
        output: &mut [MaybeUninit<f32>],
    ) -> bool {
        let [height, width] = self.out;
        let across = self.tiles()[1];
        let first = panel * LANES;
        let lanes = LANES.min(self.outputs - first);
        let mut of_panel = [0.0; LANES];
        if let Some(bias) = bias {
            of_panel[..lanes].copy_from_slice(&bias[first..][..lanes]);
        }
        let are_finite = kernels.run(FromSums {
            sums,
            places: Places {
                tiles: [1, across],
                step: LANES,
                of_number,
            },
            bias: &of_panel,
            out: block,
        });
        for (row, block) in (2 * row..height).zip(block.chunks_exact(2 * across)) {
            let to = &mut output[(first * height + row) * width..];
            to_planes(kernels, &block[..width], to, height * width, lanes);
        }
        are_finite
    }
}

/// Some planes that tiles are cut from, with zeros around them.
struct Planes<'a> {
    values: &'a [f32],
    /// At most [`LANES`].
    count: usize,
    size: [usize; 2],
    /// Zeros before the rows, and before the columns.
    padding: [usize; 2],
}

impl Planes<'_> {
    /// Copies these rows, each with so many columns, as rows of lanes.
    fn copy(
        &self,
        kernels: Kernels,
        rows: Range<usize>,
        columns: usize,
        strip: &mut [[f32; LANES]],
    ) {
        let [height, width] = self.size;
        let [above, before] = self.padding;
        for (line, row) in strip.chunks_exact_mut(columns).zip(rows) {
            let Some(row) = row.checked_sub(above).filter(|row| *row < height) else {
                line.fill([0.0; LANES]);
                continue;
            };
            let end = columns.min(before + width);
            line[..before].fill([0.0; LANES]);
            line[end..].fill([0.0; LANES]);
            let values = &self.values[row * width..];
            to_rows(
                kernels,
                values,
                height * width,
                self.count,
                &mut line[before..end],
            );
        }
    }
}
