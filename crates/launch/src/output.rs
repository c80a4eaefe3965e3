//! Reads what the ranks print: one thread for each rank, to its log file, to the console, and into a short memory for
//! the report.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::pipe::PipeFlags;

use crate::console::{Screen, Stream};
use crate::error::LaunchError;
use crate::job::{Console, Job};
use crate::lines::Lines;
use crate::signals::Signals;
use crate::worker::{Pipes, wait_readable};

/// Lines of each stream that are kept for the report.
pub(crate) const TAIL_LINES: usize = 20;
/// Longer lines are cut in the report; the log file has them whole.
const TAIL_LINE_CHARS_MAX: usize = 500;
/// Pipes that are still open this long after the last process of the job are held by strangers.
const PIPES_CLOSE_WITHIN: Duration = Duration::from_millis(300);
/// What is in the pipes then is read for at most this long.
const DRAIN_TIME: Duration = Duration::from_millis(300);
/// A console that takes nothing (a terminal stopped with Ctrl-S) holds up the end for at most this long.
const CONSOLE_TAKES_WITHIN: Duration = Duration::from_secs(30);
/// One read; also the capacity of a Linux pipe.
const READ_BYTES: usize = 64 * 1024;

/// The output of all ranks.
#[derive(Debug)]
pub(crate) struct Output {
    logs: Vec<Option<(PathBuf, File)>>,
    readers: Vec<JoinHandle<()>>,
    tails: Vec<Arc<Mutex<Tails>>>,
    notes: Arc<Mutex<Vec<String>>>,
    screen: Arc<Screen>,
    console: Console,
    /// At its end once all readers are gone; each holds a copy of `alive`.
    all_gone: OwnedFd,
    alive: OwnedFd,
    /// At its end once `stop` is dropped: the readers take what is there and leave.
    stopped: Arc<OwnedFd>,
    stop: OwnedFd,
}

/// The last lines of one rank's streams.
#[derive(Debug, Default)]
struct Tails([Tail; 2]);

/// The last lines of one stream that are worth a place in the report.
#[derive(Debug, Default)]
struct Tail {
    lines: VecDeque<String>,
    in_backtrace: bool,
}

/// What is left of the output when the job is over.
#[derive(Debug)]
pub(crate) struct Finished {
    tails: Vec<Arc<Mutex<Tails>>>,
    /// What went wrong on the way, for people.
    pub(crate) notes: Vec<String>,
}

impl Output {
    /// Makes the log folder and files, so that a folder that cannot be written stops the job before it begins.
    pub(crate) fn open(job: &Job) -> Result<Self, LaunchError> {
        let mut logs = Vec::new();
        for rank in 0..job.nproc {
            let open = |folder: &PathBuf| open_log(folder, rank, job.restart_count > 0);
            logs.push(job.log_dir.as_ref().map(open).transpose()?);
        }
        let pipe =
            || rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(LaunchError::system("pipe"));
        let ((all_gone, alive), (stopped, stop)) = (pipe()?, pipe()?);
        Ok(Self {
            logs,
            readers: Vec::new(),
            tails: Vec::new(),
            notes: Arc::default(),
            screen: Arc::default(),
            console: job.console,
            all_gone,
            alive,
            stopped: Arc::new(stopped),
            stop,
        })
    }

    /// Starts reading the next rank; ranks come in order.
    pub(crate) fn attach(&mut self, pipes: Pipes) -> Result<(), LaunchError> {
        let rank = self.readers.len();
        let tails = Arc::<Mutex<Tails>>::default();
        self.tails.push(Arc::clone(&tails));
        let reader = Reader {
            rank,
            log: self.logs.get_mut(rank).and_then(Option::take),
            tails,
            notes: Arc::clone(&self.notes),
            screen: Arc::clone(&self.screen),
            console: self.console,
            lines: Default::default(),
            to_log: Vec::new(),
            to_screen: Default::default(),
        };
        let alive = self.alive.try_clone().map_err(LaunchError::system("dup"))?;
        let stopped = Arc::clone(&self.stopped);
        let run = move || {
            reader.run(pipes, &stopped);
            drop(alive);
        };
        // The stack holds no buffers, and there may be a thousand of these threads.
        let builder = std::thread::Builder::new()
            .name(format!("rank{rank}/out"))
            .stack_size(128 * 1024);
        self.readers.push(
            builder
                .spawn(run)
                .map_err(LaunchError::system("starting a thread"))?,
        );
        Ok(())
    }

