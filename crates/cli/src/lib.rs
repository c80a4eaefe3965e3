//! The commands around a job: what may be written on their command lines, and what they do.
//!
//! [`commands`] are mounted by two programs: `paceline`, which also trains, and `paceline-launcher`, which does not know
//! Burn and builds in seconds. [`Command::read`] takes what clap made of one, [`Command::run`] does it:
//!
//! ```
//! let program = clap::Command::new("mine").subcommands(paceline_cli::commands());
//! let matches = program.clone().get_matches_from(["mine", "run", "--nproc-per-node", "2", "true"]);
//! let (name, matches) = matches.subcommand().unwrap();
//! let command = paceline_cli::Command::read(&program, name, matches).unwrap().unwrap();
//! assert!(matches!(command, paceline_cli::Command::Run(_)));
//! ```

#![warn(clippy::print_stderr)] // it panics where the terminal is gone

pub mod about;
mod activity;
mod bench;
pub mod chaos;
pub mod compare;
pub mod doctor;
pub mod exit;
pub mod flags;
pub mod gpu;
mod http;
pub mod job;
mod jobs;
pub mod report;
pub mod run;
pub mod serve;
mod stop;
pub mod submit;
mod terminal;
pub mod usage;
mod variables;
pub mod watch;

use std::io::Write;
use std::process::ExitCode;

use clap::ArgMatches;

use bench::BenchArgs;
use chaos::ChaosArgs;
use compare::CompareArgs;
use doctor::DoctorArgs;
use exit::{Exit, Failure};
use gpu::GpuArgs;
use report::ReportArgs;
use run::RunArgs;
use serve::ServeArgs;
use submit::SubmitArgs;
use watch::WatchArgs;

pub use stop::Stop;

/// What a command line asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Start any program as the ranks of a job.
    Run(Box<RunArgs>),
    /// Be the launcher of one host; started by `run`, not by people. Without arguments it reads what to do.
    HostAgent(Option<Box<RunArgs>>),
    /// Host a store for the launchers of a job; started by the driver of a Ray job, not by people.
    StoreServer,
    /// Time a program on several numbers of ranks.
    Compare(Box<CompareArgs>),
    /// Disturb a job and see whether it survives.
    Chaos(Box<ChaosArgs>),
    /// Hand a job to a scheduler.
    Submit(Box<SubmitArgs>),
    /// Check for problems before a job, or explain a failed one.
    Doctor(Box<DoctorArgs>),
    /// Show the devices.
    Gpu(Box<GpuArgs>),
    /// Write a page about runs.
    Report(Box<ReportArgs>),
    /// Watch runs as they train.
    Watch(Box<WatchArgs>),
    /// Show runs in a browser.
    Serve(Box<ServeArgs>),
    /// Measure the operations between ranks.
    Bench(Box<BenchArgs>),
    /// Be one rank of a measurement; started by `bench`, not by people.
    BenchRank(Box<BenchArgs>),
    /// Write this to stdout: the version, completions for a shell, or a man page.
    Print(Vec<u8>),
}

const EXAMPLES: &str = "\
Examples:
  Start four ranks of a program:
    paceline-launcher run --nproc-per-node 4 ./my-program
  Start a PyTorch script on each of two nodes:
    paceline-launcher run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node1 python train.py

`paceline-launcher help COMMAND` tells more. The program `paceline` has the same
commands under its own name, and trains.";

/// The program `paceline-launcher`.
#[must_use]
pub fn launcher() -> clap::Command {
    let program = clap::Command::new("paceline-launcher")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Start programs as the ranks of a job, and find out why one failed")
        .after_help(EXAMPLES)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommands(commands());
    about::complete(program)
}

