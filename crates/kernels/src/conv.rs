//! Convolutions of two-dimensional images, and their gradients.
//!
//! Each is a [`Product`] of windows of images, which stay where they are, and a packed matrix with 16 or 32 columns: of the weight for the
//! output and for the input's gradient, of the output's gradient for that of the weight. Few columns are in `by_rows.rs`, windows of one
//! pixel in `pointwise.rs`, those of 3 x 3 in `winograd.rs`.

#![expect(unsafe_code, reason = "results are not filled with zeros first")]

mod window;

use std::mem::MaybeUninit;
use std::ops::Range;

use self::window::Window;
use crate::by_rows::ByRows;
use crate::gemm::View;
use crate::isa::Kernels;
use crate::pointwise::Pointwise;
use crate::product::{Left, Out, PIECE, Product};
use crate::scratch::Scratch;
use crate::sums::sum;
use crate::threads::{by_unit, each_mut, written};
use crate::transpose::{to_planes, to_rows};
use crate::winograd::Winograd;

/// Positions of an output that are computed before they are written to its planes.
const BLOCK: usize = 90;
/// Steps whose weights stay in the nearest cache while a block of positions passes. Later steps go on with the same chains.
const CACHED: usize = 144;
/// Values of an output's gradient that each thread has at once, copied for that of the weight. They stay in the second cache.
const SPAN_VALUES: usize = 1 << 17;
/// Values of images that the gradient of a weight has at once, at least those of one image. Part of the bits.
const BATCH_VALUES: usize = 1 << 18;

/// A two-dimensional convolution (a cross-correlation, as in PyTorch and Burn) with these shapes.
///
/// *Numerics*: an output is the bias, then one fused multiply-add for each channel, row and column of its window, in this order. So is
/// a value of the input's gradient, which starts from zero, over output channels and taps. A value of the weight's gradient is a sum of pieces
/// of up to 256 positions, each such a chain. Windows of 3 x 3 with a stride of 1 are computed by [minimal filtering][paper] if there are at least 16
/// channels, 16 outputs and 4 x 4 positions, and at most 65,536 windows, without groups or dilation. For values of ordinary size, errors are then smaller
/// than those of chains, and up to twice as large for the weight's gradient. An image or a weight's gradient with others than finite results is
/// computed again by chains.
///
/// [paper]: https://arxiv.org/abs/1509.09308
///
/// *Example*:
/// ```
/// use paceline_kernels::{Conv, Kernels};
///
/// let conv = Conv {
///     input: [1, 1, 3, 3],
///     weight: [1, 1, 3, 3],
///     stride: [1, 1],
///     padding: [[1, 1], [1, 1]],
///     dilation: [1, 1],
///     groups: 1,
/// };
/// let image = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0];
/// let sums = Kernels::of_process()?.conv(&conv, &image, &[1.0; 9], None);
/// assert_eq!(sums, [12.0, 21.0, 16.0, 27.0, 45.0, 33.0, 24.0, 39.0, 28.0]);
/// # Ok::<(), paceline_kernels::IsaError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Conv {
    /// `[images, channels, height, width]` of the input.
    pub input: [usize; 4],
    /// `[outputs, channels / groups, height, width]` of the weight.
    pub weight: [usize; 4],
    /// Rows and columns from one window to the next.
    pub stride: [usize; 2],
    /// Zeros before and after the rows, and before and after the columns.
    pub padding: [[usize; 2]; 2],
    /// Rows and columns from one tap to the next.
    pub dilation: [usize; 2],
    /// Groups of channels that are convolved separately.
    pub groups: usize,
}

impl Conv {
    /// `[images, outputs, height, width]` of the output.
    ///
    /// # Panics
    ///
    /// If the shapes do not fit together.
    pub fn output(&self) -> [usize; 4] {
        let [images, channels, ..] = self.input;
        let [outputs, of_group, ..] = self.weight;
        assert!(
            self.groups > 0 && of_group * self.groups == channels && outputs % self.groups == 0,
            "{channels} channels and {outputs} outputs in {} groups, and a weight for {of_group} channels",
            self.groups
        );
        let side = |dim: usize| {
            let [before, after] = self.padding[dim];
            let padded = self.input[2 + dim] + before + after;
            let window = self.window(dim);
            assert!(
                window <= padded && self.stride[dim] > 0,
                "a window of {window}, a padded side of {padded} and a stride of {}",
                self.stride[dim]
            );
            (padded - window) / self.stride[dim] + 1
        };
        [images, outputs, side(0), side(1)]
    }

