//! What is known about a process that holds a device, and whether it was left behind.

use std::io;

use super::driver::is_in_container;
use super::{CHARS_MAX, line, text};
use crate::host::{Host, plain};
use crate::process::{Environ, Stat};
use crate::snapshot::{Gap, Holder, Reading};

/// Descriptors that are looked at for one of the device.
const DESCRIPTORS_MAX: usize = 65_536;
/// Control groups, and what the kernel tells about signals and namespaces.
const FILE_BYTES_MAX: u64 = 16 << 10;
/// Set by torchrun for the processes that it starts.
const ELASTIC: &str = "TORCHELASTIC_RUN_ID";
/// NVIDIA's own that hold devices without a parent, and displays: 15 bytes of their names.
const DAEMONS: [&str; 6] = [
    "nvidia-persiste",
    "nvidia-cuda-mps",
    "nv-hostengine",
    "nv-fabricmanage",
    "Xorg",
    "Xwayland",
];
/// Programs that are the first process of a container, and are no agent that starts ranks.
const FIRST: [&str; 9] = [
    "systemd",
    "init",
    "tini",
    "docker-init",
    "dumb-init",
    "catatonit",
    "sh",
    "bash",
    "dash",
];

/// Fills in all that the driver does not tell: name, parent, whether it is an orphan, age, rank.
pub(crate) fn describe(host: &Host<'_>, holder: &mut Holder) {
    let stat = match find(host, holder.pid) {
        Ok(stat) => stat,
        Err(gap) => {
            holder.name = Reading::missing(gap.clone());
            holder.parent = Reading::missing(gap.clone());
            holder.is_orphan = Reading::missing(gap.clone());
            holder.age_s = Reading::missing(gap);
            return;
        }
    };
    let environ = Environ::read(host, holder.pid);
    let variable = |name| environ.as_ref().and_then(|environ| environ.variable(name));
    holder.rank = variable("RANK").and_then(|rank| rank.parse().ok());
    holder.age_s = age_s(host, &stat).ok_or(Gap::NotSupported).into();
    holder.is_orphan = is_orphan(host, holder.pid, &stat, environ.as_ref()).into();
    holder.parent = stat.parent.into();
    holder.name = plain(&stat.name, CHARS_MAX).into();
}

/// The process, unless the number is that of another one: in a container the driver may tell the machine's numbers.
fn find(host: &Host<'_>, pid: u32) -> Result<Stat, Gap> {
    let Some(stat) = Stat::read(host, pid) else {
        let is_hidden = pid != 0 && !host.has("/proc/1");
        return Err(match is_hidden {
            true => Gap::NoPermission,
            false => Gap::other("no such process is seen from here"),
        });
    };
    if !is_in_container(host) {
        return Ok(stat);
    }
    let folder = format!("/proc/{pid}/fd");
    let descriptors = match host.names(&folder, DESCRIPTORS_MAX) {
        Ok(descriptors) => descriptors,
        // Recorded machines seldom have them.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(stat),
        Err(error) => return Err(super::gap(&error)),
    };
    let targets = descriptors.iter();
    let mut targets = targets.filter_map(|name| host.link(&format!("{folder}/{name}")));
    // A process that has ended and was not waited for has none any more.
    match descriptors.is_empty() || targets.any(|target| target.starts_with("/dev/nvidia")) {
        true => Ok(stat),
        false => Err(Gap::other("another process has this number here")),
    }
}

fn age_s(host: &Host<'_>, stat: &Stat) -> Option<u64> {
    let up = line(host, "/proc/uptime")?;
    let up: f64 = up.split_whitespace().next()?.parse().ok()?;
    let started = stat.started_ticks / rustix::param::clock_ticks_per_second().max(1);
    (up as u64).checked_sub(started)
}

/// Whether the process that started this one is gone and nobody else looks after it.
///
/// A session is left to children by whoever makes it. A process that sits in another session than its parent and did not
/// make that session itself was therefore not started by this parent: it was given to it when its own ended. That holds for
/// every process that takes orphans in, whatever it is called: process 1, a user's service manager, the first one of a
/// container. It does not show where both share a session, as in a container whose shell started a job; there only a job
/// that names its launcher is known to have lost it.
///
/// Not counted: services and NVIDIA's own daemons, which end their parent on purpose; what was told to outlive its
/// terminal (`nohup`); and what a terminal shows now.
fn is_orphan(
    host: &Host<'_>,
    pid: u32,
    stat: &Stat,
    environ: Option<&Environ>,
) -> Result<bool, Gap> {
    let status = text(host, &format!("/proc/{pid}/status"), FILE_BYTES_MAX).unwrap_or_default();
    // In a namespace of its own a process names its launcher by other numbers.
    let is_numbered_alike =
        field(&status, "NSpid:").is_none_or(|pids| pids.split_whitespace().count() == 1);
    if is_numbered_alike && let Some((launcher, started)) = environ.and_then(Environ::launcher) {
        let found = Stat::read(host, launcher);
        return Ok(found.is_none_or(|found| found.started_ticks != started));
    }
    // Nobody that can be seen from here, as for what is run inside of a container from outside.
    if stat.parent == 0 {
        return Ok(false);
    }
    let parent = match Stat::read(host, stat.parent) {
        Some(parent) => parent,
        // The first process is seldom recorded, and hidden from users where `/proc` is mounted so.
        None if stat.parent == 1 => Stat {
            session: 1,
            ..Stat::default()
        },
        None => return Err(Gap::NoPermission),
    };
    let is_leader = stat.session == pid;
    let is_watched = stat.terminal != 0 && stat.foreground == i64::from(stat.group);
    let is_kept = is_leader
        || is_watched
        || DAEMONS.contains(&stat.name.as_str())
        || ignores_hangup(&status)
        || is_service(host, pid);
    if is_kept {
        return Ok(false);
    }
    if stat.session != parent.session && stat.session > 1 {
        return Ok(true);
    }
    // An agent that starts ranks is no shell and no mere first process.
    let has_agent = environ
        .and_then(|environ| environ.variable(ELASTIC))
        .is_some();
    Ok(stat.parent == 1 && has_agent && FIRST.contains(&parent.name.as_str()))
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    let value = status.lines().find_map(|line| line.strip_prefix(name))?;
    Some(value.trim())
}

