//! A second, tiny process that outlives the launcher by a moment: when the launcher dies without a trace (SIGKILL, out
//! of memory), it kills what the workers have started.
//!
//! The kernel kills the workers themselves (`PR_SET_PDEATHSIG`); their own children would live on. The watchdog is a
//! fork of the launcher that runs nothing but a few system calls: it reads process group ids from a pipe until the
//! pipe's other end is gone, which only the launcher holds. Then it kills these groups, and every process that
//! has the launcher's id in its environment, and removes the job's folder in memory.
//!
//! It does not reach a process that has left its worker's group (`setsid`, a job-control shell) *and* has
//! dropped its environment (`env -i`), in a job whose launcher was killed. As long as the launcher lives, those are
//! found too (`orphans.rs`).
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::pipe::PipeFlags;
use rustix::process::{Pid, Signal};

use crate::error::LaunchError;
use crate::job::NPROC_MAX;
use crate::worker::{KILLED_ENDS_WITHIN, Worker};
use crate::{memory_folder, sweep};

/// The launcher's end of it. Dropping it ends the watchdog without harm to anyone.
#[derive(Debug)]
pub(crate) struct Watchdog {
    process: Worker,
    /// The only write end; its closing is the alarm, so it must outlive the process above.
    pipe: OwnedFd,
}

impl Watchdog {
    /// `entry` is `NAME=value` in the environment of the job's processes and no others, `folder` the job's in memory.
    pub(crate) fn start(entry: &str, folder: Option<&CStr>) -> Result<Self, LaunchError> {
        let (read_end, write_end) =
            rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(LaunchError::system("pipe"))?;
        let blocked = Blocked::all();
        // SAFETY: the child runs `guard` only, which makes system calls on its own stack and never returns: no
        // allocation, no lock, no destructor, so the state other threads left behind does not matter.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            guard(read_end.as_raw_fd(), entry.as_bytes(), folder);
        }
        drop(blocked);
        if pid < 0 {
            return Err(LaunchError::system("fork")(io::Error::last_os_error()));
        }
        let process =
            Worker::adopt(pid.unsigned_abs()).map_err(LaunchError::system("pidfd_open"))?;
        Ok(Self {
            process,
            pipe: write_end,
        })
    }

    /// From now on the group dies with the launcher.
    pub(crate) fn guard_group(&self, group: u32) {
        self.tell(group as i32);
    }

    /// The group has no members left; its number may be given to others.
    pub(crate) fn forget_group(&self, group: u32) {
        self.tell(-(group as i32));
    }

    fn tell(&self, message: i32) {
        // Four bytes are written whole or not at all. If the watchdog was killed, the job goes on without one (SIGPIPE is
        // ignored in Rust programs), and the workers still die with the launcher.
        let _ = rustix::io::write(&self.pipe, &message.to_ne_bytes());
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // Killed while the pipe is still open, so it has no chance to take this for the launcher's death.
        self.process.signal(Signal::KILL);
        self.process.wait_and_reap(KILLED_ENDS_WITHIN);
    }
}

/// Blocks all signals in this thread until dropped, so that the child starts with all blocked: a Ctrl-C in the
/// terminal is for the launcher.
struct Blocked(libc::sigset_t);

impl Blocked {
    fn all() -> Self {
        // SAFETY: sigset_t is a set of bits, for which zero is a value; both calls get valid pointers.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self(before)
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: `self.0` was filled by pthread_sigmask.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut())
        };
    }
}

/// The watchdog's whole life. Only async-signal-safe calls.
fn guard(pipe: i32, entry: &[u8], folder: Option<&CStr>) -> ! {
    let mut groups = [0_i32; NPROC_MAX];
    // Out of the launcher's session: a signal to its group, or the terminal's end, does not end the watchdog.
    let _ = rustix::process::setsid();
    // SAFETY: these calls take integers and pointers to constants, and this process has one thread and uses no other
    // descriptor than the pipe. A watchdog that could not close the launcher's descriptors would keep pipes and
    // sockets open behind its back, so it leaves instead.
    unsafe {
        libc::prctl(libc::PR_SET_NAME, c"paceline/guard".as_ptr());
        if libc::dup2(pipe, 0) != 0
            || libc::syscall(libc::SYS_close_range, 1_u32, u32::MAX, 0_u32) != 0
        {
            libc::_exit(1);
        }
    }
    loop {
        let mut bytes = [0_u8; 4];
        // SAFETY: reads at most four bytes into a buffer of four.
        let got = unsafe { libc::read(0, bytes.as_mut_ptr().cast(), bytes.len()) };
        match got {
            4 => remember(&mut groups, i32::from_ne_bytes(bytes)),
            0 => break,
            _ => {
                // SAFETY: as above. A pipe that cannot be read tells nothing about the launcher.
                unsafe { libc::_exit(1) }
            }
        }
    }
    for group in groups {
        if let Some(group) = Pid::from_raw(group) {
            let _ = rustix::process::kill_process_group(group, Signal::KILL);
        }
    }
    sweep::kill_all(entry);
    if let Some(folder) = folder {
        memory_folder::remove(folder);
    }
    // SAFETY: ends this process without running anything of the launcher's.
    unsafe { libc::_exit(0) }
}

/// Adds a group (positive) or removes it (negative).
fn remember(groups: &mut [i32], message: i32) {
    let (from, to) = if message > 0 {
        (0, message)
    } else {
        (-message, 0)
    };
    if let Some(place) = groups.iter_mut().find(|group| **group == from) {
        *place = to;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_come_and_go() {
        let mut groups = [0; 3];
        for message in [5, 6, -5, 7, -9] {
            remember(&mut groups, message);
        }
        assert_eq!(groups, [7, 6, 0]);
        remember(&mut groups, 8);
        remember(&mut groups, 9);
        assert_eq!(
            groups,
            [7, 6, 8],
            "a full table loses the newest, it does not overflow"
        );
    }
}
