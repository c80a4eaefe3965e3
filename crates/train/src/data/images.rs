//! A folder of PNG and JPEG images with a folder for each class, as torchvision's `ImageFolder` reads it.
//!
//! ```text
//! flowers/train/rose/1.jpg        flowers/rose/1.jpg
//! flowers/train/tulip/2.png       flowers/tulip/2.png
//! flowers/val/rose/3.jpg          without train/, a share is held out
//! ```
//!
//! Only the names of the files are read when the data is opened. An image is decoded each time that its sample is read, so the data may be larger
//! than memory.

mod augment;
mod bad;
mod decode;
mod resize;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, DirEntry};
use std::path::{Path, PathBuf};

pub use augment::Preparation;
pub use bad::Inspection;

use super::error::{list, nearest, similar};
use super::{
    CLASSES_MAX, DataError, DataProblem, Dataset, Features, Labels, Scaling, Schema, Split, Target,
    Values, name_of,
};
use crate::config::RandomCrop;
use bad::BadImage;
use decode::Pixels;

/// Maximum number of images.
const IMAGES_MAX: usize = 1 << 25;

/// Maximum depth of folders below one whose images are predicted. Links to folders are not followed, because they may lead back.
const DEPTH_MAX: usize = 16;

/// Entries of a folder looked at to tell what it is.
const LOOKED_AT_MAX: usize = 1000;

/// Folders with held-out images, the first of which is taken.
const HELD_OUT: [&str; 2] = ["val", "test"];

/// The files of an image folder.
#[derive(Clone, Debug, PartialEq)]
pub struct Images {
    /// The folders of the classes to train on, and of those held out.
    roots: [PathBuf; 2],
    /// The images in the first of them come first.
    trained: usize,
    /// The name of each file within its class.
    names: Vec<Box<str>>,
    preparation: Preparation,
    /// Images that are left out; `None` if they were not looked for.
    bad: Option<Vec<BadImage>>,
}

/// Files with other endings in the folders of classes.
#[derive(Default)]
struct LeftOut {
    count: usize,
    first: Option<PathBuf>,
}

/// The images of an image folder: those in `train` are for training, those in `val`, or else in `test`, are held out; without `train`, a share
/// of them is, chosen by a seed.
///
/// *Cost*: the names of the files, and their classes; and what the inspection takes.
///
/// *Errors*: no class; a class without an image; a class of the held-out images that has none to train on; names that are not UTF-8.
pub fn load(
    folder: &Path,
    preparation: Preparation,
    (held_out, split_seed): (f64, u64),
    inspection: Inspection,
) -> Result<Dataset, DataError> {
    let mut read = Reader::new(folder, Vec::new(), inspection);
    let train = folder.join("train");
    let (roots, split) = match train.is_dir() {
        true => {
            let other = held_out_of(folder)?;
            read.classes = class_names(&train)?;
            read.all(&train)?;
            let trained = read.names.len();
            read.held_out(&other)?;
            let split = Split::first(trained, read.names.len());
            ([train, other], split)
        }
        false => {
            read.classes = class_names(folder)?;
            read.all(folder)?;
            let split = Split::random(read.names.len(), held_out, split_seed);
            ([folder.to_owned(), folder.to_owned()], split)
        }
    };
    let trained = split.train.len();
    Ok(read.dataset(roots, trained, split, preparation))
}

/// The held-out images of such a folder, or all of one without `train`, as a classifier with this schema reads them.
///
/// *Errors*: as [`load`]; a class that is not among the schema's.
pub fn load_as(
    folder: &Path,
    schema: &Schema,
    inspection: Inspection,
) -> Result<Dataset, DataError> {
    let has_parts = folder.join("train").is_dir();
    let root = match has_parts || HELD_OUT.iter().any(|name| folder.join(name).is_dir()) {
        true => held_out_of(folder)?,
        false => folder.to_owned(),
    };
    let mut read = Reader::new(folder, schema.target.classes().to_vec(), inspection);
    read.held_out(&root)?;
    let split = Split::all_held_out(read.names.len());
    Ok(read.dataset([root.clone(), root], 0, split, of_schema(schema)))
}

