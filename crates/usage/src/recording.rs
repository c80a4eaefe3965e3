//! Samples that were recorded: CSV as the tracker writes it, or a sample as JSON on each line.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::time::Duration;

use paceline_gpu::snapshot::DEVICES_MAX;

use super::csv::CsvSamples;
use super::totals::RANKS_MAX;
use super::{Report, Rules, Tally};
use crate::sample::Sample;

/// Longest line, in bytes.
const LINE_BYTES_MAX: usize = 4 << 20;

/// Why a recording cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// It cannot be read.
    #[error("the recording cannot be read: {0}")]
    Read(#[from] io::Error),
    /// A line is not what it should be.
    #[error("line {line} of the recording is wrong: {why}")]
    Line {
        /// Which, from 1.
        line: u64,
        /// What is wrong with it.
        why: String,
    },
    /// It has no samples.
    #[error("the recording has no samples")]
    Empty,
}

impl RecordingError {
    /// What a user can do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Read(_) => None,
            Self::Line { .. } | Self::Empty => Some(
                "a recording is the CSV that the tracker wrote, or JSON lines with a sample each",
            ),
        }
    }
}

/// Reads on, and fails in a line that is too long, so that no reader of lines takes all memory.
struct ShortLines<R> {
    input: R,
    line_bytes: usize,
}

impl<R: Read> Read for ShortLines<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(buffer)?;
        let read = &buffer[..count];
        self.line_bytes = match read.iter().rposition(|byte| *byte == b'\n') {
            Some(end) => count - end - 1,
            None => self.line_bytes + count,
        };
        match self.line_bytes < LINE_BYTES_MAX {
            true => Ok(count),
            false => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a line is too long",
            )),
        }
    }
}

/// Recorded samples, in their order, read as they are asked for.
///
/// *Cost*: memory of two samples.
pub struct Replay {
    samples: Box<dyn Iterator<Item = Result<Sample, RecordingError>> + Send>,
    is_over: bool,
}

impl Replay {
    /// A recording in a file.
    ///
    /// *Errors*: those of [`Self::new`].
    pub fn open(path: &Path) -> Result<Self, RecordingError> {
        Self::new(BufReader::new(File::open(path)?))
    }

    /// A recording from anywhere.
    ///
    /// *Errors*: it cannot be read, or begins with neither a header nor a sample.
    pub fn new(mut input: impl BufRead + Send + 'static) -> Result<Self, RecordingError> {
        let first = loop {
            match input.fill_buf()?.first() {
                None => return Err(RecordingError::Empty),
                Some(byte) if byte.is_ascii_whitespace() => input.consume(1),
                Some(byte) => break *byte,
            }
        };
        let input = ShortLines {
            input,
            line_bytes: 0,
        };
        Ok(Self {
            samples: match first {
                b'{' => Box::new(json(input)),
                _ => Box::new(CsvSamples::new(input)?),
            },
            is_over: false,
        })
    }

    /// What a tracker would have reported of it.
    ///
    /// *Errors*: those of reading it; one without samples.
    pub fn report(self, rules: Rules) -> Result<Report, RecordingError> {
        let mut tally = Tally::new(rules, Duration::from_millis(100));
        let mut is_empty = true;
        for sample in self {
            tally.add(&sample?);
            is_empty = false;
        }
        if is_empty {
            return Err(RecordingError::Empty);
        }
        Ok(tally.report())
    }
}

/// Samples as JSON, one after the other.
fn json(
    input: impl Read + Send + 'static,
) -> impl Iterator<Item = Result<Sample, RecordingError>> + Send {
    let samples =
        serde_json::Deserializer::from_reader(BufReader::new(input)).into_iter::<Sample>();
    samples.map(|sample| match sample {
        Ok(sample) if sample.devices.len() > DEVICES_MAX || sample.ranks.len() > RANKS_MAX => {
            let error = io::Error::new(
                io::ErrorKind::InvalidData,
                "a sample has too many devices or ranks",
            );
            Err(RecordingError::Read(error))
        }
        Ok(sample) => Ok(sample),
        Err(error) if error.is_io() => Err(RecordingError::Read(error.into())),
        Err(error) => Err(RecordingError::Line {
            line: error.line() as u64,
            why: error.to_string(),
        }),
    })
}

impl Iterator for Replay {
    type Item = Result<Sample, RecordingError>;

    /// The next sample; nothing after the first error.
    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let next = self.samples.next();
        self.is_over = !matches!(next, Some(Ok(_)));
        next
    }
}

#[cfg(test)]
mod tests;