    /// The weight as a matrix with a row for each output.
    fn matrix<'a>(&self, weight: &'a [f32]) -> View<'a> {
        View {
            values: weight,
            rows: self.weight[0],
            columns: self.weight[1..].iter().product(),
            transposed: false,
        }
    }

    /// The same of so many images.
    fn of_images(&self, images: usize) -> Self {
        let mut conv = *self;
        conv.input[0] = images;
        conv
    }

    /// Side of a window.
    fn window(&self, dim: usize) -> usize {
        assert!(self.weight[2 + dim] > 0, "a weight with taps");
        (self.weight[2 + dim] - 1) * self.dilation[dim] + 1
    }

    fn multiplications(&self) -> usize {
        self.output().iter().product::<usize>() * self.weight[1..].iter().product::<usize>()
    }

    /// Taps along a dimension, with their distance from the first.
    fn taps(&self, dim: usize) -> impl Iterator<Item = (usize, isize)> + Clone {
        let dilation = self.dilation[dim];
        (0..self.weight[2 + dim]).map(move |tap| (tap, (tap * dilation) as isize))
    }

    fn check(&self, x: Option<&[f32]>, weight: Option<&[f32]>, gradient: Option<&[f32]>) {
        for (values, shape) in [
            (x, self.input),
            (weight, self.weight),
            (gradient, self.output()),
        ] {
            let count: usize = shape.iter().product();
            assert!(
                values.is_none_or(|values| values.len() == count),
                "values of the shape {shape:?}"
            );
        }
    }

    /// How the output comes from the input; without a weight only where.
    fn forward<const WIDTH: usize>(
        &self,
        kernels: Kernels,
        weight: Option<&[f32]>,
        bias: Option<&[f32]>,
    ) -> Correlation<WIDTH> {
        let [_, outputs, height, width] = self.output();
        let outputs = outputs / self.groups;
        let channels = self.weight[1];
        let pads = self.padding;
        let size = [0, 1].map(|dim| self.input[2 + dim] + pads[dim][0] + pads[dim][1]);
        let window = Window {
            origin: pads.map(|[before, _]| -(before as isize)),
            size,
        };
        let starts = (0..height)
            .flat_map(|row| (0..width).map(move |column| [row, column]))
            .map(|place| [0, 1].map(|dim| place[dim] * self.stride[dim]));
        let mut steps = Vec::new();
        for channel in 0..channels {
            for (_, down) in self.taps(0) {
                for (_, right) in self.taps(1) {
                    steps.push(window.offset(channel, [down as usize, right as usize]));
                }
            }
        }
        let of_output = steps.len();
        let packed = weight.map(|weight| {
            panels::<WIDTH>(self.groups, outputs, of_output, |output, lanes, rows| {
                to_rows(
                    kernels,
                    &weight[output * of_output..],
                    of_output,
                    lanes,
                    rows,
                );
            })
        });
        let part = Part {
            rows: starts.map(|start| window.offset(0, start)).collect(),
            steps,
            panels: packed.unwrap_or_else(|| Scratch::new(0)),
            places: None,
        };
        let bias = (0..self.groups).flat_map(|group| {
            (0..outputs).step_by(WIDTH).map(move |first| {
                let of_group = bias.map(|bias| &bias[group * outputs..][..outputs]);
                lanes(|lane| {
                    of_group
                        .and_then(|bias| bias.get(first + lane).copied())
                        .unwrap_or(0.0)
                })
            })
        });
        Correlation {
            groups: self.groups,
            channels,
            plane: [self.input[2], self.input[3]],
            window,
            outputs,
            out_plane: height * width,
            row: (self.stride[1] == 1).then_some(width),
            first: bias.collect(),
            parts: vec![part],
        }
    }

    /// How the gradient of the input comes from that of the output: for each remainder of rows and columns by the strides, from the
    /// taps that reach it.
    fn backward<const WIDTH: usize>(&self, kernels: Kernels, weight: &[f32]) -> Correlation<WIDTH> {
        let [_, outputs, ..] = self.output();
        let outputs = outputs / self.groups;
        let channels = self.weight[1];
        let gradient = [2, 3].map(|dim| self.output()[dim]);
        // By dimension, the remainders with their taps, and where each tap finds the first gradient.
        let reached = [0, 1].map(|dim| {
            let stride = self.stride[dim];
            let of_remainder = |remainder: usize| {
                let from = (remainder + self.padding[dim][0]) as isize;
                let taps = self.taps(dim).filter_map(|(tap, distance)| {
                    let place = from - distance;
                    let is_reached = place.rem_euclid(stride as isize) == 0;
                    is_reached.then(|| (tap, place.div_euclid(stride as isize)))
                });
                let count = (self.input[2 + dim].saturating_sub(remainder)).div_ceil(stride);
                (remainder, count, taps.collect::<Vec<_>>())
            };
            let remainders = 0..stride.min(self.input[2 + dim]);
            remainders.map(of_remainder).collect::<Vec<_>>()
        });
        let window = Window::around(reached.each_ref().map(|reached| {
            let ends = reached.iter().flat_map(|(_, count, taps)| {
                let last = *count as isize - 1;
                taps.iter().map(move |(_, first)| (*first, first + last))
            });
            let low = ends.clone().map(|(low, _)| low).min();
            low.zip(ends.map(|(_, high)| high).max())
        }));
        let all_taps = self.weight[2] * self.weight[3];
        let mut parts = Vec::new();
        for (top, height, rows) in &reached[0] {
            for (left, width, columns) in &reached[1] {
                let grid = || (0..*height).flat_map(|y| (0..*width).map(move |x| [y, x]));
                let reaching = || {
                    let of_row = |row| columns.iter().map(move |column| [row, column]);
                    rows.iter().flat_map(of_row)
                };
                let mut steps = Vec::new();
                for output in 0..outputs {
                    let offset = |[row, column]: [&(usize, isize); 2]| {
                        window.offset(output, window.inside([row.1, column.1]))
                    };
                    steps.extend(reaching().map(offset));
                }
                let taps: Vec<usize> = reaching()
                    .map(|[row, column]| row.0 * self.weight[3] + column.0)
                    .collect();
                let pack = |channel: usize, lanes: usize, rows: &mut [[f32; WIDTH]]| {
                    let (group, channel) = (channel / channels, channel % channels);
                    let of_output = rows.chunks_exact_mut(taps.len().max(1));
                    for (rows, output) in of_output.zip(group * outputs..) {
                        let weight = &weight[(output * channels + channel) * all_taps..];
                        if taps.len() == all_taps {
                            to_rows(kernels, weight, all_taps, lanes, rows);
                            continue;
                        }
                        for (row, tap) in rows.iter_mut().zip(&taps) {
                            let values = weight[*tap..].iter().step_by(all_taps);
                            row[lanes..].fill(0.0);
                            for (lane, value) in row[..lanes].iter_mut().zip(values) {
                                *lane = *value;
                            }
                        }
                    }
                };
                let places = grid().map(|[y, x]| {
                    (top + y * self.stride[0]) * self.input[3] + left + x * self.stride[1]
                });
                parts.push(Part {
                    rows: grid().map(|place| window.offset(0, place)).collect(),
                    panels: panels::<WIDTH>(self.groups, channels, steps.len(), pack),
                    steps,
                    places: (self.stride != [1, 1]).then(|| places.collect()),
                });
            }
        }
        Correlation {
            groups: self.groups,
            channels: outputs,
            plane: gradient,
            window,
            outputs: channels,
            out_plane: self.input[2] * self.input[3],
            row: (self.stride == [1, 1]).then_some(self.input[3]),
            first: vec![[0.0; WIDTH]; self.groups * channels.div_ceil(WIDTH)],
            parts,
        }
    }
}