    /// Takes what is still in the pipes, waits for the readers, and joins them. All processes of the job have ended.
    ///
    /// *Blocks* for a fraction of a second at most, unless the console takes nothing. A signal ends the wait.
    pub(crate) fn finish(self, signals: &Signals) -> Finished {
        let Self {
            readers,
            tails,
            notes,
            all_gone,
            alive,
            stop,
            ..
        } = self;
        drop(alive);
        let quick = is_gone_within(PIPES_CLOSE_WITHIN, &all_gone, signals);
        drop(stop);
        if quick || is_gone_within(DRAIN_TIME + CONSOLE_TAKES_WITHIN, &all_gone, signals) {
            for reader in readers {
                if reader.join().is_err() {
                    lock(&notes).push(
                        "a reader of the ranks' output panicked, its log is incomplete".to_owned(),
                    );
                }
            }
        } else {
            // They hang in a write to a console that nobody reads, and end with the process or with the console.
            lock(&notes).push(
                "the console took no more output; the end of it is only in the log files"
                    .to_owned(),
            );
        }
        let notes = std::mem::take(&mut *lock(&notes));
        Finished { tails, notes }
    }
}

impl Finished {
    /// The last lines of a rank's standard error, or of its standard output where there is none.
    pub(crate) fn last_lines(&self, rank: usize) -> Vec<String> {
        let Some(tails) = self.tails.get(rank) else {
            return Vec::new();
        };
        let tails = lock(tails);
        let [out, err] = &tails.0;
        if err.lines.is_empty() { out } else { err }
            .lines
            .iter()
            .cloned()
            .collect()
    }
}

/// Where a rank's log is.
pub(crate) fn log_path(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank{rank}.log"))
}

fn open_log(folder: &PathBuf, rank: usize, append: bool) -> Result<(PathBuf, File), LaunchError> {
    let failed = |path: &PathBuf| {
        let path = path.clone();
        |source| LaunchError::Log { path, source }
    };
    std::fs::create_dir_all(folder).map_err(failed(folder))?;
    let path = log_path(folder, rank);
    let mut options = OpenOptions::new();
    options
        .create(true)
        .write(true)
        .append(append)
        .truncate(!append);
    let file = options.open(&path).map_err(failed(&path))?;
    Ok((path, file))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a pipe's end; a signal ends the wait too.
fn is_gone_within(within: Duration, pipe: &OwnedFd, signals: &Signals) -> bool {
    let deadline = Instant::now() + within;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if is_at_end(pipe) || left.is_zero() || signals.next().is_some() {
            return is_at_end(pipe);
        }
        wait_readable(&[pipe.as_fd(), signals.as_fd()], left);
    }
}

fn is_at_end(pipe: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(pipe, PollFlags::IN)];
    let ready = rustix::event::poll(
        &mut polled,
        Some(&Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        }),
    );
    ready.is_ok_and(|ready| ready > 0)
}

/// One rank's thread.
struct Reader {
    rank: usize,
    log: Option<(PathBuf, File)>,
    tails: Arc<Mutex<Tails>>,
    notes: Arc<Mutex<Vec<String>>>,
    screen: Arc<Screen>,
    console: Console,
    lines: [Lines; 2],
    to_log: Vec<u8>,
    to_screen: [Vec<u8>; 2],
}

impl Reader {
    /// Reads both streams as bytes arrive, until both have ended or the launcher says stop.
    fn run(mut self, pipes: Pipes, stopped: &OwnedFd) {
        let (mut out, mut err) = (
            Some(File::from(OwnedFd::from(pipes.out))),
            Some(File::from(OwnedFd::from(pipes.err))),
        );
        let mut buffer = vec![0; READ_BYTES];
        let mut leave_at = None;
        while out.is_some() || err.is_some() {
            let ready = ready(&out, &err, stopped, leave_at.is_some());
            if ready.stopped {
                leave_at.get_or_insert_with(|| Instant::now() + DRAIN_TIME);
            } else if !(ready.streams[0] || ready.streams[1]) && leave_at.is_some() {
                break;
            }
            for (stream, from) in Stream::BOTH.into_iter().zip([&mut out, &mut err]) {
                if ready.streams[stream as usize] {
                    self.read(stream, from, &mut buffer);
                }
            }
            self.flush();
            if leave_at.is_some_and(|leave_at| Instant::now() >= leave_at) {
                break;
            }
        }
        for stream in Stream::BOTH {
            self.take(stream, None);
        }
        self.flush();
    }

