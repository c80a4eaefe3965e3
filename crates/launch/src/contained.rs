//! A program of the user's and everything that it starts: none of it outlives this process.

use std::io;
use std::process::Command;
use std::time::Duration;

use paceline_rendezvous::process::{self, Stat};
use rustix::process::Signal;

use crate::error::LaunchError;
use crate::judge::Ending;
use crate::orphans::Orphans;
use crate::watchdog::Watchdog;
use crate::worker::Worker;
use crate::{LAUNCHER_VARIABLE, OnlyJob, launcher_id};

/// Most processes that are looked at.
const PROCESSES_MAX: usize = 65_536;

/// A running program with all its descendants. When it is dropped, they are killed; if this process is killed first, they
/// are killed too.
///
/// While it lives, this process is a child subreaper and must not start other children.
///
/// ```
/// use std::process::Command;
/// use std::time::Duration;
///
/// use paceline_launch::Contained;
///
/// let mut program = Contained::start(Command::new("sh").args(["-c", "sleep 60 & exit 3"]))?;
/// let ending = loop {
///     match program.ended() {
///         Some(ending) => break ending,
///         None => std::thread::yield_now(),
///     }
/// };
/// assert_eq!(ending, paceline_launch::judge::Ending::Code(3));
/// assert_eq!(program.processes().len(), 1, "the sleeper is left behind");
/// assert!(program.end(Duration::ZERO).is_empty(), "nothing resists SIGKILL");
/// # Ok::<(), paceline_launch::LaunchError>(())
/// ```
#[derive(Debug)]
pub struct Contained {
    program: Worker,
    ending: Option<Ending>,
    orphans: Orphans,
    _watchdog: Watchdog,
    _only_job: OnlyJob,
}

impl Contained {
    /// Starts the program as the leader of its own session, with the standard streams of `command`. It dies with the
    /// calling thread.
    ///
    /// *Errors*: it cannot be started, or this process is already running a job.
    pub fn start(command: &mut Command) -> Result<Self, LaunchError> {
        let only_job = OnlyJob::begin()?;
        let id = launcher_id();
        let watchdog = Watchdog::start(&format!("{LAUNCHER_VARIABLE}={id}"), None)?;
        // After the watchdog, so that it counts as a child that is not the program's.
        let orphans = Orphans::adopt()?;
        let name = command.get_program().display().to_string();
        let started = Worker::lead(command.env(LAUNCHER_VARIABLE, id), None, None);
        let (program, _) = started.map_err(|source| LaunchError::Machine {
            message: format!("`{name}` could not be started"),
            hint: None,
            source: Some(source),
        })?;
        watchdog.guard_group(program.pid());
        Ok(Self {
            program,
            ending: None,
            orphans,
            _watchdog: watchdog,
            _only_job: only_job,
        })
    }

    /// How the program has ended, if it has. What it started may still run.
    pub fn ended(&mut self) -> Option<Ending> {
        if self.ending.is_none() {
            self.ending = self.program.try_reap().unwrap_or_default();
        }
        self.orphans.reap(&[self.program.pid()].into());
        self.ending
    }

    /// The process ids of the program and of all that it has started, as far as they live.
    pub fn processes(&self) -> Vec<u32> {
        let found = self.orphans.found().into_iter();
        let all = found.flat_map(|child| process::tree(child, PROCESSES_MAX));
        let lives = |pid: &u32| Stat::read(*pid).is_some_and(|stat| !stat.has_ended());
        all.filter(lives).collect()
    }

    /// Sends a signal to the program alone.
    ///
    /// *Errors*: there is no such signal.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        let signal = Signal::from_named_raw(signal).ok_or(io::ErrorKind::InvalidInput)?;
        if self.ending.is_none() {
            self.program.signal(signal);
        }
        Ok(())
    }

    /// Ends everything: SIGTERM, after `grace` SIGKILL. Returns the processes that even SIGKILL did not end.
    pub fn end(self, grace: Duration) -> Vec<u32> {
        self.orphans.end(grace)
    }
}

impl Drop for Contained {
    fn drop(&mut self) {
        self.orphans.end(Duration::ZERO);
    }
}
