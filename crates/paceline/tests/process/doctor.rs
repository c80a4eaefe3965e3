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

#[test]
fn a_job_that_failed_before_its_first_step_is_explained() {
    let folder = tempdir().expect("a folder");
    let line = "train --model tiny --nproc-per-node 2 --freeze * --run-dir run";
    let failed = paceline(folder.path(), line);
    let why = "`freeze` is *, which leaves nothing to train";
    failed.check(2, &[why]);
    for (lang, state) in [
        ("en", "it ended before its first step"),
        ("ko", "첫 스텝 전에 끝남"),
    ] {
        let ended = paceline(folder.path(), &format!("doctor run --lang {lang}"));
        ended.check(1, &[]);
        for part in [state, why] {
            assert!(ended.out.contains(part), "{part}: {}", ended.out);
        }
        let advice = ended.out.matches("`paceline eval`").count();
        assert_eq!(advice, 1, "{}", ended.out);
    }
}
