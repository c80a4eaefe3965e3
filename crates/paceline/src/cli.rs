//! The command line: what may be written on it, and what it comes to.

mod bench;
mod doctor;
mod indices;
mod logs;
mod nodes;
mod run;
mod train;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::ValueParser;
use clap::error::ErrorKind;
use clap::{Arg, ArgMatches, value_parser};

pub(crate) use bench::BenchArgs;
pub(crate) use doctor::DoctorArgs;
pub(crate) use indices::IndicesArgs;
pub(crate) use nodes::{Backend, NodesArgs};
pub(crate) use run::{Processes, RunArgs};
pub(crate) use train::TrainArgs;

use crate::exit::Exit;

/// What the command line asks for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Command {
    /// Train on the built-in tasks.
    Train(TrainArgs),
    /// Start any program as the ranks of a job.
    Run(RunArgs),
    /// Print the samples of a rank.
    Indices(IndicesArgs),
    /// Say what went wrong in a job.
    Doctor(DoctorArgs),
    /// Measure the operations between ranks.
    Bench(BenchArgs),
    /// Be one rank of a training job; started by `train`, not by people.
    Worker(WorkerArgs),
    /// Be one rank of a measurement; started by `bench`, not by people.
    BenchRank(BenchArgs),
}

/// What a rank of a training job is told besides its environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WorkerArgs {
    /// The resolved settings of the job.
    pub(crate) config: PathBuf,
}

/// Reads a command line, the program's name first.
///
/// - Errors: help or the version to print, or what is wrong.
pub(crate) fn parse<I>(args: I) -> Result<Command, Stop>
where
    I: IntoIterator<Item: Into<OsString> + Clone>,
{
    let matches = program().try_get_matches_from(args).map_err(Stop)?;
    let Some((name, matches)) = matches.subcommand() else {
        unreachable!("clap requires a subcommand");
    };
    match name {
        "train" => Ok(Command::Train(train::read(matches))),
        "run" => run::read(matches).map(Command::Run).map_err(Stop),
        "indices" => indices::read(matches).map(Command::Indices).map_err(Stop),
        "doctor" => Ok(Command::Doctor(doctor::read(matches))),
        "bench" => bench::read(matches).map(Command::Bench).map_err(Stop),
        "bench-rank" => bench::read(matches).map(Command::BenchRank).map_err(Stop),
        "worker" => Ok(Command::Worker(WorkerArgs {
            config: required(matches, "config"),
        })),
        other => unreachable!("clap knows no subcommand {other}"),
    }
}

/// A command line that ends the program: by asking for help or the version, or by a mistake.
#[derive(Debug)]
pub(crate) struct Stop(clap::Error);

impl Stop {
    /// How to end.
    #[must_use]
    pub(crate) fn exit(&self) -> Exit {
        if self.0.use_stderr() {
            Exit::Usage
        } else {
            Exit::Done
        }
    }

    /// Prints help and version on stdout, a mistake on stderr, and returns how to end.
    ///
    /// Coloured on a terminal only, and not with `NO_COLOR`.
    #[must_use]
    pub(crate) fn report(&self) -> Exit {
        // A closed pipe, as in `paceline --help | head`, is no failure.
        let _ = self.0.print();
        self.exit()
    }
}

const EXAMPLES: &str = "\
Examples:
  Learn the built-in digits, with one rank per core up to two:
    paceline train
  Learn from a CSV file whose column `label` holds the classes:
    paceline train --data wine.csv --epochs 30
  Start four ranks of a program of your own:
    paceline run --nproc-per-node 4 ./my-program

`paceline COMMAND --help` tells more.";

fn program() -> clap::Command {
    clap::Command::new("paceline")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Data-parallel training: the same bits on any number of ranks")
        .after_help(EXAMPLES)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .disable_help_subcommand(true)
        .subcommand(train::command())
        .subcommand(run::command())
        .subcommand(indices::command())
        .subcommand(doctor::command())
        .subcommand(bench::command())
        .subcommand(worker_command())
        .subcommand(bench::rank_command())
}

fn worker_command() -> clap::Command {
    clap::Command::new("worker")
        .about("Be one rank of a training job; started by `paceline train`")
        .hide(true)
        .arg(valued("config", "FILE", value_parser!(PathBuf)).required(true))
}

/// An option with a value, `--with-dashes` for the name `with_dashes`; underscores are understood too, as by torchrun.
fn option(name: &'static str) -> Arg {
    let arg = Arg::new(name);
    if name.contains('_') {
        arg.long(name.replace('_', "-")).alias(name)
    } else {
        arg.long(name)
    }
}

fn valued(name: &'static str, placeholder: &'static str, parser: impl Into<ValueParser>) -> Arg {
    option(name)
        .value_name(placeholder)
        .value_parser(parser.into())
}

/// A mistake in a command that clap does not know about, shown as clap shows its own.
fn mistake(command: clap::Command, kind: ErrorKind, message: &str) -> clap::Error {
    let name = format!("paceline {}", command.get_name());
    command.bin_name(name).error(kind, message)
}

fn required<T: Clone + Send + Sync + 'static>(matches: &ArgMatches, name: &str) -> T {
    matches
        .get_one::<T>(name)
        .cloned()
        .expect("clap requires the option or has its default")
}

#[cfg(test)]
mod tests;
