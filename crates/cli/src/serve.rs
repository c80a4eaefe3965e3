//! `paceline serve`: the pages of runs in a browser, kept up to date while they train.

mod access;
mod kept;
mod list;
mod pages;

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use paceline_report::runs_below;
use paceline_words::Lang;

use self::access::Access;
use self::pages::Pages;
use crate::exit::{Exit, Failure, note};
use crate::flags;
use crate::http::{self, Answer, Request};
use crate::report::{RUNS, failed};
use crate::usage::{lang, langs};

/// What `paceline serve` is told.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct ServeArgs {
    /// Folder of runs, or a run directory
    #[arg(value_name = "RUNS", default_value = RUNS)]
    pub runs: PathBuf,
    /// Where to listen; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:6500")]
    pub listen: SocketAddr,
    /// Language of the pages [default: the locale's, else en]
    #[arg(long, value_name = "LANG", value_parser = langs())]
    pub lang: Option<Lang>,
}

const EXAMPLES: &str = "\
The page of each run is that of `paceline report`; while the run trains, its parts are
replaced as it writes. Runs that are chosen in the list are compared on one page. Nothing is written, and nothing outside of the folder is read.

Only this machine can reach it, but any user of it, unless another address is given. Then
the address that is printed has a token, new at each start, without which nothing is shown.
The connection is not encrypted: over a network that others can read, use
`ssh -L 6500:127.0.0.1:6500 node1` in place of --listen.

Examples:
  paceline serve
  paceline serve /shared/runs --listen 0.0.0.0:6500";

/// The command as clap knows it.
#[must_use]
pub fn command() -> clap::Command {
    flags::command::<ServeArgs>("serve")
        .about("Show the pages of runs in a browser, live")
        .after_help(EXAMPLES)
}

/// Serves until SIGINT, SIGTERM or SIGHUP.
///
/// *Errors*: the folder cannot be read; the address cannot be had.
pub(crate) fn run(args: &ServeArgs) -> Result<Exit, Failure> {
    // A folder without a run may get one; one that is not there is a mistake.
    match runs_below(&args.runs) {
        Err(paceline_report::ReportError::NoRuns { .. }) if args.runs.is_dir() => {}
        found => {
            found.map_err(failed)?;
        }
    }
    let listener = http::listen(args.listen)?;
    let failed = |error| Failure::environment(format!("the server fails: {error}"));
    let stop = http::stop_signal().map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let access = Access::of(address)
        .map_err(|error| Failure::environment(format!("no token can be made: {error}")))?;
    let pages = Pages::new(args.runs.clone(), lang(args.lang));
    // The address is last, so that nothing is taken for a part of it.
    note(&format!("serving until Ctrl-C: {}", access.url(address)));
    let answer = |request: &Request<'_>| answer(&access, &pages, request);
    http::serve(listener, stop, answer).map_err(failed)?;
    Ok(Exit::Done)
}

fn answer(access: &Access, pages: &Pages, request: &Request<'_>) -> Answer {
    let refusal = access.refusal(request);
    refusal.unwrap_or_else(|| pages.answer(request))
}

#[cfg(test)]
mod tests;
