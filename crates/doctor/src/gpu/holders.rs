//! Processes on the devices: those that a job left behind, others at work, and memory held by no visible process.

use std::collections::BTreeMap;

use paceline_gpu::snapshot::{Device, Holder, Memory, Reading, Snapshot};
use paceline_words::{Lang, count, say};

use super::words::{age, gpus, listed};
use crate::checks;
use crate::finding::{Notes, Severity, plain, size};

/// Processes that get a line of their own.
const TOLD_MAX: usize = 12;

/// Memory that a device has in use without any process: driver and error correction keep up to about this.
const IDLE_BYTES: u64 = 1 << 30;

/// One process on all its devices.
struct Process<'a> {
    holder: &'a Holder,
    gpus: Vec<u32>,
    memory_bytes: Option<u64>,
    /// Whether a device it is on is at work, or short of memory because of it.
    is_felt: bool,
}

pub(super) fn judge(snapshot: &Snapshot, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::PROCESSES);
    let is_known = |device: &Device| device.processes.known().is_some();
    if !snapshot.devices.iter().any(is_known) {
        return;
    }
    let processes = processes(&snapshot.devices);
    let number = count(lang, processes.len(), "process", "프로세스");
    sheet.fact(match processes.len() {
        0 => say!(
            lang,
            "none computes on the GPUs",
            "GPU에서 계산 중인 프로세스 없음"
        ),
        _ => say!(lang, "{number} on the GPUs", "GPU에서 {number}"),
    });
    let (left, others): (Vec<&Process<'_>>, Vec<&Process<'_>>) = processes
        .values()
        .partition(|process| process.holder.is_orphan == Reading::Known(true));
    judge_left(&left, notes);
    judge_others(&others, notes);
    judge_unseen(snapshot, notes);
}

fn processes(devices: &[Device]) -> BTreeMap<u32, Process<'_>> {
    let mut all: BTreeMap<u32, Process<'_>> = BTreeMap::new();
    for device in devices {
        let holders = device.processes.known().into_iter().flatten();
        for holder in holders.filter(|holder| holder.is_compute) {
            let process = all.entry(holder.pid).or_insert_with(|| Process {
                holder,
                gpus: Vec::new(),
                memory_bytes: None,
                is_felt: false,
            });
            process.gpus.push(device.index);
            let bytes = holder.memory_bytes.known().copied();
            if let Some(bytes) = bytes {
                process.memory_bytes =
                    Some(process.memory_bytes.unwrap_or(0).saturating_add(bytes));
            }
            let busy = device.now.utilization_percent.known();
            let total = device.memory.known().map_or(0, |memory| memory.total_bytes);
            process.is_felt |= busy.is_some_and(|busy| *busy >= 10)
                || bytes.is_some_and(|bytes| bytes > total / 10);
        }
    }
    all
}

/// "python 4242 (rank 3) with 20 GiB of GPU 1, started 3 h ago".
fn named(process: &Process<'_>, lang: Lang) -> String {
    let (holder, gpus) = (process.holder, gpus(&process.gpus, lang));
    let (name, pid) = match holder.name.known() {
        Some(name) => (plain(name), holder.pid),
        None => (say!(lang, "process", "프로세스"), holder.pid),
    };
    let rank = holder
        .rank
        .map(|rank| say!(lang, " (rank {rank})", "(랭크 {rank})"));
    let memory = match process.memory_bytes.map(size) {
        Some(size) => say!(lang, "{size} of {gpus}", "{gpus}의 메모리 {size}"),
        None => gpus,
    };
    let started = holder.age_s.known().map(|seconds| {
        let age = age(*seconds, lang);
        say!(lang, ", started {age} ago", ", {age} 전에 시작")
    });
    let (rank, started) = (rank.unwrap_or_default(), started.unwrap_or_default());
    match lang {
        Lang::En => format!("{name} {pid}{rank} with {memory}{started}"),
        Lang::Ko => format!("{name} {pid}{rank}: {memory}{started}"),
    }
}

