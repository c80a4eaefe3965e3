//! The rows of a table in a file: separated cells below a header, JSON lines, or Parquet.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::fmt::{self, Display, Formatter};
use std::io::{self, Chain, Cursor, Read};
use std::path::Path;

use ::csv::{ByteRecord, ErrorKind, Reader, ReaderBuilder, StringRecord, Terminator};

use super::json::{JsonLines, Value};
use super::parquet::{self, Parquet};
use crate::data::DataProblem;
use crate::data::error::quote;
use crate::data::source::{Source, not_text};
use crate::report::plural;

/// Maximum number of bytes read to find the first line.
const HEAD_BYTES_MAX: u64 = 1 << 20;

/// Maximum length of a line, and of a row over several lines.
pub(super) const LINE_BYTES_MAX: u64 = 16 << 20;

/// Maximum number of columns.
pub(super) const COLUMNS_MAX: usize = 1 << 17;

const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// The separators that are told from the first line.
const USUAL: [u8; 4] = [b',', b';', b'\t', b'|'];

/// Most bad lines before the first object of JSON lines.
const BAD_FIRST_MAX: usize = 1000;

/// Cells that pandas takes for missing values.
const MISSING: [&str; 12] = [
    "", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None", "-NaN",
];

/// The rows of a file, one by one, without blank lines.
pub(super) struct Rows {
    names: Vec<String>,
    format: Format,
    /// The lines up to the first object of JSON lines, which are read when the file is opened.
    first: VecDeque<Result<Row, DataProblem>>,
}

enum Format {
    Separated(Box<Reader<Lines>>),
    Json(Box<JsonLines<Chain<Cursor<Vec<u8>>, Source>>>),
    Parquet(Box<Parquet>),
}

/// Comes after a file, as a line: what stands in a quoted cell shows that its quote was never closed.
const END: &str = "\n\u{1e}\n";

/// The file from its first byte: the part read to find the separator, the rest, and [`END`].
type Lines = Chain<Chain<Cursor<Vec<u8>>, Source>, &'static [u8]>;

/// A row, and where it starts.
pub(super) struct Row {
    pub(super) place: Place,
    cells: Cells,
}

/// A place in a file, counted from 1.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    Line(u64),
    Row(u64),
}

impl Display for Place {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(out, "line {line}"),
            Self::Row(row) => write!(out, "row {row}"),
        }
    }
}

enum Cells {
    Texts(StringRecord),
    /// By column; keys of JSON lines that first occur further on are not there.
    Values(Vec<Option<Value>>),
}

/// A cell as its text or its type says.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cell<'a> {
    Missing,
    Number(f64, &'a str),
    Word(&'a str),
    /// Neither of them.
    Opaque,
}

impl Row {
    pub(super) fn cell(&self, column: usize) -> Cell<'_> {
        match &self.cells {
            Cells::Texts(cells) => {
                let text = &cells[column];
                match text.parse() {
                    _ if is_missing(text) => Cell::Missing,
                    Ok(number) => Cell::Number(number, text),
                    Err(_) => Cell::Word(text),
                }
            }
            Cells::Values(values) => match values.get(column).and_then(Option::as_ref) {
                None => Cell::Missing,
                Some(Value::Number(number, text)) => Cell::Number(*number, text),
                Some(Value::Word(text)) => Cell::Word(text),
                Some(Value::Opaque) => Cell::Opaque,
            },
        }
    }

    /// The text of a cell, empty if there is none.
    pub(super) fn text(&self, column: usize) -> &str {
        match &self.cells {
            Cells::Texts(cells) => &cells[column],
            Cells::Values(values) => match values.get(column).and_then(Option::as_ref) {
                None | Some(Value::Opaque) => "",
                Some(Value::Number(_, text) | Value::Word(text)) => text,
            },
        }
    }
}

/// Whether a text stands for no value.
pub(super) fn is_missing(text: &str) -> bool {
    MISSING.contains(&text)
}

