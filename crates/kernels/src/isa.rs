//! Which instructions the kernels use.

use std::env;
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use crate::registers::{Portable, Register};

/// The variable that chooses an instruction set.
const VARIABLE: &str = "PACELINE_ISA";

/// An instruction set. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// No instructions beyond those that the program was compiled for.
    Portable,
    /// AVX2 and FMA, on x86-64.
    Avx2,
    /// AVX-512F, on x86-64.
    Avx512,
}

/// An instruction set that the kernels cannot use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IsaError {
    /// No instruction set has this name.
    #[error("`{0}` is no instruction set; expected portable, avx2 or avx512")]
    Unknown(String),
    /// This processor lacks it.
    #[error("this processor has no {0}; expected {list}", list = Isa::available_list())]
    Unavailable(Isa),
}

impl Isa {
    /// All, from narrow to wide.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => is_x86_feature_detected!("avx512f") && Self::Avx2.is_available(),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    fn available() -> impl DoubleEndedIterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    fn available_list() -> String {
        let names: Vec<String> = Self::available().map(|isa| isa.to_string()).collect();
        names.join(" or ")
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        })
    }
}

impl FromStr for Isa {
    type Err = IsaError;

    fn from_str(name: &str) -> Result<Self, IsaError> {
        let isa = Self::ALL.into_iter().find(|isa| isa.to_string() == name);
        isa.ok_or_else(|| IsaError::Unknown(name.into()))
    }
}

/// The kernels of one instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernels {
    isa: Isa,
}

impl Kernels {
    /// Those of `isa`.
    ///
    /// *Errors*: this processor lacks it.
    pub fn with(isa: Isa) -> Result<Self, IsaError> {
        match isa.is_available() {
            true => Ok(Self { isa }),
            false => Err(IsaError::Unavailable(isa)),
        }
    }

    /// Those of the instruction set that `PACELINE_ISA` names (`portable`, `avx2`, `avx512`), or else of the widest that this
    /// processor has. The variable is read once.
    ///
    /// *Errors*: it names none that this processor has.
    pub fn of_process() -> Result<Self, IsaError> {
        static OF_PROCESS: OnceLock<Result<Kernels, IsaError>> = OnceLock::new();
        let choose = || match env::var_os(VARIABLE).filter(|name| !name.is_empty()) {
            Some(name) => Self::with(name.to_string_lossy().parse()?),
            None => Self::with(Isa::available().next_back().unwrap_or(Isa::Portable)),
        };
        OF_PROCESS.get_or_init(choose).clone()
    }

    /// Their instruction set.
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// Runs `task` in a function that is compiled for these instructions.
    pub(crate) fn run<T: Task>(self, task: T) -> T::Output {
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => wide::avx2(task),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => wide::avx512(task),
            _ => task.run::<Portable>(),
        }
    }
}

/// Work that is compiled for each instruction set.
pub(crate) trait Task {
    type Output;

    /// Runs with these registers. Must be `#[inline(always)]`, and so must whatever it calls in a loop.
    fn run<R: Register>(self) -> Self::Output;
}

#[cfg(target_arch = "x86_64")]
#[expect(
    unsafe_code,
    reason = "functions for instructions that not every processor has"
)]
mod wide {
    use super::Task;
    use crate::registers::{Avx2, Avx512};

    pub(super) fn avx2<T: Task>(task: T) -> T::Output {
        #[target_feature(enable = "avx2,fma")]
        fn run<T: Task>(task: T) -> T::Output {
            task.run::<Avx2>()
        }
        // SAFETY: `Kernels` have an instruction set only if the processor has it.
        unsafe { run(task) }
    }

    pub(super) fn avx512<T: Task>(task: T) -> T::Output {
        #[target_feature(enable = "avx512f,avx2,fma")]
        fn run<T: Task>(task: T) -> T::Output {
            task.run::<Avx512>()
        }
        // SAFETY: as above.
        unsafe { run(task) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_others_are_refused() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse(), Ok(isa));
        }
        let error = "sse9".parse::<Isa>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "`sse9` is no instruction set; expected portable, avx2 or avx512"
        );
        let error = IsaError::Unavailable(Isa::Avx512).to_string();
        assert!(
            error.starts_with("this processor has no avx512; expected portable"),
            "{error}"
        );
    }
}
