//! A table: columns of numbers and of words, and one with the label, from CSV, JSON lines or Parquet.
//!
//! ```text
//! age,city,label          {"age": 31, "city": "Seoul", "label": "yes"}
//! 31,Seoul,yes            {"age": 40, "city": "Oslo", "label": "no"}
//! 40,Oslo,no
//! ```

mod columns;
mod json;
mod labels;
mod parquet;
mod rows;
mod spool;
mod stored;
mod texts;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::error::{left_out, list, nearest, quote};
use super::temporary::MEMORY_BYTES;
use super::{
    Column, DataError, DataProblem, Dataset, Features, Labels, Scaling, Schema, Split, Target,
    Values,
};
use crate::config::{BadSamples, MissingValues, Objective, TrainConfig};
use crate::report::plural;
use columns::{Cells, Encoder, Feature, Words, encode, encoders, moments, too_far};
use labels::{Label, LabelColumn, Texts};
use rows::{Cell, Row, Rows};
use spool::Spool;
pub use stored::StoredRows;
pub(crate) use texts::TextColumn;

/// The default label column.
const LABEL_COLUMN: &str = "label";

/// Endings of files that are tables, with or without a final `.gz`.
const ENDINGS: [&str; 5] = [".csv", ".tsv", ".jsonl", ".ndjson", ".parquet"];

/// Whether a file is called as tables are.
pub(crate) fn is_table(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    let name = name.to_string_lossy().to_lowercase();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// Maximum number of rows. Labels and the order of samples are in memory.
const ROWS_MAX: usize = 1 << 31;

/// Maximum number of values of a row.
const WIDTH_MAX: usize = 1 << 22;

/// The file to read, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct TableOptions {
    /// The file: CSV whose first line names the columns or JSON lines, plain or gzip, or Parquet.
    pub path: PathBuf,
    /// Another such file, all of which is held out.
    pub test_data: Option<PathBuf>,
    /// Share of the rows that is held out, if there is no other file.
    pub held_out: f64,
    /// Which ones.
    pub split_seed: u64,
    /// The column with the label; `None` means the column named `label`.
    pub label_column: Option<String>,
    /// Whether labels are classes or numbers.
    pub objective: Objective,
    /// Columns that are no features.
    pub drop_columns: Vec<String>,
    /// Columns of words, even where these are numbers.
    pub categorical: Vec<String>,
    /// The separator of cells; `None` tells it from the first line.
    pub separator: Option<u8>,
    /// Cells without a value.
    pub missing_values: MissingValues,
    /// Lines that cannot be used.
    pub bad_samples: BadSamples,
    /// Bytes of cells or values that may be in memory; a larger table is in a temporary file.
    pub memory: usize,
}

impl TableOptions {
    /// Those of a job, for its own data or for another file.
    pub(crate) fn new(config: &TrainConfig, path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            test_data: config.test_data.clone(),
            held_out: config.held_out,
            split_seed: config.split_seed,
            label_column: config.label_column.clone(),
            objective: config.objective,
            drop_columns: names_in(config.drop_columns.as_deref()),
            categorical: names_in(config.categorical.as_deref()),
            separator: config.separator.as_deref().and_then(separator_named),
            missing_values: config.missing_values,
            bad_samples: config.bad_samples,
            memory: MEMORY_BYTES,
        }
    }

    fn label_column(&self) -> &str {
        self.label_column.as_deref().unwrap_or(LABEL_COLUMN)
    }

    /// *Errors*: a name that is no column, or that of the label.
    fn check_names(&self, names: &[String]) -> Result<(), DataProblem> {
        let dropped = self
            .drop_columns
            .iter()
            .map(|name| (name, "--drop-columns"));
        let categorical = self.categorical.iter().map(|name| (name, "--categorical"));
        for (wanted, option) in dropped.chain(categorical) {
            let column = quote(wanted);
            if wanted == self.label_column() {
                return Err(DataProblem::new(format!(
                    "{column:?} is the label, which {option} cannot name"
                )));
            }
            if names.contains(wanted) {
                continue;
            }
            let listed = list(names);
            let problem = DataProblem::new(format!(
                "no column {column:?}, which {option} names; the columns are {listed}"
            ));
            return Err(match nearest(wanted, names.iter().map(String::as_str)) {
                Some(name) => problem.with_hint(format!("did you mean {name:?}?")),
                None => problem,
            });
        }
        Ok(())
    }
}