fn judge_left(left: &[&Process<'_>], notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::PROCESSES);
    for process in left.iter().take(TOLD_MAX) {
        let (pid, named) = (process.holder.pid, named(process, lang));
        sheet.warning(
            say!(
                lang,
                "{named}: what started it is gone",
                "{named}; 시작한 프로세스가 이미 없음"
            ),
            say!(
                lang,
                "most likely left behind by a job that ended or was killed: it keeps memory, and a collective that it waits in keeps the GPU busy",
                "끝나거나 강제 종료된 작업이 남긴 프로세스일 가능성이 큽니다. 메모리를 차지하고, 집합 통신을 기다리는 동안 GPU를 계속 점유합니다"
            ),
            say!(
                lang,
                "`ps -o pid,user,lstart,args -p {pid}` shows what it is; if it belongs to no running job, `kill {pid}`, and `kill -9 {pid}` if it stays",
                "`ps -o pid,user,lstart,args -p {pid}` 명령으로 무엇인지 확인하세요. 실행 중인 작업의 것이 아니라면 `kill {pid}`, 그래도 남으면 `kill -9 {pid}` \
                 명령으로 끝내세요"
            ),
        );
    }
    if left.len() > TOLD_MAX {
        let more = left.len() - TOLD_MAX;
        sheet.warning(
            say!(
                lang,
                "{more} more processes whose parent is gone hold GPUs",
                "부모가 없는 프로세스 {more}개가 더 GPU를 잡고 있음"
            ),
            say!(
                lang,
                "most likely left behind by a job that ended or was killed",
                "끝나거나 강제 종료된 작업이 남긴 프로세스일 가능성이 큽니다"
            ),
            say!(
                lang,
                "`nvidia-smi` lists them; look at each with `ps` before you end it",
                "목록은 `nvidia-smi`에 나옵니다. 끝내기 전에 하나씩 `ps`로 확인하세요"
            ),
        );
    }
}

fn judge_others(others: &[&Process<'_>], notes: &mut Notes) {
    if others.is_empty() {
        return;
    }
    let severity = match others.iter().any(|process| process.is_felt) {
        true => Severity::Warning,
        false => Severity::Note,
    };
    let lang = notes.lang;
    let number = count(lang, others.len(), "process", "프로세스");
    let verb = if others.len() == 1 { "uses" } else { "use" };
    let list = others.iter().map(|process| named(process, lang));
    let list = listed(list.collect(), lang);
    notes.sheet(checks::PROCESSES).add(
        severity,
        say!(
            lang,
            "{number} {verb} the GPUs: {list}",
            "GPU를 사용 중인 {number}: {list}"
        ),
        say!(
            lang,
            "a job that begins now shares memory and time with them: it is slower, or ends with \"out of memory\"",
            "지금 작업을 시작하면 메모리와 연산 시간을 나눠 쓰게 되어, 느려지거나 \"out of memory\"로 끝납니다"
        ),
        say!(
            lang,
            "wait, choose other GPUs with CUDA_VISIBLE_DEVICES, or ask whose they are (`ps -o user,args -p PID`); harmless if they are the job \
             that you look at",
            "기다리거나, CUDA_VISIBLE_DEVICES로 다른 GPU를 고르거나, `ps -o user,args -p PID`로 누구의 프로세스인지 확인하세요. 지금 살펴보는 작업 자신이라면 \
             문제가 없습니다"
        ),
    );
}

/// Memory in use on devices that show no process.
fn judge_unseen(snapshot: &Snapshot, notes: &mut Notes) {
    let is_unseen = |device: &&Device| {
        let none = device.processes.known().is_some_and(Vec::is_empty);
        let is_divided = device.mig.known().is_some_and(|mig| mig.is_on);
        let used = |memory: &Memory| memory.used_bytes > IDLE_BYTES.max(memory.total_bytes / 20);
        none && !is_divided && device.memory.known().is_some_and(used)
    };
    let unseen: Vec<&Device> = snapshot.devices.iter().filter(is_unseen).collect();
    if unseen.is_empty() {
        return;
    }
    let of: Vec<u32> = unseen.iter().map(|device| device.index).collect();
    let used = unseen.iter().filter_map(|device| device.memory.known());
    let used = used.fold(0_u64, |sum, memory| sum.saturating_add(memory.used_bytes));
    let lang = notes.lang;
    let (used, gpus) = (size(used), gpus(&of, lang));
    let (why, fix) = match snapshot.system.is_container() {
        true => (
            say!(
                lang,
                "a program outside of this container, or in another one, holds it: the job may end with \"out of memory\"",
                "컨테이너 밖이나 다른 컨테이너의 프로그램이 잡고 있습니다. 작업이 \"out of memory\"로 끝날 수 있습니다"
            ),
            say!(
                lang,
                "look on the host: `sudo fuser -v /dev/nvidia*`",
                "호스트에서 `sudo fuser -v /dev/nvidia*`로 확인하세요"
            ),
        ),
        false => (
            say!(
                lang,
                "a program in a container, of another user, or one that the kernel cannot end holds it: the job may end with \"out of memory\"",
                "컨테이너나 다른 사용자의 프로그램, 또는 커널이 끝내지 못한 프로그램이 잡고 있습니다. 작업이 \"out of memory\"로 끝날 수 있습니다"
            ),
            say!(
                lang,
                "`sudo fuser -v /dev/nvidia*` shows which processes have the devices open; if none has, reset the GPU (`sudo nvidia-smi -r -i N`)",
                "장치를 열고 있는 프로세스를 `sudo fuser -v /dev/nvidia*`로 확인하세요. 하나도 없다면 GPU를 리셋하세요(`sudo nvidia-smi -r -i N`)"
            ),
        ),
    };
    notes.sheet(checks::PROCESSES).warning(
        say!(
            lang,
            "{used} of memory of {gpus} is in use by no process that is seen from here",
            "{gpus}의 메모리 {used}를 어느 프로세스가 쓰는지 여기서는 보이지 않음"
        ),
        why,
        fix,
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::tests::{check, machine};
    use paceline_gpu::snapshot::Gap;

    fn holder(pid: u32, gib: u64, is_orphan: bool) -> Holder {
        Holder {
            pid,
            memory_bytes: (gib << 30).into(),
            is_compute: true,
            name: "python".to_owned().into(),
            is_orphan: is_orphan.into(),
            age_s: 11_000.into(),
            ..Holder::default()
        }
    }

    fn with(first: Vec<Holder>, second: Vec<Holder>) -> Snapshot {
        let mut snapshot = machine(2);
        for (device, holders) in snapshot.devices.iter_mut().zip([first, second]) {
            device.processes = holders.into();
        }
        snapshot
    }

    #[test]
    fn a_process_whose_parent_is_gone_is_named_with_all_it_holds() {
        let orphan = Holder {
            rank: Some(3),
            ..holder(4242, 20, true)
        };
        let snapshot = with(vec![orphan.clone()], vec![orphan]);
        check(
            judge,
            &snapshot,
            &["warning: processes: `ps -o pid,user,lstart,args -p 4242`"],
        );
        let mut notes = Notes::default();
        judge(&snapshot, &mut notes);
        assert_eq!(
            notes.findings[0].what,
            "python 4242 (rank 3) with 40 GiB of GPUs 0 and 1, started 3 h ago: what started it is gone"
        );
        assert!(notes.findings[0].fix.contains("`kill 4242`"));
    }

    #[test]
    fn others_are_a_warning_once_they_are_felt() {
        check(judge, &with(Vec::new(), Vec::new()), &[]);
        check(
            judge,
            &with(vec![holder(7, 1, false)], Vec::new()),
            &["note: processes: wait"],
        );
        check(
            judge,
            &with(vec![holder(7, 30, false)], Vec::new()),
            &["warning: processes: wait"],
        );
        let mut busy = with(vec![holder(7, 1, false)], Vec::new());
        busy.devices[0].now.utilization_percent = 99.into();
        check(judge, &busy, &["warning: processes: wait"]);
    }

    #[test]
    fn a_desktop_is_no_program_that_computes() {
        let drawing = Holder {
            is_compute: false,
            ..holder(7, 1, false)
        };
        check(judge, &with(vec![drawing], Vec::new()), &[]);
    }

    #[test]
    fn a_process_that_cannot_be_seen_is_not_called_left_behind() {
        let hidden = Holder {
            name: Reading::missing(Gap::NoPermission),
            is_orphan: Reading::missing(Gap::NoPermission),
            ..holder(7, 1, false)
        };
        check(
            judge,
            &with(vec![hidden], Vec::new()),
            &["note: processes: wait"],
        );
    }

    #[test]
    fn memory_that_nobody_holds_is_told() {
        let used = |gib: u64| {
            let mut snapshot = with(Vec::new(), Vec::new());
            snapshot.devices[1].memory = Memory {
                used_bytes: gib << 30,
                total_bytes: 80 << 30,
            }
            .into();
            snapshot
        };
        check(judge, &used(1), &[]);
        check(judge, &used(30), &["warning: processes: `sudo fuser -v"]);
        let mut container = used(30);
        container.system.confined_by = vec!["docker".to_owned()];
        check(judge, &container, &["warning: processes: look on the host"]);
    }

    #[test]
    fn a_flood_of_processes_stays_short() {
        let many = (1..200).map(|pid| holder(pid, 1, true)).collect();
        let mut notes = Notes::default();
        judge(&with(many, Vec::new()), &mut notes);
        assert_eq!(notes.findings.len(), TOLD_MAX + 1);
    }
}