/// How images are prepared for a classifier with this schema, which is one of image folders.
fn of_schema(schema: &Schema) -> Preparation {
    let (Features::Image { height: side, .. }, Scaling::Standardised { mean, deviation }) =
        (schema.features, &schema.scaling)
    else {
        unreachable!("the schema of image folders");
    };
    Preparation {
        side,
        mean: std::array::from_fn(|channel| mean[channel]),
        deviation: std::array::from_fn(|channel| deviation[channel]),
        crop: RandomCrop::None,
        hflip: 0.0,
        seed: 0,
    }
}

/// The image at `input`, or those in this folder and the folders below it, sorted.
///
/// *Errors*: nothing there; no image; a folder that cannot be read.
pub(crate) fn files_at(input: &Path) -> Result<Vec<PathBuf>, DataError> {
    if !input.is_dir() {
        return match input.exists() {
            true => Ok(vec![input.to_owned()]),
            false => Err(DataProblem::missing(similar(input, |_| true)).of(input)),
        };
    }
    let (mut files, mut folders) = (Vec::new(), vec![(input.to_owned(), 0)]);
    while let Some((folder, depth)) = folders.pop() {
        for (name, entry) in entries(&folder)? {
            let path = folder.join(&*name);
            if is_image(&entry) {
                files.push(path);
            } else if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if depth == DEPTH_MAX {
                    let problem = format!("folders of more than {DEPTH_MAX} levels");
                    return Err(DataProblem::new(problem).of(&path));
                }
                folders.push((path, depth + 1));
            }
        }
        counted(files.len(), input)?;
    }
    files.sort_unstable();
    match files.is_empty() {
        true => Err(DataProblem::new("no PNG or JPEG file in it").of(input)),
        false => Ok(files),
    }
}

/// The values of an image for a classifier with this schema.
///
/// *Errors*: a file that is no whole image.
pub(crate) fn read_as(path: &Path, schema: &Schema, values: &mut [f32]) -> Result<(), DataError> {
    let image = Pixels::read(path).map_err(|problem| problem.of(path))?;
    of_schema(schema).apply(&image, None, values);
    Ok(())
}

/// Whether this folder has a folder `train`, or images in it or in a folder of its own. Those in it are then refused with advice.
pub(crate) fn is_image_folder(folder: &Path) -> bool {
    let entries = |folder: &Path| {
        let entries = folder.read_dir().into_iter().flatten().flatten();
        let entries =
            entries.filter(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."));
        entries.take(LOOKED_AT_MAX)
    };
    let has_image =
        |entry: DirEntry| is_image(&entry) || entries(&entry.path()).any(|entry| is_image(&entry));
    folder.join("train").is_dir() || entries(folder).any(has_image)
}

impl Images {
    /// Writes the values of the image with this index, which is of `class`: augmented as in an epoch if there is one.
    ///
    /// *Errors*: a file that is no whole image.
    pub(super) fn read(
        &self,
        index: usize,
        class: &str,
        epoch: Option<u64>,
        values: &mut [f32],
    ) -> Result<(), DataError> {
        let root = &self.roots[usize::from(index >= self.trained)];
        let path = root.join(class).join(&*self.names[index]);
        let image = Pixels::read(&path).map_err(|problem| problem.of(&path))?;
        let training = epoch.map(|epoch| (epoch, index));
        self.preparation.apply(&image, training, values);
        Ok(())
    }

    /// The names of the files in the order of the samples.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(|name| &**name)
    }

    /// The file from which [`Inspection::of_run`] reads the images that are left out.
    pub(crate) fn file(&self) -> Option<(&'static str, String)> {
        let bad = self.bad.as_ref()?;
        Some((bad::FILE, bad::to_text(bad)))
    }
}

