//! The result of a run: what it printed, and the files that it wrote.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use regex_lite::Regex;
use serde::Serialize;
use sha2::{Digest, Sha256};

/// One part of a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Evidence {
    /// Where it was found.
    pub(super) name: String,
    /// What was found there; `None` if nothing was.
    pub(super) value: Option<String>,
}

/// Where results are found.
pub(super) struct Places {
    pub(super) pattern: Option<Regex>,
    pub(super) files: Vec<PathBuf>,
    /// Each file's number, size and time of change, before the run.
    before: Vec<Option<Identity>>,
}

type Identity = (u64, u64, i64, i64);

fn identity(file: &Path) -> Option<Identity> {
    let status = fs::metadata(file).ok()?;
    Some((
        status.ino(),
        status.size(),
        status.mtime(),
        status.mtime_nsec(),
    ))
}

impl Places {
    /// Before a run.
    pub(super) fn new(pattern: Option<Regex>, files: &[PathBuf]) -> Self {
        Self {
            pattern,
            before: files.iter().map(|file| identity(file)).collect(),
            files: files.to_vec(),
        }
    }

    /// After it: what the run has printed to this file, and written to others. A file that it has not touched is none of its
    /// results.
    pub(super) fn collect(&self, output: &Path) -> io::Result<Vec<Evidence>> {
        let mut found = Vec::new();
        if let Some(pattern) = &self.pattern {
            found.push(Evidence {
                name: format!("output matching {pattern}"),
                value: last_match(pattern, File::open(output)?)?,
            });
        }
        for (file, before) in self.files.iter().zip(&self.before) {
            let now = identity(file);
            let value = match now.is_some() && now != *before {
                true => Some(digest(file)?),
                false => None,
            };
            let name = format!("SHA-256 of {}", file.display());
            found.push(Evidence { name, value });
        }
        Ok(found)
    }
}

/// The first group of the last match, or all of it if the expression has no group.
fn last_match(pattern: &Regex, output: File) -> io::Result<Option<String>> {
    let (mut output, mut line, mut last) = (BufReader::new(output), Vec::new(), None);
    while output.read_until(b'\n', &mut line)? > 0 {
        let text = String::from_utf8_lossy(&line);
        if let Some(found) = pattern.captures_iter(text.trim_end()).last() {
            let found = found.get(1).or(found.get(0));
            last = found.map(|found| found.as_str().to_owned());
        }
        line.clear();
    }
    Ok(last)
}

fn digest(file: &Path) -> io::Result<String> {
    let mut sha256 = Sha256::new();
    io::copy(&mut File::open(file)?, &mut sha256)?;
    let bytes = sha256.finalize();
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Whether both results are there and equal; `None` if the first one is missing, so that there is nothing to compare with.
pub(super) fn is_same(reference: &[Evidence], result: &[Evidence]) -> Option<bool> {
    let all_found = reference.iter().all(|one| one.value.is_some());
    all_found.then(|| reference == result)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evidence(value: Option<&str>) -> Vec<Evidence> {
        vec![Evidence {
            name: "x".to_owned(),
            value: value.map(str::to_owned),
        }]
    }

    #[test]
    fn results_are_the_same_only_if_both_are_there() {
        let check = |a, b, expect| assert_eq!(is_same(&evidence(a), &evidence(b)), expect);
        check(Some("1"), Some("1"), Some(true));
        check(Some("1"), Some("2"), Some(false));
        check(Some("1"), None, Some(false));
        check(None, Some("1"), None);
        check(None, None, None);
    }

    #[test]
    fn a_result_is_the_last_that_was_printed_and_a_file_that_the_run_wrote() {
        let folder = tempfile::tempdir().expect("a folder");
        let (output, file) = (folder.path().join("out"), folder.path().join("file"));
        fs::write(&output, "[rank 0] loss: 3\nloss: 2, loss: 1\nend\n").expect("a file");
        fs::write(&file, "old").expect("a file");
        let values = |pattern: &str| {
            let pattern = Regex::new(pattern).expect("an expression");
            let places = Places::new(Some(pattern), std::slice::from_ref(&file));
            (places.collect(&output).expect("read"), places)
        };
        let value = |evidence: &[Evidence], place: usize| evidence[place].value.clone();
        let (found, places) = values("loss: ([0-9])");
        assert_eq!(value(&found, 0).as_deref(), Some("1"));
        assert_eq!(value(&found, 1), None, "the run has not written it");
        fs::write(&file, "newer").expect("a file");
        let found = places.collect(&output).expect("read");
        let hash = value(&found, 1).expect("a hash");
        assert!(hash.starts_with("804f51f7"), "{hash}");
        assert_eq!(value(&values("loss: .").0, 0).as_deref(), Some("loss: 1"));
        assert_eq!(value(&values("nothing").0, 0), None);
    }
}