/// Does what this process's command line asks `paceline-launcher` for.
///
/// # Panics
///
/// If clap accepts a command that [`Command::read`] does not know.
#[must_use]
pub fn main() -> ExitCode {
    let program = launcher();
    let words: Vec<_> = std::env::args_os().collect();
    if let Some(page) = about::page(&program, &words) {
        let printed = Command::Print(page).run();
        return printed.unwrap_or_else(|failure| failure.report()).into();
    }
    let matches = match program.clone().try_get_matches_from(words) {
        Ok(matches) => matches,
        Err(error) => return Stop::new(error, None).report().into(),
    };
    let (name, matches) = matches.subcommand().expect("clap requires a subcommand");
    let command =
        Command::read(&program, name, matches).expect("the launcher has no other commands");
    let ended = match command {
        Ok(command) => command.run(),
        Err(error) => return Stop::new(error, None).report().into(),
    };
    ended.unwrap_or_else(|failure| failure.report()).into()
}

/// The commands as clap knows them, with what the environment sets.
#[must_use]
pub fn commands() -> Vec<clap::Command> {
    vec![
        run::command().mut_args(variables::read),
        run::agent_command(),
        run::store_command(),
        compare::command(),
        chaos::command(),
        submit::command(),
        doctor::command(),
        gpu::command(),
        report::command(),
        watch::command(),
        serve::command(),
        bench::command(),
        bench::rank_command(),
    ]
}

impl Command {
    /// Reads the command of this name, one of `program`'s; nothing for a name that is not in [`commands`].
    ///
    /// *Errors*: what clap alone could not see to be wrong.
    pub fn read(
        program: &clap::Command,
        name: &str,
        matches: &ArgMatches,
    ) -> Option<Result<Self, clap::Error>> {
        match name {
            "version" => {
                let line = format!("{} {}\n", program.get_name(), env!("CARGO_PKG_VERSION"));
                Some(Ok(Self::Print(line.into_bytes())))
            }
            "run" | "compare" => Some(match (about::asked(program, matches), name) {
                (Some(text), _) => Ok(Self::Print(text)),
                (None, "run") => run::read(matches).map(|args| Self::Run(Box::new(args))),
                (None, _) => compare::read(matches).map(|args| Self::Compare(Box::new(args))),
            }),
            run::AGENT => Some(match run::words(matches) {
                None => Ok(Self::HostAgent(None)),
                Some(_) => run::read(matches).map(|args| Self::HostAgent(Some(Box::new(args)))),
            }),
            run::STORE => Some(Ok(Self::StoreServer)),
            "chaos" => Some(chaos::read(matches).map(|args| Self::Chaos(Box::new(args)))),
            "submit" => Some(submit::read(matches).map(|args| Self::Submit(Box::new(args)))),
            "doctor" => Some(Ok(Self::Doctor(Box::new(doctor::read(matches))))),
            "bench" => Some(bench::read(matches).map(|args| Self::Bench(Box::new(args)))),
            "bench-rank" => Some(bench::read(matches).map(|args| Self::BenchRank(Box::new(args)))),
            "report" => Some(Ok(Self::Report(Box::new(flags::read(matches))))),
            "watch" => Some(Ok(Self::Watch(Box::new(flags::read(matches))))),
            "serve" => Some(Ok(Self::Serve(Box::new(flags::read(matches))))),
            "gpu" => Some(Ok(Self::Gpu(Box::new(flags::read(matches))))),
            _ => None,
        }
    }

    /// Does it.
    ///
    /// *Errors*: what kept it from being done.
    pub fn run(&self) -> Result<Exit, Failure> {
        match self {
            Self::Run(args) => run::start(args),
            Self::HostAgent(None) => run::begin_agent(),
            Self::HostAgent(Some(args)) => run::serve_agent(args),
            Self::StoreServer => run::serve_store(),
            Self::Compare(args) => compare::compare(args),
            Self::Chaos(args) => chaos::chaos(args),
            Self::Submit(args) => submit::submit(args),
            Self::Doctor(args) => doctor::run(args),
            Self::Gpu(args) => gpu::run(args),
            Self::Report(args) => report::run(args),
            Self::Watch(args) => watch::run(args),
            Self::Serve(args) => serve::run(args),
            Self::Bench(args) => bench::bench(args),
            Self::BenchRank(args) => bench::rank(args),
            Self::Print(text) => flags::finish(std::io::stdout().write_all(text)),
        }
    }
}

#[cfg(test)]
mod tests;
