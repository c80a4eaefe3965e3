//! Processes as they were left behind, and as they were not.

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
    let inside = |recorded: Recorded| recorded.linked(&[("/proc/self/ns/pid", "pid:[4026532201]")]);
    check(inside(target("/dev/nvidia0")), PID, None);
    let other = Gap::other("another process has this number here");
    check(inside(target("/dev/null")), PID, Some(other));
    check(inside(LEFT.recorded()), PID, None);
}
