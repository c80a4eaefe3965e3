//! The ranks' output: one thread for each rank reads it into its log files, to the console's thread, and into a short memory
//! for the report.

pub(crate) mod bar;
mod console;
mod escapes;
mod files;
mod fold;
mod folder;
mod format;
mod lines;
mod options;
mod prefix;
mod reader;
mod stream;
mod tail;

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_rendezvous::env::WorkerEnv;
use paceline_rendezvous::net::nodename;
use paceline_rendezvous::wait::poll_for;
use rustix::event::{PollFd, PollFlags};
use rustix::pipe::PipeFlags;

use crate::error::LaunchError;
use crate::error_file;
use crate::job::{self, Job};
use crate::report;
use crate::signals::Signals;
use crate::stop::{Meaning, meaning};
use crate::worker::{Pipes, wait_readable};
use console::{Batch, Console, Newest};
use files::{Attempt, LogFile};
use format::Formatter;
use reader::{DRAIN_TIME, Reader, Shows, lock};
use stream::Stream;
use tail::Tails;

pub(crate) use escapes::{Keep, clean};
pub use fold::FOLD_WINDOW;
pub use folder::{DEFAULT_FILE_BYTES_MAX, RunFolder};
pub use options::{LineFilter, LogFormat, LogOptions, OptionError, RankFilter, StreamMap};
pub use prefix::PrefixTemplate;
pub(crate) use reader::Traffic;
pub(crate) use tail::TAIL_LINES;

/// Pipes that are still open this long after the last process of the job belong to processes outside of it.
const PIPES_CLOSE_WITHIN: Duration = Duration::from_millis(300);
/// A console that takes nothing (a terminal stopped with Ctrl-S) holds up the end for at most this long.
const CONSOLE_TAKES_WITHIN: Duration = Duration::from_secs(30);

/// The output of all ranks.
#[derive(Debug)]
pub(crate) struct Output {
    attempt: Option<Attempt>,
    /// Those of the ranks that are not attached yet.
    logs: Vec<[Option<LogFile>; 2]>,
    options: LogOptions,
    console: job::Console,
    host: String,
    attempt_number: u32,
    threads: Vec<JoinHandle<()>>,
    tails: Vec<Arc<Mutex<Tails>>>,
    traffic: Vec<Arc<Traffic>>,
    newest: Newest,
    shared: Arc<reader::Shared>,
    to_console: SyncSender<Batch>,
    /// Until the console's thread takes it.
    batches: Option<Receiver<Batch>>,
    /// At its end once all threads are gone; each holds `alive`.
    all_gone: OwnedFd,
    alive: Arc<OwnedFd>,
    /// At its end once `stop` is dropped: the readers take what is there and leave.
    stopped: Arc<OwnedFd>,
    stop: OwnedFd,
}

/// The remains of the output when the job is over.
#[derive(Debug)]
pub(crate) struct Finished {
    attempt: Option<Attempt>,
    tails: Vec<Arc<Mutex<Tails>>>,
    newest: Newest,
    /// Problems on the way, one sentence each.
    pub(crate) notes: Vec<String>,
}

/// A rank's last output.
#[derive(Debug, Default)]
pub(crate) struct LastWords {
    /// The last lines of its standard error, or of its standard output if it wrote no errors.
    pub(crate) lines: Vec<String>,
    /// They are at the end of the launcher's own standard error.
    pub(crate) are_on_console: bool,
    /// The file that has them.
    pub(crate) log: Option<PathBuf>,
    /// The error in its error file, or else its panic or traceback.
    pub(crate) error: Option<report::RankError>,
}

