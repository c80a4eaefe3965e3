//! One rank's reader: a thread that takes its two streams apart into lines and hands them to the files, the console and
//! the memory for the report.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec};

use super::console::{Batch, Content, ToConsole};
use super::files::LogFile;
use super::lines::{Lines, Piece};
use super::options::LineFilter;
use super::stream::Stream;
use super::tail::Tails;
use crate::worker::Pipes;

/// When the job is over, the rest of the pipes is read for at most this long.
pub(crate) const DRAIN_TIME: Duration = Duration::from_millis(300);
/// One read; also the capacity of a Linux pipe.
const READ_BYTES: usize = 64 * 1024;
/// A line that is not finished by then may be a question to the person at the terminal.
const QUESTION_AFTER: Duration = Duration::from_millis(100);
/// A progress bar is a line, in its file and on a console that several ranks share, at most this often.
const BAR_EVERY: Duration = Duration::from_secs(5);

/// Shared by all readers of a job.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) notes: Mutex<Vec<String>>,
    /// The filter of each stream, and the file for the lines that it takes.
    pub(crate) filtered: [Option<(LineFilter, Mutex<Option<LogFile>>)>; 2],
    /// The first local rank that is left: the only one that the console shows with [`Shows::Raw`].
    pub(crate) first: AtomicUsize,
}

/// How much a rank prints, which tells whether it makes progress.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    /// Bytes that came on either stream.
    pub(crate) bytes: AtomicU64,
    /// The console takes nothing now; soon the rank cannot print.
    pub(crate) is_held_up: AtomicBool,
}

/// One rank's thread.
#[derive(Debug)]
pub(crate) struct Reader {
    pub(crate) local_rank: usize,
    /// Its rank in the job.
    pub(crate) rank: usize,
    /// Whether it has a lost rank's place.
    pub(crate) replaces: bool,
    /// The prefix of its lines in the filtered files.
    pub(crate) prefix: String,
    pub(crate) logs: [Option<LogFile>; 2],
    pub(crate) shows: Shows,
    pub(crate) console: ToConsole,
    pub(crate) tails: Arc<Mutex<Tails>>,
    pub(crate) traffic: Arc<Traffic>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) streams: [StreamState; 2],
}

/// The part of a rank's output that reaches the console.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shows {
    /// The lines of these streams.
    Lines([bool; 2]),
    /// All bytes, as they come, of the first rank that is left.
    Raw,
}

impl Shows {
    pub(crate) fn is_any(self) -> bool {
        self != Self::Lines([false; 2])
    }
}

/// One stream between two reads.
#[derive(Debug, Default)]
pub(crate) struct StreamState {
    lines: Lines,
    bar: Bar,
    /// How much of the unfinished line is on the console.
    prompted: usize,
    to_log: Vec<u8>,
    to_console: Vec<u8>,
    to_filtered: Vec<u8>,
}

impl Reader {
    /// Reads both streams as bytes arrive, until both have ended or the launcher says stop.
    pub(crate) fn run(mut self, pipes: Pipes, stopped: &OwnedFd) {
        let mut out = Some(File::from(OwnedFd::from(pipes.out)));
        let mut err = Some(File::from(OwnedFd::from(pipes.err)));
        let mut buffer = vec![0; READ_BYTES];
        let is_interactive = pipes.is_interactive && matches!(self.shows, Shows::Lines(_));
        let mut leave_at = None;
        while out.is_some() || err.is_some() {
            let wait = match leave_at {
                Some(_) => Some(Duration::ZERO),
                None if is_interactive && self.has_question() => Some(QUESTION_AFTER),
                None => None,
            };
            let ready = ready(&out, &err, stopped, wait);
            if ready.stopped {
                leave_at.get_or_insert_with(|| Instant::now() + DRAIN_TIME);
            } else if !(ready.streams[0] || ready.streams[1]) && leave_at.is_some() {
                break;
            }
            for (stream, from) in Stream::BOTH.into_iter().zip([&mut out, &mut err]) {
                if ready.streams[stream as usize] {
                    self.read(stream, from, &mut buffer);
                    self.flush(stream);
                }
            }
            if is_interactive && !(ready.streams[0] || ready.streams[1]) {
                self.show_questions();
            }
            if leave_at.is_some_and(|leave_at| Instant::now() >= leave_at) {
                break;
            }
        }
        for stream in Stream::BOTH {
            self.take(stream, None);
            self.flush(stream);
        }
    }

