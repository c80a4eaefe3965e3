//! The `paceline` command: parse, call, render.

mod cli;
mod commands;

use std::process::ExitCode;

use cli::Command;
use paceline_cli::exit::{Exit, Failure};

fn main() -> ExitCode {
    let result = match cli::parse(std::env::args_os()) {
        Ok(command) => run(&command),
        Err(stop) => return stop.report().into(),
    };
    result.unwrap_or_else(|failure| failure.report()).into()
}

fn run(command: &Command) -> Result<Exit, Failure> {
    match command {
        Command::Train(args) => commands::train::train(args),
        Command::Eval(args) => commands::eval::run(args),
        Command::Predict(args) => commands::predict::run(args),
        Command::Report(args) => commands::report::run(args),
        Command::Generate(args) => commands::generate::generate(args),
        Command::Plan(args) => commands::plan::plan(args),
        Command::PlanRank(args) => commands::plan::rank(args),
        Command::Around(command) => command.run(),
        Command::Indices(args) => commands::indices::indices(args),
        Command::Ledger(args) => commands::ledger::verify(args),
        Command::Replay(args) => commands::replay::run(args),
        Command::Worker(args) => commands::rank::worker(args),
    }
}
