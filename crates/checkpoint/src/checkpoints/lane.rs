//! The background of saving: one checkpoint at a time for each folder, and what completes it.

use std::fmt;
use std::fs::{self, File};
use std::path::PathBuf;
use std::thread::{self, JoinHandle};

use burn::tensor::Bytes;
use paceline_collective::ProcessGroup;
use paceline_ddp::Ddp;

use crate::error::{CheckpointError, failed_in};
use crate::files::{self, State};
use crate::folder::Writing;
use crate::remote::Uploader;

/// A save that waits for the lock.
pub(super) struct Deferred(pub(super) Box<dyn FnOnce() -> Result<(), CheckpointError> + Send>);

impl fmt::Debug for Deferred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Deferred")
    }
}

/// Checkpoints in one folder. One is written at a time.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) folder: PathBuf,
    pub(super) keep: usize,
    pub(super) writing: Option<JoinHandle<Result<(), CheckpointError>>>,
    /// The ranks, for what they send in the background; from the first save of dealt state on.
    pub(super) saves: Option<ProcessGroup>,
}

impl Lane {
    pub(super) fn new(folder: PathBuf, keep: usize) -> Self {
        Self {
            folder,
            keep,
            writing: None,
            saves: None,
        }
    }

    /// The ranks' group for what they send in the background.
    pub(super) fn group_of_saves(&mut self, ddp: &Ddp) -> Result<ProcessGroup, CheckpointError> {
        if let Some(group) = &self.saves {
            return Ok(group.clone());
        }
        let group = ddp.model_group().split(Some(0), 0)?;
        let group = group.expect("every rank has a colour");
        Ok(self.saves.insert(group).clone())
    }

    /// Has a thread write.
    pub(super) fn start(
        &mut self,
        name: String,
        write: impl FnOnce() -> Result<(), CheckpointError> + Send + 'static,
    ) -> Result<(), CheckpointError> {
        let thread = thread::Builder::new().name(name).spawn(write);
        self.writing = Some(thread.map_err(failed_in(&self.folder))?);
        Ok(())
    }

    /// Waits until the last save is done.
    pub(super) fn wait(&mut self) -> Result<(), CheckpointError> {
        match self.writing.take() {
            Some(thread) => thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            None => Ok(()),
        }
    }
}

/// Where a checkpoint is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Medium {
    Files,
    Memory,
}

/// What a checkpoint has besides its tensors.
pub(super) struct Rest {
    pub(super) state: State,
    /// State of the learning-rate scheduler.
    pub(super) schedule: Option<Bytes>,
    pub(super) ledger: Option<PathBuf>,
}

impl Rest {
    /// Completes a checkpoint whose tensors are written; `hash` is that of the weights.
    pub(super) fn finish(
        mut self,
        writing: Writing,
        hash: String,
        keep: usize,
        uploader: Option<&Uploader>,
    ) -> Result<PathBuf, CheckpointError> {
        self.state.weights_sha256 = hash;
        if let Some(schedule) = self.schedule {
            let written = fs::write(writing.path().join(files::SCHEDULE), &schedule[..]);
            written.map_err(writing.failed())?;
        }
        // A run that resumes from this checkpoint finds all its steps in the ledger.
        let ledger = self.ledger.map(File::open).transpose();
        let ledger = ledger.map_err(writing.failed())?;
        let synced = ledger.as_ref().map_or(Ok(()), File::sync_data);
        synced.map_err(writing.failed())?;
        let (step, failed) = (self.state.ddp.step, writing.failed());
        let place = writing.finish(keep, self.state)?;
        if let Some(uploader) = uploader {
            uploader.put(step, &place, ledger).map_err(failed)?;
        }
        Ok(place)
    }
}
