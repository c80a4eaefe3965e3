//! `paceline bench`: measures the operations between ranks. Here is its command line.

mod measurement;
mod op;
mod quantile;
mod ranks;
mod record;
mod samples;
mod shape;
mod sizes;
mod stream;
mod table;
mod timing;
mod turn;

use std::ops::RangeInclusive;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use clap::error::ErrorKind;
use clap::{ArgMatches, Args};
use paceline_collective::{Override, PlanError, Transport};

use self::measurement::{Amount, ITERATIONS_MAX, Settings, TRANSPORTS};
use crate::flags::{self, fractions, mistake, one_of, usual};
use crate::run::Processes;

pub(crate) use self::ranks::{bench, rank};

/// The command line of `paceline bench` and of each of its ranks.
#[derive(Clone, Debug, PartialEq, Args)]
pub struct BenchArgs {
    /// Ranks to start; auto is one per core [default: 2]
    #[arg(long = "nproc-per-node", value_name = "N|auto|gpu|cpu", value_parser = Processes::parse)]
    pub(crate) processes: Option<Processes>,
    /// How bytes travel [default: auto]
    #[arg(long, value_name = "NAME", value_parser = one_of(&TRANSPORTS, |one| one.name().into()))]
    pub(crate) transport: Option<Transport>,
    /// What to measure, and how.
    #[command(flatten)]
    pub(crate) settings: Settings,
    /// Ask for an algorithm, as PACELINE_ALGORITHM does: ALGORITHM or OPERATION:ALGORITHM,... [default: auto]
    #[arg(long, value_name = "NAME", value_parser = algorithm)]
    pub(crate) algorithm: Option<String>,
    /// Print one JSON object a line
    #[arg(long)]
    pub(crate) json: bool,
}

/// How much to measure, and how closely: with a list of sizes there is no range, and with a number of calls no time.
#[derive(Args)]
struct Extent {
    /// Smallest size: bytes, or with KiB, MiB, GiB, kB, MB, GB
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_bytes, default_value = "8")]
    min_bytes: usize,
    /// Largest size
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_bytes, default_value = "64MiB")]
    max_bytes: usize,
    /// Each size is this many times the one before
    #[arg(long, value_name = "N", value_parser = count(2..=1 << 20), default_value = "8")]
    factor: usize,
    /// These sizes, in place of a range
    #[arg(long, value_name = "SIZE,...", value_parser = sizes::parse_bytes, value_delimiter = ',')]
    #[arg(conflicts_with_all = ["min_bytes", "max_bytes", "factor"])]
    sizes: Vec<usize>,
    /// Calls of each size that count
    #[arg(long, value_name = "N", value_parser = count(1..=ITERATIONS_MAX as u64), conflicts_with = "seconds")]
    iterations: Option<usize>,
    /// As many calls of each size as last about this long
    #[arg(long, value_name = "S", value_parser = fractions(0.001..=3600.0), default_value = "0.5")]
    seconds: Duration,
    /// Compare every element of the results with what it must be [default]
    #[arg(id = "check", long = "check", overrides_with = "no_check")]
    _check: bool,
}

const EXAMPLES: &str = "\
Sizes, bandwidths and their factors are those of nccl-tests: the size is that of a rank's
longest buffer, and a row's times are those of the slowest rank. The last line tells how
fast the same cores read and write memory, measured in the same run.

As a rank of a job that `paceline run`, torchrun or Slurm started, it joins that job's
ranks in place of starting its own.

Examples:
  All-reduce on two ranks over shared memory, 8 B to 64 MiB:
    paceline bench --transport shm
  Two operations on four ranks over TCP, one size:
    paceline bench all-gather reduce-scatter --nproc-per-node 4 --transport tcp --sizes 4MiB
  Over MPI between hosts, with its own launcher:
    mpirun -n 8 paceline bench --transport mpi
  On two hosts, on each of them (N is 0 on the first, 1 on the other):
    torchrun --nnodes 2 --node-rank N --nproc-per-node 4 --master-addr HOST --no-python paceline bench";

pub(crate) fn command() -> clap::Command {
    shared("bench")
        .about("Measure the operations between ranks, and the memory they go through")
        .after_help(EXAMPLES)
}

/// One rank of a measurement; started by `paceline bench`, with its own arguments.
pub(crate) fn rank_command() -> clap::Command {
    shared("bench-rank")
        .about("Be one rank of a measurement; started by `paceline bench`")
        .hide(true)
}

fn shared(name: &'static str) -> clap::Command {
    Extent::augment_args(BenchArgs::augment_args(clap::Command::new(name))).mut_args(usual)
}

fn count(range: RangeInclusive<u64>) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(range)
}

/// The text is what the ranks read again.
fn algorithm(text: &str) -> Result<String, PlanError> {
    Override::parse(text).map(|_| text.to_owned())
}

pub(crate) fn read(matches: &ArgMatches) -> Result<BenchArgs, clap::Error> {
    let extent: Extent = flags::read(matches);
    let mut args: BenchArgs = flags::read(matches);
    args.settings.amount = match extent.iterations {
        Some(iterations) => Amount::Iterations(iterations),
        None => Amount::Time(extent.seconds),
    };
    let (min, max) = (extent.min_bytes, extent.max_bytes);
    args.settings.sizes = match extent.sizes.is_empty() {
        true => sizes::sizes(min, max, extent.factor),
        false => extent.sizes,
    };
    if args.settings.sizes.is_empty() {
        let message = format!("no size is at least {min} and at most {max} bytes");
        return Err(mistake(command(), ErrorKind::ValueValidation, &message));
    }
    Ok(args)
}

#[cfg(test)]
mod tests;
