//! The commands.

pub(crate) mod eval;
pub(crate) mod generate;
pub(crate) mod indices;
pub(crate) mod ledger;
pub(crate) mod plan;
pub(crate) mod predict;
pub(crate) mod rank;
pub(crate) mod replay;
pub(crate) mod report;
pub(crate) mod train;

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use paceline_cli::exit::{Exit, Failure};
use paceline_train::config::ConfigError;
use paceline_train::{FailureClass, TrainError};
use tempfile::Builder;

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

/// Writes a file beside the wanted one, which it replaces once it is complete.
///
/// *Errors*: the system's.
fn replace(path: &Path, write: impl FnOnce(&File) -> io::Result<()>) -> Result<(), Failure> {
    let written = || {
        // A device or a pipe is written to, and a link means the file that it points to.
        if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            return write(&File::options().write(true).open(path)?);
        }
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        // As any new file, subject to the user's umask.
        let permissions = Permissions::from_mode(0o666);
        let beside = Builder::new()
            .permissions(permissions)
            .tempfile_in(folder)?;
        write(beside.as_file())?;
        beside.as_file().sync_all()?;
        beside.persist(path)?;
        Ok(())
    };
    written().map_err(|error: io::Error| {
        Failure::environment(format!("cannot write {}: {error}", path.display()))
    })
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
        let message =
            "invalid value `digit` for `task` (flag --task): expected one of digits, idx, csv, lm";
        let hint = "did you mean `digits`?".to_owned();
        assert_eq!(failure, Failure::new(Exit::Usage, message, Some(hint)));
    }
}
