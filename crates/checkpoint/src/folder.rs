//! The folder of a job's checkpoints: publishing a checkpoint, keeping the newest, finding the newest whole one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::CheckpointError;
use crate::files::{self, Contents, State};

/// A checkpoint that is being written, beside its place.
///
/// If it is dropped, earlier checkpoints are untouched and nothing half-written is left where it could be read.
pub(crate) struct Writing {
    beside: tempfile::TempDir,
    folder: PathBuf,
    place: PathBuf,
}

impl Writing {
    /// Begins the checkpoint of `step` below `folder`.
    pub(crate) fn begin(folder: &Path, step: u64) -> Result<Self, CheckpointError> {
        let place = folder.join(format!("step-{step:010}"));
        let begin = || {
            fs::create_dir_all(folder)?;
            let mut beside = tempfile::Builder::new();
            beside.prefix(".writing-").tempdir_in(folder)
        };
        Ok(Self {
            beside: begin().map_err(failed(&place))?,
            folder: folder.to_path_buf(),
            place,
        })
    }

    /// Where its files belong.
    pub(crate) fn path(&self) -> &Path {
        self.beside.path()
    }

    /// The error of a failed write.
    pub(crate) fn failed(&self) -> impl FnOnce(io::Error) -> CheckpointError + use<> {
        failed(&self.place)
    }

    /// Makes the files a checkpoint, and removes all but the newest `keep`.
    pub(crate) fn finish(self, keep: usize, state: State) -> Result<(), CheckpointError> {
        let failed = self.failed();
        let sealed = files::seal(self.path(), state);
        let published = sealed.and_then(|()| publish(self.beside, &self.place));
        published.map_err(failed)?;
        prune(&self.folder, keep);
        Ok(())
    }
}

fn failed(place: &Path) -> impl FnOnce(io::Error) -> CheckpointError + use<> {
    let path = place.to_path_buf();
    move |source| CheckpointError::File {
        action: "write checkpoint",
        path,
        source,
    }
}

/// Moves the finished folder to its place, after moving away a folder already there (torn, or of the same step).
fn publish(beside: tempfile::TempDir, place: &Path) -> io::Result<()> {
    let parent = place.parent().unwrap_or(Path::new("."));
    if place.exists() {
        let old = tempfile::Builder::new()
            .prefix(".old-")
            .tempdir_in(parent)?;
        fs::rename(place, old.path().join("checkpoint"))?;
    }
    fs::rename(beside.path(), place)?;
    // The folder was moved, so there is nothing left to remove.
    let _ = beside.keep();
    files::sync_folder(parent)
}

/// Removes all but the newest `keep` and the leftovers of interrupted writes. A failed removal is harmless.
fn prune(folder: &Path, keep: usize) {
    for old in list(folder).iter().rev().skip(keep.max(1)) {
        let _ = fs::remove_dir_all(old);
    }
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(".writing-") || name.starts_with(".old-") {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// The checkpoints in `folder`, oldest first, whole or not.
pub fn list(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<(u64, PathBuf)> = entries
        .filter_map(|entry| Some((step_of(&entry.path())?, entry.path())))
        .collect();
    found.sort();
    found.into_iter().map(|(_, path)| path).collect()
}

pub(crate) fn step_of(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    name.strip_prefix("step-")?.parse().ok()
}

/// A whole checkpoint, and the reasons why newer ones were skipped.
pub(crate) struct Newest {
    pub(crate) path: PathBuf,
    pub(crate) contents: Contents,
    pub(crate) damaged: Vec<String>,
}

/// Reads the newest whole checkpoint in `folder`; `None` if there is no checkpoint.
///
/// *Errors*: `NoneValid` if all are damaged.
pub(crate) fn newest(folder: &Path) -> Result<Option<Newest>, CheckpointError> {
    let mut damaged = Vec::new();
    for path in list(folder).into_iter().rev() {
        match files::read(&path) {
            Ok(contents) => {
                return Ok(Some(Newest {
                    path,
                    contents,
                    damaged,
                }));
            }
            Err(reason) => damaged.push(format!("{}: {reason}", path.display())),
        }
    }
    if damaged.is_empty() {
        return Ok(None);
    }
    Err(CheckpointError::NoneValid {
        path: folder.to_path_buf(),
        reasons: damaged,
    })
}

/// Whether `folder` has a checkpoint to resume from.
///
/// *Cost*: reads the newest one.
///
/// *Errors*: `NoneValid` if there are only damaged ones.
pub fn has_valid(folder: &Path) -> Result<bool, CheckpointError> {
    newest(folder).map(|found| found.is_some())
}

#[cfg(test)]
mod tests;
