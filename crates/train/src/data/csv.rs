//! A table as CSV: numeric columns, one of them the label. Cells are separated by commas, semicolons or tabs.

use std::collections::BTreeSet;
use std::io::{self, Chain, Cursor, Read};
use std::path::{Path, PathBuf};

use ::csv::{ByteRecord, ErrorKind, Reader, ReaderBuilder, StringRecord, Terminator};

use super::error::{list, nearest, quote};
use super::source::{Source, not_text};
use super::{
    CLASSES_MAX, DataError, DataProblem, Dataset, Features, Scaling, Split, VALUES_MAX, class_count,
};
use crate::report::plural;

/// Advice for a label that is a quantity.
const REGRESSION: &str = "to predict a number (regression), divide its range into classes, or write your own program, such as examples/minimal.rs";

/// The default label column.
const LABEL_COLUMN: &str = "label";

/// The file to read and its label column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CsvOptions {
    /// The file, plain or gzip. Its first line names the columns.
    pub path: PathBuf,
    /// The column with the class; `None` means the column named `label`.
    pub label_column: Option<String>,
}

/// The rows of a CSV file under the fixed split; all columns besides the label are features.
///
/// *Numerics*: cells are read as `f64`. Each column is standardised by its mean and standard deviation over the training rows
/// in order, in `f64`, so every rank gets the same bits; only the result is rounded to `f32`.
/// *Cost*: 8 bytes a cell while reading, 4 afterwards.
/// *Errors*: name the line, the column and the text. Missing values, infinities and words are refused, as are lines
///   with too many or too few cells. Spaces around a cell do not count.
pub fn load(options: &CsvOptions) -> Result<Dataset, DataError> {
    read(options).map_err(|problem| problem.of(&options.path))
}

fn read(options: &CsvOptions) -> Result<Dataset, DataProblem> {
    let table = Table::read(options)?;
    let len = table.labels.len();
    if len < 2 {
        let samples = plural(len as u64, "sample");
        return Err(DataProblem::new(format!(
            "{samples}; at least 2 are needed: one to train on, one to hold out"
        )));
    }
    let split = Split::fixed(len);
    let scale = Scale::over(&table, &split.train);
    let values = scale.apply(&table).map_err(|column| {
        let column = table.columns.features().nth(column).unwrap_or_default();
        DataProblem::new(format!(
            "column {column:?} cannot be standardised: a held-out value is too far from the others"
        ))
    })?;
    let stem = options.path.file_stem().unwrap_or_default();
    Ok(Dataset {
        name: stem.to_string_lossy().into_owned(),
        features: Features::Flat {
            count: table.width(),
        },
        values,
        classes: class_count(&table.labels),
        labels: table.labels,
        scaling: Scaling::Standardised {
            mean: scale.mean,
            deviation: scale.deviation,
        },
        split,
    })
}

/// The header line.
struct Columns {
    names: Vec<String>,
    label: usize,
}

impl Columns {
    fn read(options: &CsvOptions, rows: &mut Rows) -> Result<Self, DataProblem> {
        let header = rows.next()?.ok_or_else(|| {
            DataProblem::new("empty; the first line must name the columns")
                .with_hint("the first line could be: age,height,label")
        })?;
        let names: Vec<_> = header.cells.iter().map(str::to_owned).collect();
        let mut seen = BTreeSet::new();
        if let Some(name) = names.iter().find(|name| !seen.insert(*name)) {
            let name = quote(name);
            return Err(DataProblem::new(format!("two columns are called {name:?}")));
        }
        let wanted = options.label_column.as_deref().unwrap_or(LABEL_COLUMN);
        let Some(label) = names.iter().position(|name| name == wanted) else {
            let columns = list(&names);
            let problem = format!("no column {wanted:?}; the columns are {columns}");
            let hint = match nearest(wanted, names.iter().map(String::as_str)) {
                Some(name) => format!("did you mean {name:?}? name it with --label-column"),
                None => "name the column that holds the labels with --label-column".to_owned(),
            };
            return Err(DataProblem::new(problem).with_hint(hint));
        };
        if names.len() == 1 {
            let problem = format!("no column besides the label {wanted:?}");
            return Err(DataProblem::new(problem));
        }
        Ok(Self { names, label })
    }

