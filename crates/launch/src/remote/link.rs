//! One host: the child process that leads there, and its pipes, none of which ever blocks.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};

use rustix::process::{Pid, PidfdFlags};

/// A longer line is cut in two.
const LINE_BYTES_MAX: usize = 64 << 10;

/// The process and what travels to and from it.
#[derive(Debug)]
pub(super) struct Link {
    child: Child,
    /// Readable once the process has ended.
    pidfd: OwnedFd,
    stdin: Option<ChildStdin>,
    /// Bytes that its standard input has not taken yet.
    outgoing: Vec<u8>,
    pub(super) out: Intake,
    pub(super) err: Intake,
    ended: Option<ExitStatus>,
}

impl Link {
    /// Starts the command with what it is to read first.
    ///
    /// It has a process group of its own: Ctrl-C in the terminal is for this process, which passes it on in order.
    pub(super) fn start(command: &[OsString], first: &str) -> io::Result<Self> {
        let (program, args) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let stdin = child.stdin.take();
        let out = child.stdout.take().map(OwnedFd::from);
        let err = child.stderr.take().map(OwnedFd::from);
        let pidfd = rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
        let (i, o) = (
            stdin.as_ref().map(AsFd::as_fd),
            out.as_ref().map(AsFd::as_fd),
        );
        for pipe in [i, o, err.as_ref().map(AsFd::as_fd)] {
            rustix::io::ioctl_fionbio(pipe.ok_or(io::ErrorKind::BrokenPipe)?, true)?;
        }
        Ok(Self {
            child,
            pidfd,
            stdin,
            outgoing: first.into(),
            out: Intake::new(out),
            err: Intake::new(err),
            ended: None,
        })
    }

    /// Writes to its standard input, as soon as that takes it.
    pub(super) fn send(&mut self, bytes: &[u8]) {
        self.outgoing.extend_from_slice(bytes);
    }

    /// Ends its standard input, by which the other side ends too.
    pub(super) fn close(&mut self) {
        self.stdin = None;
    }

    pub(super) fn kill(&mut self) {
        self.close();
        let _ = self.child.kill();
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// The code of a process that has ended, if no signal did it.
    pub(super) fn code(&self) -> Option<Option<i32>> {
        self.ended.map(|status| status.code())
    }

    /// Writes what can be written, and notices the end.
    pub(super) fn pump(&mut self) {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().unwrap_or(None);
        }
        let Some(stdin) = self.stdin.as_mut().filter(|_| !self.outgoing.is_empty()) else {
            return;
        };
        match stdin.write(&self.outgoing) {
            Ok(count) => drop(self.outgoing.drain(..count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // It reads no more: its end says the rest.
            Err(_) => self.close(),
        }
    }

    /// What to wait for: its end if it lives, and room for what is to be sent.
    pub(super) fn waits(&self) -> (Option<BorrowedFd<'_>>, Option<BorrowedFd<'_>>) {
        let end = self.ended.is_none().then(|| self.pidfd.as_fd());
        let stdin = self.stdin.as_ref().filter(|_| !self.outgoing.is_empty());
        (end, stdin.map(AsFd::as_fd))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}

/// A stream that is read in lines.
#[derive(Debug)]
pub(super) struct Intake {
    pipe: Option<std::fs::File>,
    partial: Vec<u8>,
}

impl Intake {
    fn new(pipe: Option<OwnedFd>) -> Self {
        Self {
            pipe: pipe.map(std::fs::File::from),
            partial: Vec::new(),
        }
    }

    pub(super) fn waits(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    /// Whether there is nothing more to come.
    pub(super) fn is_done(&self) -> bool {
        self.pipe.is_none() && self.partial.is_empty()
    }

    /// The whole lines of what has come, without their ends; of one buffer at most. At the stream's end also a line that does not
    /// end. With `is_last` nothing is waited for: a master of shared connections may keep the stream open.
    pub(super) fn lines(&mut self, is_last: bool) -> Vec<Vec<u8>> {
        let mut bytes = [0; 16 << 10];
        let count = match self.pipe.as_mut().map(|pipe| pipe.read(&mut bytes)) {
            Some(Ok(count @ 1..)) => count,
            Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                if is_last {
                    self.pipe = None;
                }
                0
            }
            Some(Err(error)) if error.kind() == io::ErrorKind::Interrupted => 0,
            _ => {
                self.pipe = None;
                0
            }
        };
        self.partial.extend_from_slice(&bytes[..count]);
        let whole = match self.partial.iter().rposition(|byte| *byte == b'\n') {
            Some(at) => at + 1,
            None if self.pipe.is_none() || self.partial.len() > LINE_BYTES_MAX => {
                self.partial.len()
            }
            None => 0,
        };
        let whole: Vec<u8> = self.partial.drain(..whole).collect();
        let lines = whole.split_inclusive(|byte| *byte == b'\n');
        lines
            .map(|line| line.strip_suffix(b"\n").unwrap_or(line).to_vec())
            .collect()
    }
}
