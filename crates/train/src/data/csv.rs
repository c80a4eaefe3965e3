//! A table as CSV: numeric columns, and one with the label, a number or a word. Cells are separated by commas, semicolons or tabs.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, Chain, Cursor, Read};
use std::path::{Path, PathBuf};

use ::csv::{ByteRecord, ErrorKind, Reader, ReaderBuilder, StringRecord, Terminator};

use super::error::{list, nearest, quote};
use super::source::{Source, not_text};
use super::{
    CLASSES_MAX, DataError, DataProblem, Dataset, Features, Scaling, Schema, Split, VALUES_MAX,
    Values, numbered_classes,
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
    let mut rows = Rows::open(&options.path)?;
    let columns = Columns::read(options, &mut rows)?;
    let table = Table::read(&columns, &mut rows)?;
    let (classes, labels) = table.labels.classes(&columns)?;
    let len = labels.len();
    if len < 2 {
        let samples = plural(len as u64, "sample");
        return Err(DataProblem::new(format!(
            "{samples}; at least 2 are needed: one to train on, one to hold out"
        )));
    }
    let split = Split::fixed(len);
    let scale = Scale::over(&table.values, columns.width(), &split.train);
    let values = scale.all(&table.values).map_err(|column| {
        let column = columns.features().nth(column).unwrap_or_default();
        DataProblem::new(format!(
            "column {column:?} cannot be standardised: a held-out value is too far from the others"
        ))
    })?;
    Ok(Dataset {
        name: name(&options.path),
        schema: Schema {
            features: Features::Flat {
                count: columns.width(),
            },
            columns: columns.features().collect(),
            scaling: Scaling::Standardised {
                mean: scale.mean,
                deviation: scale.deviation,
            },
            classes,
        },
        values: Values::Memory(values),
        labels,
        split,
    })
}

/// The rows of a CSV file, all held out, as a classifier with this schema reads them.
///
/// *Errors*: as [`load`]; the file lacks a column of the schema; a label is not among its classes.
pub fn load_as(options: &CsvOptions, schema: &Schema) -> Result<Dataset, DataError> {
    let read = || {
        let mut rows = Rows::open(&options.path)?;
        let columns = Columns::read(options, &mut rows)?.picked(&schema.columns)?;
        let table = Table::read(&columns, &mut rows)?;
        let labels = table.labels.among(&schema.classes, &columns)?;
        Ok(Dataset {
            name: name(&options.path),
            schema: schema.clone(),
            values: Values::Memory(columns.scaled(&Scale::of(&schema.scaling), &table.values)?),
            split: Split::all_held_out(labels.len()),
            labels,
        })
    };
    read().map_err(|problem: DataProblem| problem.of(&options.path))
}

/// The samples of a CSV file without labels, one by one, as a classifier reads them. Other columns do not matter.
pub struct Unlabelled {
    path: PathBuf,
    rows: Rows,
    columns: Columns,
    scale: Scale,
}

impl Unlabelled {
    /// Opens the file and reads its header.
    ///
    /// *Errors*: a file that cannot be read; a column of the schema that is missing.
    pub fn open(path: &Path, schema: &Schema) -> Result<Self, DataError> {
        let open = || {
            let mut rows = Rows::open(path)?;
            let columns = Columns::header(&mut rows)?.picked(&schema.columns)?;
            Ok((rows, columns))
        };
        let (rows, columns) = open().map_err(|problem: DataProblem| problem.of(path))?;
        Ok(Self {
            path: path.to_owned(),
            rows,
            columns,
            scale: Scale::of(&schema.scaling),
        })
    }

    fn read(&mut self, values: &mut Vec<f32>) -> Result<bool, DataProblem> {
        let Some(row) = self.rows.next()? else {
            return Ok(false);
        };
        let mut cells = Vec::with_capacity(self.columns.width());
        self.columns.numbers(&row, &mut cells)?;
        values.extend(self.columns.scaled(&self.scale, &cells)?);
        Ok(true)
    }

    /// Appends the scaled values of the next row to `values`; false at the end.
    ///
    /// *Errors*: as [`load`].
    pub fn next(&mut self, values: &mut Vec<f32>) -> Result<bool, DataError> {
        self.read(values).map_err(|problem| problem.of(&self.path))
    }
}

