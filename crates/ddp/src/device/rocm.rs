//! AMD's GPUs: what Burn's ROCm back end needs at run time, looked at before it is started.

use burn::tensor::{Device, DeviceType};

use super::error::DeviceError;
use super::{DeviceKind, Survey};

/// The GPUs that the driver leaves to this process.
pub(super) fn survey() -> Result<Survey, DeviceError> {
    let kind = DeviceKind::Rocm;
    // Of both libraries, because it compiles kernels with the second; asking for devices without them would give none.
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
            reason: "the driver amdgpu does not run, HIP_VISIBLE_DEVICES hides its GPUs, or this user may not open /dev/kfd"
                .into(),
        }),
        count => Ok(Survey {
            kind,
            count,
            software: None,
        }),
    }
}
