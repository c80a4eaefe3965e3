//! The operations of a group, measured by `paceline-launcher bench` without the rest of the launcher's build.
//!
//! ```text
//! cargo bench -p paceline-cli --bench collectives -- [ARGUMENT OF `bench`]...
//! ```
//!
//! A run by `cargo test` makes three calls of each operation, at sizes up to 64 KiB.

use std::env;
use std::process::{Command, ExitCode};

/// What a run by `cargo test` measures.
const QUICK: &str = "all-reduce reduce broadcast all-gather reduce-scatter gather scatter all-to-all send-recv barrier \
                     --max-bytes 64KiB --factor 64 --iterations 3 --warmup 1";

/// Set in the processes that this program starts itself as: the command and its ranks.
const STARTED: &str = "PACELINE_BENCH_STARTED";

fn main() -> ExitCode {
    if env::var_os(STARTED).is_some() {
        return paceline_cli::main();
    }
    let mut arguments: Vec<String> = env::args().skip(1).collect();
    // cargo says `--bench` for a measurement; in tests it may pass the name of a test.
    let count = arguments.len();
    arguments.retain(|argument| argument != "--bench");
    if arguments.len() == count {
        arguments = QUICK.split_whitespace().map(str::to_owned).collect();
    }
    let program = env::current_exe().expect("this program's own file");
    let mut bench = Command::new(program);
    bench.env(STARTED, "1").arg("bench").args(arguments);
    let status = bench.status();
    match status.expect("this program starts").code() {
        Some(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        None => ExitCode::FAILURE,
    }
}
