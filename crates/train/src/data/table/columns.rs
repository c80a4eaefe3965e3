//! The columns of a table while its rows are read, and the values that a model gets of them.

use std::collections::{BTreeSet, HashMap};

use super::rows::{Cell, Row};
use crate::config::MissingValues;
use crate::data::error::quote;
use crate::data::{Column, DataProblem, Scaling, VALUES_MAX};
use crate::report::plural;

/// Maximum number of categories of a column.
pub(super) const CATEGORIES_MAX: usize = 1000;

/// Words of this code are no category of the model.
const UNSEEN: u32 = u32::MAX;

/// Training rows from which on a column that has a value of its own in almost each is called an identifier.
const MANY_ROWS: usize = 20;

/// A column of features, as far as it was read.
pub(super) struct Feature {
    pub(super) name: String,
    /// Its place among the columns of the file; `None` if that has none of this name.
    pub(super) at: Option<usize>,
    pub(super) cells: Cells,
}

/// The cells of a column.
pub(super) enum Cells {
    /// None has a value yet.
    Missing(usize),
    /// Numbers, `NaN` where there is none.
    Numbers(Vec<f64>),
    Words(Words),
}

/// The words of a column, each different one once.
#[derive(Default)]
pub(super) struct Words {
    codes: HashMap<String, u32>,
    rows: Vec<u32>,
    /// A word that is no category, if the categories are those of a model.
    unseen: Option<String>,
    /// Whether they are.
    is_closed: bool,
    /// Whether numbers are words too.
    takes_numbers: bool,
}

impl Words {
    /// Those of a column that may begin with numbers.
    pub(super) fn with_numbers() -> Self {
        Self {
            takes_numbers: true,
            ..Self::default()
        }
    }

    fn of_model(categories: &[String]) -> Self {
        Self {
            codes: categories.iter().cloned().zip(0..).collect(),
            is_closed: true,
            takes_numbers: true,
            ..Self::default()
        }
    }

    /// *Errors*: too many categories.
    fn push(&mut self, word: &str, name: &str) -> Result<(), DataProblem> {
        let code = match self.codes.get(word) {
            Some(code) => *code,
            None if self.is_closed => {
                self.unseen.get_or_insert_with(|| quote(word));
                UNSEEN
            }
            None if self.codes.len() == CATEGORIES_MAX => {
                let name = quote(name);
                let problem =
                    format!("column {name:?} has more than {CATEGORIES_MAX} different words");
                return Err(DataProblem::new(problem)
                    .with_hint(format!("leave it out with --drop-columns {name:?}")));
            }
            None => {
                let code = self.codes.len() as u32;
                self.codes.insert(word.to_owned(), code);
                code
            }
        };
        self.rows.push(code);
        Ok(())
    }

    /// Makes the words of these rows, sorted, the categories.
    fn close(&mut self, rows: &[usize]) -> Vec<String> {
        let used: BTreeSet<u32> = rows.iter().map(|row| self.rows[*row]).collect();
        let (known, others): (Vec<_>, Vec<_>) = std::mem::take(&mut self.codes)
            .into_iter()
            .partition(|(_, code)| used.contains(code));
        let mut known: Vec<(String, u32)> = known;
        known.sort_unstable();
        self.unseen = others.into_iter().map(|(word, _)| quote(&word)).min();
        let new: HashMap<u32, u32> = known.iter().map(|(_, code)| *code).zip(0..).collect();
        let renumber = |code: &mut u32| *code = new.get(code).copied().unwrap_or(UNSEEN);
        self.rows.iter_mut().for_each(renumber);
        known.into_iter().map(|(word, _)| word).collect()
    }
}

impl Feature {
    /// One of a model, in a file with these columns.
    pub(super) fn of_model(column: &Column, at: Option<usize>) -> Self {
        let cells = match column {
            Column::Numbers(_) => Cells::Numbers(Vec::new()),
            Column::Categories { categories, .. } => Cells::Words(Words::of_model(categories)),
        };
        Self {
            name: column.name().to_owned(),
            at,
            cells,
        }
    }