impl LeftOut {
    /// In words.
    fn warning(&self) -> Option<String> {
        let first = self.first.as_ref()?.display();
        Some(match self.count {
            1 => format!("{first} is left out: only .png, .jpg and .jpeg files are images"),
            count => format!(
                "{count} files are left out, the first is {first}: only .png, .jpg and .jpeg files are images"
            ),
        })
    }
}

/// What has been read of a folder.
struct Reader<'a> {
    folder: &'a Path,
    classes: Vec<String>,
    names: Vec<Box<str>>,
    labels: Vec<u32>,
    left_out: LeftOut,
    inspection: Inspection,
    bad: Vec<BadImage>,
}

impl<'a> Reader<'a> {
    fn new(folder: &'a Path, classes: Vec<String>, inspection: Inspection) -> Self {
        Self {
            folder,
            classes,
            names: Vec::new(),
            labels: Vec::new(),
            left_out: LeftOut::default(),
            inspection,
            bad: Vec::new(),
        }
    }

    /// Reads the images of each class.
    ///
    /// *Errors*: a class without one.
    fn all(&mut self, root: &Path) -> Result<(), DataError> {
        for (label, class) in (0..).zip(self.classes.clone()) {
            let folder = root.join(class);
            let (before, good) = (self.left_out.count, self.bad.len());
            if self.class(label, &folder)? == 0 {
                let problem = match (&self.bad[good..], self.left_out.count - before) {
                    ([], 0) => "an empty class: the folder has no image".to_owned(),
                    ([], count) => format!(
                        "a class without an image: none of its {count} files is .png, .jpg or .jpeg"
                    ),
                    ([first, ..], _) => format!(
                        "a class without an image that can be used, the first is {}",
                        first.in_words()
                    ),
                };
                return Err(DataProblem::new(problem)
                    .with_hint("add images of the class, or remove its folder")
                    .of(&folder));
            }
        }
        Ok(())
    }

    /// Reads the images of those classes that have any here.
    ///
    /// *Errors*: another class; no image.
    fn held_out(&mut self, root: &Path) -> Result<(), DataError> {
        let labels = (0..).zip(&self.classes);
        let labels: BTreeMap<String, u32> = labels.map(|(label, c)| (c.clone(), label)).collect();
        let before = self.names.len();
        for class in class_names(root)? {
            let folder = root.join(&class);
            let Some(&label) = labels.get(&class) else {
                let known = list(&self.classes);
                let alike = nearest(&class, self.classes.iter().map(String::as_str));
                let hint = alike.map_or_else(
                    || format!("the classes are {known}"),
                    |alike| format!("did you mean {alike}? The classes are {known}"),
                );
                return Err(DataProblem::new("no class that was trained on")
                    .with_hint(hint)
                    .of(&folder));
            };
            self.class(label, &folder)?;
        }
        match self.names.len() == before {
            true => Err(DataProblem::new("no image in any of its folders").of(root)),
            false => Ok(()),
        }
    }

    /// Reads the names of a class's images, sorted, without bad ones, and returns their number.
    fn class(&mut self, label: u32, folder: &Path) -> Result<usize, DataError> {
        let mut names = Vec::new();
        for (name, entry) in entries(folder)? {
            let path = folder.join(&*name);
            if is_image(&entry) {
                names.push(name);
            } else if path.is_dir() {
                return Err(DataProblem::new("a folder within that of a class")
                    .with_hint(
                        "images lie in DIR/CLASS, or in DIR/train/CLASS and DIR/val/CLASS; name DIR",
                    )
                    .of(&path));
            } else {
                self.left_out.count += 1;
                self.left_out.first.get_or_insert(path);
            }
            counted(self.names.len() + names.len(), folder)?;
        }
        let (names, bad) = self.inspection.sort_out(self.folder, folder, names)?;
        self.bad.extend(bad);
        let count = names.len();
        self.labels.extend(std::iter::repeat_n(label, count));
        self.names.extend(names);
        Ok(count)
    }

