//! The errors of finding and opening a device.

use std::path::PathBuf;
use std::time::Duration;

use super::kind::DeviceKind;

/// Why a device cannot be used. Detected at the start of a job, before any computation.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is no such kind of device.
    #[error("unknown kind of device `{text}`")]
    UnknownKind {
        /// The text as written.
        text: String,
    },
    /// The program was built without this back end.
    #[error("this program was built without {kind}")]
    NotBuilt {
        /// The kind asked for.
        kind: DeviceKind,
    },
    /// Metal is a part of macOS.
    #[error("metal exists on macOS only")]
    NotMacOs,
    /// The driver or the library that loads it is missing or broken.
    #[error("{kind} needs {library}, which cannot be used: {reason}")]
    NoLibrary {
        /// The kind asked for.
        kind: DeviceKind,
        /// The library.
        library: &'static str,
        /// The reason that the system or the library gave.
        reason: String,
    },
    /// The driver works but has no device for this process.
    #[error("{kind} finds no device: {reason}")]
    NoDevice {
        /// The kind asked for.
        kind: DeviceKind,
        /// What was found instead.
        reason: String,
    },
    /// The library of functions like `exp` that Burn's kernels are linked with is missing.
    #[error("cuda needs the file libdevice.10.bc, which is not at {}", list(.searched))]
    NoLibdevice {
        /// The files tried, in order.
        searched: Vec<PathBuf>,
    },
    /// The device number is too large.
    #[error("{kind} device {index} does not exist: there {}", there_are(*.count))]
    NoSuchDevice {
        /// The kind asked for.
        kind: DeviceKind,
        /// The device asked for, from 0.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// More ranks than devices.
    #[error("the rank with local rank {local_rank} has no {kind} device: there {}", there_are(*.count))]
    NoDeviceForRank {
        /// The kind asked for.
        kind: DeviceKind,
        /// Number of the rank on its machine, from 0.
        local_rank: usize,
        /// How many there are.
        count: usize,
    },
    /// Burn's back end or the driver failed.
    #[error("{kind} does not work here: {reason}")]
    Refused {
        /// The kind asked for.
        kind: DeviceKind,
        /// Its message.
        reason: String,
    },
    /// The driver hangs.
    #[error("the driver of {kind} has not answered for {} s", .waited.as_secs())]
    NoAnswer {
        /// The kind asked for.
        kind: DeviceKind,
        /// How long Paceline waited.
        waited: Duration,
    },
}

impl DeviceError {
    /// Advice, if there is any.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::UnknownKind { .. } => {
                let names = DeviceKind::ALL.map(DeviceKind::name).join(", ");
                format!("it is one of auto, {names}")
            }
            Self::NotBuilt { kind } => format!(
                "build it with the feature: cargo build --release --features {}",
                kind.name()
            ),
            Self::NotMacOs => "use cuda, rocm or vulkan here".into(),
            Self::NoLibrary { kind, .. } | Self::NoDevice { kind, .. } => install(*kind)?.into(),
            Self::NoLibdevice { .. } => {
                "install the CUDA toolkit, or set CUDA_PATH to a folder with nvvm/libdevice/libdevice.10.bc"
                    .into()
            }
            Self::NoSuchDevice { .. } => "devices are counted from 0".into(),
            Self::NoDeviceForRank { kind, count, .. } => {
                let share = match kind {
                    DeviceKind::Cuda => ", or show one to all of them with CUDA_VISIBLE_DEVICES=0",
                    DeviceKind::Rocm => ", or show one to all of them with HIP_VISIBLE_DEVICES=0",
                    _ => "",
                };
                format!("start at most {count} ranks on this machine{share}")
            }
            Self::Refused { .. } => return None,
            Self::NoAnswer { .. } => "check the system's log (dmesg) for errors of the device; often only a restart helps".into(),
        };
        Some(hint)
    }

    /// Whether the error means that the machine has no device of the kind or the program cannot reach one, rather than that a
    /// device is faulty.
    pub(super) fn is_absence(&self) -> bool {
        matches!(
            self,
            Self::NotBuilt { .. } | Self::NotMacOs | Self::NoLibrary { .. } | Self::NoDevice { .. }
        )
    }
}

paceline_rendezvous::debug_with_hint!(DeviceError);

/// The software to install for a kind.
fn install(kind: DeviceKind) -> Option<&'static str> {
    match kind {
        DeviceKind::Cpu => None,
        DeviceKind::Cuda => Some(
            "install NVIDIA's driver, check it with nvidia-smi, and check CUDA_VISIBLE_DEVICES; a container needs the devices \
             passed in",
        ),
        DeviceKind::Vulkan => Some(
            "install libvulkan1 and the GPU's Vulkan driver (mesa-vulkan-drivers for AMD, Intel and software); \
             vulkaninfo --summary lists what it finds",
        ),
        DeviceKind::Metal => Some("Metal needs a Mac with a GPU that the system supports"),
        DeviceKind::Rocm => Some(
            "install ROCm, set ROCM_PATH if it is not in its usual place, and check it with rocminfo",
        ),
    }
}

fn there_are(count: usize) -> String {
    match count {
        1 => "is 1".into(),
        count => format!("are {count}"),
    }
}

fn list(paths: &[PathBuf]) -> String {
    let paths: Vec<String> = paths
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    paths.join(" or ")
}
