//! `paceline indices`: the samples that a rank reads.

use clap::error::ErrorKind;
use clap::{ArgAction, ArgMatches, value_parser};
use paceline_cli::flags::{mistake, option, required, valued};

/// The command line of `paceline indices`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IndicesArgs {
    /// Samples of the data set.
    pub(crate) len: usize,
    /// Ranks that share it.
    pub(crate) world: usize,
    /// The rank to print, below `world`.
    pub(crate) rank: usize,
    /// Seed of the shuffle.
    pub(crate) seed: u64,
    /// Epoch, which changes the shuffle.
    pub(crate) epoch: u64,
    /// Whether to shuffle.
    pub(crate) shuffle: bool,
    /// Whether to drop samples instead of repeating some.
    pub(crate) drop_last: bool,
    /// Samples of a step of all ranks; `None` for the sampler without steps.
    pub(crate) global_batch: Option<usize>,
    /// Print JSON.
    pub(crate) json: bool,
}

/// Maximum number of samples: one index each must fit into memory.
const LEN_MAX: u64 = 1 << 32;

const EXAMPLES: &str = "\
The indices are those of PyTorch's DistributedSampler, one per line. For a job with
shards, the world is the number of shards and the rank a shard. With --global-batch they are
those of `paceline train`, which repeats no sample, and with --drop-last leaves out the end of an
epoch that does not fill a step.

Examples:
  paceline indices --len 11 --world 4 --rank 0 --seed 3 --epoch 2
  paceline indices --len 50000 --world 8 --rank 7 --json
  paceline indices --len 1437 --world 4 --rank 0 --global-batch 64 --drop-last";

pub(super) fn command() -> clap::Command {
    let count = |max: u64| value_parser!(u64).range(1..=max);
    clap::Command::new("indices")
        .about("Print the samples that a rank reads in an epoch")
        .after_help(EXAMPLES)
        .arg(
            valued("len", "N", count(LEN_MAX))
                .required(true)
                .help("Samples of the data set"),
        )
        .arg(
            valued("world", "N", count(LEN_MAX))
                .required(true)
                .help("Ranks that share it"),
        )
        .arg(
            valued("rank", "N", value_parser!(u64))
                .required(true)
                .help("The rank to print, from 0"),
        )
        .arg(
            valued("seed", "N", value_parser!(u64))
                .default_value("0")
                .help("Seed of the shuffle"),
        )
        .arg(
            valued("epoch", "N", value_parser!(u64))
                .default_value("0")
                .help("Epoch, from 0; each has its own order"),
        )
        .arg(
            valued("global_batch", "N", count(LEN_MAX))
                .help("Samples of a step of all ranks: print what `paceline train` reads"),
        )
        .arg(switch(
            "drop_last",
            "Drop samples that do not divide evenly, instead of repeating some",
        ))
        .arg(switch("no_shuffle", "Keep the order of the data set"))
        .arg(switch(
            "json",
            "Print one JSON object: the options and the indices",
        ))
}

fn switch(name: &'static str, help: &'static str) -> clap::Arg {
    option(name).action(ArgAction::SetTrue).help(help)
}

pub(super) fn read(matches: &ArgMatches) -> Result<IndicesArgs, clap::Error> {
    let number = |name| required::<u64>(matches, name);
    let (world, rank) = (number("world"), number("rank"));
    if rank >= world {
        let last = world - 1;
        let message = format!(
            "invalid value '{rank}' for '--rank <N>': a world of {world} has the ranks 0 to {last}"
        );
        return Err(mistake(command(), ErrorKind::ValueValidation, &message));
    }
    Ok(IndicesArgs {
        len: number("len") as usize,
        world: world as usize,
        rank: rank as usize,
        seed: number("seed"),
        epoch: number("epoch"),
        shuffle: !matches.get_flag("no_shuffle"),
        drop_last: matches.get_flag("drop_last"),
        global_batch: (matches.get_one::<u64>("global_batch")).map(|batch| *batch as usize),
        json: matches.get_flag("json"),
    })
}
