//! The lines of a run's metrics, followed while it trains.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::mem;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::de::IgnoredAny;

use crate::error::ReportError;

/// The file that a folder with a run has.
pub const METRICS: &str = "metrics.jsonl";

/// Longest line that is read: one of the end of a job of many thousand ranks fits.
pub(crate) const LINE_BYTES_MAX: usize = 16 << 20;

/// The metrics of a run from where they were read last.
pub struct Tail {
    /// Of the metrics.
    path: PathBuf,
    file: BufReader<File>,
    /// Bytes read.
    at: u64,
    /// The beginning of a line whose end is not written.
    part: Vec<u8>,
    /// In a line that is too long.
    skips: bool,
    /// The last line that was given.
    line: Vec<u8>,
}

impl Tail {
    /// Begins with the first line of a run directory's metrics.
    ///
    /// *Errors*: no metrics; the system's.
    pub fn open(folder: &Path) -> Result<Self, ReportError> {
        let path = folder.join(METRICS);
        let file = File::open(&path).map_err(|source| match source.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory => ReportError::NoRun {
                folder: folder.to_owned(),
            },
            _ => ReportError::file(&path)(source),
        })?;
        Ok(Self {
            path,
            file: BufReader::new(file),
            at: 0,
            part: Vec::new(),
            skips: false,
            line: Vec::new(),
        })
    }

    /// The run directory.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.path.parent().expect("a file is in a folder")
    }

    /// Begins anew if a resumed job has replaced the metrics, and returns whether it has.
    ///
    /// *Errors*: the metrics are gone; the system's.
    pub fn reopen(&mut self) -> Result<bool, ReportError> {
        let is_new = self.is_replaced()?;
        if is_new {
            *self = Self::open(self.folder())?;
        }
        Ok(is_new)
    }

    /// Whether another file has taken its place, or it has become shorter. The open file keeps its number from being used again.
    fn is_replaced(&self) -> Result<bool, ReportError> {
        let own = self.file.get_ref().metadata();
        let own = own.map_err(ReportError::file(&self.path))?;
        let there = match fs::metadata(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(ReportError::NoRun {
                    folder: self.folder().to_owned(),
                });
            }
            there => there.map_err(ReportError::file(&self.path))?,
        };
        let is_other = (own.dev(), own.ino()) != (there.dev(), there.ino());
        Ok(is_other || there.len() < self.at)
    }

    /// The next line, if there is one. The last one may lack its end: it is given once it is a record.
    ///
    /// *Errors*: the system's.
    pub fn next_line(&mut self) -> Result<Option<&[u8]>, ReportError> {
        let found = self.find_line();
        match found.map_err(ReportError::file(&self.path))? {
            true => Ok(Some(&self.line)),
            false => Ok(None),
        }
    }

    fn find_line(&mut self) -> io::Result<bool> {
        loop {
            let room = (LINE_BYTES_MAX - self.part.len()) as u64;
            let mut limited = self.file.by_ref().take(room);
            let read = limited.read_until(b'\n', &mut self.part)?;
            self.at += read as u64;
            let is_whole = self.part.ends_with(b"\n");
            let is_found = if is_whole || self.part.len() == LINE_BYTES_MAX {
                !mem::replace(&mut self.skips, !is_whole)
            } else if read == 0 {
                return Ok(false);
            } else if self.skips || !is_record(&self.part) {
                continue;
            } else {
                true
            };
            mem::swap(&mut self.line, &mut self.part);
            self.part.clear();
            if is_found {
                return Ok(true);
            }
        }
    }
}

fn is_record(line: &[u8]) -> bool {
    serde_json::from_slice::<BTreeMap<String, IgnoredAny>>(line).is_ok()
}