    fn read(&mut self, stream: Stream, from: &mut Option<File>, buffer: &mut [u8]) {
        let Some(file) = from else { return };
        match file.read(buffer) {
            Ok(count) if count > 0 => self.take(stream, Some(&buffer[..count])),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            _ => {
                self.take(stream, None);
                *from = None;
            }
        }
    }

    /// Takes bytes, or the stream's end, apart into lines and notes where each goes.
    fn take(&mut self, stream: Stream, bytes: Option<&[u8]>) {
        let raw = self.console == Console::RankZeroRaw;
        if raw && self.rank == 0 {
            self.screen.write(stream, bytes.unwrap_or_default());
        }
        let (to_log, to_screen, rank) = (
            &mut self.to_log,
            &mut self.to_screen[stream as usize],
            self.rank,
        );
        let mut tails = lock(&self.tails);
        let tail = &mut tails.0[stream as usize];
        let on_line = |line: &[u8]| {
            to_log.extend_from_slice(line);
            to_log.push(b'\n');
            if !raw {
                to_screen.extend_from_slice(format!("[rank {rank}] ").as_bytes());
                to_screen.extend_from_slice(line);
                to_screen.push(b'\n');
            }
            tail.remember(line);
        };
        match bytes {
            Some(bytes) => self.lines[stream as usize].push(bytes, on_line),
            None => self.lines[stream as usize].finish(on_line),
        }
    }

    /// The file first: the console may take its time.
    fn flush(&mut self) {
        if let Some((path, file)) = &mut self.log
            && let Err(error) = file.write_all(&self.to_log)
        {
            let note = format!(
                "log `{}` is incomplete from here on: {error}",
                path.display()
            );
            lock(&self.notes).push(note);
            self.log = None;
        }
        self.to_log.clear();
        for stream in Stream::BOTH {
            let text = &mut self.to_screen[stream as usize];
            self.screen.write(stream, text);
            text.clear();
        }
    }
}

impl Tail {
    fn remember(&mut self, line: &[u8]) {
        // Four bytes a character at most, so nothing that counts is cut before the text is decoded.
        let text = String::from_utf8_lossy(&line[..line.len().min(4 * TAIL_LINE_CHARS_MAX)]);
        if text.trim().is_empty() {
            return;
        }
        // The frames of a Rust panic would push its message out of the report; all of them are indented.
        self.in_backtrace = match text.as_ref() {
            "stack backtrace:" => true,
            text => self.in_backtrace && text.starts_with(' '),
        };
        if self.in_backtrace {
            return;
        }
        if self.lines.len() == TAIL_LINES {
            self.lines.pop_front();
        }
        self.lines
            .push_back(text.chars().take(TAIL_LINE_CHARS_MAX).collect());
    }
}

struct Ready {
    streams: [bool; 2],
    stopped: bool,
}

/// Waits for bytes, for an end or for the word to stop; once `leaving`, only looks.
///
/// The wait needs no deadline of its own: the launcher always ends it by dropping the other end of `stopped`.
fn ready(out: &Option<File>, err: &Option<File>, stopped: &OwnedFd, leaving: bool) -> Ready {
    let mut places = Vec::with_capacity(3);
    let mut polled = Vec::with_capacity(3);
    for (place, file) in [out, err].into_iter().enumerate() {
        if let Some(file) = file {
            places.push(place);
            polled.push(PollFd::new(file, PollFlags::IN));
        }
    }
    if !leaving {
        places.push(2);
        polled.push(PollFd::new(stopped, PollFlags::IN));
    }
    let only_look = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // An interrupted poll leaves all results empty, which is right.
    let _ = rustix::event::poll(&mut polled, leaving.then_some(&only_look));
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
    fn the_message_of_a_panic_is_remembered_and_its_frames_are_not() {
        let mut tail = Tail::default();
        tail.remember(b"thread 'main' panicked at src/main.rs:7:5:");
        tail.remember(b"no more samples");
        tail.remember(b"stack backtrace:");
        for frame in 0..TAIL_LINES {
            tail.remember(format!("  {frame}: core::panicking::panic_fmt").as_bytes());
            tail.remember(b"             at /rustc/library/core/src/panicking.rs:80:14");
        }
        tail.remember(b"note: run with `RUST_BACKTRACE=full` for more");
        let expect = [
            "thread 'main' panicked at src/main.rs:7:5:",
            "no more samples",
            "note: run with `RUST_BACKTRACE=full` for more",
        ];
        assert_eq!(tail.lines, expect);
    }
}
