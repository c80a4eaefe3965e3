//! Labelled data sets, in memory or in files of images, split into training and held-out samples.

pub mod csv;
pub mod digits;
mod error;
pub mod idx;
pub mod images;
mod open;
mod source;
pub(crate) mod text;

use std::path::Path;

use paceline_ddp::sampler::permutation;
use serde::{Deserialize, Serialize};

pub use error::DataError;
pub(crate) use error::DataProblem;
use images::Images;
pub use open::{open, open_as};

/// Maximum number of values in a file: 2 GiB as `f32`. Every rank holds the whole data set.
pub const VALUES_MAX: u64 = 1 << 29;

/// Maximum number of classes.
pub const CLASSES_MAX: usize = 65_536;

/// Seed of the fixed split. Changing it changes every published accuracy.
const SPLIT_SEED: u64 = 0;

/// Percentage of training samples in the fixed split.
const TRAIN_PERCENT: usize = 80;

/// A classification data set.
#[derive(Clone, Debug, PartialEq)]
pub struct Dataset {
    /// Short name, for reports.
    pub name: String,
    /// What the values and the labels mean.
    pub schema: Schema,
    /// The values of all samples.
    pub values: Values,
    /// The class of each sample, an index into the schema's classes.
    pub labels: Vec<u32>,
    /// The training and held-out samples.
    pub split: Split,
}

/// The values of a data set's samples.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// Scaled, in memory.
    ///
    /// *Shape*: `len` samples of `features.count()` values, one sample after another.
    Memory(Vec<f32>),
    /// In the files of images, decoded when they are read.
    Images(Images),
}

/// What a classifier knows of its data: what a sample is, how its values are scaled, and what its classes are called.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schema {
    /// What one sample looks like.
    pub features: Features,
    /// The names of the columns of a table, in the order of the values; none for images.
    pub columns: Vec<String>,
    /// How the values are scaled.
    pub scaling: Scaling,
    /// The names of the classes.
    pub classes: Vec<String>,
}

impl Dataset {
    /// Number of samples.
    #[must_use]
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there are no samples; loaded data sets always have some.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// The values and the class of sample `index`.
    ///
    /// # Panics
    ///
    /// If `index` is not below `len`, or the values are in files.
    #[must_use]
    pub fn sample(&self, index: usize) -> (&[f32], u32) {
        let Values::Memory(values) = &self.values else {
            panic!("`Dataset::read` reads the samples of {}", self.name);
        };
        let count = self.schema.features.count();
        let first = index * count;
        (&values[first..first + count], self.labels[index])
    }

    /// Writes the values of sample `index`, as it is in an epoch of training if there is one, and returns its class.
    ///
    /// *Errors*: the file of an image that cannot be read.
    ///
    /// # Panics
    ///
    /// If `index` is not below `len`, or `values` are not `features.count()`.
    pub fn read(
        &self,
        index: usize,
        epoch: Option<u64>,
        values: &mut [f32],
    ) -> Result<u32, DataError> {
        let label = self.labels[index];
        match &self.values {
            Values::Memory(_) => values.copy_from_slice(self.sample(index).0),
            Values::Images(images) => {
                let class = &self.schema.classes[label as usize];
                images.read(index, class, epoch, values)?;
            }
        }
        Ok(label)
    }

    /// The samples to train on.
    #[must_use]
    pub fn train(&self) -> Subset<'_> {
        Subset {
            dataset: self,
            indices: &self.split.train,
        }
    }

    /// The samples to evaluate on.
    #[must_use]
    pub fn held_out(&self) -> Subset<'_> {
        Subset {
            dataset: self,
            indices: &self.split.held_out,
        }
    }
}

impl Schema {
    /// Whether each sample is a file, which an image folder holds.
    pub(crate) fn is_of_files(&self) -> bool {
        let is_image = matches!(self.features, Features::Image { .. });
        is_image && matches!(self.scaling, Scaling::Standardised { .. })
    }

