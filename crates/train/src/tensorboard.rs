//! TensorBoard's event files, beside the metrics of a run.
//!
//! A file is a sequence of records in the framing of TFRecord, each an `Event` in the encoding of protocol buffers. TensorBoard reads the
//! files of a folder in the order of their names, and a session's start drops what earlier files have of its step and later ones.
//!
//! *Source*: `tensorflow/core/util/event.proto`, `tensorflow/core/framework/summary.proto` and `tensorflow/core/lib/io/record_writer.cc`.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::mem;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use paceline_usage::spans;
use serde_json::{Map, Value};

use crate::protobuf::Message;
use crate::run_dir::key;
use crate::scalars::scalars;

/// TensorBoard finds files by it, and shows each folder that has one as a run.
const PREFIX: &str = "events.out.tfevents.";

/// The version of the format whose sessions have a start.
const VERSION: &str = "brain.Event:2";

/// Longest event that is read back: a scalar has some fifty bytes.
const EVENT_BYTES_MAX: u64 = 1 << 20;

/// Numbers of the messages' fields.
mod field {
    pub(super) const EVENT_WALL_TIME: u64 = 1;
    pub(super) const EVENT_STEP: u64 = 2;
    pub(super) const EVENT_FILE_VERSION: u64 = 3;
    pub(super) const EVENT_SUMMARY: u64 = 5;
    pub(super) const EVENT_SESSION_LOG: u64 = 7;
    pub(super) const SESSION_LOG_STATUS: u64 = 1;
    pub(super) const SUMMARY_VALUE: u64 = 1;
    pub(super) const VALUE_TAG: u64 = 1;
    pub(super) const VALUE_SIMPLE: u64 = 2;
}

/// `SessionLog.START`
const START: u64 = 1;

/// An event file that is written.
pub(crate) struct Events {
    file: BufWriter<File>,
    /// Lines, and when they came: a training step must not wait for their encoding.
    waiting: Vec<(f64, Vec<u8>)>,
}

impl Events {
    /// Begins a file behind those of the run, whose events from `step` on do not count any more, with the events of the lines from then on, and of
    /// earlier ones that a lost rank 0 has not written. A run without event files, which is older than them, gets those of all lines.
    ///
    /// *Errors*: the system's.
    pub(crate) fn create(run: &Path, step: u64, lines: &[u8]) -> io::Result<Self> {
        let now = now();
        // Clocks of two hosts may differ, and a lost rank 0 may be followed within a second.
        let (number, step) = match newest(run) {
            Some((newest, path)) => {
                let number = (now as u64).max(newest.saturating_add(1));
                (number, step.min(last_step(&path)?))
            }
            None => (now as u64, 0),
        };
        let path = run.join(format!("{PREFIX}{number:010}.paceline"));
        let file = File::options().write(true).create_new(true).open(path)?;
        let mut events = Self {
            file: BufWriter::new(file),
            waiting: Vec::new(),
        };
        events.write(now, 0, |event| {
            event.text(field::EVENT_FILE_VERSION, VERSION)
        })?;
        let mut session = Message::default();
        session.number(field::SESSION_LOG_STATUS, START);
        events.write(now, step, |event| {
            event.message(field::EVENT_SESSION_LOG, &session)
        })?;
        let lines = lines.split_inclusive(|byte| *byte == b'\n').rev();
        // The spans of earlier steps may follow; they have no events.
        let again: Vec<_> = lines
            .take_while(|line| {
                key(line).is_some_and(|(kind, at)| at >= step || kind == spans::RECORD)
            })
            .collect();
        let mut again = again.into_iter().rev();
        again.try_for_each(|line| events.encode(now, line))?;
        Ok(events)
    }

    /// Adds the scalars of a line of `metrics.jsonl`, with the next [`flush`](Self::flush).
    pub(crate) fn add(&mut self, line: &[u8]) {
        self.waiting.push((now(), line.to_vec()));
    }

