//! How much memory the machine and this process's container have, and what is left.

use crate::cgroup::{self, Folders};
use crate::host::{Host, kib};

/// What was read, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Memory {
    /// The machine's.
    pub total: Option<u64>,
    /// What the machine has left.
    pub available: Option<u64>,
    /// The container's limit, and what it leaves.
    pub group: Option<(u64, u64)>,
}

/// Version 1 writes "unlimited" as a number near this.
const UNLIMITED_FROM: u64 = 1 << 60;

impl Memory {
    /// What machine and container have left.
    pub fn left(&self) -> Option<u64> {
        let left = [self.available, self.group.map(|(_, left)| left)];
        left.into_iter().flatten().min()
    }
}

/// Reads it; what the system does not tell is missing.
pub fn read(host: &Host<'_>) -> Memory {
    let table = host.text("/proc/meminfo").unwrap_or_default();
    Memory {
        total: kib(&table, "MemTotal:"),
        available: kib(&table, "MemAvailable:"),
        group: group(host),
    }
}

fn group(host: &Host<'_>) -> Option<(u64, u64)> {
    let (folders, [most, now, file]) = match cgroup::folders(host, "memory") {
        Folders::V2(folders) => (folders, ["memory.max", "memory.current", "inactive_file "]),
        Folders::V1(folders) => (
            folders,
            [
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file ",
            ],
        ),
    };
    cgroup::smallest(&folders, |folder| {
        let most = host.number(&format!("{folder}/{most}"))?;
        let most = Some(most).filter(|most| *most < UNLIMITED_FROM)?;
        let now = host.number(&format!("{folder}/{now}")).unwrap_or(0);
        // What only caches files is given back when a process asks for memory.
        let stat = host.text(&format!("{folder}/memory.stat"));
        let cached = stat.as_deref().and_then(|stat| {
            let line = stat.lines().find_map(|line| line.strip_prefix(file))?;
            line.trim().parse().ok()
        });
        let used = now.saturating_sub(cached.unwrap_or(0));
        Some((most, most.saturating_sub(used)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::recorded::Recorded;

    const MEMINFO: (&str, &str) = (
        "/proc/meminfo",
        "MemTotal:       16384000 kB\nMemFree: 12 kB\nMemAvailable:    8192000 kB\nOdd\n",
    );

    #[test]
    fn the_machine_and_both_kinds_of_groups_are_read() {
        let v2 = Recorded::new(&[
            MEMINFO,
            ("/proc/self/cgroup", "0::/job\n"),
            ("/sys/fs/cgroup/job/memory.max", "1073741824\n"),
            ("/sys/fs/cgroup/job/memory.current", "805306368\n"),
            (
                "/sys/fs/cgroup/job/memory.stat",
                "anon 1\ninactive_file 268435456\n",
            ),
        ]);
        let memory = read(&v2.host());
        assert_eq!(memory.total, Some(16_384_000 << 10));
        assert_eq!(memory.available, Some(8_192_000 << 10));
        assert_eq!(memory.group, Some((1 << 30, 512 << 20)));
        assert_eq!(memory.left(), Some(512 << 20));
        let v1 = Recorded::new(&[
            ("/proc/self/cgroup", "3:memory:/\n"),
            (
                "/sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712",
            ),
        ]);
        assert_eq!(read(&v1.host()).group, None);
        let odd = Recorded::new(&[("/proc/meminfo", "MemTotal: many kB\n")]);
        assert_eq!(read(&odd.host()).total, None);
    }
}
