//! Catches the signals that the launcher handles while a job runs, and puts the process's own handling back afterwards.
//!
//! The handler writes the signal's number to a pipe, which the launcher polls together with its workers. signalfd
//! would need the signals blocked in every thread of a process that is not ours alone. A signal that is ignored when
//! the job starts (`nohup`) stays ignored.
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use paceline_rendezvous::stop::signal_name;
use rustix::pipe::PipeFlags;

use crate::stop::HandledSignals;

/// Where the handler writes; -1 while no job runs.
static WRITE_END: AtomicI32 = AtomicI32::new(-1);

/// The process that handles them. A child has the handler too between fork and exec, and must not report its signals as ours.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// Catches the signals until it is dropped. There is one at a time: see `lib.rs`.
#[derive(Debug)]
pub(crate) struct Signals {
    read_end: OwnedFd,
    /// Kept open for the handler.
    _write_end: OwnedFd,
    before: Vec<(i32, Action)>,
}

struct Action(libc::sigaction);

impl std::fmt::Debug for Action {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Action").field(&self.0.sa_sigaction).finish()
    }
}

impl Signals {
    pub(crate) fn catch(handled: &HandledSignals) -> io::Result<Self> {
        let (read_end, write_end) =
            rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        OWNER.store(rustix::process::getpid().as_raw_pid(), Ordering::Relaxed);
        WRITE_END.store(write_end.as_raw_fd(), Ordering::Release);
        let mut signals = Self {
            read_end,
            _write_end: write_end,
            before: Vec::new(),
        };
        for signal in handled.numbers() {
            let before = exchange(signal, None)?;
            if before.sa_sigaction == libc::SIG_IGN {
                continue;
            }
            exchange(signal, Some(&caught()))?;
            signals.before.push((signal, Action(before)));
        }
        Ok(signals)
    }

    /// The next signal that has arrived, if one has.
    pub(crate) fn next(&self) -> Option<i32> {
        let mut byte = [0_u8];
        match rustix::io::read(&self.read_end, &mut byte) {
            Ok(1) => Some(i32::from(byte[0])),
            _ => None,
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.read_end.as_fd()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for (signal, before) in &self.before {
            // It worked with this signal a moment ago, so it cannot fail.
            let _ = exchange(*signal, Some(&before.0));
        }
        WRITE_END.store(-1, Ordering::Release);
    }
}

fn caught() -> libc::sigaction {
    // SAFETY: all fields of sigaction are integers, a set of bits or an optional pointer; zero is a value of each.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = on_signal as *const () as libc::sighandler_t;
    // Interrupted system calls of other threads go on: the process is not ours alone.
    action.sa_flags = libc::SA_RESTART;
    action
}

/// Sets the action for a signal if there is a new one, and returns the one before.
fn exchange(signal: i32, new: Option<&libc::sigaction>) -> io::Result<libc::sigaction> {
    let mut before = MaybeUninit::uninit();
    let new = new.map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `new` is null or points to a whole sigaction whose handler is async-signal-safe (`on_signal`) or was the
    // process's own; `before` has room for one.
    if unsafe { libc::sigaction(signal, new, before.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: sigaction succeeded, so it has filled `before`.
    Ok(unsafe { before.assume_init() })
}

extern "C" fn on_signal(signal: libc::c_int) {
    let fd = WRITE_END.load(Ordering::Acquire);
    if rustix::process::getpid().as_raw_pid() != OWNER.load(Ordering::Relaxed) {
        return;
    }
    // All caught signals have numbers far below 256.
    let byte = signal as u8;
    // SAFETY: write and errno's location are async-signal-safe; errno is put back so that the interrupted code does not
    // see ours. A full pipe loses the signal, but only behind thousands of unread ones.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        libc::write(fd, std::ptr::from_ref(&byte).cast(), 1);
        *errno = before;
    }
}

/// The signal's name, `SIGKILL` for 9.
pub(crate) fn name(number: i32) -> String {
    match number {
        // Linux's own.
        libc::SIGSTKFLT => "SIGSTKFLT".to_owned(),
        libc::SIGPWR => "SIGPWR".to_owned(),
        _ => signal_name(number),
    }
}
