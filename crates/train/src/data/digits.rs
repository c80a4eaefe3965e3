//! The built-in data set: 1,797 handwritten digits of 8 x 8 pixels, part of the program.

use std::io::Read;

use flate2::read::GzDecoder;

use super::{Dataset, Features, Labels, Scaling, Schema, Split, Target, Values, numbered_classes};

/// One line per image: 64 intensities 0..=16, row by row, then the digit. The attribution is in `data/README.md`.
const FILE: &[u8] = include_bytes!("../../data/digits.csv.gz");

const SIDE: usize = 8;
const INTENSITY_MAX: f32 = 16.0;

/// The digits, scaled to 0..=1, of which a share is held out: with 0.2, 1,437 are to train on, and 360 held out.
///
/// *Cost*: about half a megabyte.
/// *Source*: UCI Machine Learning Repository, "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak,
///   1998), test split; CC BY 4.0.
#[must_use]
pub fn load(held_out: f64, split_seed: u64) -> Dataset {
    let mut text = String::new();
    let read = GzDecoder::new(FILE).read_to_string(&mut text);
    read.expect("the file in the program is intact");

    let mut values = Vec::new();
    let mut labels = Vec::new();
    for line in text.lines() {
        let cells = line.split(',').map(|cell| cell.parse::<u8>());
        let mut cells: Vec<_> = cells.map(|cell| cell.expect("a small number")).collect();
        labels.push(u32::from(cells.pop().expect("a label")));
        values.extend(cells.iter().map(|&cell| f32::from(cell) / INTENSITY_MAX));
    }
    assert_eq!(values.len(), labels.len() * SIDE * SIDE, "whole images");
    Dataset {
        name: "digits".to_owned(),
        schema: Schema {
            features: Features::Image {
                height: SIDE,
                width: SIDE,
                channels: 1,
            },
            columns: Vec::new(),
            scaling: Scaling::DividedBy(INTENSITY_MAX),
            target: Target::Classes(numbered_classes(&labels)),
        },
        values: Values::Memory(values),
        split: Split::random(labels.len(), held_out, split_seed),
        labels: Labels::Classes(labels),
        class_weights: None,
        mixup: None,
        label_smoothing: 0.0,
        warnings: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_images_are_there_and_in_range() {
        let digits = load(0.2, 0);
        assert_eq!(digits.len(), 1797);
        let Values::Memory(values) = &digits.values else {
            panic!("in memory");
        };
        assert_eq!(values.len(), 1797 * 64);
        assert!(values.iter().all(|value| (0.0..=1.0).contains(value)));
        assert!(digits.labels.classes().iter().all(|&label| label < 10));
    }

    #[test]
    fn the_first_image_is_the_zero_of_the_original_file() {
        let digits = load(0.2, 0);
        let row: Vec<f32> = digits.sample(0)[..8]
            .iter()
            .map(|pixel| pixel * 16.0)
            .collect();
        assert_eq!(row, [0., 0., 5., 13., 9., 1., 0., 0.]);
        assert_eq!(digits.labels.classes()[0], 0);
    }

    #[test]
    fn every_digit_is_trained_on_and_held_out() {
        let digits = load(0.2, 0);
        assert_eq!((digits.train().len(), digits.held_out().len()), (1437, 360));
        for subset in [digits.train(), digits.held_out()] {
            let mut count = [0; 10];
            let all: Vec<usize> = (0..subset.len()).collect();
            for label in subset.labels(&all).classes() {
                count[*label as usize] += 1;
            }
            let least = subset.len() / 20;
            assert!(count.iter().all(|&of| of >= least), "{count:?}");
        }
    }
}
