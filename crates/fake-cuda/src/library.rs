//! The fake library as a file, one copy per user.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use paceline_fake_library::LibraryFile;
use tempfile::TempDir;

use crate::process::{MACHINE_FILE, MACHINE_VARIABLE};

/// The file names of NVIDIA's libraries. One file is both, so that NCCL knows the driver's streams.
const DRIVER: &str = "libcuda.so.1";
const NCCL: &str = "libnccl.so.2";

/// Device memory that a test holds. Copies happen at once, whatever streams do.
#[derive(Debug)]
pub struct Room {
    library: Arc<Library>,
    /// Address of the first byte.
    pub address: u64,
    /// Length.
    ///
    /// *Units*: bytes.
    pub bytes: usize,
}

impl Room {
    /// Memory of a device with these bytes.
    ///
    /// *Panics*: before a program has initialized the driver, or if the device has no memory left.
    pub fn new(library: &Arc<Library>, device: usize, bytes: &[u8]) -> Self {
        // SAFETY: this is the type that the library exports under this name.
        let allocate =
            unsafe { (library.file).own::<unsafe extern "C" fn(c_int, usize) -> u64>("allocate") };
        // SAFETY: it takes numbers.
        let address = unsafe { allocate(device as c_int, bytes.len().max(1)) };
        assert_ne!(address, 0, "device {device} has no {} bytes", bytes.len());
        let room = Self {
            library: library.clone(),
            address,
            bytes: bytes.len(),
        };
        // The copy only reads from there.
        room.copy(bytes.as_ptr().cast_mut(), 0);
        room
    }

    /// Its bytes.
    pub fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes];
        self.copy(bytes.as_mut_ptr(), 1);
        bytes
    }

    fn copy(&self, host: *mut u8, is_read: c_int) {
        type Copy = unsafe extern "C" fn(u64, *mut u8, usize, c_int) -> c_int;
        // SAFETY: this is the type that the library exports under this name.
        let copy = unsafe { self.library.file.own::<Copy>("copy") };
        // SAFETY: the caller's vector has as many bytes.
        let code = unsafe { copy(self.address, host, self.bytes, is_read) };
        assert_eq!(code, 0, "the memory is allocated");
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // SAFETY: this is the type that the library exports under this name.
        let free = unsafe { (self.library.file).own::<unsafe extern "C" fn(u64)>("free") };
        // SAFETY: it takes a number.
        unsafe { free(self.address) };
    }
}

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
