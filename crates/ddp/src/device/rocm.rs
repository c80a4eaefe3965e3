//! AMD's GPUs: checks the run-time requirements of Burn's ROCm back end before it starts.

use burn::tensor::{Device, DeviceType};

use super::error::DeviceError;
use super::{DeviceKind, Survey};

/// The GPUs that the driver exposes to this process.
pub(super) fn survey() -> Result<Survey, DeviceError> {
    let kind = DeviceKind::Rocm;
    // Checks both libraries, because the second compiles kernels; without them a device query would return none.
    if !cubecl_hip_sys::is_available() {
        return Err(DeviceError::NoLibrary {
            kind,
            library: "libamdhip64.so and libhiprtc.so",
            reason: "one of them cannot be loaded".into(),
        });
    }
    match Device::enumerate(DeviceType::Rocm).len() {
        0 => Err(DeviceError::NoDevice {
            kind,
            reason: "the driver amdgpu is not loaded, HIP_VISIBLE_DEVICES hides its GPUs, or this user may not open /dev/kfd"
                .into(),
        }),
        count => Ok(Survey {
            kind,
            count,
            software: None,
        }),
    }
}
