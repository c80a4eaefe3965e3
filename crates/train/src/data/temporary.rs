//! Temporary files of data that is too large for memory.

use std::env;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::PathBuf;

use super::DataProblem;

/// A file without a name, so nothing is left of it when the process ends.
pub(super) fn file() -> io::Result<File> {
    tempfile::tempfile_in(folder())
}

/// Where large temporary files belong: on many systems `/tmp` is in memory.
fn folder() -> PathBuf {
    let set = env::var_os("TMPDIR").filter(|folder| !folder.is_empty());
    set.map_or_else(|| "/var/tmp".into(), PathBuf::from)
}

/// Why it cannot be made or written, and what to do.
pub(super) fn unwritable(error: &io::Error, hint: &str) -> DataProblem {
    let folder = folder();
    let folder = folder.display();
    let what = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "is full",
        _ => "cannot be written",
    };
    DataProblem::new(format!(
        "too large for memory, and {folder}, which takes a temporary file of it, {what}: {error}"
    ))
    .with_hint(hint)
}

/// Why it cannot be read.
pub(super) fn unreadable(error: &io::Error) -> DataProblem {
    let folder = folder();
    let folder = folder.display();
    DataProblem::new(format!(
        "its temporary file in {folder} cannot be read: {error}"
    ))
}