    /// Whether it can be one, if it comes from a file.
    ///
    /// *Errors*: what is wrong with it, in words.
    pub(crate) fn check(&self) -> Result<(), String> {
        if !(1..=CLASSES_MAX).contains(&self.classes.len()) {
            return Err(format!("it has {} classes", self.classes.len()));
        }
        let sides = match self.features {
            Features::Image {
                height,
                width,
                channels,
            } => [height, width, channels],
            Features::Flat { count } => [count, 1, 1],
        };
        let count = sides
            .iter()
            .try_fold(1_usize, |count, side| count.checked_mul(*side));
        let Some(count) = count.filter(|count| (1..=VALUES_MAX as usize).contains(count)) else {
            return Err(format!("its samples are {}", self.features.describe()));
        };
        let is_divisor = |value: f64| value.is_finite() && value != 0.0;
        let fits = match (&self.scaling, self.features) {
            (Scaling::DividedBy(divisor), Features::Image { .. }) => is_divisor((*divisor).into()),
            (Scaling::DividedBy(_), Features::Flat { .. }) => false,
            (Scaling::Standardised { mean, deviation }, features) => {
                let lens = [self.columns.len(), mean.len(), deviation.len()];
                let is_shaped = match features {
                    Features::Flat { .. } => lens == [count; 3],
                    Features::Image { channels, .. } => {
                        sides[0] == sides[1] && channels == 3 && lens == [0, 3, 3]
                    }
                };
                is_shaped
                    && mean.iter().all(|mean| mean.is_finite())
                    && deviation.iter().all(|deviation| is_divisor(*deviation))
            }
        };
        fits.then_some(())
            .ok_or_else(|| "its scaling does not fit its samples".to_owned())
    }
}

/// What one sample looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Features {
    /// An image, one channel after another, each row by row (`[channels, height, width]`).
    Image {
        /// Rows.
        height: usize,
        /// Columns.
        width: usize,
        /// Values per pixel.
        channels: usize,
    },
    /// Values without a shape.
    Flat {
        /// How many.
        count: usize,
    },
}

impl Features {
    /// Values of one sample.
    #[must_use]
    pub fn count(&self) -> usize {
        match *self {
            Self::Image {
                height,
                width,
                channels,
            } => height * width * channels,
            Self::Flat { count } => count,
        }
    }

    /// In words, for reports.
    pub(crate) fn describe(&self) -> String {
        match *self {
            Self::Image {
                height,
                width,
                channels: 1,
            } => format!("grey images of {height} x {width} pixels (height x width)"),
            Self::Image {
                height,
                width,
                channels,
            } => format!(
                "images of {height} x {width} pixels (height x width) in {channels} channels"
            ),
            Self::Flat { count } => format!("rows of {count} values"),
        }
    }

    /// The kind of network for such samples.
    pub(crate) fn network(&self) -> &'static str {
        match self {
            Self::Image { .. } => "convolutional network",
            Self::Flat { .. } => "multi-layer perceptron",
        }
    }
}

/// How the values were scaled. A trained model needs its input scaled in the same way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scaling {
    /// Divided by a constant.
    DividedBy(f32),
    /// Each column minus its `mean`, divided by its `deviation`; for files of images each channel, in intensities from 0 to 1.
    Standardised {
        /// Mean of each column over the training samples, or of each channel.
        mean: Vec<f64>,
        /// Standard deviation of each column over the training samples (divided by their number), 1 for a constant one; or of each channel.
        deviation: Vec<f64>,
    },
}

/// Training and held-out samples: two disjoint ascending lists of indices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// Indices to train on.
    pub train: Vec<usize>,
    /// Indices to evaluate on.
    pub held_out: Vec<usize>,
}

impl Split {
    /// The fixed split for data without its own: 80 % at random, always the same for the same length.
    ///
    /// At least one sample is for training; with two or more, at least one is held out.
    #[must_use]
    pub fn fixed(len: usize) -> Self {
        let mut train = permutation(len, SPLIT_SEED);
        let mut held_out = train.split_off((len * TRAIN_PERCENT / 100).max(1).min(len));
        train.sort_unstable();
        held_out.sort_unstable();
        Self { train, held_out }
    }

    /// The split of a set that is only evaluated.
    fn all_held_out(len: usize) -> Self {
        Self::first(0, len)
    }

    /// The split of a set whose first `train` samples are for training.
    #[must_use]
    fn first(train: usize, len: usize) -> Self {
        Self {
            train: (0..train).collect(),
            held_out: (train..len).collect(),
        }
    }
}

