//! Jobs that are asked to stop: by signals to a launcher, to a rank alone, and to one of several nodes.

mod support;

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use support::launcher::{Launcher, PROMPTLY};
use support::node::{Fleet, Node, SOON, STAY};
use support::{PROBE, numbers};

/// Ends the launcher under `flags` with ranks that run `words` of the helper program, once rank 0 looks at the page.
fn asked(flags: &[&str], words: &str, signals: &[Signal]) -> (Option<i32>, String, String) {
    // Deaf to the signals themselves: only the word on the job page reaches them.
    let script = format!("trap '' TERM USR1; exec $PROBE worker {words}");
    let mut launcher = Launcher::start(flags, &script);
    assert_eq!(launcher.line(), "[rank 0] polls");
    for signal in signals {
        launcher.signal(*signal);
    }
    let (status, out, err) = launcher.end(PROMPTLY);
    (status.code(), out, err)
}

#[test]
fn ranks_that_look_at_the_page_stop_in_one_step_which_is_said() {
    for (signal, name) in [(Signal::TERM, "SIGTERM"), (Signal::USR1, "SIGUSR1")] {
        for words in ["exit=0", &format!("exit={}", 128 + signal.as_raw())] {
            let words = format!("poll until-asked stopped=7 {words}");
            let (code, _, err) = asked(&[], &words, &[signal]);
            assert_eq!(code, Some(128 + signal.as_raw()), "{err}");
            let said = format!("stopped after step 7 by {name}\nleft behind: []\nnotes: []\n");
            assert!(err.contains(&said) && !err.contains("failure:"), "{err}");
            assert!(
                err.contains(&format!("{name}: stopping after this step")),
                "{err}"
            );
        }
    }
}

#[test]
fn a_job_that_was_done_before_it_looked_is_done() {
    for signal in [Signal::TERM, Signal::USR1] {
        let (code, _, err) = asked(&[], "poll until-asked", &[signal]);
        assert_eq!(code, Some(0), "{err}");
    }
}

#[test]
fn a_rank_that_fails_to_save_is_a_failure_and_nothing_starts_again() {
    for signal in [Signal::TERM, Signal::USR1] {
        let words = "poll until-asked exit=9";
        let (code, out, err) = asked(&["--max-restarts", "3"], words, &[signal]);
        assert_eq!(code, Some(9), "{err}");
        assert!(
            err.contains("failure: rank 0 ") && !err.contains("restart"),
            "{err}"
        );
        assert!(!out.contains("polls"), "{out}");
    }
}

#[test]
fn a_notice_that_comes_several_times_and_the_end_that_follows_leave_time_to_save() {
    // Schedulers send the notice to every process, and SIGTERM when the time is over.
    let signals = [Signal::USR1, Signal::USR1, Signal::USR1, Signal::TERM];
    let (code, _, err) = asked(&[], "poll until-asked sleep=300 stopped=9,10", &signals);
    assert_eq!(code, Some(138), "{err}");
    assert!(err.contains("\nstopped after step 9 by SIGUSR1\n"), "{err}");
}

#[test]
fn ranks_that_do_not_come_to_a_step_boundary_are_killed_after_the_grace_or_by_a_second_signal() {
    let words = "poll until-asked sleep=60000";
    let (code, _, err) = asked(&["--grace-ms", "300"], words, &[Signal::TERM]);
    assert_eq!(code, Some(143), "{err}");
    let slow = "did not end within 0.3 s of SIGTERM and was killed";
    assert!(err.contains(slow), "{err}");
    let (code, _, err) = asked(
        &["--grace-ms", "60000"],
        words,
        &[Signal::INT, Signal::TERM],
    );
    assert!([Some(130), Some(143)].contains(&code), "{err}");
}

#[test]
fn a_signal_to_a_rank_alone_is_a_stop_when_all_ranks_say_so() {
    let script = "exec $PROBE worker poll stopped=5,15 exit=143";
    let mut launcher = Launcher::start(&["--nproc", "2", "--max-restarts", "3"], script);
    let (status, _, err) = launcher.end(PROMPTLY);
    assert_eq!(status.code(), Some(143), "{err}");
    assert!(err.contains("stopped after step 5 by SIGTERM\n"), "{err}");
    assert!(
        !err.contains("failure:") && !err.contains("restart"),
        "{err}"
    );
}

