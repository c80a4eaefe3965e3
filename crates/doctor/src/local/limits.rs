//! What the system lets a user's processes have: open files, processes, locked memory, file sizes.

use paceline_words::{Lang, say};
use rustix::process::{Resource, getrlimit, getuid};

use crate::checks;
use crate::finding::{Notes, Severity, size};
use crate::options::Options;
use paceline_gpu::cgroup::{self, Folders};
use paceline_gpu::host::Host;

/// What was read. `None` is no limit, or one that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Limits {
    /// Open files, soft and hard.
    pub(crate) files: [Option<u64>; 2],
    /// Processes and threads of this user.
    pub(crate) tasks: Option<u64>,
    /// The same of the container: at most, now.
    pub(crate) group_tasks: Option<(u64, u64)>,
    pub(crate) locked_bytes: Option<u64>,
    pub(crate) file_bytes: Option<u64>,
    pub(crate) is_root: bool,
    /// Network adapters that read memory by themselves.
    pub(crate) rdma: Vec<String>,
}

/// Descriptors of a process besides those that grow with the job: program, libraries, log files, devices.
const FILES_OWN: u64 = 128;
/// Connections to a rank of this host: two for messages, its memory, and one while it is formed.
const FILES_NEAR: u64 = 4;
/// Connections to a rank of another host: two for messages, and eight for data at most.
const FILES_FAR: u64 = 10;
/// Of the launcher for a rank: two pipes, two files, the process, and its connection to the store.
const FILES_LAUNCHER: u64 = 6;
/// Threads of a rank besides those that compute: communication, loaders, those of libraries.
const TASKS_OWN: u64 = 16;
/// Threads of the launcher itself.
const TASKS_LAUNCHER: u64 = 16;
/// What a small arena needs; below, the ranks' shared memory is a file too large.
const FILE_BYTES_MIN: u64 = 1 << 30;
const DEVICES_MAX: usize = 8;

pub(crate) fn read(host: &Host<'_>) -> Limits {
    let limit = |resource| getrlimit(resource);
    let files = limit(Resource::Nofile);
    let (folders, maximum) = match cgroup::folders(host, "pids") {
        Folders::V2(folders) | Folders::V1(folders) => (folders, "pids.max"),
    };
    let group_tasks = cgroup::smallest(&folders, |folder| {
        let most = host.number(&format!("{folder}/{maximum}"))?;
        let now = host.number(&format!("{folder}/pids.current")).unwrap_or(0);
        Some((most, now))
    });
    let adapters = std::fs::read_dir(host.path("/sys/class/infiniband"));
    let mut rdma: Vec<String> = adapters
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .take(DEVICES_MAX)
        .collect();
    rdma.sort();
    Limits {
        files: [files.current, files.maximum],
        tasks: limit(Resource::Nproc).current,
        group_tasks,
        locked_bytes: limit(Resource::Memlock).current,
        file_bytes: limit(Resource::Fsize).current,
        is_root: getuid().is_root(),
        rdma,
    }
}

/// Descriptors that the hungriest process of the job needs: a rank, or the launcher of the node with the store.
pub(crate) fn files_needed(ranks: usize, nodes: usize) -> u64 {
    let (ranks, nodes) = (ranks as u64, nodes as u64);
    let far = ranks * nodes.saturating_sub(1);
    let rank = FILES_OWN + FILES_NEAR * ranks + FILES_FAR * far;
    let launcher = FILES_OWN + FILES_LAUNCHER * ranks + far + 2 * nodes;
    rank.max(launcher)
}

pub(crate) fn judge(limits: &Limits, options: &Options, threads: usize, notes: &mut Notes) {
    judge_files(limits, options, notes);
    judge_tasks(limits, options, threads, notes);
    judge_memory(limits, notes);
}

fn judge_files(limits: &Limits, options: &Options, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::OPEN_FILES);
    let needed = files_needed(options.ranks, options.nodes_max);
    let [soft, hard] = limits.files;
    let (soft_text, hard_text) = (limit_text(soft, lang), limit_text(hard, lang));
    sheet.fact(say!(
        lang,
        "{soft_text} for each process (hard limit {hard_text}); this job needs about {needed}",
        "프로세스마다 {soft_text}(하드 한도 {hard_text}); 이 작업에는 약 {needed}개 필요"
    ));
    let Some(soft) = soft.filter(|soft| *soft < needed) else {
        return;
    };
    let fix = match hard {
        Some(hard) if hard < needed => say!(
            lang,
            "the hard limit is {hard}: have an administrator raise it (`LimitNOFILE=`, /etc/security/limits.conf, or `docker run \
             --ulimit nofile={needed}:{needed}`)",
            "하드 한도가 {hard}개입니다. 관리자에게 올려 달라고 하세요(`LimitNOFILE=`, /etc/security/limits.conf, 또는 `docker run --ulimit \
             nofile={needed}:{needed}`)"
        ),
        _ => say!(
            lang,
            "`ulimit -n {needed}` in the shell that starts the job",
            "작업을 시작하는 셸에서 `ulimit -n {needed}` 명령을 실행하세요"
        ),
    };
    // The estimate assumes eight connections for each pair of ranks, which few jobs have.
    let severity = match soft < needed / 3 {
        true => Severity::Error,
        false => Severity::Warning,
    };
    sheet.add(
        severity,
        say!(
            lang,
            "a process may have {soft} files open, but this job needs up to {needed}",
            "프로세스가 열 수 있는 파일은 {soft}개인데 이 작업에는 최대 {needed}개가 필요함"
        ),
        say!(
            lang,
            "every connection to another rank is an open file; the rank that runs out fails with \"too many open files\"",
            "다른 랭크와의 연결 하나하나가 열린 파일입니다. 한도를 넘은 랭크는 \"too many open files\"로 실패합니다"
        ),
        fix,
    );
}

