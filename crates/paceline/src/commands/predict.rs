//! `paceline predict`: the classes or numbers of new samples, as CSV.

use std::io::{self, Write};
use std::path::Path;

use paceline_cli::exit::{Exit, Failure, warn};
use paceline_cli::flags::finish;
use paceline_train::config::{Task, TrainConfig};
use paceline_train::{Answer, Prediction, Predictor, TrainError};
use paceline_usage::files::replace;

use super::train::{run_or_newest, settings_of};
use super::{Program, failed};
use crate::cli::PredictArgs;

/// Prints a line for each sample, or writes them to a file beside the wanted one that replaces it at the end.
///
/// *Errors*: no such run, or one of a language model; samples that cannot be read or do not fit it; a file that cannot be written.
pub(crate) fn run(program: &Program, args: &PredictArgs) -> Result<Exit, Failure> {
    let mut config = settings_of(program, run_or_newest(args.run.as_deref())?)?;
    if args.separator.is_some() {
        config.separator.clone_from(&args.separator);
        if config.task != Task::Csv {
            warn("--separator has no effect: the run's data is no table");
        }
    }
    let model = program.predictor()(&config, args.which);
    let model = model.map_err(|error| failed(None, &error))?;
    let Some(path) = &args.output else {
        let written = predict(&model, &config, &args.input, io::stdout().lock())?;
        return finish(written);
    };
    let mut failure = None;
    let written = replace(path, |file| {
        let written = predict(&model, &config, &args.input, file).map_err(|error| {
            failure = Some(error);
            io::Error::other("the predictions are incomplete")
        });
        written?
    });
    match failure {
        Some(failure) => Err(failure),
        None => (written.map(|()| Exit::Done)).map_err(|error| Failure::unwritten(path, &error)),
    }
}

/// Writes the predictions for all samples of a file.
///
/// *Errors*: samples that cannot be used. What went wrong in writing is returned by itself.
fn predict(
    model: &Predictor,
    config: &TrainConfig,
    input: &Path,
    to: impl Write,
) -> Result<io::Result<()>, Failure> {
    let mut to = csv::Writer::from_writer(to);
    let head = head(model);
    let (mut written, mut has_head) = (Ok(()), false);
    let predicted = model.predict(config, input, |prediction| {
        // Not before, so that nothing is written for a file that cannot be read.
        if !std::mem::replace(&mut has_head, true) {
            written = to.write_record(&head);
        }
        if written.is_ok() {
            written = to.write_record(cells(model, prediction));
        }
        written.is_ok()
    });
    if predicted.is_ok() && !has_head {
        written = to.write_record(&head);
    }
    let flushed = to.flush();
    let warnings = predicted.map_err(|error: TrainError| failed(None, &error))?;
    warnings.iter().for_each(|warning| warn(warning));
    Ok(written.map_err(unwritten).and(flushed))
}

/// What the writer below said: `io::Error::from` would hide that a reader has stopped early.
fn unwritten(error: csv::Error) -> io::Error {
    match error.into_kind() {
        csv::ErrorKind::Io(error) => error,
        kind => io::Error::other(format!("{kind:?}")),
    }
}

fn head(model: &Predictor) -> Vec<String> {
    let path = model.reads_files().then(|| "path".to_owned());
    let answer = match model.classes() {
        [] => vec!["prediction".to_owned()],
        classes => {
            let head = ["class".to_owned(), "probability".to_owned()];
            let names = classes.iter().map(|name| format!("p({name})"));
            head.into_iter().chain(names).collect()
        }
    };
    path.into_iter().chain(answer).collect()
}

fn cells(model: &Predictor, prediction: &Prediction) -> Vec<String> {
    let path = prediction.file.as_ref();
    let path = path.map(|path| path.to_string_lossy().into_owned());
    let answer = match &prediction.answer {
        Answer::Number(number) => vec![number.to_string()],
        Answer::Class {
            class,
            probabilities,
        } => {
            let best = [probabilities[*class]].into_iter();
            let all = best.chain(probabilities.iter().copied());
            let row = all.map(|probability| format!("{probability:.6}"));
            [model.classes()[*class].clone()]
                .into_iter()
                .chain(row)
                .collect()
        }
    };
    path.into_iter().chain(answer).collect()
}