    /// The cell of a row.
    pub(super) fn cell<'a>(&self, row: &'a Row) -> Cell<'a> {
        self.at.map_or(Cell::Missing, |at| row.cell(at))
    }

    /// *Errors*: a cell that does not belong in this column.
    pub(super) fn check(
        &self,
        line: u64,
        cell: Cell<'_>,
        missing: MissingValues,
    ) -> Result<(), DataProblem> {
        match (cell, &self.cells) {
            (Cell::Missing, _) if missing == MissingValues::Error => {
                let name = quote(&self.name);
                let problem = format!("line {line}: no value in column {name:?}");
                Err(DataProblem::new(problem).with_hint(MISSING))
            }
            (Cell::Number(_, text), Cells::Words(words)) if !words.takes_numbers => {
                let (name, text) = (quote(&self.name), quote(text));
                Err(DataProblem::new(format!(
                    "line {line}: column {name:?} is {text:?}, a number among words"
                ))
                .with_hint(CATEGORICAL))
            }
            (Cell::Number(number, text), Cells::Numbers(_) | Cells::Missing(_))
                if !(number as f32).is_finite() =>
            {
                Err(self.not_a_number(line, text))
            }
            (Cell::Word(text), Cells::Numbers(_) | Cells::Missing(_))
                if text.replace(',', ".").parse::<f64>().is_ok() =>
            {
                let hint = "write decimals with a point";
                Err(self.not_a_number(line, text).with_hint(hint))
            }
            (Cell::Word(text), Cells::Numbers(_)) => {
                Err(self.not_a_number(line, text).with_hint(CATEGORICAL))
            }
            _ => Ok(()),
        }
    }

    fn not_a_number(&self, line: u64, text: &str) -> DataProblem {
        let (name, text) = (quote(&self.name), quote(text));
        DataProblem::new(format!(
            "line {line}: column {name:?} is {text:?}, not a finite 32-bit number"
        ))
    }

    /// Adds a cell that was [checked](Self::check).
    ///
    /// *Errors*: too many categories.
    pub(super) fn push(&mut self, cell: Cell<'_>) -> Result<(), DataProblem> {
        if let (Cells::Missing(rows), Cell::Number(..) | Cell::Word(_)) = (&self.cells, cell) {
            let rows = *rows;
            self.cells = match cell {
                Cell::Word(_) => Cells::Words(Words::default()),
                _ => Cells::Numbers(vec![f64::NAN; rows]),
            };
            if let Cells::Words(words) = &mut self.cells {
                (0..rows).try_for_each(|_| words.push("", &self.name))?;
            }
        }
        match (&mut self.cells, cell) {
            (Cells::Missing(rows), _) => *rows += 1,
            (Cells::Numbers(rows), Cell::Number(number, _)) => rows.push(number),
            (Cells::Numbers(rows), _) => rows.push(f64::NAN),
            (Cells::Words(words), Cell::Missing) => words.push("", &self.name)?,
            (Cells::Words(words), Cell::Number(_, word) | Cell::Word(word)) => {
                words.push(word, &self.name)?;
            }
        }
        Ok(())
    }

    /// Forgets the rows, and which words were no category.
    pub(super) fn clear(&mut self) {
        match &mut self.cells {
            Cells::Missing(rows) => *rows = 0,
            Cells::Numbers(rows) => rows.clear(),
            Cells::Words(words) => words.rows.clear(),
        }
    }

    /// What a model knows of the column, by its training rows: itself, and the mean and deviation of each of its values. Words become ones and
    /// zeros, which are not scaled.
    ///
    /// *Errors*: none has a value.
    pub(super) fn learn(&mut self, train: &[usize]) -> Result<(Column, Vec<Moments>), DataProblem> {
        let name = self.name.clone();
        match &mut self.cells {
            Cells::Words(words) => {
                let categories = words.close(train);
                let scales = vec![(0.0, 1.0); categories.len()];
                Ok((Column::Categories { name, categories }, scales))
            }
            Cells::Numbers(rows) => {
                let known = train.iter().map(|row| rows[*row]);
                let known: Vec<f64> = known.filter(|value| !value.is_nan()).collect();
                match known.is_empty() {
                    false => Ok((Column::Numbers(name), vec![moments(&known)])),
                    true => Err(valueless(&name)),
                }
            }
            Cells::Missing(_) => Err(valueless(&name)),
        }
    }

    /// A sign that the column is no feature but names or counts the rows.
    pub(super) fn warning(&self, train: &[usize]) -> Option<String> {
        let what = match &self.cells {
            _ if train.len() < MANY_ROWS => return None,
            Cells::Numbers(rows) if rows.windows(2).all(|two| two[1] - two[0] == 1.0) => {
                "counts the rows".to_owned()
            }
            Cells::Words(words) => {
                let seen = train.iter().map(|row| words.rows[*row]);
                let different = seen.collect::<BTreeSet<_>>().len();
                let are_many = different * 2 > train.len();
                are_many.then(|| {
                    let rows = plural(train.len() as u64, "training row");
                    format!(
                        "has {} in {rows}",
                        plural(different as u64, "different word")
                    )
                })?
            }
            _ => return None,
        };
        let name = quote(&self.name);
        Some(format!(
            "column {name:?} {what}: if it is no feature, leave it out with --drop-columns"
        ))
    }

    /// How many words are no category of the model, in words.
    pub(super) fn unseen(&self) -> Option<(u64, String)> {
        let Cells::Words(words) = &self.cells else {
            return None;
        };
        let count = words.rows.iter().filter(|code| **code == UNSEEN).count() as u64;
        let example = words.unseen.clone()?;
        Some((count, example)).filter(|(count, _)| *count > 0)
    }

    /// Appends the values of a row as a model gets them.
    ///
    /// *Errors*: a number that is too far from those of training.
    fn values(&self, row: usize, scales: &[Moments], to: &mut Vec<f32>) -> Result<(), ()> {
        match &self.cells {
            Cells::Missing(_) => to.push(0.0),
            Cells::Numbers(rows) => {
                let [(mean, deviation)] = scales else {
                    unreachable!("a number has one scale");
                };
                let scaled = ((rows[row] - mean) / deviation) as f32;
                match rows[row].is_nan() {
                    // The mean.
                    true => to.push(0.0),
                    false if scaled.is_finite() => to.push(scaled),
                    false => return Err(()),
                }
            }
            Cells::Words(words) => {
                let code = words.rows[row] as usize;
                to.extend((0..scales.len()).map(|category| f32::from(category == code)));
            }
        }
        Ok(())
    }
}