    fn encode(&mut self, time: f64, line: &[u8]) -> io::Result<()> {
        let record: Map<String, Value> = serde_json::from_slice(line)?;
        let step = record.get("step").and_then(Value::as_u64).unwrap_or(0);
        let mut summary = Message::default();
        for (tag, scalar) in scalars(&record) {
            let mut value = Message::default();
            value.text(field::VALUE_TAG, &tag);
            value.float(field::VALUE_SIMPLE, scalar as f32);
            summary.message(field::SUMMARY_VALUE, &value);
        }
        match summary.is_empty() {
            true => Ok(()),
            false => self.write(time, step, |event| {
                event.message(field::EVENT_SUMMARY, &summary)
            }),
        }
    }

    /// Hands all events to the system.
    ///
    /// *Cost*: some microseconds for each line.
    ///
    /// *Errors*: the system's.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        for (time, line) in mem::take(&mut self.waiting) {
            self.encode(time, &line)?;
        }
        self.file.flush()
    }

    fn write(
        &mut self,
        time: f64,
        step: u64,
        content: impl FnOnce(&mut Message),
    ) -> io::Result<()> {
        let mut event = Message::default();
        event.double(field::EVENT_WALL_TIME, time);
        event.number(field::EVENT_STEP, step);
        content(&mut event);
        let message = event.encoded();
        let len = (message.len() as u64).to_le_bytes();
        self.file.write_all(&len)?;
        self.file.write_all(&masked_crc32c(&len).to_le_bytes())?;
        self.file.write_all(&message)?;
        self.file.write_all(&masked_crc32c(&message).to_le_bytes())
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // A job that fails has an error of its own.
        let _ = self.flush();
    }
}

/// Seconds since 1970.
fn now() -> f64 {
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    now.as_secs_f64()
}

/// The number in the name of the last event file, and its path.
fn newest(run: &Path) -> Option<(u64, PathBuf)> {
    let entries = fs::read_dir(run).into_iter().flatten().flatten();
    let number = |name: &str| name.strip_prefix(PREFIX)?.split('.').next()?.parse().ok();
    entries
        .filter_map(|entry| Some((number(entry.file_name().to_str()?)?, entry.path())))
        .max()
}

/// The step of the last whole event in a file of ours.
///
/// *Errors*: the system's.
fn last_step(path: &Path) -> io::Result<u64> {
    let mut file = BufReader::new(File::open(path)?);
    let (mut last, mut event) = (0, Vec::new());
    loop {
        let (mut len, mut checksum) = ([0; 8], [0; 4]);
        // A crash may have torn the last one.
        let head = file
            .read_exact(&mut len)
            .and_then(|()| file.read_exact(&mut checksum));
        let len = u64::from_le_bytes(len);
        if head.is_err() || len > EVENT_BYTES_MAX {
            return Ok(last);
        }
        event.clear();
        file.by_ref().take(len).read_to_end(&mut event)?;
        if file.read_exact(&mut checksum).is_err() {
            return Ok(last);
        }
        last = step_of(&event).unwrap_or(last);
    }
}

/// The step of an event that [`Events::write`] wrote: its second field, behind a double.
fn step_of(event: &[u8]) -> Option<u64> {
    let number = event.get(1 + size_of::<f64>() + 1..)?;
    let end = number.iter().position(|byte| byte & 0x80 == 0)?;
    let digits = number[..=end].iter().rev();
    Some(digits.fold(0, |step, byte| step << 7 | u64::from(byte & 0x7f)))
}

/// The checksum of a record: Castagnoli's polynomial, rotated and shifted, because a checksum over data with checksums is weak.
fn masked_crc32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut byte = 0;
        while byte < 256 {
            let mut remainder = byte as u32;
            let mut bit = 0;
            while bit < 8 {
                remainder = (remainder >> 1) ^ ((remainder & 1) * 0x82f6_3b78);
                bit += 1;
            }
            table[byte] = remainder;
            byte += 1;
        }
        table
    };
    let add = |crc: u32, byte: &u8| (crc >> 8) ^ TABLE[usize::from(crc as u8 ^ byte)];
    let crc = !bytes.iter().fold(!0, add);
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests;