    fn features(&self) -> impl Iterator<Item = String> + '_ {
        let names = self.names.iter().enumerate();
        names
            .filter(|(index, _)| *index != self.label)
            .map(|(_, name)| name.clone())
    }
}

/// The file's cells as numbers.
struct Table {
    columns: Columns,
    values: Vec<f64>,
    labels: Vec<u32>,
}

impl Table {
    fn read(options: &CsvOptions) -> Result<Self, DataProblem> {
        let mut rows = Rows::open(&options.path)?;
        let mut table = Self {
            columns: Columns::read(options, &mut rows)?,
            values: Vec::new(),
            labels: Vec::new(),
        };
        while let Some(row) = rows.next()? {
            table.push(&row)?;
        }
        Ok(table)
    }

    /// Features of a row.
    fn width(&self) -> usize {
        self.columns.names.len() - 1
    }

    fn push(&mut self, row: &Row) -> Result<(), DataProblem> {
        let Row { line, ref cells } = *row;
        if cells.len() != self.columns.names.len() {
            let got = plural(cells.len() as u64, "cell");
            let expected = plural(self.columns.names.len() as u64, "column");
            return Err(DataProblem::new(format!(
                "line {line}: {got}, but the header names {expected}"
            )));
        }
        let values = (self.values.len() + self.width()) as u64;
        if values > VALUES_MAX {
            return Err(DataProblem::too_large("values", values, VALUES_MAX));
        }
        for (index, (text, name)) in cells.iter().zip(&self.columns.names).enumerate() {
            let cell = Cell { line, name, text };
            if index == self.columns.label {
                self.labels.push(cell.label()?);
            } else {
                self.values.push(cell.number()?);
            }
        }
        Ok(())
    }
}

/// One cell and where it is.
struct Cell<'a> {
    line: u64,
    name: &'a str,
    text: &'a str,
}

impl Cell<'_> {
    fn number(&self) -> Result<f64, DataProblem> {
        let parsed = self.text.parse::<f64>().ok();
        // Values beyond `f32` are refused although cells are kept as `f64`: the model could not get them either.
        parsed
            .filter(|value| (*value as f32).is_finite())
            .ok_or_else(|| {
                let hint = if self.text.is_empty() {
                    "fill in missing values, or leave out their lines"
                } else if self.text.replace(',', ".").parse::<f64>().is_ok() {
                    "write decimals with a point"
                } else {
                    "encode words as numbers, or leave the column out"
                };
                let (line, name, text) = (self.line, quote(self.name), quote(self.text));
                DataProblem::new(format!(
                    "line {line}: column {name:?} is {text:?}, not a finite 32-bit number"
                ))
                .with_hint(hint)
            })
    }

    fn label(&self) -> Result<u32, DataProblem> {
        let line = self.line;
        let label: u32 = self.text.parse().map_err(|_| {
            let (name, text) = (quote(self.name), quote(self.text));
            let problem = DataProblem::new(format!(
                "line {line}: {text:?} in column {name:?} is no class; expected a whole number 0, 1, 2, ..."
            ));
            match self.text.parse::<f64>() {
                Ok(_) => problem.with_hint(format!("number the classes from 0; {REGRESSION}")),
                Err(_) => problem.with_hint("number the classes from 0"),
            }
        })?;
        if label as usize >= CLASSES_MAX {
            let problem = format!("line {line}: label {label} is out of range 0..{CLASSES_MAX}");
            let hint = format!("number the classes from 0; {REGRESSION}");
            return Err(DataProblem::new(problem).with_hint(hint));
        }
        Ok(label)
    }
}

/// The file's lines as cells, without blank ones.
struct Rows {
    reader: Reader<Lines>,
}

/// The file from its first byte: the part read to find the separator, the rest, and a final line break.
type Lines = Chain<Chain<Cursor<Vec<u8>>, Source>, &'static [u8]>;

/// Maximum number of bytes read to find the first line.
const HEADER_BYTES_MAX: u64 = 1 << 20;

