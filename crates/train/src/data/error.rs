//! Why a data set cannot be used, in words that name the file, the place in it and what was found there.

use std::io;
use std::path::{Path, PathBuf};

/// Text of a cell that an error quotes at most, in characters.
const QUOTE_MAX: usize = 40;

/// Columns that an error lists at most.
const LISTED_MAX: usize = 12;

/// Files of a folder that are compared with a missing one at most.
const COMPARED_MAX: usize = 1000;

/// Why a data set cannot be used. Lines and columns count from 1, bytes from 0 and as uncompressed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// There is no such file or folder.
    #[error("{} does not exist", path.display())]
    Missing {
        /// What was looked for.
        path: PathBuf,
        /// The name beside it that is most alike.
        nearest: Option<String>,
    },
    /// The system could not read the file.
    #[error("{} cannot be read: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file's gzip compression is broken or incomplete.
    #[error("{} is damaged after uncompressed byte {offset}: {source}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Bytes that could be uncompressed.
        offset: u64,
        /// What is wrong.
        source: io::Error,
    },
    /// The set is larger than supported.
    #[error("{} has {value} {what}, more than the {max} supported", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// What there is too much of.
        what: &'static str,
        /// How much there is, at least.
        value: u64,
        /// How much there may be.
        max: u64,
    },
    /// The file does not start like an IDX file of its kind.
    #[error("{} starts with {got:#010x}, but IDX {kind} start with {expected:#010x}", path.display())]
    Magic {
        /// The file.
        path: PathBuf,
        /// What the file should hold.
        kind: &'static str,
        /// The first four bytes of such a file.
        expected: u32,
        /// The first four bytes.
        got: u32,
    },
    /// A number in an IDX header makes no sense.
    #[error("{}: number of {what} at byte {offset} is {value}, outside 1..={max}", path.display())]
    Dimension {
        /// The file.
        path: PathBuf,
        /// What the number counts.
        what: &'static str,
        /// Where it is.
        offset: u64,
        /// The number.
        value: u32,
        /// The highest one supported.
        max: u32,
    },
    /// The file is shorter than its header says.
    #[error("{} ends at byte {got}, {expected} bytes were expected", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes there should be.
        expected: u64,
        /// Bytes there are.
        got: u64,
    },
    /// The file is longer than its header says.
    #[error("{} goes on after byte {expected}, where its header says it ends", path.display())]
    Trailing {
        /// The file.
        path: PathBuf,
        /// Bytes there should be.
        expected: u64,
    },
    /// Images and labels do not belong together.
    #[error("{} has {images} images, but {} has {labels} labels", images_path.display(), labels_path.display())]
    CountMismatch {
        /// The file of images.
        images_path: PathBuf,
        /// Its images.
        images: usize,
        /// The file of labels.
        labels_path: PathBuf,
        /// Its labels.
        labels: usize,
    },
    /// Two files hold images of different sizes.
    #[error("images of {} are {got} pixels (height x width), those that train are {expected}", path.display())]
    SizeMismatch {
        /// The second file.
        path: PathBuf,
        /// Size in the first file.
        expected: String,
        /// Size in the second file.
        got: String,
    },
    /// A label is not one of the classes.
    #[error("label {label} at {place} of {} is out of range 0..{classes}", path.display())]
    LabelRange {
        /// The file.
        path: PathBuf,
        /// `line 7` or `byte 15`.
        place: String,
        /// The label.
        label: u32,
        /// Number of classes.
        classes: usize,
    },
    /// A CSV file without its first line.
    #[error("{} is empty, its first line must name the columns", path.display())]
    NoHeader {
        /// The file.
        path: PathBuf,
    },
    /// Two columns share a name.
    #[error("{} names two columns {name:?}", path.display())]
    DuplicateColumn {
        /// The file.
        path: PathBuf,
        /// The name.
        name: String,
    },
    /// No column holds the labels.
    #[error("{} has no column {wanted:?}; its columns are {columns}", path.display())]
    NoLabelColumn {
        /// The file.
        path: PathBuf,
        /// The name looked for.
        wanted: String,
        /// The names there are.
        columns: String,
        /// The one that is most alike.
        nearest: Option<String>,
    },
    /// There is nothing but labels.
    #[error("{} has no column besides the label {label:?}", path.display())]
    NoFeatures {
        /// The file.
        path: PathBuf,
        /// The label column.
        label: String,
    },
    /// A line has more or fewer cells than there are columns.
    #[error("line {line} of {} has {got} cells, its header names {expected} columns", path.display())]
    Ragged {
        /// The file.
        path: PathBuf,
        /// The line.
        line: u64,
        /// Columns.
        expected: usize,
        /// Cells.
        got: usize,
    },
    /// A line is not UTF-8.
    #[error("line {line} of {} is not UTF-8 text", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// The line.
        line: u64,
    },
    /// A feature is not a number that fits.
    #[error("line {line} of {}: column {column:?} is {text:?}, not a finite 32-bit number", path.display())]
    BadNumber {
        /// The file.
        path: PathBuf,
        /// The line.
        line: u64,
        /// The column's name.
        column: String,
        /// The cell, shortened if long.
        text: String,
    },
    /// A label is not a whole number, or is negative.
    #[error("line {line} of {}: label {column:?} is {text:?}, not a whole number 0, 1, 2, ...", path.display())]
    BadLabel {
        /// The file.
        path: PathBuf,
        /// The line.
        line: u64,
        /// The column's name.
        column: String,
        /// The cell, shortened if long.
        text: String,
    },
    /// Too little to train on some and hold out others.
    #[error("{} has {samples} samples, at least 2 are needed: one to train on, one to hold out", path.display())]
    TooFewSamples {
        /// The file.
        path: PathBuf,
        /// Samples there are.
        samples: usize,
    },
    /// Standardising would leave what `f32` can hold.
    #[error("column {column:?} of {} cannot be standardised: a held-out value is too far from the others", path.display())]
    Unscalable {
        /// The file.
        path: PathBuf,
        /// The column's name.
        column: String,
    },
}

impl DataError {
    /// What to do about it, where that is known.
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
            Self::CountMismatch { .. } => "check that both files are of one data set".to_owned(),
            Self::LabelRange { .. } => "classes count from 0".to_owned(),
            Self::NoHeader { .. } => "the first line could be: age,height,label".to_owned(),
            Self::BadNumber { text, .. } if text.is_empty() => {
                "fill in missing values, or leave out their lines".to_owned()
            }
            Self::BadNumber { .. } => "encode words as numbers, or leave the column out".to_owned(),
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
        // The system lists in any order; equally similar names must not take turns.
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

/// The candidate that is most alike, if one is alike at all.
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

/// A cell's text as errors quote it.
pub(super) fn quote(text: &str) -> String {
    let mut quoted: String = text.chars().take(QUOTE_MAX).collect();
    if quoted.len() < text.len() {
        quoted.push('…');
    }
    quoted
}

/// The names as errors list them.
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
