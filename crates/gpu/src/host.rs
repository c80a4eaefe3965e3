//! How a machine is looked at: files of `/proc` and `/sys` below a root that tests replace, and variables.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Longest file that is read; `/proc/net/tcp` of a busy server is the largest.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// The machine, or a recorded one.
pub struct Host<'a> {
    root: PathBuf,
    variable: &'a dyn Fn(&str) -> Option<String>,
}

impl<'a> Host<'a> {
    /// A machine whose files lie below `root`, and whose environment `variable` tells.
    pub fn new(root: impl Into<PathBuf>, variable: &'a dyn Fn(&str) -> Option<String>) -> Self {
        let root = root.into();
        Self { root, variable }
    }

    /// A variable of the environment that is set to something.
    pub fn variable(&self, name: &str) -> Option<String> {
        (self.variable)(name).filter(|value| !value.trim().is_empty())
    }

    /// Where an absolute path lies.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The beginning of a file, or nothing where it cannot be read. Bytes that are no text are replaced.
    ///
    /// *Cost*: 4 MiB at most.
    pub fn text(&self, path: &str) -> Option<String> {
        let bytes = self.read(path, FILE_BYTES_MAX).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// A file that is one whole number.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.trim().parse().ok()
    }

    /// Whether this is the machine that runs this, so that its kernel may be asked as well.
    pub fn is_this_one(&self) -> bool {
        self.root == Path::new("/")
    }

    /// The beginning of a file.
    ///
    /// *Errors*: those of the system, so that what is not there and what may not be read are told apart.
    pub fn read(&self, path: &str, most: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open(path)?.take(most).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Opens a file so that reading never waits: not for a pipe's other end, and not for the kernel's next message.
    pub(crate) fn open(&self, path: &str) -> io::Result<File> {
        let flags = rustix::fs::OFlags::NONBLOCK.bits();
        OpenOptions::new()
            .read(true)
            .custom_flags(flags.cast_signed())
            .open(self.path(path))
    }

    /// Numbers of the processes, of at most so many entries.
    pub fn processes(&self, most: usize) -> Vec<u32> {
        let names = self.names("/proc", most).unwrap_or_default();
        names.iter().filter_map(|name| name.parse().ok()).collect()
    }

    /// Names of what is in a folder, ascending; those that are no text are left out.
    ///
    /// *Cost*: at most `most` entries are looked at.
    pub fn names(&self, path: &str, most: usize) -> io::Result<Vec<String>> {
        let entries = fs::read_dir(self.path(path))?.take(most).flatten();
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        Ok(names)
    }

    /// Where a symbolic link leads, as it is written there.
    pub(crate) fn link(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.path(path)).ok()?;
        target.into_os_string().into_string().ok()
    }

    /// The last part of what a symbolic link leads to.
    pub(crate) fn link_name(&self, path: &str) -> Option<String> {
        let target = self.link(path)?;
        let name = target.rsplit('/').next()?;
        (!name.is_empty()).then(|| name.to_owned())
    }

    /// Whether something is there.
    pub(crate) fn has(&self, path: &str) -> bool {
        self.path(path).exists()
    }
}

/// What `look` comes to, or nothing where it takes longer than `timeout`: a file server that is gone, or a process that the
/// kernel holds, keeps whoever asks for it. The thread is then left behind; it holds nothing that others need.
///
/// *Blocks*: for `timeout` at most.
pub fn within<T: Send + 'static>(
    name: &str,
    timeout: Duration,
    look: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let tell = move || {
        // The receiver is gone if this is late; then the answer is not needed.
        let _ = sender.send(look());
    };
    thread::Builder::new().name(name.into()).spawn(tell).ok()?;
    receiver.recv_timeout(timeout).ok()
}

/// A size in a table of the kernel's, in bytes: `MemTotal:  1000 kB`.
pub fn kib(table: &str, name: &str) -> Option<u64> {
    let line = table.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// A recorded machine for tests.
#[cfg(feature = "recorded")]
#[path = "host/tests/recorded.rs"]
pub mod recorded;

#[cfg(test)]
mod tests {
    use super::recorded::Recorded;
    use super::*;

    /// A file that is not text, one that is far too long, and a pipe without a writer.
    #[test]
    fn malformed_files_are_read_as_far_as_they_go() {
        let recorded = Recorded::new(&[("/a", "12 x"), ("/n", " 7\n"), ("/e", "")]);
        let host = recorded.host();
        std::fs::write(host.path("/b"), [0xff, b'1', 0]).expect("written");
        std::fs::write(host.path("/long"), vec![b'1'; 5 << 20]).expect("written");
        assert_eq!(host.number("/a"), None);
        assert_eq!(host.number("/n"), Some(7));
        assert_eq!(host.number("/e"), None);
        assert_eq!(host.number("/none"), None);
        assert_eq!(host.text("/b").as_deref(), Some("\u{fffd}1\0"));
        rustix::fs::mkfifoat(rustix::fs::CWD, host.path("/pipe"), rustix::fs::Mode::RUSR)
            .expect("a pipe");
        assert_eq!(host.text("/pipe").as_deref(), Some(""));
        assert_eq!(host.text("/long").map(|text| text.len()), Some(4 << 20));
    }

    #[test]
    fn a_look_that_never_ends_is_left_behind() {
        let (keep, stuck) = mpsc::channel::<()>();
        let late = within("test", Duration::ZERO, move || stuck.recv().is_err());
        assert_eq!(late, None);
        drop(keep);
        let soon = within("test", Duration::from_secs(20), || 7);
        assert_eq!(soon, Some(7));
    }
}
