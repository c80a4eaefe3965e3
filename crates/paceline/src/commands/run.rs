//! `paceline run`: any program as the ranks of a job.

use std::path::Path;

use paceline_launch::{Console, StopMode};

use super::job;
use crate::cli::RunArgs;
use crate::exit::{Exit, Failure};

/// Starts the program and waits for its end.
///
/// - Errors: it could not be started.
pub(crate) fn run(args: &RunArgs) -> Result<Exit, Failure> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut job = job::new(Path::new(&args.program), args.processes.on(cores))?;
    job.args.clone_from(&args.args);
    job.log_dir.clone_from(&args.log_dir);
    job.console = Console::Prefixed;
    job.stop = StopMode::Forward;
    job.grace = args.shutdown_timeout;
    job.threads_per_rank = args.threads_per_rank;
    if let Some(timeout) = args.timeout {
        let seconds = timeout.as_secs().to_string();
        job.env.push(("PACELINE_TIMEOUT_SECONDS".into(), seconds));
    }
    job::run(job)
}