/// Signal 1 is the lowest bit.
fn ignores_hangup(status: &str) -> bool {
    let ignored = field(status, "SigIgn:");
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask, 16).ok());
    ignored.is_some_and(|mask| mask & 1 != 0)
}

/// Whether systemd runs it as a service; a user's service manager is none, but what all of his programs lie below.
fn is_service(host: &Host<'_>, pid: u32) -> bool {
    let groups = text(host, &format!("/proc/{pid}/cgroup"), FILE_BYTES_MAX).unwrap_or_default();
    groups.lines().any(|line| {
        let name = line.rsplit('/').next().unwrap_or_default();
        name.ends_with(".service") && !name.starts_with("user@")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::recorded::Recorded;

    /// A process, and what makes it one that was left behind or not.
    struct Case {
        name: &'static str,
        parent: u32,
        group: u32,
        session: u32,
        terminal: i64,
        foreground: i64,
        status: &'static str,
        cgroup: &'static str,
        environ: &'static str,
        /// Name and session of process 1.
        first: (&'static str, u32),
    }

    const PID: u32 = 500;
    /// A rank whose launcher, process 400 in the session of shell 300, was killed.
    const LEFT: Case = Case {
        name: "python",
        parent: 1,
        group: 400,
        session: 300,
        terminal: 0,
        foreground: -1,
        status: "",
        cgroup: "0::/user.slice/user-1000.slice/session-3.scope\n",
        environ: "",
        first: ("systemd", 1),
    };

    fn stat(pid: u32, name: &str, case: [i64; 5], started: u64) -> String {
        let [parent, group, session, terminal, foreground] = case;
        format!(
            "{pid} ({name}) S {parent} {group} {session} {terminal} {foreground} 0 0 0 0 0 1 1 0 0 20 0 1 0 {started} 0 9\n"
        )
    }

    impl Case {
        fn recorded(&self) -> Recorded {
            let numbers = [
                i64::from(self.parent),
                i64::from(self.group),
                i64::from(self.session),
                self.terminal,
                self.foreground,
            ];
            let (first, session) = self.first;
            Recorded::new(&[
                ("/proc/500/stat", &stat(PID, self.name, numbers, 1000)),
                ("/proc/500/status", self.status),
                ("/proc/500/cgroup", self.cgroup),
                ("/proc/500/environ", self.environ),
                (
                    "/proc/1/stat",
                    &stat(1, first, [0, 1, i64::from(session), 0, -1], 1),
                ),
                (
                    "/proc/400/stat",
                    &stat(400, "bash", [300, 400, 300, 0, -1], 900),
                ),
                (
                    "/proc/800/stat",
                    &stat(800, "systemd", [1, 800, 800, 0, -1], 50),
                ),
                ("/proc/uptime", "60.75 1.00\n"),
            ])
        }
    }

    fn check(case: &Case, expect: Result<bool, Gap>, why: &str) {
        let recorded = case.recorded();
        let mut holder = Holder {
            pid: PID,
            ..Holder::default()
        };
        describe(&recorded.host(), &mut holder);
        assert_eq!(holder.is_orphan, expect.into(), "{why}");
    }

    #[test]
    fn a_process_in_a_session_that_its_parent_is_not_in_was_left_behind() {
        check(&LEFT, Ok(true), "given to process 1");
        check(
            &Case {
                parent: 800,
                ..LEFT
            },
            Ok(true),
            "given to a user's service manager",
        );
        check(
            &Case {
                first: ("bash", 1),
                ..LEFT
            },
            Ok(true),
            "given to the first of a container",
        );
        check(
            &Case {
                terminal: 34817,
                foreground: 300,
                ..LEFT
            },
            Ok(true),
            "its terminal shows the shell again",
        );
        check(
            &Case { group: PID, ..LEFT },
            Ok(true),
            "put into the background, and the shell ended",
        );
    }

    #[test]
    fn what_has_its_parent_was_not_left_behind() {
        check(
            &Case {
                parent: 400,
                ..LEFT
            },
            Ok(false),
            "its parent lives",
        );
        check(
            &Case { parent: 0, ..LEFT },
            Ok(false),
            "run from outside of the container",
        );
        check(
            &Case {
                session: 1,
                group: 1,
                first: ("sh", 1),
                ..LEFT
            },
            Ok(false),
            "started by the first of a container",
        );
        check(
            &Case {
                session: 0,
                group: 0,
                first: ("init", 0),
                ..LEFT
            },
            Ok(false),
            "a session from outside",
        );
        check(
            &Case {
                parent: 999,
                ..LEFT
            },
            Err(Gap::NoPermission),
            "its parent is not to be seen",
        );
    }

    #[test]
    fn what_is_meant_to_run_alone_was_not_left_behind() {
        check(
            &Case {
                session: PID,
                group: PID,
                ..LEFT
            },
            Ok(false),
            "the leader of its session",
        );
        check(
            &Case {
                terminal: 34817,
                foreground: 400,
                ..LEFT
            },
            Ok(false),
            "a terminal shows it",
        );
        check(
            &Case {
                cgroup: "0::/system.slice/mine.service\n",
                ..LEFT
            },
            Ok(false),
            "a service",
        );
        check(
            &Case {
                cgroup: "0::/user.slice/user-1.slice/user@1.service/app.slice/a.scope\n",
                ..LEFT
            },
            Ok(true),
            "a program below a user's service manager",
        );
        check(
            &Case {
                status: "SigIgn:\t0000000000001001\n",
                ..LEFT
            },
            Ok(false),
            "nohup",
        );
        check(
            &Case {
                status: "SigIgn:\t0000000001001000\n",
                ..LEFT
            },
            Ok(true),
            "other signals",
        );
        check(
            &Case {
                name: "nvidia-cuda-mps",
                ..LEFT
            },
            Ok(false),
            "NVIDIA's own",
        );
    }

    #[test]
    fn a_job_that_names_its_launcher_is_judged_by_that() {
        let lives = Case {
            environ: "RANK=3\0PACELINE_LAUNCHER=9:1,400:900\0",
            ..LEFT
        };
        check(&lives, Ok(false), "it lives");
        let gone = Case {
            environ: "PACELINE_LAUNCHER=400:901\0",
            session: PID,
            ..LEFT
        };
        check(&gone, Ok(true), "another process has its number");
        let elsewhere = Case {
            environ: gone.environ,
            status: "NSpid:\t500\t7\n",
            parent: 400,
            ..LEFT
        };
        check(
            &elsewhere,
            Ok(false),
            "its numbers are those of a container",
        );
        let same = Case {
            session: 1,
            group: 1,
            first: ("sh", 1),
            environ: "TORCHELASTIC_RUN_ID=none\0",
            ..LEFT
        };
        check(&same, Ok(true), "a shell starts no elastic ranks");
        let agent = Case {
            first: ("python", 1),
            ..same
        };
        check(&agent, Ok(false), "the first process may be the agent");
    }

    #[test]
    fn a_process_is_described() {
        let recorded = Case {
            environ: "A=1\0RANK=3\0",
            name: "a\u{1b}b",
            ..LEFT
        }
        .recorded();
        let mut holder = Holder {
            pid: PID,
            ..Holder::default()
        };
        describe(&recorded.host(), &mut holder);
        assert_eq!(holder.name, Reading::Known("a b".to_owned()));
        assert_eq!(holder.parent, Reading::Known(1));
        assert_eq!(holder.age_s, Reading::Known(50));
        assert_eq!(holder.rank, Some(3));
    }

    #[test]
    fn a_number_of_another_process_is_not_believed() {
        let check = |recorded: Recorded, pid: u32, expect: Option<Gap>| {
            let mut holder = Holder {
                pid,
                ..Holder::default()
            };
            describe(&recorded.host(), &mut holder);
            assert_eq!(holder.name.gap(), expect.as_ref());
            assert_eq!(holder.age_s.gap(), expect.as_ref());
        };
        check(LEFT.recorded(), PID, None);
        let unseen = Gap::other("no such process is seen from here");
        check(LEFT.recorded(), 77, Some(unseen.clone()));
        check(LEFT.recorded(), 0, Some(unseen));
        check(Recorded::new(&[]), 77, Some(Gap::NoPermission));
        let target = |target| LEFT.recorded().linked(&[("/proc/500/fd/7", target)]);
        check(target("/dev/null"), PID, None);
        let inside =
            |recorded: Recorded| recorded.linked(&[("/proc/self/ns/pid", "pid:[4026532201]")]);
        check(inside(target("/dev/nvidia0")), PID, None);
        let other = Gap::other("another process has this number here");
        check(inside(target("/dev/null")), PID, Some(other));
        check(inside(LEFT.recorded()), PID, None);
    }
}
