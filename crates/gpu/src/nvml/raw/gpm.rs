//! The device's performance counters (GPM, "GPU performance monitoring"): two samples of them, and what happened in between.
//!
//! Devices have them from Hopper on, drivers from 525 on. The wrapper's sample ends the program where the driver cannot free it.
#![allow(unsafe_code)]

use std::cell::OnceCell;
use std::os::raw::c_uint;
use std::{mem, ptr};

use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as c;

use super::Library;
use crate::nvml::gap::gap;
use crate::snapshot::Gap;

/// A share that the driver computes may lie a little above the whole.
const PERCENT_MAX: f64 = 101.0;

/// A share of the time between two samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::nvml) enum Metric {
    SmActive,
    SmOccupancy,
    TensorActive,
    DramActive,
}

impl Metric {
    pub(in crate::nvml) const ALL: [Self; 4] = [
        Self::SmActive,
        Self::SmOccupancy,
        Self::TensorActive,
        Self::DramActive,
    ];

    fn id(self) -> c::nvmlGpmMetricId_t {
        match self {
            Self::SmActive => c::nvmlGpmMetricId_t_NVML_GPM_METRIC_SM_UTIL,
            Self::SmOccupancy => c::nvmlGpmMetricId_t_NVML_GPM_METRIC_SM_OCCUPANCY,
            Self::TensorActive => c::nvmlGpmMetricId_t_NVML_GPM_METRIC_ANY_TENSOR_UTIL,
            Self::DramActive => c::nvmlGpmMetricId_t_NVML_GPM_METRIC_DRAM_BW_UTIL,
        }
    }
}

/// Which of a device's two samples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::nvml) enum Place {
    #[default]
    First,
    Second,
}

impl Place {
    pub(in crate::nvml) fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }
}

/// Memory of the driver for two samples of one device, which stays until the library is closed.
#[derive(Debug)]
pub(super) struct Samples([c::nvmlGpmSample_t; 2]);

// SAFETY: a sample is a number to everyone but the library, and the library may be called from any thread.
unsafe impl Send for Samples {}

impl Samples {
    fn allocate(nvml: &Nvml) -> Result<Self, NvmlError> {
        let call = nvml_sym(nvml.lib().nvmlGpmSampleAlloc.as_ref())?;
        let free = nvml_sym(nvml.lib().nvmlGpmSampleFree.as_ref())?;
        let mut pair = [ptr::null_mut(); 2];
        // SAFETY: the places outlive the calls.
        nvml_try(unsafe { call(&mut pair[0]) })?;
        if let Err(error) = nvml_try(unsafe { call(&mut pair[1]) }) {
            // SAFETY: the driver has just allocated it, and nobody else has it.
            let _ = unsafe { free(pair[0]) };
            return Err(error);
        }
        Ok(Self(pair))
    }

    /// Called once, when nobody uses them any more.
    pub(super) fn free(&self, nvml: &Nvml) {
        let Ok(free) = &nvml.lib().nvmlGpmSampleFree else {
            return;
        };
        for sample in self.0 {
            // SAFETY: it was allocated by this library. What the driver answers changes nothing: the program is done with it.
            let _ = unsafe { free(sample) };
        }
    }

    fn at(&self, place: Place) -> c::nvmlGpmSample_t {
        match place {
            Place::First => self.0[0],
            Place::Second => self.0[1],
        }
    }
}

impl Library {
    /// Whether the device has counters.
    pub(in crate::nvml) fn has_counters(&self, device: &Device<'_>) -> Result<bool, Gap> {
        let call = nvml_sym(self.nvml.lib().nvmlGpmQueryDeviceSupport.as_ref()).map_err(gap)?;
        let mut support = c::nvmlGpmSupport_t {
            version: c::NVML_GPM_SUPPORT_VERSION,
            isSupportedDevice: 0,
        };
        // SAFETY: the handle is of this library; `support` outlives the call.
        nvml_try(unsafe { call(device.handle(), &mut support) }).map_err(gap)?;
        Ok(support.isSupportedDevice != 0)
    }

    /// Reads the counters of the device with this number into one of its samples.
    pub(in crate::nvml) fn read_counters(
        &self,
        device: &Device<'_>,
        index: u32,
        place: Place,
    ) -> Result<(), Gap> {
        let call = nvml_sym(self.nvml.lib().nvmlGpmSampleGet.as_ref()).map_err(gap)?;
        let sample = self.samples(index)?.at(place);
        // SAFETY: handle and sample are of this library.
        nvml_try(unsafe { call(device.handle(), sample) }).map_err(gap)
    }

    /// What happened on the device from the reading before the one at `later` to that one, in percent.
    pub(in crate::nvml) fn between_counters<const N: usize>(
        &self,
        index: u32,
        later: Place,
        metrics: [Metric; N],
    ) -> Result<[Result<f64, Gap>; N], Gap> {
        let call = nvml_sym(self.nvml.lib().nvmlGpmMetricsGet.as_ref()).map_err(gap)?;
        let samples = self.samples(index)?;
        // SAFETY: the structure is plain numbers and pointers, for which zero is a value.
        let mut request: Box<c::nvmlGpmMetricsGet_t> = Box::new(unsafe { mem::zeroed() });
        request.version = c::NVML_GPM_METRICS_GET_VERSION;
        request.numMetrics = N as c_uint;
        request.sample1 = samples.at(later.other());
        request.sample2 = samples.at(later);
        for (place, metric) in request.metrics.iter_mut().zip(metrics) {
            place.metricId = metric.id();
            // A driver that overlooks a metric has not answered it.
            place.nvmlReturn = c::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED;
        }
        // SAFETY: the samples are of this library; `request` has room for more than `N` metrics and outlives the call.
        nvml_try(unsafe { call(&mut *request) }).map_err(gap)?;
        let mut answers = request.metrics.iter().map(|metric| {
            nvml_try(metric.nvmlReturn).map_err(gap)?;
            percent(metric.value)
        });
        Ok(metrics.map(|_| answers.next().unwrap_or(Err(Gap::NotRead))))
    }

    fn samples(&self, index: u32) -> Result<&Samples, Gap> {
        let cell = usize::try_from(index)
            .ok()
            .and_then(|at| self.samples.get(at));
        let cell: &OnceCell<Samples> =
            cell.ok_or_else(|| Gap::other(format!("there is no device {index}")))?;
        if let Some(samples) = cell.get() {
            return Ok(samples);
        }
        let samples = Samples::allocate(&self.nvml).map_err(gap)?;
        // Nothing can have come in between: the cell belongs to this thread.
        Ok(cell.get_or_init(|| samples))
    }
}

/// Two places behind the point are more than the counters are worth.
fn percent(value: f64) -> Result<f64, Gap> {
    if !(0.0..=PERCENT_MAX).contains(&value) {
        return Err(Gap::other(format!("the driver says {value} percent")));
    }
    Ok((value * 100.0).round().min(10_000.0) / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_that_is_none_is_not_believed() {
        assert_eq!(percent(41.237), Ok(41.24));
        assert_eq!(percent(100.004), Ok(100.0));
        for odd in [-1.0, 101.5, f64::NAN, f64::INFINITY] {
            assert!(matches!(percent(odd), Err(Gap::Other(_))), "{odd}");
        }
    }
}
