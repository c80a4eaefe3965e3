//! The columns of a table while its rows are read, and the values that a model gets of them.

use std::collections::HashMap;

use super::rows::{Cell, Place, Row};
use crate::config::MissingValues;
use crate::data::error::quote;
use crate::data::{Column, DataProblem, Scaling};
use crate::report::plural;

/// Maximum number of categories of a column.
pub(super) const CATEGORIES_MAX: usize = 1000;

/// Words of this code are no category of the model.
const UNSEEN: u32 = u32::MAX;

/// Training rows from which on a column that has a value of its own in almost each is called an identifier.
const MANY_ROWS: usize = 20;

/// A column of features, as far as it was read. A number stands for each cell: the code of a word, or `NaN` for a cell without a value.
pub(super) struct Feature {
    pub(super) name: String,
    /// Its place among the columns of the file; `None` if that has none of this name.
    pub(super) at: Option<usize>,
    pub(super) cells: Cells,
}

/// What is known of the cells of a column.
pub(super) enum Cells {
    /// None has a value yet.
    Missing,
    Numbers(Numbers),
    Words(Words),
}

/// The numbers of a column.
pub(super) struct Numbers {
    /// The lowest and the highest so far; `NaN` before the first.
    range: [f64; 2],
    /// That of the last row, and whether each row so far has the number after that of the row before.
    last: Option<f64>,
    are_counted: bool,
    /// Those of the training rows.
    spread: Spread,
}

/// The words of a column, each different one once.
#[derive(Default)]
pub(super) struct Words {
    codes: HashMap<String, u32>,
    /// In how many training rows and in how many others each code is.
    counts: Vec<[u64; 2]>,
    /// The category of each code, or `UNSEEN`.
    categories: Vec<u32>,
    /// How often a word was no category, and one of them.
    unseen: Option<(u64, String)>,
    /// Whether the categories are those of a model.
    is_closed: bool,
    /// Whether numbers are words too.
    takes_numbers: bool,
}

impl Default for Numbers {
    fn default() -> Self {
        Self {
            range: [f64::NAN; 2],
            last: None,
            are_counted: true,
            spread: Spread::default(),
        }
    }
}

impl Numbers {
    fn push(&mut self, number: f64) -> f64 {
        let [lowest, highest] = self.range;
        self.range = [lowest.min(number), highest.max(number)];
        self.are_counted &= self.last.is_none_or(|last| number - last == 1.0);
        self.last = Some(number);
        number
    }
}

impl Words {
    /// Those of a column whose categories are not known yet. A missing one is the empty word.
    fn open() -> Self {
        Self {
            codes: HashMap::from([(String::new(), 0)]),
            ..Self::default()
        }
    }

    /// Those of a column that may begin with numbers.
    pub(super) fn with_numbers() -> Self {
        Self {
            takes_numbers: true,
            ..Self::open()
        }
    }

    fn of_model(categories: &[String]) -> Self {
        Self {
            codes: categories.iter().cloned().zip(0..).collect(),
            categories: (0..categories.len() as u32).collect(),
            is_closed: true,
            takes_numbers: true,
            ..Self::default()
        }
    }

