//! The launcher's own standard output and error: one thread that folds, formats and writes what the readers send.
//!
//! A console that takes nothing (a terminal stopped with Ctrl-S, a pager) holds up the ranks as it would if they wrote to
//! it themselves: nothing is lost, because standard output may be data for another program. The queue
//! bounds how much waits.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use super::bar;
use super::fold::{Fold, Folded};
use super::format::{self, Formatter};
use super::options::LogFormat;
use super::reader::lock;
use super::stream::Stream;

/// Batches that wait for the console; each has at most what two reads of a pipe leave.
pub(crate) const BATCHES_MAX: usize = 64;
/// Most bytes that are collected for one write.
const WRITE_BYTES: usize = 64 * 1024;
/// The longest wait if no line is held back, so that every wait ends.
const IDLE: Duration = Duration::from_secs(60);

/// Lines that a person still sees above the report.
const NEWEST_MAX: usize = 30;

/// The local ranks of the newest lines on standard error, for the report: it does not repeat what is right above it.
pub(crate) type Newest = Arc<Mutex<VecDeque<Vec<usize>>>>;

/// Takes the readers' batches.
pub(crate) type ToConsole = SyncSender<Batch>;

/// Output of one rank on one stream.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) local_rank: usize,
    /// Its rank in the job.
    pub(crate) rank: usize,
    pub(crate) stream: Stream,
    pub(crate) at: SystemTime,
    pub(crate) content: Content,
}

/// Lines or plain bytes.
#[derive(Debug)]
pub(crate) enum Content {
    /// Whole lines, each with its newline.
    Lines(Vec<u8>),
    /// Bytes that go through as they are.
    Raw(Vec<u8>),
    /// The beginning of a line that a person is to answer, or more of it.
    Question { text: Vec<u8>, is_first: bool },
}

/// The console's thread.
#[derive(Debug)]
pub(crate) struct Console {
    formatter: Formatter,
    /// The rank in the job of each local rank.
    ranks: Vec<usize>,
    fold: Option<Fold>,
    started: Instant,
    text: Vec<u8>,
    stream: Stream,
    /// The rank whose question is the last line, without an end.
    asked: Option<usize>,
    /// Whether a [bar] is the last line.
    has_bar: bool,
    broken: [bool; 2],
    newest: Newest,
}

impl Console {
    /// A console for lines of `shown` ranks.
    pub(crate) fn new(formatter: Formatter, shown: usize, newest: Newest) -> Self {
        let folds = formatter.options.fold && formatter.options.format == LogFormat::Text;
        Self {
            formatter,
            ranks: Vec::new(),
            fold: (folds && shown > 1).then(|| Fold::new(shown)),
            started: Instant::now(),
            text: Vec::new(),
            stream: Stream::Out,
            asked: None,
            has_bar: false,
            broken: [false; 2],
            newest,
        }
    }