/// The names in a list with commas; one with a comma in it is quoted, as in CSV.
fn names_in(text: Option<&str>) -> Vec<String> {
    let mut reader = ::csv::ReaderBuilder::new()
        .has_headers(false)
        .trim(::csv::Trim::All)
        .from_reader(text.unwrap_or_default().as_bytes());
    let record = reader.records().next().and_then(Result::ok);
    let names = record.iter().flatten().filter(|name| !name.is_empty());
    names.map(str::to_owned).collect()
}

/// A separator by its name or as itself; `None` if it can be none.
#[must_use]
pub fn separator_named(text: &str) -> Option<u8> {
    match (text, text.as_bytes()) {
        ("comma", _) => Some(b','),
        ("semicolon", _) => Some(b';'),
        ("tab" | "\\t", _) => Some(b'\t'),
        ("pipe", _) => Some(b'|'),
        ("space", _) => Some(b' '),
        // A point and a minus are within numbers, and quotes are around cells.
        (_, [byte]) if byte.is_ascii_punctuation() && !b".-\"".contains(byte) => Some(*byte),
        (_, [b'\t' | b' ']) => Some(text.as_bytes()[0]),
        _ => None,
    }
}

/// The rows of a file under a split; all columns besides the label are features, if they are not left out.
///
/// A column is one of words if its first value is a word: each word of the training rows is then a category, in alphabetical order, with a
/// value of 1 or 0.
///
/// *Numerics*: cells are read as `f64`. Each column of numbers is standardised by its mean and standard deviation over the training rows
/// in order, in `f64`, so every rank gets the same bits; only the result is rounded to `f32`.
/// *Cost*: 8 bytes a cell while reading, 4 for each value afterwards. What is more than [`TableOptions::memory`] is not in memory: the cells are in
///   a temporary file without a name, and become values when a sample is read.
/// *Errors*: name the line, the column and the text. Infinities, numbers among words and words among numbers are refused, as are lines
///   with too many or too few cells. Spaces around a cell do not count.
pub fn load(options: &TableOptions) -> Result<Dataset, DataError> {
    let mut dataset = read(options).map_err(|problem| problem.of(&options.path))?;
    if let Some(path) = &options.test_data {
        let options = TableOptions {
            path: path.clone(),
            ..options.clone()
        };
        let test = read_as(&options, &dataset.schema).map_err(|problem| problem.of(path))?;
        if test.split.held_out.is_empty() {
            return Err(DataProblem::new("no row to evaluate on").of(path));
        }
        dataset = dataset.and_held_out(test);
    }
    dataset.in_memory_up_to(options.memory)
}

/// The rows of a file, all held out, as a model with this schema reads them.
///
/// *Errors*: as [`load`]; the file lacks a column of the schema; a label is not among its classes.
pub fn load_as(options: &TableOptions, schema: &Schema) -> Result<Dataset, DataError> {
    let dataset = read_as(options, schema).map_err(|problem| problem.of(&options.path))?;
    dataset.in_memory_up_to(options.memory)
}

