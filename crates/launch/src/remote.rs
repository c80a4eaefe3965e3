//! A job on several hosts from one terminal: a child process, mostly ssh, starts a launcher on each, tells it what to do, brings
//! what it says, and takes it down.
//!
//! A launcher reads its orders on standard input: a line that says what to check, which it answers when all is well; a line that
//! starts it; then a byte for each signal. The end of its standard input ends it, so that none outlives this process, a connection or
//! a terminal. One thread does all of this, and no pipe blocks it.

mod link;
mod said;

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use paceline_rendezvous::wait::poll_for;
use rustix::event::{PollFd, PollFlags};

use self::link::Link;
use self::said::Said;
use crate::error::LaunchError;
use crate::output::{Keep, clean};
use crate::signals::Signals;
use crate::stop::{HandledSignals, Meaning, meaning};
use crate::worker::KILLED_ENDS_WITHIN;

/// Begins the line on standard output by which a launcher says that it is ready; the rest of the line is its answer. What a login
/// shell prints may come before.
pub const READY: &str = "\u{1e}paceline ready ";
/// Begins the line on standard output with the code of a launcher that has done what it was there for.
pub const ENDS: &str = "\u{1e}paceline ends ";

/// What is kept of what a host says before it is ready.
const TOLD_LINES_MAX: usize = 40;
/// More output than this waits in the pipes until the terminal takes it.
const BUFFER_BYTES_MAX: usize = 256 << 10;
/// A write of so much does not block when there is room: `PIPE_BUF`.
const WRITE_BYTES: usize = 4096;
/// How long the terminal may take for the last lines.
const FLUSHED_WITHIN: Duration = Duration::from_secs(30);

/// A host, and how to get there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remote {
    /// What people call it.
    pub name: String,
    /// The command that leads to its launcher's standard streams.
    pub command: Vec<OsString>,
    /// The line that says what to check.
    pub check: String,
}

/// What came of a host before anything was started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// It is ready, and this is its answer.
    Ready(String),
    /// Its command has ended, with this code if no signal did it.
    Ended(Option<i32>),
    /// It has said nothing in time.
    Late,
}

/// How the launcher of a host has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RemoteEnd {
    /// By itself, with this code.
    Code(u8),
    /// The connection or the launcher was lost.
    Lost,
    /// It did not end in time after the others or after a signal, and was left.
    Late,
}

/// The launchers of a job on other hosts. Dropping it ends them.
#[derive(Debug)]
pub struct Remotes {
    hosts: Vec<Host>,
    signals: Signals,
    said: Said,
    out: Outlet,
    err: Outlet,
}

#[derive(Debug)]
struct Host {
    name: String,
    link: Link,
    answer: Option<String>,
    /// What it said on standard error before it was told to start.
    told: Vec<Vec<u8>>,
    is_started: bool,
    code: Option<u8>,
}

impl Remotes {
    /// Starts the commands of all hosts.
    ///
    /// *Errors*: one cannot be started; then none runs.
    pub fn start(remotes: Vec<Remote>, signals: &HandledSignals) -> Result<Self, LaunchError> {
        let signals = Signals::catch(signals).map_err(LaunchError::system("sigaction"))?;
        let host = |remote: Remote| -> Result<Host, LaunchError> {
            let first = format!("{}\n", remote.check);
            let link = Link::start(&remote.command, &first).map_err(|source| {
                let program = remote.command.first().cloned().unwrap_or_default();
                LaunchError::Machine {
                    message: format!("`{}` cannot be started", program.display()),
                    hint: Some("install OpenSSH's client, or name another with --ssh".into()),
                    source: Some(source),
                }
            })?;
            Ok(Host {
                name: remote.name,
                link,
                answer: None,
                told: Vec::new(),
                is_started: false,
                code: None,
            })
        };
        Ok(Self {
            hosts: remotes.into_iter().map(host).collect::<Result<_, _>>()?,
            signals,
            said: Said::default(),
            out: Outlet::default(),
            err: Outlet::default(),
        })
    }

