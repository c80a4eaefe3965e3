//! What the driver's errors mean: no driver at all, or one value that cannot be had.

use std::borrow::Cow;

use nvml_wrapper::error::NvmlError;

use crate::snapshot::{DriverError, Gap};

/// Codes of newer drivers that the wrapper has no name for.
const ARGUMENT_VERSION_MISMATCH: u32 = 25;
const DEPRECATED: u32 = 26;
const GPU_NOT_FOUND: u32 = 28;

/// Why the driver does not answer at all.
pub(super) fn trouble(error: NvmlError) -> DriverError {
    match error {
        NvmlError::LibloadingError(error) => DriverError::NoLibrary(bounded(error)),
        NvmlError::DriverNotLoaded => DriverError::NoDriver,
        NvmlError::NoPermission => DriverError::NoPermission,
        NvmlError::LibRmVersionMismatch => DriverError::VersionMismatch,
        NvmlError::FailedToLoadSymbol(words) => {
            DriverError::Other(bounded(format!("this is no NVML library: {words}")))
        }
        other => DriverError::Other(bounded(words(&other))),
    }
}

/// Why one value cannot be had.
pub(super) fn gap(error: NvmlError) -> Gap {
    match error {
        NvmlError::NotSupported | NvmlError::UnexpectedVariant(DEPRECATED) => Gap::NotSupported,
        NvmlError::NoPermission => Gap::NoPermission,
        NvmlError::FailedToLoadSymbol(_)
        | NvmlError::FunctionNotFound
        | NvmlError::UnexpectedVariant(ARGUMENT_VERSION_MISMATCH) => Gap::NoFunction,
        NvmlError::GpuLost | NvmlError::UnexpectedVariant(GPU_NOT_FOUND) => Gap::Lost,
        other => Gap::other(words(&other)),
    }
}

/// Whether asking again soon is of no use.
pub(crate) fn is_lasting(gap: &Gap) -> bool {
    matches!(gap, Gap::NotSupported | Gap::NoFunction | Gap::NoPermission)
}

fn words(error: &NvmlError) -> Cow<'static, str> {
    let text = match error {
        NvmlError::UnexpectedVariant(23) => "the driver is short of resources",
        NvmlError::UnexpectedVariant(27) => "the device is not ready",
        NvmlError::UnexpectedVariant(29) => "the device is in a state that does not allow this",
        NvmlError::UnexpectedVariant(number) => {
            return format!("the driver answers {number}, which has no known meaning").into();
        }
        NvmlError::OperatingSystem => "the operating system or a control group forbids it",
        NvmlError::ResetRequired => "the device must be reset first",
        NvmlError::InUse => "another program is using the device",
        NvmlError::Uninitialized => "the driver's library was shut down",
        NvmlError::Unknown => "the driver failed for a reason that it does not know",
        other => return other.to_string().into(),
    };
    text.into()
}

/// The same bounds as for a gap's words: they are shown in the same places.
fn bounded(text: impl std::fmt::Display) -> String {
    match Gap::other(text) {
        Gap::Other(text) => text,
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_is_one_kind_of_gap() {
        let check = |code: u32, expect: &str| {
            assert_eq!(
                gap(NvmlError::from(code)).to_string(),
                expect,
                "code {code}"
            );
        };
        check(1, "the driver's library was shut down");
        check(2, "a supplied argument was invalid");
        check(3, "not supported");
        check(4, "no permission");
        check(10, "the provided timeout was reached");
        check(13, "the driver is too old to tell");
        check(15, "the device is lost");
        check(16, "the device must be reset first");
        check(25, "the driver is too old to tell");
        check(26, "not supported");
        check(28, "the device is lost");
        check(77, "the driver answers 77, which has no known meaning");
        check(999, "the driver failed for a reason that it does not know");
    }

    #[test]
    fn each_error_of_the_start_is_one_kind_of_trouble() {
        let check = |error: NvmlError, expect: DriverError| assert_eq!(trouble(error), expect);
        check(NvmlError::DriverNotLoaded, DriverError::NoDriver);
        check(NvmlError::NoPermission, DriverError::NoPermission);
        check(
            NvmlError::LibRmVersionMismatch,
            DriverError::VersionMismatch,
        );
        let other = |text: &str| DriverError::Other(text.to_owned());
        check(
            NvmlError::FailedToLoadSymbol("nvmlInit_v2\u{7} is missing".to_owned()),
            other("this is no NVML library: nvmlInit_v2  is missing"),
        );
        check(
            NvmlError::GpuLost,
            other("device fell off the bus or has otherwise become inacessible"),
        );
    }

    #[test]
    fn what_the_driver_cannot_tell_is_not_worth_asking_again() {
        for code in [3, 4, 13, 25, 26] {
            assert!(is_lasting(&gap(NvmlError::from(code))), "code {code}");
        }
        for code in [1, 2, 10, 15, 16, 999] {
            assert!(!is_lasting(&gap(NvmlError::from(code))), "code {code}");
        }
    }
}