impl Output {
    /// Makes the log folder and files, so that a folder that cannot be written stops the job before it begins.
    ///
    /// Rounds of one attempt continue each other's files.
    pub(crate) fn open(job: &Job, attempt_number: u32) -> Result<Self, LaunchError> {
        let options = job.logs.clone();
        let attempt = job
            .log_dir
            .as_deref()
            .map(|log_dir| Attempt::new(log_dir, attempt_number));
        if let Some(log_dir) = &job.log_dir {
            error_file::forget(log_dir);
        }
        let mut logs = Vec::new();
        for local_rank in 0..job.nproc {
            logs.push(match &attempt {
                Some(attempt) => attempt.open(local_rank, &options)?.map(Some),
                None => [None, None],
            });
        }
        let mut filtered = [None, None];
        if let Some(attempt) = &attempt {
            for stream in Stream::BOTH {
                let file = attempt.open_filtered(stream, &options)?;
                filtered[stream as usize] =
                    file.map(|file| (options.filter(stream).clone(), Mutex::new(Some(file))));
            }
        }
        let pipe =
            || rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(LaunchError::system("pipe"));
        let ((all_gone, alive), (stopped, stop)) = (pipe()?, pipe()?);
        let (to_console, batches) = sync_channel(console::BATCHES_MAX);
        Ok(Self {
            attempt,
            logs,
            options,
            console: job.console,
            host: nodename(),
            attempt_number,
            threads: Vec::new(),
            tails: (0..job.nproc).map(|_| Arc::default()).collect(),
            traffic: (0..job.nproc).map(|_| Arc::default()).collect(),
            newest: Newest::default(),
            shared: Arc::new(reader::Shared {
                notes: Mutex::default(),
                filtered,
                first: AtomicUsize::new(0),
            }),
            to_console,
            batches: Some(batches),
            all_gone,
            alive: Arc::new(alive),
            stopped: Arc::new(stopped),
            stop,
        })
    }

    /// The file for a rank's error, if files are kept.
    pub(crate) fn error_file(&self, local_rank: usize) -> Option<PathBuf> {
        let attempt = self.attempt.as_ref()?;
        Some(attempt.error_file(local_rank))
    }

    /// Continues a rank's log files for a process that is to take its place, and removes the rank's error. Call it before that process
    /// starts, which may fail at once.
    pub(crate) fn reopen(&mut self, local_rank: usize) -> Result<(), LaunchError> {
        if let Some(attempt) = &self.attempt {
            self.logs[local_rank] = attempt.open(local_rank, &self.options)?.map(Some);
        }
        Ok(())
    }

    /// Starts reading a rank's output.
    pub(crate) fn attach(&mut self, env: &WorkerEnv, mut pipes: Pipes) -> Result<(), LaunchError> {
        // Half a line is no record.
        pipes.is_interactive &= self.options.format == LogFormat::Text;
        let local_rank = env.local_rank;
        let formatter = Formatter {
            options: self.options.clone(),
            host: self.host.clone(),
            role: env.role.clone(),
            attempt: self.attempt_number,
        };
        let prefix = formatter.prefix(&[env.rank], &[local_rank]);
        if let Some(batches) = self.batches.take() {
            let shown = match self.console {
                job::Console::RankZeroRaw => 1,
                job::Console::Prefixed => {
                    let ranks = 0..self.logs.len();
                    ranks.filter(|rank| self.shows(*rank).is_any()).count()
                }
            };
            let console = Console::new(formatter, shown, Arc::clone(&self.newest));
            self.spawn("paceline/console".to_owned(), move || console.run(&batches))?;
        }
        let tails = Arc::clone(&self.tails[local_rank]);
        *lock(&tails) = Tails::default();
        let traffic = Arc::clone(&self.traffic[local_rank]);
        let reader = Reader {
            local_rank,
            rank: env.rank,
            replaces: env.replacement > 0,
            prefix,
            logs: std::mem::take(&mut self.logs[local_rank]),
            shows: self.shows(local_rank),
            console: self.to_console.clone(),
            tails,
            traffic,
            shared: Arc::clone(&self.shared),
            streams: Default::default(),
        };
        let stopped = Arc::clone(&self.stopped);
        self.spawn(format!("rank{}/out", env.rank), move || {
            reader.run(pipes, &stopped);
        })
    }

    /// How much each rank prints, kept up to date.
    pub(crate) fn traffic(&self) -> &[Arc<Traffic>] {
        &self.traffic
    }

    /// A console that shows one rank only shows this local rank from now on, because those before it are lost.
    pub(crate) fn show_first(&self, local_rank: usize) {
        self.shared.first.store(local_rank, Ordering::Release);
    }

