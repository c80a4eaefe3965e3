//! Samples that were recorded: CSV as the tracker writes it, or a sample as JSON on each line.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::time::Duration;

use paceline_gpu::snapshot::{DEVICES_MAX, Gap, Reading};

use super::csv::{Header, Row, What};
use super::totals::RANKS_MAX;
use super::{Report, Rules, Source, Tally};
use crate::sample::Sample;

/// Longest line, in bytes.
const LINE_BYTES_MAX: u64 = 4 << 20;

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

/// What is wrong with a line.
#[derive(Debug)]
pub(crate) struct Wrong(String);

impl Wrong {
    pub(crate) fn new(why: impl Into<String>) -> Self {
        Self(why.into())
    }
}

/// Recorded samples, in their order, read as they are asked for.
///
/// As a [`Source`] it gives at each moment what was recorded last before it; past the end every reading is missing.
///
/// *Cost*: memory of two samples.
pub struct Replay {
    input: Box<dyn BufRead + Send>,
    line: u64,
    kind: Kind,
    row: Option<Row>,
    now: Option<Sample>,
    next: Option<Sample>,
    is_over: bool,
}

enum Kind {
    Csv(Box<Header>),
    Json { first: Option<String> },
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
    pub fn new(input: impl BufRead + Send + 'static) -> Result<Self, RecordingError> {
        let mut replay = Self {
            input: Box::new(input),
            line: 0,
            kind: Kind::Json { first: None },
            row: None,
            now: None,
            next: None,
            is_over: false,
        };
        let first = replay.line()?.ok_or(RecordingError::Empty)?;
        replay.kind = if first.starts_with('{') {
            Kind::Json { first: Some(first) }
        } else {
            let header = Header::parse(&first);
            Kind::Csv(Box::new(header.map_err(|wrong| replay.wrong(wrong))?))
        };
        Ok(replay)
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

    /// The next line that is not empty.
    fn line(&mut self) -> Result<Option<String>, RecordingError> {
        loop {
            let mut line = String::new();
            let mut bounded = (&mut self.input).take(LINE_BYTES_MAX);
            if bounded.read_line(&mut line)? == 0 {
                return Ok(None);
            }
            self.line += 1;
            if line.len() as u64 >= LINE_BYTES_MAX {
                return Err(self.wrong(Wrong::new("it is too long")));
            }
            let trimmed = line.trim();
            if !trimmed.is_empty() {
                return Ok(Some(trimmed.to_owned()));
            }
        }
    }

    fn wrong(&self, Wrong(why): Wrong) -> RecordingError {
        let line = self.line;
        RecordingError::Line { line, why }
    }

    fn read(&mut self) -> Result<Option<Sample>, RecordingError> {
        match &mut self.kind {
            Kind::Json { first } => {
                let line = match first.take() {
                    Some(line) => Some(line),
                    None => self.line()?,
                };
                let Some(line) = line else {
                    return Ok(None);
                };
                let sample: Sample = serde_json::from_str(&line)
                    .map_err(|error| self.wrong(Wrong::new(error.to_string())))?;
                if sample.devices.len() > DEVICES_MAX || sample.ranks.len() > RANKS_MAX {
                    return Err(self.wrong(Wrong::new("it has too many devices or ranks")));
                }
                Ok(Some(sample))
            }
            Kind::Csv(_) => self.rows(),
        }
    }

    /// The rows of one moment, as a sample.
    fn rows(&mut self) -> Result<Option<Sample>, RecordingError> {
        let first = match self.row.take() {
            Some(row) => Some(row),
            None => self.next_row()?,
        };
        let Some(first) = first else {
            return Ok(None);
        };
        let mut sample = Sample {
            at: first.at,
            ..Sample::default()
        };
        let mut row = Some(first);
        while let Some(now) = row {
            if now.at != sample.at {
                self.row = Some(now);
                break;
            }
            match now.what {
                What::Nothing => {}
                What::Gpu(device) => sample.devices.push(*device),
                What::Rank(rank) => sample.ranks.push(rank),
            }
            if sample.devices.len() > DEVICES_MAX || sample.ranks.len() > RANKS_MAX {
                return Err(self.wrong(Wrong::new("too many devices or ranks at one moment")));
            }
            row = self.next_row()?;
        }
        Ok(Some(sample))
    }

    fn next_row(&mut self) -> Result<Option<Row>, RecordingError> {
        let Some(line) = self.line()? else {
            return Ok(None);
        };
        let Kind::Csv(header) = &self.kind else {
            return Ok(None);
        };
        let row = header.row(&line);
        row.map(Some).map_err(|wrong| self.wrong(wrong))
    }
}

impl Iterator for Replay {
    type Item = Result<Sample, RecordingError>;

    /// The next sample; nothing after the first error.
    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let read = self.read();
        self.is_over = !matches!(read, Ok(Some(_)));
        read.transpose()
    }
}

impl Source for Replay {
    fn sample(&mut self, at: Duration) -> Sample {
        let mut why = Gap::other("the recording has ended");
        loop {
            if self.next.is_none() {
                match self.next() {
                    Some(Ok(sample)) => self.next = Some(sample),
                    Some(Err(error)) => why = Gap::other(error),
                    None => {}
                }
            }
            match self.next.take() {
                Some(next) if self.now.is_some() && next.at > at => {
                    self.next = Some(next);
                    break;
                }
                Some(next) => self.now = Some(next),
                None => {
                    if let Some(now) = self.now.as_mut().filter(|now| now.at < at) {
                        silence(now, &why);
                    }
                    break;
                }
            }
        }
        let mut sample = self.now.clone().unwrap_or_default();
        sample.at = at;
        sample
    }
}

/// Takes every reading away.
fn silence(sample: &mut Sample, why: &Gap) {
    for device in &mut sample.devices {
        *device = paceline_gpu::sample::DeviceSample {
            index: device.index,
            utilization_percent: Reading::missing(why.clone()),
            ..Default::default()
        };
    }
    for rank in &mut sample.ranks {
        rank.cpu = Reading::missing(why.clone());
        rank.resident_bytes = Reading::missing(why.clone());
    }
}

#[cfg(test)]
mod tests;