fn read(options: &TableOptions) -> Result<Dataset, DataProblem> {
    let mut lines = Rows::open(&options.path, options.separator, None)?;
    if lines.has_header() {
        options.check_names(lines.names())?;
    }
    let mut table = Table::new(options, &lines)?;
    let rows = table.read(&mut lines, options)?;
    if !lines.has_header() {
        options.check_names(lines.names())?;
    }
    if table.features.is_empty() {
        let label = quote(options.label_column());
        let problem = format!("no column besides the label {label:?}");
        return Err(DataProblem::new(problem));
    }
    let split = match options.test_data {
        Some(_) => Split::first(rows.len(), rows.len()),
        None => Split::random(rows.len(), options.held_out, options.split_seed),
    };
    let needed = 1 + usize::from(options.test_data.is_none() && options.held_out > 0.0);
    if rows.len() < needed {
        return Err(table.too_few(rows.len(), needed));
    }
    table.learn(&rows, &split.train)?;
    let suspects = table.features.iter();
    let suspects = suspects.filter_map(|column| column.warning(split.train.len()));
    let suspects: Vec<String> = suspects.collect();
    let (mut columns, mut mean, mut deviation) = (Vec::new(), Vec::new(), Vec::new());
    for feature in &mut table.features {
        let (column, scales) = feature.learned()?;
        columns.push(column);
        mean.extend(scales.iter().map(|(mean, _)| *mean));
        deviation.extend(scales.iter().map(|(_, deviation)| *deviation));
    }
    let count = mean.len();
    if count > WIDTH_MAX {
        let (count, max) = (count as u64, WIDTH_MAX as u64);
        return Err(DataProblem::too_large("values in a row", count, max).with_hint(
            "a column of words has a value for each category: leave some out with --drop-columns",
        ));
    }
    let warnings = [suspects, table.warnings(&options.path)].concat();
    let scaling = Scaling::Standardised { mean, deviation };
    let encoders = encoders(&table.features, &columns, &scaling);
    if let Some(column) = too_far(&table.features, &encoders) {
        return Err(DataProblem::new(format!(
            "column {column:?} cannot be standardised: a held-out value is too far from the others"
        )));
    }
    let (target, labels) = match table.labels {
        LabelColumn::Texts(texts) => {
            let (classes, labels) = texts.classes();
            (Target::Classes(classes), Labels::Classes(labels))
        }
        LabelColumn::Numbers(numbers) => {
            let (mean, deviation) = moments(split.train.iter().map(|row| numbers[*row]));
            let target = Target::Number { mean, deviation };
            let labels = standardised(&target, &numbers, options.label_column())?;
            (target, labels)
        }
        LabelColumn::None | LabelColumn::Known(..) => unreachable!("labels are read"),
    };
    Ok(Dataset {
        name: name(&options.path),
        schema: Schema {
            features: Features::Flat { count },
            columns,
            scaling,
            target,
        },
        values: Values::Table(StoredRows::new(&options.path, rows, encoders)),
        labels,
        class_weights: None,
        mixup: None,
        label_smoothing: 0.0,
        split,
        warnings,
    })
}

fn read_as(options: &TableOptions, schema: &Schema) -> Result<Dataset, DataProblem> {
    let mut lines = Rows::open(&options.path, options.separator, None)?;
    let mut table = Table::of_model(schema, &lines, options.missing_values)?;
    table.label = Some(label_of(options, &lines)?);
    table.labels = match &schema.target {
        Target::Classes(classes) => LabelColumn::known(classes),
        Target::Number { .. } => LabelColumn::Numbers(Vec::new()),
    };
    let rows = table.read(&mut lines, options)?;
    let warnings = table.warnings(&options.path);
    let encoders = table.encoders(schema);
    table.check_range(&encoders)?;
    let labels = match table.labels {
        LabelColumn::Known(_, labels) => Labels::Classes(labels),
        LabelColumn::Numbers(numbers) => {
            standardised(&schema.target, &numbers, options.label_column())?
        }
        LabelColumn::None | LabelColumn::Texts(_) => unreachable!("of a model"),
    };
    Ok(Dataset {
        name: name(&options.path),
        schema: schema.clone(),
        split: Split::all_held_out(rows.len()),
        values: Values::Table(StoredRows::new(&options.path, rows, encoders)),
        labels,
        class_weights: None,
        mixup: None,
        label_smoothing: 0.0,
        warnings,
    })
}

/// The numbers to predict, as a model gets them.
///
/// *Errors*: one is too far from those of training.
fn standardised(target: &Target, numbers: &[f64], column: &str) -> Result<Labels, DataProblem> {
    let Target::Number { mean, deviation } = target else {
        unreachable!("numbers are read for no classes");
    };
    let scaled = numbers
        .iter()
        .map(|number| ((number - mean) / deviation) as f32);
    let scaled: Vec<f32> = scaled.collect();
    match scaled.iter().all(|number| number.is_finite()) {
        true => Ok(Labels::Numbers(scaled)),
        false => {
            let column = quote(column);
            Err(DataProblem::new(format!(
                "column {column:?} cannot be standardised: a number is too far from those trained on"
            )))
        }
    }
}

/// The samples of a file without labels, one by one, as a model reads them. Other columns do not matter.
pub struct Unlabelled {
    options: TableOptions,
    /// Values of a row.
    width: usize,
    rows: Rows,
    table: Table,
    encoders: Vec<Encoder>,
}