fn name(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default();
    stem.to_string_lossy().into_owned()
}

/// The header line: which columns are read.
struct Columns {
    names: Vec<String>,
    /// The label's index.
    label: Option<usize>,
    /// Indices of the features, in the order of a sample's values.
    picked: Vec<usize>,
}

impl Columns {
    /// All columns are features.
    fn header(rows: &mut Rows) -> Result<Self, DataProblem> {
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
        Ok(Self {
            label: None,
            picked: (0..names.len()).collect(),
            names,
        })
    }

    /// All columns besides the label are features.
    fn read(options: &CsvOptions, rows: &mut Rows) -> Result<Self, DataProblem> {
        let mut columns = Self::header(rows)?;
        let names = &columns.names;
        let wanted = options.label_column.as_deref().unwrap_or(LABEL_COLUMN);
        let Some(label) = names.iter().position(|name| name == wanted) else {
            let listed = list(names);
            let problem = format!("no column {wanted:?}; the columns are {listed}");
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
        columns.label = Some(label);
        columns.picked.remove(label);
        Ok(columns)
    }

    /// Only the columns with these names are features, in this order.
    fn picked(mut self, features: &[String]) -> Result<Self, DataProblem> {
        let at: BTreeMap<&String, usize> = self.names.iter().zip(0..).collect();
        let find = |wanted: &String| {
            at.get(wanted).copied().ok_or_else(|| {
                let (wanted, listed) = (quote(wanted), list(&self.names));
                let problem = DataProblem::new(format!(
                    "no column {wanted:?}, which the model was trained on; the columns are {listed}"
                ));
                match nearest(&wanted, self.names.iter().map(String::as_str)) {
                    Some(name) => problem.with_hint(format!("rename {name:?}, if it is the same")),
                    None => problem,
                }
            })
        };
        self.picked = features.iter().map(find).collect::<Result<_, _>>()?;
        Ok(self)
    }

    /// Features of a row.
    fn width(&self) -> usize {
        self.picked.len()
    }

    fn features(&self) -> impl Iterator<Item = String> + '_ {
        self.picked.iter().map(|index| self.names[*index].clone())
    }

    fn label_cell<'a>(&'a self, line: u64, text: &'a str) -> Cell<'a> {
        let name = self.label.map_or(LABEL_COLUMN, |label| &self.names[label]);
        Cell { line, name, text }
    }

    /// Features of whole rows, scaled as those that a model was trained on.
    fn scaled(&self, scale: &Scale, values: &[f64]) -> Result<Vec<f32>, DataProblem> {
        scale.all(values).map_err(|column| {
            let column = quote(&self.names[self.picked[column]]);
            DataProblem::new(format!(
                "column {column:?} has a value too far from those that the model was trained on"
            ))
        })
    }

    /// Appends the features of a row to `values`.
    fn numbers(&self, row: &Row, values: &mut Vec<f64>) -> Result<(), DataProblem> {
        let Row { line, ref cells } = *row;
        if cells.len() != self.names.len() {
            let got = plural(cells.len() as u64, "cell");
            let expected = plural(self.names.len() as u64, "column");
            return Err(DataProblem::new(format!(
                "line {line}: {got}, but the header names {expected}"
            )));
        }
        for &index in &self.picked {
            let (name, text) = (&self.names[index], &cells[index]);
            values.push(Cell { line, name, text }.number()?);
        }
        Ok(())
    }
}

/// The file's cells: numbers and labels.
struct Table {
    values: Vec<f64>,
    labels: Labels,
}

impl Table {
    fn read(columns: &Columns, rows: &mut Rows) -> Result<Self, DataProblem> {
        let mut table = Self {
            values: Vec::new(),
            labels: Labels::default(),
        };
        while let Some(row) = rows.next()? {
            let values = (table.values.len() + columns.width()) as u64;
            if values > VALUES_MAX {
                return Err(DataProblem::too_large("values", values, VALUES_MAX));
            }
            columns.numbers(&row, &mut table.values)?;
            if let Some(label) = columns.label {
                table.labels.push(&row.cells[label], row.line)?;
            }
        }
        Ok(table)
    }
}

