//! NVML's functions in C, as nvml-wrapper calls them: each finds its device, asks it, and writes the answer where it is told to.
#![allow(unsafe_code, non_snake_case)]

mod gpm;
mod tell;
mod write;

use std::ffi::{c_char, c_int, c_longlong, c_uint, c_ulong, c_ulonglong};
use std::path::PathBuf;
use std::ptr;

use nvml_wrapper_sys::bindings::*;

use self::write::{put, put_pci, put_text};
use crate::model::{Answer, Code, Device, level, p2p_status};
use crate::state::{State, Subject};

type Outcome = Result<(), Code>;

/// Counts the call, then answers it unless it is to fail.
fn answer(
    function: &'static str,
    subject: Subject,
    tell: impl FnOnce(&mut State) -> Outcome,
) -> nvmlReturn_t {
    let mut state = State::lock();
    let outcome = state
        .enter(function, subject)
        .and_then(|()| tell(&mut state));
    outcome.map_or_else(|code| code.0, |()| Code::SUCCESS.0)
}

/// Answers about a device; a MIG instance is no device to most functions.
fn of_device(
    function: &'static str,
    handle: nvmlDevice_t,
    tell: impl FnOnce(&Device, u64) -> Outcome,
) -> nvmlReturn_t {
    let subject = subject(handle);
    answer(function, subject, |state| match subject {
        Subject::Device(index) => tell(state.device(index)?, state.tick()),
        _ => Err(Code::INVALID_ARGUMENT),
    })
}

/// Handles are never looked behind: they are numbers. Bits 0 to 15 are the device counted from 1, those above the MIG instance
/// counted from 1.
fn handle(device: u32, mig: Option<u32>) -> nvmlDevice_t {
    let mig = mig.map_or(0, |mig| mig as usize + 1);
    ptr::without_provenance_mut((mig << 16) | (device as usize + 1))
}

fn subject(handle: nvmlDevice_t) -> Subject {
    let number = handle.addr();
    let part = |bits: usize| u32::try_from(bits).ok()?.checked_sub(1);
    match (part(number & 0xffff), part(number >> 16)) {
        (Some(device), None) if number >> 16 == 0 => Subject::Device(device),
        (Some(device), Some(mig)) => Subject::Mig(device, mig),
        _ => Subject::Stranger,
    }
}

/// Where this copy of the library lies.
fn library() -> Option<PathBuf> {
    paceline_fake_library::file_of(paceline_fake_nvml_calls)
}

/// Replaces the machine by another, and forgets what was called. Returns 0, or 1 where it is none.
#[unsafe(no_mangle)]
extern "C" fn paceline_fake_nvml_load(json: *const u8, length: usize) -> c_int {
    // SAFETY: the caller lends `length` bytes.
    unsafe { paceline_fake_library::load(json, length, |json| State::lock().load(json)) }
}

/// How often a function was called since the machine was loaded.
#[unsafe(no_mangle)]
extern "C" fn paceline_fake_nvml_calls(function: *const c_char) -> u64 {
    // SAFETY: the caller gives a string that ends.
    unsafe { paceline_fake_library::calls(function, |name| State::lock().calls(name)) }
}

/// Functions with the names and types of the bindings. `numbers` and `settings` write one field of a device,
/// `settings_now_and_then` a setting now and after a reset, `processes` a list; `machine` and `devices` answer with an
/// expression, and the bodies of `others` get the function's name.
macro_rules! exported {
    (
        numbers { $($number:ident: $number_type:ty = $number_field:ident;)* }
        settings { $($setting:ident: $setting_type:ty = $setting_field:ident;)* }
        settings_now_and_then { $($pair:ident: $pair_type:ty = $pair_field:ident;)* }
        processes { $($list:ident: $list_type:ty = $list_field:ident, $one:ident;)* }
        machine { $(fn $machine:ident($($told:ident: $told_type:ty),* $(,)?) = |$state:ident| $tell:expr;)* }
        devices { $(fn $asked:ident($($to:ident: $to_type:ty),* $(,)?) = |$device:ident, $tick:ident| $answer:expr;)* }
        others { $(fn $function:ident($($argument:ident: $type:ty),*) = |$name:ident| $body:expr;)* }
    ) => {
        exported_functions! {
            $(fn $number(device: nvmlDevice_t, to: *mut $number_type) = |name| {
                of_device(name, device, |device, tick| put(to, *device.$number_field.at(tick)?))
            };)*
            $(fn $setting(device: nvmlDevice_t, to: *mut $setting_type) = |name| {
                of_device(name, device, |device, tick| put(to, device.$setting_field.at(tick)?.0))
            };)*
            $(fn $pair(device: nvmlDevice_t, now: *mut $pair_type, then: *mut $pair_type) = |name| {
                of_device(name, device, |device, tick| {
                    let (first, second) = device.$pair_field.at(tick)?;
                    put(now, first.0)?;
                    put(then, second.0)
                })
            };)*
            $(fn $list(device: nvmlDevice_t, count: *mut c_uint, list: *mut $list_type) = |name| {
                processes(name, device, count, list, |device| &device.$list_field, $one)
            };)*
            $(fn $machine($($told: $told_type),*) = |name| of_machine(name, |$state| $tell);)*
            $(fn $asked(device: nvmlDevice_t $(, $to: $to_type)*) = |name| of_device(name, device, |$device, $tick| $answer);)*
            $(fn $function($($argument: $type),*) = |$name| $body;)*
        }
    };
}

macro_rules! exported_functions {
    ($(fn $function:ident($($argument:ident: $type:ty),*) = |$name:ident| $body:expr;)*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $function($($argument: $type),*) -> nvmlReturn_t {
                let $name = stringify!($function);
                $body
            }
        )*

        /// The functions that the fake library has, apart from `nvmlErrorString`.
        pub const FUNCTIONS: &[&str] = &[$(stringify!($function)),*];

        /// Never called: it compiles as long as every function has the type that the bindings call it with.
        #[cfg(test)]
        #[expect(dead_code, reason = "checked by the compiler")]
        fn types_agree(library: &mut NvmlLib) {
            $(library.$function = Ok($function);)*
        }
    };
}

/// A few of the codes in words; static strings, as NVML's.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: nvmlReturn_t) -> *const c_char {
    let text = match result {
        0 => c"The operation was successful",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        15 => c"GPU is lost",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

fn start(function: &'static str) -> nvmlReturn_t {
    answer(function, Subject::Machine, |state| {
        state.initialize(library().as_deref())?;
        // The file that says whether this fails was read just now.
        match state
            .machine()?
            .failure(function, None, state.calls(function).saturating_sub(1))
        {
            Some(code) => state.shut_down().and(Err(code)),
            None => Ok(()),
        }
    })
}

/// Answers about the machine once the library is initialized.
fn of_machine(function: &'static str, tell: impl FnOnce(&mut State) -> Outcome) -> nvmlReturn_t {
    answer(function, Subject::Machine, |state| {
        if !state.is_initialized() {
            return Err(Code::UNINITIALIZED);
        }
        tell(state)
    })
}

mod functions;

pub use self::functions::FUNCTIONS;
