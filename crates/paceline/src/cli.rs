//! The command line and its parsed form.

mod eval;
mod export;
mod generate;
mod indices;
mod ledger;
mod plan;
pub(crate) mod program;
mod replay;
mod tip;
mod train;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgAction, value_parser};
use paceline_cli::exit::{Exit, Failure};
use paceline_cli::flags::{option, required, valued};
use paceline_cli::{Command as Around, Stop, about};

use crate::commands::{self, Program};

pub(crate) use eval::{EvalArgs, PredictArgs};
pub(crate) use export::ExportArgs;
pub(crate) use generate::GenerateArgs;
pub(crate) use indices::IndicesArgs;
pub(crate) use ledger::LedgerArgs;
pub(crate) use plan::{PlanArgs, PlanRankArgs};
pub(crate) use replay::ReplayArgs;
pub(crate) use train::TrainArgs;

/// The parsed command.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Command {
    /// Train on the built-in tasks.
    Train(TrainArgs),
    /// Evaluate a trained model.
    Eval(EvalArgs),
    /// Classify new samples.
    Predict(PredictArgs),
    /// Write a trained model in a format of other programs.
    Export(ExportArgs),
    /// Write text with a trained language model.
    Generate(GenerateArgs),
    /// Say what layouts of a training cost.
    Plan(PlanArgs),
    /// Measure as one rank; started by `plan`, not by users.
    PlanRank(PlanRankArgs),
    /// A command around a job, such as starting it or finding out why it failed.
    Around(Around),
    /// Print the samples of a rank.
    Indices(IndicesArgs),
    /// Verify the ledger of a run.
    Ledger(LedgerArgs),
    /// Compute a step of a run again.
    Replay(ReplayArgs),
    /// Run as one rank of a training job; started by `train`, not by users.
    Worker(WorkerArgs),
}

impl Command {
    /// Does it.
    ///
    /// *Errors*: what kept it from being done.
    pub(crate) fn run(&self) -> Result<Exit, Failure> {
        match self {
            Self::Train(args) => commands::train::train(&Program::PACELINE, args),
            Self::Eval(args) => commands::eval::run(&Program::PACELINE, args),
            Self::Predict(args) => commands::predict::run(&Program::PACELINE, args),
            Self::Export(args) => commands::export::run(args),
            Self::Generate(args) => commands::generate::generate(args),
            Self::Plan(args) => commands::plan::plan(args),
            Self::PlanRank(args) => commands::plan::rank(args),
            Self::Around(command) => command.run(),
            Self::Indices(args) => commands::indices::indices(args),
            Self::Ledger(args) => commands::ledger::verify(args),
            Self::Replay(args) => commands::replay::run(args),
            Self::Worker(args) => commands::rank::worker(&Program::PACELINE, args),
        }
    }
}

/// The settings of a rank that its environment does not carry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WorkerArgs {
    /// The resolved settings of the job.
    pub(crate) config: PathBuf,
    /// Whether rank 0 reports in JSON.
    pub(crate) json: bool,
}

/// Reads a command line, the program's name first.
///
/// *Errors*: help or the version to print, or the usage error.
pub(crate) fn parse<I>(args: I) -> Result<Command, Stop>
where
    I: IntoIterator<Item: Into<OsString> + Clone>,
{
    let words: Vec<OsString> = args.into_iter().map(Into::into).collect();
    if let Some(page) = about::page(&program(), &words) {
        return Ok(Command::Around(Around::Print(page)));
    }
    let stop = |error| {
        let tip = tip::of(&error, &words);
        Stop::new(error, tip)
    };
    let matches = program().try_get_matches_from(&words).map_err(stop)?;
    let Some((name, matches)) = matches.subcommand() else {
        unreachable!("clap requires a subcommand");
    };
    match name {
        "train" => Ok(match about::asked(&program(), matches) {
            Some(text) => Command::Around(Around::Print(text)),
            None => Command::Train(train::read(matches)),
        }),
        "plan" => Ok(Command::Plan(plan::read(matches))),
        "plan-rank" => Ok(Command::PlanRank(plan::read_rank(matches))),
        "eval" => Ok(Command::Eval(eval::read_eval(matches))),
        "predict" => Ok(Command::Predict(eval::read_predict(matches))),
        "export" => Ok(Command::Export(export::read(matches))),
        "generate" => Ok(Command::Generate(generate::read(matches))),
        "indices" => indices::read(matches).map(Command::Indices).map_err(stop),
        "ledger" => Ok(Command::Ledger(ledger::read(matches))),
        "replay" => Ok(Command::Replay(replay::read(matches))),
        "worker" => Ok(Command::Worker(read_worker(matches))),
        other => match Around::read(&program(), other, matches) {
            Some(command) => command.map(Command::Around).map_err(stop),
            None => unreachable!("clap knows no subcommand {other}"),
        },
    }
}

const EXAMPLES: &str = "\
Examples:
  Learn the built-in digits, with one rank per core, at most two:
    paceline train
  Learn from a CSV file whose column `label` holds the classes:
    paceline train --data wine.csv --epochs 30
  Look at the run while it trains:
    paceline watch
  See which classes it confuses, and classify new rows:
    paceline eval
    paceline predict new.csv
  Start four ranks of your own program:
    paceline run --nproc-per-node 4 ./my-program
  See whether it is faster on four ranks than on one:
    paceline compare 1 4 -- ./my-program

`paceline help COMMAND` tells more.";

fn program() -> clap::Command {
    let program = clap::Command::new("paceline")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Data-parallel training: the same bits on any number of ranks")
        .after_help(EXAMPLES)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(train::command())
        .subcommands(eval::commands("paceline"))
        .subcommand(export::command())
        .subcommand(generate::command())
        .subcommand(plan::command())
        .subcommand(plan::rank_command())
        .subcommands(paceline_cli::commands())
        .mut_subcommand("compare", train::add_to_compare)
        .subcommand(indices::command())
        .subcommand(ledger::command())
        .subcommand(replay::command())
        .subcommand(worker_command());
    about::complete(program)
}

fn worker_command() -> clap::Command {
    clap::Command::new("worker")
        .about("Run as one rank of a training job; started by `paceline train`")
        .hide(true)
        .arg(valued("config", "FILE", value_parser!(PathBuf)).required(true))
        .arg(option("json").action(ArgAction::SetTrue))
}

fn read_worker(matches: &clap::ArgMatches) -> WorkerArgs {
    WorkerArgs {
        config: required(matches, "config"),
        json: matches.get_flag("json"),
    }
}

#[cfg(test)]
mod pages;
#[cfg(test)]
mod tests;