impl Unlabelled {
    /// Opens the file and reads its columns.
    ///
    /// *Errors*: a file that cannot be read; a column of the schema that is missing.
    pub fn open(options: &TableOptions, schema: &Schema) -> Result<Self, DataError> {
        let open = || {
            let mut rows = Rows::open(&options.path, options.separator, None)?;
            let table = Table::of_model(schema, &rows, options.missing_values)?;
            rows.only(&table.wanted());
            Ok((rows, table))
        };
        let (rows, table) = open().map_err(|problem: DataProblem| problem.of(&options.path))?;
        Ok(Self {
            options: options.clone(),
            width: schema.features.count(),
            encoders: table.encoders(schema),
            rows,
            table,
        })
    }

    fn read(&mut self, values: &mut Vec<f32>) -> Result<bool, DataProblem> {
        let Some(row) = self.rows.next()?.transpose()? else {
            return Ok(false);
        };
        let cells = self.table.take(&row, &self.rows, &self.options)??;
        self.table.check_range(&self.encoders)?;
        let start = values.len();
        values.resize(start + self.width, 0.0);
        encode(&self.encoders, &cells, &mut values[start..]);
        Ok(true)
    }

    /// Appends the scaled values of the next row to `values`; false at the end. Bad lines are not skipped, because every row gets an answer.
    ///
    /// *Errors*: as [`load`].
    pub fn next(&mut self, values: &mut Vec<f32>) -> Result<bool, DataError> {
        self.read(values)
            .map_err(|problem| problem.of(&self.options.path))
    }

    /// Signs that the rows so far are not like those that the model was trained on.
    pub fn warnings(&self) -> Vec<String> {
        self.table.warnings(&self.options.path)
    }
}

fn name(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default();
    stem.to_string_lossy().into_owned()
}

/// Where the label is.
///
/// *Errors*: there is no such column.
fn label_of(options: &TableOptions, rows: &Rows) -> Result<usize, DataProblem> {
    column_of(rows, options.label_column(), "labels", "--label-column")
}

/// Where a column is, which holds these and which an option names.
///
/// *Errors*: there is no such column.
fn column_of(rows: &Rows, wanted: &str, held: &str, option: &str) -> Result<usize, DataProblem> {
    let names = rows.names();
    names.iter().position(|name| name == wanted).ok_or_else(|| {
        let listed = list(names);
        let problem = format!("no column {wanted:?}; the columns are {listed}");
        let hint = match nearest(wanted, names.iter().map(String::as_str)) {
            Some(name) => format!("did you mean {name:?}? name it with {option}"),
            None if names.len() == 1 && rows.has_header() => {
                "if the first line has several columns, name what separates them with --separator"
                    .to_owned()
            }
            None => format!("name the column that holds the {held} with {option}"),
        };
        DataProblem::new(problem).with_hint(hint)
    })
}

/// The columns of a file, as far as it was read.
struct Table {
    features: Vec<Feature>,
    /// Where the label is, if it is read.
    label: Option<usize>,
    labels: LabelColumn,
    /// Columns of the file that were looked at; JSON lines may have further ones.
    looked_at: usize,
    /// Whether further columns are features.
    is_open: bool,
    skipped: Skipped,
}

/// Lines, or rows of Parquet, that were left out.
struct Skipped {
    unit: &'static str,
    count: u64,
    first: Option<DataProblem>,
}

impl Skipped {
    /// Counts a bad line that may be left out.
    ///
    /// *Errors*: it may not.
    fn add(&mut self, problem: DataProblem, bad_samples: BadSamples) -> Result<(), DataProblem> {
        match bad_samples {
            BadSamples::Stop => Err(problem),
            BadSamples::Skip => {
                self.count += 1;
                self.first.get_or_insert(problem);
                Ok(())
            }
        }
    }

    fn new(rows: &Rows) -> Self {
        Self {
            unit: rows.unit(),
            count: 0,
            first: None,
        }
    }

    fn noun(&self) -> String {
        format!("bad {}", self.unit)
    }

    fn warning(&self, path: &Path) -> Option<String> {
        let first = self.first.as_ref()?.message();
        Some(left_out(path, self.count, &self.noun(), first))
    }
}

impl Table {
    /// No rows yet, and all columns besides the label are features, if they are not left out.
    fn new(options: &TableOptions, rows: &Rows) -> Result<Self, DataProblem> {
        let mut table = Self {
            features: Vec::new(),
            label: Some(label_of(options, rows)?),
            labels: match options.objective {
                Objective::Classification => LabelColumn::Texts(Texts::default()),
                Objective::Regression => LabelColumn::Numbers(Vec::new()),
            },
            looked_at: 0,
            is_open: true,
            skipped: Skipped::new(rows),
        };
        table.add_features(options, rows.names());
        Ok(table)
    }

