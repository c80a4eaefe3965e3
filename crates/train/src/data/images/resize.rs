//! Resizing by a triangle filter, in integers: the same bits on every machine, those of Pillow's `BILINEAR`.

use std::ops::Range;

use paceline_kernels::{Kernels, Tap, WEIGHT_BITS};

use super::decode::Pixels;

/// A rectangle of an image, in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Area {
    pub(super) x: usize,
    pub(super) y: usize,
    pub(super) width: usize,
    pub(super) height: usize,
}

/// The square of `side` pixels at `[x, y]` of what `area` of `image` becomes if it is resized to `to`, its width and height.
///
/// *Numerics*: a triangle as wide as an output pixel, at least as an input pixel, so that shrinking averages; first along rows, then along columns, each
/// rounded to bytes.
///
/// *Cost*: only what the square needs is computed.
///
/// *Source*: Pillow's `Resample.c`, which is what torchvision's `Resize` runs on images.
pub(super) fn resized(
    image: &Pixels,
    area: Area,
    to: [usize; 2],
    at: [usize; 2],
    side: usize,
) -> Vec<u8> {
    let columns = taps(area.width, to[0], at[0]..at[0] + side);
    let rows = taps(area.height, to[1], at[1]..at[1] + side);
    let start = 3 * (area.y * image.width + area.x);
    let kernels = Kernels::of_process().unwrap_or_else(|error| panic!("PACELINE_ISA: {error}"));
    kernels.resample(&image.rgb[start..], 3 * image.width, &columns, &rows)
}

/// The taps of some output pixels of an axis.
fn taps(from: usize, to: usize, wanted: Range<usize>) -> Vec<Tap> {
    let scale = from as f64 / to as f64;
    let reach = scale.max(1.0);
    let tap = |index: usize| {
        let center = (index as f64 + 0.5) * scale;
        // A cast of a negative number is 0.
        let first = (center - reach + 0.5) as usize;
        let end = ((center + reach + 0.5) as usize).min(from);
        let triangle = |at: usize| {
            let distance = ((at as f64 - center + 0.5) / reach).abs();
            (1.0 - distance).max(0.0)
        };
        let weights: Vec<f64> = (first..end).map(triangle).collect();
        let total: f64 = weights.iter().sum();
        let fixed = |weight: f64| (weight / total * f64::from(1 << WEIGHT_BITS) + 0.5) as i32;
        Tap {
            first,
            weights: weights.into_iter().map(fixed).collect(),
        }
    };
    wanted.map(tap).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pixels_are_those_of_pillow() {
        // Image.frombytes("RGB", (7, 5), bytes((i * 37 + i * i) % 256 for i in range(105))).resize(size, Image.BILINEAR)
        let bytes = (0..105_usize).map(|i| ((i * 37 + i * i) % 256) as u8);
        let image = Pixels {
            width: 7,
            height: 5,
            rgb: bytes.collect(),
        };
        let whole = Area {
            x: 0,
            y: 0,
            width: 7,
            height: 5,
        };
        let checked = |to: [usize; 2], side, pillow: &[u8]| {
            assert_eq!(resized(&image, whole, to, [0, 0], side), pillow, "{to:?}");
        };
        checked([2, 2], 2, PILLOW_2X2);
        checked([3, 3], 3, PILLOW_3X3);
        let square = resized(&image, whole, [11, 8], [2, 1], 3);
        assert_eq!(square, PILLOW_11X8_AT_2_1);
    }

    const PILLOW_2X2: &[u8] = &[142, 85, 139, 114, 106, 129, 147, 112, 173, 134, 121, 134];
    const PILLOW_3X3: &[u8] = &[
        111, 62, 125, 117, 113, 123, 93, 89, 131, 178, 110, 178, 149, 96, 144, 136, 125, 127, 129,
        129, 178, 142, 107, 151, 119, 129, 133,
    ];
    const PILLOW_11X8_AT_2_1: &[u8] = &[
        142, 93, 158, 102, 57, 126, 121, 80, 100, 181, 28, 105, 191, 32, 123, 201, 43, 141, 139,
        158, 116, 199, 111, 184, 202, 69, 194,
    ];
}
