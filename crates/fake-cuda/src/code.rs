//! What the two libraries return, by number and by name.

use std::ffi::CStr;

/// What a function of the driver returns: 0 is success. *Source* - `CUresult`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) u32);

/// What a function of NCCL returns: 0 is success. *Source* - `ncclResult_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reply(pub(crate) u32);

/// Names and meanings of the driver's codes.
const CODES: &[(Code, &CStr, &CStr)] = &[
    (Code::SUCCESS, c"CUDA_SUCCESS", c"no error"),
    (
        Code::INVALID_VALUE,
        c"CUDA_ERROR_INVALID_VALUE",
        c"an argument is out of its range",
    ),
    (
        Code::OUT_OF_MEMORY,
        c"CUDA_ERROR_OUT_OF_MEMORY",
        c"the device has no memory left",
    ),
    (
        Code::NOT_INITIALIZED,
        c"CUDA_ERROR_NOT_INITIALIZED",
        c"cuInit was not called",
    ),
    (
        Code::NO_DEVICE,
        c"CUDA_ERROR_NO_DEVICE",
        c"there is no device",
    ),
    (
        Code::INVALID_DEVICE,
        c"CUDA_ERROR_INVALID_DEVICE",
        c"there is no such device",
    ),
    (
        Code::INVALID_CONTEXT,
        c"CUDA_ERROR_INVALID_CONTEXT",
        c"no context is current, or it is none",
    ),
    (
        Code::ECC_UNCORRECTABLE,
        c"CUDA_ERROR_ECC_UNCORRECTABLE",
        c"memory has an error that cannot be corrected",
    ),
    (
        Code::PEER_ACCESS_UNSUPPORTED,
        c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
        c"the devices cannot reach each other",
    ),
    (
        Code::INVALID_PTX,
        c"CUDA_ERROR_INVALID_PTX",
        c"the PTX cannot be compiled",
    ),
    (
        Code::INVALID_HANDLE,
        c"CUDA_ERROR_INVALID_HANDLE",
        c"a handle is none, or was destroyed",
    ),
    (
        Code::NOT_FOUND,
        c"CUDA_ERROR_NOT_FOUND",
        c"a name was not found",
    ),
    (
        Code::NOT_READY,
        c"CUDA_ERROR_NOT_READY",
        c"what was asked about goes on",
    ),
    (
        Code::ILLEGAL_ADDRESS,
        c"CUDA_ERROR_ILLEGAL_ADDRESS",
        c"a kernel or copy met an address that is none",
    ),
    (
        Code::PEER_ACCESS_ALREADY_ENABLED,
        c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
        c"the peer's memory is within reach already",
    ),
    (
        Code::PEER_ACCESS_NOT_ENABLED,
        c"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED",
        c"the peer's memory was not within reach",
    ),
    (
        Code::LAUNCH_FAILED,
        c"CUDA_ERROR_LAUNCH_FAILED",
        c"a kernel failed",
    ),
    (
        Code::NOT_SUPPORTED,
        c"CUDA_ERROR_NOT_SUPPORTED",
        c"not supported",
    ),
    (
        Code::SYSTEM_DRIVER_MISMATCH,
        c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        c"library and kernel module are of different versions",
    ),
    (Code::UNKNOWN, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

impl Code {
    pub(crate) const SUCCESS: Self = Self(0);
    pub(crate) const INVALID_VALUE: Self = Self(1);
    pub(crate) const OUT_OF_MEMORY: Self = Self(2);
    pub(crate) const NOT_INITIALIZED: Self = Self(3);
    pub(crate) const NO_DEVICE: Self = Self(100);
    pub(crate) const INVALID_DEVICE: Self = Self(101);
    pub(crate) const INVALID_CONTEXT: Self = Self(201);
    pub(crate) const ECC_UNCORRECTABLE: Self = Self(214);
    pub(crate) const PEER_ACCESS_UNSUPPORTED: Self = Self(217);
    pub(crate) const INVALID_PTX: Self = Self(218);
    pub(crate) const INVALID_HANDLE: Self = Self(400);
    pub(crate) const NOT_FOUND: Self = Self(500);
    pub(crate) const NOT_READY: Self = Self(600);
    pub(crate) const ILLEGAL_ADDRESS: Self = Self(700);
    pub(crate) const PEER_ACCESS_ALREADY_ENABLED: Self = Self(704);
    pub(crate) const PEER_ACCESS_NOT_ENABLED: Self = Self(705);
    pub(crate) const LAUNCH_FAILED: Self = Self(719);
    pub(crate) const NOT_SUPPORTED: Self = Self(801);
    pub(crate) const SYSTEM_DRIVER_MISMATCH: Self = Self(803);
    pub(crate) const UNKNOWN: Self = Self(999);

    /// Its name and its meaning, where it is known here.
    pub(crate) fn words(self) -> Option<(&'static CStr, &'static CStr)> {
        let known = CODES.iter().find(|(code, ..)| *code == self)?;
        Some((known.1, known.2))
    }
}

impl Reply {
    pub(crate) const SUCCESS: Self = Self(0);
    pub(crate) const UNHANDLED_CUDA_ERROR: Self = Self(1);
    pub(crate) const SYSTEM_ERROR: Self = Self(2);
    pub(crate) const INTERNAL_ERROR: Self = Self(3);
    pub(crate) const INVALID_ARGUMENT: Self = Self(4);
    pub(crate) const INVALID_USAGE: Self = Self(5);
    pub(crate) const REMOTE_ERROR: Self = Self(6);
    pub(crate) const IN_PROGRESS: Self = Self(7);

    /// What it means.
    pub(crate) fn words(self) -> &'static CStr {
        match self {
            Self::SUCCESS => c"no error",
            Self::UNHANDLED_CUDA_ERROR => c"unhandled cuda error",
            Self::SYSTEM_ERROR => c"unhandled system error",
            Self::INTERNAL_ERROR => c"internal error",
            Self::INVALID_ARGUMENT => c"invalid argument",
            Self::INVALID_USAGE => c"invalid usage",
            Self::REMOTE_ERROR => c"remote process exited or there was a network error",
            Self::IN_PROGRESS => c"NCCL operation in progress",
            _ => c"unknown result code",
        }
    }
}
