//! `paceline worker`: one rank of a training job, started by `train`.

use paceline_collective::{GroupOptions, ProcessGroup, Transport};
use paceline_train::config::{FileText, Resolved, TrainConfig, TransportChoice};
use paceline_train::{End, FailureClass, TrainError};

use super::wrong_settings;
use crate::cli::WorkerArgs;
use paceline_cli::exit::{Exit, Failure};

/// Trains as the settings say, as the rank that the environment says.
///
/// *Errors*: any failure of the rank, its number in front.
pub(crate) fn worker(args: &WorkerArgs) -> Result<Exit, Failure> {
    let saved = FileText::read(&args.config).map_err(wrong_settings)?;
    let resolved = Resolved::from_saved(&saved).map_err(wrong_settings)?;
    let config = resolved.config();
    let group =
        ProcessGroup::init(&options(config)).map_err(|error| failure(None, &error.into()))?;
    let rank = group.rank();
    match paceline_train::train(config, group).map_err(|error| failure(Some(rank), &error))? {
        End::Finished => Ok(Exit::Done),
        End::Stopped { signal } => Ok(Exit::Signal(signal.exit_code() - 128)),
    }
}

fn options(config: &TrainConfig) -> GroupOptions {
    GroupOptions {
        timeout: config.timeout(),
        transport: match config.transport {
            TransportChoice::Auto => Transport::Auto,
            TransportChoice::Shm => Transport::Shm,
            TransportChoice::Tcp => Transport::Tcp,
        },
        ..GroupOptions::default()
    }
}

fn failure(rank: Option<usize>, error: &TrainError) -> Failure {
    let exit = match error.class() {
        FailureClass::Job => Exit::JobFailed,
        FailureClass::Usage => Exit::Usage,
        FailureClass::Environment => Exit::Environment,
        FailureClass::Deadline => Exit::Deadline,
    };
    let message = match rank {
        Some(rank) => format!("rank {rank}: {error}"),
        None => error.to_string(),
    };
    Failure::new(exit, message, error.hint())
}
