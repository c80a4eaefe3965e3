//! The lock on a folder: it keeps other jobs out, and a job's next rank 0 until the lost one is gone.
//!
//! The system frees the lock with its process. A lost process on another host may still have it: a machine that is frozen, or cut off from
//! a network file system, which keeps the locks of silent clients for a while (NFS for 90 s by default). Its writes would mix with those of
//! its successor, so that one waits. The file names the job of its holder, so a job knows its own lost process from a stranger.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use paceline_rendezvous::env::WorkerEnv;
use paceline_rendezvous::notice;

use crate::ledger::Hash;

/// Longer than a file server keeps the locks of a silent client.
const PATIENCE: Duration = Duration::from_secs(120);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// The lock on a folder, held or not; it ends with the process at the latest.
#[derive(Debug)]
pub struct FolderLock {
    folder: PathBuf,
    /// The job in the file; empty if other jobs may have the same name.
    job: String,
    held: Option<File>,
    waits_since: Option<Instant>,
    patience: Duration,
}

/// Why a folder is not locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another job has it, or a process of this job that is lost but not gone.
    #[error("{}", in_use(.waited))]
    InUse {
        /// How long this process has waited for it; zero if another job has it.
        waited: Duration,
    },
    /// The system's.
    #[error(transparent)]
    File(#[from] io::Error),
}

pub(crate) fn in_use(waited: &Duration) -> String {
    match waited.as_secs() {
        0 => "is in use by another job".into(),
        seconds => format!("is still in use by a lost process of this job after {seconds} s"),
    }
}

impl FolderLock {
    /// For a rank of the job `env`, or a process that no other one succeeds.
    pub fn new(folder: &Path, env: Option<&WorkerEnv>) -> Self {
        let job = env.filter(|env| env.token_is_secret).map(|env| {
            let secret = format!("{}{}", env.token.to_hex(), env.run_id);
            Hash::of(secret.as_bytes()).to_string()
        });
        Self {
            folder: folder.to_path_buf(),
            job: job.unwrap_or_default(),
            held: None,
            waits_since: None,
            patience: PATIENCE,
        }
    }

    /// Whether this process has the lock.
    pub fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// Creates the folder and locks it, if that can be done now; false while a lost process of this job has it. The first such answer
    /// also prints a notice.
    ///
    /// *Errors*: `InUse` at once if another job has it, and after two minutes of attempts otherwise; the system's.
    pub fn attempt(&mut self) -> Result<bool, LockError> {
        if self.is_held() {
            return Ok(true);
        }
        fs::create_dir_all(&self.folder)?;
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).read(true).write(true);
        let mut file = options.open(self.folder.join(".lock"))?;
        match file.try_lock() {
            Ok(()) => {
                file.set_len(0)?;
                file.write_all(self.job.as_bytes())?;
                self.held = Some(file);
                return Ok(true);
            }
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(source)) => return Err(source.into()),
        }
        let mut holder = String::new();
        file.read_to_string(&mut holder)?;
        if self.job.is_empty() || self.job != holder {
            let waited = Duration::ZERO;
            return Err(LockError::InUse { waited });
        }
        if self.waits_since.is_none() {
            let (folder, seconds) = (self.folder.display(), self.patience.as_secs());
            notice!(
                WARN,
                "{folder} is locked by a lost process of this job that is not gone yet: waiting up to {seconds} s for it"
            );
        }
        let waited = self.waits_since.get_or_insert_with(Instant::now).elapsed();
        match waited < self.patience {
            true => Ok(false),
            false => Err(LockError::InUse { waited }),
        }
    }

    /// As [`attempt`](Self::attempt), until it succeeds or fails.
    pub fn hold(&mut self) -> Result<(), LockError> {
        while !self.attempt()? {
            thread::sleep(PAUSE);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use paceline_rendezvous::token::Token;

    use super::*;

    fn of_job(folder: &Path, seed: &str) -> FolderLock {
        let env = WorkerEnv {
            token: Token::derived(seed),
            token_is_secret: true,
            ..WorkerEnv::alone()
        };
        FolderLock::new(folder, Some(&env))
    }

    #[test]
    fn another_job_is_refused_at_once_and_a_successor_waits_until_the_lost_process_is_gone() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut lost = of_job(folder.path(), "a");
        assert!(lost.attempt().expect("free"));
        let refused = |mut lock: FolderLock| lock.attempt().expect_err("in use").to_string();
        let says = "is in use by another job";
        assert_eq!(refused(of_job(folder.path(), "b")), says);
        assert_eq!(refused(FolderLock::new(folder.path(), None)), says);
        let mut next = of_job(folder.path(), "a");
        assert!(!next.attempt().expect("the same job"));
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(3 * PAUSE);
                drop(lost);
            });
            next.hold().expect("gone");
        });
        assert!(next.is_held());
        assert_eq!(refused(of_job(folder.path(), "b")), says);
    }

    #[test]
    fn a_successor_waits_no_longer_than_a_file_server_keeps_locks() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut lost = of_job(folder.path(), "a");
        assert!(lost.attempt().expect("free"));
        let mut next = of_job(folder.path(), "a");
        next.patience = Duration::from_secs(1);
        let error = next.hold().expect_err("still there").to_string();
        assert_eq!(
            error,
            "is still in use by a lost process of this job after 1 s"
        );
    }

    #[test]
    fn jobs_that_may_share_their_name_do_not_wait_for_each_other() {
        let folder = tempfile::tempdir().expect("a folder");
        let lock = || FolderLock::new(folder.path(), Some(&WorkerEnv::alone()));
        let mut first = lock();
        assert!(first.attempt().expect("free"));
        assert!(matches!(
            lock().attempt(),
            Err(LockError::InUse {
                waited: Duration::ZERO
            })
        ));
    }
}
