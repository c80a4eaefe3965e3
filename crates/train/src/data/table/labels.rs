//! The label column: classes, or the numbers to predict.

use std::collections::HashMap;

use super::rows::{Place, is_missing};
use crate::data::error::{list, quote};
use crate::data::{CLASSES_MAX, DataProblem, numbered_classes};

/// Advice for a label that is a quantity.
const REGRESSION: &str = "to predict a number, add --objective regression";

/// Advice for labels that are not there.
const FILL_IN: &str = "fill in missing labels, or leave out their lines with --bad-samples skip";

/// The label column, as far as it was read.
pub(super) enum LabelColumn {
    /// There is no label column.
    None,
    /// Classes, each different text once.
    Texts(Texts),
    /// Classes of a model, by their names.
    Known(HashMap<String, u32>, Vec<u32>),
    /// Numbers to predict.
    Numbers(Vec<f64>),
}

/// Labels of classes that are not known yet.
#[derive(Default)]
pub(super) struct Texts {
    texts: Vec<String>,
    known: HashMap<String, u32>,
    /// Of each row, the index of its text.
    rows: Vec<u32>,
}

/// Whether labels of classes are words.
fn is_word(text: &str) -> bool {
    text.parse::<f64>().is_err()
}

/// The label of one row and where it is.
pub(super) struct Label<'a> {
    pub(super) place: Place,
    pub(super) column: &'a str,
    pub(super) text: &'a str,
}

impl LabelColumn {
    /// Those of a model's classes.
    pub(super) fn known(classes: &[String]) -> Self {
        let numbered = classes.iter().cloned().zip(0..);
        Self::Known(numbered.collect(), Vec::new())
    }

    /// *Errors*: no label, or none of this kind.
    pub(super) fn check(&self, label: &Label<'_>) -> Result<(), DataProblem> {
        match self {
            Self::None => Ok(()),
            Self::Texts(texts) => match texts.texts.first() {
                // If the first label is a word, all must be.
                Some(first) if is_word(first) => label.word(),
                None if !is_missing(label.text) && is_word(label.text) => Ok(()),
                _ => label.number().map(drop),
            },
            Self::Known(classes, _) => label.among(classes).map(drop),
            Self::Numbers(_) => label.value().map(drop),
        }
    }

    /// Adds a label that was [checked](Self::check).
    ///
    /// *Errors*: too many classes.
    pub(super) fn push(&mut self, label: &Label<'_>) -> Result<(), DataProblem> {
        match self {
            Self::None => {}
            Self::Texts(texts) => texts.push(label)?,
            Self::Known(classes, rows) => rows.push(label.among(classes)?),
            Self::Numbers(rows) => rows.push(label.value()?),
        }
        Ok(())
    }
}

impl Texts {
    fn push(&mut self, label: &Label<'_>) -> Result<(), DataProblem> {
        let new = self.texts.len() as u32;
        let index = match self.known.get(label.text) {
            Some(index) => *index,
            None if new as usize >= CLASSES_MAX => {
                let place = label.place;
                let problem = format!("{place}: more than {CLASSES_MAX} different labels");
                return Err(DataProblem::new(problem).with_hint(REGRESSION));
            }
            None => {
                self.texts.push(label.text.to_owned());
                self.known.insert(label.text.to_owned(), new);
                new
            }
        };
        self.rows.push(index);
        Ok(())
    }

    /// The names of the classes, and the class of each row. If the labels are words, they are the classes, in alphabetical order; otherwise
    /// they are class numbers.
    pub(super) fn classes(self) -> (Vec<String>, Vec<u32>) {
        let of_rows = |numbers: Vec<u32>| {
            let rows = self.rows.iter().map(|row| numbers[*row as usize]);
            rows.collect::<Vec<_>>()
        };
        if self.texts.first().is_some_and(|first| is_word(first)) {
            let mut classes = self.texts.clone();
            classes.sort_unstable();
            let found = |text| classes.binary_search(text).expect("it is one of them") as u32;
            let labels = of_rows(self.texts.iter().map(found).collect());
            return (classes, labels);
        }
        let number = |text: &String| text.parse().expect("it was checked");
        let labels = of_rows(self.texts.iter().map(number).collect());
        (numbered_classes(&labels), labels)
    }
}

impl Label<'_> {
    fn word(&self) -> Result<(), DataProblem> {
        let (place, column, text) = (self.place, quote(self.column), quote(self.text));
        match is_word(self.text) && !is_missing(self.text) {
            true => Ok(()),
            false if is_missing(self.text) => Err(self.missing()),
            false => Err(DataProblem::new(format!(
                "{place}: {text:?} in column {column:?} is a number, but earlier labels are words"
            ))
            .with_hint("use only numbers or only words")),
        }
    }

    /// A class number.
    fn number(&self) -> Result<u32, DataProblem> {
        let place = self.place;
        if is_missing(self.text) {
            return Err(self.missing());
        }
        let label: u32 = self.text.parse().map_err(|_| {
            let (column, text) = (quote(self.column), quote(self.text));
            let problem = DataProblem::new(format!(
                "{place}: {text:?} in column {column:?} is no class; expected a whole number 0, 1, 2, ..."
            ));
            problem.with_hint(match is_word(self.text) {
                false => format!("number the classes from 0; {REGRESSION}"),
                true => "earlier labels are numbers: use only numbers or only words".to_owned(),
            })
        })?;
        if label as usize >= CLASSES_MAX {
            let problem = format!("{place}: label {label} is out of range 0..{CLASSES_MAX}");
            let hint = format!("number the classes from 0; {REGRESSION}");
            return Err(DataProblem::new(problem).with_hint(hint));
        }
        Ok(label)
    }

    /// One of a model's classes.
    fn among(&self, classes: &HashMap<String, u32>) -> Result<u32, DataProblem> {
        // Numbers may have been written in another way in training, such as 01.
        let by_number = || classes.get(&self.text.parse::<u32>().ok()?.to_string());
        let found = classes.get(self.text).or_else(by_number);
        found.copied().ok_or_else(|| {
            let mut known: Vec<(&String, &u32)> = classes.iter().collect();
            known.sort_unstable_by_key(|(_, class)| **class);
            let known: Vec<String> = known.into_iter().map(|(name, _)| name.clone()).collect();
            let (place, text, column) = (self.place, quote(self.text), quote(self.column));
            let known = list(&known);
            DataProblem::new(format!(
                "{place}: {text:?} in column {column:?} is none of the model's classes, {known}"
            ))
        })
    }

    /// The number to predict.
    fn value(&self) -> Result<f64, DataProblem> {
        if is_missing(self.text) {
            return Err(self.missing());
        }
        let parsed = self.text.parse::<f64>().ok();
        parsed
            .filter(|value| (*value as f32).is_finite())
            .ok_or_else(|| {
                let (place, column, text) = (self.place, quote(self.column), quote(self.text));
                DataProblem::new(format!(
                    "{place}: {text:?} in column {column:?} is no finite 32-bit number to predict"
                ))
                .with_hint("for classes, omit --objective regression")
            })
    }

    fn missing(&self) -> DataProblem {
        let (place, column) = (self.place, quote(self.column));
        DataProblem::new(format!("{place}: no label in column {column:?}")).with_hint(FILL_IN)
    }
}