    /// The code of a word.
    ///
    /// *Errors*: too many categories.
    fn push(&mut self, word: &str, name: &str) -> Result<f64, DataProblem> {
        let code = match self.codes.get(word) {
            Some(code) => *code,
            None if self.is_closed => {
                let unseen = self.unseen.get_or_insert_with(|| (0, quote(word)));
                unseen.0 += 1;
                UNSEEN
            }
            None if self.codes.len() > CATEGORIES_MAX => {
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
        Ok(code.into())
    }

    /// Counts a cell of a training row or of another one.
    fn count(&mut self, cell: f64, is_trained: bool) {
        self.counts.resize(self.codes.len(), [0; 2]);
        let code = if cell.is_nan() { 0 } else { cell as usize };
        self.counts[code][usize::from(!is_trained)] += 1;
    }

    /// How many different ones the training rows have.
    fn different(&self) -> usize {
        self.counts
            .iter()
            .filter(|[trained, _]| *trained > 0)
            .count()
    }

    /// Makes the words of the training rows, sorted, the categories.
    fn close(&mut self) -> Vec<String> {
        let mut words: Vec<(&String, u32)> =
            self.codes.iter().map(|(w, code)| (w, *code)).collect();
        words.sort_unstable();
        self.categories = vec![UNSEEN; words.len()];
        let mut known = Vec::new();
        for (word, code) in words {
            let [trained, others] = self.counts[code as usize];
            if trained > 0 {
                self.categories[code as usize] = known.len() as u32;
                known.push(word.clone());
            } else if others > 0 {
                let unseen = self.unseen.get_or_insert_with(|| (0, quote(word)));
                unseen.0 += others;
            }
        }
        known
    }
}

impl Feature {
    /// One of a model, in a file with these columns.
    pub(super) fn of_model(column: &Column, at: Option<usize>) -> Self {
        let cells = match column {
            Column::Numbers(_) => Cells::Numbers(Numbers::default()),
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
        place: Place,
        cell: Cell<'_>,
        missing: MissingValues,
    ) -> Result<(), DataProblem> {
        match (cell, &self.cells) {
            (Cell::Missing, _) if missing == MissingValues::Error => {
                let name = quote(&self.name);
                let problem = format!("{place}: no value in column {name:?}");
                Err(DataProblem::new(problem).with_hint(MISSING))
            }
            (Cell::Number(_, text), Cells::Words(words)) if !words.takes_numbers => {
                let (name, text) = (quote(&self.name), quote(text));
                Err(DataProblem::new(format!(
                    "{place}: column {name:?} is {text:?}, a number among words"
                ))
                .with_hint(CATEGORICAL))
            }
            (Cell::Number(number, text), Cells::Numbers(_) | Cells::Missing)
                if !(number as f32).is_finite() =>
            {
                Err(self.not_a_number(place, text))
            }
            (Cell::Word(text), Cells::Numbers(_) | Cells::Missing)
                if text.replace(',', ".").parse::<f64>().is_ok() =>
            {
                let hint = "write decimals with a point";
                Err(self.not_a_number(place, text).with_hint(hint))
            }
            (Cell::Word(text), Cells::Numbers(_)) => {
                Err(self.not_a_number(place, text).with_hint(CATEGORICAL))
            }
            (Cell::Opaque, _) => {
                let hint =
                    "lists, structs and bytes are not read: leave it out with --drop-columns";
                Err(opaque(place, &self.name).with_hint(hint))
            }
            _ => Ok(()),
        }
    }

    fn not_a_number(&self, place: Place, text: &str) -> DataProblem {
        let (name, text) = (quote(&self.name), quote(text));
        DataProblem::new(format!(
            "{place}: column {name:?} is {text:?}, not a finite 32-bit number"
        ))
    }

    /// The number that stands for a cell, which was [checked](Self::check).
    ///
    /// *Errors*: too many categories.
    pub(super) fn push(&mut self, cell: Cell<'_>) -> Result<f64, DataProblem> {
        if matches!(self.cells, Cells::Missing) {
            self.cells = match cell {
                Cell::Missing | Cell::Opaque => return Ok(f64::NAN),
                Cell::Number(..) => Cells::Numbers(Numbers::default()),
                Cell::Word(_) => Cells::Words(Words::open()),
            };
        }
        match (&mut self.cells, cell) {
            (Cells::Numbers(numbers), Cell::Number(number, _)) => Ok(numbers.push(number)),
            (Cells::Words(words), Cell::Number(_, word) | Cell::Word(word)) => {
                words.push(word, &self.name)
            }
            (Cells::Words(words), Cell::Missing | Cell::Opaque) => words.push("", &self.name),
            (Cells::Numbers(Numbers { are_counted, .. }), _) => {
                *are_counted = false;
                Ok(f64::NAN)
            }
            (Cells::Missing, _) => unreachable!("it has a value"),
        }
    }

    /// Learns from the number of a cell, in the first of two passes over all rows.
    pub(super) fn learn(&mut self, cell: f64, is_trained: bool) {
        match &mut self.cells {
            Cells::Words(words) => words.count(cell, is_trained),
            Cells::Numbers(numbers) if is_trained && !cell.is_nan() => numbers.spread.add(cell),
            Cells::Numbers(_) | Cells::Missing => {}
        }
    }

    /// Learns from the number of a training row's cell, in the second pass.
    pub(super) fn learn_deviation(&mut self, cell: f64) {
        if let Cells::Numbers(numbers) = &mut self.cells
            && !cell.is_nan()
        {
            numbers.spread.add_deviation(cell);
        }
    }

    /// What a model knows of the column, by its training rows: itself, and the mean and deviation of each of its values. Words become ones and
    /// zeros, which are not scaled.
    ///
    /// *Errors*: none has a value.
    pub(super) fn learned(&mut self) -> Result<(Column, Vec<Moments>), DataProblem> {
        let name = self.name.clone();
        match &mut self.cells {
            Cells::Words(words) => {
                let categories = words.close();
                let scales = vec![(0.0, 1.0); categories.len()];
                Ok((Column::Categories { name, categories }, scales))
            }
            Cells::Numbers(Numbers { spread, .. }) if spread.count > 0 => {
                Ok((Column::Numbers(name), vec![spread.moments()]))
            }
            Cells::Numbers(_) | Cells::Missing => {
                let name = quote(&name);
                let problem = format!("column {name:?} has no value in a training row");
                Err(DataProblem::new(problem).with_hint("leave it out with --drop-columns"))
            }
        }
    }

    /// A sign that the column is no feature but names or counts the rows, after the first pass over them.
    pub(super) fn warning(&self, trained: usize) -> Option<String> {
        let what = match &self.cells {
            _ if trained < MANY_ROWS => return None,
            Cells::Numbers(numbers) if numbers.are_counted => "counts the rows".to_owned(),
            Cells::Words(words) if words.different() * 2 > trained => {
                let different = plural(words.different() as u64, "different word");
                let rows = plural(trained as u64, "training row");
                format!("has {different} in {rows}")
            }
            _ => return None,
        };
        let name = quote(&self.name);
        Some(format!(
            "column {name:?} {what}: if it is no feature, leave it out with --drop-columns"
        ))
    }

    /// How many words are no category of the model, and one of them.
    pub(super) fn unseen(&self) -> Option<&(u64, String)> {
        match &self.cells {
            Cells::Words(words) => words.unseen.as_ref(),
            Cells::Numbers(_) | Cells::Missing => None,
        }
    }

    /// How its cells become values, which have these scales.
    fn encoder(&self, scales: &[Moments]) -> Encoder {
        match (&self.cells, scales) {
            (Cells::Words(words), _) => Encoder::Category {
                count: scales.len(),
                of_code: words.categories.clone(),
                missing: words.codes.get("").copied().unwrap_or(UNSEEN),
            },
            (Cells::Numbers(_), [moments]) => Encoder::Number(*moments),
            _ => unreachable!("a number has one scale, and each column of a model has values"),
        }
    }
}

/// How the number of a cell becomes values of a model.
#[derive(Debug)]
pub(super) enum Encoder {
    /// Minus the mean, divided by the deviation.
    Number(Moments),
    /// A value for each of `count` categories.
    Category {
        count: usize,
        of_code: Vec<u32>,
        missing: u32,
    },
}

impl Encoder {
    fn width(&self) -> usize {
        match self {
            Self::Number(_) => 1,
            Self::Category { count, .. } => *count,
        }
    }

    fn encode(&self, cell: f64, values: &mut [f32]) {
        match self {
            // The mean.
            Self::Number(_) if cell.is_nan() => values[0] = 0.0,
            Self::Number((mean, deviation)) => values[0] = ((cell - mean) / deviation) as f32,
            Self::Category {
                of_code, missing, ..
            } => {
                let code = if cell.is_nan() { *missing } else { cell as u32 };
                let category = of_code.get(code as usize).copied().unwrap_or(UNSEEN);
                values.fill(0.0);
                if let Some(value) = values.get_mut(category as usize) {
                    *value = 1.0;
                }
            }
        }
    }
}

/// How the cells of each feature become values, which have this scaling.
pub(super) fn encoders(
    features: &[Feature],
    columns: &[Column],
    scaling: &Scaling,
) -> Vec<Encoder> {
    let Scaling::Standardised { mean, deviation } = scaling else {
        panic!("tables are standardised, not {scaling:?}");
    };
    let mut scales = mean.iter().copied().zip(deviation.iter().copied());
    let of = |(feature, column): (&Feature, &Column)| {
        let scales: Vec<Moments> = scales.by_ref().take(column.width()).collect();
        feature.encoder(&scales)
    };
    features.iter().zip(columns).map(of).collect()
}

/// Writes the values of a row.
pub(super) fn encode(encoders: &[Encoder], cells: &[f64], values: &mut [f32]) {
    let mut rest = values;
    for (encoder, cell) in encoders.iter().zip(cells) {
        let (values, others) = rest.split_at_mut(encoder.width());
        encoder.encode(*cell, values);
        rest = others;
    }
}

/// The first feature with a number so far that is too far from those of training to be scaled.
pub(super) fn too_far(features: &[Feature], encoders: &[Encoder]) -> Option<String> {
    let is_too_far = |(feature, encoder): &(&Feature, &Encoder)| {
        let Cells::Numbers(numbers) = &feature.cells else {
            return false;
        };
        // Scaling keeps the order, so all numbers are finite if these are.
        numbers.range.iter().any(|number| {
            let mut value = [0.0];
            encoder.encode(*number, &mut value);
            !value[0].is_finite()
        })
    };
    let found = features.iter().zip(encoders).find(is_too_far);
    found.map(|(feature, _)| quote(&feature.name))
}

/// A cell of a column that has neither numbers nor text.
pub(super) fn opaque(place: Place, name: &str) -> DataProblem {
    let name = quote(name);
    DataProblem::new(format!("{place}: column {name:?} is no number and no text"))
}

/// Advice for a cell without a value.
const MISSING: &str = "--missing-values fill takes the column's mean, or makes missing words a category; --bad-samples skip leaves out such lines";

/// Advice for numbers and words in one column.
const CATEGORICAL: &str = "if both are categories, name the column in --categorical; leave it out with --drop-columns, or such lines with --bad-samples skip";

/// Mean and standard deviation.
pub(super) type Moments = (f64, f64);

/// Mean and standard deviation of numbers, in two passes over them.
#[derive(Clone, Copy, Default)]
pub(super) struct Spread {
    count: u64,
    first: f64,
    differ: bool,
    sum: f64,
    squares: f64,
}

impl Spread {
    fn add(&mut self, number: f64) {
        if self.count == 0 {
            self.first = number;
        }
        self.differ |= number != self.first;
        self.count += 1;
        self.sum += number;
    }

    fn mean(&self) -> f64 {
        self.sum / self.count as f64
    }

    fn add_deviation(&mut self, number: f64) {
        self.squares += (number - self.mean()).powi(2);
    }

    /// For equal numbers they are the number and 1: a computed mean can be off by rounding, and dividing by an equally tiny deviation would
    /// amplify that.
    fn moments(&self) -> Moments {
        match self.differ {
            false => (self.first, 1.0),
            true => (self.mean(), (self.squares / self.count as f64).sqrt()),
        }
    }
}

/// Mean and standard deviation of some numbers.
pub(super) fn moments(numbers: impl Iterator<Item = f64> + Clone) -> Moments {
    let mut spread = Spread::default();
    numbers.clone().for_each(|number| spread.add(number));
    numbers.for_each(|number| spread.add_deviation(number));
    spread.moments()
}
