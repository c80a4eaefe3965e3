//! The fake library as a file, one copy per user.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use paceline_fake_library::LibraryFile;
use tempfile::TempDir;

use crate::process::{MACHINE_FILE, MACHINE_VARIABLE};

/// The file names of NVIDIA's libraries. One file is both, so that NCCL knows the driver's streams.
const DRIVER: &str = "libcuda.so.1";
const NCCL: &str = "libnccl.so.2";

/// A copy of the fake library with its own machine, for this process and others that load it by its path.
///
/// *Example*:
/// ```no_run
/// let library = paceline_fake_cuda::Library::whole();
/// library.load(r#"{"devices": 2, "peers": "NS"}"#);
/// // Point the program at library.driver() and library.nccl(), then check its calls.
/// assert_eq!(library.calls("cuDeviceCanAccessPeer"), 2);
/// ```
#[derive(Debug)]
pub struct Library {
    file: LibraryFile,
    /// Deleted with the copy.
    scratch: TempDir,
}

impl Library {
    /// A copy with all functions, and a machine with one good device.
    pub fn whole() -> Self {
        Self::without(&[])
    }

    /// A copy that lacks some functions.
    pub fn without(functions: &[&str]) -> Self {
        let scratch = TempDir::new().expect("a temporary folder");
        let driver = scratch.path().join(DRIVER);
        let file = LibraryFile::copy(env!("CARGO_PKG_NAME"), driver, functions);
        symlink(DRIVER, scratch.path().join(NCCL)).expect("a second name for the copy");
        file.keep();
        Self { file, scratch }
    }

    /// The file that stands for the CUDA driver.
    pub fn driver(&self) -> PathBuf {
        self.file.path().to_owned()
    }

    /// The file that stands for NCCL.
    pub fn nccl(&self) -> PathBuf {
        self.folder().join(NCCL)
    }

    /// The folder with both, for `LD_LIBRARY_PATH`.
    pub fn folder(&self) -> &Path {
        self.scratch.path()
    }

    /// Sets the machine for programs that load this copy; a process that has already loaded it keeps its machine.
    pub fn describe(&self, json: &str) {
        std::fs::write(self.folder().join(MACHINE_FILE), json)
            .expect("a machine beside the library");
    }

    /// An environment variable that sets a program's machine, whichever copy it loads.
    pub fn variable(json: &str) -> (String, String) {
        (MACHINE_VARIABLE.to_owned(), json.to_owned())
    }

    /// Replaces the machine in this process, and resets the call counts.
    pub fn load(&self, json: &str) {
        self.file.load(json);
    }

    /// Number of calls of a function in this process since the machine was loaded.
    pub fn calls(&self, function: &str) -> u64 {
        self.file.calls(function)
    }

    /// Stops all streams of this process from starting a copy, kernel or collective until [`Self::let_go`], so that a missing
    /// wait shows every time.
    pub fn hold(&self) {
        self.set_held(1);
    }

    /// Lets all streams continue.
    pub fn let_go(&self) {
        self.set_held(0);
    }

    fn set_held(&self, is_held: c_int) {
        // SAFETY: this is the type that the library exports under this name.
        let hold = unsafe { self.file.own::<unsafe extern "C" fn(c_int)>("hold") };
        // SAFETY: it takes a number.
        unsafe { hold(is_held) };
    }
}
