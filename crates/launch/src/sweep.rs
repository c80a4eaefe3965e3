//! Kills every process whose environment names this launcher; made for the watchdog, which may not allocate.
//!
//! A process inherits its parent's environment, so the entry is in that of every descendant of a worker, whatever group or
//! session they have moved to. Each candidate is held by a pidfd while its environment is read, so the signal
//! reaches the process that was looked at or none.

use std::ffi::CStr;
use std::io::Write;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::fs::{CWD, Mode, OFlags, RawDir};
use rustix::io::Result;
use rustix::process::{Pid, PidfdFlags, Signal};

/// A process may start another while the list is read; after this many looks it is left to win.
const LOOKS_MAX: usize = 50;

/// Looks through all processes until a look finds none with this entry in its environment. Allocates nothing and takes no lock.
pub(crate) fn kill_all(entry: &[u8]) {
    for _ in 0..LOOKS_MAX {
        if !kill_found(entry).unwrap_or(false) {
            return;
        }
    }
}

/// One look. Says whether it found a process.
fn kill_found(entry: &[u8]) -> Result<bool> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let proc = rustix::fs::openat(CWD, c"/proc", flags, Mode::empty())?;
    let mut buffer = [MaybeUninit::<u8>::uninit(); 8192];
    let mut entries = RawDir::new(&proc, &mut buffer);
    let mut found = false;
    while let Some(process) = entries.next() {
        let Some(pid) = number(process?.file_name()).and_then(Pid::from_raw) else {
            continue;
        };
        // A process that is gone by now, or belongs to another user, is not ours.
        let Ok(pidfd) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else {
            continue;
        };
        if has_entry(&proc, pid, entry).unwrap_or(false) {
            found |= rustix::process::pidfd_send_signal(&pidfd, Signal::KILL).is_ok();
        }
    }
    Ok(found)
}

/// Whether the environment contains this entry, or one that continues with a comma. A process that has ended has none.
fn has_entry(proc: &OwnedFd, pid: Pid, entry: &[u8]) -> Result<bool> {
    let mut path = [0_u8; 32];
    let Some(path) = environ_path(pid, &mut path) else {
        return Ok(false);
    };
    let file = rustix::fs::openat(proc, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut buffer = [0_u8; 8192];
    // As if a separator stood before the first entry.
    let mut kept = 1;
    loop {
        let filled = match rustix::io::read(&file, &mut buffer[kept..])? {
            0 => return Ok(false),
            count => kept + count,
        };
        if contains(&buffer[..filled], entry) {
            return Ok(true);
        }
        // An entry may lie across two reads: its length and both separators, less one byte, stay.
        kept = (entry.len() + 1).min(filled);
        buffer.copy_within(filled - kept..filled, 0);
    }
}

fn contains(text: &[u8], entry: &[u8]) -> bool {
    let is_it = |window: &[u8]| matches!(window, [0, found @ .., 0 | b','] if found == entry);
    text.windows(entry.len() + 2).any(is_it)
}

/// `<pid>/environ`, without allocation.
fn environ_path(pid: Pid, buffer: &mut [u8; 32]) -> Option<&CStr> {
    write!(&mut buffer[..], "{pid}/environ\0").ok()?;
    CStr::from_bytes_until_nul(buffer).ok()
}

/// The number that a name in `/proc` is, if it is one.
fn number(name: &CStr) -> Option<i32> {
    name.to_str().ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    #[test]
    fn names_in_proc_are_numbers_or_not() {
        let check = |name: &CStr, expect| assert_eq!(number(name), expect, "{name:?}");
        check(c"1", Some(1));
        check(c"4194304", Some(4_194_304));
        check(c"self", None);
        check(c"", None);
        check(c"99999999999", None);
    }

    #[test]
    fn a_path_is_made_without_allocation() {
        for pid in [1, 42, i32::MAX] {
            let mut buffer = [0; 32];
            let path = environ_path(Pid::from_raw(pid).unwrap(), &mut buffer).unwrap();
            assert_eq!(path.to_str().unwrap(), format!("{pid}/environ"));
        }
    }

    #[test]
    fn only_a_whole_entry_counts() {
        let check =
            |text: &str, expect| assert_eq!(contains(text.as_bytes(), b"A=1"), expect, "{text:?}");
        check("\0A=1\0", true);
        check("\0B=2\0A=1\0C=3\0", true);
        check("\0A=1,7\0", true);
        check("\0A=12\0", false);
        check("\0XA=1\0", false);
        check("\0A=1", false);
    }

    #[test]
    fn processes_of_the_launcher_die_and_others_live() {
        let entry = format!("PACELINE_TEST_LAUNCHER={}", std::process::id());
        let (name, value) = entry.split_once('=').unwrap();
        let start = |value: &str, padding: usize| {
            let mut command = Command::new("sleep");
            // The padding moves the entry across the reads of the environment.
            command
                .arg("60")
                .env_clear()
                .env("A_PADDING", "x".repeat(padding))
                .env(name, value);
            command.spawn().unwrap()
        };
        let mut other = start(&format!("{value}0"), 0);
        let mut ours: Vec<_> = [0, 8_150, 8_170, 8_192, 20_000]
            .map(|padding| start(value, padding))
            .into();
        kill_all(entry.as_bytes());
        for process in &mut ours {
            let status = process.wait().unwrap();
            assert_eq!(status.signal(), Some(9));
        }
        let other_lives = other.try_wait().unwrap().is_none();
        other.kill().unwrap();
        other.wait().unwrap();
        assert!(other_lives);
    }
}
