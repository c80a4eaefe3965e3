//! What the ranks print, as a user and a log reader see it.

mod support;

use std::io::Read;
use std::process::Command;
use std::time::Duration;

use support::launcher::{Launcher, PROMPTLY};
use support::{PROBE, lines, numbers};

#[test]
fn lines_of_different_ranks_are_never_mixed() {
    const LINES: usize = 400;
    let logs = tempfile::tempdir().unwrap();
    let script = "i=0; while [ $i -lt 400 ]; do
        printf '%s %s ' $RANK $i; printf '%0300d\n' $RANK; echo error $RANK $i >&2; i=$((i+1)); done";
    // Both streams into one pipe, as in a terminal.
    let mut command = Command::new("sh");
    command
        .args(["-c", "exec \"$@\" 2>&1", "sh", PROBE, "launch", "--log-dir"])
        .arg(logs.path());
    let mut launcher = Launcher::start_command(command, &["--nproc", "4"], script);
    let mut out = String::new();
    launcher.stdout.read_to_string(&mut out).unwrap();
    for rank in 0..4 {
        let prefix = format!("[rank {rank}] ");
        let seen = out.lines().filter_map(|line| line.strip_prefix(&prefix));
        let (errors, lines): (Vec<_>, Vec<_>) = seen.partition(|line| line.starts_with("error"));
        assert!(
            lines
                .into_iter()
                .eq((0..LINES).map(|i| format!("{rank} {i} {rank:0300}"))),
            "{out}"
        );
        assert!(
            errors
                .into_iter()
                .eq((0..LINES).map(|i| format!("error {rank} {i}"))),
            "{out}"
        );
        assert_eq!(
            support::lines(&logs.path().join(format!("rank{rank}.log"))).len(),
            2 * LINES
        );
    }
    let (_, rest, _) = launcher.end(PROMPTLY);
    assert_eq!(rest, "");
    let others: Vec<_> = out
        .lines()
        .filter(|line| !line.starts_with("[rank "))
        .collect();
    assert_eq!(others, ["left behind: []", "notes: []"]);
}

#[test]
fn a_stranger_that_holds_a_ranks_output_does_not_hold_up_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let go = folder.path().join("go");
    let script = format!(
        "echo pid $$; until [ -e {} ]; do sleep 0.02; done; printf bye",
        go.display()
    );
    let mut launcher = Launcher::start(&["--log-dir", folder.path().to_str().unwrap()], &script);
    let pid = numbers(&launcher.line())[0];
    let held = std::fs::OpenOptions::new()
        .write(true)
        .open(format!("/proc/{pid}/fd/1"))
        .unwrap();
    std::fs::write(&go, "").unwrap();
    let (status, out, err) = launcher.end(PROMPTLY);
    drop(held);
    assert_eq!((status.code(), &*out), (Some(0), "[rank 0] bye\n"), "{err}");
    assert_eq!(
        lines(&folder.path().join("rank0.log"))
            .last()
            .map(String::as_str),
        Some("bye")
    );
}

#[test]
fn the_raw_console_passes_rank_0_through_byte_by_byte() {
    let logs = tempfile::tempdir().unwrap();
    let script = "[ $RANK = 0 ] && printf '10%%\\r20%%\\r' || echo only in the file; printf end";
    let flags = [
        "--nproc",
        "2",
        "--console",
        "raw",
        "--log-dir",
        logs.path().to_str().unwrap(),
    ];
    let mut launcher = Launcher::start(&flags, script);
    let (_, out, _) = launcher.end(PROMPTLY);
    assert_eq!(out, "10%\r20%\rend");
    assert_eq!(lines(&logs.path().join("rank0.log")), ["end"]);
    assert_eq!(
        lines(&logs.path().join("rank1.log")),
        ["only in the file", "end"]
    );
}

#[test]
fn a_console_that_is_gone_does_not_end_the_job() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "echo first; i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done; touch {}/done",
        folder.path().display()
    );
    let mut command = Command::new("sh");
    command
        .args([
            "-c",
            "\"$@\" | head -n 1",
            "sh",
            PROBE,
            "launch",
            "--log-dir",
        ])
        .arg(folder.path());
    let mut launcher = Launcher::start_command(command, &[], &script);
    let (_, out, _) = launcher.end(Duration::from_secs(20));
    assert_eq!(out, "[rank 0] first\n");
    assert!(folder.path().join("done").exists());
    assert_eq!(lines(&folder.path().join("rank0.log")).len(), 2001);
}
