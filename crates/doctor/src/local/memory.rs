//! *Memory*: the machine's, the container's, and `/dev/shm`.

use crate::finding::{Notes, count, size};
use crate::options::Options;
use paceline_gpu::host::Host;
use paceline_gpu::memory;

/// What was read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Memory {
    pub(crate) machine: memory::Memory,
    /// Size of `/dev/shm` in bytes, if it is there.
    pub(crate) shm: Option<u64>,
}

/// Below this a program with a framework does not get far: importing PyTorch takes 300 to 500 MiB.
const RANK_BYTES_MIN: u64 = 512 << 20;
/// Below this not even a bare program does.
const RANK_BYTES_BARE: u64 = 64 << 20;
/// What Docker gives a container unless told otherwise.
const SHM_OF_DOCKER: u64 = 64 << 20;

pub(crate) fn read(host: &Host<'_>) -> Memory {
    Memory {
        machine: memory::read(host),
        shm: rustix::fs::statvfs(host.path("/dev/shm"))
            .ok()
            .map(|shm| shm.f_blocks.saturating_mul(shm.f_frsize)),
    }
}

pub(crate) fn judge(memory: &Memory, options: &Options, notes: &mut Notes) {
    let (machine, left) = (&memory.machine, memory.machine.left());
    let mut sheet = notes.sheet("memory");
    let mut text = match (machine.available, machine.total) {
        (Some(available), Some(total)) => {
            format!("{} available of {}", size(available), size(total))
        }
        _ => "cannot be read".to_owned(),
    };
    if let Some((most, left)) = machine.group {
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

    #[test]
    fn what_is_left_for_a_rank_is_judged() {
        let check = |memory: Memory, ranks, expect: &[&str]| {
            let mut notes = Notes::default();
            judge(&memory, &job(ranks, 1), &mut notes);
            assert_eq!(found(&notes), expect, "{memory:?}");
        };
        let machine = Memory {
            machine: memory::Memory {
                total: Some(16 << 30),
                available: Some(8 << 30),
                group: None,
            },
            shm: Some(8 << 30),
        };
        check(machine.clone(), 8, &[]);
        check(machine.clone(), 17, &["warning: memory: start fewer ranks"]);
        let mut container = machine.clone();
        container.machine.group = Some((1 << 30, 120 << 20));
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
