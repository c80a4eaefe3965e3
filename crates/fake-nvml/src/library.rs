//! The fake library as a file: found where cargo builds it, copied so that every user has one to itself, and made poorer for
//! drivers that lack functions.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tempfile::TempDir;

use crate::state::MACHINE_FILE;

/// What cargo calls the library.
const BUILT: &str = "libpaceline_fake_nvml.so";

/// What a copy is called, as NVIDIA's own.
const COPY: &str = "libnvidia-ml.so.1";

/// A copy of the fake library, which answers for a machine of its own, in this process and in those that are given its path.
///
/// *Example* - `Library::without(&["nvmlDeviceGetP2PStatus"])` is the library of a driver that was never asked about
/// peer-to-peer.
#[derive(Debug)]
pub struct Library {
    path: PathBuf,
    loaded: OnceLock<libloading::Library>,
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
        let built = built();
        let mut bytes = std::fs::read(&built)
            .unwrap_or_else(|error| panic!("cannot read {}: {error}", built.display()));
        for function in without {
            take_out(&mut bytes, function);
        }
        let path = folder.join(COPY);
        std::fs::write(&path, bytes).expect("a copy of the library");
        Self::at(path)
    }

    /// What lies at a path, which may be nothing.
    pub(crate) fn at(path: PathBuf) -> Self {
        Self {
            path,
            loaded: OnceLock::new(),
            _folder: None,
        }
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where its machine's `nvml.json` lies, which is read when the library is first initialized.
    pub fn machine(&self) -> PathBuf {
        self.path.with_file_name(MACHINE_FILE)
    }

    /// Gives it another machine from now on, in this process: an `nvml.json`. Calls are counted from 0 again.
    pub fn load(&self, json: &str) {
        type Load = unsafe extern "C" fn(*const u8, usize) -> c_int;
        // SAFETY: this is the type that the library exports under this name.
        let load = unsafe { self.loaded().get::<Load>(b"paceline_fake_nvml_load\0") };
        let load = load.expect("the fake library");
        // SAFETY: the bytes are there for as long as the call takes.
        let code = unsafe { load(json.as_ptr(), json.len()) };
        assert_eq!(code, 0, "the machine is wrong; the line above says how");
    }

    /// How often a function was called in this process since the machine was loaded.
    pub fn calls(&self, function: &str) -> u64 {
        type Calls = unsafe extern "C" fn(*const c_char) -> u64;
        // SAFETY: this is the type that the library exports under this name.
        let calls = unsafe { self.loaded().get::<Calls>(b"paceline_fake_nvml_calls\0") };
        let calls = calls.expect("the fake library");
        let function = CString::new(function).expect("a name of a function");
        // SAFETY: the name is there for as long as the call takes.
        unsafe { calls(function.as_ptr()) }
    }

    /// Keeps it in this process, so that what it knows outlives those who open and close it.
    pub(crate) fn keep(&self) {
        if self.path.is_file() {
            self.loaded();
        }
    }

    /// The copy that whoever opens the same path in this process has, too.
    fn loaded(&self) -> &libloading::Library {
        self.loaded.get_or_init(|| {
            // SAFETY: nothing runs when this library is loaded.
            let library = unsafe { libloading::Library::new(&self.path) };
            library.unwrap_or_else(|error| panic!("{}: {error}", self.path.display()))
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
            "{BUILT} is not built. It is built along with any test whose crate has paceline-fake-nvml among its \
             dev-dependencies, or by `cargo build -p paceline-fake-nvml`. Looked for:{}",
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
