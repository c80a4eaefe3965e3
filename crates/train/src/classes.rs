//! How well each class is predicted, and which classes are taken for each other.

use std::collections::BTreeMap;

use paceline_usage::columns;
use serde::{Deserialize, Serialize};

use crate::error::TrainError;
use crate::report::plural;

/// The figures of one class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassFigures {
    /// Its name.
    pub name: String,
    /// Samples of this class.
    pub samples: u64,
    /// Right predictions of this class over all predictions of it; `None` if it was never predicted.
    pub precision: Option<f64>,
    /// Right predictions of this class over its samples; `None` if it has no sample.
    pub recall: Option<f64>,
    /// Harmonic mean of precision and recall; `None` if the class neither occurs nor is predicted.
    pub f1: Option<f64>,
}

/// How often samples of one class were taken for another one, or rightly for the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Confused {
    /// The class of the samples, an index.
    pub of: u32,
    /// The class that the model took them for.
    pub taken_for: u32,
    /// Samples.
    pub count: u64,
}

/// The pairs of classes that occur, by classes.
pub(crate) fn confused(confusion: BTreeMap<[u32; 2], u64>) -> Vec<Confused> {
    let pairs = confusion.into_iter();
    let pairs = pairs.map(|([of, taken_for], count)| Confused {
        of,
        taken_for,
        count,
    });
    pairs.collect()
}

/// *Errors*: an evaluation has counted a class that has no name.
pub(crate) fn check_classes(
    confusion: &BTreeMap<[u32; 2], u64>,
    classes: usize,
) -> Result<(), TrainError> {
    let last = confusion.keys().flatten().max();
    match last.filter(|last| **last as usize >= classes) {
        None => Ok(()),
        Some(last) => Err(TrainError::usage(
            format!(
                "an evaluation has counted class {last}, but the task has {}",
                plural(classes as u64, "class")
            ),
            "return the names of all classes from `TrainTask::classes`, and count them from 0",
        )),
    }
}

/// The figures of each class.
pub(crate) fn figures(names: &[String], confusion: &[Confused]) -> Vec<ClassFigures> {
    // Samples of the class, samples taken for it, samples rightly taken for it.
    let mut counts = vec![[0_u64; 3]; names.len()];
    for confused in confusion {
        let (of, taken_for) = (confused.of as usize, confused.taken_for as usize);
        counts[of][0] += confused.count;
        counts[taken_for][1] += confused.count;
        counts[of][2] += u64::from(of == taken_for) * confused.count;
    }
    let share = |part: u64, all: u64| (all > 0).then(|| part as f64 / all as f64);
    let figures = names.iter().zip(counts);
    let figures = figures.map(|(name, [samples, taken, right])| ClassFigures {
        name: name.clone(),
        samples,
        precision: share(right, taken),
        recall: share(right, samples),
        f1: share(2 * right, samples + taken),
    });
    figures.collect()
}

/// A class's name, which came from a file, for a terminal.
#[must_use]
pub fn printable(name: &str) -> String {
    name.replace(|character: char| character.is_control(), "?")
}

/// A line for each class, or for those with the lowest F1 if there are more than `most`.
#[must_use]
pub fn class_table(classes: &[ClassFigures], most: usize) -> String {
    let percent =
        |share: Option<f64>| share.map_or("-".into(), |share| format!("{:.2} %", share * 100.0));
    let head = ["samples", "precision", "recall", "F1", "class"].map(str::to_owned);
    let mut listed: Vec<&ClassFigures> = classes.iter().collect();
    if classes.len() > most {
        let f1 = |class: &ClassFigures| class.f1.unwrap_or(f64::INFINITY);
        listed.sort_by(|one, other| f1(one).total_cmp(&f1(other)));
        listed.truncate(most);
    }
    let row = |class: &&ClassFigures| {
        vec![
            class.samples.to_string(),
            percent(class.precision),
            percent(class.recall),
            percent(class.f1),
            printable(&class.name),
        ]
    };
    let rows: Vec<Vec<String>> = [head.to_vec()]
        .into_iter()
        .chain(listed.iter().map(row))
        .collect();
    columns::with_numbers(4, &rows)
}

/// The pairs of classes that are confused most often, at most so many: `8 taken for 1: 3 times`.
#[must_use]
pub fn most_confused(classes: &[ClassFigures], pairs: &[Confused], most: usize) -> Vec<String> {
    let wrong = pairs.iter().filter(|pair| pair.of != pair.taken_for);
    let mut wrong: Vec<_> = wrong.collect();
    wrong.sort_by_key(|pair| std::cmp::Reverse(pair.count));
    let name = |class: u32| printable(&classes[class as usize].name);
    let lines = wrong.iter().take(most).map(|pair| {
        let times = plural(pair.count, "time");
        format!(
            "{} taken for {}: {times}",
            name(pair.of),
            name(pair.taken_for)
        )
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_of_classes_are_those_of_the_textbook() {
        let confused = |of, taken_for, count| Confused {
            of,
            taken_for,
            count,
        };
        let confusion = [
            confused(0, 0, 6),
            confused(0, 1, 2),
            confused(1, 0, 1),
            confused(1, 1, 3),
        ];
        let names = ["no", "yes", "never"].map(str::to_owned);
        let figures = figures(&names, &confusion);
        let rows: Vec<_> = figures
            .iter()
            .map(|row| (row.samples, row.precision, row.recall, row.f1))
            .collect();
        assert_eq!(
            rows,
            [
                (8, Some(6.0 / 7.0), Some(0.75), Some(0.8)),
                (4, Some(0.6), Some(0.75), Some(2.0 / 3.0)),
                (0, None, None, None),
            ]
        );
    }
}
