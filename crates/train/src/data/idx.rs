//! A folder in the format of MNIST: four IDX files, each plain or gzip.
//!
//! ```text
//! images                               labels
//! 0   4  00 00 08 03                   0   4  00 00 08 01
//! 4   4  number of images, big-endian  4   4  number of labels, big-endian
//! 8   4  rows                          8   n  labels, a byte each
//! 12  4  columns
//! 16  n  pixels, a byte each, row by row
//! ```

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::similar;
use super::source::Source;
use super::temporary::{MEMORY_BYTES, Spill};
use super::{
    DataError, DataProblem, Dataset, Features, Labels, Scaling, Schema, Split, Target, VALUES_MAX,
    Values, name_of, numbered_classes,
};

/// Maximum number of images in a file, and maximum side of an image.
const IMAGES_MAX: u32 = 100_000_000;
const SIDE_MAX: u32 = 4096;

const INTENSITY_MAX: f32 = 255.0;

/// Maximum number of pixels of a file: a small gzip file can unpack to any size.
const PIXELS_MAX: u64 = 1 << 40;

/// Bytes of a file that are read at once.
const CHUNK: u64 = 1 << 20;

/// What to do if there is no room for more pixels.
const NO_ROOM: &str = "set TMPDIR to a folder with a byte for each pixel and each rank";

/// The images of an MNIST-like folder, scaled to 0..=1. `train-*` is for training, `t10k-*` is held out.
///
/// The files are called `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
/// `t10k-labels-idx1-ubyte`; a `.` before `idx` and a final `.gz` are accepted as well.
///
/// *Cost*: 4 bytes a pixel, so 220 MB for MNIST; above 256 MiB a temporary file with a byte for each pixel.
/// *Errors*: headers are checked before anything is allocated for them; a file that is too short, too long or inconsistent
/// with the others is refused.
pub fn load(folder: &Path) -> Result<Dataset, DataError> {
    load_with(folder, MEMORY_BYTES)
}

fn load_with(folder: &Path, memory: usize) -> Result<Dataset, DataError> {
    let [train_images, train_labels, held_out_images, held_out_labels] = FILES;
    let mut pixels = Spill::new(memory, NO_ROOM);
    let mut images = read_part(folder, [train_images, train_labels], &mut pixels)?;
    let trained = images.labels.len();
    let held_out = read_part(folder, [held_out_images, held_out_labels], &mut pixels)?;
    images.append(held_out)?;

    let dataset = Dataset {
        name: name_of(folder),
        schema: Schema {
            features: images.features(),
            columns: Vec::new(),
            scaling: Scaling::DividedBy(INTENSITY_MAX),
            target: Target::Classes(numbered_classes(&images.labels)),
        },
        values: Values::Pixels(Pixels::new(&images.path, pixels, INTENSITY_MAX)),
        split: Split::first(trained, images.labels.len()),
        labels: Labels::Classes(images.labels),
        class_weights: None,
        mixup: None,
        label_smoothing: 0.0,
        warnings: Vec::new(),
    };
    dataset.in_memory_up_to(memory)
}

/// The held-out images of such a folder, as a classifier with this schema reads them.
///
/// *Errors*: as [`load`]; images of another size; a label that is not among the schema's classes.
pub fn load_as(folder: &Path, schema: &Schema) -> Result<Dataset, DataError> {
    let [_, _, images, labels] = FILES;
    let mut pixels = Spill::new(MEMORY_BYTES, NO_ROOM);
    let images = read_part(folder, [images, labels], &mut pixels)?;
    let of = |problem: DataProblem| problem.of(&images.path);
    let divisor = fitting(images.features(), schema).map_err(of)?;
    let classes = schema.target.classes().len();
    if let Some(label) = images
        .labels
        .iter()
        .find(|label| **label as usize >= classes)
    {
        let problem = format!("label {label}, but the model has {classes} classes from 0");
        return Err(of(DataProblem::new(problem)));
    }
    let dataset = Dataset {
        name: name_of(folder),
        schema: schema.clone(),
        values: Values::Pixels(Pixels::new(&images.path, pixels, divisor)),
        split: Split::all_held_out(images.labels.len()),
        labels: Labels::Classes(images.labels),
        class_weights: None,
        mixup: None,
        label_smoothing: 0.0,
        warnings: Vec::new(),
    };
    dataset.in_memory_up_to(MEMORY_BYTES)
}

/// The scaled images of one file, without labels, as a classifier with this schema reads them.
///
/// *Errors*: as [`load`]; images of another size.
pub fn images_as(path: &Path, schema: &Schema) -> Result<Vec<f32>, DataError> {
    let read = || {
        let mut pixels = Vec::new();
        let [_, height, width] = read_idx(path, &IMAGES, VALUES_MAX, |bytes| {
            pixels.extend(bytes);
            Ok(())
        })?;
        let divisor = fitting(grey(height, width), schema)?;
        let mut values = vec![0.0; pixels.len()];
        scale(&pixels, divisor, &mut values);
        Ok(values)
    };
    read().map_err(|problem: DataProblem| problem.of(path))
}

