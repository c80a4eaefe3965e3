//! NVML's functions in C, as nvml-wrapper calls them: each finds its device, asks it, and writes the answer where it is told to.
#![allow(unsafe_code, non_snake_case)]

mod write;

use std::ffi::{CStr, c_char, c_int, c_longlong, c_uint, c_ulong, c_ulonglong};
use std::path::PathBuf;
use std::ptr;

use nvml_wrapper_sys::bindings::*;

use self::write::{bits, put, put_pci, put_processes, put_text};
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
    use std::os::unix::ffi::OsStrExt;
    let own: extern "C" fn(*const c_char) -> u64 = paceline_fake_nvml_calls;
    // SAFETY: every bit pattern is a `Dl_info`: numbers and pointers.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the address is that of a function here, and `info` may be written to.
    if unsafe { libc::dladdr(own as *const _, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr says that this is a string that lives as long as the library.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(std::ffi::OsStr::from_bytes(name.to_bytes()).into())
}

/// Replaces the machine by another, and forgets what was called. Returns 0, or 1 where it is none.
#[unsafe(no_mangle)]
extern "C" fn paceline_fake_nvml_load(json: *const u8, length: usize) -> c_int {
    if json.is_null() {
        return 1;
    }
    // SAFETY: the caller lends `length` bytes.
    let json = unsafe { std::slice::from_raw_parts(json, length) };
    match State::lock().load(json) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("fake nvml: {error}");
            1
        }
    }
}

/// How often a function was called since the machine was loaded.
#[unsafe(no_mangle)]
extern "C" fn paceline_fake_nvml_calls(function: *const c_char) -> u64 {
    if function.is_null() {
        return 0;
    }
    // SAFETY: the caller gives a string that ends.
    let function = unsafe { CStr::from_ptr(function) };
    State::lock().calls(&function.to_string_lossy())
}

