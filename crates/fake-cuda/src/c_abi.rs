//! The C functions of both libraries. Each counts its call, and fails if the machine says so.
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

/// Declares functions with the names and types of a vendor's header, and the list of their names. In its body, `name` is the
/// function's name.
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

/// The path of this copy of the library.
pub(crate) fn library() -> Option<PathBuf> {
    paceline_fake_library::file_of(paceline_fake_cuda_calls)
}

/// Keeps the library loaded, because its threads outlive the program's handle.
fn stay() {
    let Some(path) = library() else { return };
    if let Ok(path) = std::ffi::CString::new(path.as_os_str().as_bytes()) {
        let flags = libc::RTLD_NOW | libc::RTLD_NODELETE | libc::RTLD_NOLOAD;
        // SAFETY: the library at this path is loaded already, so that no initializer runs.
        unsafe { libc::dlopen(path.as_ptr(), flags) };
    }
}

/// Ends the process at once, as a crash does.
pub(crate) fn end(code: c_int) -> ! {
    // SAFETY: it takes a number and never returns.
    unsafe { libc::_exit(code) }
}

/// Replaces the machine and resets the call counts. Returns 0, or 1 if the JSON is invalid.
#[unsafe(no_mangle)]
extern "C" fn paceline_fake_cuda_load(json: *const u8, length: usize) -> c_int {
    // SAFETY: the caller lends `length` bytes.
    unsafe { paceline_fake_library::load(json, length, |json| Process::here().load(json)) }
}

/// How often a function was called since the machine was loaded.
#[unsafe(no_mangle)]
extern "C" fn paceline_fake_cuda_calls(function: *const c_char) -> u64 {
    // SAFETY: the caller gives a terminated string.
    unsafe { paceline_fake_library::calls(function, |name| Process::here().calls(name)) }
}

/// Stops all streams from starting further work, or with 0 lets them continue.
#[unsafe(no_mangle)]
extern "C" fn paceline_fake_cuda_hold(is_held: c_int) {
    Process::here().hold(is_held != 0);
}