    /// Writes until all readers are gone.
    pub(crate) fn run(mut self, batches: &Receiver<Batch>) {
        loop {
            let wait = self
                .fold
                .as_ref()
                .and_then(Fold::due)
                .map_or(IDLE, |due| due.saturating_sub(self.started.elapsed()));
            match batches.recv_timeout(wait) {
                Ok(batch) => self.take(batch),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            while self.text.len() < WRITE_BYTES
                && let Ok(batch) = batches.try_recv()
            {
                self.take(batch);
            }
            self.take_folded(false);
            self.write();
        }
        self.take_folded(true);
        self.write();
    }

    fn take(&mut self, batch: Batch) {
        let known = self.ranks.len();
        self.ranks.extend(known..=batch.local_rank);
        self.ranks[batch.local_rank] = batch.rank;
        match batch.content {
            Content::Raw(bytes) => self.append_raw(batch.stream, &bytes),
            Content::Question { text, is_first } => {
                self.take_folded(true);
                self.clear_bar();
                self.asked = Some(batch.local_rank);
                let line = format::single(batch.at, batch.local_rank, batch.stream, &text);
                self.append(batch.stream, |console, out| match is_first {
                    true => console.formatter.write_text(&line, &console.ranks, out),
                    false => out.extend_from_slice(&text),
                });
            }
            Content::Lines(lines) => {
                for line in lines
                    .strip_suffix(b"\n")
                    .unwrap_or(&lines)
                    .split(|byte| *byte == b'\n')
                {
                    match &mut self.fold {
                        Some(fold) => {
                            let now = self.started.elapsed();
                            fold.push(now, batch.at, batch.local_rank, batch.stream, line);
                        }
                        None => {
                            self.append_line(&format::single(
                                batch.at,
                                batch.local_rank,
                                batch.stream,
                                line,
                            ));
                        }
                    }
                }
                self.take_folded(false);
            }
        }
    }

    fn take_folded(&mut self, all: bool) {
        let now = self.started.elapsed();
        while let Some(line) = self.fold.as_mut().and_then(|fold| match all {
            true => fold.pop_any(),
            false => fold.pop(now),
        }) {
            self.append_line(&line);
        }
    }

    /// Bytes as they are, but nothing is behind or below a bar.
    fn append_raw(&mut self, stream: Stream, mut bytes: &[u8]) {
        while let Some(first) = bytes.first() {
            if *first != b'\r' {
                self.clear_bar();
            }
            let bar = match stream {
                Stream::Out => bar::end(bytes),
                Stream::Err => None,
            };
            let (now, rest) = bytes.split_at(bar.unwrap_or(bytes.len()));
            self.append(stream, |_, text| text.extend_from_slice(now));
            self.has_bar = bar.is_some();
            bytes = rest;
        }
    }

    fn clear_bar(&mut self) {
        if std::mem::take(&mut self.has_bar) {
            self.append(Stream::Out, |_, text| text.extend_from_slice(bar::ERASE));
        }
    }

    fn append_line(&mut self, line: &Folded) {
        self.clear_bar();
        // The answer that was typed has ended the line, unless another rank's line comes first.
        let is_between = self.asked.take().is_some_and(|asked| line.ranks != [asked]);
        if line.stream == Stream::Err && self.formatter.options.format == LogFormat::Text {
            let mut newest = lock(&self.newest);
            newest.truncate(NEWEST_MAX - 1);
            newest.push_front(line.ranks.clone());
        }
        self.append(line.stream, |console, text| {
            if is_between {
                text.push(b'\n');
            }
            console.formatter.write(line, &console.ranks, text);
        });
    }

    /// Both streams often lead to the same terminal, so their order is kept.
    fn append(&mut self, stream: Stream, write: impl FnOnce(&Self, &mut Vec<u8>)) {
        if self.stream != stream || self.text.len() >= WRITE_BYTES {
            self.write();
            self.stream = stream;
        }
        let mut text = std::mem::take(&mut self.text);
        write(self, &mut text);
        self.text = text;
    }

    /// Writes the collected bytes. A stream whose reader is gone (`| head`) gets no more; the job goes on.
    fn write(&mut self) {
        let is_broken = &mut self.broken[self.stream as usize];
        if !*is_broken && !self.text.is_empty() {
            let written = match self.stream {
                Stream::Out => write_and_flush(io::stdout().lock(), &self.text),
                Stream::Err => write_and_flush(io::stderr().lock(), &self.text),
            };
            *is_broken = written.is_err();
            bar::set_drawn(self.has_bar);
        }
        self.text.clear();
    }
}

fn write_and_flush(mut to: impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes)?;
    to.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::options::LogOptions;

    /// What a terminal gets of raw output, `^` for erasing a line; what stands before `|` comes as a batch of its own.
    fn terminal(batches: &str) -> String {
        let formatter = Formatter {
            options: LogOptions::default(),
            host: String::new(),
            role: String::new(),
            attempt: 0,
        };
        let mut console = Console::new(formatter, 1, Newest::default());
        for text in batches.split('|') {
            let bytes = text.replace('^', "\x1b[2K").into_bytes();
            console.take(Batch {
                local_rank: 0,
                rank: 0,
                stream: Stream::Out,
                at: SystemTime::UNIX_EPOCH,
                content: match text.strip_prefix('*') {
                    Some(line) => Content::Lines(line.into()),
                    None => Content::Raw(bytes),
                },
            });
        }
        let text = String::from_utf8(std::mem::take(&mut console.text)).expect("text");
        text.replace("\x1b[2K", "^")
    }

    #[test]
    fn a_print_takes_the_place_of_a_bar() {
        for (batches, expected) in [
            ("\r^one\r|hello\n", "\r^one\r\r^hello\n"),
            (
                "\r^one\rhello\nworld\n\r^two\r",
                "\r^one\r\r^hello\nworld\n\r^two\r",
            ),
            (
                "\r^one\r\r^two\r|*a line\n",
                "\r^one\r\r^two\r\r^[rank 0] a line\n",
            ),
            ("\r^one\r\r^two\r|\r^|end\n", "\r^one\r\r^two\r\r^end\n"),
            // Bars of others, and lines that are no bars.
            ("\r10 %|\r20 %|\nend\n", "\r10 %\r20 %\nend\n"),
            ("\r^end\nmore\n", "\r^end\nmore\n"),
        ] {
            assert_eq!(terminal(batches), expected, "{batches:?}");
        }
    }
}
