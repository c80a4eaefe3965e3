//! `paceline report`: a page about runs.

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, value_parser};
use paceline_cli::flags::valued;
use paceline_report::RUNS_MAX;
use paceline_usage::Lang;

/// The command line of `paceline report`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReportArgs {
    /// The run directories; none for the newest run.
    pub(crate) runs: Vec<PathBuf>,
    /// The file to write.
    pub(crate) output: Option<PathBuf>,
    /// The language; `None` for that of the locale.
    pub(crate) lang: Option<Lang>,
}

const EXAMPLES: &str = "\
The page is one HTML file without scripts, for any browser, without a network: curves of loss,
accuracy, throughput and waits, what each rank did with its time, incidents and settings. A
running job has one too.

Examples:
  paceline report
  paceline report runs/wine --lang ko
  paceline report runs/one-rank runs/two-ranks --output compared.html";

pub(super) fn command() -> clap::Command {
    clap::Command::new("report")
        .about("Write a page about a run, or one that compares several")
        .after_help(EXAMPLES)
        .arg(
            Arg::new("runs")
                .value_name("RUN")
                .value_parser(value_parser!(PathBuf))
                .action(ArgAction::Append)
                .num_args(0..=RUNS_MAX)
                .help("Run directories, at most 8 [default: the newest below runs/ with a checkpoint]"),
        )
        .arg(valued("output", "FILE", value_parser!(PathBuf)).help(
            "File to write [default: report.html in the run directory, or here for several runs]",
        ))
        .arg(
            valued("lang", "LANG", Lang::NAMES)
                .help("Language of the page [default: the locale's, else en]"),
        )
}

pub(super) fn read(matches: &ArgMatches) -> ReportArgs {
    let runs = matches.get_many("runs").into_iter().flatten();
    let lang: Option<&String> = matches.get_one("lang");
    ReportArgs {
        runs: runs.cloned().collect(),
        output: matches.get_one("output").cloned(),
        lang: lang.and_then(|lang| Lang::named(lang)),
    }
}
