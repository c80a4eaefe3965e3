//! The files of one attempt, laid out as torchrun does: `attempt_<N>/<local rank>/{stdout,stderr}.log` and `error.json`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::options::LogOptions;
use super::stream::Stream;
use crate::error::LaunchError;

/// The folder of one attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Attempt(PathBuf);

impl Attempt {
    /// Its place in the log folder of a job, in full, for ranks that may work in another folder.
    pub(crate) fn new(log_dir: &Path, restart_count: u32) -> Self {
        let log_dir = std::path::absolute(log_dir).unwrap_or_else(|_| log_dir.to_owned());
        Self(log_dir.join(format!("attempt_{restart_count}")))
    }

    /// The file of a rank's stream.
    pub(crate) fn log(&self, local_rank: usize, stream: Stream) -> PathBuf {
        self.rank(local_rank).join(format!("{}.log", stream.name()))
    }

    /// The file for a rank's error, written by torch's `@record` or by a program that follows its convention.
    pub(crate) fn error_file(&self, local_rank: usize) -> PathBuf {
        self.rank(local_rank).join("error.json")
    }

    fn rank(&self, local_rank: usize) -> PathBuf {
        self.0.join(local_rank.to_string())
    }

    /// Makes a rank's folder and opens its logs. Existing logs are continued, so that a resumed run keeps its output. An
    /// earlier run's error is removed, since it would pass for one of this run.
    pub(crate) fn open(
        &self,
        local_rank: usize,
        options: &LogOptions,
    ) -> Result<[LogFile; 2], LaunchError> {
        let folder = self.rank(local_rank);
        fs::create_dir_all(&folder).map_err(LaunchError::log(&folder))?;
        let error_file = self.error_file(local_rank);
        match fs::remove_file(&error_file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(LaunchError::log(&error_file)(error));
            }
            _ => {}
        }
        let open = |stream| LogFile::open(self.log(local_rank, stream), options.file_bytes_max);
        Ok([open(Stream::Out)?, open(Stream::Err)?])
    }

    /// Opens the file for the lines of all ranks that a filter takes, if there is a filter.
    pub(crate) fn open_filtered(
        &self,
        stream: Stream,
        options: &LogOptions,
    ) -> Result<Option<LogFile>, LaunchError> {
        if options.filter(stream).is_empty() {
            return Ok(None);
        }
        fs::create_dir_all(&self.0).map_err(LaunchError::log(&self.0))?;
        let path = self.0.join(format!("filtered_{}.log", stream.name()));
        LogFile::open(path, options.file_bytes_max).map(Some)
    }
}

/// A file that lines are appended to.
#[derive(Debug)]
pub(crate) struct LogFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    bytes_max: Option<u64>,
}

impl LogFile {
    fn open(path: PathBuf, bytes_max: Option<u64>) -> Result<Self, LaunchError> {
        let (file, bytes) = open(&path).map_err(LaunchError::log(&path))?;
        Ok(Self {
            path,
            file,
            bytes,
            bytes_max,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends whole lines. Where the file gets too long, it becomes `<name>.1` in place of an older one.
    pub(crate) fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        let bytes = self.bytes.saturating_add(lines.len() as u64);
        if self.bytes > 0 && self.bytes_max.is_some_and(|max| bytes > max) {
            let mut old = self.path.clone().into_os_string();
            old.push(".1");
            fs::rename(&self.path, old)?;
            (self.file, self.bytes) = open(&self.path)?;
        }
        self.file.write_all(lines)?;
        self.bytes = self.bytes.saturating_add(lines.len() as u64);
        Ok(())
    }
}

fn open(path: &Path) -> io::Result<(File, u64)> {
    let file = OpenOptions::new().create(true).append(true).open(path)?;
    let bytes = file.metadata()?.len();
    Ok((file, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_gets_too_long_keeps_its_newest_lines() {
        let folder = tempfile::tempdir().unwrap();
        let options = LogOptions {
            file_bytes_max: Some(10),
            ..LogOptions::default()
        };
        let attempt = Attempt::new(folder.path(), 0);
        let [mut log, _] = attempt.open(3, &options).unwrap();
        for line in ["one\n", "two\n", "three\n", "four\n", "a very long line\n"] {
            log.append(line.as_bytes()).unwrap();
        }
        let read =
            |name: &str| fs::read_to_string(folder.path().join("attempt_0/3").join(name)).unwrap();
        assert_eq!(read("stdout.log.1"), "three\nfour\n".get(6..).unwrap());
        assert_eq!(read("stdout.log"), "a very long line\n");
    }

    #[test]
    fn logs_are_continued_and_an_old_error_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let attempt = Attempt::new(folder.path(), 1);
        let options = LogOptions::default();
        for _ in 0..2 {
            let [_, mut log] = attempt.open(0, &options).unwrap();
            log.append(b"line\n").unwrap();
            assert!(!attempt.error_file(0).exists());
            fs::write(attempt.error_file(0), "{}").unwrap();
        }
        let log = attempt.log(0, Stream::Err);
        assert!(log.ends_with("attempt_1/0/stderr.log"));
        assert_eq!(fs::read_to_string(log).unwrap(), "line\nline\n");
    }
}