    fn shows(&self, local_rank: usize) -> Shows {
        match (self.console, local_rank) {
            (job::Console::Prefixed, _) => {
                Shows::Lines(Stream::BOTH.map(|stream| self.options.shows(local_rank, stream)))
            }
            (job::Console::RankZeroRaw, _) => Shows::Raw,
        }
    }

    fn spawn(
        &mut self,
        name: String,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), LaunchError> {
        let alive = Arc::clone(&self.alive);
        // The stack holds no buffers, and there may be a thousand of these threads.
        let builder = std::thread::Builder::new()
            .name(name)
            .stack_size(128 * 1024);
        let run = move || {
            run();
            drop(alive);
        };
        let thread = builder
            .spawn(run)
            .map_err(LaunchError::system("starting a thread"))?;
        self.threads.push(thread);
        Ok(())
    }

    /// Lets the threads read the rest of the pipes, and joins them. All processes of the job have ended.
    ///
    /// *Blocks*: for a fraction of a second at most, unless the console takes nothing. A signal ends the wait.
    pub(crate) fn finish(self, signals: &Signals) -> Finished {
        let Self {
            attempt,
            threads,
            tails,
            newest,
            shared,
            all_gone,
            alive,
            to_console,
            stop,
            ..
        } = self;
        drop((alive, to_console));
        let notes = &shared.notes;
        let quick = is_gone_within(PIPES_CLOSE_WITHIN, &all_gone, signals);
        drop(stop);
        if quick || is_gone_within(DRAIN_TIME + CONSOLE_TAKES_WITHIN, &all_gone, signals) {
            for thread in threads {
                if thread.join().is_err() {
                    lock(notes).push(
                        "a thread for the ranks' output panicked, what it had is lost".to_owned(),
                    );
                }
            }
        } else {
            // They hang in a write to a console that takes nothing, and end with the process or with the console.
            lock(notes).push(
                "the console took no more output; the end of it is only in the log files"
                    .to_owned(),
            );
        }
        let notes = std::mem::take(&mut *lock(notes));
        Finished {
            attempt,
            tails,
            newest,
            notes,
        }
    }
}

impl Finished {
    /// A rank's last output.
    pub(crate) fn last_words(&self, local_rank: usize) -> LastWords {
        let Some(tails) = self.tails.get(local_rank) else {
            return LastWords::default();
        };
        let tails = lock(tails);
        let [out, err] = &tails.0;
        let stream = if err.lines.is_empty() && !out.lines.is_empty() {
            Stream::Out
        } else {
            Stream::Err
        };
        let trace = err.trace().or_else(|| out.trace());
        let written = self
            .attempt
            .as_ref()
            .and_then(|attempt| error_file::read(&attempt.error_file(local_rank)));
        let newest = lock(&self.newest);
        let is_its = |ranks: &&Vec<usize>| ranks.contains(&local_rank);
        let on_console = newest.iter().filter(is_its).count();
        LastWords {
            are_on_console: stream == Stream::Err && on_console >= err.lines.len(),
            lines: tails.0[stream as usize].lines.iter().cloned().collect(),
            log: self
                .attempt
                .as_ref()
                .map(|attempt| attempt.log(local_rank, stream)),
            error: written.or_else(|| {
                let trace = trace?;
                Some(report::RankError {
                    message: trace.message.clone()?,
                    traceback: trace.lines.clone(),
                })
            }),
        }
    }
}

/// Waits for a pipe's end; a signal that ends jobs ends the wait too.
fn is_gone_within(within: Duration, pipe: &OwnedFd, signals: &Signals) -> bool {
    let deadline = Instant::now() + within;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let ends = |signal| meaning(signal) == Meaning::End;
        if is_at_end(pipe) || left.is_zero() || signals.next().is_some_and(ends) {
            return is_at_end(pipe);
        }
        wait_readable(&[pipe.as_fd(), signals.as_fd()], left);
    }
}

/// Whether the other end of a pipe is closed.
pub(crate) fn is_at_end(pipe: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(pipe, PollFlags::IN)];
    let ready = poll_for(&mut polled, Duration::ZERO);
    ready.is_ok_and(|ready| ready > 0)
}