    /// No rows yet, and only the columns of a model are features.
    ///
    /// *Errors*: the file has not all of them.
    fn of_model(schema: &Schema, rows: &Rows, missing: MissingValues) -> Result<Self, DataProblem> {
        let names = rows.names();
        // In JSON lines a key may come later.
        let may_lack = !rows.has_header() && missing == MissingValues::Fill;
        let feature = |column: &Column| {
            let at = names.iter().position(|name| name == column.name());
            if at.is_some() || may_lack {
                return Ok(Feature::of_model(column, at));
            }
            let (wanted, listed) = (quote(column.name()), list(names));
            let problem = DataProblem::new(format!(
                "no column {wanted:?}, which the model was trained on; the columns are {listed}"
            ));
            Err(match nearest(&wanted, names.iter().map(String::as_str)) {
                Some(name) => problem.with_hint(format!("rename {name:?}, if it is the same")),
                None => problem,
            })
        };
        let features = schema.columns.iter().map(feature);
        Ok(Self {
            features: features.collect::<Result<_, _>>()?,
            label: None,
            labels: LabelColumn::None,
            looked_at: names.len(),
            is_open: false,
            skipped: Skipped::new(rows),
        })
    }

    /// Makes columns that were not looked at yet features.
    fn add_features(&mut self, options: &TableOptions, names: &[String]) {
        for (at, name) in names.iter().enumerate().skip(self.looked_at) {
            if Some(at) == self.label || options.drop_columns.contains(name) {
                continue;
            }
            self.features.push(Feature {
                name: name.clone(),
                at: Some(at),
                cells: match options.categorical.contains(name) {
                    true => Cells::Words(Words::with_numbers()),
                    false => Cells::Missing,
                },
            });
        }
        self.looked_at = names.len();
    }

    /// The columns that are read.
    fn wanted(&self) -> HashSet<usize> {
        let features = self.features.iter().filter_map(|feature| feature.at);
        features.chain(self.label).collect()
    }

    /// Reads all rows, and leaves out bad ones if that is wished.
    ///
    /// *Errors*: a file that cannot be read to its end; otherwise a bad row.
    fn read(&mut self, rows: &mut Rows, options: &TableOptions) -> Result<Spool, DataProblem> {
        let mut spool = Spool::new(options.memory);
        rows.only(&self.wanted());
        while let Some(row) = rows.next()? {
            let taken = match row {
                Ok(row) => self.take(&row, rows, options)?,
                Err(problem) => Err(problem),
            };
            match taken {
                Ok(cells) if spool.len() < ROWS_MAX => spool.push(&cells)?,
                Ok(_) => {
                    let (rows, max) = (ROWS_MAX as u64 + 1, ROWS_MAX as u64);
                    return Err(DataProblem::too_large("rows", rows, max));
                }
                Err(problem) => self.skipped.add(problem, options.bad_samples)?,
            }
        }
        Ok(spool)
    }

    /// Learns from all rows, of which `train` are for training, in ascending order.
    fn learn(&mut self, rows: &Spool, train: &[usize]) -> Result<(), DataProblem> {
        let (mut cells, mut trained) = (Vec::new(), train.iter().peekable());
        for row in 0..rows.len() {
            rows.read(row, &mut cells)?;
            let is_trained = trained.next_if(|next| **next == row).is_some();
            let columns = self.features.iter_mut().zip(&cells);
            columns.for_each(|(feature, cell)| feature.learn(*cell, is_trained));
        }
        for row in train {
            rows.read(*row, &mut cells)?;
            let columns = self.features.iter_mut().zip(&cells);
            columns.for_each(|(feature, cell)| feature.learn_deviation(*cell));
        }
        Ok(())
    }

    /// Takes a row whole and returns the numbers that stand for its cells, or says why it is bad.
    ///
    /// *Errors*: the table as a whole cannot be used.
    fn take(
        &mut self,
        row: &Row,
        rows: &Rows,
        options: &TableOptions,
    ) -> Result<Result<Vec<f64>, DataProblem>, DataProblem> {
        let label = self.label.map(|at| Label {
            place: row.place,
            column: &rows.names()[at],
            text: row.text(at),
        });
        let mut checked = self.checked(row, label.as_ref(), options.missing_values);
        // Only a row that is good so far makes its new keys columns.
        if checked.is_ok() && self.looked_at != rows.names().len() {
            let looked = self.look_at_new(row, rows.names(), options);
            checked =
                looked.and_then(|()| self.checked(row, label.as_ref(), options.missing_values));
        }
        let cells = match checked {
            Ok(cells) => self.features.iter_mut().zip(cells),
            Err(problem) => return Ok(Err(problem)),
        };
        let cells = cells.map(|(feature, cell)| feature.push(cell));
        let cells = cells.collect::<Result<_, _>>()?;
        if let Some(label) = &label {
            self.labels.push(label)?;
        }
        Ok(Ok(cells))
    }

