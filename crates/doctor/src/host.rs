//! How a machine is looked at: files of `/proc` and `/sys` below a root that tests replace, and variables.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Longest file that is read; `/proc/net/tcp` of a busy server is the largest.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// The machine, or a recorded one.
pub(crate) struct Host<'a> {
    root: PathBuf,
    variable: &'a dyn Fn(&str) -> Option<String>,
}

impl<'a> Host<'a> {
    pub(crate) fn new(
        root: impl Into<PathBuf>,
        variable: &'a dyn Fn(&str) -> Option<String>,
    ) -> Self {
        let root = root.into();
        Self { root, variable }
    }

    /// A variable of the environment that is set to something.
    pub(crate) fn variable(&self, name: &str) -> Option<String> {
        (self.variable)(name).filter(|value| !value.trim().is_empty())
    }

    /// Where an absolute path lies.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The beginning of a file, or nothing where it cannot be read. Bytes that are no text are replaced.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        let bytes = bytes(&self.path(path), FILE_BYTES_MAX)?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// A file that is one whole number.
    pub(crate) fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.trim().parse().ok()
    }
}

/// What `look` comes to, or nothing where it takes longer than `timeout`: a file server that is gone, or a process that the
/// kernel holds, keeps whoever asks for it. The thread is then left behind; it holds nothing that others need.
pub(crate) fn within<T: Send + 'static>(
    name: &str,
    timeout: Duration,
    look: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let tell = move || {
        // The receiver is gone when this is late; then nobody needs it.
        let _ = sender.send(look());
    };
    thread::Builder::new().name(name.into()).spawn(tell).ok()?;
    receiver.recv_timeout(timeout).ok()
}

/// At most so many bytes of a file.
pub(crate) fn bytes(path: &Path, most: u64) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)
        .ok()?
        .take(most)
        .read_to_end(&mut bytes)
        .ok()?;
    Some(bytes)
}

/// A recorded machine for tests: files below a folder that goes with it.
#[cfg(test)]
pub(crate) mod recorded {
    use super::*;

    pub(crate) struct Recorded {
        folder: tempfile::TempDir,
    }

    impl Recorded {
        pub(crate) fn new(files: &[(&str, &str)]) -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            for (path, text) in files {
                let path = folder.path().join(path.trim_start_matches('/'));
                std::fs::create_dir_all(path.parent().expect("a parent")).expect("made");
                std::fs::write(path, text).expect("written");
            }
            Self { folder }
        }

        pub(crate) fn host(&self) -> Host<'_> {
            Host::new(self.folder.path(), &|_| None)
        }

        pub(crate) fn host_with<'a>(
            &self,
            variable: &'a dyn Fn(&str) -> Option<String>,
        ) -> Host<'a> {
            Host::new(self.folder.path(), variable)
        }
    }

    /// A file that is no text and one that is far too long are read as far as they go.
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