    /// Whether a line is unfinished that the console does not show yet.
    fn has_question(&self) -> bool {
        let is_hidden = |state: &StreamState| state.lines.unfinished().len() > state.prompted;
        self.streams.iter().any(is_hidden)
    }

    /// Shows the beginnings of unfinished lines: the rank waits for an answer.
    fn show_questions(&mut self) {
        for stream in Stream::BOTH {
            let state = &mut self.streams[stream as usize];
            let begun = state.lines.unfinished();
            if self.shows == Shows::Lines([false; 2]) || begun.len() <= state.prompted {
                continue;
            }
            let question = begun[state.prompted..].to_vec();
            let is_first = std::mem::replace(&mut state.prompted, begun.len()) == 0;
            let content = Content::Question {
                text: question,
                is_first,
            };
            self.send(stream, content);
        }
    }

    fn read(&mut self, stream: Stream, from: &mut Option<File>, buffer: &mut [u8]) {
        let Some(file) = from else { return };
        match file.read(buffer) {
            Ok(count) if count > 0 => {
                (self.traffic.bytes).fetch_add(count as u64, Ordering::Relaxed);
                self.take(stream, Some(&buffer[..count]));
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            _ => {
                self.take(stream, None);
                *from = None;
            }
        }
    }

    /// Whether the console shows another rank in place of this one. A lost rank's last bytes are still shown.
    fn is_behind(&self) -> bool {
        let first = self.shared.first.load(Ordering::Acquire);
        match self.replaces {
            true => self.local_rank != first,
            false => self.local_rank > first,
        }
    }

    /// Takes bytes, or the stream's end, apart into lines and notes where each goes.
    fn take(&mut self, stream: Stream, bytes: Option<&[u8]>) {
        let shows = match self.shows {
            Shows::Lines(shows) => shows[stream as usize],
            Shows::Raw if self.is_behind() => false,
            Shows::Raw => {
                self.send(stream, Content::Raw(bytes.unwrap_or_default().to_vec()));
                false
            }
        };
        let filter = self.shared.filtered[stream as usize]
            .as_ref()
            .map(|(filter, _)| filter);
        let StreamState {
            lines,
            bar,
            prompted,
            to_log,
            to_console,
            to_filtered,
        } = &mut self.streams[stream as usize];
        let mut tails = lock(&self.tails);
        let tail = &mut tails.0[stream as usize];
        let add = |to: &mut Vec<u8>, line: &[u8]| {
            to.extend_from_slice(line);
            to.push(b'\n');
        };
        let now = Instant::now();
        let mut keep = |line: &[u8], for_report: bool| {
            add(to_log, line);
            // The console already shows the beginning of an answered question.
            let shown = std::mem::take(prompted).min(line.len());
            if shows && (shown == 0 || shown < line.len()) {
                add(to_console, &line[shown..]);
            }
            if filter.is_some_and(|filter| filter.takes(line)) {
                to_filtered.extend_from_slice(self.prefix.as_bytes());
                add(to_filtered, line);
            }
            if for_report {
                tail.remember(line);
            }
        };
        let mut on_piece = |piece: Piece<'_>| match piece {
            Piece::Line(line) => {
                if let Some(state) = bar.end() {
                    keep(&state, true);
                }
                keep(line, true);
            }
            Piece::Overwritten(state) => {
                if bar.is_due(now) {
                    keep(state, false);
                }
            }
            Piece::Redrawn(state) => {
                if bar.is_due(now) {
                    keep(state, false);
                    bar.held = None;
                } else {
                    bar.held = Some(state.to_vec());
                }
            }
        };
        match bytes {
            Some(bytes) => lines.push(bytes, &mut on_piece),
            None => {
                lines.finish(&mut on_piece);
                if let Some(state) = bar.end() {
                    keep(&state, true);
                }
            }
        }
    }

