//! The C functions of both libraries: each counts its call, goes wrong if it is to, and else does what its name says.
#![allow(unsafe_code, non_snake_case)]

mod caller;
mod driver;
mod nccl;

use std::ffi::{c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

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
    paceline_fake_library::file_of(paceline_fake_cuda_calls)
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
    // SAFETY: the caller lends `length` bytes.
    unsafe { paceline_fake_library::load(json, length, |json| Process::here().load(json)) }
}

/// How often a function was called since the machine was loaded.
#[unsafe(no_mangle)]
extern "C" fn paceline_fake_cuda_calls(function: *const c_char) -> u64 {
    // SAFETY: the caller gives a string that ends.
    unsafe { paceline_fake_library::calls(function, |name| Process::here().calls(name)) }
}

/// Lets no stream begin another piece of work, or with 0 lets all go on.
#[unsafe(no_mangle)]
extern "C" fn paceline_fake_cuda_hold(is_held: c_int) {
    Process::here().hold(is_held != 0);
}
