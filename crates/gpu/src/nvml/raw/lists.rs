//! The driver's lists of processes, in whichever form it has them, within bounds.
#![allow(unsafe_code)]

use std::os::raw::c_uint;

use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper_sys::bindings as c;

use crate::nvml::gap::gap;
use crate::snapshot::Gap;

/// Processes that are asked for at first, which is enough nearly always.
const PROCESSES_FEW: usize = 64;

/// Most processes of a device that are looked at.
pub(in crate::nvml) const PROCESSES_MAX: usize = 4096;

/// Memory of a process on a device; `u64::MAX` is the driver's word for "not known".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::nvml) struct Process {
    pub(in crate::nvml) pid: u32,
    pub(in crate::nvml) used_bytes: u64,
}

/// Processes that compute on the device.
pub(in crate::nvml) fn compute_processes(device: &Device<'_>) -> Result<Vec<Process>, Gap> {
    let library = device.nvml().lib();
    processes(
        device,
        library
            .nvmlDeviceGetComputeRunningProcesses_v3
            .as_ref()
            .or(library.nvmlDeviceGetComputeRunningProcesses_v2.as_ref())
            .ok(),
        library.nvmlDeviceGetComputeRunningProcesses.as_ref(),
    )
}

/// Processes that draw on the device.
pub(in crate::nvml) fn graphics_processes(device: &Device<'_>) -> Result<Vec<Process>, Gap> {
    let library = device.nvml().lib();
    processes(
        device,
        library
            .nvmlDeviceGetGraphicsRunningProcesses_v3
            .as_ref()
            .or(library.nvmlDeviceGetGraphicsRunningProcesses_v2.as_ref())
            .ok(),
        library.nvmlDeviceGetGraphicsRunningProcesses.as_ref(),
    )
}

type List<T> = unsafe extern "C" fn(c::nvmlDevice_t, *mut c_uint, *mut T) -> c::nvmlReturn_t;

/// The newest list that the driver has; the first of all had less in each entry.
fn processes<E: std::fmt::Display>(
    device: &Device<'_>,
    newer: Option<&List<c::nvmlProcessInfo_v2_t>>,
    oldest: Result<&List<c::nvmlProcessInfo_v1_t>, &E>,
) -> Result<Vec<Process>, Gap> {
    let Some(newer) = newer else {
        let oldest = oldest.map_err(|_| Gap::NoFunction)?;
        let empty = c::nvmlProcessInfo_v1_t {
            pid: 0,
            usedGpuMemory: 0,
        };
        return listed(device, *oldest, empty, |entry| Process {
            pid: entry.pid,
            used_bytes: entry.usedGpuMemory,
        });
    };
    let empty = c::nvmlProcessInfo_v2_t {
        pid: 0,
        usedGpuMemory: 0,
        gpuInstanceId: 0,
        computeInstanceId: 0,
    };
    listed(device, *newer, empty, |entry| Process {
        pid: entry.pid,
        used_bytes: entry.usedGpuMemory,
    })
}

fn listed<T: Copy>(
    device: &Device<'_>,
    call: List<T>,
    empty: T,
    process: impl Fn(&T) -> Process,
) -> Result<Vec<Process>, Gap> {
    for room in [PROCESSES_FEW, PROCESSES_MAX] {
        let mut entries = vec![empty; room];
        let mut count = room as c_uint;
        // SAFETY: the handle is of this library; `entries` has `count` entries and outlives the call.
        let code = unsafe { call(device.handle(), &mut count, entries.as_mut_ptr()) };
        match nvml_try(code) {
            Ok(()) => {
                let count = usize::try_from(count).map_or(room, |count| count.min(room));
                return Ok(entries[..count].iter().map(process).collect());
            }
            Err(NvmlError::InsufficientSize(_)) => {}
            Err(error) => return Err(gap(error)),
        }
    }
    Err(Gap::other(format!("more than {PROCESSES_MAX} processes")))
}