    /// The file first: the console may take its time.
    fn flush(&mut self, stream: Stream) {
        let state = &mut self.streams[stream as usize];
        let (lines, filtered, to_console) = (
            std::mem::take(&mut state.to_log),
            std::mem::take(&mut state.to_filtered),
            std::mem::take(&mut state.to_console),
        );
        append(&mut self.logs[stream as usize], &lines, &self.shared.notes);
        if let Some((_, file)) = &self.shared.filtered[stream as usize] {
            append(&mut lock(file), &filtered, &self.shared.notes);
        }
        // The buffer of the log is kept for the next lines.
        self.streams[stream as usize].to_log = lines;
        self.streams[stream as usize].to_log.clear();
        if !to_console.is_empty() {
            self.send(stream, Content::Lines(to_console));
        }
    }

    fn send(&self, stream: Stream, content: Content) {
        let batch = Batch {
            local_rank: self.local_rank,
            rank: self.rank,
            stream,
            at: SystemTime::now(),
            content,
        };
        self.traffic.is_held_up.store(true, Ordering::Relaxed);
        // The console is gone only if it has panicked, and that is told at the end.
        let _ = self.console.send(batch);
        self.traffic.is_held_up.store(false, Ordering::Relaxed);
    }
}

fn append(to: &mut Option<LogFile>, lines: &[u8], notes: &Mutex<Vec<String>>) {
    if lines.is_empty() {
        return;
    }
    if let Some(log) = to
        && let Err(error) = log.append(lines)
    {
        let note = format!(
            "log `{}` is incomplete from here on: {error}",
            log.path().display()
        );
        lock(notes).push(note);
        *to = None;
    }
}

/// The state of a progress bar.
#[derive(Debug, Default)]
struct Bar {
    begun_or_kept: Option<Instant>,
    /// A redrawn line that nothing has overwritten yet and that is nowhere else.
    held: Option<Vec<u8>>,
}

impl Bar {
    /// Whether to keep a state: not of a bar that is soon done, and not too often.
    fn is_due(&mut self, now: Instant) -> bool {
        let since = *self.begun_or_kept.get_or_insert(now);
        let is_due = now.saturating_duration_since(since) >= BAR_EVERY;
        if is_due {
            self.begun_or_kept = Some(now);
        }
        is_due
    }

    /// A line follows, so the bar has come to its end; its last state stands if it was not overwritten.
    fn end(&mut self) -> Option<Vec<u8>> {
        self.begun_or_kept = None;
        self.held.take()
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Ready {
    streams: [bool; 2],
    stopped: bool,
}

/// Waits for bytes, for an end, for the launcher to say stop, or as long as `wait` says. A wait of zero only looks at the
/// streams.
///
/// The wait needs no deadline of its own: the launcher always ends it by dropping the other end of `stopped`.
fn ready(
    out: &Option<File>,
    err: &Option<File>,
    stopped: &OwnedFd,
    wait: Option<Duration>,
) -> Ready {
    let mut places = Vec::with_capacity(3);
    let mut polled = Vec::with_capacity(3);
    for (place, file) in [out, err].into_iter().enumerate() {
        if let Some(file) = file {
            places.push(place);
            polled.push(PollFd::new(file, PollFlags::IN));
        }
    }
    if wait != Some(Duration::ZERO) {
        places.push(2);
        polled.push(PollFd::new(stopped, PollFlags::IN));
    }
    let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
    // An interrupted poll leaves all results empty, which is right.
    let _ = rustix::event::poll(&mut polled, wait.as_ref());
    let is_ready = |wanted: usize| {
        let found = places.iter().position(|place| *place == wanted);
        found.is_some_and(|found| !polled[found].revents().is_empty())
    };
    Ready {
        streams: [is_ready(0), is_ready(1)],
        stopped: is_ready(2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_a_line_now_and_then_and_a_quick_one_only_at_its_end() {
        let start = Instant::now();
        let mut bar = Bar::default();
        let shown: Vec<_> = (0..=12_u64)
            .filter(|second| bar.is_due(start + Duration::from_secs(*second)))
            .collect();
        assert_eq!(shown, [5, 10]);
        assert!(bar.end().is_none());
        assert!(!bar.is_due(start + Duration::from_secs(100)), "another bar");
    }
}
