//! *Memory*: the machine's, the container's, and `/dev/shm`.

use crate::cgroup::{self, Folders};
use crate::finding::{Notes, count, size};
use crate::options::Options;
use paceline_gpu::host::{Host, kib};

/// What was read, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Memory {
    pub(crate) total: Option<u64>,
    pub(crate) available: Option<u64>,
    /// The container's limit, and what it leaves.
    pub(crate) group: Option<(u64, u64)>,
    /// Size of `/dev/shm`, if it is there.
    pub(crate) shm: Option<u64>,
}

/// Below this a program with a framework does not get far: importing PyTorch takes 300 to 500 MiB.
const RANK_BYTES_MIN: u64 = 512 << 20;
/// Below this not even a bare program does.
const RANK_BYTES_BARE: u64 = 64 << 20;
/// What Docker gives a container unless told otherwise.
const SHM_OF_DOCKER: u64 = 64 << 20;
/// Version 1 writes "unlimited" as a number near this.
const UNLIMITED_FROM: u64 = 1 << 60;

pub(crate) fn read(host: &Host<'_>) -> Memory {
    let table = host.text("/proc/meminfo").unwrap_or_default();
    Memory {
        total: kib(&table, "MemTotal:"),
        available: kib(&table, "MemAvailable:"),
        group: group(host),
        shm: rustix::fs::statvfs(host.path("/dev/shm"))
            .ok()
            .map(|shm| shm.f_blocks.saturating_mul(shm.f_frsize)),
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

pub(crate) fn judge(memory: &Memory, options: &Options, notes: &mut Notes) {
    let left = [memory.available, memory.group.map(|(_, left)| left)];
    let left = left.into_iter().flatten().min();
    let mut sheet = notes.sheet("memory");
    let mut text = match (memory.available, memory.total) {
        (Some(available), Some(total)) => {
            format!("{} available of {}", size(available), size(total))
        }
        _ => "cannot be read".to_owned(),
    };
    if let Some((most, left)) = memory.group {
        text += &format!(
            "; this container may use {}, of which {} are left",
            size(most),
            size(left)
        );
    }
    let each = left.map(|left| left / options.ranks.max(1) as u64);
    if let Some(each) = each {
        text += &format!("; {} for a rank", size(each));
    }
    sheet.fact(text);
    if let Some(each) = each.filter(|each| *each < RANK_BYTES_MIN) {
        let ranks = count(options.ranks, "rank");
        let what = format!(
            "{} of memory are left for {ranks}: {} each",
            size(left.unwrap_or(0)),
            size(each)
        );
        let (why, fix) = (
            "the kernel kills the process that asks for what is not there, and a launcher only sees SIGKILL",
            "start fewer ranks, end other programs, or raise the container's limit (`docker run --memory`)",
        );
        match each < RANK_BYTES_BARE {
            true => sheet.error(what, why, fix),
            false => sheet.warning(what, why, fix),
        }
    }
    judge_shm(memory, notes);
}

fn judge_shm(memory: &Memory, notes: &mut Notes) {
    let mut sheet = notes.sheet("/dev/shm");
    let Some(bytes) = memory.shm else {
        sheet.fact("not there; Paceline does not use it");
        return;
    };
    sheet.fact(format!(
        "{}; Paceline does not use it, its shared memory has no name",
        size(bytes)
    ));
    if bytes <= SHM_OF_DOCKER {
        sheet.warning(
            format!("/dev/shm has {}, which is what Docker gives unless it is told otherwise", size(bytes)),
            "Paceline's own shared memory is not there, but PyTorch's data loaders and NCCL put theirs there: they fail with \
             \"bus error\" or \"no space left on device\" when it is full",
            "`docker run --shm-size=8g`, or `--ipc=host`; not needed for programs that use neither",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::tests::{found, job};
    use paceline_gpu::host::recorded::Recorded;

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

    #[test]
    fn what_is_left_for_a_rank_is_judged() {
        let check = |memory: Memory, ranks, expect: &[&str]| {
            let mut notes = Notes::default();
            judge(&memory, &job(ranks, 1), &mut notes);
            assert_eq!(found(&notes), expect, "{memory:?}");
        };
        let machine = Memory {
            total: Some(16 << 30),
            available: Some(8 << 30),
            group: None,
            shm: Some(8 << 30),
        };
        check(machine.clone(), 8, &[]);
        check(machine.clone(), 17, &["warning: memory: start fewer ranks"]);
        let container = Memory {
            group: Some((1 << 30, 120 << 20)),
            ..machine.clone()
        };
        check(container, 2, &["error: memory: start fewer ranks"]);
        check(Memory::default(), 8, &[]);
        let docker = Memory {
            shm: Some(64 << 20),
            ..machine
        };
        check(
            docker,
            1,
            &["warning: /dev/shm: `docker run --shm-size=8g`"],
        );
    }
}
