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

/// Why a data set cannot be used.
#[derive(thiserror::Error)]
#[error("{}: {}", path.display(), problem.message)]
pub struct DataError {
    /// The file or folder.
    pub path: PathBuf,
    problem: DataProblem,
}

/// What is wrong with a file or folder of data. Lines and columns count from 1, bytes from 0 and as uncompressed.
#[derive(Debug)]
pub(crate) struct DataProblem {
    message: String,
    hint: Option<String>,
}

impl DataError {
    /// Advice, if there is any.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        self.problem.hint.clone()
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

    pub(crate) fn new(message: impl Into<String>) -> Self {
        let (message, hint) = (message.into(), None);
        Self { message, hint }
    }

    pub(crate) fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The problem in words, without advice.
    pub(super) fn message(&self) -> &str {
        &self.message
    }

    /// The system could not read the file.
    pub(super) fn io(error: &io::Error) -> Self {
        let problem = Self::new(format!("cannot be read: {error}"));
        match error.kind() {
            io::ErrorKind::IsADirectory => {
                problem.with_hint("task csv reads a file; `paceline train` without --task guesses the task from the data")
            }
            _ => problem,
        }
    }

    /// The set is larger than supported.
    pub(crate) fn too_large(what: &str, value: u64, max: u64) -> Self {
        Self::new(format!("{value} {what}, more than the {max} supported"))
    }

    /// There is no folder that this task could read.
    pub(super) fn no_folder(folder: &Path, task: &str) -> DataError {
        let problem = match folder.exists() {
            true => Self::new(format!("a file, but task {task} reads a folder"))
                .with_hint("`paceline train` without --task guesses the task from the data"),
            false => Self::missing(similar(folder, |_| true)),
        };
        problem.of(folder)
    }

    /// There is no such file or folder.
    pub(super) fn missing(hint: Option<String>) -> Self {
        Self {
            hint,
            ..Self::new("no such file or folder")
        }
    }

    /// The file ends early.
    pub(super) fn incomplete(message: String) -> Self {
        Self::new(message).with_hint("the file may not have been copied or downloaded completely")
    }
}

/// That parts of the data in `path`, such as "3 bad lines", are left out; `first` says where and why the first of them is bad.
pub(super) fn left_out(path: &Path, count: u64, noun: &str, first: &str) -> String {
    let (path, parts) = (path.display(), plural(count, noun));
    match count {
        1 => format!("{path}: {parts} is left out: {first}"),
        _ => format!("{path}: {parts} are left out, the first is {first}"),
    }
}

/// A suggestion in place of `path`: the most similar name in the same folder, among the likely ones.
pub(super) fn similar(path: &Path, is_likely: impl Fn(&str) -> bool) -> Option<String> {
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
    nearest.map(|name| format!("did you mean {name}?"))
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
