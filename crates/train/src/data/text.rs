//! Text as documents: files, rows of tables, or the built-in text; each cut into a part to train on and a held-out one.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;

use super::source::{Source, not_text};
use super::table::{TextColumn, is_table};
use super::{DataError, DataProblem, name_of};

/// The attribution is in `data/README.md`.
const BUILT_IN: &[u8] = include_bytes!("../../data/shakespeare.txt.gz");

/// Maximum size of all documents together: every rank holds them, and then four bytes for each token.
const BYTES_MAX: u64 = 1 << 29;

/// Maximum number of files in a folder.
const FILES_MAX: usize = 1 << 20;

/// Maximum number of documents.
const DOCUMENTS_MAX: usize = 1 << 24;

/// Maximum depth of folders.
const DEPTH_MAX: usize = 32;

/// Percentage of each document that is trained on.
const TRAIN_PERCENT: usize = 90;

/// Texts in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Documents {
    /// Short name, for reports.
    pub(crate) name: String,
    documents: Vec<String>,
    /// Signs that the texts are not what the user intended.
    pub(crate) warnings: Vec<String>,
}

impl Documents {
    /// The built-in text: 200 kB of Shakespeare's plays.
    ///
    /// *Source*: A. Karpathy, "tiny Shakespeare" (2015); public domain.
    pub(crate) fn built_in() -> Self {
        let mut text = String::new();
        let read = GzDecoder::new(BUILT_IN).read_to_string(&mut text);
        read.expect("the text in the program is intact");
        Self {
            name: "shakespeare".to_owned(),
            documents: vec![text],
            warnings: Vec::new(),
        }
    }

    /// Reads a file, or all files in a folder and its subfolders in the order of their paths. Hidden files are left out. A table has a document in
    /// each row; a file that is not called as one is read as one only if it is the only one and `column` is asked for.
    ///
    /// *Errors*: files that are not UTF-8 or cannot be read; those of a table; no text at all; more than 512 MiB.
    pub(crate) fn read(path: &Path, column: &TextColumn) -> Result<Self, DataError> {
        let mut files = Vec::new();
        let is_folder = path.is_dir();
        if is_folder {
            list(path, DEPTH_MAX, &mut files)?;
        } else {
            files.push(path.to_owned());
        }
        let mut all = Self {
            name: name_of(path),
            documents: Vec::new(),
            warnings: Vec::new(),
        };
        let mut left = BYTES_MAX;
        for file in &files {
            let read = match is_table(file) || column.is_named && !is_folder {
                true => column.read(file, |text| all.add(text.to_owned(), &mut left)),
                false => read_text(file, left)
                    .and_then(|text| all.add(text, &mut left))
                    .map(|()| Vec::new()),
            };
            let warnings = read.map_err(|problem| problem.of(file))?;
            all.warnings.extend(warnings);
        }
        match all.documents.is_empty() {
            true => Err(DataProblem::new("no text").of(path)),
            false => Ok(all),
        }
    }

    /// Adds a document, unless it is empty.
    fn add(&mut self, text: String, left: &mut u64) -> Result<(), DataProblem> {
        *left = left.checked_sub(text.len() as u64).ok_or_else(too_long)?;
        if self.documents.len() == DOCUMENTS_MAX {
            let (value, max) = (DOCUMENTS_MAX as u64 + 1, DOCUMENTS_MAX as u64);
            return Err(DataProblem::too_large("documents or more", value, max));
        }
        self.documents.extend((!text.is_empty()).then_some(text));
        Ok(())
    }

    /// Each document's first nine tenths.
    pub(crate) fn train(&self) -> impl Iterator<Item = &str> {
        self.documents.iter().map(|text| &text[..cut(text)])
    }

    /// Each document's last tenth.
    pub(crate) fn held_out(&self) -> impl Iterator<Item = &str> {
        self.documents.iter().map(|text| &text[cut(text)..])
    }
}

/// Where the held-out part of a document begins, in bytes.
fn cut(text: &str) -> usize {
    text.floor_char_boundary(text.len() * TRAIN_PERCENT / 100)
}

/// Adds the files below `folder`. A link to a folder is not followed, because it may lead back.
fn list(folder: &Path, depth: usize, files: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let failed = |error| DataProblem::io(&error).of(folder);
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if !entry.file_name().to_string_lossy().starts_with('.') {
            entries.push((entry.path(), entry.file_type().map_err(failed)?));
        }
    }
    entries.sort_by(|(one, _), (other, _)| one.cmp(other));
    for (path, kind) in entries {
        if kind.is_dir() && depth > 0 {
            list(&path, depth - 1, files)?;
        } else if path.is_file() {
            files.push(path);
        }
        if files.len() > FILES_MAX {
            let (value, max) = (files.len() as u64, FILES_MAX as u64);
            return Err(DataProblem::too_large("files", value, max).of(folder));
        }
    }
    Ok(())
}

fn too_long() -> DataProblem {
    let what = "bytes of text or more, with the files before it";
    DataProblem::too_large(what, BYTES_MAX + 1, BYTES_MAX)
}

