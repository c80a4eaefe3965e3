//! Why a data set cannot be used: the file, the place in it and the value found.

use std::io;
use std::path::{Path, PathBuf};

use crate::report::plural;

/// Maximum length of a quoted cell, in characters.
const QUOTE_MAX: usize = 40;

/// Maximum number of columns listed in an error.
const LISTED_MAX: usize = 12;

/// Maximum number of files in a folder compared with a missing name.
const COMPARED_MAX: usize = 1000;

/// Advice for a label that is a quantity.
const REGRESSION: &str = "to predict a number (regression), divide its range into classes, or write your own program, such as examples/minimal.rs";

/// Why a data set cannot be used. Lines and columns count from 1, bytes from 0 and as uncompressed.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the message of a variant says what its fields are"
)]
pub enum DataError {
    /// There is no such file or folder.
    #[error("{} does not exist", path.display())]
    Missing {
        path: PathBuf,
        nearest: Option<String>,
    },
    /// The system could not read the file.
    #[error("{} cannot be read: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// The file's gzip compression is broken or incomplete.
    #[error("{} is damaged after uncompressed byte {offset}: {source}", path.display())]
    Damaged {
        path: PathBuf,
        offset: u64,
        source: io::Error,
    },
    /// The set is larger than supported.
    #[error("{} has {value} {what}, more than the {max} supported", path.display())]
    TooLarge {
        path: PathBuf,
        what: &'static str,
        value: u64,
        max: u64,
    },
    /// The file does not start as an IDX file of its kind does.
    #[error("{} starts with {got:#010x}, but IDX {kind} start with {expected:#010x}", path.display())]
    Magic {
        path: PathBuf,
        kind: &'static str,
        expected: u32,
        got: u32,
    },
    /// A number in an IDX header makes no sense.
    #[error("{}: number of {what} at byte {offset} is {value}, outside 1..={max}", path.display())]
    Dimension {
        path: PathBuf,
        what: &'static str,
        offset: u64,
        value: u32,
        max: u32,
    },
    /// The file is shorter than its header says.
    #[error("{} ends at byte {got}, {expected} bytes are expected", path.display())]
    Truncated {
        path: PathBuf,
        expected: u64,
        got: u64,
    },
    /// The file is longer than its header says.
    #[error("{} continues after byte {expected}, where its header says it ends", path.display())]
    Trailing { path: PathBuf, expected: u64 },
    /// Images and labels differ in number.
    #[error("{} has {images} images, but {} has {labels} labels", images_path.display(), labels_path.display())]
    CountMismatch {
        images_path: PathBuf,
        images: usize,
        labels_path: PathBuf,
        labels: usize,
    },
    /// Two files hold images of different sizes.
    #[error("images of {} are {got} pixels (height x width), but training images are {expected}", path.display())]
    SizeMismatch {
        path: PathBuf,
        expected: String,
        got: String,
    },
    /// A folder with one subfolder of images per class.
    #[error("{} holds {folders} folders, perhaps one per image class; `paceline train` does not read image folders", path.display())]
    ClassFolders { path: PathBuf, folders: usize },
    /// A label is too large for a class.
    #[error("label {label} at line {line} of {} is out of range 0..{}", path.display(), super::CLASSES_MAX)]
    LabelRange {
        path: PathBuf,
        line: u64,
        label: u32,
    },
    /// A CSV file without its first line.
    #[error("{} is empty; its first line must name the columns", path.display())]
    NoHeader { path: PathBuf },
    /// Two columns share a name.
    #[error("{} names two columns {name:?}", path.display())]
    DuplicateColumn { path: PathBuf, name: String },
    /// No column holds the labels.
    #[error("{} has no column {wanted:?}; its columns are {columns}", path.display())]
    NoLabelColumn {
        path: PathBuf,
        wanted: String,
        columns: String,
        nearest: Option<String>,
    },
    /// The file has only labels.
    #[error("{} has no column besides the label {label:?}", path.display())]
    NoFeatures { path: PathBuf, label: String },
    /// A line has more or fewer cells than there are columns.
    #[error("line {line} of {} has {}, its header names {}", path.display(), plural(*got as u64, "cell"), plural(*expected as u64, "column"))]
    Ragged {
        path: PathBuf,
        line: u64,
        expected: usize,
        got: usize,
    },
    /// A line is not UTF-8.
    #[error("line {line} of {} is not UTF-8 text", path.display())]
    NotText { path: PathBuf, line: u64 },
    /// A feature is not a number that fits.
    #[error("line {line} of {}: column {column:?} is {text:?}, not a finite 32-bit number", path.display())]
    BadNumber {
        path: PathBuf,
        line: u64,
        column: String,
        text: String,
    },
    /// A label is not a whole number, or is negative.
    #[error("line {line} of {}: label {column:?} is {text:?}, not a whole number 0, 1, 2, ...", path.display())]
    BadLabel {
        path: PathBuf,
        line: u64,
        column: String,
        text: String,
    },
    /// Too few samples to train on some and hold out others.
    #[error("{} has {}; at least 2 are needed: one to train on, one to hold out", path.display(), plural(*samples as u64, "sample"))]
    TooFewSamples { path: PathBuf, samples: usize },
    /// Standardised values would exceed `f32`.
    #[error("column {column:?} of {} cannot be standardised: a held-out value is too far from the others", path.display())]
    Unscalable { path: PathBuf, column: String },
}

