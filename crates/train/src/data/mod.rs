//! Labelled data sets, in memory or in files, split into training and held-out samples.

pub mod digits;
mod draws;
mod error;
pub mod idx;
pub mod images;
pub(crate) mod mixup;
mod open;
mod source;
pub mod table;
mod temporary;
pub(crate) mod text;
pub(crate) mod tokens;

use std::path::Path;

use paceline_ddp::sampler::permutation;
use serde::{Deserialize, Serialize};

pub use error::DataError;
pub(crate) use error::DataProblem;
use idx::Pixels;
use images::Images;
pub use mixup::Mixup;
pub use open::{open, open_as};
use table::StoredRows;

/// Maximum number of values that every rank holds in memory: 2 GiB as `f32`.
pub const VALUES_MAX: u64 = 1 << 29;

/// Maximum number of classes.
pub const CLASSES_MAX: usize = 65_536;

/// Seed of the split. Changing it changes every published accuracy.
const SPLIT_SEED: u64 = 0;

/// A labelled data set.
#[derive(Clone, Debug, PartialEq)]
pub struct Dataset {
    /// Short name, for reports.
    pub name: String,
    /// What the values and the labels mean.
    pub schema: Schema,
    /// The values of all samples.
    pub values: Values,
    /// What is to be predicted of each sample.
    pub labels: Labels,
    /// The weight of each class in the loss of training, if they differ.
    pub class_weights: Option<Vec<f32>>,
    /// How samples are mixed in training, if they are.
    pub mixup: Option<Mixup>,
    /// Share of the weight that the loss of a class gives to all classes alike, `0.0..1.0`.
    pub label_smoothing: f64,
    /// The training and held-out samples.
    pub split: Split,
    /// Signs that the data is not what the user intended, as found while it was read.
    pub warnings: Vec<String>,
}

/// What is to be predicted of each of some samples.
#[derive(Clone, Debug, PartialEq)]
pub enum Labels {
    /// A class, an index into the schema's.
    Classes(Vec<u32>),
    /// A number, standardised as the schema's target says.
    Numbers(Vec<f32>),
}

/// The values of a data set's samples.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// Scaled, in memory.
    ///
    /// *Shape*: `len` samples of `features.count()` values, one sample after another.
    Memory(Vec<f32>),
    /// Of a table that is too large for that: its rows, scaled when they are read.
    Table(StoredRows),
    /// Of images that are too large for that: bytes, scaled when they are read.
    Pixels(Pixels),
    /// In the files of images, decoded when they are read.
    Images(Images),
}

/// What a model knows of its data: what a sample is, how its values are scaled, and what is predicted.
#[derive(Clone, Debug, PartialEq)]
pub struct Schema {
    /// What one sample looks like.
    pub features: Features,
    /// The columns of a table, in the order of the values; none for images.
    pub columns: Vec<Column>,
    /// How the values are scaled.
    pub scaling: Scaling,
    /// What is predicted.
    pub target: Target,
}

/// A column of a table that a model reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Column {
    /// One of numbers, by its name: one value of a sample.
    Numbers(String),
    /// One of words.
    Categories {
        /// Its name.
        name: String,
        /// The words, each with a value of a sample that is 1 for this word and else 0. The empty one stands for a missing cell.
        categories: Vec<String>,
    },
}

/// What a model predicts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// A class: their names.
    Classes(Vec<String>),
    /// A number, minus `mean` and divided by `deviation`.
    Number {
        /// Mean over the training samples, in the number's own unit.
        mean: f64,
        /// Standard deviation over the training samples (divided by their number), in the same unit; 1 if they are equal.
        deviation: f64,
    },
}

impl Column {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Numbers(name) | Self::Categories { name, .. } => name,
        }
    }

    /// Values of a sample.
    #[must_use]
    pub fn width(&self) -> usize {
        match self {
            Self::Numbers(_) => 1,
            Self::Categories { categories, .. } => categories.len(),
        }
    }
}

