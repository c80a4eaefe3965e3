//! What several functions have in common: the answer is found for a device or a pair, and written.

use nvml_wrapper_sys::bindings::*;

use super::write::{put, put_list};
use super::*;
use crate::model::Process;

/// Writes the processes of a device.
pub(super) fn processes<T: Copy>(
    function: &'static str,
    asked: nvmlDevice_t,
    count: *mut c_uint,
    list: *mut T,
    field: fn(&Device) -> &Answer<Vec<Process>>,
    make: fn(&Process) -> T,
) -> nvmlReturn_t {
    let subject = subject(asked);
    answer(function, subject, |state| {
        let Subject::Device(index) = subject else {
            return Err(Code::INVALID_ARGUMENT);
        };
        let device = state.device(index)?;
        let mut all = field(device).at(state.tick())?.clone();
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
        let all: Vec<T> = all.iter().map(make).collect();
        put_list(&all, told, count, list)
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
        gpuInstanceId: u32::MAX,
        computeInstanceId: u32::MAX,
    }
}

/// Memory of a device: total, reserved, used, in bytes.
pub(super) fn memory(
    function: &'static str,
    device: nvmlDevice_t,
    tell: impl FnOnce(u64, u64, u64) -> Outcome,
) -> nvmlReturn_t {
    of_device(function, device, |device, tick| {
        let memory = device.memory.at(tick)?;
        let mib = [memory.total_mib, memory.reserved_mib, memory.used_mib];
        let [total, reserved, used] = mib.map(|mib| mib.saturating_mul(1 << 20));
        tell(total, reserved, used)
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

/// Pages retired for one cause: how many, and where they lie.
pub(super) fn retired_pages(
    device: &Device,
    tick: u64,
    cause: nvmlPageRetirementCause_t,
    (count, addresses): (*mut c_uint, *mut c_ulonglong),
) -> Outcome {
    let pages = device.retired_pages.at(tick)?;
    let pages = *pages.get(cause as usize).ok_or(Code::INVALID_ARGUMENT)?;
    if pages > PAGES_MAX {
        put(count, pages)?;
        return Err(Code::INSUFFICIENT_SIZE);
    }
    let pages: Vec<u64> = (1..=u64::from(pages)).map(|page| page << 16).collect();
    put_list(&pages, None, count, addresses)
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
