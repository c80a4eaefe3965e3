//! Processes of jobs: those that an earlier one left behind, and those of one that still runs.

use std::collections::BTreeMap;

use paceline_gpu::host::Host;
use paceline_gpu::process::{Environ, Stat};
use paceline_words::{count, say};

use crate::checks;
use crate::finding::{Notes, plain};

/// Processes of one job on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeftoverJob {
    pub(crate) launcher: u32,
    pub(crate) launcher_lives: bool,
    /// Pid and name.
    pub(crate) processes: Vec<(u32, String)>,
}

const PROCESSES_MAX: usize = 65_536;
const NAMED_MAX: usize = 12;

pub(crate) fn read(host: &Host<'_>) -> Vec<LeftoverJob> {
    let mut jobs: BTreeMap<(u32, u64), Vec<(u32, String)>> = BTreeMap::new();
    let own = std::process::id();
    for pid in host.processes(PROCESSES_MAX) {
        // Another user's environment cannot be read, and a process that has ended has none.
        let launcher = Environ::read(host, pid).and_then(|environ| environ.launcher());
        let Some(launcher) = launcher.filter(|_| pid != own) else {
            continue;
        };
        let name = host.text(&format!("/proc/{pid}/comm")).unwrap_or_default();
        let members = jobs.entry(launcher).or_default();
        members.push((pid, plain(name.trim())));
    }
    jobs.into_iter()
        .map(|((launcher, started), mut processes)| {
            processes.sort();
            LeftoverJob {
                launcher,
                launcher_lives: Stat::read(host, launcher)
                    .is_some_and(|stat| stat.started_ticks == started),
                processes,
            }
        })
        .collect()
}

/// `jobs` is nothing where looking took too long.
pub(crate) fn judge(jobs: Option<&[LeftoverJob]>, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::OTHER_JOBS);
    let Some(jobs) = jobs else {
        sheet.fact(say!(
            lang,
            "a process does not let its variables be read, so nothing is known",
            "변수를 읽을 수 없는 프로세스가 있어 알 수 없음"
        ));
        return;
    };
    let running = jobs.iter().filter(|job| job.launcher_lives).count();
    let left = jobs.len() - running;
    let running_jobs = count(lang, running, "running job", "실행 중인 작업");
    let left_jobs = count(lang, left, "job", "작업");
    sheet.fact(match (running, left) {
        (0, 0) => say!(
            lang,
            "none, and nothing is left of earlier ones",
            "없음, 이전 작업이 남긴 것도 없음"
        ),
        (_, 0) => say!(
            lang,
            "{running_jobs} of Paceline's",
            "Paceline의 {running_jobs}"
        ),
        _ => say!(
            lang,
            "{running_jobs} of Paceline's, and processes of {left_jobs} whose launcher is gone",
            "Paceline의 {running_jobs}, 런처가 사라지고 프로세스만 남은 {left_jobs}"
        ),
    });
    for job in jobs {
        let processes = count(lang, job.processes.len(), "process", "프로세스");
        let names = job.processes.iter().take(NAMED_MAX);
        let names: Vec<String> = names.map(|(pid, name)| format!("{name} {pid}")).collect();
        let more = match job.processes.len() > NAMED_MAX {
            true => ", ...",
            false => "",
        };
        let names = names.join(", ");
        let launcher = job.launcher;
        if job.launcher_lives {
            sheet.note(
                say!(
                    lang,
                    "another job runs here: launcher {launcher} with {processes} ({names}{more})",
                    "다른 작업이 실행 중: 런처 {launcher}, {processes}({names}{more})"
                ),
                say!(
                    lang,
                    "both share cores, memory and devices",
                    "두 작업이 코어, 메모리, 장치를 나눠 쓰게 됩니다"
                ),
                say!(
                    lang,
                    "wait for it, or end it with `kill {launcher}`",
                    "끝나기를 기다리거나 `kill {launcher}` 명령으로 끝내세요"
                ),
            );
        } else {
            let pids = job.processes.iter().map(|(pid, _)| pid.to_string());
            let pids = pids.collect::<Vec<_>>().join(" ");
            sheet.warning(
                say!(
                    lang,
                    "{processes} of an earlier job still run ({names}{more}); launcher {launcher} is gone",
                    "이전 작업의 {processes}가 아직 실행 중({names}{more}); 사라진 런처: {launcher}"
                ),
                say!(
                    lang,
                    "they hold memory, devices and ports that the next job wants",
                    "다음 작업에 필요한 메모리, 장치, 포트를 잡고 있습니다"
                ),
                say!(
                    lang,
                    "`kill {pids}`, and `kill -9` for those that stay",
                    "`kill {pids}` 명령으로 끝내고, 남는 것은 `kill -9`로 끝내세요"
                ),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::tests::{found, noted};
    use paceline_gpu::host::recorded::Recorded;

    #[test]
    fn jobs_are_told_apart_by_their_launcher_and_whether_it_lives() {
        let stat = |started: u64| {
            format!("7 (a b) (c) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {started} 0 0")
        };
        let recorded = Recorded::new(&[
            ("/proc/7/stat", &stat(100)),
            ("/proc/20/environ", "A=1\0PACELINE_LAUNCHER=7:100\0"),
            ("/proc/20/comm", "rank\n"),
            ("/proc/21/environ", "PACELINE_LAUNCHER=7:99\0"),
            ("/proc/22/environ", "PACELINE_LAUNCHER=7:100,9:5\0"),
            ("/proc/23/environ", "PACELINE_LAUNCHER=\0"),
            ("/proc/24/environ", "PACELINE_LAUNCHER=x:y,\0"),
            ("/proc/25/environ", "XPACELINE_LAUNCHER=7:1\0"),
            ("/proc/self/environ", "PACELINE_LAUNCHER=1:1\0"),
        ]);
        let jobs = read(&recorded.host());
        let short: Vec<(u32, bool, Vec<u32>)> = jobs
            .iter()
            .map(|job| {
                let pids = job.processes.iter().map(|(pid, _)| *pid).collect();
                (job.launcher, job.launcher_lives, pids)
            })
            .collect();
        assert_eq!(
            short,
            [
                (7, false, vec![21]),
                (7, true, vec![20]),
                (9, false, vec![22])
            ]
        );
        let notes = noted(|notes| judge(Some(&jobs), notes));
        let expect = [
            "warning: other jobs: `kill 21`",
            "note: other jobs: wait for it",
            "warning: other jobs: `kill 22`",
        ];
        assert_eq!(found(&notes), expect);
    }
}
