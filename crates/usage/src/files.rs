//! Files that appear whole: written beside their place and renamed.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Writes a file beside its place and renames it, so that a reader never sees half of one; see [`replace`].
///
/// *Errors*: those of the file system; then nothing is left beside it.
pub fn write_beside(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace(path, |mut file| file.write_all(bytes))
}

/// The same for what `write` writes. A device or a pipe is written to, and a link means the file that it points to.
///
/// *Errors*: those of the file system and of `write`; then nothing is left beside it.
pub fn replace(path: &Path, write: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
        return write(&File::options().write(true).open(path)?);
    }
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let beside = beside(&path);
    let written = || {
        let file = File::create(&beside)?;
        write(&file)?;
        file.sync_all()?;
        fs::rename(&beside, &path)
    };
    written().inspect_err(|_| {
        // It may not even be there.
        let _ = fs::remove_file(&beside);
    })
}

/// Whether there is a folder for this file to be in.
pub fn has_folder(file: &Path) -> bool {
    let folder = file
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    folder.is_none_or(Path::is_dir)
}

/// `usage.csv.part`
pub(crate) fn beside(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".part");
    name.into()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_link_stays_and_a_failed_write_loses_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let [file, link] = ["file", "link"].map(|name| folder.path().join(name));
        fs::write(&file, "old").expect("a file");
        symlink(&file, &link).expect("a link");
        let failed = replace(&link, |mut file| {
            file.write_all(b"half")?;
            Err(io::Error::other("no more"))
        });
        assert_eq!(failed.expect_err("it failed").to_string(), "no more");
        assert_eq!(fs::read_to_string(&file).expect("a file"), "old");
        write_beside(&link, b"new").expect("written");
        assert_eq!(fs::read_to_string(&file).expect("a file"), "new");
        assert!(link.is_symlink());
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 2);
    }

    #[test]
    fn a_device_is_written_to_and_not_replaced() {
        write_beside(Path::new("/dev/null"), b"nothing").expect("written");
        assert!(!fs::metadata("/dev/null").expect("a device").is_file());
    }
}
