//! The kinds of devices, by name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::error::DeviceError;

/// A kind of device: a back end of Burn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The CPU, through Burn's Flex.
    Cpu,
    /// NVIDIA's GPUs.
    Cuda,
    /// GPUs of any maker with a Vulkan driver.
    Vulkan,
    /// Apple's GPUs.
    Metal,
    /// AMD's GPUs.
    Rocm,
}

impl DeviceKind {
    /// All kinds.
    pub const ALL: [Self; 5] = [Self::Cpu, Self::Cuda, Self::Vulkan, Self::Metal, Self::Rocm];

    /// The name in settings: `cuda`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Vulkan => "vulkan",
            Self::Metal => "metal",
            Self::Rocm => "rocm",
        }
    }

    /// Whether it is a GPU or a software stand-in.
    #[must_use]
    pub fn is_gpu(self) -> bool {
        self != Self::Cpu
    }

    /// The cargo feature that it needs; the CPU needs none.
    #[must_use]
    pub fn feature(self) -> Option<&'static str> {
        self.is_gpu().then(|| self.name())
    }

    /// Whether this program was built with its feature.
    #[must_use]
    pub fn is_built(self) -> bool {
        match self {
            Self::Cpu => true,
            Self::Cuda => cfg!(feature = "cuda"),
            Self::Vulkan => cfg!(feature = "vulkan"),
            Self::Metal => cfg!(feature = "metal"),
            Self::Rocm => cfg!(feature = "rocm"),
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DeviceKind {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == text)
            .ok_or_else(|| DeviceError::UnknownKind {
                text: text.to_owned(),
            })
    }
}
