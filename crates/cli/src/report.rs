//! `paceline report`: a page about runs.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use paceline_report::{RUNS_MAX, ReportError, page, runs_below};
use paceline_usage::files::write_beside;
use paceline_words::Lang;

use crate::exit::{Exit, Failure};
use crate::flags::{self, finish};
use crate::usage::{lang, langs};

/// The folder of runs that have no other.
pub(crate) const RUNS: &str = "runs";

/// The runs that a command shows.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct RunsArgs {
    /// Run directories, at most 8 [default: the one below runs/ that was written to last]
    #[arg(value_name = "RUN", num_args = 0..=RUNS_MAX)]
    pub runs: Vec<PathBuf>,
}

impl RunsArgs {
    /// Their folders, at least one.
    ///
    /// *Errors*: none was named, and none is below `runs/`.
    pub(crate) fn folders(&self) -> Result<Vec<PathBuf>, Failure> {
        match &self.runs[..] {
            [] => {
                let mut runs = runs_below(Path::new(RUNS)).map_err(failed)?;
                runs.truncate(1);
                Ok(runs)
            }
            runs => Ok(runs.to_vec()),
        }
    }
}

/// The failure for a run that cannot be shown.
pub(crate) fn failed(error: ReportError) -> Failure {
    let exit = match error {
        ReportError::NoRun { .. } | ReportError::NoRuns { .. } => Exit::Usage,
        ReportError::File { .. } => Exit::Environment,
    };
    let hint = error.hint();
    Failure::new(exit, error, hint)
}

/// What `paceline report` is told.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct ReportArgs {
    /// What the page is about.
    #[command(flatten)]
    pub runs: RunsArgs,
    /// File to write [default: report.html in the run directory, or here for several runs]
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Language of the page [default: the locale's, else en]
    #[arg(long, value_name = "LANG", value_parser = langs())]
    pub lang: Option<Lang>,
}

const EXAMPLES: &str = "\
The page is one HTML file without scripts, for any browser, without a network: curves of loss,
accuracy, throughput and waits, what each rank did with its time, incidents and settings. A
running job has one too.

Examples:
  paceline report
  paceline report runs/wine --lang ko
  paceline report runs/one-rank runs/two-ranks --output compared.html";

/// The command as clap knows it.
#[must_use]
pub fn command() -> clap::Command {
    flags::command::<ReportArgs>("report")
        .about("Write a page about a run, or one that compares several")
        .after_help(EXAMPLES)
}

/// Writes the page, and prints where it is.
///
/// *Errors*: a folder without a run; files that cannot be read or written.
pub(crate) fn run(args: &ReportArgs) -> Result<Exit, Failure> {
    let runs = args.runs.folders()?;
    let html = page(&runs, lang(args.lang)).map_err(failed)?;
    let path = args.output.clone().unwrap_or_else(|| match &runs[..] {
        [run] => run.join("report.html"),
        _ => PathBuf::from("report.html"),
    });
    write_beside(&path, html.as_bytes()).map_err(|error| Failure::unwritten(&path, &error))?;
    finish(writeln!(io::stdout(), "{}", path.display()))
}