impl Rows {
    /// Opens a file, whose first bytes say whether it is Parquet or one of JSON lines. If one column is `wanted`, JSON lines and Parquet have no values
    /// in others.
    ///
    /// *Errors*: a file that cannot be read, a compressed one of Parquet; an unclear or a wrong separator; no names of columns, or two alike.
    pub(super) fn open(
        path: &Path,
        separator: Option<u8>,
        wanted: Option<&str>,
    ) -> Result<Self, DataProblem> {
        let mut source = Source::open(path)?;
        let head = source.read_some(HEAD_BYTES_MAX)?;
        if head.starts_with(parquet::MAGIC) {
            let (mut file, names) = Parquet::open(source.into_file()?)?;
            if let Some(wanted) = wanted {
                file.only(|at| names[at] == wanted);
            }
            let mut rows = Self::of(Format::Parquet(Box::new(file)));
            rows.names = distinct(names)?;
            return Ok(rows);
        }
        let start = head.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&head);
        let start = start.trim_ascii_start();
        let marked = head.len() - start.len();
        match start {
            [b'{', ..] => {
                let before = head[..marked].iter().filter(|byte| **byte == b'\n').count();
                let mut rest = Cursor::new(head);
                rest.set_position(marked as u64);
                let lines = JsonLines::open(rest.chain(source), before as u64, wanted);
                let mut rows = Self::of(Format::Json(Box::new(lines)));
                // Bad lines may come before the first object, whose keys are the columns.
                let mut first = VecDeque::new();
                while first.iter().all(Result::is_err) && first.len() < BAD_FIRST_MAX {
                    let Some(row) = rows.next()? else { break };
                    first.push_back(row);
                }
                if first.iter().all(Result::is_err)
                    && let Some(bad) = first.pop_front()
                {
                    bad?;
                }
                rows.first = first;
                Ok(rows)
            }
            [b'[', rest @ ..] if rest.trim_ascii_start().starts_with(b"{") => Err(
                DataProblem::new("a JSON array; JSON lines have an object on each line")
                    .with_hint("`jq -c '.[]' FILE` writes an array as JSON lines"),
            ),
            _ => Self::separated(head, source, separator),
        }
    }

    /// Reads no values in other columns than the `wanted` ones, where the format stores columns apart.
    pub(super) fn only(&mut self, wanted: &HashSet<usize>) {
        if let Format::Parquet(file) = &mut self.format {
            file.only(|at| wanted.contains(&at));
        }
    }

    fn of(format: Format) -> Self {
        Self {
            names: Vec::new(),
            format,
            first: VecDeque::new(),
        }
    }

    fn separated(
        head: Vec<u8>,
        source: Source,
        separator: Option<u8>,
    ) -> Result<Self, DataProblem> {
        let mut lines = head.split(|&byte| byte == b'\n');
        let first = lines.find(|line| !line.trim_ascii().is_empty());
        let counts = counts(first.unwrap_or_default());
        let chosen = match separator {
            Some(separator) => separator,
            None => guess(counts)?,
        };
        // With `\n` as the only terminator and one behind the file, every record ends at a line end, so its line number is
        // known. A preceding `\r` is trimmed with the other spaces around cells.
        let reader = ReaderBuilder::new()
            .has_headers(false)
            .flexible(true)
            .delimiter(chosen)
            .terminator(Terminator::Any(b'\n'))
            .from_reader(Cursor::new(head).chain(source).chain(END.as_bytes()));
        let mut rows = Self::of(Format::Separated(Box::new(reader)));
        rows.names = rows.header()?;
        let other = counts.into_iter().max_by_key(|(_, count)| *count);
        match other {
            Some((other, 1..)) if rows.names.len() == 1 && other != chosen => {
                let (header, chosen, other) = (quote(&rows.names[0]), shown(chosen), shown(other));
                Err(DataProblem::new(format!(
                    "the separator {chosen} is not in the first line, {header:?}"
                ))
                .with_hint(format!("{other} is: name it with --separator")))
            }
            _ => Ok(rows),
        }
    }

    fn header(&mut self) -> Result<Vec<String>, DataProblem> {
        let Format::Separated(reader) = &mut self.format else {
            unreachable!("only separated cells have a line of names");
        };
        let Some(header) = read_record(reader)?.transpose()? else {
            return Err(
                DataProblem::new("empty; the first line must name the columns")
                    .with_hint("the first line could be: age,height,label"),
            );
        };
        let Cells::Texts(header) = header.cells else {
            unreachable!("a record is of texts");
        };
        // pandas writes its index without a name, and reads it back as this one.
        let name = |(at, name): (usize, &str)| match name {
            "" => format!("Unnamed: {at}"),
            name => name.to_owned(),
        };
        distinct(header.iter().enumerate().map(name).collect())
    }

    /// The columns; in JSON lines those of the objects up to the last one that was read.
    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// What the places of rows count.
    pub(super) fn unit(&self) -> &'static str {
        match self.format {
            Format::Parquet(_) => "row",
            Format::Separated(_) | Format::Json(_) => "line",
        }
    }

    /// Whether the columns are known from the start.
    pub(super) fn has_header(&self) -> bool {
        !matches!(self.format, Format::Json(_))
    }

    /// The next row, or why a line is none; nothing at the end.
    ///
    /// *Errors*: the file cannot be read on.
    pub(super) fn next(&mut self) -> Result<Option<Result<Row, DataProblem>>, DataProblem> {
        if let Some(first) = self.first.pop_front() {
            return Ok(Some(first));
        }
        match &mut self.format {
            Format::Parquet(file) => {
                let row = file.next()?.map(|(row, values)| Row {
                    place: Place::Row(row),
                    cells: Cells::Values(values),
                });
                Ok(row.map(Ok))
            }
            Format::Json(lines) => {
                // The reader has a limit of its own to a line, but not to blank ones.
                lines.reader_mut().get_mut().1.allow(2 * LINE_BYTES_MAX);
                let failed = |source: &Chain<_, Source>, error| source.get_ref().1.error(error);
                let read = lines.next(&mut self.names, failed)?;
                Ok(read.map(|read| {
                    read.map(|(line, values)| Row {
                        place: Place::Line(line),
                        cells: Cells::Values(values),
                    })
                }))
            }
            Format::Separated(reader) => {
                let Some(row) = read_record(reader)? else {
                    return Ok(None);
                };
                Ok(Some(match row {
                    Ok(row) => fitting(row, self.names.len())?,
                    Err(problem) => Err(problem),
                }))
            }
        }
    }
}

