//! `paceline-launcher`: the commands around a job, without training.

use std::process::ExitCode;

use paceline_cli::flags::Stop;
use paceline_cli::{Command, launcher};

fn main() -> ExitCode {
    let program = launcher();
    let matches = match program.clone().try_get_matches() {
        Ok(matches) => matches,
        Err(error) => return Stop(error).report().into(),
    };
    let (name, matches) = matches.subcommand().expect("clap requires a subcommand");
    let command =
        Command::read(&program, name, matches).expect("the launcher has no other commands");
    let ended = match command {
        Ok(command) => command.run(),
        Err(error) => return Stop(error).report().into(),
    };
    ended.unwrap_or_else(|failure| failure.report()).into()
}