/// A row of a panel.
fn lanes<const WIDTH: usize>(value: impl FnMut(usize) -> f32) -> [f32; WIDTH] {
    std::array::from_fn(value)
}

/// For each group and panel of its outputs, a row for each step. `pack` gets the first output's number among all, how many there are in the
/// panel, and the rows, which it writes.
fn panels<const WIDTH: usize>(
    groups: usize,
    outputs: usize,
    steps: usize,
    pack: impl Fn(usize, usize, &mut [[f32; WIDTH]]) + Sync,
) -> Scratch {
    let of_group = outputs.div_ceil(WIDTH);
    let mut panels = Scratch::new(groups * of_group * steps * WIDTH);
    let cost = panels.len();
    each_mut(panels.rows_mut(), steps, cost, |panel, rows| {
        for (panel, rows) in (panel..).zip(rows.chunks_exact_mut(steps.max(1))) {
            let (group, first) = (panel / of_group, panel % of_group * WIDTH);
            pack(group * outputs + first, WIDTH.min(outputs - first), rows);
        }
    });
    panels
}

/// Outputs that are sums over windows of an image.
struct Correlation<const WIDTH: usize> {
    groups: usize,
    /// Of the input, in a group.
    channels: usize,
    /// Rows and columns of the input.
    plane: [usize; 2],
    window: Window,
    /// In a group.
    outputs: usize,
    /// Values of an output's plane.
    out_plane: usize,
    /// Positions of an output's row, if their windows are one after another.
    row: Option<usize>,
    /// Where the sums start, for each group and panel of outputs.
    first: Vec<[f32; WIDTH]>,
    parts: Vec<Part<WIDTH>>,
}

