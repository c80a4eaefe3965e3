//! `paceline eval`: how good a trained model is.

use std::io::{self, Write};

use paceline_cli::exit::{Exit, Failure, warn};
use paceline_cli::flags::finish;
use paceline_gpu::columns;
use paceline_train::config::Task;
use paceline_train::{
    ClassFigures, Deviations, Evaluation, Which, class_table, eval, most_confused, printable,
};
use paceline_words::counted;

use super::train::{run_or_newest, settings_of};
use super::{Program, failed};
use crate::cli::EvalArgs;

/// Most classes in a confusion matrix; with more, the pairs confused most often are listed.
const MATRIX_MAX: usize = 20;

/// Most pairs of classes listed.
const PAIRS_MAX: usize = 10;

/// Most classes listed with their figures, those of the lowest F1 first.
const CLASSES_MAX: usize = 100;

/// Prints the evaluation.
///
/// *Errors*: no such run, or one without a checkpoint; data that cannot be used.
pub(crate) fn run(program: &Program, args: &EvalArgs) -> Result<Exit, Failure> {
    let mut config = settings_of(program, run_or_newest(args.run.as_deref())?)?;
    if args.label_column.is_some() {
        config.label_column.clone_from(&args.label_column);
    }
    if args.separator.is_some() {
        config.separator.clone_from(&args.separator);
    }
    if config.task != Task::Csv && (args.label_column.is_some() || args.separator.is_some()) {
        warn("--label-column and --separator have no effect: the run's data is no table");
    }
    let data = args.data.as_deref();
    let evaluation = eval(&config, data, args.which, program.predictor());
    let evaluation = evaluation.map_err(|error| failed(None, &error))?;
    evaluation.warnings.iter().for_each(|warning| warn(warning));
    let text = match args.json {
        true => serde_json::to_string(&evaluation).expect("plain data encodes") + "\n",
        false => report(&evaluation, args.which),
    };
    finish(io::stdout().lock().write_all(text.as_bytes()))
}

fn report(evaluation: &Evaluation, which: Which) -> String {
    let Evaluation {
        checkpoint,
        data,
        predictions,
        loss,
        perplexity,
        accuracy,
        deviations,
        classes,
        ..
    } = evaluation;
    let noun = match perplexity {
        None => "sample",
        Some(_) => "token",
    };
    let perplexity = perplexity.map(|value| format!("   perplexity {value:.2}"));
    let accuracy = accuracy.map(|share| format!("   accuracy {:.2} %", share * 100.0));
    let deviations = deviations.map(|Deviations { mae, rmse, r2 }| {
        format!("   mae {mae:.4}   rmse {rmse:.4}   r2 {r2:.4}")
    });
    let figures: String = [perplexity, accuracy, deviations]
        .into_iter()
        .flatten()
        .collect();
    let mut text = format!(
        "model     {checkpoint}{}\ndata      {data}: {}\nresult    loss {loss:.4}{figures}\n",
        which.note(),
        counted(*predictions as usize, noun),
    );
    if !classes.is_empty() {
        text += &format!("\n{}\n{}", of_classes(classes), confusion(evaluation));
    }
    text
}

/// A line for each class.
fn of_classes(classes: &[ClassFigures]) -> String {
    let mut text = class_table(classes, CLASSES_MAX);
    if classes.len() > CLASSES_MAX {
        text += &format!(
            "the {CLASSES_MAX} worst of {} classes; --json has all\n",
            classes.len()
        );
    }
    text
}

/// The confusion matrix, or what is confused most often.
fn confusion(evaluation: &Evaluation) -> String {
    let (classes, pairs) = (&evaluation.classes, &evaluation.confusion);
    if classes.len() > MATRIX_MAX {
        let lines = most_confused(classes, pairs, PAIRS_MAX).into_iter();
        let lines = lines.map(|line| format!("  {line}\n"));
        return format!("confused most often\n{}", lines.collect::<String>());
    }
    let mut head: Vec<String> = classes.iter().map(|class| printable(&class.name)).collect();
    head.push("class".into());
    let mut rows = vec![head];
    for (of, class) in (0..).zip(classes) {
        let count = |taken_for| {
            let found = pairs
                .iter()
                .find(|pair| (pair.of, pair.taken_for) == (of, taken_for));
            found.map_or(".".into(), |pair| pair.count.to_string())
        };
        let mut row: Vec<String> = (0..classes.len() as u32).map(count).collect();
        row.push(printable(&class.name));
        rows.push(row);
    }
    format!(
        "a row for the samples of each class, a column for what they were taken for\n{}",
        columns::with_numbers(classes.len(), &rows)
    )
}
