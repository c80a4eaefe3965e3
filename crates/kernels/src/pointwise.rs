//! Convolutions with a window of one pixel: products of the weight and each image, whose planes are rows already.

#![expect(unsafe_code, reason = "results are not filled with zeros first")]

use std::mem::MaybeUninit;
use std::ops::Range;

use crate::conv::Conv;
use crate::gemm::{BLOCK, View, pieces};
use crate::isa::Kernels;
use crate::product::{Left, Out, Product};
use crate::scratch::Scratch;
use crate::threads::{by_unit, each_mut, written};

/// Values of images that are panels at once: they stay in the second cache.
const CHUNK_VALUES: usize = 1 << 17;

/// A convolution with a window of one pixel, without padding or groups.
pub(crate) struct Pointwise {
    images: usize,
    /// Height and width of an input.
    plane: [usize; 2],
    /// Height and width of an output.
    out_plane: [usize; 2],
    stride: [usize; 2],
}

impl Pointwise {
    /// Nothing if `conv` is another convolution.
    pub(crate) fn of(conv: &Conv) -> Option<Self> {
        let is_one = conv.weight[2..] == [1, 1] && conv.padding == [[0; 2]; 2] && conv.groups == 1;
        let [images, _, height, width] = conv.input;
        let [_, _, out_height, out_width] = conv.output();
        is_one.then_some(Self {
            images,
            plane: [height, width],
            out_plane: [out_height, out_width],
            stride: conv.stride,
        })
    }

    /// The output of `x`. The weight has a row for each output and a column for each channel.
    pub(crate) fn output(
        &self,
        kernels: Kernels,
        weight: View<'_>,
        x: &[f32],
        bias: Option<&[f32]>,
    ) -> Vec<f32> {
        let seen = self.seen(x);
        self.products(kernels, weight, seen.as_deref().unwrap_or(x), bias)
    }

    /// The gradient of the input, from that of the output. The weight has a row for each channel and a column for each output.
    pub(crate) fn input_gradient(
        &self,
        kernels: Kernels,
        weight: View<'_>,
        gradient: &[f32],
    ) -> Vec<f32> {
        let seen = self.products(kernels, weight, gradient, None);
        if self.stride == [1, 1] {
            return seen;
        }
        let (of_plane, of_seen) = (
            self.plane.iter().product::<usize>(),
            self.out_plane.iter().product::<usize>(),
        );
        let mut all = vec![0.0; self.images * weight.rows * of_plane];
        for (plane, seen) in all
            .chunks_exact_mut(of_plane.max(1))
            .zip(seen.chunks_exact(of_seen.max(1)))
        {
            let rows = plane.chunks_mut(self.plane[1]).step_by(self.stride[0]);
            for (row, seen) in rows.zip(seen.chunks_exact(self.out_plane[1])) {
                for (value, seen) in row.iter_mut().step_by(self.stride[1]).zip(seen) {
                    *value = *seen;
                }
            }
        }
        all
    }

    /// The pixels of `x` that windows meet, or nothing if they meet all.
    pub(crate) fn seen(&self, x: &[f32]) -> Option<Vec<f32>> {
        if self.stride == [1, 1] {
            return None;
        }
        let of_plane = self.plane.iter().product::<usize>();
        let mut seen = Vec::with_capacity(
            x.len() / of_plane.max(1) * self.out_plane.iter().product::<usize>(),
        );
        for plane in x.chunks_exact(of_plane.max(1)) {
            for row in plane.chunks_exact(self.plane[1]).step_by(self.stride[0]) {
                seen.extend(row.iter().step_by(self.stride[1]));
            }
        }
        Some(seen)
    }

    /// The weight times each image. The images have `weight.columns` planes, the results `weight.rows`.
    fn products(
        &self,
        kernels: Kernels,
        weight: View<'_>,
        x: &[f32],
        bias: Option<&[f32]>,
    ) -> Vec<f32> {
        let positions: usize = self.out_plane.iter().product();
        let products = Products::new(kernels, weight, positions, bias);
        match kernels.is_wide(self.images * positions) {
            true => products.run::<32>(self.images, x),
            false => products.run::<16>(self.images, x),
        }
    }
}

/// A weight, times images.
struct Products<'a> {
    kernels: Kernels,
    outputs: usize,
    /// Of the images.
    channels: usize,
    /// Of a plane.
    positions: usize,
    /// Tiles of the weight, by block of rows and piece of the channels.
    tiles: Scratch,
    bias: Option<&'a [f32]>,
}

impl<'a> Products<'a> {
    fn new(kernels: Kernels, weight: View<'_>, positions: usize, bias: Option<&'a [f32]>) -> Self {
        let (outputs, channels) = (weight.rows, weight.columns);
        let tile = kernels.tile();
        let mut tiles = Scratch::new(outputs.next_multiple_of(tile) * channels);
        let of_block = (BLOCK * channels).max(1);
        let copy = |block: usize, tiles: &mut [f32]| {
            for (mut tiles, row) in tiles
                .chunks_mut(of_block)
                .zip((block * BLOCK..).step_by(BLOCK))
            {
                let rows = row..outputs.min(row + BLOCK);
                for steps in pieces(channels) {
                    let len = rows.len().next_multiple_of(tile) * steps.len();
                    let tiles = tiles.split_off_mut(..len).expect("the rows of a block");
                    weight.tiles(kernels, &rows, &steps, tiles);
                }
            }
        };
        each_mut(&mut tiles, of_block, outputs * channels, copy);
        Self {
            kernels,
            outputs,
            channels,
            positions,
            tiles,
            bias,
        }
    }

