//! `paceline ledger`: which samples the steps of a run used.

use std::path::PathBuf;

use clap::{Arg, ArgMatches, value_parser};
use paceline_cli::flags::{json, required, valued};

/// The command line of `paceline ledger verify`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LedgerArgs {
    /// The run directory, or a program's folder of checkpoints.
    pub(crate) run: PathBuf,
    /// Where to draw the timeline.
    pub(crate) svg: Option<PathBuf>,
    /// Print JSON.
    pub(crate) json: bool,
}

const EXAMPLES: &str = "\
Each committed step is a line of ledger.jsonl, beside the checkpoints: its epoch, its range
of samples, and a checksum of their indices. A resumed job adds from which step it went on,
so that steps done again count once. Each line has the checksum of the line before it; a
line that is missing, changed, repeated, moved or of another run is named. No data is
needed: the samples are dealt again from the recorded settings.

Exit codes: 0 every sample was used as the settings say; 1 it was not, or the ledger is
damaged; 2 there is no ledger; 3 the picture cannot be written.

Examples:
  paceline ledger verify runs/digits-20261121-113000
  paceline ledger verify runs/mine --svg timeline.svg";

pub(super) fn command() -> clap::Command {
    let verify = clap::Command::new("verify")
        .about("Prove that a run used every sample of every epoch once, over all kills and resumes")
        .after_help(EXAMPLES)
        .arg(
            Arg::new("run")
                .value_name("RUN")
                .value_parser(value_parser!(PathBuf))
                .required(true)
                .help("Run directory, or the folder of a program's checkpoints"),
        )
        .arg(
            valued("svg", "FILE", value_parser!(PathBuf))
                .help("Draw which rank computed which shards, and when, as SVG"),
        )
        .arg(json());
    clap::Command::new("ledger")
        .about("Check which samples the steps of a run used")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(verify)
}

pub(super) fn read(matches: &ArgMatches) -> LedgerArgs {
    let Some(("verify", matches)) = matches.subcommand() else {
        unreachable!("clap requires a subcommand");
    };
    LedgerArgs {
        run: required(matches, "run"),
        svg: matches.get_one("svg").cloned(),
        json: matches.get_flag("json"),
    }
}
