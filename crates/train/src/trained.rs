//! What a run has trained, for commands that use it and do not train on.

use std::num::NonZeroUsize;
use std::path::Path;

use paceline_checkpoint::{CheckpointError, SavedModel};
use serde::de::DeserializeOwned;

use crate::config::{FileText, Resolved};
use crate::error::TrainError;
use crate::run_dir;

/// Which of a run's checkpoints is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Which {
    /// The newest whole one.
    #[default]
    Newest,
    /// That of the epoch with the best figure of `--monitor`.
    Best,
    /// The mean of so many of the newest.
    MeanOf(NonZeroUsize),
}

impl Which {
    /// What follows the newest checkpoint's path where people read it.
    #[must_use]
    pub fn note(self) -> String {
        match self {
            Self::Newest | Self::Best => String::new(),
            Self::MeanOf(count) => format!(", the mean of the newest {count}"),
        }
    }

    /// The checkpoint of a run.
    ///
    /// *Errors*: no such checkpoint; only damaged ones.
    pub(crate) fn of_run(self, run: &Path) -> Result<SavedModel, TrainError> {
        let folder = run_dir::checkpoints(run);
        const NONE: (&str, &str) = (
            "no checkpoint",
            "name a run that has saved one: each does so at the end of an epoch, or every --save-every steps",
        );
        let (saved, (what, hint)) = match self {
            Self::Newest => (SavedModel::newest(&folder), NONE),
            Self::MeanOf(count) => {
                // The best one may lie beside them.
                if let Some(kept) = kept(run).filter(|kept| count.get() > *kept) {
                    return Err(TrainError::usage(
                        format!(
                            "{} has its newest {kept} checkpoints, but {count} are to be averaged",
                            run.display()
                        ),
                        "average fewer, or train with a larger --keep",
                    ));
                }
                (SavedModel::mean_of_newest(&folder, count.get()), NONE)
            }
            Self::Best => (
                SavedModel::best(&folder),
                (
                    "no best checkpoint",
                    "a run has one from the first epoch on that ends with an evaluation; without held-out data use the newest one",
                ),
            ),
        };
        let saved = saved.map_err(|error| match error {
            // Its own advice is for a job that trains on.
            CheckpointError::NoneValid { .. } => TrainError::usage(
                error.to_string(),
                "its files were changed, or not copied whole: copy the run again, or use another one",
            ),
            other => other.into(),
        })?;
        saved.ok_or_else(|| TrainError::usage(format!("{} has {what}", run.display()), hint))
    }
}

/// How many of its newest checkpoints a run keeps; `None` if it does not say so.
fn kept(run: &Path) -> Option<usize> {
    let settings = FileText::read(&run.join("config.toml")).ok()?;
    Some(Resolved::from_saved(&settings).ok()?.config().keep)
}

/// An entry of the checkpoint's metadata, which is JSON.
///
/// *Errors*: `Misfit` if the entry is missing or is not of this type.
pub(crate) fn entry<T: DeserializeOwned>(saved: &SavedModel, name: &str) -> Result<T, TrainError> {
    let misfit = |what| misfit(saved, what);
    let text = saved.metadata().get(name).ok_or_else(|| {
        misfit(format!(
            "it has no entry `{name}`: an earlier version wrote it"
        ))
    })?;
    let read = serde_json::from_str(text);
    read.map_err(|error| misfit(format!("its entry `{name}` cannot be read: {error}")))
}

/// The checkpoint is not what it should be.
pub(crate) fn misfit(saved: &SavedModel, what: String) -> TrainError {
    let path = saved.path().to_owned();
    CheckpointError::Misfit { path, what }.into()
}
