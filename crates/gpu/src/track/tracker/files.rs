//! Files that appear whole: written beside their place and renamed.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::sample::Sample;
use crate::track::csv::CsvWriter;
use crate::track::report::Note;

/// How old the samples are at most that a crash takes with it.
const FLUSH_EVERY: Duration = Duration::from_secs(1);

/// The samples' file; after the first error nothing more is written, and the end tells.
#[derive(Debug)]
pub(super) struct Csv {
    path: PathBuf,
    beside: PathBuf,
    writer: io::Result<CsvWriter<BufWriter<File>>>,
    flushed: Duration,
}

impl Csv {
    pub(super) fn create(path: &Path) -> Self {
        let beside = beside(path);
        let file = File::create(&beside);
        Self {
            path: path.to_owned(),
            writer: file.and_then(|file| CsvWriter::new(BufWriter::new(file))),
            beside,
            flushed: Duration::ZERO,
        }
    }

    pub(super) fn write(&mut self, sample: &Sample) {
        let Ok(writer) = &mut self.writer else {
            return;
        };
        let mut written = writer.write(sample);
        if written.is_ok() && sample.at.saturating_sub(self.flushed) >= FLUSH_EVERY {
            self.flushed = sample.at;
            written = writer.flush();
        }
        if let Err(error) = written {
            self.writer = Err(error);
        }
    }

    /// Moves the file to its place; says what went wrong.
    pub(super) fn finish(self) -> Option<Note> {
        let finished = self.writer.and_then(|mut writer| {
            writer.flush()?;
            fs::rename(&self.beside, &self.path)
        });
        note(&self.path, finished)
    }
}

/// Writes a file beside its place and renames it.
///
/// *Errors* - those of the file system; then nothing is left beside it.
pub(super) fn write_beside(path: &Path, bytes: &[u8]) -> io::Result<()> {
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

/// What a report says of a file that was not written.
pub(super) fn note(path: &Path, written: io::Result<()>) -> Option<Note> {
    let error = written.err()?;
    Some(Note::File {
        path: path.display().to_string(),
        why: error.to_string(),
    })
}

/// `usage.csv.part`
fn beside(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".part");
    name.into()
}
