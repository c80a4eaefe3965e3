//! Where the driver's library and the system's files are looked for.

use std::path::PathBuf;

/// Variable that names NVIDIA's management library, for machines where the loader does not find it.
pub const LIBRARY_VARIABLE: &str = "PACELINE_NVML_LIBRARY";

/// Variable that names the folder under which `/proc`, `/sys` and `/dev` of the machine lie, as for a container that has
/// the host's mounted.
pub const ROOT_VARIABLE: &str = "PACELINE_SYSTEM_ROOT";

/// Where the driver's library and the system's files are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// NVIDIA's management library; what the loader finds as `libnvidia-ml.so.1` if not given.
    pub library: Option<PathBuf>,
    /// The folder to take for `/`.
    pub root: PathBuf,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            library: None,
            root: "/".into(),
        }
    }
}

impl Places {
    /// This machine's, or those that [`LIBRARY_VARIABLE`] and [`ROOT_VARIABLE`] name.
    pub fn from_env() -> Self {
        let named = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        Self {
            library: named(LIBRARY_VARIABLE).map(PathBuf::from),
            root: named(ROOT_VARIABLE).map_or_else(|| "/".into(), PathBuf::from),
        }
    }
}
