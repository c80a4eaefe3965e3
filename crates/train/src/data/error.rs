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

/// Why a data set cannot be used.
#[derive(thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct DataError {
    /// The file or folder.
    pub path: PathBuf,
    /// What is wrong with it.
    pub problem: DataProblem,
}

/// What is wrong with a file or folder of data. Lines and columns count from 1, bytes from 0 and as uncompressed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the message of a variant says what its fields are"
)]
pub enum DataProblem {
    /// There is no such file or folder.
    #[error("no such file or folder")]
    Missing { hint: Option<String> },
    /// The task reads a folder, but this is a file.
    #[error("a file, but task idx reads a folder")]
    NotAFolder,
    /// The system could not read the file.
    #[error("cannot be read: {0}")]
    Io(io::Error),
    /// The file's gzip compression is broken or incomplete.
    #[error("damaged after uncompressed byte {offset}: {source}")]
    Damaged { offset: u64, source: io::Error },
    /// The set is larger than supported.
    #[error("{value} {what}, more than the {max} supported")]
    TooLarge {
        what: &'static str,
        value: u64,
        max: u64,
    },
    /// The file does not start as an IDX file of its kind does.
    #[error("starts with {got:#010x}, but IDX {kind} start with {expected:#010x}")]
    Magic {
        kind: &'static str,
        expected: u32,
        got: u32,
    },
    /// A number in an IDX header makes no sense.
    #[error("number of {what} at byte {offset} is {value}, outside 1..={max}")]
    Dimension {
        what: &'static str,
        offset: u64,
        value: u32,
        max: u32,
    },
    /// The file is shorter than its header says.
    #[error("ends at byte {got}, but {expected} bytes are expected")]
    Truncated { expected: u64, got: u64 },
    /// The file is longer than its header says.
    #[error("continues after byte {expected}, where its header says it ends")]
    Trailing { expected: u64 },
    /// Images and labels differ in number.
    #[error("{images} images, but {} has {labels} labels", labels_path.display())]
    CountMismatch {
        images: usize,
        labels_path: PathBuf,
        labels: usize,
    },
    /// Two files hold images of different sizes.
    #[error("images are {got} pixels (height x width), but training images are {expected}")]
    SizeMismatch { expected: String, got: String },
    /// A folder with one subfolder of images per class.
    #[error(
        "{folders} folders, perhaps one per image class; `paceline train` does not read image folders"
    )]
    ClassFolders { folders: usize },
    /// A label is too large for a class.
    #[error("line {line}: label {label} is out of range 0..{}", super::CLASSES_MAX)]
    LabelRange { line: u64, label: u32 },
    /// A CSV file without its first line.
    #[error("empty; the first line must name the columns")]
    NoHeader,
    /// Two columns share a name.
    #[error("two columns are called {name:?}")]
    DuplicateColumn { name: String },
    /// No column holds the labels.
    #[error("no column {wanted:?}; the columns are {columns}")]
    NoLabelColumn {
        wanted: String,
        columns: String,
        nearest: Option<String>,
    },
    /// The file has only labels.
    #[error("no column besides the label {label:?}")]
    NoFeatures { label: String },
    /// A line has more or fewer cells than there are columns.
    #[error("line {line}: {}, but the header names {}", plural(*got as u64, "cell"), plural(*expected as u64, "column"))]
    Ragged {
        line: u64,
        expected: usize,
        got: usize,
    },
    /// A line is not UTF-8.
    #[error("line {line}: not UTF-8 text")]
    NotText { line: u64 },
    /// A feature is not a number that fits.
    #[error("line {line}: column {column:?} is {text:?}, not a finite 32-bit number")]
    BadNumber {
        line: u64,
        column: String,
        text: String,
    },
    /// A label is not a whole number, or is negative.
    #[error("line {line}: label {column:?} is {text:?}, not a whole number 0, 1, 2, ...")]
    BadLabel {
        line: u64,
        column: String,
        text: String,
    },
    /// Too few samples to train on some and hold out others.
    #[error("{}; at least 2 are needed: one to train on, one to hold out", plural(*samples as u64, "sample"))]
    TooFewSamples { samples: usize },
    /// A text without a character.
    #[error("no text")]
    NoText,
    /// A text shorter than one sequence.
    #[error("{} to train on, fewer than the {context} of one context", plural(*tokens as u64, "token"))]
    ShortText { tokens: usize, context: usize },
    /// The tokenizer does not take the text.
    #[error("the tokenizer cannot encode the text: {why}")]
    Untokenizable { why: String },
    /// Standardised values would exceed `f32`.
    #[error(
        "column {column:?} cannot be standardised: a held-out value is too far from the others"
    )]
    Unscalable { column: String },
}

impl DataError {
    /// Advice, if there is any.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        self.problem.hint()
    }
}

impl DataProblem {
    /// The error of this file or folder.
    pub(crate) fn of(self, path: &Path) -> DataError {
        DataError {
            path: path.to_owned(),
            problem: self,
        }
    }

    fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Missing { hint } => return hint.clone(),
            Self::NotAFolder => "omit --task to guess it from the data".to_owned(),
            Self::Io(error) if error.kind() == io::ErrorKind::IsADirectory => {
                "task csv reads a file; omit --task to guess it from the data".to_owned()
            }
            Self::ShortText { .. } => "lower --context, or add text".to_owned(),
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

    /// `Missing` for `path`, with the most similar name in the same folder, among the likely ones.
    pub(super) fn missing(path: &Path, is_likely: impl Fn(&str) -> bool) -> Self {
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let names = folder.read_dir().into_iter().flatten().flatten();
        let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut names: Vec<_> = names.take(COMPARED_MAX).collect();
        names.retain(|name| is_likely(name));
        // The system lists in any order; sorting makes ties deterministic.
        names.sort_unstable();
        let wanted = path.file_name().unwrap_or_default().to_string_lossy();
        let nearest = nearest(&wanted, names.iter().map(String::as_str));
        Self::Missing {
            hint: nearest.map(|name| format!("did you mean {name}?")),
        }
    }
}

paceline_rendezvous::debug_with_hint!(DataError);

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
