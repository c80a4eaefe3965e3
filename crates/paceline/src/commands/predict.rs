//! `paceline predict`: the classes of new samples, as CSV.

use std::io::{self, Write};
use std::path::Path;

use paceline_cli::exit::{Exit, Failure};
use paceline_cli::flags::finish;
use paceline_train::{Classifier, TrainError};
use paceline_usage::files::replace;

use super::failed;
use super::train::{run_or_newest, settings_of};
use crate::cli::PredictArgs;

/// Prints a line for each sample, or writes them to a file beside the wanted one that replaces it at the end.
///
/// *Errors*: no such run, or one without a classifier; samples that cannot be read or do not fit it; a file that cannot be written.
pub(crate) fn run(args: &PredictArgs) -> Result<Exit, Failure> {
    let run = settings_of(run_or_newest(args.run.as_deref())?)?.run_dir;
    let model = Classifier::of_run(&run, args.which).map_err(|error| failed(None, &error))?;
    let Some(path) = &args.output else {
        let written = predict(&model, &args.input, io::stdout().lock())?;
        return finish(written);
    };
    let mut failure = None;
    let written = replace(path, |file| {
        let written = predict(&model, &args.input, file).map_err(|error| {
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
fn predict(model: &Classifier, input: &Path, to: impl Write) -> Result<io::Result<()>, Failure> {
    let mut to = csv::Writer::from_writer(to);
    let names = model.classes().iter().map(|name| format!("p({name})"));
    let head = ["class".to_owned(), "probability".to_owned()];
    let path = model.reads_files().then(|| "path".to_owned());
    let head: Vec<String> = path.into_iter().chain(head).chain(names).collect();
    let (mut written, mut has_head) = (Ok(()), false);
    let predicted = model.predict(input, |prediction| {
        // Not before, so that nothing is written for a file that cannot be read.
        if !std::mem::replace(&mut has_head, true) {
            written = to.write_record(&head);
        }
        let class = &model.classes()[prediction.class];
        let best = prediction.probabilities[prediction.class];
        let probabilities = [best]
            .into_iter()
            .chain(prediction.probabilities.iter().copied());
        let row = probabilities.map(|probability| format!("{probability:.6}"));
        if written.is_ok() {
            let path = prediction.file.as_ref();
            let path = path.map(|path| path.to_string_lossy().into_owned());
            let cells = path.into_iter().chain([class.clone()]).chain(row);
            written = to.write_record(cells);
        }
        written.is_ok()
    });
    if predicted.is_ok() && !has_head {
        written = to.write_record(&head);
    }
    let flushed = to.flush();
    predicted.map_err(|error: TrainError| failed(None, &error))?;
    Ok(written.map_err(io::Error::from).and(flushed))
}