impl Target {
    /// The names of the classes; none for numbers.
    #[must_use]
    pub fn classes(&self) -> &[String] {
        match self {
            Self::Classes(classes) => classes,
            Self::Number { .. } => &[],
        }
    }

    /// Values that a model has for a sample: the score of each class, or the number.
    #[must_use]
    pub fn outputs(&self) -> usize {
        match self {
            Self::Classes(classes) => classes.len(),
            Self::Number { .. } => 1,
        }
    }
}

impl Labels {
    /// Number of samples.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Classes(labels) => labels.len(),
            Self::Numbers(labels) => labels.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The classes; none if numbers are predicted.
    #[must_use]
    pub fn classes(&self) -> &[u32] {
        match self {
            Self::Classes(labels) => labels,
            Self::Numbers(_) => &[],
        }
    }

    /// Those of some samples.
    fn at(&self, indices: impl Iterator<Item = usize>) -> Self {
        match self {
            Self::Classes(labels) => Self::Classes(indices.map(|index| labels[index]).collect()),
            Self::Numbers(labels) => Self::Numbers(indices.map(|index| labels[index]).collect()),
        }
    }

    /// Those of both, which are of one kind.
    fn and(mut self, other: Self) -> Self {
        match (&mut self, other) {
            (Self::Classes(labels), Self::Classes(others)) => labels.extend(others),
            (Self::Numbers(labels), Self::Numbers(others)) => labels.extend(others),
            _ => unreachable!("both were read for one target"),
        }
        self
    }
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

    /// The values of sample `index`.
    ///
    /// # Panics
    ///
    /// If `index` is not below `len`, or the values are in files.
    #[must_use]
    pub fn sample(&self, index: usize) -> &[f32] {
        let Values::Memory(values) = &self.values else {
            panic!("`Dataset::read` reads the samples of {}", self.name);
        };
        let count = self.schema.features.count();
        &values[index * count..][..count]
    }

    /// Writes the values of sample `index`, as it is in an epoch of training if there is one.
    ///
    /// *Errors*: the file of an image, or a temporary file, that cannot be read.
    ///
    /// # Panics
    ///
    /// If `index` is not below `len`, or `values` are not `features.count()`.
    pub fn read(
        &self,
        index: usize,
        epoch: Option<u64>,
        values: &mut [f32],
    ) -> Result<(), DataError> {
        match &self.values {
            Values::Memory(_) => values.copy_from_slice(self.sample(index)),
            Values::Table(rows) => rows.read(index, values)?,
            Values::Pixels(pixels) => pixels.read(index, values)?,
            Values::Images(images) => {
                let class = self.labels.classes()[index] as usize;
                let class = &self.schema.target.classes()[class];
                images.read(index, class, epoch, values)?;
            }
        }
        Ok(())
    }

    /// The same with the values of a table or of pixels in memory, if these are not more than `bytes`.
    ///
    /// *Errors*: the temporary file cannot be read.
    fn in_memory_up_to(mut self, bytes: usize) -> Result<Self, DataError> {
        let width = self.schema.features.count();
        if matches!(self.values, Values::Table(_) | Values::Pixels(_))
            && self.len() <= bytes / size_of::<f32>() / width
        {
            let mut values = vec![0.0; self.len() * width];
            let mut samples = values.chunks_mut(width).enumerate();
            samples.try_for_each(|(index, values)| self.read(index, None, values))?;
            self.values = Values::Memory(values);
        }
        Ok(self)
    }

    /// The same samples to train on, and all of `other`, a table that was read with the schema of this one, held out.
    fn and_held_out(mut self, other: Self) -> Self {
        if let (Values::Table(rows), Values::Table(others)) = (&mut self.values, other.values) {
            rows.extend(others);
        }
        let trained = self.labels.len();
        self.labels = self.labels.and(other.labels);
        self.split = Split::first(trained, self.labels.len());
        self.warnings.extend(other.warnings);
        self
    }

