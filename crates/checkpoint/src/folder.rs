//! The folder of a job's checkpoints: publishing a checkpoint, keeping the newest, finding the newest whole one.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::CheckpointError;
use crate::files::{self, Contents, State};

/// Ends the name of a checkpoint that another one of the same step replaces. It counts until that has its place.
const OLD: &str = ".old";
/// How often a folder is read anew because a job published or removed a checkpoint meanwhile.
const READS_MAX: usize = 10;

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
        let place = folder.join(name_of(step));
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

    /// Makes the files a checkpoint, and removes all but the newest `keep` and the best one.
    pub(crate) fn finish(self, keep: usize, state: State) -> Result<PathBuf, CheckpointError> {
        files::seal(self.path(), state).map_err(self.failed())?;
        self.publish(keep)
    }

    /// Puts files that are a checkpoint in its place, which it returns, and removes all but the newest `keep` and the best one.
    pub(crate) fn publish(self, keep: usize) -> Result<PathBuf, CheckpointError> {
        let failed = self.failed();
        publish(self.beside, &self.place).map_err(failed)?;
        prune(&self.folder, keep, &self.place);
        Ok(self.place)
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

/// Moves the finished folder to its place. A folder already there (torn, or of the same step) gets another name before.
fn publish(beside: tempfile::TempDir, place: &Path) -> io::Result<()> {
    if place.exists() {
        let old = PathBuf::from(format!("{}{OLD}", place.display()));
        if old.exists() {
            fs::remove_dir_all(&old)?;
        }
        fs::rename(place, old)?;
    }
    fs::rename(beside.path(), place)?;
    // The folder was moved, so there is nothing left to remove.
    let _ = beside.keep();
    files::sync_folder(place.parent().unwrap_or(Path::new(".")))
}

/// Removes all but `written`, the newest others, `keep` together, and the best one. A failed removal is harmless.
fn prune(folder: &Path, keep: usize, written: &Path) {
    remove_leftovers(folder);
    // Those of later steps are damaged, or were made before the job went back to an earlier one.
    let mut others = list(folder);
    others.retain(|path| path != written);
    others.truncate(others.len().saturating_sub(keep.saturating_sub(1)));
    let best = files::best_step(written).ok().flatten();
    others.retain(|old| step_of(old) != best);
    for old in others {
        let _ = fs::remove_dir_all(old);
    }
}

/// Removes what interrupted writes have left.
pub(crate) fn remove_leftovers(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let is_replaced = path.extension().is_some_and(|end| OLD[1..] == *end)
            && path.with_extension("").exists();
        if is_replaced || name.to_string_lossy().starts_with(".writing-") {
            let _ = fs::remove_dir_all(path);
        }
    }
}

/// Removes the checkpoints of steps after `step`. A failed removal is harmless: the same steps will be saved again.
pub(crate) fn remove_after(folder: &Path, step: u64) {
    let later = |path: &PathBuf| step_of(path).is_some_and(|of| of > step);
    for wrong in list(folder).into_iter().filter(later) {
        let _ = fs::remove_dir_all(wrong);
    }
}

/// The checkpoints in `folder`, oldest first, whole or not.
pub fn list(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter_map(|entry| Some((age(&entry.path())?, entry.path())))
        .collect();
    found.sort();
    found.into_iter().map(|(_, path)| path).collect()
}

/// The name of the folder of a step's checkpoint.
pub(crate) fn name_of(step: u64) -> String {
    format!("step-{step:010}")
}

pub(crate) fn step_of(path: &Path) -> Option<u64> {
    age(path).map(|(step, _)| step)
}

/// A checkpoint's step, and whether it is the last one of that step.
fn age(path: &Path) -> Option<(u64, bool)> {
    let name = path.file_name()?.to_str()?.strip_prefix("step-")?;
    let (step, is_last) = match name.strip_suffix(OLD) {
        Some(step) => (step, false),
        None => (name, true),
    };
    Some((step.parse().ok()?, is_last))
}

/// A whole checkpoint, and the reasons why newer ones were skipped.
pub(crate) struct Newest<T> {
    pub(crate) path: PathBuf,
    pub(crate) contents: T,
    pub(crate) damaged: Vec<String>,
}

/// The newest whole checkpoint in `folders` of step `last` or before, from the last folder that has it; `None` if there is no checkpoint.
///
/// *Errors*: `NoneValid` if all are damaged.
pub(crate) fn newest(
    folders: &[&Path],
    last: u64,
) -> Result<Option<Newest<Contents>>, CheckpointError> {
    newest_by(folders, last, files::read)
}

/// What `read` makes of the newest checkpoint of step `last` or before that it can read, even while a job publishes and removes some.
///
/// *Errors*: `NoneValid` with the first folder if it can read none of them.
pub(crate) fn newest_by<T>(
    folders: &[&Path],
    last: u64,
    read: impl Fn(&Path) -> Result<T, String>,
) -> Result<Option<Newest<T>>, CheckpointError> {
    let mut damaged = Vec::new();
    let mut listed = identified(folders, last);
    let (mut left, mut reads) = (listed.clone(), 1);
    while let Some((path, _)) = left.pop() {
        let reason = match read(&path) {
            Ok(contents) => {
                return Ok(Some(Newest {
                    path,
                    contents,
                    damaged,
                }));
            }
            Err(reason) => reason,
        };
        let now = identified(folders, last);
        if now != listed && reads < READS_MAX {
            damaged.clear();
            (listed, left, reads) = (now.clone(), now, reads + 1);
            continue;
        }
        damaged.push(format!("{}: {reason}", path.display()));
    }
    if damaged.is_empty() {
        return Ok(None);
    }
    Err(CheckpointError::NoneValid {
        path: folders[0].to_path_buf(),
        reasons: damaged,
    })
}

/// The checkpoints in `folders` up to step `last`, oldest first, with the numbers by which the system tells folders of one name apart. One
/// that is gone by now has none.
fn identified(folders: &[&Path], last: u64) -> Vec<(PathBuf, Option<u64>)> {
    let mut found: Vec<_> = folders.iter().flat_map(|folder| list(folder)).collect();
    found.retain(|path| step_of(path).is_some_and(|step| step <= last));
    // Of the same step, those of the last folder stay last.
    found.sort_by_key(|path| age(path));
    found
        .into_iter()
        .map(|path| {
            let inode = fs::metadata(&path).ok().map(|found| found.ino());
            (path, inode)
        })
        .collect()
}

/// Whether `folder` has a checkpoint to resume from.
///
/// *Cost*: reads the newest one.
///
/// *Errors*: `NoneValid` if there are only damaged ones.
pub fn has_valid(folder: &Path) -> Result<bool, CheckpointError> {
    newest(&[folder], u64::MAX).map(|found| found.is_some())
}

#[cfg(test)]
pub(crate) mod tests;
