//! One process that this process has started: a handle that cannot be confused with another process's.
#![allow(unsafe_code)]

use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::time::Duration;

use paceline_rendezvous::page::{self, JobPage};
use paceline_rendezvous::process::{self, Stat};
use paceline_rendezvous::wait::poll_for;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use rustix::thread::CpuSet;

use crate::judge::Ending;

/// A child of this process, held by its pidfd: a signal to it reaches it or no process.
#[derive(Debug)]
pub(crate) struct Worker {
    pid: Pid,
    pidfd: OwnedFd,
}

/// What a worker reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Input {
    /// Nothing.
    Null,
    /// The launcher's terminal.
    Terminal,
    /// Another standard input of the launcher: a file or a pipe.
    Inherited,
}

impl Input {
    /// The launcher's own. A terminal belongs to the job in its foreground: in the background there is nothing to read.
    pub(crate) fn of_launcher() -> Self {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Self::Inherited;
        }
        match rustix::termios::tcgetpgrp(&stdin) {
            Ok(foreground) if foreground != rustix::process::getpgrp() => Self::Null,
            // A terminal of another session has no foreground for this one, and stops no process of it.
            _ => Self::Terminal,
        }
    }
}

/// The two ends a worker writes to.
#[derive(Debug)]
pub(crate) struct Pipes {
    pub(crate) out: ChildStdout,
    pub(crate) err: ChildStderr,
    /// A person at a terminal types its input, and has to see a question that ends without a newline.
    pub(crate) is_interactive: bool,
}

impl Worker {
    /// Starts `command` as the leader of its own session, so of its own process group too, that dies when the calling
    /// thread ends, on these CPUs if any are said; besides its standard input it inherits the page's descriptor.
    ///
    /// In another session than the terminal's, a rank may read the terminal: the kernel stops readers in the background
    /// (SIGTTIN) only in the terminal's own session. Ctrl-C is for the launcher, which passes it on.
    ///
    /// The calling thread must live as long as the worker should: the kernel ties the death signal to the thread.
    pub(crate) fn spawn(
        command: &mut Command,
        page: &JobPage,
        cpus: Option<CpuSet>,
        stdin: Input,
    ) -> io::Result<(Self, Pipes)> {
        command
            .stdin(match stdin {
                Input::Null => Stdio::null(),
                Input::Terminal | Input::Inherited => Stdio::inherit(),
            })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let (worker, mut child) = Self::lead(command, Some(page), cpus)?;
        match child.stdout.take().zip(child.stderr.take()) {
            Some((out, err)) => {
                let is_interactive = stdin == Input::Terminal;
                Ok((
                    worker,
                    Pipes {
                        out,
                        err,
                        is_interactive,
                    },
                ))
            }
            None => {
                let _ = child.kill();
                let _ = child.wait();
                Err(io::ErrorKind::BrokenPipe.into())
            }
        }
    }

    /// The same with the standard streams that `command` has, and with a page only if `page` is one.
    pub(crate) fn lead(
        command: &mut Command,
        page: Option<&JobPage>,
        cpus: Option<CpuSet>,
    ) -> io::Result<(Self, Child)> {
        let launcher = rustix::process::getpid();
        let page_fd = page.and_then(JobPage::raw_fd);
        let prepare = move || {
            rustix::process::setsid()?;
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // The launcher may have died between fork and the line above; then no signal will come.
            if rustix::process::getppid() != Some(launcher) {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            if let Some(cpus) = &cpus {
                rustix::thread::sched_setaffinity(None, cpus)?;
            }
            match page_fd {
                // SAFETY: the page is borrowed for the whole of `lead`, in which this runs, and keeps it open.
                Some(fd) => page::allow_inherit(unsafe { BorrowedFd::borrow_raw(fd) }),
                None => Ok(()),
            }
        };
        // SAFETY: `prepare` makes plain system calls: no allocation and no lock.
        let mut child = unsafe { command.pre_exec(prepare) }.spawn()?;
        // The child is unreaped, so its pid is still its own.
        match Self::adopt(child.id()) {
            Ok(worker) => Ok((worker, child)),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// A handle for a child of this process that has not been reaped.
    pub(crate) fn adopt(pid: u32) -> io::Result<Self> {
        let pid = i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self {
            pid,
            pidfd: rustix::process::pidfd_open(pid, PidfdFlags::empty())?,
        })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid.as_raw_pid().unsigned_abs()
    }

    /// Sends a signal to the process alone. One that has ended is left alone.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, signal);
    }

    /// Sends a signal to the process group it leads. Exact while it is not reaped: until then the number is its own.
    pub(crate) fn signal_group(&self, signal: Signal) {
        let _ = rustix::process::kill_process_group(self.pid, signal);
    }

    /// Whether its process group still has members. Call it after it was reaped.
    pub(crate) fn group_has_members(&self) -> bool {
        rustix::process::test_kill_process_group(self.pid).is_ok()
    }

    /// Its end, and its reaping, if it has ended.
    pub(crate) fn try_reap(&self) -> io::Result<Option<Ending>> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        let status = rustix::process::waitid(WaitId::PidFd(self.pidfd.as_fd()), options)?;
        Ok(status.map(
            |status| match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => Ending::Code(code),
                (None, signal) => Ending::Signal {
                    number: signal.unwrap_or(0),
                    core: status.dumped(),
                },
            },
        ))
    }

    /// Whether it ends with an error: [`ending`](Self::ending) may know of it before it can be reaped.
    pub(crate) fn is_failing(&self) -> bool {
        Stat::read(self.pid()).is_some_and(Stat::is_failing)
    }

    /// How it has ended, if that was an error, as soon as none of its threads can run any more. For a large process this is long
    /// before it can be reaped.
    pub(crate) fn ending(&self) -> Option<Ending> {
        let status = process::status_without_memory(self.pid())?;
        Some(match libc::WIFSIGNALED(status) {
            true => Ending::Signal {
                number: libc::WTERMSIG(status),
                core: libc::WCOREDUMP(status),
            },
            false => Ending::Code(libc::WEXITSTATUS(status)),
        })
    }

    /// Waits for the end of a process that was killed, and reaps it.
    pub(crate) fn wait_and_reap(&self, within: Duration) {
        wait_readable(&[self.as_fd()], within);
        let _ = self.try_reap();
    }
}

/// Readable once the process has ended.
impl AsFd for Worker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// A killed process that has not ended by then hangs in the kernel.
pub(crate) const KILLED_ENDS_WITHIN: Duration = Duration::from_secs(5);

/// Sleeps until one of `fds` is readable or at its end, or the time is over.
pub(crate) fn wait_readable(fds: &[BorrowedFd<'_>], timeout: Duration) {
    let mut polled: Vec<_> = fds
        .iter()
        .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN))
        .collect();
    // Interrupted by a signal or not: the caller looks at what has happened and at its clock.
    let _ = poll_for(&mut polled, timeout);
}
