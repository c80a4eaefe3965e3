//! What the stand-ins for NVIDIA's libraries have in common.
//!
//! Tests copy one as a [`LibraryFile`]: found where cargo builds it, made poorer for drivers that lack functions, loaded into this
//! process so that its machine can be changed and its calls counted. The library itself finds its file with [`file_of`], and serves the
//! two functions that tests call with [`load`] and [`calls`].
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::fmt::Display;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A file with a library in it, or the place for one.
#[derive(Debug)]
pub struct LibraryFile {
    package: &'static str,
    path: PathBuf,
    loaded: OnceLock<libloading::Library>,
}

impl LibraryFile {
    /// A copy at `path` of what cargo has built of `package`, in which some functions cannot be found.
    ///
    /// *Panics*: the library is not built, has no such function, or cannot be copied.
    pub fn copy(package: &'static str, path: PathBuf, without: &[&str]) -> Self {
        let built = built(package);
        let mut bytes = std::fs::read(&built)
            .unwrap_or_else(|error| panic!("cannot read {}: {error}", built.display()));
        for function in without {
            take_out(&mut bytes, function);
        }
        std::fs::write(&path, bytes).expect("a copy of the library");
        Self::at(package, path)
    }

    /// What lies at `path`, which may be nothing.
    pub fn at(package: &'static str, path: PathBuf) -> Self {
        Self {
            package,
            path,
            loaded: OnceLock::new(),
        }
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keeps it loaded, so that its state outlives users that open and close it.
    pub fn keep(&self) {
        self.library();
    }

    /// Gives it another machine from now on, in this process. Calls are counted from 0 again.
    ///
    /// *Panics*: the library does not take this machine.
    pub fn load(&self, json: &str) {
        // SAFETY: this is the type that every stand-in exports under this name.
        let load = unsafe { self.own::<unsafe extern "C" fn(*const u8, usize) -> c_int>("load") };
        // SAFETY: the bytes are there for as long as the call takes.
        let code = unsafe { load(json.as_ptr(), json.len()) };
        assert_eq!(code, 0, "the machine is wrong; the line above says how");
    }

    /// How often a function was called in this process since the machine was loaded.
    pub fn calls(&self, function: &str) -> u64 {
        // SAFETY: this is the type that every stand-in exports under this name.
        let calls = unsafe { self.own::<unsafe extern "C" fn(*const c_char) -> u64>("calls") };
        let function = CString::new(function).expect("a name of a function");
        // SAFETY: the name is there for as long as the call takes.
        unsafe { calls(function.as_ptr()) }
    }

    /// A function of the stand-in's own, which it exports with its package's name before `name`.
    ///
    /// # Safety
    ///
    /// `F` is the function's type.
    pub unsafe fn own<F>(&self, name: &str) -> libloading::Symbol<'_, F> {
        let name = format!("{}_{name}\0", self.package.replace('-', "_"));
        // SAFETY: the caller vouches for the type.
        let function = unsafe { self.library().get(name.as_bytes()) };
        function.unwrap_or_else(|error| panic!("{}: {error}", self.path.display()))
    }

    /// The copy that every user of the same path in this process shares.
    fn library(&self) -> &libloading::Library {
        self.loaded.get_or_init(|| {
            // SAFETY: nothing runs when a stand-in is loaded.
            let library = unsafe { libloading::Library::new(&self.path) };
            library.unwrap_or_else(|error| panic!("{}: {error}", self.path.display()))
        })
    }
}

/// Where cargo has put the library: beside the tests, or beside what programs are made of.
fn built(package: &str) -> PathBuf {
    let name = format!("lib{}.so", package.replace('-', "_"));
    let program = std::env::current_exe().expect("this program has a path");
    let folders: Vec<&Path> = program.ancestors().skip(1).take(3).collect();
    let beside = folders.iter().map(|folder| folder.join(&name));
    // A folder `deps` has what was built last; a copy above it may be of another day.
    let in_deps = folders.iter().map(|folder| folder.join("deps").join(&name));
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
            "{name} is not built. It is built along with any test whose crate has {package} among its dev-dependencies, or by \
             `cargo build -p {package}`. Looked for:{}",
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

/// The file from which the library with this function in it was loaded.
pub fn file_of(function: extern "C" fn(*const c_char) -> u64) -> Option<PathBuf> {
    // SAFETY: every bit pattern is a `Dl_info`: numbers and pointers.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the address is that of a function, and `info` may be written to.
    let code = unsafe { libc::dladdr(function as *const _, &raw mut info) };
    if code == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr says that this is a string that lives as long as the library.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(OsStr::from_bytes(name.to_bytes()).into())
}

/// What a library does when [`LibraryFile::load`] calls it: 0, or 1 where `take` wants no such machine.
///
/// # Safety
///
/// `json` is null, or the caller lends `length` bytes there.
pub unsafe fn load<E: Display>(
    json: *const u8,
    length: usize,
    take: impl FnOnce(&[u8]) -> Result<(), E>,
) -> c_int {
    if json.is_null() {
        return 1;
    }
    // SAFETY: as this function's.
    let json = unsafe { std::slice::from_raw_parts(json, length) };
    match take(json) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("fake library: {error}");
            1
        }
    }
}

/// What a library does when [`LibraryFile::calls`] calls it.
///
/// # Safety
///
/// `function` is null, or a string that ends.
pub unsafe fn calls(function: *const c_char, count: impl FnOnce(&str) -> u64) -> u64 {
    if function.is_null() {
        return 0;
    }
    // SAFETY: as this function's.
    let function = unsafe { CStr::from_ptr(function) };
    count(&function.to_string_lossy())
}
