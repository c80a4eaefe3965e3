//! The kind of device to use, and a rank's device among several: pure functions.

use super::error::DeviceError;
use super::kind::DeviceKind;
use super::{GPUS_VARIABLE, KIND_VARIABLE, Survey};

/// The kinds of GPUs, vendor back ends before the generic one.
const GPUS: [DeviceKind; 4] = [
    DeviceKind::Cuda,
    DeviceKind::Rocm,
    DeviceKind::Metal,
    DeviceKind::Vulkan,
];

/// A build without any kind of GPU reports the error of this kind.
const USUAL: DeviceKind = if cfg!(target_os = "macos") {
    DeviceKind::Metal
} else {
    DeviceKind::Cuda
};

/// The best kind of GPU, see [`super::auto`].
pub(super) fn best(survey: &dyn Fn(DeviceKind) -> Result<Survey, DeviceError>) -> DeviceKind {
    let mut built = None;
    for kind in GPUS {
        match survey(kind) {
            // A faulty GPU is reported, not passed over.
            Ok(found) if found.software.is_none() => return kind,
            Err(error) if !error.is_absence() => return kind,
            Err(DeviceError::NotBuilt { .. } | DeviceError::NotMacOs) => {}
            Ok(_) | Err(_) => built = built.or(Some(kind)),
        }
    }
    built.unwrap_or(USUAL)
}

/// The kind named in the environment, if any.
pub(super) fn asked(
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<Option<DeviceKind>, DeviceError> {
    match variable(KIND_VARIABLE).as_deref() {
        None | Some("" | "auto") => Ok(None),
        Some(text) => text.parse().map(Some),
    }
}

/// Whether the environment asks for GPUs of any kind.
pub(super) fn wants_gpu(variable: &dyn Fn(&str) -> Option<String>) -> bool {
    variable(GPUS_VARIABLE).is_some_and(|text| text.parse().is_ok_and(|gpus: u64| gpus > 0))
}

/// The device of a rank: the device with its number, or the only device.
pub(super) fn place(local_rank: usize, count: usize) -> Option<usize> {
    match count {
        1 => Some(0),
        count => (local_rank < count).then_some(local_rank),
    }
}