fn read_text(file: &Path, bytes_max: u64) -> Result<String, DataProblem> {
    let bytes = Source::open(file)?.read_some(bytes_max + 1)?;
    if bytes.len() as u64 > bytes_max {
        return Err(too_long());
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = valid.iter().filter(|&&byte| byte == b'\n').count() as u64 + 1;
        not_text(line)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Given, Inputs, Surroundings};

    fn read(path: &Path, flags: &[(&str, &str)]) -> Result<Documents, DataError> {
        let flags = [("task", "lm")].iter().chain(flags);
        let inputs = Inputs {
            flags: flags
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
            ..Inputs::default()
        };
        let given = Given::read(&inputs).expect("settings");
        let resolved = given.resolve(None, &Surroundings::of_process());
        Documents::read(path, &TextColumn::new(resolved.expect("settings").config()))
    }

    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, bytes) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
            fs::write(path, bytes).expect("a file");
        }
        folder
    }

    #[test]
    fn a_folder_is_read_in_the_order_of_paths_without_hidden_and_empty_files() {
        let folder = folder(&[
            ("b.txt", b"two"),
            ("a/z.md", b"one"),
            (".git", b"hidden"),
            ("empty", b""),
        ]);
        let read = read(folder.path(), &[]).expect("readable");
        assert_eq!(read.documents, ["one", "two"]);
    }

    #[test]
    fn each_row_of_a_table_is_a_document() {
        let jsonl = b"{\"id\": {\"a\": 1}, \"text\": \" one\\n\"}\n{\"text\": null}\n{\"id\": 3}\n{\"text\": \"two\"}\n";
        let folder = folder(&[
            ("a.jsonl", jsonl),
            ("b.txt", b"text,but\nno,table"),
            ("c.TSV", b"text\tn\n\"th\nree\"\t3\nfour\t4\n"),
        ]);
        let all = read(folder.path(), &[]).expect("readable");
        let expected = [" one\n", "two", "text,but\nno,table", "th\nree", "four"];
        assert_eq!(all.documents, expected);
        let [warning] = &all.warnings[..] else {
            panic!("{:?}", all.warnings)
        };
        let expected = "a.jsonl: left out 2 rows without a text in column \"text\"";
        assert!(warning.ends_with(expected), "{warning}");
        let path = folder.path().join("b.txt");
        let named = read(&path, &[("text_column", "but")]).expect("readable");
        assert_eq!(named.documents, ["table"]);
    }

    #[test]
    fn bad_rows_are_named_or_left_out() {
        let folder = folder(&[
            ("a.jsonl", b"{\"text\": \"one\"}\n{\"text\": [2]}\n"),
            ("b.csv", b"text,n\none,1\ntwo\n"),
            ("c.csv", b"body,n\none,1\n"),
            ("d.jsonl", b"{\"content\": \"one\", \"n\": 1}\n"),
        ]);
        let check = |name: &str, flags: &[(&str, &str)], expected: &str, hint: &str| {
            let error = read(&folder.path().join(name), flags).expect_err("refused");
            let message = error.to_string();
            assert!(message.ends_with(expected), "{message}");
            let given = error.hint().unwrap_or_default();
            assert!(given.contains(hint), "{given}");
        };
        let array = "a.jsonl: line 2: key \"text\" holds an array; values must be flat";
        check("a.jsonl", &[], array, "");
        let short = "b.csv: line 3: 1 cell, but the header names 2 columns";
        check("b.csv", &[], short, "");
        let none = "c.csv: no column \"text\"; the columns are body, n";
        check("c.csv", &[], none, "--text-column");
        let none = "d.jsonl: no column \"contents\"; the columns are content, n";
        check(
            "d.jsonl",
            &[("text_column", "contents")],
            none,
            "\"content\"",
        );
        let skip = &[("bad_samples", "skip")];
        let left = read(&folder.path().join("b.csv"), skip).expect("readable");
        assert_eq!(left.documents, ["one"]);
        assert!(
            left.warnings[0].contains("1 bad line"),
            "{:?}",
            left.warnings
        );
    }

    #[test]
    fn both_parts_of_a_document_are_the_document_even_between_wide_characters() {
        for text in ["0123456789", "éééé", "x"] {
            let documents = Documents {
                name: String::new(),
                documents: vec![text.to_owned()],
                warnings: Vec::new(),
            };
            let parts: String = documents.train().chain(documents.held_out()).collect();
            assert_eq!(parts, text);
        }
        let built_in = Documents::built_in();
        let bytes = |text: &str| text.len();
        let train: usize = built_in.train().map(bytes).sum();
        assert_eq!(train, 179_994);
        assert_eq!(built_in.held_out().map(bytes).sum::<usize>(), 20_000);
    }

    #[test]
    fn what_is_no_text_is_refused_with_its_file_and_line() {
        let check = |files: &[(&str, &[u8])], path: &str, expect: &str| {
            let folder = folder(files);
            let error = read(&folder.path().join(path), &[]).expect_err("refused");
            let message = error.to_string();
            assert!(message.ends_with(expect), "{message}");
        };
        check(
            &[("a.bin", b"text\n\xff\xfe")],
            "",
            "a.bin: line 2: not UTF-8 text",
        );
        check(&[("empty", b"")], "", ": no text");
        check(&[("sub/.hidden", b"text")], "", ": no text");
        check(
            &[("a.txt", b"text")],
            "b.txt",
            "b.txt: no such file or folder",
        );
    }
}
