//! `paceline-launcher`: the commands around a job, without training.

use std::process::ExitCode;

fn main() -> ExitCode {
    paceline_cli::main()
}
