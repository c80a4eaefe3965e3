//! `paceline doctor`: checks for problems before a job, and explains one that runs or is over.

mod check;
mod flight;
mod job;

use std::path::PathBuf;

use clap::builder::ValueParser;
use clap::{Arg, ArgMatches, value_parser};
use paceline_words::Lang;

use crate::exit::{Exit, Failure};
use crate::flags::{json, valued};
use crate::usage::{langs, report_lang};

pub use check::CheckArgs;
pub use job::Subject;

/// The command line of `paceline doctor`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DoctorArgs {
    /// The job that is looked at.
    pub subject: Option<Subject>,
    /// Folder of the flight records; without it and a job, the checks before a job.
    pub flight: Option<PathBuf>,
    /// The job that is to begin.
    pub check: CheckArgs,
    /// Language of the report.
    pub lang: Option<Lang>,
    /// Print JSON.
    pub json: bool,
}

const EXAMPLES: &str = "\
With RUN or --pid it looks at a job that runs or is over, and says whether it waits forever,
works on some devices only, is not in step, slow, or ended early, why, and what to do.

Without them and --flight it looks at this machine: cores, memory, limits, disk, network, ports,
variables, and what an earlier job has left. With several nodes the same command runs
on each of them; they meet, and each tries to reach every address of every other.
Nothing is changed.

Ranks leave flight records when a job fails that was started with
`paceline run --flight-dir DIR`, or with PACELINE_FLIGHT_DIR set. Records of several
hosts belong into one folder; records of ranks may be missing.

Exit codes: 0 nothing wrong was found, or only warnings; 1 a fault was found; 2 wrong
usage, or no record can be read; 3 this machine does not let it look; 4 the other nodes
did not come in time.

Examples:
  Look before eight ranks are started here:
    paceline doctor --nproc-per-node 8
  Look on two nodes, with the same command on each:
    export PACELINE_JOB_TOKEN=...   # once: openssl rand -hex 32
    paceline doctor --nproc-per-node 8 --nnodes 2 --rdzv-endpoint node1
  See what is the matter with a job:
    paceline doctor runs/flowers
  Read what a failed job has left:
    paceline run --nproc-per-node 4 --flight-dir flight ./my-program
    paceline doctor --flight flight";

/// The command as clap knows it.
#[must_use]
pub fn command() -> clap::Command {
    let command = clap::Command::new("doctor")
        .about("Check for problems before a job, or explain one that runs or is over")
        .after_help(EXAMPLES)
        .arg(
            Arg::new("run")
                .value_name("RUN")
                .value_parser(value_parser!(PathBuf))
                .conflicts_with_all(check::names().chain(["flight", "pid"]))
                .help("Run directory of a job that runs or is over"),
        )
        .arg(
            valued("pid", "PID", value_parser!(u32).range(1..))
                .conflicts_with_all(check::names().chain(["flight"]))
                .help("A rank or the launcher of a job that runs on this machine"),
        )
        .arg(
            valued("flight", "DIR", value_parser!(PathBuf))
                .conflicts_with_all(check::names())
                .help("Read the flight records in this folder, of a job that failed"),
        )
        .arg(
            valued("lang", "LANG", ValueParser::new(langs()))
                .help("Language of the report [default: the locale's, else en]"),
        )
        .arg(json());
    check::add_to(command)
}

/// Reads the arguments of a command line.
#[must_use]
pub fn read(matches: &ArgMatches) -> DoctorArgs {
    let run = matches.get_one("run").cloned().map(Subject::Run);
    let pid = matches.get_one("pid").copied().map(Subject::Pid);
    DoctorArgs {
        subject: run.or(pid),
        flight: matches.get_one("flight").cloned(),
        check: check::read(matches),
        lang: matches.get_one("lang").copied(),
        json: matches.get_flag("json"),
    }
}

/// Looks, or reads, and prints what it comes to.
///
/// *Errors*: what kept it from that.
pub(crate) fn run(args: &DoctorArgs) -> Result<Exit, Failure> {
    let lang = report_lang(args.lang, args.json);
    match (&args.subject, &args.flight) {
        (Some(subject), _) => job::explain(subject, lang, args.json),
        (None, Some(dir)) => flight::read(dir, lang, args.json),
        (None, None) => check::check(&args.check, lang, args.json),
    }
}