/// What the pixels of such images are divided by, if a classifier with this schema can read them.
fn fitting(images: Features, schema: &Schema) -> Result<f32, DataProblem> {
    match schema.scaling {
        Scaling::DividedBy(divisor) if images == schema.features => Ok(divisor),
        _ => {
            let (images, model) = (images.describe(), schema.features.describe());
            let problem = format!("samples are {images}, but the model was trained on {model}");
            Err(DataProblem::new(problem))
        }
    }
}

fn scale(pixels: &[u8], divisor: f32, values: &mut [f32]) {
    for (value, &byte) in values.iter_mut().zip(pixels) {
        *value = f32::from(byte) / divisor;
    }
}

/// The pixels of images that are too large for memory, scaled when they are read.
#[derive(Clone, Debug)]
pub struct Pixels {
    path: PathBuf,
    bytes: Arc<Spill>,
    divisor: f32,
}

/// Whether they are the same pixels; these are not compared.
impl PartialEq for Pixels {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.bytes, &other.bytes)
    }
}

impl Pixels {
    fn new(path: &Path, bytes: Spill, divisor: f32) -> Self {
        Self {
            path: path.to_owned(),
            bytes: Arc::new(bytes),
            divisor,
        }
    }

    /// Writes the values of the image that is the `index`th, if all are of this size.
    ///
    /// *Errors*: the temporary file cannot be read.
    ///
    /// # Panics
    ///
    /// If there is no such image.
    pub(crate) fn read(&self, index: usize, values: &mut [f32]) -> Result<(), DataError> {
        let bytes = self.bytes.read(index * values.len(), values.len());
        let bytes = bytes.map_err(|problem| problem.of(&self.path))?;
        scale(&bytes, self.divisor, values);
        Ok(())
    }
}

fn grey(height: usize, width: usize) -> Features {
    Features::Image {
        height,
        width,
        channels: 1,
    }
}

/// A file of images, without its pixels, and its file of labels.
struct Part {
    path: PathBuf,
    height: usize,
    width: usize,
    labels: Vec<u32>,
}

impl Part {
    fn features(&self) -> Features {
        grey(self.height, self.width)
    }

    fn append(&mut self, other: Self) -> Result<(), DataError> {
        if (self.height, self.width) != (other.height, other.width) {
            let problem = format!(
                "images are {} x {} pixels (height x width), but training images are {} x {}",
                other.height, other.width, self.height, self.width
            );
            return Err(DataProblem::new(problem).of(&other.path));
        }
        self.labels.extend(other.labels);
        Ok(())
    }
}

/// Reads both files; the pixels are added to those in `pixels`.
fn read_part(folder: &Path, files: [&str; 2], pixels: &mut Spill) -> Result<Part, DataError> {
    let [path, labels_path] = files.map(|file| locate(folder, file));
    let (path, labels_path) = (path?, labels_path?);
    let images_of = read_idx(&path, &IMAGES, PIXELS_MAX, |bytes| pixels.push(bytes));
    let [images, height, width] = images_of.map_err(|problem| problem.of(&path))?;
    let mut all = Vec::new();
    let labels_of = read_idx(&labels_path, &LABELS, VALUES_MAX, |bytes| {
        all.extend(bytes.iter().map(|&byte| u32::from(byte)));
        Ok(())
    });
    let [labels] = labels_of.map_err(|problem| problem.of(&labels_path))?;
    if images != labels {
        let labels_path = labels_path.display();
        let problem = format!("{images} images, but {labels_path} has {labels} labels");
        return Err(DataProblem::new(problem)
            .with_hint("check that both files belong to the same data set")
            .of(&path));
    }
    Ok(Part {
        path,
        height,
        width,
        labels: all,
    })
}

/// The four files of a folder.
const FILES: [&str; 4] = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
];

/// Whether a folder has any of the files.
pub(crate) fn is_idx_folder(folder: &Path) -> bool {
    let is_one = |name: &str| {
        let mut parts = FILES.iter().filter_map(|file| file.split_once("-idx"));
        parts.any(|(part, _)| name.starts_with(part))
    };
    let mut entries = folder.read_dir().into_iter().flatten().flatten();
    entries.any(|entry| entry.file_name().to_str().is_some_and(is_one) && entry.path().is_file())
}

/// The usual names of a file.
fn names(file: &str) -> [String; 4] {
    let dotted = file.replace("-idx", ".idx");
    [
        file.to_owned(),
        dotted.clone(),
        format!("{file}.gz"),
        format!("{dotted}.gz"),
    ]
}