impl DataError {
    /// Advice, if there is any.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Missing { nearest, .. } => return nearest.as_ref().map(did_you_mean),
            Self::NoLabelColumn { nearest, .. } => match nearest {
                Some(name) => format!("did you mean {name:?}? name it with --label-column"),
                None => "name the column that holds the labels with --label-column".to_owned(),
            },
            Self::Damaged { .. } | Self::Truncated { .. } => {
                "the file may not have been copied or downloaded completely".to_owned()
            }
            Self::Magic { .. } => {
                "check that images and labels are not swapped, and that values are unsigned bytes"
                    .to_owned()
            }
            Self::CountMismatch { .. } => {
                "check that both files belong to the same data set".to_owned()
            }
            Self::ClassFolders { .. } => {
                "it reads IDX folders (such as MNIST) and CSV files with one row per sample; \
                 load other data in your own program, such as examples/minimal.rs"
                    .to_owned()
            }
            Self::LabelRange { .. } => format!("number the classes from 0; {REGRESSION}"),
            Self::NoHeader { .. } => "the first line could be: age,height,label".to_owned(),
            Self::BadNumber { text, .. } if text.is_empty() => {
                "fill in missing values, or leave out their lines".to_owned()
            }
            Self::BadNumber { text, .. } if text.replace(',', ".").parse::<f64>().is_ok() => {
                "write decimals with a point".to_owned()
            }
            Self::BadNumber { .. } => "encode words as numbers, or leave the column out".to_owned(),
            Self::BadLabel { text, .. } if text.parse::<f64>().is_ok() => {
                format!("number the classes from 0; {REGRESSION}")
            }
            Self::BadLabel { .. } => "number the classes from 0".to_owned(),
            _ => return None,
        };
        Some(hint)
    }

    /// `Missing` for `path`, with the most similar name in the same folder.
    pub(super) fn missing(path: &Path) -> Self {
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let names = folder.read_dir().into_iter().flatten().flatten();
        let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut names: Vec<_> = names.take(COMPARED_MAX).collect();
        // The system lists in any order; sorting makes ties deterministic.
        names.sort_unstable();
        let wanted = path.file_name().unwrap_or_default().to_string_lossy();
        Self::Missing {
            path: path.to_owned(),
            nearest: nearest(&wanted, names.iter().map(String::as_str)),
        }
    }
}

paceline_rendezvous::debug_with_hint!(DataError);

fn did_you_mean(name: &String) -> String {
    format!("did you mean {name}?")
}

/// The most similar candidate, if any is similar.
pub(super) fn nearest<'a>(
    wanted: &str,
    candidates: impl Iterator<Item = &'a str>,
) -> Option<String> {
    let wanted = wanted.to_lowercase();
    candidates
        .map(|name| (strsim::jaro_winkler(&wanted, &name.to_lowercase()), name))
        .filter(|(likeness, _)| *likeness > 0.75)
        .reduce(|best, other| if other.0 > best.0 { other } else { best })
        .map(|(_, name)| name.to_owned())
}

/// A cell's text as quoted in errors.
pub(super) fn quote(text: &str) -> String {
    let mut quoted: String = text.chars().take(QUOTE_MAX).collect();
    if quoted.len() < text.len() {
        quoted.push('…');
    }
    quoted
}

/// The names as listed in errors.
pub(super) fn list(names: &[String]) -> String {
    let mut listed: Vec<_> = names
        .iter()
        .take(LISTED_MAX)
        .map(|name| quote(name))
        .collect();
    if names.len() > LISTED_MAX {
        listed.push(format!("... ({} in all)", names.len()));
    }
    listed.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_similar_name_is_suggested_and_only_if_it_is_similar() {
        let names = || ["train-labels-idx1-ubyte", "notes.txt"].into_iter();
        let suggested = nearest("train-label-idx1-ubyte", names());
        assert_eq!(suggested.as_deref(), Some("train-labels-idx1-ubyte"));
        assert_eq!(nearest("Notes.TXT", names()).as_deref(), Some("notes.txt"));
        assert_eq!(nearest("zebra", names()), None);
    }

    #[test]
    fn quotes_and_lists_are_bounded() {
        assert_eq!(quote("é".repeat(41).as_str()), "é".repeat(40) + "…");
        assert_eq!(quote("short"), "short");
        let names: Vec<_> = (0..20).map(|index| format!("c{index}")).collect();
        assert!(list(&names).ends_with("c10, c11, ... (20 in all)"));
    }
}
