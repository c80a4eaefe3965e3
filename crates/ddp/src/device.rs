//! Devices: the kinds available in this build and on this machine, each rank's device, and opening it.
//!
//! All requirements of a kind are checked before Burn opens a device, because Burn's back ends panic if a driver or a library
//! is missing, some only at the first kernel.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let group = paceline_collective::ProcessGroup::init(&Default::default())?;
//! let device = paceline_ddp::device::of_rank(&group)?.autodiff(); // PACELINE_DEVICE=cuda|cpu|...
//! # Ok(())
//! # }
//! ```

#[cfg(any(feature = "vulkan", feature = "metal", test))]
mod adapters;
#[cfg(any(feature = "cuda", test))]
mod cuda;
mod error;
#[cfg(any(feature = "vulkan", feature = "metal"))]
mod graphics;
mod kind;
mod pick;
#[cfg(feature = "rocm")]
mod rocm;
#[cfg(any(feature = "cube", test))]
mod watched;

use burn::tensor::Device;
use paceline_collective::ProcessGroup;
use paceline_rendezvous::page;

pub use error::DeviceError;
pub use kind::DeviceKind;

/// The variable that names the kind of device that [`of_rank`] opens.
pub const KIND_VARIABLE: &str = "PACELINE_DEVICE";
/// The variable that makes `auto` use GPUs: their number, one rank each.
pub const GPUS_VARIABLE: &str = "PACELINE_USE_GPU";

/// The devices of a kind that this process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Their kind.
    pub kind: DeviceKind,
    /// How many there are, at least one.
    pub count: usize,
    /// The adapter's name, if it is a software adapter and the only one.
    pub software: Option<String>,
}

impl Survey {
    /// A warning to show before training on these devices.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        let name = self.software.as_ref()?;
        Some(format!(
            "{} has no GPU here, only {name}, which computes on the processor: fine for a trial, but slow",
            self.kind
        ))
    }
}

/// Looks for the devices of a kind and everything that they need to compute.
///
/// Asks the driver without opening a device or taking its memory.
///
/// *Cost*: tenths of a second for a GPU, to load its driver.
/// *Blocks*: until the driver has answered, at most a minute.
/// *Errors*: all but `UnknownKind`, `NoDeviceForRank` and `NoSuchDevice`.
pub fn survey(kind: DeviceKind) -> Result<Survey, DeviceError> {
    if kind == DeviceKind::Metal && !cfg!(target_os = "macos") {
        return Err(DeviceError::NotMacOs);
    }
    match kind {
        DeviceKind::Cpu => Ok(Survey {
            kind,
            count: 1,
            software: None,
        }),
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda => watched::asked(kind, cuda::survey),
        #[cfg(feature = "vulkan")]
        DeviceKind::Vulkan => watched::asked(kind, move || graphics::survey(kind)),
        #[cfg(feature = "metal")]
        DeviceKind::Metal => watched::asked(kind, move || graphics::survey(kind)),
        #[cfg(feature = "rocm")]
        DeviceKind::Rocm => watched::asked(kind, rocm::survey),
        #[allow(
            unreachable_patterns,
            reason = "reached unless every feature is turned on"
        )]
        _ => Err(DeviceError::NotBuilt { kind }),
    }
}

/// Checks before ranks start that `ranks` ranks on this machine get a device each, or share the only one.
///
/// *Errors*: `NoDeviceForRank`.
pub fn check_ranks(found: &Survey, ranks: usize) -> Result<(), DeviceError> {
    let last = ranks.saturating_sub(1);
    match pick::place(last, found.count) {
        Some(_) => Ok(()),
        None => Err(DeviceError::NoDeviceForRank {
            kind: found.kind,
            // The first rank without a device.
            local_rank: found.count,
            count: found.count,
        }),
    }
}

/// Number of devices of a kind that this process may use, at least one; always one CPU.
///
/// *Errors*: as [`survey`].
pub fn count(kind: DeviceKind) -> Result<usize, DeviceError> {
    survey(kind).map(|survey| survey.count)
}

