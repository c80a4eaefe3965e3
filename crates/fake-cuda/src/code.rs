//! The result codes of the two libraries, and the names of the driver's.

use std::ffi::CStr;

/// The result of a function of the driver: 0 is success. *Source*: `CUresult`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) u32);

/// The result of a function of NCCL: 0 is success. *Source*: `ncclResult_t`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Reply(pub(crate) u32);

/// Defines a constant for each code, and its name in the driver's words.
macro_rules! codes {
    ($($code:ident = $number:literal => $name:literal,)*) => {
        impl Code {
            $(pub(crate) const $code: Self = Self($number);)*

            /// Its name, if it is known here.
            pub(crate) fn name(self) -> Option<&'static CStr> {
                match self.0 {
                    $(number if number == Self::$code.0 => Some($name),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    SUCCESS = 0 => c"CUDA_SUCCESS",
    INVALID_VALUE = 1 => c"CUDA_ERROR_INVALID_VALUE",
    OUT_OF_MEMORY = 2 => c"CUDA_ERROR_OUT_OF_MEMORY",
    NOT_INITIALIZED = 3 => c"CUDA_ERROR_NOT_INITIALIZED",
    NO_DEVICE = 100 => c"CUDA_ERROR_NO_DEVICE",
    INVALID_DEVICE = 101 => c"CUDA_ERROR_INVALID_DEVICE",
    INVALID_CONTEXT = 201 => c"CUDA_ERROR_INVALID_CONTEXT",
    ECC_UNCORRECTABLE = 214 => c"CUDA_ERROR_ECC_UNCORRECTABLE",
    PEER_ACCESS_UNSUPPORTED = 217 => c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
    INVALID_PTX = 218 => c"CUDA_ERROR_INVALID_PTX",
    INVALID_HANDLE = 400 => c"CUDA_ERROR_INVALID_HANDLE",
    NOT_FOUND = 500 => c"CUDA_ERROR_NOT_FOUND",
    NOT_READY = 600 => c"CUDA_ERROR_NOT_READY",
    ILLEGAL_ADDRESS = 700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
    PEER_ACCESS_ALREADY_ENABLED = 704 => c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
    PEER_ACCESS_NOT_ENABLED = 705 => c"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED",
    LAUNCH_FAILED = 719 => c"CUDA_ERROR_LAUNCH_FAILED",
    NOT_SUPPORTED = 801 => c"CUDA_ERROR_NOT_SUPPORTED",
    SYSTEM_DRIVER_MISMATCH = 803 => c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    UNKNOWN = 999 => c"CUDA_ERROR_UNKNOWN",
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
}