#[test]
fn other_programs_get_the_signal_as_it_is_and_the_launcher_waits_for_them() {
    // What a rank has started does not know the signal, and lives.
    let script = "sleep 60 & trap 'kill -0 $!; echo got USR1: $?' USR1
        trap 'echo got USR2' USR2; trap 'exit 0' ALRM; echo pid $$; while :; do sleep 0.02; done";
    let run = |signals: &[(Signal, &str)]| {
        let mut launcher = Launcher::start(&["--nproc", "2"], script);
        let ranks = [0, 1].map(|_| numbers(&launcher.line()[8..])[0]);
        for (signal, line) in signals {
            launcher.signal(*signal);
            let mut lines = [launcher.line(), launcher.line()];
            lines.sort();
            assert_eq!(lines, [0, 1].map(|rank| format!("[rank {rank}] {line}")));
        }
        for rank in ranks {
            let rank = Pid::from_raw(rank).expect("a pid");
            rustix::process::kill_process(rank, Signal::ALARM).expect("it lives");
        }
        let (status, _, err) = launcher.end(PROMPTLY);
        assert!(
            err.contains("left behind: []") && !err.contains("failure:"),
            "{err}"
        );
        (status.code(), err)
    };
    let (notice, other) = ((Signal::USR1, "got USR1: 0"), (Signal::USR2, "got USR2"));
    assert_eq!(run(&[other]).0, Some(0), "SIGUSR2 asks for nothing");
    let (code, err) = run(&[notice, other, notice]);
    assert_eq!(code, Some(138), "{err}");
    assert!(err.contains("SIGUSR1: passed on to the ranks\n"), "{err}");
    assert!(err.contains("\nstopped by SIGUSR1\n"), "{err}");
}

#[test]
fn a_program_that_does_not_know_the_notice_is_ended_by_it_and_not_started_again() {
    let mut launcher = Launcher::start(&["--max-restarts", "3"], "echo ready; exec sleep 60");
    assert_eq!(launcher.line(), "[rank 0] ready");
    launcher.signal(Signal::USR1);
    let (status, _, err) = launcher.end(PROMPTLY);
    assert_eq!(status.code(), Some(138), "{err}");
    assert!(
        !err.contains("failure:") && !err.contains("restart"),
        "{err}"
    );
}

#[test]
fn a_signal_that_is_not_to_be_handled_does_what_it_does_to_any_program() {
    let script = "echo pid $$; exec sleep 60";
    let mut launcher = Launcher::start(&["--signals", "SIGTERM"], script);
    let rank = support::Watched::new(numbers(&launcher.line()[8..])[0]);
    launcher.signal(Signal::USR1);
    let (status, _, _) = launcher.end(PROMPTLY);
    assert_eq!(status.code(), None);
    assert!(rank.ends_within(PROMPTLY));
}

#[test]
fn after_a_failure_ranks_that_would_wait_for_their_step_boundary_are_not_waited_for() {
    for restarts in ["0", "1"] {
        let script = "case $RANK in
            0) until [ -e $READY ]; do sleep 0.02; done; exit 3;;
            *) trap '' TERM; $PROBE worker poll; touch $READY; exec sleep 60;;
        esac";
        let folder = tempfile::tempdir().expect("a folder");
        let ready = folder.path().join("ready");
        let script = format!("READY={}; {script}", ready.display());
        let flags = [
            "--nproc",
            "2",
            "--grace-ms",
            "60000",
            "--max-restarts",
            restarts,
        ];
        let mut launcher = Launcher::start(&flags, &script);
        let (status, _, err) = launcher.end(PROMPTLY);
        assert_eq!(status.code(), Some(3), "{err}");
    }
}

#[test]
fn before_a_restart_the_ranks_have_the_whole_grace() {
    let script = "case $RANK$TORCHELASTIC_RESTART_COUNT in
        00) until [ -e $READY ]; do sleep 0.02; done; exit 3;;
        10) trap 'sleep 0.3; echo saved; exit 0' TERM; touch $READY; while :; do sleep 0.02; done;;
    esac";
    let run = |grace: &str, script: &str| {
        let folder = tempfile::tempdir().expect("a folder");
        let ready = folder.path().join("ready");
        let script = format!("READY={}; {script}", ready.display());
        let flags = ["--nproc", "2", "--grace-ms", grace, "--max-restarts", "1"];
        let (status, out, err) = Launcher::start(&flags, &script).end(PROMPTLY);
        assert_eq!(status.code(), Some(0), "{err}");
        (out, err)
    };
    let (out, err) = run("60000", script);
    assert!(out.contains("[rank 1] saved"), "{out}{err}");
    let (out, err) = run("300", &script.replace("sleep 0.3; echo saved; exit 0", ":"));
    assert!(
        err.contains("rank 1 ") && err.contains("within 0.3 s"),
        "{out}{err}"
    );
}

/// Ranks of several nodes that stop in one step: who is asked tells the others by a file, where ranks have a collective.
/// In a round of one node they stay.
fn agreeing(folder: &tempfile::TempDir) -> String {
    let file = folder.path().join("asked");
    format!(
        "[ $WORLD_SIZE = 1 ] && {{ {STAY}; }}; exec {PROBE} worker poll until-asked={} stopped=7",
        file.display()
    )
}

