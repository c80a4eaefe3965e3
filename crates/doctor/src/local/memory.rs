//! *Memory*: the machine's, the container's, and `/dev/shm`.

use paceline_words::{count, say};

use crate::checks;
use crate::finding::{Notes, size};
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
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::MEMORY);
    let mut text = match (machine.available.map(size), machine.total.map(size)) {
        (Some(available), Some(total)) => say!(
            lang,
            "{available} available of {total}",
            "{total} 중 {available} 사용 가능"
        ),
        _ => say!(lang, "cannot be read", "읽을 수 없음"),
    };
    if let Some((most, left)) = machine.group.map(|(most, left)| (size(most), size(left))) {
        text += &say!(
            lang,
            "; this container may use {most}, of which {left} are left",
            "; 이 컨테이너의 한도 {most} 중 {left} 남음"
        );
    }
    let each_bytes = left.map(|left| left / options.ranks.max(1) as u64);
    if let Some(each) = each_bytes.map(size) {
        text += &say!(lang, "; {each} for a rank", "; 랭크당 {each}");
    }
    sheet.fact(text);
    if let Some(each_bytes) = each_bytes.filter(|each| *each < RANK_BYTES_MIN) {
        let ranks = count(lang, options.ranks, "rank", "랭크");
        let (left, each) = (size(left.unwrap_or(0)), size(each_bytes));
        let what = say!(
            lang,
            "{left} of memory are left for {ranks}: {each} each",
            "{ranks}에 남은 메모리가 {left}, 랭크당 {each}뿐임"
        );
        let why = say!(
            lang,
            "the kernel kills the process that asks for what is not there, and a launcher only sees SIGKILL",
            "없는 메모리를 요청한 프로세스는 커널이 강제 종료하고, 런처에는 SIGKILL만 보입니다"
        );
        let fix = say!(
            lang,
            "start fewer ranks, end other programs, or raise the container's limit (`docker run --memory`)",
            "랭크 수를 줄이거나, 다른 프로그램을 끝내거나, 컨테이너의 한도를 늘리세요(`docker run --memory`)"
        );
        match each_bytes < RANK_BYTES_BARE {
            true => sheet.error(what, why, fix),
            false => sheet.warning(what, why, fix),
        }
    }
    judge_shm(memory, notes);
}

fn judge_shm(memory: &Memory, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::SHM);
    let Some(bytes) = memory.shm else {
        sheet.fact(say!(
            lang,
            "not there; Paceline does not use it",
            "없음; Paceline은 쓰지 않음"
        ));
        return;
    };
    let total = size(bytes);
    sheet.fact(say!(
        lang,
        "{total}; Paceline does not use it, its shared memory has no name",
        "{total}; Paceline은 이름 없는 공유 메모리를 쓰므로 필요 없음"
    ));
    if bytes <= SHM_OF_DOCKER {
        sheet.warning(
            say!(
                lang,
                "/dev/shm has {total}, which is what Docker gives unless it is told otherwise",
                "/dev/shm 크기가 Docker 기본값인 {total}임"
            ),
            say!(
                lang,
                "Paceline's own shared memory is not there, but PyTorch's data loaders and NCCL put theirs there: they fail with \
                 \"bus error\" or \"no space left on device\" when it is full",
                "Paceline의 공유 메모리는 여기에 없지만, PyTorch 데이터 로더와 NCCL은 여기를 씁니다. 가득 차면 \"bus error\"나 \"no space left on device\"로 \
                 실패합니다"
            ),
            say!(
                lang,
                "`docker run --shm-size=8g`, or `--ipc=host`; not needed for programs that use neither",
                "컨테이너를 `docker run --shm-size=8g`나 `--ipc=host`로 시작하세요. 둘 다 쓰지 않는 프로그램이라면 필요 없습니다"
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::tests::{found, job, noted};

    #[test]
    fn what_is_left_for_a_rank_is_judged() {
        let check = |memory: Memory, ranks, expect: &[&str]| {
            let notes = noted(|notes| judge(&memory, &job(ranks, 1), notes));
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
