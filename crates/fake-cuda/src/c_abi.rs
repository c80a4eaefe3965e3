//! The C functions of both libraries. Each counts its call, and fails if the machine says so.
#![allow(unsafe_code, non_snake_case)]

mod caller;
mod driver;
mod nccl;

use std::ffi::{c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use crate::device::HostSpan;
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

/// Allocates memory of a device, once a program has initialized the driver; 0 if the device or its memory is missing.
#[unsafe(no_mangle)]
extern "C" fn paceline_fake_cuda_allocate(device: c_int, length: usize) -> u64 {
    let process = Process::here();
    let device = process.device(device);
    let address = device.and_then(|device| process.memory.allocate(&device, length));
    address.unwrap_or(0)
}

/// Frees it.
#[unsafe(no_mangle)]
extern "C" fn paceline_fake_cuda_free(address: u64) {
    // An address that is not allocated is not in use either.
    let _ = Process::here().memory.free(address);
}

/// Copies `length` bytes from the host to an address, or with `is_read` back, at once. Returns 0, or 1 if they are not of one
/// allocation.
#[unsafe(no_mangle)]
extern "C" fn paceline_fake_cuda_copy(
    address: u64,
    host: *mut u8,
    length: usize,
    is_read: c_int,
) -> c_int {
    let span = Process::here().memory.span(address, length);
    let (Some(span), Ok(host)) = (span, HostSpan::new(host.cast(), length)) else {
        return 1;
    };
    match is_read {
        0 => span.write(&host.read()),
        _ => host.write(&span.read()),
    }
    0
}

/// Stops all streams from starting further work, or with 0 lets them continue.
#[unsafe(no_mangle)]
extern "C" fn paceline_fake_cuda_hold(is_held: c_int) {
    Process::here().hold(is_held != 0);
}
