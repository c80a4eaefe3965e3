//! Which running job writes a run, or has a process.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use paceline_rendezvous::page::{Running, RunningJob};

/// Most open files of a rank that are looked at.
const FILES_MAX: usize = 1024;

/// The jobs of this machine.
pub(crate) struct Jobs {
    running: Running,
    seen: Vec<RunningJob>,
}

impl Jobs {
    pub(crate) fn new() -> Self {
        Self {
            running: Running::new(Path::new("/")),
            seen: Vec::new(),
        }
    }

    pub(crate) fn look(&mut self) {
        self.seen = self.running.look(Instant::now());
    }

    /// The job that has a file of the run in `folder` open. Rank 0 has the metrics as long as it trains, and it or the launcher the
    /// folder's lock from the start.
    pub(crate) fn of(&self, folder: &Path) -> Option<&RunningJob> {
        let files = ["metrics.jsonl", ".lock"].map(|name| folder.join(name));
        let files = files.iter().filter_map(|path| fs::metadata(path).ok());
        let files: Vec<(u64, u64)> = files.map(|file| (file.dev(), file.ino())).collect();
        self.seen.iter().find(|job| {
            let ranks = job.ranks.iter().filter_map(|rank| rank.pid);
            let mut pids = ranks.chain(job.launcher);
            pids.any(|pid| has_open(pid, &files))
        })
    }

    /// The job of which this process is a rank or the launcher.
    pub(crate) fn of_process(&self, pid: u32) -> Option<&RunningJob> {
        self.seen.iter().find(|job| {
            let mut pids = job.ranks.iter().filter_map(|rank| rank.pid);
            job.launcher == Some(pid) || pids.any(|rank| rank == pid)
        })
    }
}

/// Whether a process has one of these files open.
fn has_open(pid: u32, wanted: &[(u64, u64)]) -> bool {
    let files = fs::read_dir(format!("/proc/{pid}/fd"));
    let files = files.into_iter().flatten().flatten().take(FILES_MAX);
    files
        .filter_map(|link| fs::metadata(link.path()).ok())
        .any(|open| wanted.contains(&(open.dev(), open.ino())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_the_files_that_it_has_open() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let other = tempfile::NamedTempFile::new().expect("a file");
        let key = |file: &tempfile::NamedTempFile| {
            let metadata = file.as_file().metadata().expect("metadata");
            (metadata.dev(), metadata.ino())
        };
        let closed = key(&other);
        // Its number stays taken.
        let kept = other.into_temp_path();
        assert!(has_open(std::process::id(), &[key(&file)]));
        assert!(!has_open(std::process::id(), &[closed]));
        drop(kept);
    }
}
