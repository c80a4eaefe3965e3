//! The commands.

pub(crate) mod generate;
pub(crate) mod indices;
pub(crate) mod ledger;
pub(crate) mod plan;
pub(crate) mod rank;
pub(crate) mod replay;
pub(crate) mod train;

use paceline_cli::exit::{Exit, Failure};
use paceline_train::config::ConfigError;
use paceline_train::{FailureClass, TrainError};

/// The failure for settings that cannot be used.
fn wrong_settings(error: ConfigError) -> Failure {
    let hint = error.hint();
    Failure::new(Exit::Usage, error, hint)
}

/// The failure for training that failed or cannot begin, with the rank's number if a single rank reports it.
fn failed(rank: Option<usize>, error: &TrainError) -> Failure {
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

#[cfg(test)]
mod tests {
    use paceline_train::config::{Given, Inputs};

    use super::*;

    #[test]
    fn wrong_settings_are_wrong_usage() {
        let inputs = Inputs {
            flags: vec![("task".to_owned(), "digit".to_owned())],
            ..Inputs::default()
        };
        let failure = wrong_settings(Given::read(&inputs).expect_err("refused"));
        let message =
            "invalid value `digit` for `task` (flag --task): expected one of digits, idx, csv, lm";
        let hint = "did you mean `digits`?".to_owned();
        assert_eq!(failure, Failure::new(Exit::Usage, message, Some(hint)));
    }
}
