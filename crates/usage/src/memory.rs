//! The memory that a process has used at most.

/// Largest resident memory of this process so far, in bytes; `None` where the system does not tell.
///
/// *Source*: `VmHWM` in `/proc/self/status` (Linux).
pub fn peak_resident_bytes() -> Option<u64> {
    parse_peak(&std::fs::read_to_string(STATUS).ok()?)
}

/// Resident memory of this process that has the contents of files, such as its program, in bytes.
///
/// *Source*: `RssFile` in `/proc/self/status` (Linux).
pub fn resident_file_bytes() -> Option<u64> {
    paceline_gpu::host::kib(&std::fs::read_to_string(STATUS).ok()?, "RssFile:")
}

const STATUS: &str = "/proc/self/status";

fn parse_peak(status: &str) -> Option<u64> {
    paceline_gpu::host::kib(status, "VmHWM:")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_read_in_bytes() {
        let status = "Name:\tpaceline\nVmPeak:\t  999 kB\nVmHWM:\t    1234 kB\nThreads:\t2\n";
        assert_eq!(parse_peak(status), Some(1234 * 1024));
    }

    #[test]
    fn an_odd_status_gives_nothing() {
        for status in [
            "",
            "VmHWM:\n",
            "VmHWM: many kB",
            "VmHWM: 18446744073709551615 kB",
        ] {
            assert_eq!(parse_peak(status), None, "{status:?}");
        }
    }

    #[test]
    fn this_process_has_used_some_memory() {
        assert!(peak_resident_bytes().is_none_or(|bytes| bytes > 100_000));
    }
}
