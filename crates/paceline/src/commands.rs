//! The commands.

pub(crate) mod eval;
pub(crate) mod export;
pub(crate) mod generate;
pub(crate) mod indices;
pub(crate) mod ledger;
mod mlflow;
pub(crate) mod plan;
pub(crate) mod predict;
pub(crate) mod rank;
pub(crate) mod replay;
pub(crate) mod train;

use paceline_cli::exit::{Exit, Failure};
use paceline_collective::ProcessGroup;
use paceline_train::config::{ConfigError, TrainConfig, UserProgram};
use paceline_train::{
    End, FailureClass, Foreseen, LoadPredictor, Output, Predictor, TrainError, TrainTask,
};

/// What this program trains.
pub(crate) struct Program {
    /// A user's program; `None` for `paceline train`.
    user: Option<UserProgram>,
    foresee: fn(&TrainConfig) -> Result<Foreseen, TrainError>,
    train: fn(&TrainConfig, ProcessGroup, Output) -> Result<End, TrainError>,
    predictor: Option<LoadPredictor>,
}

impl Program {
    /// `paceline train`.
    pub(crate) const PACELINE: Self = Self {
        user: None,
        foresee: paceline_train::foresee,
        train: paceline_train::train,
        predictor: Some(Predictor::of_run),
    };

    /// A user's program.
    pub(crate) fn of<T: TrainTask>(user: UserProgram) -> Self {
        Self {
            user: Some(user),
            foresee: paceline_train::foresee_task::<T>,
            train: paceline_train::train_task::<T>,
            predictor: T::PREDICTOR,
        }
    }

    /// How its trained models are loaded, if they are of samples as `paceline train` reads them: only such a program has the commands that ask.
    fn predictor(&self) -> LoadPredictor {
        self.predictor.expect("a program of samples")
    }

    /// Its command.
    fn command(&self) -> &str {
        let user = self.user.as_ref();
        user.map_or("paceline train", |program| &program.name)
    }
}

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

/// Lets glibc's allocator keep the memory that a step frees for the next step. By default it gives the end of its heap back to
/// the system each time, and every page of it then costs a page fault again: a tenth of a step's time for small models.
/// Variables set by the user stay unchanged.
fn allocator_settings() -> Option<(String, String)> {
    const VARIABLE: &str = "GLIBC_TUNABLES";
    // Naming one threshold fixes the other one too. Larger blocks go back to the system at once, so that the peak stays where it
    // was; 32 MiB is 5 % faster, and takes up to a fifth more memory. Huge pages save most of the processor's search for addresses,
    // which costs most on virtual machines; a rank of the digits job takes 3 MB more.
    let value = "glibc.malloc.trim_threshold=4294967296:glibc.malloc.mmap_threshold=4194304:glibc.malloc.hugetlb=1";
    std::env::var_os(VARIABLE)
        .is_none()
        .then(|| (VARIABLE.into(), value.into()))
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
        let message = "invalid value `digit` for `task` (flag --task): expected one of digits, idx, csv, images, lm";
        let hint = "did you mean `digits`?".to_owned();
        assert_eq!(failure, Failure::new(Exit::Usage, message, Some(hint)));
    }
}