    /// The cells of a row, by feature.
    ///
    /// *Errors*: why the row is bad.
    fn checked<'a>(
        &self,
        row: &'a Row,
        label: Option<&Label<'_>>,
        missing: MissingValues,
    ) -> Result<Vec<Cell<'a>>, DataProblem> {
        let features = self.features.iter();
        let cells = features.map(|feature| {
            let cell = feature.cell(row);
            feature.check(row.place, cell, missing).map(|()| cell)
        });
        let cells = cells.collect::<Result<_, _>>()?;
        label.map_or(Ok(()), |label| self.labels.check(label))?;
        Ok(cells)
    }

    /// Takes keys of JSON lines that no row before had.
    fn look_at_new(
        &mut self,
        row: &Row,
        names: &[String],
        options: &TableOptions,
    ) -> Result<(), DataProblem> {
        if !self.is_open {
            for feature in self
                .features
                .iter_mut()
                .filter(|feature| feature.at.is_none())
            {
                feature.at = names.iter().position(|name| *name == feature.name);
            }
            self.looked_at = names.len();
            return Ok(());
        }
        if options.missing_values == MissingValues::Fill {
            self.add_features(options, names);
            return Ok(());
        }
        let is_new = |at: &usize| {
            !matches!(row.cell(*at), Cell::Missing) && !options.drop_columns.contains(&names[*at])
        };
        match (self.looked_at..names.len()).find(is_new) {
            None => Ok(()),
            Some(at) => {
                let (place, name) = (row.place, quote(&names[at]));
                Err(DataProblem::new(format!(
                    "{place}: key {name:?} is not in the first object"
                ))
                .with_hint(
                    "--missing-values fill takes keys that are missing elsewhere; --drop-columns leaves them out",
                ))
            }
        }
    }

    /// How the cells become values of a model.
    fn encoders(&self, schema: &Schema) -> Vec<Encoder> {
        encoders(&self.features, &schema.columns, &schema.scaling)
    }

    /// *Errors*: a number so far is too far from those that the model was trained on.
    fn check_range(&self, encoders: &[Encoder]) -> Result<(), DataProblem> {
        match too_far(&self.features, encoders) {
            None => Ok(()),
            Some(column) => Err(DataProblem::new(format!(
                "column {column:?} has a value too far from those that the model was trained on"
            ))),
        }
    }

    /// Signs that the rows are not what the user intended.
    fn warnings(&self, path: &Path) -> Vec<String> {
        let skipped = self.skipped.warning(path).into_iter();
        let features = self.features.iter();
        let of_features = features.filter_map(|feature| warning(path, feature));
        skipped.chain(of_features).collect()
    }

    fn too_few(&self, rows: usize, needed: usize) -> DataProblem {
        let samples = plural(rows as u64, "sample");
        let why = match needed {
            1 => "at least 1 is needed to train on",
            _ => "at least 2 are needed: one to train on, one to hold out",
        };
        let problem = DataProblem::new(format!("{samples}; {why}"));
        match &self.skipped.first {
            None => problem,
            Some(first) => {
                let lines = plural(self.skipped.count, &self.skipped.noun());
                problem.with_hint(format!("{lines} left out, the first: {}", first.message()))
            }
        }
    }
}

/// A sign that rows do not fit what a model has learned of a column: how many words are no category, and one of them, or no value at all.
fn warning(path: &Path, feature: &Feature) -> Option<String> {
    let (path, column) = (path.display(), quote(&feature.name));
    if feature.at.is_none() {
        return Some(format!(
            "{path}: no row has a value in column {column:?}, which the model was trained on"
        ));
    }
    let (count, first) = feature.unseen()?;
    let rows = plural(*count, "row");
    Some(format!(
        "{path}: {rows} with a word in column {column:?} that no training row has, such as {first:?}: it counts as no category"
    ))
}

#[cfg(test)]
mod tests;
