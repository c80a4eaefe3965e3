//! Text as documents: files, rows of tables, or the built-in text; each cut into a part to train on and a held-out one.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;

use super::source::{Source, not_text};
use super::table::{TextColumn, is_table};
use super::{DataError, DataProblem, name_of};
use crate::task::Part;

/// The attribution is in `data/README.md`.
const BUILT_IN: &[u8] = include_bytes!("../../data/shakespeare.txt.gz");

/// Maximum size of a file.
const FILE_BYTES_MAX: u64 = 1 << 40;

/// Longest text that is handed over in one piece.
const PIECE_BYTES: u64 = 1 << 20;

/// Maximum number of files in a folder.
const FILES_MAX: usize = 1 << 20;

/// Maximum number of documents.
const DOCUMENTS_MAX: usize = 1 << 31;

/// Maximum depth of folders.
const DEPTH_MAX: usize = 32;

/// Percentage of each document that is trained on.
const TRAIN_PERCENT: u64 = 90;

/// Texts, which are read anew each time that they are gone through.
pub(crate) struct Documents {
    /// Short name, for reports.
    pub(crate) name: String,
    texts: Texts,
}

enum Texts {
    BuiltIn,
    Files {
        root: PathBuf,
        files: Vec<PathBuf>,
        column: TextColumn,
    },
}

/// A part of a document, or a piece of a long one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece<'a> {
    /// Whether the document's part begins here.
    pub(crate) begins: bool,
    /// The first nine tenths of a document are trained on, and the last is held out.
    pub(crate) part: Part,
    pub(crate) text: &'a str,
}

impl Documents {
    /// The built-in text: 200 kB of Shakespeare's plays.
    ///
    /// *Source*: A. Karpathy, "tiny Shakespeare" (2015); public domain.
    pub(crate) fn built_in() -> Self {
        Self {
            name: "shakespeare".to_owned(),
            texts: Texts::BuiltIn,
        }
    }

    /// A file, or all files in a folder and its subfolders in the order of their paths. Hidden files are left out. A table has a document in
    /// each row; a file that is not called as one is read as one only if it is the only one and a column is asked for.
    ///
    /// *Errors*: a folder that cannot be read, or has too many files.
    pub(crate) fn open(path: &Path, column: TextColumn) -> Result<Self, DataError> {
        let mut files = Vec::new();
        if path.is_dir() {
            list(path, DEPTH_MAX, &mut files)?;
        } else {
            files.push(path.to_owned());
        }
        Ok(Self {
            name: name_of(path),
            texts: Texts::Files {
                root: path.to_owned(),
                files,
                column,
            },
        })
    }