fn judge_tasks(limits: &Limits, options: &Options, threads: usize, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::PROCESSES);
    let ranks = options.ranks as u64;
    let needed = ranks * (threads as u64 + TASKS_OWN) + TASKS_LAUNCHER;
    let group = limits.group_tasks.map(|(most, now)| {
        say!(
            lang,
            ", {most} in this container or service, of which {now} exist",
            ", 이 컨테이너나 서비스에 {most}개(현재 {now}개)"
        )
    });
    let (user, group) = (limit_text(limits.tasks, lang), group.unwrap_or_default());
    sheet.fact(say!(
        lang,
        "{user} for this user{group}; this job needs about {needed}, threads included",
        "이 사용자에게 {user}{group}; 이 작업에는 스레드를 포함해 약 {needed}개 필요"
    ));
    let why = || {
        say!(
            lang,
            "a rank that cannot start a thread fails with \"resource temporarily unavailable\"",
            "스레드를 시작하지 못한 랭크는 \"resource temporarily unavailable\"로 실패합니다"
        )
    };
    if let Some((most, now)) = limits.group_tasks
        && most.saturating_sub(now) < needed
    {
        let enough = needed + now;
        sheet.warning(
            say!(
                lang,
                "this container or service may have {most} processes and threads and has {now}; this job needs about {needed}",
                "이 컨테이너나 서비스의 프로세스·스레드 한도는 {most}개, 현재 {now}개인데 이 작업에는 약 {needed}개가 필요함"
            ),
            why(),
            say!(
                lang,
                "`docker run --pids-limit {enough}`, or `TasksMax=` of the service",
                "한도를 늘리세요: `docker run --pids-limit {enough}`, 서비스라면 `TasksMax=`"
            ),
        );
    }
    // The kernel exempts root.
    if let Some(most) = limits.tasks
        && most < needed
        && !limits.is_root
    {
        sheet.warning(
            say!(
                lang,
                "this user may have {most} processes and threads, but this job needs about {needed}",
                "이 사용자의 프로세스·스레드 한도는 {most}개인데 이 작업에는 약 {needed}개가 필요함"
            ),
            why(),
            say!(
                lang,
                "`ulimit -u {needed}` in the shell that starts the job",
                "작업을 시작하는 셸에서 `ulimit -u {needed}` 명령을 실행하세요"
            ),
        );
    }
}

fn judge_memory(limits: &Limits, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::LOCKED_MEMORY);
    let text = match limits.locked_bytes {
        Some(bytes) => size(bytes),
        None => limit_text(None, lang),
    };
    match limits.rdma.as_slice() {
        [] => sheet.fact(say!(
            lang,
            "{text}; nothing here needs it: no RDMA adapter, and Paceline locks no memory",
            "{text}; 필요한 것 없음: RDMA 어댑터가 없고 Paceline은 메모리를 잠그지 않음"
        )),
        devices => {
            let devices = devices.join(", ");
            sheet.fact(say!(
                lang,
                "{text}; RDMA adapters: {devices}",
                "{text}; RDMA 어댑터: {devices}"
            ));
            if limits.locked_bytes.is_some_and(|bytes| bytes < 1 << 30) {
                sheet.warning(
                    say!(
                        lang,
                        "a process may lock {text} of memory, and there is an RDMA adapter ({devices})",
                        "RDMA 어댑터({devices})가 있는데 프로세스가 잠글 수 있는 메모리가 {text}뿐임"
                    ),
                    say!(
                        lang,
                        "NCCL and other users of RDMA lock what they send, and fail to register it beyond the limit; Paceline itself \
                         locks none",
                        "NCCL처럼 RDMA를 쓰는 프로그램은 보내는 메모리를 잠그며, 한도를 넘으면 등록에 실패합니다. Paceline은 메모리를 잠그지 않습니다"
                    ),
                    say!(
                        lang,
                        "`ulimit -l unlimited`, or `docker run --ulimit memlock=-1`",
                        "`ulimit -l unlimited`를 실행하거나, `docker run --ulimit memlock=-1`로 시작하세요"
                    ),
                );
            }
        }
    }
    if let Some(bytes) = limits.file_bytes
        && bytes < FILE_BYTES_MIN
    {
        let most = size(bytes);
        notes.sheet(checks::FILE_SIZE).error(
            say!(
                lang,
                "a process may write files of {most} at most (`ulimit -f`)",
                "프로세스가 쓸 수 있는 파일 크기가 최대 {most}임(`ulimit -f`)"
            ),
            say!(
                lang,
                "memory that ranks share is a file to the kernel, and log files are too: a rank that goes beyond is killed with SIGXFSZ",
                "랭크가 공유하는 메모리도 커널에는 파일이고 로그도 파일입니다. 한도를 넘은 랭크는 SIGXFSZ로 강제 종료됩니다"
            ),
            say!(
                lang,
                "`ulimit -f unlimited` in the shell that starts the job",
                "작업을 시작하는 셸에서 `ulimit -f unlimited`를 실행하세요"
            ),
        );
    }
}