    /// Waits until every host has answered or failed; what came of each, in their order. If one is not ready, all are ended.
    ///
    /// *Blocks*: for `within`, and some seconds if hosts have to be ended.
    ///
    /// *Errors*: the number of a signal that this process got meanwhile; then all are ended too.
    pub fn answers(&mut self, within: Duration) -> Result<Vec<Answer>, i32> {
        let deadline = Instant::now() + within;
        let is_open = |host: &Host| host.answer.is_none() && !host.is_over();
        while self.hosts.iter().any(is_open) && Instant::now() < deadline {
            if let Some(signal) = self.stopped_by() {
                self.end();
                return Err(signal);
            }
            self.turn(deadline);
        }
        let answers: Vec<_> = self.hosts.iter().map(Host::answered).collect();
        let is_ready = |answer: &Answer| matches!(answer, Answer::Ready(_));
        if !answers.iter().all(is_ready) {
            self.end();
        }
        Ok(answers)
    }

    /// What a host has said on standard error before it was ready, as text that is harmless on a terminal.
    pub fn told(&self, host: usize) -> Vec<String> {
        let told = self.hosts.get(host).into_iter().flat_map(|host| &host.told);
        let text = |line: &Vec<u8>| {
            let mut text = Vec::new();
            clean(line, Keep::Text, &mut text);
            String::from_utf8_lossy(&text).trim_end().to_owned()
        };
        told.map(text).filter(|line| !line.is_empty()).collect()
    }

    /// Starts the launchers, each with its line, and stays until they have ended: passes on what they say and the signals that this
    /// process gets. `linger` is how long they may go on once one has ended, or after a signal that ends the job.
    pub fn run(mut self, orders: &[String], linger: Duration) -> Vec<RemoteEnd> {
        for (number, (host, order)) in self.hosts.iter_mut().zip(orders).enumerate() {
            host.link.send(format!("{order}\n").as_bytes());
            host.is_started = true;
            // The rest is of ssh and of login shells.
            let own = |line: &Vec<u8>| crate::notice::is_marked(line);
            for line in std::mem::take(&mut host.told).into_iter().filter(own) {
                self.err.push(self.said.shown(number, &host.name, &line));
            }
        }
        let (mut over_by, mut asked) = (None, None);
        let mut late = vec![false; self.hosts.len()];
        while self.hosts.iter().any(|host| !host.is_over()) {
            while let Some(signal) = self.signals.next() {
                for host in &mut self.hosts {
                    host.link.send(&[u8::try_from(signal).unwrap_or(u8::MAX)]);
                }
                if meaning(signal) == Meaning::End {
                    asked.get_or_insert(signal);
                    over_by.get_or_insert_with(|| Instant::now() + linger);
                }
            }
            if self.hosts.iter().any(Host::is_over) {
                over_by.get_or_insert_with(|| Instant::now() + linger);
            }
            if over_by.is_some_and(|by| Instant::now() >= by) {
                if late.contains(&true) {
                    break;
                }
                for (host, is_late) in self.hosts.iter_mut().zip(&mut late) {
                    *is_late = !host.is_over();
                    host.link.kill();
                }
                over_by = Some(Instant::now() + KILLED_ENDS_WITHIN);
            }
            self.turn(over_by.unwrap_or_else(|| Instant::now() + FLUSHED_WITHIN));
        }
        let deadline = Instant::now() + FLUSHED_WITHIN;
        while !(self.out.is_empty() && self.err.is_empty()) && Instant::now() < deadline {
            if self.stopped_by().is_some() {
                break;
            }
            self.turn(deadline);
        }
        let ends = self
            .hosts
            .iter()
            .zip(late)
            .map(|(host, is_late)| match host.code {
                Some(code) => RemoteEnd::Code(code),
                None if is_late => RemoteEnd::Late,
                // The signal came before it could handle one, and ended it.
                None => match asked.map(|signal| u8::try_from(128 + signal)) {
                    Some(Ok(code)) => RemoteEnd::Code(code),
                    _ => RemoteEnd::Lost,
                },
            });
        ends.collect()
    }

    /// Ends all: those that wait for a start by the end of their input, the others' commands at once.
    fn end(&mut self) {
        let deadline = Instant::now() + KILLED_ENDS_WITHIN;
        for host in &mut self.hosts {
            if host.answer.is_some() {
                host.link.close();
            } else {
                host.link.kill();
            }
        }
        while self.hosts.iter().any(|host| !host.is_over()) && Instant::now() < deadline {
            self.turn(deadline);
        }
    }

