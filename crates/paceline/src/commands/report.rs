//! `paceline report`: a page about runs.

use std::io::{self, Write};
use std::path::PathBuf;

use paceline_cli::exit::{Exit, Failure};
use paceline_cli::flags::finish;
use paceline_train::page;
use paceline_usage::Lang;
use paceline_usage::files::write_beside;

use super::failed;
use super::train::run_or_newest;
use crate::cli::ReportArgs;

/// Writes the page, and prints where it is.
///
/// *Errors*: a folder without a run; files that cannot be read or written.
pub(crate) fn run(args: &ReportArgs) -> Result<Exit, Failure> {
    let runs = match &args.runs[..] {
        [] => vec![run_or_newest(None)?.folder],
        runs => runs.to_vec(),
    };
    let lang = args
        .lang
        .unwrap_or_else(|| Lang::from_env(|name| std::env::var(name).ok()));
    let html = page(&runs, lang).map_err(|error| failed(None, &error))?;
    let path = args.output.clone().unwrap_or_else(|| match &runs[..] {
        [run] => run.join("report.html"),
        _ => PathBuf::from("report.html"),
    });
    write_beside(&path, html.as_bytes()).map_err(|error| Failure::unwritten(&path, &error))?;
    finish(writeln!(io::stdout(), "{}", path.display()))
}