    fn dataset(
        self,
        roots: [PathBuf; 2],
        trained: usize,
        split: Split,
        preparation: Preparation,
    ) -> Dataset {
        let side = preparation.side;
        let bad = bad::warning(self.folder, &self.bad);
        Dataset {
            name: name_of(self.folder),
            schema: Schema {
                features: Features::Image {
                    height: side,
                    width: side,
                    channels: 3,
                },
                columns: Vec::new(),
                scaling: Scaling::Standardised {
                    mean: preparation.mean.to_vec(),
                    deviation: preparation.deviation.to_vec(),
                },
                target: Target::Classes(self.classes),
            },
            labels: Labels::Classes(self.labels),
            class_weights: None,
            mixup: None,
            label_smoothing: 0.0,
            warnings: self.left_out.warning().into_iter().chain(bad).collect(),
            split,
            values: Values::Images(Images {
                roots,
                trained,
                names: self.names,
                preparation,
                bad: match self.inspection {
                    Inspection::None => None,
                    Inspection::All | Inspection::Known(_) => Some(self.bad),
                },
            }),
        }
    }
}

/// The folder with held-out images beside `train`.
fn held_out_of(folder: &Path) -> Result<PathBuf, DataError> {
    let mut candidates = HELD_OUT.iter().map(|name| folder.join(name));
    candidates.find(|path| path.is_dir()).ok_or_else(|| {
        DataProblem::new("a folder train, but neither val nor test")
            .with_hint(
                "add one of them, or name the folder train itself: a fifth of it is then held out; a class must not be called train",
            )
            .of(folder)
    })
}

/// The names of the folders in `root`, sorted by their bytes.
///
/// *Errors*: none; too many.
fn class_names(root: &Path) -> Result<Vec<String>, DataError> {
    let mut classes = Vec::new();
    for (name, entry) in entries(root)? {
        if entry.path().is_dir() {
            classes.push(String::from(name));
        }
    }
    match classes.len() {
        0 => Err(
            DataProblem::new("no folder in it, but an image folder has one for each class")
                .with_hint("images lie in DIR/CLASS, or in DIR/train/CLASS and DIR/val/CLASS")
                .of(root),
        ),
        1..=CLASSES_MAX => Ok(classes),
        count => Err(DataProblem::too_large("classes", count as u64, CLASSES_MAX as u64).of(root)),
    }
}

/// The entries of a folder with their names, sorted by their bytes, without hidden ones.
///
/// *Errors*: a folder that cannot be read; a name that is not UTF-8; too many.
fn entries(folder: &Path) -> Result<Vec<(Box<str>, DirEntry)>, DataError> {
    if !folder.is_dir() {
        return Err(DataProblem::no_folder(folder, "images"));
    }
    let failed = |source| DataProblem::io(&source).of(folder);
    let mut entries: Vec<(Box<str>, DirEntry)> = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else {
            return Err(DataProblem::new("the name is not UTF-8")
                .with_hint("rename the file or folder")
                .of(&entry.path()));
        };
        if !name.starts_with('.') {
            entries.push((name.into(), entry));
            counted(entries.len(), folder)?;
        }
    }
    entries.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
    Ok(entries)
}

/// *Errors*: more images than supported.
fn counted(images: usize, folder: &Path) -> Result<(), DataError> {
    match images > IMAGES_MAX {
        true => {
            let (images, max) = (images as u64, IMAGES_MAX as u64);
            Err(DataProblem::too_large("files", images, max).of(folder))
        }
        false => Ok(()),
    }
}

/// Whether the entry is a file whose name ends as that of an image.
fn is_image(entry: &DirEntry) -> bool {
    let path = entry.path();
    let ending = path.extension().and_then(OsStr::to_str).unwrap_or_default();
    let is_named = ["png", "jpg", "jpeg"]
        .iter()
        .any(|image| ending.eq_ignore_ascii_case(image));
    is_named
        && match entry.file_type() {
            // A link to nothing is an error when it is read.
            Ok(kind) if kind.is_symlink() => path.metadata().map_or(true, |found| found.is_file()),
            kind => kind.is_ok_and(|kind| kind.is_file()),
        }
}

#[cfg(test)]
mod tests;
