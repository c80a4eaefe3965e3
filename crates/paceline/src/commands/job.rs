//! Starting a job and telling people how it ended; shared by `train` and `run`.

use std::path::Path;

use paceline_launch::{Job, LaunchError, Outcome};
use paceline_rendezvous::token::Token;

use crate::exit::{Exit, Failure, warn};

/// A job of `processes` ranks of `program` with a token of its own.
///
/// - Errors: the system has no randomness to give.
pub(crate) fn new(program: &Path, processes: usize) -> Result<Job, Failure> {
    let token = Token::generate().map_err(|error| {
        let message = format!("no job token can be made: {error}");
        Failure::new(Exit::Environment, message, None)
    })?;
    Ok(Job::new(program, processes, token))
}

/// Runs the job and says what became of it.
///
/// - Errors: it could not be started.
pub(crate) fn run(job: Job) -> Result<Exit, Failure> {
    let outcome = paceline_launch::run(job).map_err(refused)?;
    for note in &outcome.notes {
        warn(note);
    }
    Ok(report(&outcome))
}

fn report(outcome: &Outcome) -> Exit {
    let exit = ending(outcome);
    match &outcome.failure {
        Some(failure) => Failure::new(exit, failure, failure.hint()).report(),
        None => exit,
    }
}

fn ending(outcome: &Outcome) -> Exit {
    match (outcome.exit_code(), outcome.stopped_by) {
        (code, Some(_)) if code > 128 => Exit::Signal(code - 128),
        (4, _) => Exit::Deadline,
        (code, _) => Exit::of_child(i32::from(code)),
    }
}

fn refused(error: LaunchError) -> Failure {
    let exit = if error.exit_code() == Exit::Usage.code() {
        Exit::Usage
    } else {
        Exit::Environment
    };
    Failure::new(exit, &error, error.hint())
}