/// Opens the device with number `index` among the devices of its kind that this process may use. The CPU has no number.
///
/// CUDA and ROCm count the devices that `CUDA_VISIBLE_DEVICES` and `HIP_VISIBLE_DEVICES` expose. Vulkan and Metal count the
/// adapters of the best class present: discrete GPUs, else integrated, else virtual, else software.
///
/// *Cost*: seconds the first time in a process, while the driver sets up the device.
/// *Blocks*: until the driver has answered, at most a minute.
/// *Errors*: as [`survey`], and `NoSuchDevice`.
pub fn open(kind: DeviceKind, index: usize) -> Result<Device, DeviceError> {
    if kind == DeviceKind::Cpu {
        return Ok(Device::flex());
    }
    let survey = survey(kind)?;
    if index >= survey.count {
        return Err(DeviceError::NoSuchDevice {
            kind,
            index,
            count: survey.count,
        });
    }
    if let Some(warning) = survey.warning() {
        paceline_rendezvous::notice!(WARN, "{warning}");
    }
    match kind {
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda => watched::asked(kind, move || Ok(set_up(Device::cuda(index)))),
        #[cfg(feature = "vulkan")]
        DeviceKind::Vulkan => watched::asked(kind, move || graphics::open(kind, index)),
        #[cfg(feature = "metal")]
        DeviceKind::Metal => watched::asked(kind, move || graphics::open(kind, index)),
        #[cfg(feature = "rocm")]
        DeviceKind::Rocm => watched::asked(kind, move || Ok(set_up(Device::rocm(index)))),
        _ => Err(DeviceError::NotBuilt { kind }),
    }
}

/// Opens the device for a local rank: the device with the same number, or the only device.
///
/// If the launcher exposes one device to each process, that device has number 0 in every process.
///
/// *Errors*: as [`open`], and `NoDeviceForRank` if there are several devices but none for this rank.
pub fn open_for_rank(kind: DeviceKind, local_rank: usize) -> Result<Device, DeviceError> {
    let count = count(kind)?;
    let index = pick::place(local_rank, count).ok_or(DeviceError::NoDeviceForRank {
        kind,
        local_rank,
        count,
    })?;
    open(kind, index)
}

/// Opens the device of this rank, for a program with its own training loop.
///
/// `PACELINE_DEVICE` names the kind: `cpu`, `cuda`, `vulkan`, `metal` or `rocm`. Unset or `auto`, it is the CPU, or with
/// `PACELINE_USE_GPU` above 0 the best kind of GPU, as in `paceline train`.
///
/// *Errors*: as [`open_for_rank`], and `UnknownKind`.
pub fn of_rank(group: &ProcessGroup) -> Result<Device, DeviceError> {
    let variable = |name: &str| Some(std::env::var_os(name)?.to_string_lossy().into_owned());
    let asked = pick::asked(&variable);
    page::tell_misconfigured(asked.is_err());
    let kind = match asked? {
        Some(kind) => kind,
        None => auto(pick::wants_gpu(&variable), &survey),
    };
    open_for_rank(kind, group.local_rank())
}

/// The kind of device that `auto` selects.
///
/// The CPU unless GPUs are wanted. Otherwise the first of CUDA, ROCm, Metal and Vulkan that finds a GPU, not counting
/// software adapters. If none does, the first kind in this build, whose error then names what is missing.
#[must_use]
pub fn auto(
    wants_gpu: bool,
    survey: &dyn Fn(DeviceKind) -> Result<Survey, DeviceError>,
) -> DeviceKind {
    match wants_gpu {
        true => pick::best(survey),
        false => DeviceKind::Cpu,
    }
}

/// The name of the device, such as `NVIDIA H200`; `None` for the CPU.
#[must_use]
pub fn name(device: &Device) -> Option<String> {
    #[cfg(feature = "cube")]
    return device.identity().map(|identity| identity.name);
    #[cfg(not(feature = "cube"))]
    {
        let _ = device;
        None
    }
}

/// Returns the device after a first use, which makes Burn set it up.
#[cfg(any(feature = "cuda", feature = "rocm"))]
fn set_up(device: Device) -> Device {
    let _ = device.identity();
    device
}

#[cfg(test)]
mod tests;
