//! The job's folder in this host's memory, for copies of checkpoints: its name, and its end with the job.
//!
//! The rank that saves the first copy makes the folder. The launcher removes it when the job is over, and the watchdog if the launcher was
//! killed. If both were killed at once, the next launcher on this host does so. The kernel removes it with the machine's memory.

use std::ffi::{CStr, CString, OsStr};
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use paceline_rendezvous::process::Stat;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RawDir};
use rustix::io::{Errno, Result};
use rustix::time::Timespec;

/// Where Linux has files that are nowhere but in memory.
const PARENT: &str = "/dev/shm";
/// `f_type` of such a file system, from `linux/magic.h`.
const TMPFS: u64 = 0x0102_1994;
/// A copy's files are two levels below the job's folder.
const DEPTH: usize = 2;
/// A rank that is being killed may finish a file while the folder is removed; after so many tries, a tenth of a second apart, it stays.
const TRIES: usize = 50;

/// The folder of one launcher's job; it is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct MemoryFolder(CString);

impl MemoryFolder {
    /// The folder of this process's job; `None` if the host has no file system in memory. Removes what killed launchers left behind.
    pub(crate) fn of_this_job() -> Option<Self> {
        let is_in_memory = rustix::fs::statfs(PARENT).is_ok_and(|at| at.f_type as u64 == TMPFS);
        if !is_in_memory {
            return None;
        }
        let prefix = prefix()?;
        remove_left(Path::new(PARENT), &prefix);
        let pid = std::process::id();
        let started = Stat::read(pid)?.started;
        CString::new(format!("{PARENT}/{prefix}{pid}-{started}"))
            .ok()
            .map(Self)
    }

    pub(crate) fn path(&self) -> &CStr {
        &self.0
    }
}

impl Drop for MemoryFolder {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

/// Removes the folders below `parent` whose names say that their launcher is gone.
fn remove_left(parent: &Path, prefix: &str) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(launcher) = name.to_str().and_then(|name| launcher(name, prefix)) else {
            continue;
        };
        let path = CString::new(entry.path().as_os_str().as_bytes());
        if let (false, Ok(path)) = (lives(launcher), path) {
            remove(&path);
        }
    }
}

/// Whether this is the name in `/dev/shm` of the memory of a job whose launcher runs on this machine.
#[must_use]
pub fn is_memory_in_use(name: &OsStr) -> bool {
    let launcher = || launcher(name.to_str()?, &prefix()?);
    launcher().is_some_and(lives)
}

/// What the names of all folders begin with. A container with its host's memory has other process ids.
fn prefix() -> Option<String> {
    let ids = fs::metadata("/proc/self/ns/pid").ok()?.ino();
    Some(format!("paceline-{ids}-"))
}

fn lives((pid, started): (u32, u64)) -> bool {
    Stat::read(pid).is_some_and(|stat| stat.started == started && !stat.has_ended())
}

/// Pid and start time of the launcher in a folder's name.
fn launcher(name: &str, prefix: &str) -> Option<(u32, u64)> {
    let (pid, started) = name.strip_prefix(prefix)?.split_once('-')?;
    Some((pid.parse().ok()?, started.parse().ok()?))
}

/// Removes a job's folder if it exists. Allocates nothing and takes no lock.
pub(crate) fn remove(path: &CStr) {
    for _ in 0..TRIES {
        match remove_tree(CWD, path, DEPTH) {
            Ok(()) => return,
            // Waiting does not help.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::PERM | Errno::ACCESS) => return,
            Err(_) => {}
        }
        let pause = Timespec {
            tv_sec: 0,
            tv_nsec: 100_000_000,
        };
        let _ = rustix::thread::nanosleep(&pause);
    }
}

/// Removes a folder with files, and folders in it down to `depth`. Follows no link.
fn remove_tree(parent: impl AsFd, name: &CStr, depth: usize) -> Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::openat(&parent, name, flags, Mode::empty())?;
    let mut buffer = [MaybeUninit::<u8>::uninit(); 4096];
    let mut entries = RawDir::new(&folder, &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let removed = rustix::fs::unlinkat(&folder, name, AtFlags::empty());
        if removed == Err(Errno::ISDIR) && depth > 0 {
            match remove_tree(folder.as_fd(), name, depth - 1) {
                // The watchdog of one launcher and the next launcher may remove it at once.
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
    }
    rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;

    #[test]
    fn folders_of_launchers_that_are_gone_are_removed_and_others_stay() {
        let parent = tempfile::tempdir().unwrap();
        let me = std::process::id();
        let started = Stat::read(me).unwrap().started;
        let make = |name: &str| {
            let copy = parent.path().join(name).join("step-0000000004");
            fs::create_dir_all(&copy).unwrap();
            for file in 0..300 {
                fs::write(copy.join(format!("a-file-with-a-long-name-{file}")), "x").unwrap();
            }
        };
        let mine = format!("paceline-7-{me}-{started}");
        let earlier = format!("paceline-7-{me}-{}", started + 1);
        let elsewhere = format!("paceline-8-{me}-{}", started + 1);
        for name in [&mine, &earlier, &elsewhere, "paceline-7-notes"] {
            make(name);
        }
        let of_now = |pid| OsString::from(format!("{}{pid}-{started}", prefix().unwrap()));
        assert!(is_memory_in_use(&of_now(me)));
        assert!(!is_memory_in_use(&of_now(0)) && !is_memory_in_use(OsStr::new(&mine)));
        remove_left(parent.path(), "paceline-7-");
        let mut left: Vec<_> = fs::read_dir(parent.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, [mine.as_str(), "paceline-7-notes", &elsewhere]);
    }
}