/// The names of columns.
///
/// *Errors*: too many; two alike.
fn distinct(names: Vec<String>) -> Result<Vec<String>, DataProblem> {
    if names.len() > COLUMNS_MAX {
        let (columns, max) = (names.len() as u64, COLUMNS_MAX as u64);
        let problem = DataProblem::too_large("columns", columns, max);
        return Err(problem.with_hint("each row is a sample, and each column a feature: transpose a table that has them the other way round"));
    }
    let mut seen = BTreeSet::new();
    match names.iter().find(|name| !seen.insert(*name)) {
        None => Ok(names),
        Some(name) => {
            let name = quote(name);
            Err(DataProblem::new(format!("two columns are called {name:?}")))
        }
    }
}

/// A row with a cell for each column, or why it is none.
///
/// *Errors*: a row over several lines has other cells: if its quote is not closed, it has taken good rows with it.
fn fitting(row: Row, columns: usize) -> Result<Result<Row, DataProblem>, DataProblem> {
    let Cells::Texts(cells) = &row.cells else {
        return Ok(Ok(row));
    };
    if cells.len() == columns {
        return Ok(Ok(row));
    }
    let got = plural(cells.len() as u64, "cell");
    let expected = plural(columns as u64, "column");
    let place = row.place;
    let what = format!("{place}: {got}, but the header names {expected}");
    match cells.iter().any(|cell| cell.contains('\n')) {
        false => Ok(Err(DataProblem::new(what))),
        true => Err(
            DataProblem::new(format!("{what}, in a row of several lines"))
                .with_hint("close the quote that begins there, if it is not meant to go on"),
        ),
    }
}

