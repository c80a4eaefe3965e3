//! The launcher as a process of its own: signalled, killed, and read from outside.

mod support;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use paceline_rendezvous::env::{WorkerEnv, worker_vars};
use rustix::process::{Pid, Signal};
use support::launcher::{Launcher, PROMPTLY};
use support::{PROBE, Watched, lines, numbers};

#[test]
fn each_stopping_signal_is_forwarded_and_becomes_the_exit_code() {
    for (signal, name) in [
        (Signal::TERM, "TERM"),
        (Signal::INT, "INT"),
        (Signal::HUP, "HUP"),
        (Signal::QUIT, "QUIT"),
    ] {
        let script = format!(
            "trap 'echo got {name}; exit 0' {name}; echo ready; while :; do sleep 0.05; done"
        );
        let mut launcher = Launcher::start(&["--nproc", "2"], &script);
        let ready = [launcher.line(), launcher.line()];
        assert!(
            ready.contains(&"[rank 0] ready".to_owned())
                && ready.contains(&"[rank 1] ready".to_owned())
        );
        launcher.signal(signal);
        let (status, out, err) = launcher.end(PROMPTLY);
        assert_eq!(status.code(), Some(128 + signal.as_raw()), "{err}");
        for rank in 0..2 {
            assert!(
                out.contains(&format!("[rank {rank}] got {name}\n")),
                "{out}"
            );
        }
        assert!(
            err.contains("left behind: []\nnotes: []\n") && !err.contains("failure:"),
            "{err}"
        );
    }
}

#[test]
fn a_second_signal_kills_at_once() {
    let script = "trap 'echo refused' TERM; echo ready; while :; do sleep 0.05; done";
    let mut launcher = Launcher::start(&["--grace-ms", "60000"], script);
    assert_eq!(launcher.line(), "[rank 0] ready");
    launcher.signal(Signal::TERM);
    assert_eq!(launcher.line(), "[rank 0] refused");
    launcher.signal(Signal::TERM);
    let (status, _, err) = launcher.end(PROMPTLY);
    assert_eq!(status.code(), Some(143), "{err}");
}

#[test]
fn a_rank_that_refuses_to_stop_is_killed_after_the_grace() {
    let script = "trap '' TERM; echo ready; while :; do sleep 0.05; done";
    let mut launcher = Launcher::start(&["--grace-ms", "300"], script);
    assert_eq!(launcher.line(), "[rank 0] ready");
    launcher.signal(Signal::TERM);
    let (status, _, err) = launcher.end(PROMPTLY);
    assert_eq!(status.code(), Some(143), "{err}");
    assert!(
        err.contains("did not end within 0.3 s of SIGTERM and was killed"),
        "{err}"
    );
}

#[test]
fn a_signal_that_was_ignored_before_stays_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let go = folder.path().join("go");
    let mut command = Command::new("env");
    command.args(["--ignore-signal=HUP", PROBE, "launch"]);
    let script = format!(
        "echo ready; until [ -e {} ]; do sleep 0.02; done; echo done",
        go.display()
    );
    let mut launcher = Launcher::start_command(command, &[], &script);
    assert_eq!(launcher.line(), "[rank 0] ready");
    launcher.signal(Signal::HUP);
    std::fs::write(&go, "").unwrap();
    assert_eq!(launcher.line(), "[rank 0] done");
    let (status, _, err) = launcher.end(PROMPTLY);
    assert_eq!(status.code(), Some(0), "{err}");
}

#[test]
fn a_launcher_that_is_killed_leaves_nothing() {
    // In the rank's group, and in a session of its own.
    let script = "sleep 60 & a=$!; setsid sleep 60 & echo pids $$ $a $!; wait";
    let mut launcher = Launcher::start(&["--nproc", "3"], script);
    let pids: Vec<_> = (0..3)
        .flat_map(|_| numbers(&launcher.line()[8..]))
        .collect();
    assert_eq!(pids.len(), 9);
    let mut watched: Vec<_> = pids.into_iter().map(Watched::new).collect();
    watched.push(watchdog(&launcher));
    assert!(watched.iter().all(Watched::is_alive));
    launcher.signal(Signal::KILL);
    for process in &watched {
        assert!(
            process.ends_within(PROMPTLY),
            "process {} outlives its launcher",
            process.pid
        );
    }
}

#[test]
fn a_launcher_inside_a_job_goes_with_it() {
    // The inner rank and its child sit in groups and sessions that the outer launcher has never heard of.
    let script = "exec $PROBE launch -- sh -c 'setsid sleep 60 & echo pids $$ $!; wait'";
    let mut launcher = Launcher::start(&[], script);
    let line = launcher.line();
    let inner: Vec<_> = numbers(line.trim_start_matches("[rank 0] "))
        .into_iter()
        .map(Watched::new)
        .collect();
    assert_eq!(inner.len(), 2, "{line}");
    assert!(inner.iter().all(Watched::is_alive));
    launcher.signal(Signal::KILL);
    assert!(inner.iter().all(|process| process.ends_within(PROMPTLY)));
}

#[test]
fn a_launcher_killed_after_its_watchdog_still_takes_its_ranks_along() {
    let mut launcher = Launcher::start(&["--nproc", "2"], "echo pid $$; exec sleep 60");
    let ranks = [0, 1].map(|_| Watched::new(numbers(&launcher.line()[8..])[0]));
    let watchdog = watchdog(&launcher);
    rustix::process::kill_process(Pid::from_raw(watchdog.pid).unwrap(), Signal::KILL).unwrap();
    assert!(watchdog.ends_within(PROMPTLY));
    assert!(ranks.iter().all(Watched::is_alive));
    launcher.signal(Signal::KILL);
    assert!(ranks.iter().all(|rank| rank.ends_within(PROMPTLY)));
}

