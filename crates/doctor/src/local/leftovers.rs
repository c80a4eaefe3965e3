//! Processes of jobs: those that an earlier one left behind, and those of one that still runs.

use std::collections::BTreeMap;

use paceline_gpu::host::Host;
use paceline_gpu::process::{Environ, Stat};

use crate::finding::{Notes, count, plain};

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
    let mut sheet = notes.sheet("other jobs");
    let Some(jobs) = jobs else {
        sheet.fact("a process does not let its variables be read, so nothing is known");
        return;
    };
    let running = jobs.iter().filter(|job| job.launcher_lives).count();
    sheet.fact(match (running, jobs.len() - running) {
        (0, 0) => "none, and nothing is left of earlier ones".to_owned(),
        (running, 0) => format!("{} of Paceline's", count(running, "running job")),
        (running, left) => format!(
            "{} of Paceline's, and processes of {} whose launcher is gone",
            count(running, "running job"),
            count(left, "job")
        ),
    });
    for job in jobs {
        let processes = count(job.processes.len(), "process");
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
                format!(
                    "another job runs here: launcher {launcher} with {processes} ({names}{more})"
                ),
                "both share cores, memory and devices",
                format!("wait for it, or end it with `kill {launcher}`"),
            );
        } else {
            let pids = job.processes.iter().map(|(pid, _)| pid.to_string());
            let pids: Vec<String> = pids.collect();
            sheet.warning(
                format!("{processes} of an earlier job still run ({names}{more}); launcher {launcher} is gone"),
                "they hold memory, devices and ports that the next job wants",
                format!("`kill {}`, and `kill -9` for those that stay", pids.join(" ")),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::tests::found;
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
        let mut notes = Notes::default();
        judge(Some(&jobs), &mut notes);
        let expect = [
            "warning: other jobs: `kill 21`",
            "note: other jobs: wait for it",
            "warning: other jobs: `kill 22`",
        ];
        assert_eq!(found(&notes), expect);
    }
}
