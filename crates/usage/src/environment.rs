//! What a report says about the machine that it comes from.

use paceline_gpu::host::Host;
use paceline_gpu::memory;
use serde::Serialize;

/// A machine and its program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Environment {
    /// The machine's name.
    pub host: String,
    /// The processor's name; "unknown" where the kernel does not tell it.
    pub cpu: String,
    /// Those that this process may use.
    pub cores: usize,
    /// The machine's memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Operating system and release.
    pub os: String,
    /// The version of Paceline.
    pub version: &'static str,
}

impl Environment {
    /// That of this process.
    pub fn here() -> Self {
        let host = Host::new("/", &|_| None);
        Self {
            host: rustix::system::uname()
                .nodename()
                .to_string_lossy()
                .into_owned(),
            cpu: cpu(),
            cores: cores(),
            memory_bytes: memory::read(&host).total,
            os: system(),
            version: env!("CARGO_PKG_VERSION"),
        }
    }
}

/// The processor's name as the kernel tells it; "unknown" where it does not.
pub fn cpu() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    model_name(&text).unwrap_or("unknown").to_owned()
}

/// Cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Operating system and release.
pub fn system() -> String {
    let name = rustix::system::uname();
    format!(
        "{} {}",
        name.sysname().to_string_lossy(),
        name.release().to_string_lossy()
    )
}

fn model_name(cpuinfo: &str) -> Option<&str> {
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
        let (_, value) = line.split_once(':')?;
        Some(value.trim()).filter(|value| !value.is_empty())
    };
    // ARM kernels have the number of the part only.
    field("model name").or_else(|| field("CPU part"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_found_where_the_kernel_tells_it() {
        let check = |text, expect| assert_eq!(model_name(text), expect, "{text}");
        check(
            "processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nflags: x",
            Some("AMD EPYC"),
        );
        check("processor : 0\nCPU part\t: 0xd0c\n", Some("0xd0c"));
        check("model name\t:\n", None);
        check("", None);
    }
}
