//! The C functions of both libraries: each counts its call, goes wrong if it is to, and else does what its name says.
#![allow(unsafe_code, non_snake_case)]

mod caller;
mod driver;
mod nccl;

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::process::Process;

pub use self::driver::DRIVER_FUNCTIONS;
pub use self::nccl::NCCL_FUNCTIONS;

/// Declares functions with the names and types of a vendor's header, and the list of their names; `name` is a function's own name
/// in its body.
macro_rules! exported {
    ($(#[$about:meta])* $list:ident: $(fn $function:ident($($argument:ident: $type:ty),* $(,)?) = |$name:ident| $body:expr;)*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $function($($argument: $type),*) -> u32 {
                let $name = stringify!($function);
                $body
            }
        )*

        $(#[$about])*
        pub const $list: &[&str] = &[$(stringify!($function)),*];
    };
}
pub(crate) use exported;

/// Where this copy of the library lies.
pub(crate) fn library() -> Option<PathBuf> {
    let own: extern "C" fn(*const c_char) -> u64 = paceline_fake_cuda_calls;
    // SAFETY: every bit pattern is a `Dl_info`: numbers and pointers.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the address is that of a function here, and `info` may be written to.
    if unsafe { libc::dladdr(own as *const _, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr says that this is a string that lives as long as the library.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(Path::new(OsStr::from_bytes(name.to_bytes())).to_owned())
}

/// Keeps the library in the process: its threads go on after whoever opened it has closed it.
fn stay() {
    let Some(path) = library() else { return };
    if let Ok(path) = std::ffi::CString::new(path.as_os_str().as_bytes()) {
        let flags = libc::RTLD_NOW | libc::RTLD_NODELETE | libc::RTLD_NOLOAD;
        // SAFETY: the library at this path is loaded, so that nothing of it runs now.
        unsafe { libc::dlopen(path.as_ptr(), flags) };
    }
}

/// Ends the process as a crash does: nothing is told to anybody.
pub(crate) fn end(code: c_int) -> ! {
    // SAFETY: it takes a number, and never returns.
    unsafe { libc::_exit(code) }
}

/// Replaces the machine by another, and forgets what was called. Returns 0, or 1 where it is none.
#[unsafe(no_mangle)]
extern "C" fn paceline_fake_cuda_load(json: *const u8, length: usize) -> c_int {
    if json.is_null() {
        return 1;
    }
    // SAFETY: the caller lends `length` bytes.
    let json = unsafe { std::slice::from_raw_parts(json, length) };
    match Process::here().load(json) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("fake cuda: {error}");
            1
        }
    }
}

/// How often a function was called since the machine was loaded.
#[unsafe(no_mangle)]
extern "C" fn paceline_fake_cuda_calls(function: *const c_char) -> u64 {
    if function.is_null() {
        return 0;
    }
    // SAFETY: the caller gives a string that ends.
    let function = unsafe { CStr::from_ptr(function) };
    Process::here().calls(&function.to_string_lossy())
}

/// Lets no stream begin another piece of work, or with 0 lets all go on.
#[unsafe(no_mangle)]
extern "C" fn paceline_fake_cuda_hold(is_held: c_int) {
    Process::here().hold(is_held != 0);
}
