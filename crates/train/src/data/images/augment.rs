//! From an image to the values of a sample: resized, cropped, flipped and normalised.
//!
//! What happens to a sample in training is a pure function of the seed, the epoch and the sample's index, whichever rank reads it.

use paceline_nn::mix;

use super::decode::Pixels;
use super::resize::{Area, resized};
use crate::config::RandomCrop;
use crate::data::draws::Draws;

/// A padded image is larger than the crop by this fraction of its side on each side: 4 pixels of 32.
const PAD_FRACTION: usize = 8;

/// Share of the area and aspect ratio of a resized crop, as in torchvision's `RandomResizedCrop`.
const SCALE: [f64; 2] = [0.08, 1.0];
const RATIO: [f64; 2] = [3.0 / 4.0, 4.0 / 3.0];
const ATTEMPTS: usize = 10;

/// How an image becomes a sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Preparation {
    /// Side of the square that remains of an image, in pixels.
    pub side: usize,
    /// Mean of each channel, in intensities from 0 to 1.
    pub mean: [f64; 3],
    /// Standard deviation of each channel, which its values are divided by.
    pub deviation: [f64; 3],
    /// What is cropped in training.
    pub crop: RandomCrop,
    /// Probability that an image is flipped from left to right in training.
    pub hflip: f64,
    /// Seed of crops and flips.
    pub seed: u64,
}

impl Preparation {
    /// Writes the values of a sample: in `training` with its epoch and index, otherwise resized so that the shorter side fits, and its centre.
    ///
    /// *Shape*: `values` is `[3, side, side]`.
    pub(super) fn apply(&self, image: &Pixels, training: Option<(u64, usize)>, values: &mut [f32]) {
        let side = self.side;
        let mut draws =
            training.map(|(epoch, index)| Draws::new(mix(self.seed, epoch, index as u64)));
        let (square, [right, down]) = match (&mut draws, self.crop) {
            (Some(draws), RandomCrop::Resized) => {
                let area = draws.area([image.width, image.height]);
                (resized(image, area, [side, side], [0, 0], side), [0, 0])
            }
            (Some(draws), RandomCrop::Pad) => {
                let pad = side / PAD_FRACTION;
                let moved = [0; 2].map(|_: i32| draws.below(2 * pad + 1) as isize - pad as isize);
                (self.centre(image), moved)
            }
            _ => (self.centre(image), [0, 0]),
        };
        let is_flipped = draws.is_some_and(|mut draws| draws.uniform() < self.hflip);
        let tables = self.tables();
        let pixels = square.as_chunks::<3>().0;
        let inside = |at: usize, by: isize| at.checked_add_signed(by).filter(|at| *at < side);
        for y in 0..side {
            for x in 0..side {
                let from_x = if is_flipped { side - 1 - x } else { x };
                let from = inside(from_x, right).zip(inside(y, down));
                // The padding is black.
                let pixel = from.map_or([0; 3], |(x, y)| pixels[y * side + x]);
                for channel in 0..3 {
                    let value = tables[channel][usize::from(pixel[channel])];
                    values[(channel * side + y) * side + x] = value;
                }
            }
        }
    }

    /// The centre of the image, resized so that its shorter side fits: torchvision's `Resize` and `CenterCrop`.
    fn centre(&self, image: &Pixels) -> Vec<u8> {
        let side = self.side;
        let (width, height) = (image.width, image.height);
        let longer = |long: usize, short: usize| side * long / short;
        let to = match width <= height {
            true => [side, longer(height, width)],
            false => [longer(width, height), side],
        };
        // Half a pixel is rounded to the even number, as in Python.
        let at = to.map(|size| {
            let rest = size - side;
            rest / 2 + (rest % 2) * (rest / 2 % 2)
        });
        let area = Area {
            x: 0,
            y: 0,
            width,
            height,
        };
        resized(image, area, to, at, side)
    }

    /// The normalised value of each intensity, by channel.
    fn tables(&self) -> [[f32; 256]; 3] {
        std::array::from_fn(|channel| {
            let (mean, deviation) = (self.mean[channel] as f32, self.deviation[channel] as f32);
            std::array::from_fn(|intensity| (intensity as f32 / 255.0 - mean) / deviation)
        })
    }
}

impl Draws {
    /// A part of an image of a random size, shape and place.
    fn area(&mut self, [width, height]: [usize; 2]) -> Area {
        let pixels = width as f64 * height as f64;
        for _ in 0..ATTEMPTS {
            let pixels = pixels * self.between(SCALE);
            let ratio = libm::exp(self.between(RATIO.map(libm::log)));
            let size = [pixels * ratio, pixels / ratio].map(|square| libm::rint(square.sqrt()));
            let [wide, high] = size.map(|side| side as usize);
            if (1..=width).contains(&wide) && (1..=height).contains(&high) {
                return Area {
                    x: self.below(width - wide + 1),
                    y: self.below(height - high + 1),
                    width: wide,
                    height: high,
                };
            }
        }
        let ratio = width as f64 / height as f64;
        let of = |side: usize, by: f64| (libm::rint(side as f64 * by) as usize).clamp(1, side);
        let (wide, high) = match () {
            () if ratio < RATIO[0] => (width, of(height, ratio / RATIO[0])),
            () if ratio > RATIO[1] => (of(width, RATIO[1] / ratio), height),
            () => (width, height),
        };
        Area {
            x: (width - wide) / 2,
            y: (height - high) / 2,
            width: wide,
            height: high,
        }
    }
}
