//! Small files of `/sys` and `/proc`, read with a bound. A missing file is `None`.

use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::Path;

use super::BindError;
use super::cpus::Cpus;

/// The longest is the list of a node with thousands of CPUs.
const BYTES_MAX: usize = 64 << 10;
/// Enough of a file to recognise what is wrong with it.
const SHOWN_CHARS: usize = 40;

/// A file's text.
pub(crate) fn text(path: &Path) -> Result<Option<String>, BindError> {
    let mut text = String::new();
    let read =
        File::open(path).and_then(|file| file.take(BYTES_MAX as u64 + 1).read_to_string(&mut text));
    match read {
        Ok(bytes) if bytes > BYTES_MAX => Err(malformed(path, &text, "64 KiB at most")),
        Ok(_) => Ok(Some(text)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(source) => Err(BindError::Read {
            path: path.to_owned(),
            source,
        }),
    }
}

/// A file with a list of CPUs, or of nodes.
pub(crate) fn cpus(path: &Path) -> Result<Option<Cpus>, BindError> {
    parsed(path, "a list as `0-3,8`")
}

/// A file with one number.
pub(crate) fn number(path: &Path) -> Result<Option<i64>, BindError> {
    parsed(path, "a whole number")
}

fn parsed<T: std::str::FromStr>(
    path: &Path,
    expected: &'static str,
) -> Result<Option<T>, BindError> {
    let Some(text) = text(path)? else {
        return Ok(None);
    };
    let value = text.trim().parse();
    value
        .map(Some)
        .map_err(|_| malformed(path, &text, expected))
}

pub(crate) fn malformed(path: &Path, text: &str, expected: &'static str) -> BindError {
    BindError::Malformed {
        path: path.to_owned(),
        found: text.trim().chars().take(SHOWN_CHARS).collect(),
        expected,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_goes_on_for_ever_is_left_alone() {
        let error = text(Path::new("/dev/zero")).unwrap_err().to_string();
        assert!(error.ends_with("expected 64 KiB at most"), "{error}");
    }

    #[test]
    fn a_file_that_is_not_there_is_nothing() {
        assert!(text(Path::new("/proc/none")).unwrap().is_none());
        assert!(cpus(Path::new("/proc/version/none")).unwrap().is_none());
    }
}
