//! The performance counters: samples are numbers, and two of them in their order give what the device says at the later one.

use nvml_wrapper_sys::bindings::*;

use super::write::put;
use super::*;

/// A sample's handle, which is never looked behind.
pub(super) fn handle(number: usize) -> nvmlGpmSample_t {
    ptr::without_provenance_mut(number)
}

/// Whether the device has counters; an unknown version of the structure is refused, as NVML does.
pub(super) fn support(device: &Device, to: *mut nvmlGpmSupport_t) -> Outcome {
    // SAFETY: the caller gives a structure with its version filled in.
    let version = unsafe { to.as_ref() }
        .ok_or(Code::INVALID_ARGUMENT)?
        .version;
    if version != NVML_GPM_SUPPORT_VERSION {
        return Err(Code::ARGUMENT_VERSION_MISMATCH);
    }
    let support = nvmlGpmSupport_t {
        version,
        isSupportedDevice: device.gpm.is_some().into(),
    };
    put(to, support)
}

/// Fills a sample with the device's counters now.
pub(super) fn fill(
    function: &'static str,
    subject: Subject,
    sample: nvmlGpmSample_t,
) -> nvmlReturn_t {
    answer(function, subject, |state| {
        let Subject::Device(index) = subject else {
            return Err(Code::INVALID_ARGUMENT);
        };
        if state.device(index)?.gpm.is_none() {
            return Err(Code::NOT_SUPPORTED);
        }
        state.gpm.fill(sample.addr(), index)
    })
}

/// Answers each metric by itself: one that is missing fails alone.
pub(super) fn metrics(function: &'static str, request: *mut nvmlGpmMetricsGet_t) -> nvmlReturn_t {
    // SAFETY: the caller lends a structure that it has filled in.
    let Some(request) = (unsafe { request.as_mut() }) else {
        return Code::INVALID_ARGUMENT.0;
    };
    let samples = [request.sample1.addr(), request.sample2.addr()];
    // No handle says which device is meant, but errors may be meant for one alone.
    let device = State::lock().gpm.device_between(samples);
    let subject = device.map_or(Subject::Stranger, Subject::Device);
    answer(function, subject, |state| {
        if request.version != NVML_GPM_METRICS_GET_VERSION {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        let count = request.numMetrics as usize;
        let asked = request.metrics.get_mut(..count);
        let asked = asked.ok_or(Code::INVALID_ARGUMENT)?;
        let device = state.device(device.ok_or(Code::INVALID_ARGUMENT)?)?;
        let known = device.gpm.as_ref().ok_or(Code::NOT_SUPPORTED)?;
        for metric in asked {
            let found = known.get(&metric.metricId);
            let found = found.ok_or(Code::NOT_SUPPORTED);
            let found = found.and_then(|answer| answer.at(state.tick()).copied());
            metric.nvmlReturn = found.map_or_else(|code| code.0, |_| Code::SUCCESS.0);
            metric.value = found.unwrap_or(0.0);
        }
        Ok(())
    })
}
