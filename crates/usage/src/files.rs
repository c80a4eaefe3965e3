//! Files that appear whole: written beside their place and renamed.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Writes a file beside its place and renames it, so that a reader never sees half of one.
///
/// *Errors*: those of the file system; then nothing is left beside it.
pub fn write_beside(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let beside = beside(path);
    let write = || {
        let mut file = File::create(&beside)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&beside, path)
    };
    write().inspect_err(|_| {
        // It may not even be there.
        let _ = fs::remove_file(&beside);
    })
}

/// `usage.csv.part`
pub(crate) fn beside(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".part");
    name.into()
}
