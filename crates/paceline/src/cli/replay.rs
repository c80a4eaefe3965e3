//! `paceline replay`: a step of a run, computed again on one rank.

use std::path::PathBuf;

use clap::{Arg, ArgMatches, value_parser};
use paceline_cli::flags::{json, required, valued};
use paceline_train::Replay;

/// The command line of `paceline replay`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReplayArgs {
    /// The run directory.
    pub(crate) run: PathBuf,
    /// The step, and the rank to examine.
    pub(crate) replay: Replay,
    /// Where the data is here, if not where the run had it.
    pub(crate) data: Option<PathBuf>,
    /// Print JSON.
    pub(crate) json: bool,
}

const EXAMPLES: &str = "\
A run with --record N keeps a digest of each shard's gradient of each parameter for its last
N steps, in checkpoints/digests, a file for each rank on its own host. The replay starts from
the newest checkpoint before the step, or from the run's start, computes all shards on one
rank, with any number of threads, and compares the digests of each step on the way.

Exit codes: 0 same bits; 1 the first step, shard and tensors that differ are named, with the
rank that computed them; 2 nothing can be compared.

Examples:
  paceline replay runs/digits-20261121-113000 --step 57
  paceline replay runs/mine --step 57 --rank 3 --data here/train.csv --json";

pub(super) fn command() -> clap::Command {
    clap::Command::new("replay")
        .about("Compute a step of a run again on one rank, and compare it with what each rank computed")
        .after_help(EXAMPLES)
        .arg(
            Arg::new("run")
                .value_name("RUN")
                .value_parser(value_parser!(PathBuf))
                .required(true)
                .help("Run directory"),
        )
        .arg(
            valued("step", "S", value_parser!(u64).range(1..))
                .required(true)
                .help("Step, counted from 1 as in metrics.jsonl"),
        )
        .arg(
            valued("rank", "R", value_parser!(u64))
                .help("Compare only the shards that this rank computed [default: all]"),
        )
        .arg(
            valued("data", "PATH", value_parser!(PathBuf))
                .help("Training data on this machine [default: where the run read it]"),
        )
        .arg(json())
}

pub(super) fn read(matches: &ArgMatches) -> ReplayArgs {
    let rank: Option<&u64> = matches.get_one("rank");
    ReplayArgs {
        run: required(matches, "run"),
        replay: Replay {
            step: required(matches, "step"),
            rank: rank.map(|rank| *rank as usize),
        },
        data: matches.get_one("data").cloned(),
        json: matches.get_flag("json"),
    }
}