/// Positions of an output that have the same taps.
struct Part<const WIDTH: usize> {
    /// Offset of each position's window.
    rows: Vec<u32>,
    /// Offset of each tap in a window.
    steps: Vec<u32>,
    panels: Scratch,
    /// Where each position is in the output's plane, if not in order.
    places: Option<Vec<usize>>,
}

impl<const WIDTH: usize> Correlation<WIDTH> {
    fn run(&self, kernels: Kernels, images: usize, cost: usize, input: &[f32]) -> Vec<f32> {
        let of_output = self.groups * self.outputs * self.out_plane;
        let of_input = self.groups * self.channels * self.plane[0] * self.plane[1];
        let fill = |first: usize, output: &mut [MaybeUninit<f32>]| {
            let mut block = Scratch::new(BLOCK * WIDTH);
            let mut padded = self.window.zeros(self.channels, self.plane);
            for (image, output) in (first..).zip(output.chunks_exact_mut(of_output.max(1))) {
                let input = &input[image * of_input..][..of_input];
                for group in 0..self.groups {
                    let of_group = of_input / self.groups;
                    let mut input = &input[group * of_group..][..of_group];
                    if !self.window.is_whole(self.plane) {
                        self.window.fill(input, self.plane, &mut padded);
                        input = &padded;
                    }
                    let of_group = of_output / self.groups;
                    let output = &mut output[group * of_group..][..of_group];
                    for part in &self.parts {
                        self.part(kernels, part, group, input, output, block.rows_mut());
                    }
                }
            }
        };
        // SAFETY: the parts have all places of all planes, and `part` writes those of all outputs.
        unsafe { written(images * of_output, of_output, cost, fill) }
    }

    /// The group of a panel, and the first of its outputs in the group.
    fn outputs_of(&self, panel: usize) -> (usize, usize) {
        let of_group = self.outputs.div_ceil(WIDTH);
        (panel / of_group, panel % of_group * WIDTH)
    }

    /// Writes rows of a panel of outputs, from the gradients of images one after another: for each position from `start` on.
    fn by_position(
        &self,
        kernels: Kernels,
        gradient: &[f32],
        start: usize,
        panel: usize,
        rows: &mut [[f32; WIDTH]],
    ) {
        let (group, output) = self.outputs_of(panel);
        let lanes = WIDTH.min(self.outputs - output);
        for (some, image, position) in by_unit(start..start + rows.len(), self.out_plane) {
            let plane = (image * self.groups + group) * self.outputs + output;
            let planes = &gradient[plane * self.out_plane + position..];
            to_rows(kernels, planes, self.out_plane, lanes, &mut rows[some]);
        }
    }

