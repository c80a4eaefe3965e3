//! `paceline gpu usage`: the summary of a recording, as a job's tracker would have told it.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::{ArgMatches, value_parser};
use paceline_usage::files::write_beside;
use paceline_usage::{Lang, RecordingError, Replay, Report, Rules};

use crate::exit::{Exit, Failure};
use crate::flags::{finish, json, required, valued, whole};
use crate::usage::{self, lang};

/// What `paceline gpu usage` is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageArgs {
    /// The recording: CSV that a tracker wrote, or a sample as JSON on each line.
    pub recording: PathBuf,
    /// Utilisation from which a device counts as busy, in percent.
    pub busy_percent: u32,
    /// File for the picture.
    pub svg: Option<PathBuf>,
    /// Language; that of the locale if not given.
    pub lang: Option<Lang>,
    /// Print JSON.
    pub json: bool,
}

const HELP: &str = "\
A recording is what `paceline run --usage-csv FILE` wrote. Of a job that was cut off it is
FILE.part, and has everything up to then.

Exit codes: 0 it is summed up; 2 the recording cannot be used; 3 the picture cannot be
written.

Examples:
  Record a job, then ask again with another idea of what is busy:
    paceline run --nproc-per-node 2 --usage-csv job.csv ./my-program
    paceline gpu usage job.csv --busy-percent 50 --svg job.svg";

/// The command as clap knows it.
pub(super) fn command() -> clap::Command {
    clap::Command::new("usage")
        .about("Sum up a recording: how long all devices really worked at the same time")
        .after_help(HELP)
        .arg(
            clap::Arg::new("recording")
                .value_name("RECORDING")
                .value_parser(value_parser!(PathBuf))
                .required(true)
                .help("CSV of samples that a job's tracker wrote"),
        )
        .arg(
            valued("busy_percent", "PERCENT", whole(1..=100))
                .default_value("5")
                .help("Utilisation from which a device counts as busy"),
        )
        .arg(
            valued("svg", "FILE", value_parser!(PathBuf)).help("Draw utilisation over time as SVG"),
        )
        .arg(usage::lang_arg("the summary and the picture"))
        .arg(json())
}

/// What it was told.
pub(super) fn read(matches: &ArgMatches) -> UsageArgs {
    UsageArgs {
        recording: required(matches, "recording"),
        busy_percent: required::<u64>(matches, "busy_percent") as u32,
        svg: matches.get_one("svg").cloned(),
        lang: usage::read_lang(matches),
        json: matches.get_flag("json"),
    }
}

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
        write_beside(file, report.svg(lang).as_bytes()).map_err(|error| {
            let message = format!("{} cannot be written: {error}", file.display());
            Failure::new(Exit::Environment, message, None)
        })?;
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
