//! Versions in the numeric encodings of NVIDIA's libraries.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A version of NCCL, or of CUDA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version {
    /// The 2 of 2.30.7.
    pub major: u32,
    /// The 30 of 2.30.7.
    pub minor: u32,
    /// The 7 of 2.30.7; `None` for CUDA, whose drivers do not report it.
    pub patch: Option<u32>,
}

impl Version {
    /// Decodes `ncclGetVersion`: 2708 is 2.7.8, 23007 is 2.30.7.
    pub(crate) fn of_nccl(code: i32) -> Self {
        let code = u32::try_from(code).unwrap_or(0);
        let unit = if code < 10_000 { 1_000 } else { 10_000 };
        Self {
            major: code / unit,
            minor: code % unit / 100,
            patch: Some(code % 100),
        }
    }

    /// Decodes `cuDriverGetVersion`: 12050 is 12.5.
    pub fn of_cuda(code: i32) -> Self {
        let code = u32::try_from(code).unwrap_or(0);
        Self {
            major: code / 1000,
            minor: code % 1000 / 10,
            patch: None,
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)?;
        match self.patch {
            Some(patch) => write!(f, ".{patch}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unpacked() {
        for (code, expected) in [
            (2708, "2.7.8"),
            (20_905, "2.9.5"),
            (21_800, "2.18.0"),
            (23_203, "2.32.3"),
            (-1, "0.0.0"),
        ] {
            assert_eq!(Version::of_nccl(code).to_string(), expected);
        }
        for (code, expected) in [(12_050, "12.5"), (13_000, "13.0"), (0, "0.0")] {
            assert_eq!(Version::of_cuda(code).to_string(), expected);
        }
        assert!(Version::of_nccl(21_705) < Version::of_nccl(21_800));
        assert!(Version::of_cuda(13_000) > Version::of_cuda(12_050));
    }
}