/// The cell separator: of the usual characters, the most frequent in the first line.
fn separator(head: &[u8]) -> u8 {
    let line = head
        .split(|&byte| byte == b'\n')
        .find(|line| !line.trim_ascii().is_empty());
    let count = |separator: u8| {
        let line = line.unwrap_or_default();
        line.iter().filter(|&&byte| byte == separator).count()
    };
    // In a tie the last one wins.
    [b'\t', b';', b',']
        .into_iter()
        .max_by_key(|&byte| count(byte))
        .unwrap_or(b',')
}

/// A record and the line it starts on.
struct Row {
    line: u64,
    cells: StringRecord,
}

impl Rows {
    fn open(path: &Path) -> Result<Self, DataProblem> {
        // With `\n` as the only terminator and one at the very end, every record ends at a line end, so its line number is
        // known. A preceding `\r` is trimmed with the other spaces around cells.
        let mut source = Source::open(path)?;
        let head = source.read_some(HEADER_BYTES_MAX)?;
        let separator = separator(&head);
        let source = Cursor::new(head).chain(source).chain(&b"\n"[..]);
        let reader = ReaderBuilder::new()
            .has_headers(false)
            .flexible(true)
            .delimiter(separator)
            .terminator(Terminator::Any(b'\n'))
            .from_reader(source);
        Ok(Self { reader })
    }

    fn next(&mut self) -> Result<Option<Row>, DataProblem> {
        let mut bytes = ByteRecord::new();
        loop {
            let read = self.reader.read_byte_record(&mut bytes);
            if !read.map_err(|error| self.error(error))? {
                return Ok(None);
            }
            let within = bytes.as_slice().iter().filter(|&&byte| byte == b'\n');
            // The reader's own position of a record is that of preceding blank lines.
            let line = self.reader.position().line() - 1 - within.count() as u64;
            let text = StringRecord::from_byte_record(bytes);
            let mut cells = text.map_err(|_| not_text(line))?;
            cells.trim();
            if cells.len() > 1 || !cells[0].is_empty() {
                return Ok(Some(Row { line, cells }));
            }
            bytes = cells.into_byte_record();
        }
    }

    fn error(&self, error: ::csv::Error) -> DataProblem {
        let (start, _) = self.reader.get_ref().get_ref();
        let (_, source) = start.get_ref();
        source.error(match error.into_kind() {
            ErrorKind::Io(error) => error,
            // Other kinds come from decoding, seeking and strict readers, which are not used here.
            other => io::Error::other(format!("{other:?}")),
        })
    }
}

/// Mean and standard deviation of each column.
struct Scale {
    mean: Vec<f64>,
    deviation: Vec<f64>,
}

impl Scale {
    fn over(table: &Table, rows: &[usize]) -> Self {
        let width = table.width();
        let column = |column: usize| {
            let at = |&row: &usize| table.values[row * width + column];
            moments(&rows.iter().map(at).collect::<Vec<_>>())
        };
        let (mean, deviation) = (0..width).map(column).unzip();
        Self { mean, deviation }
    }

    /// All values scaled, or the first column with a scaled value outside the range of `f32`.
    fn apply(&self, table: &Table) -> Result<Vec<f32>, usize> {
        let columns = (0..table.width()).cycle();
        let scaled = table.values.iter().zip(columns).map(|(value, column)| {
            let scaled = ((value - self.mean[column]) / self.deviation[column]) as f32;
            scaled.is_finite().then_some(scaled).ok_or(column)
        });
        scaled.collect()
    }
}

/// Mean and standard deviation. For equal values they are the value and 1: a computed mean can be off by rounding, and
/// dividing by an equally tiny deviation would amplify that.
fn moments(values: &[f64]) -> (f64, f64) {
    if values.iter().all(|value| *value == values[0]) {
        return (values[0], 1.0);
    }
    let of = |sum: f64| sum / values.len() as f64;
    let mean = of(values.iter().sum());
    let squares = values.iter().map(|value| (value - mean).powi(2));
    (mean, of(squares.sum()).sqrt())
}

#[cfg(test)]
mod tests;
