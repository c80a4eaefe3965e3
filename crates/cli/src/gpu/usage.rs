//! `paceline gpu usage`: the summary of a recording, as a job's tracker would have told it.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use paceline_usage::files::write_beside;
use paceline_usage::{RecordingError, Replay, Report, Rules};
use paceline_words::Lang;

use crate::exit::{Exit, Failure};
use crate::flags::{finish, whole};
use crate::usage::{self, lang};

/// What `paceline gpu usage` is told.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct UsageArgs {
    /// CSV of samples that a job's tracker wrote
    #[arg(value_name = "RECORDING")]
    pub recording: PathBuf,
    /// Utilisation from which a device counts as busy
    #[arg(long, value_name = "PERCENT", value_parser = whole::<u32>(1..=100), default_value = "5")]
    pub busy_percent: u32,
    /// Draw utilisation over time as SVG
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Language of the summary and the picture [default: the locale's, else en]
    #[arg(long, value_name = "LANG", value_parser = usage::langs())]
    pub lang: Option<Lang>,
    /// Print one JSON object with everything
    #[arg(long)]
    pub json: bool,
}

pub(super) const HELP: &str = "\
A recording is what `paceline run --usage-csv FILE` wrote. Of a job that was cut off it is
FILE.part, and has everything up to then.

Exit codes: 0 it is summed up; 2 the recording cannot be used; 3 the picture cannot be
written.

Examples:
  Record a job, then ask again with another idea of what is busy:
    paceline run --nproc-per-node 2 --usage-csv job.csv ./my-program
    paceline gpu usage job.csv --busy-percent 50 --svg job.svg";

/// Adds the recording up and prints what it comes to.
///
/// *Errors*: the file cannot be read or is no recording, or the picture cannot be written.
pub(super) fn run(args: &UsageArgs) -> Result<Exit, Failure> {
    let report = report(args).map_err(|error| {
        let message = format!("{}: {error}", args.recording.display());
        Failure::new(Exit::Usage, message, error.hint().map(str::to_owned))
    })?;
    let lang = lang(args.lang);
    if let Some(file) = &args.svg {
        write_beside(file, report.svg(lang).as_bytes())
            .map_err(|error| Failure::unwritten(file, &error))?;
    }
    let text = match args.json {
        true => report.json(),
        false => report.text(lang),
    };
    finish(io::stdout().lock().write_all(text.as_bytes()))
}

fn report(args: &UsageArgs) -> Result<Report, RecordingError> {
    let rules = Rules {
        busy_percent: args.busy_percent,
        ..Rules::default()
    };
    Replay::open(&args.recording)?.report(rules)
}