    fn run<const WIDTH: usize>(&self, images: usize, x: &[f32]) -> Vec<f32> {
        let (positions, channels) = (self.positions, self.channels);
        let of_output = self.outputs * positions;
        let fill = |first: usize, output: &mut [MaybeUninit<f32>]| {
            if output.is_empty() {
                return;
            }
            let columns = output.len() / self.outputs;
            let at_once = (CHUNK_VALUES / WIDTH / channels.max(1)).max(1) * WIDTH;
            let at_once = at_once.min(columns.next_multiple_of(WIDTH));
            let mut packed = Scratch::new(at_once * channels);
            let between = (at_once / WIDTH).min(at_once / positions + 2);
            let mut sums = Scratch::new(between * BLOCK * WIDTH);
            for from in (0..columns).step_by(at_once) {
                let some = from..columns.min(from + at_once);
                let x = &x[first * channels * positions..];
                let packed =
                    &mut packed.rows_mut::<WIDTH>()[..some.len().div_ceil(WIDTH) * channels];
                pack(x, positions, &some, packed);
                for row in (0..self.outputs).step_by(BLOCK) {
                    let rows = row..self.outputs.min(row + BLOCK);
                    self.block(rows, &some, packed, output, &mut sums);
                }
            }
        };
        let cost = images * of_output * channels;
        // SAFETY: the blocks have all outputs, and each writes all columns.
        unsafe { written(images * of_output, of_output, cost, fill) }
    }

    /// Writes these rows of outputs for these columns, the positions of one image after another. Panels with positions of several images get their
    /// sums in `sums` first.
    fn block<const WIDTH: usize>(
        &self,
        rows: Range<usize>,
        columns: &Range<usize>,
        packed: &[[f32; WIDTH]],
        output: &mut [MaybeUninit<f32>],
        sums: &mut [f32],
    ) {
        let (channels, positions) = (self.channels, self.positions);
        let height = rows.len().next_multiple_of(self.kernels.tile());
        let tiles = &self.tiles[rows.start * channels..][..height * channels];
        let at = |image: usize, row: usize, position: usize| {
            (image * self.outputs + row) * positions + position
        };
        // Where the first row has these columns, if they are of one image.
        let place = |some: &Range<usize>| {
            let (image, position) = (some.start / positions, some.start % positions);
            (position + some.len() <= positions).then(|| at(image, rows.start, position))
        };
        for steps in pieces(channels) {
            let mut sums = sums.chunks_mut(BLOCK * WIDTH);
            for some in stretches::<WIDTH>(columns.clone(), positions) {
                let panel = (some.start - columns.start) / WIDTH;
                let (mut out, out_step) = match place(&some) {
                    Some(at) => (Out::New(&mut output[at..]), positions),
                    None => (Out::Old(sums.next().expect("one for each image")), WIDTH),
                };
                if let Some(bias) = self.bias.filter(|_| steps.start == 0) {
                    out.fill_rows(&bias[rows.clone()], some.len(), out_step);
                }
                if steps.start > 0 || self.bias.is_some() {
                    // SAFETY: the bias, or the piece before, is there.
                    out = unsafe { out.chained() };
                }
                self.kernels.run(Product {
                    a: Left::Tiles {
                        values: &tiles[height * steps.start..],
                        rows: rows.len(),
                        steps: steps.len(),
                    },
                    b: &packed[panel * channels + steps.start..],
                    b_step: channels,
                    first: &[],
                    out,
                    out_step,
                    columns: some.len(),
                });
            }
        }
        let mut sums = sums.chunks(BLOCK * WIDTH);
        for some in stretches::<WIDTH>(columns.clone(), positions) {
            if place(&some).is_some() {
                continue;
            }
            let sums = sums.next().expect("as above");
            for (lanes, image, position) in by_unit(some, positions) {
                for (sums, row) in sums.chunks_exact(WIDTH).zip(rows.clone()) {
                    let output = &mut output[at(image, row, position)..][..lanes.len()];
                    output.write_copy_of_slice(&sums[lanes.clone()]);
                }
            }
        }
    }
}

/// All columns: whole panels within an image, and between them panels with positions of several images.
fn stretches<const WIDTH: usize>(
    mut columns: Range<usize>,
    positions: usize,
) -> impl Iterator<Item = Range<usize>> {
    std::iter::from_fn(move || {
        let of_image = positions - columns.start % positions;
        let len = match of_image / WIDTH * WIDTH {
            _ if columns.len() <= of_image => columns.len(),
            0 => WIDTH.min(columns.len()),
            whole => whole,
        };
        let some = columns.start..columns.start + len;
        columns.start = some.end;
        (len > 0).then_some(some)
    })
}

/// Panels of these positions, each with a row for each channel. They get zeros past the last position.
fn pack<const WIDTH: usize>(
    x: &[f32],
    positions: usize,
    columns: &Range<usize>,
    packed: &mut [[f32; WIDTH]],
) {
    let channels = packed.len() / columns.len().div_ceil(WIDTH).max(1);
    let panels = packed.chunks_exact_mut(channels.max(1));
    for (rows, column) in panels.zip(columns.clone().step_by(WIDTH)) {
        let some = column..columns.end.min(column + WIDTH);
        if some.len() < WIDTH {
            rows.fill([0.0; WIDTH]);
        }
        for (lanes, image, position) in by_unit(some, positions) {
            let planes = x[image * channels * positions..].chunks_exact(positions);
            for (row, plane) in rows.iter_mut().zip(planes) {
                let values = &plane[position..][..lanes.len()];
                match values.first_chunk() {
                    Some(values) => *row = *values,
                    None => row[lanes.clone()].copy_from_slice(values),
                }
            }
        }
    }
}