    /// Writes the values of a part's places for all outputs of a group.
    fn part(
        &self,
        kernels: Kernels,
        part: &Part<WIDTH>,
        group: usize,
        input: &[f32],
        output: &mut [MaybeUninit<f32>],
        block: &mut [[f32; WIDTH]],
    ) {
        let steps = part.steps.len();
        let is_by_rows = |row: &usize| kernels.is_by_rows(self.outputs, *row);
        let by_rows = self.row.filter(is_by_rows);
        for first in (0..self.outputs).step_by(WIDTH) {
            let panel = group * self.outputs.div_ceil(WIDTH) + first / WIDTH;
            let lanes = WIDTH.min(self.outputs - first);
            let output = &mut output[first * self.out_plane..];
            if let Some(row) = by_rows {
                kernels.run(ByRows {
                    values: input,
                    positions: &part.rows,
                    row,
                    steps: &part.steps,
                    weights: &part.panels.rows()[panel * steps..][..steps],
                    first: &self.first[panel],
                    outputs: lanes,
                    out: output,
                    plane: self.out_plane,
                });
                continue;
            }
            for (rows, at) in part.rows.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
                let block = &mut block[..rows.len()];
                let weights = &part.panels.rows()[panel * steps..][..steps];
                for at in (0..steps.max(1)).step_by(CACHED) {
                    let some = at..steps.min(at + CACHED);
                    let sums = block.as_flattened_mut();
                    kernels.run(Product {
                        a: Left::Windows {
                            values: input,
                            rows,
                            steps: &part.steps[some.clone()],
                        },
                        b: &weights[some],
                        b_step: 0,
                        first: &self.first[panel..=panel],
                        out: if at == 0 {
                            Out::Old(sums)
                        } else {
                            Out::chain(sums)
                        },
                        out_step: WIDTH,
                        columns: WIDTH,
                    });
                }
                match &part.places {
                    None => to_planes(kernels, block, &mut output[at..], self.out_plane, lanes),
                    Some(places) => {
                        for lane in 0..lanes {
                            let plane = &mut output[lane * self.out_plane..];
                            for (row, place) in block.iter().zip(&places[at..]) {
                                plane[*place].write(row[lane]);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Adds the products of some places, piece by piece, to the sums of these taps, which are nothing before the first.
fn add_places<const WIDTH: usize>(
    kernels: Kernels,
    (values, taps, places): (&[f32], &[u32], &[u32]),
    gradients: &[[f32; WIDTH]],
    mut is_first: bool,
    sums: &mut [[f32; WIDTH]],
) {
    for (places, gradients) in places.chunks(PIECE).zip(gradients.chunks(PIECE)) {
        let sums = sums.as_flattened_mut();
        kernels.run(Product {
            a: Left::Windows {
                values,
                rows: taps,
                steps: places,
            },
            b: gradients,
            b_step: 0,
            first: &[],
            out: match std::mem::take(&mut is_first) {
                true => Out::Old(sums),
                false => Out::Sum(sums),
            },
            out_step: WIDTH,
            columns: WIDTH,
        });
    }
}

impl Kernels {
    /// The convolution of `x` with `weight`.
    ///
    /// *Shape*: `x` is `conv.input`, `weight` is `conv.weight`, `bias` has a value for each output; the result is [`Conv::output`].
    ///
    /// # Panics
    ///
    /// If a slice has another length.
    pub fn conv(self, conv: &Conv, x: &[f32], weight: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
        conv.check(Some(x), Some(weight), None);
        assert!(bias.is_none_or(|bias| bias.len() == conv.weight[0]));
        if let Some(pointwise) = Pointwise::of(conv) {
            return pointwise.output(self, conv.matrix(weight), x, bias);
        }
        if let Some(winograd) = Winograd::forward(conv) {
            let direct = |x: &[f32]| self.direct(&conv.of_images(1), x, weight, bias);
            return winograd.output(self, x, weight, bias, direct);
        }
        self.direct(conv, x, weight, bias)
    }

    /// [`conv`](Self::conv) without fewer multiplications.
    fn direct(self, conv: &Conv, x: &[f32], weight: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
        let cost = conv.multiplications();
        match self.is_wide(conv.weight[0] / conv.groups) {
            true => conv
                .forward::<32>(self, Some(weight), bias)
                .run(self, conv.input[0], cost, x),
            false => conv
                .forward::<16>(self, Some(weight), bias)
                .run(self, conv.input[0], cost, x),
        }
    }

    /// The gradient of the input, from that of the output.
    ///
    /// *Shape*: `gradient` is [`Conv::output`], the result is `conv.input`.
    ///
    /// # Panics
    ///
    /// If a slice has another length.
    pub fn conv_input_gradient(self, conv: &Conv, weight: &[f32], gradient: &[f32]) -> Vec<f32> {
        conv.check(None, Some(weight), Some(gradient));
        if let Some(pointwise) = Pointwise::of(conv) {
            return pointwise.input_gradient(self, conv.matrix(weight).transpose(), gradient);
        }
        if let Some(winograd) = Winograd::forward(conv) {
            let direct =
                |gradient: &[f32]| self.direct_input_gradient(&conv.of_images(1), weight, gradient);
            return winograd.input_gradient(self, weight, gradient, direct);
        }
        self.direct_input_gradient(conv, weight, gradient)
    }

    /// [`conv_input_gradient`](Self::conv_input_gradient) without fewer multiplications.
    fn direct_input_gradient(self, conv: &Conv, weight: &[f32], gradient: &[f32]) -> Vec<f32> {
        let cost = conv.multiplications();
        match self.is_wide(conv.weight[1]) {
            true => conv
                .backward::<32>(self, weight)
                .run(self, conv.input[0], cost, gradient),
            false => conv
                .backward::<16>(self, weight)
                .run(self, conv.input[0], cost, gradient),
        }
    }

    /// The gradient of the weight, from the input and the gradient of the output.
    ///
    /// *Shape*: `x` is `conv.input`, `gradient` is [`Conv::output`], the result is `conv.weight`.
    ///
    /// *Memory*: copies of a part of the images and of their gradients, 1 MiB for each thread or those of one image. With windows of one pixel and a stride, the
    /// pixels that they meet. With windows of 3 x 3, for each thread 16 values for each channel and output of 128 tiles of
    /// 2 x 2 positions, or of one row of them.
    ///
    /// # Panics
    ///
    /// If a slice has another length.
    pub fn conv_weight_gradient(self, conv: &Conv, x: &[f32], gradient: &[f32]) -> Vec<f32> {
        conv.check(Some(x), None, Some(gradient));
        if let Some(seen) = Pointwise::of(conv).and_then(|pointwise| pointwise.seen(x)) {
            let [images, channels, ..] = conv.input;
            let [.., height, width] = conv.output();
            let seen_all = Conv {
                input: [images, channels, height, width],
                stride: [1, 1],
                ..*conv
            };
            return self.conv_weight_gradient(&seen_all, &seen, gradient);
        }
        if let Some(winograd) = Winograd::forward(conv) {
            let result = winograd.weight_gradient(self, x, gradient);
            // Tiles would spread other values to their neighbours.
            if result.iter().all(|value| value.is_finite()) {
                return result;
            }
        }
        match self.is_wide(conv.weight[0] / conv.groups) {
            true => self.weight_gradient::<32>(conv, x, gradient),
            false => self.weight_gradient::<16>(conv, x, gradient),
        }
    }

    fn weight_gradient<const WIDTH: usize>(
        self,
        conv: &Conv,
        x: &[f32],
        gradient: &[f32],
    ) -> Vec<f32> {
        let forward = conv.forward::<WIDTH>(self, None, None);
        let (groups, outputs) = (forward.groups, forward.outputs);
        let positions = forward.out_plane;
        let [Part { rows, steps, .. }] = &forward.parts[..] else {
            unreachable!("a forward pass has one part");
        };
        // An image, with zeros around it, and its gradients as rows of a panel's outputs.
        let of_image = forward.window.values(groups * forward.channels);
        let panels = groups * outputs.div_ceil(WIDTH);
        let images = conv.input[0];
        // Not with the panels' width, which depends on the instruction set.
        let of_both = of_image + groups * outputs.next_multiple_of(16) * positions;
        let at_once = (BATCH_VALUES / of_both.max(1)).clamp(1, images.max(1));
        // Each copy and each product ends with a wait for all threads, so there is a batch for each of them if they are small.
        let threads = rayon::current_num_threads();
        let batches = threads * BATCH_VALUES / (at_once * of_both).max(1);
        let round = (at_once * batches.clamp(1, threads)).min(images.max(1));
        // The roles change: a sum has a row for each tap, and a step for each position of each image.
        let places: Vec<u32> = (0..round)
            .flat_map(|image| {
                let start = u32::try_from(image * of_image).expect("part of a small batch");
                rows.iter().map(move |row| start + row)
            })
            .collect();
        let mut sums = Scratch::new(panels * steps.len() * WIDTH);
        if images * positions == 0 {
            sums.fill(0.0);
        }
        let sums = sums.rows_mut::<WIDTH>();
        let of_plane = forward.window.values(1);
        let channels = groups * forward.channels;
        let mut padded = forward.window.zeros(round * channels, forward.plane);
        // Whole pieces, because later ones are added to their sum.
        let span = (SPAN_VALUES / (panels * WIDTH).max(1) / PIECE * PIECE).max(PIECE);
        let of_span = panels * span.min(at_once * positions) * WIDTH;
        let mut by_position = Scratch::new(threads * of_span);
        let (of_x, of_gradient) = (x.len() / images.max(1), gradient.len() / images.max(1));
        for first_image in (0..images).step_by(round) {
            let count = round.min(images - first_image);
            let mut a = &x[first_image * of_x..][..count * of_x];
            let gradient = &gradient[first_image * of_gradient..][..count * of_gradient];
            if !padded.is_empty() {
                let padded = &mut padded[..count * of_image];
                each_mut(padded, of_plane, count * of_x, |plane, padded| {
                    let of_x = of_x / channels;
                    let x = &a[plane * of_x..][..padded.len() / of_plane * of_x];
                    forward.window.fill(x, forward.plane, padded);
                });
                a = padded;
            }
            let of_batch = at_once * positions;
            let spans: Vec<Range<usize>> = (0..count * positions)
                .step_by(of_batch.max(1))
                .map(|start| start..(start + of_batch).min(count * positions))
                .flat_map(|batch| {
                    let starts = batch.clone().step_by(span);
                    starts.map(move |start| start..batch.end.min(start + span))
                })
                .collect();
            for spans in spans.chunks(threads) {
                let (start, end) = (spans[0].start, spans[spans.len() - 1].end);
                let len = end - start;
                // By panel and position.
                let by_position = &mut by_position.rows_mut::<WIDTH>()[..panels * len];
                each_mut(by_position, PIECE, panels * len * WIDTH, |first, rows| {
                    let first = first * PIECE;
                    for (some, panel, position) in by_unit(first..first + rows.len(), len) {
                        let rows = &mut rows[some];
                        forward.by_position(self, gradient, start + position, panel, rows);
                    }
                });
                let (cost, unit) = (sums.len() * WIDTH * len, self.windows());
                each_mut(sums, unit, cost, |first, sums| {
                    let first = first * unit;
                    for (some, panel, tap) in by_unit(first..first + sums.len(), steps.len()) {
                        let taps = &steps[tap..][..some.len()];
                        let (group, _) = forward.outputs_of(panel);
                        let a = &a[forward.window.values(group * forward.channels)..];
                        let sums = &mut sums[some];
                        for span in spans {
                            let is_first = first_image + span.start == 0;
                            let gradients = &by_position[panel * len + span.start - start..];
                            let gradients = &gradients[..span.len()];
                            let places = &places[span.clone()];
                            add_places(self, (a, taps, places), gradients, is_first, sums);
                        }
                    }
                });
            }
        }
        let fill = |_: usize, result: &mut [MaybeUninit<f32>]| {
            for (panel, sums) in sums.chunks_exact(steps.len().max(1)).enumerate() {
                let (group, output) = forward.outputs_of(panel);
                let result = &mut result[(group * outputs + output) * steps.len()..];
                to_planes(self, sums, result, steps.len(), WIDTH.min(outputs - output));
            }
        };
        // SAFETY: the panels have all outputs, and rows for all taps.
        unsafe { written(conv.weight.iter().product(), 0, 0, fill) }
    }

    /// The gradient of the bias, from that of the output: its sums over images and positions, in f64 over the planes.
    ///
    /// *Shape*: `gradient` is [`Conv::output`], the result has a value for each output.
    ///
    /// # Panics
    ///
    /// If the slice has another length.
    pub fn conv_bias_gradient(self, conv: &Conv, gradient: &[f32]) -> Vec<f32> {
        conv.check(None, None, Some(gradient));
        let [_, outputs, height, width] = conv.output();
        let mut sums = vec![0.0_f64; outputs];
        for (at, plane) in gradient.chunks_exact((height * width).max(1)).enumerate() {
            sums[at % outputs] += f64::from(sum(self, plane));
        }
        sums.into_iter().map(|sum| sum as f32).collect()
    }
}
