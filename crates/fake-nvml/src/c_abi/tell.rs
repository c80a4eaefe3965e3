//! What several functions have in common: the answer is found for a device, a MIG instance or a pair, and written.

use std::ffi::CStr;

use nvml_wrapper_sys::bindings::*;

use super::write::{self, bits, put, put_processes, put_text};
use super::*;
use crate::model::{MigDevice, Process, Text};

/// Finds a device by one of its texts.
pub(super) fn find(
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
pub(super) fn processes<T>(
    function: &'static str,
    asked: nvmlDevice_t,
    count: *mut c_uint,
    list: *mut T,
    field: fn(&Device) -> &Answer<Vec<Process>>,
    make: fn(&Process) -> T,
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
            all.extend(process.map(|first| Process {
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

pub(super) fn process_v1(process: &Process) -> nvmlProcessInfo_v1_t {
    nvmlProcessInfo_v1_t {
        pid: process.pid,
        usedGpuMemory: process.memory_mib.map_or(u64::MAX, |mib| mib << 20),
    }
}

pub(super) fn process_v2(process: &Process) -> nvmlProcessInfo_v2_t {
    nvmlProcessInfo_v2_t {
        pid: process.pid,
        usedGpuMemory: process.memory_mib.map_or(u64::MAX, |mib| mib << 20),
        gpuInstanceId: process.gpu_instance,
        computeInstanceId: process.compute_instance,
    }
}

/// Memory of a device or of a MIG instance: total, reserved, used, in bytes.
pub(super) fn memory(
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
pub(super) fn text(
    function: &'static str,
    asked: nvmlDevice_t,
    (to, length): (*mut c_char, c_uint),
    of_device: fn(&Device) -> &Answer<Text>,
    of_mig: fn(&MigDevice) -> &Answer<Text>,
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
pub(super) fn instance(
    function: &'static str,
    asked: nvmlDevice_t,
    to: *mut c_uint,
    field: fn(&MigDevice) -> &Answer<u32>,
) -> nvmlReturn_t {
    let subject = subject(asked);
    answer(function, subject, |state| match subject {
        Subject::Mig(device, mig) => put(to, *field(state.mig(device, mig)?).at(state.tick())?),
        _ => Err(Code::INVALID_ARGUMENT),
    })
}

/// Writes what holds between two devices.
pub(super) fn between(
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
pub(super) fn clock(
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
pub(super) fn memory_errors(
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
pub(super) fn retired_pages(
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
pub(super) fn near(
    function: &'static str,
    device: nvmlDevice_t,
    (to, length): (*mut c_ulong, c_uint),
    tell: fn(&Device, u64) -> Result<Vec<usize>, Code>,
) -> nvmlReturn_t {
    of_device(function, device, |device, tick| {
        bits(&tell(device, tick)?, to, length)
    })
}

pub(super) fn cpus(device: &Device, tick: u64) -> Result<Vec<usize>, Code> {
    Ok(device.cpus.at(tick)?.0.clone())
}

pub(super) fn node(device: &Device, tick: u64) -> Result<Vec<usize>, Code> {
    Ok(vec![*device.numa_node.at(tick)? as usize])
}

/// Answers each field by itself: one that is missing fails alone.
pub(super) fn fields(
    device: &Device,
    tick: u64,
    count: c_int,
    values: *mut nvmlFieldValue_t,
) -> Outcome {
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