fn all_poll(nodes: &mut [Node]) {
    for node in nodes {
        node.expect("polls", SOON);
    }
}

fn stopped(node: &mut Node, code: i32, said: &str) {
    let (ended, err) = node.end(SOON);
    assert_eq!(ended, Some(code), "{err}");
    assert!(err.contains(said) && !err.contains("failure:"), "{err}");
}

#[test]
fn all_nodes_save_before_the_one_that_is_to_go_leaves_and_the_others_go_on() {
    for leaver in [1, 0] {
        let folder = tempfile::tempdir().expect("a folder");
        let fleet = Fleet::new("1:2");
        let mut nodes = fleet.nodes(&["a", "b"], &[], &agreeing(&folder));
        all_poll(&mut nodes);
        nodes[leaver].signal(Signal::TERM);
        stopped(&mut nodes[leaver], 143, "stopped after step 7 by SIGTERM\n");
        let stays = &mut nodes[1 - leaver];
        stays.expect("up 0 of 1", SOON);
        stays.signal(Signal::TERM);
        assert_eq!(stays.end(SOON).0, Some(143));
    }
}

#[test]
fn ranks_save_before_a_round_with_a_node_that_has_come() {
    let fleet = Fleet::new("1:2");
    let script = format!(
        "[ $WORLD_SIZE = 2 ] && {{ {STAY}; }}; {PROBE} worker poll until-asked= stopped=7 && echo saved"
    );
    let mut a = fleet.node("a", &[], &script);
    a.expect("polls", SOON);
    let mut b = fleet.node("b", &[], &script);
    a.expect("saved", SOON);
    a.expect("up 0 of 2", SOON);
    b.expect("up 1 of 2", SOON);
    a.expect_err("a node has joined", SOON);
}

#[test]
fn ranks_that_save_for_a_node_that_has_come_end_at_once_when_another_is_lost() {
    let folder = tempfile::tempdir().expect("a folder");
    let fleet = Fleet::new("1:3");
    let file = folder.path().join("asked");
    // They never come to the step that they would agree on.
    let script = format!(
        "exec {PROBE} worker poll until-asked={} until-revoked",
        file.display()
    );
    let flags = ["--grace-ms", "60000"];
    let mut a = fleet.node("a", &flags, &script);
    a.waits_for_others();
    let mut b = fleet.node("b", &flags, &script);
    a.expect("polls", SOON);
    b.expect("polls", SOON);
    let mut c = fleet.node("c", &flags, &script);
    let deadline = Instant::now() + SOON;
    while !file.exists() {
        assert!(Instant::now() < deadline, "nobody was asked to save");
        std::thread::sleep(Duration::from_millis(2));
    }
    b.signal(Signal::KILL);
    a.expect("polls", SOON);
    c.expect("polls", SOON);
}

#[test]
fn where_nodes_cannot_change_all_stop_when_one_is_to_go() {
    for leaver in [1, 0] {
        let folder = tempfile::tempdir().expect("a folder");
        let fleet = Fleet::new("2");
        let node = |host, rank| fleet.node(host, &["--node-rank", rank], &agreeing(&folder));
        let mut nodes = [node("a", "0"), node("b", "1")];
        all_poll(&mut nodes);
        nodes[leaver].signal(Signal::TERM);
        for node in &mut nodes {
            stopped(node, 143, "stopped after step 7 by SIGTERM\n");
        }
    }
}

#[test]
fn a_notice_to_one_node_stops_the_whole_job() {
    for asked in [0, 1] {
        let folder = tempfile::tempdir().expect("a folder");
        let fleet = Fleet::new("1:2");
        let mut nodes = fleet.nodes(&["a", "b"], &["--max-restarts", "3"], &agreeing(&folder));
        all_poll(&mut nodes);
        nodes[asked].signal(Signal::USR1);
        for node in &mut nodes {
            stopped(node, 138, "stopped after step 7 by SIGUSR1\n");
        }
    }
}

#[test]
fn a_failure_after_a_notice_to_one_node_ends_the_job_on_all() {
    let folder = tempfile::tempdir().expect("a folder");
    let fleet = Fleet::new("1:2");
    let script = agreeing(&folder).replace("stopped=7", "exit=9");
    let mut nodes = fleet.nodes(&["a", "b"], &["--max-restarts", "3"], &script);
    all_poll(&mut nodes);
    nodes[1].signal(Signal::USR1);
    for node in &mut nodes {
        let (code, err) = node.end(SOON);
        assert_eq!(code, Some(9), "{err}");
        assert!(
            err.contains("failure: rank ") && !err.contains("restart 1"),
            "{err}"
        );
    }
}