fn read_record(
    reader: &mut Reader<Lines>,
) -> Result<Option<Result<Row, DataProblem>>, DataProblem> {
    let mut bytes = ByteRecord::new();
    let start = reader.position().line();
    let (file, _) = reader.get_mut().get_mut();
    file.get_mut().1.allow(LINE_BYTES_MAX);
    loop {
        let read = reader.read_byte_record(&mut bytes);
        if !read.map_err(|error| unreadable(reader, start, error))? {
            return Ok(None);
        }
        let is_open = bytes.as_slice().ends_with(END.as_bytes());
        let within = bytes.as_slice().iter().filter(|&&byte| byte == b'\n');
        // The reader's own position of a record is that of preceding blank lines.
        let line = reader.position().line() - u64::from(!is_open) - within.count() as u64;
        if is_open {
            let problem = format!("line {line}: a quote of this row is not closed");
            return Err(DataProblem::new(problem)
                .with_hint("close it; a quote within a quoted cell is written twice"));
        }
        let mut cells = match StringRecord::from_byte_record(bytes) {
            Ok(cells) => cells,
            Err(error) => {
                let bytes = error.into_byte_record();
                return Ok(Some(Err(not_text(line, bytes.as_slice()))));
            }
        };
        cells.trim();
        if cells.len() == 1 && &cells[0] == END.trim() {
            return Ok(None);
        }
        if cells.len() > 1 || !cells[0].is_empty() {
            let cells = Cells::Texts(cells);
            let place = Place::Line(line);
            return Ok(Some(Ok(Row { place, cells })));
        }
        bytes = cells.into_byte_record();
    }
}

/// Why no row could be read from line `start` on.
fn unreadable(reader: &Reader<Lines>, start: u64, error: ::csv::Error) -> DataProblem {
    let (file, _) = reader.get_ref().get_ref();
    let (_, source) = file.get_ref();
    source.error(match error.into_kind() {
        ErrorKind::Io(error) if error.kind() == io::ErrorKind::FileTooLarge => {
            let problem = format!("line {start}: a row longer than {LINE_BYTES_MAX} bytes");
            return DataProblem::new(problem)
                .with_hint("close the quote that begins there, if it is not meant to go on");
        }
        ErrorKind::Io(error) => error,
        // Other kinds come from decoding, seeking and strict readers, which are not used here.
        other => io::Error::other(format!("{other:?}")),
    })
}

/// How often each usual separator is in the first line, outside of quotes.
fn counts(line: &[u8]) -> [(u8, usize); 4] {
    let mut is_quoted = false;
    let mut counts = USUAL.map(|separator| (separator, 0));
    for &byte in line {
        is_quoted ^= byte == b'"';
        let same = counts
            .iter_mut()
            .filter(|(separator, _)| *separator == byte);
        same.for_each(|(_, count)| *count += usize::from(!is_quoted));
    }
    counts
}

/// The most frequent of the usual separators.
///
/// *Errors*: two are.
fn guess(counts: [(u8, usize); 4]) -> Result<u8, DataProblem> {
    let most = counts.iter().map(|(_, count)| *count).max().unwrap_or(0);
    let mut of_most = counts.iter().filter(|(_, count)| *count == most);
    match (of_most.next(), of_most.next()) {
        (Some((one, _)), Some((other, _))) if most > 0 => {
            let (one, other) = (shown(*one), shown(*other));
            Err(DataProblem::new(format!(
                "the first line has {one} as often as {other}: either could be the separator"
            ))
            .with_hint("name it with --separator"))
        }
        (Some((one, _)), _) => Ok(*one),
        (None, _) => Ok(b','),
    }
}

/// A separator in words.
fn shown(separator: u8) -> String {
    match separator {
        b'\t' => "a tab".to_owned(),
        other => format!("\"{}\"", char::from(other)),
    }
}
