//! `paceline bench`: measures the operations between ranks. Here is its command line.

mod host;
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

use std::time::Duration;

use clap::builder::{Resettable, ValueParser};
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, value_parser};
use paceline_collective::{DType, Override, PlanError, ReduceOp, Transport};

use self::measurement::{Amount, ITERATIONS_MAX, Memory, REDUCTIONS, Settings, TRANSPORTS};
use self::op::Op;
use crate::flags::{mistake, one_of, option, required, valued};
use crate::run::{self, Processes};

pub(crate) use self::ranks::{bench, rank};

/// The command line of `paceline bench` and of each of its ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct BenchArgs {
    /// What to measure, and how.
    pub(crate) settings: Settings,
    /// How many ranks to start; two if not given.
    pub(crate) processes: Option<Processes>,
    /// How bytes travel; the group's own choice if not given.
    pub(crate) transport: Option<Transport>,
    /// The algorithms to ask for, as in `PACELINE_ALGORITHM`; the group's own choice if not given.
    pub(crate) algorithm: Option<String>,
    /// Print JSON lines.
    pub(crate) json: bool,
}

/// Names of the options that say how much to measure: with a list of sizes there is no range.
const RANGE: [&str; 3] = ["min_bytes", "max_bytes", "factor"];

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
    clap::Command::new(name)
        .arg(
            Arg::new("operations")
                .value_name("OPERATIONS")
                .num_args(0..)
                .value_parser(one_of(Op::ALL, |op| op.name().into()))
                .help("What to measure, one table after the other [default: all-reduce]"),
        )
        .arg(
            run::shared("nproc_per_node")
                .default_value(Resettable::Reset)
                .help("Ranks to start; auto is one per core [default: 2]"),
        )
        .arg(
            chosen("transport", &TRANSPORTS, |one| one.name().into()).help("How bytes travel [default: auto]"),
        )
        .args(size_args())
        .arg(
            chosen("dtype", &DType::ALL, |dtype| dtype.to_string())
                .default_value("f32")
                .help("Type of the elements"),
        )
        .arg(
            chosen("reduction", &REDUCTIONS, |op| op.to_string())
                .default_value("sum")
                .help("How operations that reduce combine"),
        )
        .arg(
            valued("root", "RANK", value_parser!(u64))
                .default_value("0")
                .help("The root of operations that have one"),
        )
        .arg(
            valued("algorithm", "NAME", algorithm).help(
                "Ask for an algorithm, as PACELINE_ALGORITHM does: ALGORITHM or OPERATION:ALGORITHM,... \
                 [default: auto]",
            ),
        )
        .arg(
            chosen("memory", &Memory::ALL, |memory| memory.name().into())
                .default_value("arena")
                .help("Work on the group's buffers (arena) or on ordinary memory"),
        )
        .args(amount())
        .arg(
            option("check")
                .action(ArgAction::SetTrue)
                .overrides_with("no_check")
                .help("Compare every element of the results with what it must be [default]"),
        )
        .arg(
            option("no_check")
                .action(ArgAction::SetTrue)
                .overrides_with("check")
                .help("Do not"),
        )
        .arg(
            option("json")
                .action(ArgAction::SetTrue)
                .help("Print one JSON object a line"),
        )
}

fn size_args() -> [Arg; 4] {
    let bytes = |text: &str| sizes::parse_bytes(text);
    [
        valued("min_bytes", "SIZE", bytes)
            .default_value("8")
            .help("Smallest size: bytes, or with KiB, MiB, GiB, kB, MB, GB"),
        valued("max_bytes", "SIZE", bytes)
            .default_value("64MiB")
            .help("Largest size"),
        valued("factor", "N", value_parser!(u64).range(2..=1 << 20))
            .default_value("8")
            .help("Each size is this many times the one before"),
        valued("sizes", "SIZE,...", bytes)
            .value_delimiter(',')
            .conflicts_with_all(RANGE)
            .help("These sizes, in place of a range"),
    ]
}

fn amount() -> [Arg; 3] {
    let count = |least: u64| value_parser!(u64).range(least..=ITERATIONS_MAX as u64);
    [
        valued("iterations", "N", count(1))
            .conflicts_with("seconds")
            .help("Calls of each size that count"),
        valued("seconds", "S", seconds)
            .default_value("0.5")
            .help("As many calls of each size as last about this long"),
        valued("warmup", "N", count(0))
            .default_value("5")
            .help("Calls of each size before those that count"),
    ]
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok();
    seconds
        .filter(|seconds| (0.001..=3600.0).contains(seconds))
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "expected seconds from 0.001 to 3600".into())
}

/// The text is what the ranks read again.
fn algorithm(text: &str) -> Result<String, PlanError> {
    Override::parse(text).map(|_| text.to_owned())
}

/// An option whose value is one of a few names.
fn chosen<T: Copy + Send + Sync + 'static, const N: usize>(
    name: &'static str,
    all: &'static [T; N],
    word: fn(T) -> String,
) -> Arg {
    valued(name, "NAME", ValueParser::new(one_of(all, word)))
}

pub(crate) fn read(matches: &ArgMatches) -> Result<BenchArgs, clap::Error> {
    let ops: Vec<Op> = matches
        .get_many("operations")
        .into_iter()
        .flatten()
        .copied()
        .collect();
    let amount = match matches.get_one::<u64>("iterations") {
        Some(iterations) => Amount::Iterations(*iterations as usize),
        None => Amount::Time(required(matches, "seconds")),
    };
    let defaults = Settings::default();
    let settings = Settings {
        ops: if ops.is_empty() { defaults.ops } else { ops },
        sizes: read_sizes(matches)?,
        dtype: required::<DType>(matches, "dtype"),
        reduction: required::<ReduceOp>(matches, "reduction"),
        root: required::<u64>(matches, "root") as usize,
        memory: required(matches, "memory"),
        amount,
        warmup: required::<u64>(matches, "warmup") as usize,
        check: !matches.get_flag("no_check"),
        stream_bytes: defaults.stream_bytes,
    };
    Ok(BenchArgs {
        settings,
        processes: matches.get_one("nproc_per_node").copied(),
        transport: matches.get_one("transport").copied(),
        algorithm: matches.get_one("algorithm").cloned(),
        json: matches.get_flag("json"),
    })
}

fn read_sizes(matches: &ArgMatches) -> Result<Vec<usize>, clap::Error> {
    if let Some(list) = matches.get_many("sizes") {
        return Ok(list.copied().collect());
    }
    let (min, max) = (
        required(matches, "min_bytes"),
        required(matches, "max_bytes"),
    );
    let sizes = sizes::sizes(min, max, required::<u64>(matches, "factor") as usize);
    if sizes.is_empty() {
        let message = format!("no size is at least {min} and at most {max} bytes");
        return Err(mistake(command(), ErrorKind::ValueValidation, &message));
    }
    Ok(sizes)
}

#[cfg(test)]
mod tests;
