//! `paceline doctor RUN` says what is the matter with a job.

use rustix::process::Signal;
use serde_json::Value;
use tempfile::tempdir;

use super::support::{paceline, start};

#[test]
fn a_stopped_rank_is_named_while_the_job_runs_and_a_killed_one_afterwards() {
    let folder = tempdir().expect("a folder");
    let line =
        "train --model tiny --epochs 100000 --nproc-per-node 2 --recovery none --run-dir run";
    let job = start(folder.path(), line);
    job.has_printed("epoch ");
    let held = job.rank(1);
    assert!(job.hits(&[1], Signal::STOP));
    let ended = paceline(folder.path(), "doctor run --json");
    ended.check(1, &[]);
    let report: Value = serde_json::from_str(&ended.out).expect("an object");
    let found = &report["findings"][0];
    assert_eq!(found["check"], "waits forever", "{report}");
    let pid = held.as_raw_nonzero();
    assert_eq!(found["fix"], format!("kill -CONT {pid}"), "{report}");
    assert!(job.hits(&[1], Signal::KILL));
    job.ended(super::support::LIMIT).check(137, &[]);
    let ended = paceline(folder.path(), "doctor run");
    ended.check(1, &[]);
    for part in ["was killed by signal 9 (SIGKILL)", "was not done"] {
        assert!(ended.out.contains(part), "{part}: {}", ended.out);
    }
    paceline(folder.path(), "doctor nothing").check(2, &["nothing holds no run"]);
}
