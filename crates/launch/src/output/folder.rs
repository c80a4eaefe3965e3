//! The folder of one run: below the log folder that the user named, or else among the last runs of this user.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::error::LaunchError;
use crate::time;

/// Runs that are kept if the user named no folder, this one among them.
const RUNS_KEPT: usize = 20;
/// A bound for each log file there: the user did not ask for them, so they must not fill the disk. A stream keeps up to
/// twice as much, in two files.
pub const DEFAULT_FILE_BYTES_MAX: u64 = 8 * 1024 * 1024;
/// Most characters of a job's name in its folder's name.
const RUN_ID_CHARS_MAX: usize = 64;
const LOCK: &str = ".lock";

/// A new folder for the logs of one run. While it lives, other runs do not remove it.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    _lock: Option<Lock>,
}

impl RunFolder {
    /// `<log_dir>/<run_id>_<random>`, as torchrun names it.
    ///
    /// *Errors*: it cannot be made.
    pub fn create(log_dir: &Path, run_id: &str) -> Result<Self, LaunchError> {
        if log_dir.is_file() {
            let why = io::Error::other("it is a file, not a folder");
            return Err(LaunchError::log(log_dir)(why));
        }
        let path = make(log_dir, &file_name(run_id), 0o777)?;
        Ok(Self { path, _lock: None })
    }

    /// `$XDG_STATE_HOME/paceline/runs/<time>_<run_id>_<random>`, for a run whose user named no folder; without a home
    /// that can be written, below the folder for temporary files. `latest` there leads to it. The oldest runs that have
    /// ended go, so that 20 stay. `var` looks up the environment.
    ///
    /// *Errors*: neither place can be written.
    pub fn create_default(
        run_id: &str,
        var: &dyn Fn(&str) -> Option<OsString>,
    ) -> Result<Self, LaunchError> {
        let in_home = state_home(var).map(|state| state.join("paceline/runs"));
        let user = rustix::process::getuid().as_raw();
        let in_temp = std::env::temp_dir().join(format!("paceline-{user}"));
        if let Some(base) = in_home
            && let Ok(folder) = Self::create_among(&base, run_id)
        {
            return Ok(folder);
        }
        Self::create_among(&in_temp, run_id)
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn create_among(base: &Path, run_id: &str) -> Result<Self, LaunchError> {
        private(base).map_err(LaunchError::log(base))?;
        let now = time::utc(SystemTime::now());
        // Sorted by name they are sorted by time; a colon would have to be quoted in a shell.
        let moment = now.split('.').next().unwrap_or_default().replace(':', "-");
        let path = make(base, &format!("{moment}_{}", file_name(run_id)), 0o700)?;
        let lock = Lock::take(&path.join(LOCK), true).map_err(LaunchError::log(&path))?;
        // The rest is convenience: a run does not fail without it.
        let _ = point_to(base, &path);
        let _ = remove_old(base);
        Ok(Self { path, _lock: lock })
    }
}

/// The folder that the XDG specification has for such files.
fn state_home(var: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let absolute = |name| {
        var(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))
}

/// Makes a folder that no other user may read, or checks that it is one: all users share the place for temporary files.
fn private(folder: &Path) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    let found = fs::symlink_metadata(folder)?;
    let is_ours = found.is_dir()
        && found.uid() == rustix::process::getuid().as_raw()
        && found.mode() & 0o022 == 0;
    if is_ours {
        Ok(())
    } else {
        Err(io::ErrorKind::PermissionDenied.into())
    }
}

/// A new folder of this name and a few random characters.
fn make(base: &Path, name: &str, mode: u32) -> Result<PathBuf, LaunchError> {
    fs::create_dir_all(base).map_err(LaunchError::log(base))?;
    let made = tempfile::Builder::new()
        .prefix(&format!("{name}_"))
        .rand_bytes(8)
        .permissions(Permissions::from_mode(mode))
        .tempdir_in(base);
    Ok(made.map_err(LaunchError::log(base))?.keep())
}

/// A job's name as a part of a file's.
fn file_name(run_id: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let plain = |c| if is_plain(c) { c } else { '_' };
    let name: String = run_id.chars().take(RUN_ID_CHARS_MAX).map(plain).collect();
    match name.trim_start_matches('.') {
        "" => "none".to_owned(),
        name => name.to_owned(),
    }
}

/// A run's folder that other runs leave alone until this is dropped.
#[derive(Debug)]
struct Lock(File);

impl Lock {
    /// Locks it; `None` when another process has it.
    fn take(path: &Path, create: bool) -> io::Result<Option<Self>> {
        let mut options = OpenOptions::new();
        options.write(true).create(create).mode(0o600);
        let file = options.open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self(file))),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing is not enough: a child of this process shares the lock between fork and exec.
        let _ = self.0.unlock();
    }
}