    fn stopped_by(&self) -> Option<i32> {
        std::iter::from_fn(|| self.signals.next()).find(|signal| meaning(*signal) == Meaning::End)
    }

    /// Waits until something happens or the moment has come, and does what can be done.
    fn turn(&mut self, until: Instant) {
        self.wait(until);
        for (number, host) in self.hosts.iter_mut().enumerate() {
            host.link.pump();
            let is_last = host.link.has_ended();
            if self.out.has_room() {
                for line in host.link.out.lines(is_last) {
                    if let Some(line) = host.heard(line) {
                        self.out.push(Some(line));
                    }
                }
            }
            if self.err.has_room() {
                for line in host.link.err.lines(is_last) {
                    if host.is_started {
                        self.err.push(self.said.shown(number, &host.name, &line));
                    } else if host.told.len() < TOLD_LINES_MAX {
                        host.told.push(line);
                    }
                }
            }
        }
        self.out.flush(io::stdout().as_fd());
        self.err.flush(io::stderr().as_fd());
    }

    fn wait(&self, until: Instant) {
        let (out, err) = (io::stdout(), io::stderr());
        let mut polled = vec![PollFd::new(&self.signals, PollFlags::IN)];
        let mut add = |fd: Option<_>, flags| {
            polled.extend(fd.map(|fd| PollFd::from_borrowed_fd(fd, flags)));
        };
        for host in &self.hosts {
            let (end, stdin) = host.link.waits();
            add(end, PollFlags::IN);
            add(stdin, PollFlags::OUT);
            add(
                host.link.out.waits().filter(|_| self.out.has_room()),
                PollFlags::IN,
            );
            add(
                host.link.err.waits().filter(|_| self.err.has_room()),
                PollFlags::IN,
            );
        }
        add((!self.out.is_empty()).then(|| out.as_fd()), PollFlags::OUT);
        add((!self.err.is_empty()).then(|| err.as_fd()), PollFlags::OUT);
        // Whatever it says: the caller tries all, and nothing of it blocks.
        let _ = poll_for(&mut polled, until.saturating_duration_since(Instant::now()));
    }
}

impl Host {
    fn is_over(&self) -> bool {
        self.link.has_ended() && self.link.out.is_done() && self.link.err.is_done()
    }

    /// A line of its standard output, if it is the program's.
    fn heard(&mut self, line: Vec<u8>) -> Option<Vec<u8>> {
        let text = std::str::from_utf8(&line).unwrap_or_default();
        if let Some(code) = text.strip_prefix(ENDS) {
            self.code = code.trim_end().parse().ok();
        } else if let (None, Some(answer)) = (&self.answer, text.strip_prefix(READY)) {
            self.answer = Some(answer.trim_end().to_owned());
        } else if self.is_started {
            return Some(line);
        }
        None
    }

    fn answered(&self) -> Answer {
        match (&self.answer, self.link.code()) {
            // One that has ended since is not ready.
            (_, Some(code)) => Answer::Ended(code),
            (Some(answer), None) => Answer::Ready(answer.clone()),
            (None, None) => Answer::Late,
        }
    }
}

/// One of this process's own streams, which takes lines when its reader does.
#[derive(Debug, Default)]
struct Outlet {
    buffer: Vec<u8>,
    /// Nobody reads it any more; the job goes on, because it may still have to be saved.
    is_gone: bool,
}

impl Outlet {
    fn push(&mut self, line: Option<Vec<u8>>) {
        if let (Some(line), false) = (line, self.is_gone) {
            self.buffer.extend_from_slice(&line);
            self.buffer.push(b'\n');
        }
    }

    fn has_room(&self) -> bool {
        self.buffer.len() < BUFFER_BYTES_MAX
    }

    fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    fn flush(&mut self, to: BorrowedFd<'_>) {
        let is_ready = || {
            let mut polled = [PollFd::from_borrowed_fd(to, PollFlags::OUT)];
            poll_for(&mut polled, Duration::ZERO).is_ok_and(|ready| ready > 0)
        };
        let mut written = 0;
        while written < self.buffer.len() && is_ready() {
            let end = self.buffer.len().min(written + WRITE_BYTES);
            match rustix::io::write(to, &self.buffer[written..end]) {
                Ok(count) => written += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => {
                    self.is_gone = true;
                    written = self.buffer.len();
                }
            }
        }
        self.buffer.drain(..written);
    }
}