/// Some samples of a data set, numbered from 0.
#[derive(Clone, Copy, Debug)]
pub struct Subset<'a> {
    dataset: &'a Dataset,
    indices: &'a [usize],
}

impl<'a> Subset<'a> {
    /// Number of samples.
    #[must_use]
    pub fn len(&self) -> usize {
        self.indices.len()
    }

    /// Whether there is no sample.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.indices.is_empty()
    }

    /// The values and the class of the subset's sample `index`.
    ///
    /// # Panics
    ///
    /// If `index` is not below `len`.
    #[must_use]
    pub fn sample(&self, index: usize) -> (&'a [f32], u32) {
        self.dataset.sample(self.indices[index])
    }

    /// [`Dataset::read`] of the subset's sample `index`.
    ///
    /// *Errors*: as there.
    ///
    /// # Panics
    ///
    /// As there.
    pub fn read(
        &self,
        index: usize,
        epoch: Option<u64>,
        values: &mut [f32],
    ) -> Result<u32, DataError> {
        self.dataset.read(self.indices[index], epoch, values)
    }
}

/// The name of a data set: that of its file or folder.
fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str());
    name.to_string_lossy().into_owned()
}

/// The names of classes that are numbers: up to the highest label.
fn numbered_classes(labels: &[u32]) -> Vec<String> {
    let highest = labels.iter().max().copied().unwrap_or(0);
    (0..=highest).map(|class| class.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fixed_split_covers_every_sample_once_and_never_changes() {
        for len in [1, 2, 3, 5, 100, 1797] {
            let split = Split::fixed(len);
            let mut all = [split.train.clone(), split.held_out.clone()].concat();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..len), "{len} samples");
        }
        // A golden split: every run on every machine holds out these samples.
        assert_eq!(Split::fixed(10).held_out, [2, 6]);
        assert_eq!(Split::fixed(10), Split::fixed(10));
    }

    #[test]
    fn small_sets_still_train_and_hold_out_where_possible() {
        let sizes = |len| {
            let split = Split::fixed(len);
            (split.train.len(), split.held_out.len())
        };
        assert_eq!(sizes(1), (1, 0));
        assert_eq!(sizes(2), (1, 1));
        assert_eq!(sizes(10), (8, 2));
        assert_eq!(sizes(0), (0, 0));
    }

    #[test]
    fn a_schema_from_a_file_is_checked_before_it_is_used() {
        let schema = Schema {
            features: Features::Flat { count: 1 },
            columns: vec!["a".to_owned()],
            scaling: Scaling::Standardised {
                mean: vec![0.0],
                deviation: vec![1.0],
            },
            classes: numbered_classes(&[1]),
        };
        assert_eq!(schema.check(), Ok(()));
        let refused = |change: fn(&mut Schema), says: &str| {
            let mut other = schema.clone();
            change(&mut other);
            let error = other.check().expect_err("refused");
            assert!(error.contains(says), "{error}");
        };
        refused(|schema| schema.classes.clear(), "0 classes");
        refused(|schema| schema.columns.clear(), "scaling does not fit");
        refused(
            |schema| schema.features = Features::Flat { count: 0 },
            "rows of 0 values",
        );
        refused(
            |schema| schema.scaling = Scaling::DividedBy(1.0),
            "scaling does not fit",
        );
        let huge = |schema: &mut Schema| {
            schema.features = Features::Image {
                height: usize::MAX,
                width: 2,
                channels: 1,
            };
        };
        refused(huge, "images of");
    }

    #[test]
    fn a_subset_numbers_its_own_samples() {
        let dataset = Dataset {
            name: "three".to_owned(),
            schema: Schema {
                features: Features::Flat { count: 2 },
                columns: ["a", "b"].map(str::to_owned).to_vec(),
                scaling: Scaling::DividedBy(1.),
                classes: numbered_classes(&[9]),
            },
            values: Values::Memory(vec![0., 1., 2., 3., 4., 5.]),
            labels: vec![7, 8, 9],
            split: Split::first(1, 3),
        };
        assert_eq!(dataset.sample(1), (&[2., 3.][..], 8));
        assert_eq!(dataset.train().len(), 1);
        assert_eq!(dataset.held_out().sample(1), (&[4., 5.][..], 9));
    }
}