/// Lets `latest` lead to the newest run, in one step.
fn point_to(base: &Path, run: &Path) -> io::Result<()> {
    let beside = base.join(format!(".latest_{}", std::process::id()));
    std::os::unix::fs::symlink(run.file_name().unwrap_or_default(), &beside)?;
    fs::rename(&beside, base.join("latest")).inspect_err(|_| {
        let _ = fs::remove_file(&beside);
    })
}

/// Removes the oldest runs, but none that goes on and nothing that is no run.
fn remove_old(base: &Path) -> io::Result<()> {
    let mut runs: Vec<_> = fs::read_dir(base)?
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.file_name())
        .filter(|name| name.to_str().is_some_and(is_run))
        .collect();
    runs.sort_unstable();
    let surplus = runs.len().saturating_sub(RUNS_KEPT);
    for run in runs.iter().take(surplus) {
        let run = base.join(run);
        if let Ok(Some(lock)) = Lock::take(&run.join(LOCK), false) {
            fs::remove_dir_all(&run)?;
            drop(lock);
        }
    }
    Ok(())
}

/// Whether a name begins with a moment as [`RunFolder`] writes it.
fn is_run(name: &str) -> bool {
    const SHAPE: &[u8] = b"0000-00-00T00-00-00_";
    let fits = |(byte, shape): (&u8, &u8)| match shape {
        b'0' => byte.is_ascii_digit(),
        shape => byte == shape,
    };
    name.len() > SHAPE.len() && name.as_bytes().iter().zip(SHAPE).all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_run_below_a_log_folder_has_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().join("logs");
        let runs = [0, 1].map(|_| RunFolder::create(&base, "../my job").unwrap());
        assert_ne!(runs[0].path(), runs[1].path());
        for run in &runs {
            assert_eq!(run.path().parent(), Some(&*base));
            let name = run.path().file_name().unwrap().to_str().unwrap();
            assert!(name.starts_with("_my_job_"), "{name}");
            assert!(run.path().is_dir());
        }
    }

    #[test]
    fn the_name_of_a_job_cannot_lead_out_of_the_folder() {
        let check = |run_id: &str, expect: &str| assert_eq!(file_name(run_id), expect);
        check("none", "none");
        check("", "none");
        check("..", "none");
        check("a/b\0c\n", "a_b_c_");
        check(&"x".repeat(1000), &"x".repeat(RUN_ID_CHARS_MAX));
    }

    #[test]
    fn only_the_newest_runs_stay_and_those_that_go_on() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().to_owned();
        let base = home.join("paceline/runs");
        let var = |name: &str| (name == "XDG_STATE_HOME").then(|| home.clone().into_os_string());
        let old = |day: usize| base.join(format!("2000-01-{day:02}T00-00-00_none_00000000"));
        fs::create_dir_all(base.join("not a run")).unwrap();
        fs::set_permissions(&base, Permissions::from_mode(0o700)).unwrap();
        for day in 1..=RUNS_KEPT + 3 {
            fs::create_dir_all(old(day).join("attempt_0")).unwrap();
            File::create(old(day).join(LOCK)).unwrap();
        }
        let goes_on = Lock::take(&old(2).join(LOCK), false).unwrap();
        assert!(goes_on.is_some());
        let run = RunFolder::create_default("none", &var).unwrap();
        assert!(run.path().starts_with(&base) && run.path().is_dir());
        assert_eq!(
            fs::canonicalize(base.join("latest")).unwrap(),
            fs::canonicalize(run.path()).unwrap()
        );
        let stays: Vec<_> = (1..=6).map(|day| old(day).exists()).collect();
        assert_eq!(stays, [false, true, false, false, true, true]);
        assert!(base.join("not a run").exists());
        // Its own is locked as long as it lives.
        assert!(Lock::take(&run.path().join(LOCK), false).unwrap().is_none());
        let path = run.path().join(LOCK);
        drop(run);
        assert!(Lock::take(&path, false).unwrap().is_some());
    }

    #[test]
    fn a_home_is_absolute_or_none() {
        let check = |vars: &[(&str, &str)], expect: Option<&str>| {
            let var = |name: &str| {
                let found = vars.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| OsString::from(value))
            };
            assert_eq!(state_home(&var), expect.map(PathBuf::from), "{vars:?}");
        };
        check(&[("XDG_STATE_HOME", "/s"), ("HOME", "/h")], Some("/s"));
        check(
            &[("XDG_STATE_HOME", "s"), ("HOME", "/h")],
            Some("/h/.local/state"),
        );
        check(&[("HOME", "")], None);
        check(&[], None);
    }

    #[test]
    fn a_folder_that_others_may_write_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let open = folder.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
        assert!(private(&open).is_err());
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        assert!(private(&link).is_err());
        assert!(private(&folder.path().join("new/one")).is_ok());
    }
}