    /// Hands all documents to `take`, first the training part of each, and returns signs that they are not what the user intended. Empty
    /// documents are left out.
    ///
    /// *Cost*: no more than a row of a table, or 2 MiB of a file, is in memory.
    ///
    /// *Errors*: files that are not UTF-8 or cannot be read; those of a table; no text at all; those of `take`.
    pub(crate) fn each(
        &self,
        mut take: impl FnMut(Piece<'_>) -> Result<(), DataProblem>,
    ) -> Result<Vec<String>, DataError> {
        let mut warnings = Vec::new();
        let Texts::Files {
            root,
            files,
            column,
        } = &self.texts
        else {
            let mut text = String::new();
            let read = GzDecoder::new(BUILT_IN).read_to_string(&mut text);
            read.expect("the text in the program is intact");
            whole(&text, &mut take).map_err(|problem| problem.of("the built-in text".as_ref()))?;
            return Ok(warnings);
        };
        let mut documents = 0;
        let mut count = |text_len: usize| {
            documents += usize::from(text_len > 0);
            match documents > DOCUMENTS_MAX {
                true => {
                    let (value, max) = (documents as u64, DOCUMENTS_MAX as u64);
                    Err(DataProblem::too_large("documents", value, max))
                }
                false => Ok(()),
            }
        };
        for file in files {
            let read = match is_table(file) || column.is_named && !root.is_dir() {
                true => column.read(file, |text| {
                    count(text.len())?;
                    whole(text, &mut take)
                }),
                false => read_text(file, &mut take)
                    .and_then(|has_text| count(usize::from(has_text)))
                    .map(|()| Vec::new()),
            };
            warnings.extend(read.map_err(|problem| problem.of(file))?);
        }
        match documents {
            0 => Err(DataProblem::new("no text").of(root)),
            _ => Ok(warnings),
        }
    }
}

/// Where the held-out part of a document of so many bytes begins, unless that is within a letter.
fn cut(len: u64) -> u64 {
    // Neither overflows nor rounds.
    len / 100 * TRAIN_PERCENT + len % 100 * TRAIN_PERCENT / 100
}

/// Hands over both parts of a document that is in memory.
fn whole(
    text: &str,
    take: &mut impl FnMut(Piece<'_>) -> Result<(), DataProblem>,
) -> Result<(), DataProblem> {
    if text.is_empty() {
        return Ok(());
    }
    let (train, held_out) =
        text.split_at(text.floor_char_boundary(cut(text.len() as u64) as usize));
    for (part, text) in [(Part::Train, train), (Part::HeldOut, held_out)] {
        take(Piece {
            begins: true,
            part,
            text,
        })?;
    }
    Ok(())
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

/// Hands over a file, in pieces if it is long, and tells whether it has any text.
fn read_text(
    file: &Path,
    take: &mut impl FnMut(Piece<'_>) -> Result<(), DataProblem>,
) -> Result<bool, DataProblem> {
    let open = || {
        let mut source = Source::open(file)?;
        source.allow(FILE_BYTES_MAX);
        Ok(source)
    };
    let mut source = open()?;
    let mut bytes = source.read_some(PIECE_BYTES + 1)?;
    if bytes.len() as u64 <= PIECE_BYTES {
        let text = str::from_utf8(&bytes)
            .map_err(|error| not_text(1 + lines(&bytes[..error.valid_up_to()]), &bytes))?;
        whole(text, take)?;
        return Ok(!text.is_empty());
    }
    let cut = cut(open()?.count()?);
    let (mut part, mut begins) = (Part::Train, true);
    // Bytes and lines that were handed over.
    let (mut at, mut line) = (0, 1);
    loop {
        let is_end = bytes.len() as u64 <= PIECE_BYTES;
        let text = match str::from_utf8(&bytes) {
            Ok(text) => text,
            Err(error) => {
                let (text, _) = bytes.split_at(error.valid_up_to());
                if error.error_len().is_some() || is_end || text.is_empty() {
                    return Err(not_text(line + lines(text), &bytes));
                }
                str::from_utf8(text).expect("it is valid up to here")
            }
        };
        let to_cut = cut.checked_sub(at).filter(|_| part == Part::Train);
        let to_cut = to_cut.filter(|to_cut| *to_cut < text.len() as u64);
        let end = match to_cut {
            Some(to_cut) => text.floor_char_boundary(to_cut as usize),
            None if is_end => text.len(),
            None => last_line(text),
        };
        let text = &text[..end];
        take(Piece { begins, part, text })?;
        at += end as u64;
        line += lines(text.as_bytes());
        bytes.drain(..end);
        begins = to_cut.is_some();
        if begins {
            part = Part::HeldOut;
        } else if is_end {
            break;
        }
        bytes.append(
            &mut source.read_some(PIECE_BYTES + 1 - (bytes.len() as u64).min(PIECE_BYTES + 1))?,
        );
    }
    if part == Part::Train {
        // The file has become shorter.
        take(Piece {
            begins: true,
            part: Part::HeldOut,
            text: "",
        })?;
    }
    Ok(true)
}

/// Where the last line begins that begins with a letter: there, tokens begin anyway. The end, if there is no such line.
fn last_line(text: &str) -> usize {
    let starts = text.rmatch_indices('\n').map(|(at, _)| at + 1);
    let mut starts =
        starts.filter(|at| text[*at..].starts_with(|letter: char| !letter.is_whitespace()));
    starts.next().unwrap_or(text.len())
}

fn lines(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|&&byte| byte == b'\n').count() as u64
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::config::{Given, Inputs, Surroundings};

    /// Whole documents, and warnings.
    #[derive(Debug)]
    struct All {
        documents: Vec<String>,
        warnings: Vec<String>,
    }

    fn all(documents: &Documents) -> Result<All, DataError> {
        let mut all = Vec::<String>::new();
        let warnings = documents.each(|piece| {
            if piece.begins && piece.part == Part::Train {
                all.push(String::new());
            }
            all.last_mut()
                .expect("a document begins")
                .push_str(piece.text);
            Ok(())
        })?;
        Ok(All {
            documents: all,
            warnings,
        })
    }

    fn read(path: &Path, flags: &[(&str, &str)]) -> Result<All, DataError> {
        let flags = [("task", "lm")].iter().chain(flags);
        let inputs = Inputs {
            flags: flags
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
            ..Inputs::default()
        };
        let given = Given::read(&inputs).expect("settings");
        let resolved = given.resolve(None, &Surroundings::of_process());
        let column = TextColumn::new(resolved.expect("settings").config());
        all(&Documents::open(path, column)?)
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

    /// The text of both parts, and the pieces of the first.
    fn parts(text: &str, is_compressed: bool) -> ([String; 2], Vec<String>) {
        let folder = folder(&[]);
        let path = folder.path().join("text");
        let mut file = fs::File::create(&path).expect("a file");
        if is_compressed {
            let mut encoder = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
            encoder.write_all(text.as_bytes()).expect("written");
            encoder.finish().expect("written");
        } else {
            file.write_all(text.as_bytes()).expect("written");
        }
        let (mut parts, mut pieces) = ([String::new(), String::new()], Vec::new());
        let take = &mut |piece: Piece<'_>| {
            let at = usize::from(piece.part == Part::HeldOut);
            assert_eq!(
                piece.begins,
                parts[at].is_empty() && (at == 1 || pieces.is_empty())
            );
            parts[at].push_str(piece.text);
            if at == 0 {
                pieces.push(piece.text.to_owned());
            }
            Ok(())
        };
        assert!(read_text(&path, take).expect("readable"));
        (parts, pieces)
    }

    #[test]
    fn both_parts_of_a_document_are_the_document_even_between_wide_characters() {
        let long = "naïve lines ∑ of\n\n  text\n".repeat(100_000);
        for text in ["0123456789", "éééé", "x", &"é".repeat(2_000_001), &long] {
            let at = text.floor_char_boundary(text.len() * 9 / 10);
            for is_compressed in [false, true] {
                let (parts, _) = parts(text, is_compressed);
                assert_eq!(parts, [&text[..at], &text[at..]].map(str::to_owned));
            }
        }
        let mut train = 0;
        let count = |piece: Piece<'_>| {
            train += piece.text.len() * usize::from(piece.part == Part::Train);
            Ok(())
        };
        Documents::built_in().each(count).expect("intact");
        assert_eq!(train, 179_994);
    }

    #[test]
    fn long_files_are_cut_where_a_line_begins_with_a_letter() {
        let long = "naïve lines ∑ of\n\n  text\n".repeat(100_000);
        let (_, pieces) = parts(&long, false);
        assert!(pieces.len() > 2);
        for piece in &pieces[1..] {
            assert!(piece.starts_with("naïve"), "{}", &piece[..20]);
        }
        for piece in pieces {
            assert!(piece.len() as u64 <= PIECE_BYTES + 1);
        }
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
        let mut long = b"a line\n".repeat(400_000);
        long.extend(b"\xff\n");
        check(
            &[("a.bin", &long)],
            "",
            "a.bin: line 400001: not UTF-8 text",
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
