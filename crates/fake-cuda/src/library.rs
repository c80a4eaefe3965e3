//! The fake library as a file: a copy for every user.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use paceline_fake_library::LibraryFile;
use tempfile::TempDir;

use crate::process::{MACHINE_FILE, MACHINE_VARIABLE};

/// What a copy is called, as NVIDIA's own; one file is both, so that NCCL knows the driver's streams.
const DRIVER: &str = "libcuda.so.1";
const NCCL: &str = "libnccl.so.2";

/// A copy of the fake library, which has a machine of its own, in this process and in those that are given its path.
///
/// *Example*:
/// ```no_run
/// let library = paceline_fake_cuda::Library::whole();
/// library.load(r#"{"devices": 2, "peers": "NS"}"#);
/// // Point the program at library.driver() and library.nccl(), then look whom it asked.
/// assert_eq!(library.calls("cuDeviceCanAccessPeer"), 2);
/// ```
#[derive(Debug)]
pub struct Library {
    file: LibraryFile,
    /// Goes with the copy.
    scratch: TempDir,
}

impl Library {
    /// A copy with all functions, and a machine with one good device.
    pub fn whole() -> Self {
        Self::without(&[])
    }

    /// A copy in which some functions cannot be found.
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

    /// Describes the machine that programs find which are given this copy; a process that has looked before keeps its own.
    pub fn describe(&self, json: &str) {
        std::fs::write(self.folder().join(MACHINE_FILE), json)
            .expect("a machine beside the library");
    }

    /// A variable with which a program finds a machine of its own, whichever copy it is given.
    pub fn variable(json: &str) -> (String, String) {
        (MACHINE_VARIABLE.to_owned(), json.to_owned())
    }

    /// Gives it another machine from now on, in this process. Calls are counted from 0 again.
    pub fn load(&self, json: &str) {
        self.file.load(json);
    }

    /// How often a function was called in this process since the machine was loaded.
    pub fn calls(&self, function: &str) -> u64 {
        self.file.calls(function)
    }

    /// Lets no stream of this process begin another copy, kernel or collective until [`Self::let_go`]. What is queued stays
    /// queued, so that a wait that is missing shows every time.
    pub fn hold(&self) {
        self.set_held(1);
    }

    /// Lets all streams go on.
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