/// Functions with the names and types that the bindings have; `name` is the function's own name in its body.
macro_rules! exported {
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

/// A function that writes one number of a device.
macro_rules! number {
    ($name:ident, $device:ident, $to:ident, $field:ident) => {
        of_device($name, $device, |device, tick| {
            put($to, *device.$field.at(tick)?)
        })
    };
}

/// A function that writes one setting of a device.
macro_rules! setting {
    ($name:ident, $device:ident, $to:ident, $field:ident) => {
        of_device($name, $device, |device, tick| {
            put($to, device.$field.at(tick)?.0)
        })
    };
}

/// A function that writes a setting now and after a reset.
macro_rules! settings {
    ($name:ident, $device:ident, $now:ident, $then:ident, $field:ident) => {
        of_device($name, $device, |device, tick| {
            let (now, then) = device.$field.at(tick)?;
            put($now, now.0)?;
            put($then, then.0)
        })
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

/// Finds a device by one of its texts.
fn find(
    function: &'static str,
    text: *const c_char,
    to: *mut nvmlDevice_t,
    is_it: fn(&Device, &str, u64) -> bool,
) -> nvmlReturn_t {
    of_machine(function, |state| {
        if text.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        // SAFETY: the caller gives a string that ends.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        let mut devices = (0..).zip(state.devices());
        let found = devices.find(|(_, device)| is_it(device, &text, state.tick()));
        let (index, device) = found.ok_or(Code::NOT_FOUND)?;
        device
            .lost
            .map_or_else(|| put(to, handle(index, None)), Err)
    })
}

/// Writes the processes of a device or of a MIG instance.
fn processes<T>(
    function: &'static str,
    asked: nvmlDevice_t,
    count: *mut c_uint,
    list: *mut T,
    field: fn(&Device) -> &Answer<Vec<crate::model::Process>>,
    make: fn(&crate::model::Process) -> T,
) -> nvmlReturn_t {
    let subject = subject(asked);
    answer(function, subject, |state| {
        let tick = state.tick();
        let (index, mut all) = match subject {
            Subject::Device(index) => (index, field(state.device(index)?).at(tick)?.clone()),
            Subject::Mig(index, mig) => (index, state.mig(index, mig)?.compute.at(tick)?.clone()),
            _ => return Err(Code::INVALID_ARGUMENT),
        };
        let device = state.device(index)?;
        let (grows, told) = (device.processes_grow, device.process_count);
        for grown in 0..state.grown {
            let process = all.first().cloned();
            all.extend(process.map(|first| crate::model::Process {
                pid: first.pid.wrapping_add(1 + grown),
                ..first
            }));
        }
        if grows {
            state.grown += 1;
        }
        put_processes(&all, told, count, list, make)
    })
}

fn process_v1(process: &crate::model::Process) -> nvmlProcessInfo_v1_t {
    nvmlProcessInfo_v1_t {
        pid: process.pid,
        usedGpuMemory: process.memory_mib.map_or(u64::MAX, |mib| mib << 20),
    }
}

fn process_v2(process: &crate::model::Process) -> nvmlProcessInfo_v2_t {
    nvmlProcessInfo_v2_t {
        pid: process.pid,
        usedGpuMemory: process.memory_mib.map_or(u64::MAX, |mib| mib << 20),
        gpuInstanceId: process.gpu_instance,
        computeInstanceId: process.compute_instance,
    }
}

/// Memory of a device or of a MIG instance: total, reserved, used, in bytes.
fn memory(
    function: &'static str,
    asked: nvmlDevice_t,
    tell: impl FnOnce(u64, u64, u64) -> Outcome,
) -> nvmlReturn_t {
    let subject = subject(asked);
    answer(function, subject, |state| {
        let memory = match subject {
            Subject::Device(index) => state.device(index)?.memory.at(state.tick())?,
            Subject::Mig(index, mig) => state.mig(index, mig)?.memory.at(state.tick())?,
            _ => return Err(Code::INVALID_ARGUMENT),
        };
        let bytes = |mib: u64| mib.saturating_mul(1 << 20);
        tell(
            bytes(memory.total_mib),
            bytes(memory.reserved_mib),
            bytes(memory.used_mib),
        )
    })
}

/// Writes a text of a device or of a MIG instance.
fn text(
    function: &'static str,
    asked: nvmlDevice_t,
    (to, length): (*mut c_char, c_uint),
    of_device: fn(&Device) -> &Answer<crate::model::Text>,
    of_mig: fn(&crate::model::MigDevice) -> &Answer<crate::model::Text>,
) -> nvmlReturn_t {
    let subject = subject(asked);
    answer(function, subject, |state| {
        let text = match subject {
            Subject::Device(index) => of_device(state.device(index)?),
            Subject::Mig(index, mig) => of_mig(state.mig(index, mig)?),
            _ => return Err(Code::INVALID_ARGUMENT),
        };
        put_text(text.at(state.tick())?, to, length)
    })
}

/// Writes a number of a MIG instance.
fn instance(
    function: &'static str,
    asked: nvmlDevice_t,
    to: *mut c_uint,
    field: fn(&crate::model::MigDevice) -> &Answer<u32>,
) -> nvmlReturn_t {
    let subject = subject(asked);
    answer(function, subject, |state| match subject {
        Subject::Mig(device, mig) => put(to, *field(state.mig(device, mig)?).at(state.tick())?),
        _ => Err(Code::INVALID_ARGUMENT),
    })
}

/// Writes what holds between two devices.
fn between(
    function: &'static str,
    (one, other): (nvmlDevice_t, nvmlDevice_t),
    to: *mut c_uint,
    tell: impl FnOnce(&State, u32, u32) -> Result<u32, Code>,
) -> nvmlReturn_t {
    let from = subject(one);
    answer(function, from, |state| {
        let (Subject::Device(from), Subject::Device(other)) = (from, subject(other)) else {
            return Err(Code::INVALID_ARGUMENT);
        };
        state.device(other)?.lost.map_or(Ok(()), Err)?;
        put(to, tell(state, from, other)?)
    })
}

/// Writes one of four clocks.
fn clock(
    function: &'static str,
    device: nvmlDevice_t,
    kind: nvmlClockType_t,
    to: *mut c_uint,
    field: fn(&Device) -> &Answer<[u32; 4]>,
) -> nvmlReturn_t {
    of_device(function, device, |device, tick| {
        let clocks = field(device).at(tick)?;
        put(
            to,
            *clocks.get(kind as usize).ok_or(Code::INVALID_ARGUMENT)?,
        )
    })
}

/// Corrected or uncorrected memory errors, since the driver was loaded or ever.
fn memory_errors(
    function: &'static str,
    device: nvmlDevice_t,
    kinds: (nvmlMemoryErrorType_t, nvmlEccCounterType_t),
    to: *mut c_ulonglong,
) -> nvmlReturn_t {
    of_device(function, device, |device, tick| {
        let (since, ever) = match kinds.0 {
            0 => device.ecc_corrected.at(tick)?,
            1 => device.ecc_uncorrected.at(tick)?,
            _ => return Err(Code::INVALID_ARGUMENT),
        };
        match kinds.1 {
            0 => put(to, *since),
            1 => put(to, *ever),
            _ => Err(Code::INVALID_ARGUMENT),
        }
    })
}

/// Pages retired for one cause: how many, and where they lie.
fn retired_pages(
    function: &'static str,
    device: nvmlDevice_t,
    cause: nvmlPageRetirementCause_t,
    count: *mut c_uint,
    (addresses, timestamps): (*mut c_ulonglong, *mut c_ulonglong),
) -> nvmlReturn_t {
    of_device(function, device, |device, tick| {
        let pages = device.retired_pages.at(tick)?;
        let pages = [pages.0, pages.1];
        let pages = *pages.get(cause as usize).ok_or(Code::INVALID_ARGUMENT)?;
        if pages > PAGES_MAX {
            put(count, pages)?;
            return Err(Code::INSUFFICIENT_SIZE);
        }
        let pages: Vec<u64> = (1..=u64::from(pages)).map(|page| page << 16).collect();
        if !timestamps.is_null() {
            write::put_list(&vec![1_700_000_000; pages.len()], count, timestamps)?;
        }
        write::put_list(&pages, count, addresses)
    })
}

/// Writes the CPUs or NUMA nodes near a device as one bit each.
fn near(
    function: &'static str,
    device: nvmlDevice_t,
    (to, length): (*mut c_ulong, c_uint),
    tell: fn(&Device, u64) -> Result<Vec<usize>, Code>,
) -> nvmlReturn_t {
    of_device(function, device, |device, tick| {
        bits(&tell(device, tick)?, to, length)
    })
}

fn cpus(device: &Device, tick: u64) -> Result<Vec<usize>, Code> {
    Ok(device.cpus.at(tick)?.0.clone())
}

fn node(device: &Device, tick: u64) -> Result<Vec<usize>, Code> {
    Ok(vec![*device.numa_node.at(tick)? as usize])
}

/// Answers each field by itself: one that is missing fails alone.
fn fields(device: &Device, tick: u64, count: c_int, values: *mut nvmlFieldValue_t) -> Outcome {
    let count = usize::try_from(count).map_err(|_| Code::INVALID_ARGUMENT)?;
    if values.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: the caller lends `count` values that it has filled in.
    let values = unsafe { std::slice::from_raw_parts_mut(values, count) };
    for value in values {
        let found = device.field(value.fieldId, value.scopeId, tick);
        value.timestamp = TIMESTAMP_US + tick as c_longlong * TICK_US;
        value.nvmlReturn = found.map_or_else(|code| code.0, |_| Code::SUCCESS.0);
        let found = found.unwrap_or(0);
        (value.valueType, value.value) = match (value.fieldId, u32::try_from(found)) {
            (84..=91 | 132..=137 | 146 | 164..=166, Ok(number)) => (
                nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT,
                nvmlValue_t { uiVal: number },
            ),
            _ => (
                nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG,
                nvmlValue_t { ullVal: found },
            ),
        };
    }
    Ok(())
}

/// More retired pages than this are told and never listed.
const PAGES_MAX: u32 = 1024;

/// Time of the first tick, in microseconds since 1970; field values carry the time of their tick.
const TIMESTAMP_US: c_longlong = 1_700_000_000_000_000;

/// Time between two ticks in the time stamps of field values.
const TICK_US: c_longlong = 100_000;

mod functions;

pub use self::functions::FUNCTIONS;
