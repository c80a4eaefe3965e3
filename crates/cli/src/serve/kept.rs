//! The runs in a folder, of which those asked for last stay in memory and are followed.

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use paceline_report::{ReportError, Run, runs_below};

/// Most runs that are kept in memory; the one that was asked for longest ago makes room.
const RUNS_KEPT: usize = 16;

/// A run that several browsers may show.
pub(super) type Shared = Arc<Mutex<Run>>;

/// The runs in a folder.
pub(super) struct Kept {
    folder: PathBuf,
    runs: Mutex<Vec<(PathBuf, Shared)>>,
}

impl Kept {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            runs: Mutex::new(Vec::new()),
        }
    }

    /// Names and folders of the runs that are there now, the one that was written to last first.
    pub(super) fn folders(&self) -> Vec<(String, PathBuf)> {
        // A folder that has gone, or has no run yet, has none.
        let folders = runs_below(&self.folder).unwrap_or_default();
        let named = |folder: PathBuf| {
            let full = fs::canonicalize(&folder).unwrap_or_else(|_| folder.clone());
            Some((full.file_name()?.to_str()?.to_owned(), folder))
        };
        folders.into_iter().filter_map(named).collect()
    }

    /// The run whose name is the wanted one, as it is now.
    ///
    /// *Errors*: no run has that name; its files cannot be read.
    pub(super) fn named(&self, is_wanted: impl Fn(&str) -> bool) -> Result<Shared, ReportError> {
        let found = self
            .folders()
            .into_iter()
            .find(|(known, _)| is_wanted(known));
        let Some((_, folder)) = found else {
            let folder = self.folder.clone();
            return Err(ReportError::NoRun { folder });
        };
        self.run(folder)
    }

    /// The run in a folder, as it is now.
    ///
    /// *Errors*: it cannot be read.
    pub(super) fn run(&self, folder: PathBuf) -> Result<Shared, ReportError> {
        let kept = {
            let mut runs = lock(&self.runs);
            let place = runs.iter().position(|(kept, _)| *kept == folder);
            place.map(|place| {
                // The last one was asked for last.
                let kept = runs.remove(place);
                runs.push(kept.clone());
                kept.1
            })
        };
        if let Some(run) = kept {
            lock(&run).update()?;
            return Ok(run);
        }
        // Meanwhile other runs can be shown.
        let run = Arc::new(Mutex::new(Run::read(&folder)?));
        let mut runs = lock(&self.runs);
        if runs.len() >= RUNS_KEPT {
            runs.remove(0);
        }
        runs.push((folder, run.clone()));
        Ok(run)
    }

    /// What comes of several runs at once. They are locked in an order that all threads share, whatever the order in which they are shown.
    pub(super) fn with<R>(shared: &[Shared], what: impl FnOnce(&[&Run]) -> R) -> R {
        let mut order: Vec<usize> = (0..shared.len()).collect();
        order.sort_by_key(|place| Arc::as_ptr(&shared[*place]));
        let mut locked: Vec<(usize, MutexGuard<'_, Run>)> = order
            .into_iter()
            .map(|place| (place, lock(&shared[place])))
            .collect();
        locked.sort_by_key(|(place, _)| *place);
        let runs: Vec<&Run> = locked.iter().map(|(_, run)| &**run).collect();
        what(&runs)
    }
}

/// The lock of what is whole even if another thread has panicked.
pub(super) fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
