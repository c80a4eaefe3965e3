//! The files of a tracker: samples while it runs, and what it says of those that could not be written.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::csv::CsvWriter;
use crate::files::beside;
use crate::report::Note;
use crate::sample::Sample;

/// How old the samples are at most that a crash takes with it.
const FLUSH_EVERY: Duration = Duration::from_secs(1);

/// The samples' file; after the first error nothing more is written, and the end tells.
#[derive(Debug)]
pub(super) struct Csv {
    path: PathBuf,
    beside: PathBuf,
    writer: io::Result<CsvWriter<File>>,
    flushed: Duration,
}

impl Csv {
    pub(super) fn create(path: &Path) -> Self {
        let beside = beside(path);
        let file = File::create(&beside);
        Self {
            path: path.to_owned(),
            writer: file.and_then(CsvWriter::new),
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

/// What a report says of a file that was not written.
pub(super) fn note(path: &Path, written: io::Result<()>) -> Option<Note> {
    let error = written.err()?;
    Some(Note::File {
        path: path.display().to_string(),
        why: error.to_string(),
    })
}