/// The values of some features in `rows` rows, one row after another, or the first feature with a number that is too far from those of training.
///
/// *Errors*: too many values.
pub(super) fn encoded(
    features: &[Feature],
    columns: &[Column],
    scaling: &Scaling,
    rows: usize,
) -> Result<Result<Vec<f32>, String>, DataProblem> {
    let Scaling::Standardised { mean, deviation } = scaling else {
        panic!("tables are standardised, not {scaling:?}");
    };
    let scales: Vec<Moments> = mean
        .iter()
        .copied()
        .zip(deviation.iter().copied())
        .collect();
    let count = rows as u64 * scales.len() as u64;
    if count > VALUES_MAX {
        return Err(DataProblem::too_large("values", count, VALUES_MAX)
            .with_hint("a column of words has a value for each category: leave some out with --drop-columns"));
    }
    let mut values = Vec::with_capacity(count as usize);
    for row in 0..rows {
        let mut at = 0;
        for (feature, column) in features.iter().zip(columns) {
            let scales = &scales[at..at + column.width()];
            at += column.width();
            if feature.values(row, scales, &mut values).is_err() {
                return Ok(Err(quote(&feature.name)));
            }
        }
    }
    Ok(Ok(values))
}

/// Advice for a cell without a value.
const MISSING: &str = "--missing-values fill takes the column's mean, or makes missing words a category; --bad-samples skip leaves out such lines";

/// Advice for numbers and words in one column.
const CATEGORICAL: &str = "if both are categories, name the column in --categorical; leave it out with --drop-columns, or such lines with --bad-samples skip";

fn valueless(name: &str) -> DataProblem {
    let name = quote(name);
    DataProblem::new(format!("column {name:?} has no value in a training row"))
        .with_hint("leave it out with --drop-columns")
}

/// Mean and standard deviation.
pub(super) type Moments = (f64, f64);

/// Mean and standard deviation. For equal values they are the value and 1: a computed mean can be off by rounding, and
/// dividing by an equally tiny deviation would amplify that.
pub(super) fn moments(values: &[f64]) -> Moments {
    if values.iter().all(|value| *value == values[0]) {
        return (values[0], 1.0);
    }
    let of = |sum: f64| sum / values.len() as f64;
    let mean = of(values.iter().sum());
    let squares = values.iter().map(|value| (value - mean).powi(2));
    (mean, of(squares.sum()).sqrt())
}
