//! What a report says about the machine.

/// The processor's name as the kernel tells it; "unknown" where it does not.
pub(super) fn cpu() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    model_name(&text).unwrap_or("unknown").to_owned()
}

/// Cores that this process may use.
pub(super) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Operating system and release.
pub(super) fn system() -> String {
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
