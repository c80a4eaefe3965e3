//! Weighted sums of pixels, in integers: the same bits on every machine.

use crate::isa::{Kernels, Task};
use crate::registers::Register;

/// Bits of a weight behind the point, as in Pillow: a sum of products with bytes fits 32 bits.
pub const WEIGHT_BITS: u32 = 32 - 8 - 2;

/// Half of the last bit that is kept.
const HALF: i32 = 1 << (WEIGHT_BITS - 1);

/// Bytes of a row that are summed at once.
const BLOCK: usize = 32;

/// What an output pixel is of its axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tap {
    /// The first input pixel.
    pub first: usize,
    /// The weights from there on, which add up to about 2^[`WEIGHT_BITS`].
    pub weights: Vec<i32>,
}

impl Kernels {
    /// The weighted sums of pixels of three bytes, first along rows, then along columns, each rounded to bytes.
    ///
    /// *Shape*: a row begins every `step` bytes of `rgb`; the output is `[rows, columns, 3]`.
    ///
    /// *Cost*: rows that no tap needs are not read.
    pub fn resample(self, rgb: &[u8], step: usize, columns: &[Tap], rows: &[Tap]) -> Vec<u8> {
        self.run(Resample {
            rgb,
            step,
            columns,
            rows,
        })
    }
}

struct Resample<'a> {
    rgb: &'a [u8],
    step: usize,
    columns: &'a [Tap],
    rows: &'a [Tap],
}

impl Task for Resample<'_> {
    type Output = Vec<u8>;

    #[inline(always)]
    fn run<R: Register>(self) -> Vec<u8> {
        let first = self.rows.iter().map(|row| row.first).min().unwrap_or(0);
        let ends = self.rows.iter().map(|row| row.first + row.weights.len());
        let end = ends.max().unwrap_or(first);
        let width = 3 * self.columns.len();
        let mut narrow = vec![0; width * (end - first)];
        if width > 0 {
            for (y, narrow) in (first..end).zip(narrow.chunks_exact_mut(width)) {
                along_row(&self.rgb[y * self.step..], self.columns, narrow);
            }
        }
        let mut output = vec![0; width * self.rows.len()];
        if width > 0 {
            for (row, output) in self.rows.iter().zip(output.chunks_exact_mut(width)) {
                let narrow = &narrow[(row.first - first) * width..];
                along_columns(narrow, width, &row.weights, output);
            }
        }
        output
    }
}

#[inline(always)]
fn along_row(row: &[u8], columns: &[Tap], output: &mut [u8]) {
    for (tap, output) in columns.iter().zip(output.as_chunks_mut::<3>().0) {
        let mut sums = [HALF; 4];
        let pixels = &row[3 * tap.first..];
        for (at, weight) in tap.weights.iter().enumerate() {
            // The fourth byte is of the next pixel; it only fills the register.
            let pixel: [u8; 4] = match pixels[3 * at..].first_chunk::<4>() {
                Some(pixel) => *pixel,
                None => [pixels[3 * at], pixels[3 * at + 1], pixels[3 * at + 2], 0],
            };
            for (sum, byte) in sums.iter_mut().zip(pixel) {
                *sum += weight * i32::from(byte);
            }
        }
        let [red, green, blue, _] = sums.map(rounded);
        *output = [red, green, blue];
    }
}

/// The weighted sum of rows of `width` bytes.
#[inline(always)]
fn along_columns(rows: &[u8], width: usize, weights: &[i32], output: &mut [u8]) {
    let (blocks, rest) = output.as_chunks_mut::<BLOCK>();
    let whole = blocks.len() * BLOCK;
    for (block, start) in blocks.iter_mut().zip((0..).step_by(BLOCK)) {
        let mut sums = [HALF; BLOCK];
        for (weight, row) in weights.iter().zip(rows.chunks(width)) {
            let bytes = row[start..]
                .first_chunk::<BLOCK>()
                .expect("a block is within a row");
            for (sum, byte) in sums.iter_mut().zip(bytes) {
                *sum += weight * i32::from(*byte);
            }
        }
        *block = sums.map(rounded);
    }
    for (at, output) in (whole..).zip(rest) {
        let products = weights.iter().zip(rows.chunks(width));
        let products = products.map(|(weight, row)| weight * i32::from(row[at]));
        *output = rounded(HALF + products.sum::<i32>());
    }
}

#[inline(always)]
fn rounded(sum: i32) -> u8 {
    (sum >> WEIGHT_BITS).clamp(0, 255) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    /// One pixel after the other, as it is written down.
    fn plain(rgb: &[u8], step: usize, columns: &[Tap], rows: &[Tap]) -> Vec<u8> {
        let sum = |tap: &Tap, byte: &dyn Fn(usize) -> u8| {
            let weights = tap.weights.iter().zip(tap.first..);
            let sum: i32 = weights
                .map(|(weight, at)| weight * i32::from(byte(at)))
                .sum();
            rounded(HALF + sum)
        };
        let mut output = Vec::new();
        for row in rows {
            for column in columns {
                for channel in 0..3 {
                    let narrow = |y: usize| sum(column, &|x| rgb[y * step + 3 * x + channel]);
                    output.push(sum(row, &narrow));
                }
            }
        }
        output
    }

    #[test]
    fn every_instruction_set_gives_the_pixels_that_are_written_down() {
        let mut state = 1_u64;
        let mut draw = |below: usize| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as usize % below
        };
        for (width, height, wide, high) in
            [(1, 1, 1, 1), (7, 5, 3, 4), (40, 9, 33, 11), (3, 50, 11, 2)]
        {
            let rgb: Vec<u8> = (0..3 * width * height).map(|_| draw(256) as u8).collect();
            let mut taps = |from: usize, to: usize| -> Vec<Tap> {
                let tap = |_| {
                    let first = draw(from);
                    let count = 1 + draw(from - first);
                    let weights = (0..count).map(|_| draw(1 << WEIGHT_BITS) as i32 / count as i32);
                    let weights = weights.collect();
                    Tap { first, weights }
                };
                (0..to).map(tap).collect()
            };
            let (columns, rows) = (taps(width, wide), taps(height, high));
            let expected = plain(&rgb, 3 * width, &columns, &rows);
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                let kernels = Kernels::with(isa).expect("it is available");
                let found = kernels.resample(&rgb, 3 * width, &columns, &rows);
                assert_eq!(found, expected, "{isa}: {width}x{height}");
            }
        }
    }

    #[test]
    fn nothing_is_resampled_to_nothing() {
        let kernels = Kernels::with(Isa::Portable).expect("always there");
        let one = [Tap {
            first: 0,
            weights: vec![1 << WEIGHT_BITS],
        }];
        assert_eq!(kernels.resample(&[1, 2, 3], 3, &[], &one), []);
        assert_eq!(kernels.resample(&[1, 2, 3], 3, &one, &[]), []);
        assert_eq!(kernels.resample(&[1, 2, 3], 3, &one, &one), [1, 2, 3]);
    }
}
