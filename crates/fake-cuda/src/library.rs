//! The fake library as a file: found where cargo builds it, copied so that every user has one to itself, and made poorer for
//! drivers that lack functions.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tempfile::TempDir;

use crate::process::{MACHINE_FILE, MACHINE_VARIABLE};

/// What cargo calls the library.
const BUILT: &str = "libpaceline_fake_cuda.so";

/// What a copy is called, as NVIDIA's own; one file is both, so that NCCL knows the driver's streams.
const DRIVER: &str = "libcuda.so.1";
const NCCL: &str = "libnccl.so.2";

/// A copy of the fake library, which has a machine of its own, in this process and in those that are given its path.
///
/// *Example* -
/// ```no_run
/// let library = paceline_fake_cuda::Library::whole();
/// library.load(r#"{"devices": 2, "peers": "NS"}"#);
/// // Point the program at library.driver() and library.nccl(), then look whom it asked.
/// assert_eq!(library.calls("cuDeviceCanAccessPeer"), 2);
/// ```
#[derive(Debug)]
pub struct Library {
    folder: PathBuf,
    loaded: OnceLock<libloading::Library>,
    /// Goes with the copy.
    _scratch: TempDir,
}

impl Library {
    /// A copy with all functions, and a machine with one good device.
    pub fn whole() -> Self {
        Self::without(&[])
    }

    /// A copy in which some functions cannot be found.
    pub fn without(functions: &[&str]) -> Self {
        let scratch = TempDir::new().expect("a temporary folder");
        let folder = scratch.path().to_owned();
        let built = built();
        let mut bytes = std::fs::read(&built)
            .unwrap_or_else(|error| panic!("cannot read {}: {error}", built.display()));
        for function in functions {
            take_out(&mut bytes, function);
        }
        std::fs::write(folder.join(DRIVER), bytes).expect("a copy of the library");
        symlink(DRIVER, folder.join(NCCL)).expect("a second name for the copy");
        let library = Self {
            folder,
            loaded: OnceLock::new(),
            _scratch: scratch,
        };
        // What it knows outlives those who open and close it in this process.
        library.loaded();
        library
    }

    /// The file that stands for the CUDA driver.
    pub fn driver(&self) -> PathBuf {
        self.folder.join(DRIVER)
    }

    /// The file that stands for NCCL.
    pub fn nccl(&self) -> PathBuf {
        self.folder.join(NCCL)
    }

    /// The folder with both, for `LD_LIBRARY_PATH`.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Describes the machine that programs find which are given this copy; a process that has looked before keeps its own.
    pub fn describe(&self, json: &str) {
        std::fs::write(self.folder.join(MACHINE_FILE), json).expect("a machine beside the library");
    }

    /// A variable with which a program finds a machine of its own, whichever copy it is given.
    pub fn variable(json: &str) -> (String, String) {
        (MACHINE_VARIABLE.to_owned(), json.to_owned())
    }

    /// Gives it another machine from now on, in this process. Calls are counted from 0 again.
    pub fn load(&self, json: &str) {
        type Load = unsafe extern "C" fn(*const u8, usize) -> c_int;
        // SAFETY: this is the type that the library exports under this name.
        let load = unsafe { self.loaded().get::<Load>(b"paceline_fake_cuda_load\0") };
        let load = load.expect("the fake library");
        // SAFETY: the bytes are there for as long as the call takes.
        let code = unsafe { load(json.as_ptr(), json.len()) };
        assert_eq!(code, 0, "the machine is wrong; the line above says how");
    }

    /// How often a function was called in this process since the machine was loaded.
    pub fn calls(&self, function: &str) -> u64 {
        type Calls = unsafe extern "C" fn(*const c_char) -> u64;
        // SAFETY: this is the type that the library exports under this name.
        let calls = unsafe { self.loaded().get::<Calls>(b"paceline_fake_cuda_calls\0") };
        let calls = calls.expect("the fake library");
        let function = CString::new(function).expect("a name of a function");
        // SAFETY: the name is there for as long as the call takes.
        unsafe { calls(function.as_ptr()) }
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
        type Hold = unsafe extern "C" fn(c_int);
        // SAFETY: this is the type that the library exports under this name.
        let hold = unsafe { self.loaded().get::<Hold>(b"paceline_fake_cuda_hold\0") };
        // SAFETY: it takes a number.
        unsafe { hold.expect("the fake library")(is_held) };
    }

    /// The copy that whoever opens the same path in this process has, too.
    fn loaded(&self) -> &libloading::Library {
        self.loaded.get_or_init(|| {
            // SAFETY: nothing runs when this library is loaded.
            let library = unsafe { libloading::Library::new(self.driver()) };
            library.unwrap_or_else(|error| panic!("{}: {error}", self.driver().display()))
        })
    }
}

/// Where cargo has put the library: beside the tests, or beside what programs are made of.
fn built() -> PathBuf {
    let program = std::env::current_exe().expect("this program has a path");
    let folders: Vec<&Path> = program.ancestors().skip(1).take(3).collect();
    let beside = folders.iter().map(|folder| folder.join(BUILT));
    // A folder `deps` has what was built last; a copy above it may be of another day.
    let in_deps = folders.iter().map(|folder| folder.join("deps").join(BUILT));
    let is_in_deps = folders
        .first()
        .is_some_and(|folder| folder.ends_with("deps"));
    let places: Vec<PathBuf> = if is_in_deps {
        beside.chain(in_deps).collect()
    } else {
        in_deps.chain(beside).collect()
    };
    let found = places.iter().find(|place| place.is_file());
    found.cloned().unwrap_or_else(|| {
        let looked = places.iter().map(|place| format!("\n  {}", place.display()));
        panic!(
            "{BUILT} is not built. It is built along with any test whose crate has paceline-fake-cuda among its \
             dev-dependencies, or by `cargo build -p paceline-fake-cuda`. Looked for:{}",
            looked.collect::<String>()
        )
    })
}

/// Changes a function's name wherever it stands by itself, which is in the tables that the loader looks names up in. The
/// tables' hashes stay, so that a search for either name ends without it.
fn take_out(library: &mut [u8], function: &str) {
    let name = format!("\0{function}\0");
    let mut from = 0;
    let mut found = false;
    while let Some(at) = find(&library[from..], name.as_bytes()) {
        library[from + at + 1] = b'-';
        from += at + name.len() - 1;
        found = true;
    }
    assert!(found, "the fake library has no function {function}");
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes
        .windows(wanted.len())
        .position(|window| window == wanted)
}