    /// The weights that give each class of the training samples the same part in the loss: `samples / (classes * samples of the class)`, as
    /// scikit-learn's `balanced`. `None` for numbers.
    fn balanced(&self) -> Option<Vec<f32>> {
        let labels = self.labels.classes();
        let mut counts = vec![0_usize; self.schema.target.classes().len()];
        let train = self.split.train.iter();
        train
            .filter_map(|index| labels.get(*index))
            .for_each(|label| counts[*label as usize] += 1);
        let (samples, classes) = (
            self.split.train.len(),
            counts.iter().filter(|count| **count > 0).count(),
        );
        // A class without a training sample weighs nothing in any batch, but Burn's loss wants positive weights.
        let weight = |count: usize| match count {
            0 => 1.0,
            count => (samples as f64 / (classes * count) as f64) as f32,
        };
        (!labels.is_empty()).then(|| counts.into_iter().map(weight).collect())
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
        let is_divisor = |value: f64| value.is_finite() && value != 0.0;
        match &self.target {
            Target::Classes(classes) if !(1..=CLASSES_MAX).contains(&classes.len()) => {
                return Err(format!("it has {} classes", classes.len()));
            }
            Target::Number { mean, deviation } if !(mean.is_finite() && is_divisor(*deviation)) => {
                return Err("the scaling of its target cannot be".to_owned());
            }
            Target::Classes(_) | Target::Number { .. } => {}
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
        let widths = self.columns.iter().map(Column::width);
        let columns = widths.fold(0_usize, usize::saturating_add);
        let fits = match (&self.scaling, self.features) {
            (Scaling::DividedBy(divisor), Features::Image { .. }) => is_divisor((*divisor).into()),
            (Scaling::DividedBy(_), Features::Flat { .. }) => false,
            (Scaling::Standardised { mean, deviation }, features) => {
                let lens = [columns, mean.len(), deviation.len()];
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
    /// Each value minus its `mean`, divided by its `deviation`; for files of images each channel, in intensities from 0 to 1.
    Standardised {
        /// Mean of each value over the training samples, 0 for one of a category; or of each channel.
        mean: Vec<f64>,
        /// Standard deviation of each value over the training samples (divided by their number), 1 for a constant one and one of a category; or
        /// of each channel.
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
    /// The split for data without its own: holds out a share of the samples, `0.0..1.0`, at random, always the same ones for the same length and seed.
    ///
    /// At least one sample is for training; with two or more, at least one is held out, unless the share is 0.
    #[must_use]
    pub fn random(len: usize, held_out: f64, seed: u64) -> Self {
        let mut train = permutation(len, SPLIT_SEED.wrapping_add(seed));
        let most = len
            .saturating_sub(usize::from(held_out > 0.0))
            .max(1)
            .min(len);
        // A share such as 0.8 leaves a little less than its tenths.
        let trained = (len as f64 * (1.0 - held_out) + 1e-9) as usize;
        let mut held_out = train.split_off(trained.max(1).min(most));
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

    /// What is to be predicted of the subset's samples with these indices.
    ///
    /// # Panics
    ///
    /// If one is not below `len`.
    #[must_use]
    pub fn labels(&self, indices: &[usize]) -> Labels {
        let indices = indices.iter().map(|index| self.indices[*index]);
        self.dataset.labels.at(indices)
    }

    /// The values of the subset's sample `index`.
    ///
    /// # Panics
    ///
    /// If `index` is not below `len`.
    #[must_use]
    pub fn sample(&self, index: usize) -> &'a [f32] {
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
    ) -> Result<(), DataError> {
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
    fn the_split_covers_every_sample_once_and_never_changes() {
        for len in [1, 2, 3, 5, 100, 1797] {
            let split = Split::random(len, 0.2, 0);
            let mut all = [split.train.clone(), split.held_out.clone()].concat();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..len), "{len} samples");
        }
        // A golden split: every run on every machine holds out these samples.
        assert_eq!(Split::random(10, 0.2, 0).held_out, [2, 6]);
        assert_ne!(Split::random(10, 0.2, 1).held_out, [2, 6]);
        assert_eq!(Split::random(10, 0.2, 0), Split::random(10, 0.2, 0));
    }

    #[test]
    fn small_sets_still_train_and_hold_out_where_possible() {
        let sizes = |len| {
            let split = Split::random(len, 0.2, 0);
            (split.train.len(), split.held_out.len())
        };
        assert_eq!(sizes(1), (1, 0));
        assert_eq!(sizes(2), (1, 1));
        assert_eq!(sizes(10), (8, 2));
        assert_eq!(sizes(0), (0, 0));
    }

    #[test]
    fn the_share_that_is_held_out_is_exact_and_leaves_samples_to_train_on() {
        for len in 0..2000 {
            let trained = (len * 80 / 100).max(1).min(len);
            assert_eq!(Split::random(len, 0.2, 0).train.len(), trained, "{len}");
        }
        let sizes = |len, share| {
            let split = Split::random(len, share, 0);
            (split.train.len(), split.held_out.len())
        };
        assert_eq!(sizes(10, 0.0), (10, 0));
        assert_eq!(sizes(10, 0.5), (5, 5));
        assert_eq!(sizes(10, 0.01), (9, 1));
        assert_eq!(sizes(10, 0.99), (1, 9));
        assert_eq!(sizes(1, 0.5), (1, 0));
    }

    #[test]
    fn a_schema_from_a_file_is_checked_before_it_is_used() {
        let schema = Schema {
            features: Features::Flat { count: 1 },
            columns: vec![Column::Numbers("a".to_owned())],
            scaling: Scaling::Standardised {
                mean: vec![0.0],
                deviation: vec![1.0],
            },
            target: Target::Classes(numbered_classes(&[1])),
        };
        assert_eq!(schema.check(), Ok(()));
        let refused = |change: fn(&mut Schema), says: &str| {
            let mut other = schema.clone();
            change(&mut other);
            let error = other.check().expect_err("refused");
            assert!(error.contains(says), "{error}");
        };
        refused(
            |schema| schema.target = Target::Classes(Vec::new()),
            "0 classes",
        );
        let still = |schema: &mut Schema| {
            schema.target = Target::Number {
                mean: 0.0,
                deviation: 0.0,
            };
        };
        refused(still, "target");
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
    fn a_saved_target_reads_back_to_the_last_bit() {
        let target = Target::Number {
            mean: 970.945_833_333_333_3,
            deviation: 428.566_342_082_497_44,
        };
        let text = serde_json::to_string(&target).expect("it encodes");
        assert_eq!(serde_json::from_str::<Target>(&text).ok(), Some(target));
    }

    #[test]
    fn a_subset_numbers_its_own_samples() {
        let dataset = Dataset {
            name: "three".to_owned(),
            schema: Schema {
                features: Features::Flat { count: 2 },
                columns: ["a", "b"]
                    .map(|name| Column::Numbers(name.to_owned()))
                    .to_vec(),
                scaling: Scaling::DividedBy(1.),
                target: Target::Classes(numbered_classes(&[9])),
            },
            values: Values::Memory(vec![0., 1., 2., 3., 4., 5.]),
            labels: Labels::Classes(vec![7, 8, 9]),
            class_weights: None,
            mixup: None,
            label_smoothing: 0.0,
            split: Split::first(1, 3),
            warnings: Vec::new(),
        };
        assert_eq!(dataset.sample(1), [2., 3.]);
        assert_eq!(dataset.train().len(), 1);
        let held_out = dataset.held_out();
        assert_eq!(held_out.sample(1), [4., 5.]);
        assert_eq!(held_out.labels(&[1, 0]), Labels::Classes(vec![9, 8]));
    }
}
