//! The GPUs of this host, as NVIDIA's driver reports them.

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

/// Why the GPUs asked for cannot be had.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum DeviceError {
    /// Fewer GPUs than asked for.
    #[error("{asked} GPU{} asked for, {found} found{}", if *.asked == 1 { "" } else { "s" }, .reason.as_ref().map(|r| format!(" ({r})")).unwrap_or_default())]
    TooFew {
        /// How many were asked for.
        asked: usize,
        /// How many there are.
        found: usize,
        /// Why none were found, where the driver did not answer.
        reason: Option<String>,
    },
}

impl DeviceError {
    /// What a user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::TooFew { found: 0, .. } => Some(
                "train on the CPU with --use-gpu 0, or check the driver with nvidia-smi".into(),
            ),
            Self::TooFew { found, .. } => Some(format!("use at most --use-gpu {found}")),
        }
    }
}

/// The number of GPUs, or why the driver cannot say.
pub fn count() -> Result<usize, String> {
    let describe = |error: NvmlError| match error {
        NvmlError::LibloadingError(_) => {
            "NVIDIA's driver library libnvidia-ml.so.1 is not installed".to_string()
        }
        other => format!("NVIDIA's driver says: {other}"),
    };
    let nvml = Nvml::init().map_err(describe)?;
    let count = nvml.device_count().map_err(describe)?;
    Ok(count as usize)
}

/// Checks that `asked` GPUs exist; `found` is what [`count`] returned.
///
/// *Errors* - [`DeviceError::TooFew`].
pub fn require(asked: usize, found: Result<usize, String>) -> Result<(), DeviceError> {
    let (found, reason) = match found {
        Ok(found) => (found, None),
        Err(reason) => (0, Some(reason)),
    };
    if asked > found {
        return Err(DeviceError::TooFew {
            asked,
            found,
            reason,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(asked: usize, found: Result<usize, String>, expect: &str) {
        let text = match require(asked, found) {
            Ok(()) => "ok".to_string(),
            Err(error) => format!("{error}; {}", error.hint().expect("a hint")),
        };
        assert_eq!(text, expect);
    }

    #[test]
    fn asking_for_what_there_is_is_fine() {
        check(0, Err("no driver".into()), "ok");
        check(2, Ok(2), "ok");
    }

    #[test]
    fn asking_for_more_says_how_many_there_are() {
        check(
            4,
            Ok(2),
            "4 GPUs asked for, 2 found; use at most --use-gpu 2",
        );
        check(
            1,
            Err("no driver".into()),
            "1 GPU asked for, 0 found (no driver); \
             train on the CPU with --use-gpu 0, or check the driver with nvidia-smi",
        );
    }

    #[test]
    fn counting_answers_on_any_host() {
        // With or without a driver: an answer or a reason, never a panic.
        if let Err(reason) = count() {
            assert!(!reason.is_empty());
        }
    }
}