fn limit_text(limit: Option<u64>, lang: Lang) -> String {
    match limit {
        Some(limit) => say!(lang, "{limit}", "{limit}개"),
        None => say!(lang, "unlimited", "제한 없음"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::tests::{found, job, noted};
    use paceline_gpu::host::recorded::Recorded;

    fn sound() -> Limits {
        Limits {
            files: [Some(1 << 20); 2],
            ..Limits::default()
        }
    }

    fn check(limits: Limits, ranks: usize, nodes: usize, expect: &[&str]) {
        let notes = noted(|notes| judge(&limits, &job(ranks, nodes), 4, notes));
        assert_eq!(found(&notes), expect, "{limits:?} {ranks} {nodes}");
    }

    #[test]
    fn a_sound_machine_has_nothing_said_about_it() {
        check(sound(), 8, 4, &[]);
        check(Limits::default(), 8, 4, &[]);
    }

    #[test]
    fn files_are_counted_for_the_hungriest_process() {
        assert_eq!(files_needed(1, 1), 128 + 8);
        assert_eq!(files_needed(8, 1), 128 + 50);
        assert_eq!(files_needed(8, 4), 128 + 32 + 240);
        let files = |soft, hard| Limits {
            files: [Some(soft), Some(hard)],
            ..sound()
        };
        check(files(1024, 1024), 8, 4, &[]);
        check(
            files(1024, 4096),
            8,
            16,
            &["warning: open files: `ulimit -n 1360`"],
        );
        check(
            files(256, 4096),
            8,
            16,
            &["error: open files: `ulimit -n 1360`"],
        );
        check(
            files(256, 300),
            8,
            16,
            &["error: open files: the hard limit is 300"],
        );
    }

    #[test]
    fn tasks_are_limited_by_the_container_and_for_users_but_root() {
        let group = Limits {
            group_tasks: Some((200, 60)),
            ..sound()
        };
        check(group.clone(), 4, 1, &[]);
        check(
            group,
            8,
            1,
            &["warning: processes: `docker run --pids-limit 236`"],
        );
        let user = Limits {
            tasks: Some(100),
            ..sound()
        };
        check(user.clone(), 8, 1, &["warning: processes: `ulimit -u 176`"]);
        let root = Limits {
            is_root: true,
            ..user
        };
        check(root, 8, 1, &[]);
    }

    #[test]
    fn locked_memory_matters_where_there_is_rdma() {
        let locked = Limits {
            locked_bytes: Some(64 << 10),
            ..sound()
        };
        check(locked.clone(), 1, 1, &[]);
        let rdma = Limits {
            rdma: vec!["mlx5_0".into()],
            ..locked
        };
        check(
            rdma,
            1,
            1,
            &["warning: locked memory: `ulimit -l unlimited`"],
        );
    }

    #[test]
    fn a_limit_of_file_sizes_holds_for_shared_memory() {
        let limits = Limits {
            file_bytes: Some(1 << 20),
            ..sound()
        };
        check(limits, 1, 1, &["error: file size: `ulimit -f unlimited`"]);
    }

    #[test]
    fn the_containers_tasks_are_read_from_the_group() {
        let recorded = Recorded::new(&[
            ("/proc/self/cgroup", "0::/\n"),
            ("/sys/fs/cgroup/pids.max", "512\n"),
            ("/sys/fs/cgroup/pids.current", "7\n"),
            ("/sys/class/infiniband/mlx5_1/x", ""),
        ]);
        let limits = read(&recorded.host());
        assert_eq!(limits.group_tasks, Some((512, 7)));
        assert_eq!(limits.rdma, ["mlx5_1"]);
        let unlimited = Recorded::new(&[("/sys/fs/cgroup/pids.max", "max\n")]);
        assert_eq!(read(&unlimited.host()).group_tasks, None);
    }
}