/// The file's path under one of its usual names.
fn locate(folder: &Path, file: &str) -> Result<PathBuf, DataError> {
    if !folder.is_dir() {
        return Err(DataProblem::no_folder(folder, "idx"));
    }
    let mut paths = names(file).into_iter().map(|name| folder.join(name));
    if let Some(found) = paths.find(|path| path.exists()) {
        return Ok(found);
    }
    match class_folders(folder) {
        0 => Err(missing(&folder.join(file))),
        folders => Err(DataProblem::new(format!(
            "{folders} folders, perhaps one per image class, but neither an IDX file nor an image in them"
        ))
        .with_hint("task images reads a folder of PNG or JPEG files for each class")
        .of(folder)),
    }
}

/// A missing file: what it is called instead, but none of the other three, or which files a folder has.
fn missing(path: &Path) -> DataError {
    let is_another = |name: &str| {
        FILES
            .iter()
            .any(|file| names(file).iter().any(|one| one == name))
    };
    let files = || {
        let files = FILES.join(", ");
        let exists = |name: &String| path.with_file_name(name).exists();
        let other = match FILES.iter().any(|file| names(file).iter().any(exists)) {
            true => "",
            false => "; an image folder has a folder for each class",
        };
        format!("task idx reads {files}, each plain or .gz{other}")
    };
    let hint = similar(path, |name| !is_another(name)).unwrap_or_else(files);
    DataProblem::missing(Some(hint)).of(path)
}

/// Number of subfolders: the layout of `ImageFolder` has one per class.
fn class_folders(folder: &Path) -> usize {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    entries.filter(|entry| entry.path().is_dir()).count()
}

/// How an IDX file of `N` dimensions starts.
struct Kind<const N: usize> {
    name: &'static str,
    magic: u32,
    /// The name and the maximum of each dimension.
    dimensions: [(&'static str, u32); N],
}

const IMAGES: Kind<3> = Kind {
    name: "images",
    magic: 0x0000_0803,
    dimensions: [
        ("images", IMAGES_MAX),
        ("rows", SIDE_MAX),
        ("columns", SIDE_MAX),
    ],
};

const LABELS: Kind<1> = Kind {
    name: "labels",
    magic: 0x0000_0801,
    dimensions: [("labels", IMAGES_MAX)],
};

impl<const N: usize> Kind<N> {
    const fn header_bytes(&self) -> u64 {
        4 + 4 * N as u64
    }
}

/// The dimensions in the header. `take` gets exactly as many bytes as follow it, at most `values_max`, a part at a time.
fn read_idx<const N: usize>(
    path: &Path,
    kind: &Kind<N>,
    values_max: u64,
    mut take: impl FnMut(&[u8]) -> Result<(), DataProblem>,
) -> Result<[usize; N], DataProblem> {
    let mut source = Source::open(path)?;
    let dimensions = read_header(kind, &mut source)?;
    let expected: u64 = dimensions.iter().map(|&size| size as u64).product();
    if expected > values_max {
        return Err(DataProblem::too_large("values", expected, values_max));
    }
    // One byte more than expected detects trailing bytes, and makes gzip verify its checksum.
    source.allow(expected + 1);
    let whole = kind.header_bytes() + expected;
    let mut left = expected + 1;
    loop {
        let bytes = source.read_some(left.min(CHUNK))?;
        left -= bytes.len() as u64;
        match (left, bytes.is_empty()) {
            (0, _) => {
                return Err(DataProblem::new(format!(
                    "continues after byte {whole}, where its header says it ends"
                )));
            }
            (1, true) => return Ok(dimensions),
            (_, true) => return Err(truncated(whole + 1 - left, whole)),
            (_, false) => take(&bytes)?,
        }
    }
}

fn truncated(got: u64, expected: u64) -> DataProblem {
    DataProblem::incomplete(format!(
        "ends at byte {got}, but {expected} bytes are expected"
    ))
}

fn read_header<const N: usize>(
    kind: &Kind<N>,
    source: &mut Source,
) -> Result<[usize; N], DataProblem> {
    let expected = kind.header_bytes();
    let bytes = source.read_some(expected)?;
    let (words, _) = bytes.as_chunks::<4>();
    let word = |index: usize| words.get(index).map(|&word| u32::from_be_bytes(word));
    // Checks the first word first: a file of another format may be shorter than a header.
    if let Some(got) = word(0).filter(|&got| got != kind.magic) {
        let (name, expected) = (kind.name, kind.magic);
        return Err(DataProblem::new(format!(
            "starts with {got:#010x}, but IDX {name} start with {expected:#010x}"
        ))
        .with_hint(
            "check that images and labels are not swapped, and that values are unsigned bytes",
        ));
    }
    let mut sizes = [0; N];
    for (index, (what, max)) in kind.dimensions.into_iter().enumerate() {
        let value = word(index + 1).ok_or_else(|| truncated(bytes.len() as u64, expected))?;
        if !(1..=max).contains(&value) {
            let offset = 4 + 4 * index;
            return Err(DataProblem::new(format!(
                "number of {what} at byte {offset} is {value}, outside 1..={max}"
            )));
        }
        sizes[index] = value as usize;
    }
    Ok(sizes)
}

#[cfg(test)]
mod tests;