#[test]
fn a_job_that_fails_to_start_half_way_takes_back_what_it_has_started() {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 100; exec \"$@\"", "sh", PROBE, "launch"]);
    let mut launcher = Launcher::start_command(command, &["--nproc", "64"], "sleep 60");
    let (status, _, err) = launcher.end(PROMPTLY);
    assert_eq!(status.code(), Some(3), "{err}");
    assert!(err.contains("see `ulimit -n`"), "{err}");
    let rank = err
        .split_once("error: rank ")
        .and_then(|(_, rest)| rest.split_once(' '))
        .map(|(rank, _)| rank);
    assert!(
        rank.is_some_and(|rank| rank != "0"),
        "some ranks were running: {err}"
    );
    let entry_start = format!("PACELINE_LAUNCHER={}:", launcher.process.id());
    let is_marked = |environ: &Vec<u8>| {
        String::from_utf8_lossy(environ)
            .split('\0')
            .any(|entry| entry.starts_with(&entry_start))
    };
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let environments =
        processes.filter_map(|entry| std::fs::read(entry.path().join("environ")).ok());
    assert_eq!(environments.filter(is_marked).count(), 0);
}

#[test]
fn a_killed_watchdog_costs_the_job_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let go = folder.path().join("go");
    let script = format!(
        "echo ready; until [ -e {} ]; do sleep 0.02; done",
        go.display()
    );
    let mut launcher = Launcher::start(&[], &script);
    assert_eq!(launcher.line(), "[rank 0] ready");
    let watchdog = watchdog(&launcher);
    rustix::process::kill_process(Pid::from_raw(watchdog.pid).unwrap(), Signal::KILL).unwrap();
    std::fs::write(&go, "").unwrap();
    let (status, _, err) = launcher.end(PROMPTLY);
    assert_eq!(status.code(), Some(0), "{err}");
}

/// The launcher's watchdog, once it has given itself its name.
fn watchdog(launcher: &Launcher) -> Watched {
    let text = |pid: i32, file: &str| {
        std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default()
    };
    let parent = format!("\nPPid:\t{}\n", launcher.process.id());
    let is_it = |pid: &i32| {
        text(*pid, "comm") == "paceline/guard\n" && text(*pid, "status").contains(&parent)
    };
    let deadline = Instant::now() + PROMPTLY;
    while Instant::now() < deadline {
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        if let Some(pid) = pids.find(is_it) {
            return Watched::new(pid);
        }
    }
    panic!("no watchdog after {PROMPTLY:?}");
}

#[test]
fn each_rank_gets_the_whole_environment_contract() {
    let logs = tempfile::tempdir().unwrap();
    let flags = ["--nproc", "2", "--log-dir", logs.path().to_str().unwrap()];
    let (status, _, err) = Launcher::start(&flags, "exec env").end(PROMPTLY);
    assert_eq!(status.code(), Some(0), "{err}");
    let ranks = [0, 1].map(|rank| rank_of(&support::log(logs.path(), rank)));
    for (rank, env) in ranks.iter().enumerate() {
        assert_eq!(
            (env.rank, env.local_rank, env.world, env.local_world),
            (rank, rank, 2, 2)
        );
        assert_eq!(
            (env.node_rank, env.node_count, env.restart_count),
            (0, 1, 0)
        );
        assert_eq!((env.agent_store, &*env.master_addr), (false, "127.0.0.1"));
        assert!(
            env.store
                .as_deref()
                .is_some_and(|store| store.starts_with("127.0.0.1:")),
            "{:?}",
            env.store
        );
        assert!(env.page_fd.is_some() && env.token_is_secret && env.master_port != 0);
        assert_eq!(
            (&env.store, env.master_port),
            (&ranks[0].store, ranks[0].master_port)
        );
        assert!(env.token == ranks[0].token);
    }
}

/// Reads back what `env` printed, and checks that it has every variable of the contract.
fn rank_of(log: &Path) -> WorkerEnv {
    let printed = lines(log);
    let get = |name: &str| {
        let value = printed
            .iter()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        value.map(str::to_owned)
    };
    let env = WorkerEnv::from_lookup(&get).expect("a whole environment");
    let contract = worker_vars(&env);
    for name in [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "ROLE_RANK",
        "GROUP_RANK",
    ] {
        assert!(
            contract.iter().any(|(key, _)| key == name),
            "{name} belongs to the contract"
        );
    }
    for (name, value) in contract {
        assert_eq!(get(&name), Some(value), "{name}");
    }
    for name in [
        "OMP_NUM_THREADS",
        "RAYON_NUM_THREADS",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ] {
        assert!(get(name).is_some(), "{name}");
    }
    env
}

#[test]
fn two_ranks_that_do_nothing_take_next_to_no_time() {
    let limit = Duration::from_millis(500);
    let mut best = Duration::MAX;
    for _ in 0..50 {
        if best < limit {
            break;
        }
        let mut launcher = Launcher::start(&["--nproc", "2"], "exit 0");
        let (status, _, err) = launcher.end(PROMPTLY);
        assert_eq!(status.code(), Some(0), "{err}");
        best = best.min(launcher.started.elapsed());
    }
    assert!(best < limit, "{best:?}");
}
