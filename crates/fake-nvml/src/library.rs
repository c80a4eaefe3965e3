//! The fake library as a file: a copy for every user.

use std::path::{Path, PathBuf};

use paceline_fake_library::LibraryFile;
use tempfile::TempDir;

use crate::state::MACHINE_FILE;

const PACKAGE: &str = env!("CARGO_PKG_NAME");

/// What a copy is called, as NVIDIA's own.
const NAME: &str = "libnvidia-ml.so.1";

/// A copy of the fake library, which answers for a machine of its own, in this process and in those that are given its path.
///
/// *Example*: `Library::without(&["nvmlDeviceGetP2PStatus"])` is the library of a driver that was never asked about
/// peer-to-peer.
#[derive(Debug)]
pub struct Library {
    file: LibraryFile,
    /// Goes with the copy.
    _folder: Option<TempDir>,
}

impl Library {
    /// A copy with all functions, and no machine yet.
    pub fn whole() -> Self {
        Self::without(&[])
    }

    /// A copy in which some functions cannot be found, and no machine yet.
    pub fn without(functions: &[&str]) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let mut library = Self::copy_to(folder.path(), functions);
        library._folder = Some(folder);
        library.keep();
        library
    }

    /// A copy in a folder that stays.
    pub(crate) fn copy_to(folder: &Path, without: &[&str]) -> Self {
        Self::of(LibraryFile::copy(PACKAGE, folder.join(NAME), without))
    }

    /// What lies in a folder, which may be nothing.
    pub(crate) fn in_folder(folder: &Path) -> Self {
        Self::of(LibraryFile::at(PACKAGE, folder.join(NAME)))
    }

    fn of(file: LibraryFile) -> Self {
        Self {
            file,
            _folder: None,
        }
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Where its machine's `nvml.json` lies, which is read when the library is first initialized.
    pub fn machine(&self) -> PathBuf {
        self.path().with_file_name(MACHINE_FILE)
    }

    /// Gives it another machine from now on, in this process: an `nvml.json`. Calls are counted from 0 again.
    pub fn load(&self, json: &str) {
        self.file.load(json);
    }

    /// How often a function was called in this process since the machine was loaded.
    pub fn calls(&self, function: &str) -> u64 {
        self.file.calls(function)
    }

    /// Keeps it loaded, so that its state outlives users that open and close it.
    pub(crate) fn keep(&self) {
        if self.path().is_file() {
            self.file.keep();
        }
    }
}