/// The labels of all rows, each different text once.
#[derive(Default)]
struct Labels {
    /// Different texts and the line of the first one.
    texts: Vec<(String, u64)>,
    known: HashMap<String, u32>,
    /// Of each row, the index of its text.
    rows: Vec<u32>,
}

impl Labels {
    fn push(&mut self, text: &str, line: u64) -> Result<(), DataProblem> {
        let known = self.known.get(text).copied();
        let label = match known {
            Some(label) => label,
            None => {
                let new = self.texts.len() as u32;
                if new as usize >= CLASSES_MAX {
                    return Err(DataProblem::new(format!(
                        "line {line}: more than {CLASSES_MAX} different labels"
                    ))
                    .with_hint(REGRESSION));
                }
                self.texts.push((text.to_owned(), line));
                self.known.insert(text.to_owned(), new);
                new
            }
        };
        self.rows.push(label);
        Ok(())
    }

    /// The names of the classes, and the class of each row. If all labels are words, they are the classes, in alphabetical order; otherwise
    /// they are class numbers.
    fn classes(self, columns: &Columns) -> Result<(Vec<String>, Vec<u32>), DataProblem> {
        let is_word = |text: &str| !text.is_empty() && text.parse::<f64>().is_err();
        if !self.texts.is_empty() && self.texts.iter().all(|(text, _)| is_word(text)) {
            let mut classes: Vec<String> =
                self.texts.iter().map(|(text, _)| text.clone()).collect();
            classes.sort_unstable();
            let labels = self.among(&classes, columns)?;
            return Ok((classes, labels));
        }
        if let Some((text, line)) = self.texts.iter().find(|(text, _)| text.is_empty()) {
            columns.label_cell(*line, text).label()?;
        }
        let number = |(text, line): &(String, u64)| columns.label_cell(*line, text).label();
        let numbers: Vec<u32> = self.texts.iter().map(number).collect::<Result<_, _>>()?;
        let labels: Vec<u32> = self.rows.iter().map(|row| numbers[*row as usize]).collect();
        Ok((numbered_classes(&labels), labels))
    }

    /// The class of each row.
    ///
    /// *Errors*: the first label that is not among `classes`.
    fn among(self, classes: &[String], columns: &Columns) -> Result<Vec<u32>, DataProblem> {
        let at: HashMap<&str, u32> = classes.iter().map(String::as_str).zip(0..).collect();
        let find = |(text, line): &(String, u64)| {
            // Numbers may have been written in another way in training, such as 01.
            let by_number = || {
                at.get(text.parse::<u32>().ok()?.to_string().as_str())
                    .copied()
            };
            let found = at.get(text.as_str()).copied().or_else(by_number);
            found.ok_or_else(|| {
                let cell = columns.label_cell(*line, text);
                let (text, name, known) = (quote(text), quote(cell.name), list(classes));
                DataProblem::new(format!(
                    "line {line}: {text:?} in column {name:?} is none of the model's classes, {known}"
                ))
            })
        };
        let found: Vec<u32> = self.texts.iter().map(find).collect::<Result<_, _>>()?;
        Ok(self.rows.iter().map(|row| found[*row as usize]).collect())
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
                Err(_) if self.text.is_empty() => {
                    problem.with_hint("fill in missing labels, or leave out their lines")
                }
                Err(_) => problem.with_hint("other labels are numbers: use only numbers or only words"),
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
    /// That of the given rows of a table.
    fn over(values: &[f64], width: usize, rows: &[usize]) -> Self {
        let column = |column: usize| {
            let at = |&row: &usize| values[row * width + column];
            moments(&rows.iter().map(at).collect::<Vec<_>>())
        };
        let (mean, deviation) = (0..width).map(column).unzip();
        Self { mean, deviation }
    }

    /// That of a table.
    ///
    /// # Panics
    ///
    /// If it is that of images.
    fn of(scaling: &Scaling) -> Self {
        let Scaling::Standardised { mean, deviation } = scaling.clone() else {
            panic!("tables are standardised, not {scaling:?}");
        };
        Self { mean, deviation }
    }

    /// All values of whole rows scaled, or the first column with a scaled value outside the range of `f32`.
    fn all(&self, values: &[f64]) -> Result<Vec<f32>, usize> {
        let columns = (0..self.mean.len()).cycle();
        let scaled = values.iter().zip(columns).map(|(value, column)| {
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
